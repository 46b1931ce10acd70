"""Every sample once, wherever a run resumes; and weights of batches that are not alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from distlab_lesson_03.checks.averages import TAKES_NO_GROUP, told
from torch import Tensor

from distlab.comm import RankError
from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.traffic import calls
from distlab.course.grading.diagnosis.values import describe
from distlab.course.grading.exercise import Refused
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Fault, Mutant

DATA = ((10, 4), (13, 6), (3, 5))  # samples, batch; in the last a batch is larger than the data
FEWEST = 10  # samples: fewer may fall into the same order by chance
TOKENS: tuple[list[int], ...] = (
    [5, 2, 9],
    [11, 8],
    [],
    [7, 4],
)  # of each rank's micro-batches; rank 2 has run out of data


def _hash_in_a_later_program(value: Any) -> int:
    """Return a hash as the program that resumes a run would: that of a text differs from program to program."""
    holds_text = isinstance(value, str | bytes) or (isinstance(value, tuple) and any(isinstance(v, str) for v in value))
    return value.__hash__() ^ 0x5EED if holds_text else value.__hash__()


def _draw_sampler(draw: Draw) -> tuple[Any, ...]:
    num_samples = draw.one_of(1, draw.integer(2, 9), draw.integer(10, 60))
    return draw.integer(1, 25), num_samples, draw.integer(0, 10**6), draw.integer(1, 7), draw.integer(0, 5)


def _use_sampler(
    fn: Callable[..., list[int]], batch_size: int, num_samples: int, seed: int, world_size: int, epoch: int
) -> dict[str, Any]:
    """Say of an epoch's batches what holds for every right order; ask for them twice, the second time from the end."""

    def batch(position: int, ranks: int = world_size, seed: int = seed) -> list[list[int]]:
        named = {"num_samples": num_samples, "seed": seed, "world_size": ranks}
        shares = [fn(position, batch_size, rank=rank, **named) for rank in range(ranks)]
        for rank, share in enumerate(shares):
            if not isinstance(share, list | tuple) or not all(type(index) is int for index in share):
                text = f"rank {rank} of {ranks} got {describe(share)} for the batch at position {position}"
                raise Refused("returned", f"{text}; expected a list of whole numbers (a tensor has tolist())")
        return [list(share) for share in shares]

    def flat(batches: list[list[list[int]]]) -> list[int]:
        return [index for shares in batches for share in shares for index in share]

    begin = epoch * num_samples
    positions = range(begin, begin + num_samples, batch_size)
    found = [batch(position) for position in positions]
    with mock.patch("builtins.hash", _hash_in_a_later_program):
        again = [batch(position) for position in reversed(positions)][::-1]
    shown, sizes = flat(found), [len(flat([shares])) for shares in found]
    alone = [batch(position, ranks=1) for position in positions]
    seen = {
        "samples in its batches": sizes,
        "each batch is the same when it is asked for again": found == again,
        "the largest and the smallest share of each batch": [
            [max(map(len, shares)), min(map(len, shares))] for shares in found
        ],
        "each sample is shown once": sorted(shown) == list(range(num_samples)),
        "each batch holds what it holds on one rank": all(
            sorted(flat([shares])) == sorted(flat([one])) for shares, one in zip(found, alone, strict=True)
        ),
    }
    if num_samples >= FEWEST:
        order = flat(alone)
        turns = set(zip(order, order[1:] + order[:1], strict=True))  # one order, wherever it begins
        others = {
            "the next epoch": flat([batch(position + num_samples, ranks=1) for position in positions]),
            "a different seed": flat([batch(position, ranks=1, seed=seed + 1) for position in positions]),
        }
        seen["its samples are shuffled"] = order != list(range(num_samples))
        for name, other in others.items():
            again = "the same order" + ", begun elsewhere" * (other != order)
            is_turned = turns == set(zip(other, other[1:] + other[:1], strict=True))
            seen[f"{name} has"] = again if is_turned else "a different order"
    return seen


def _name(num_samples: int, batch_size: int, world_size: int, epoch: int) -> str:
    who = "one rank" if world_size == 1 else f"{world_size} ranks"
    return f"epoch {epoch} of {num_samples} samples, batches of {batch_size}, {who}"


drive_sampler = Cases(
    {
        _name(num_samples, batch_size, ranks, epoch): (batch_size, num_samples, 0, ranks, epoch)
        for num_samples, batch_size in DATA
        for ranks in (1, 2, 3, 4)
        for epoch in (0, 1)
    },
    _use_sampler,
)
vary_sampler = Vary(_draw_sampler, use=_use_sampler)


def _use_uneven(fn: Callable[[list[int]], Any], num_tokens: list[int]) -> dict[str, Any]:
    """Return the weights as plain numbers."""
    got, asked = fn(num_tokens), list(num_tokens)
    is_list = isinstance(got, list | tuple) and all(isinstance(one, int | float | Tensor) for one in got)
    return {f"weights for {asked} tokens": [float(one) for one in got] if is_list else got}


def _draw_uneven(draw: Draw) -> tuple[Any, ...]:
    return ([draw.own(0 if index else 1, 50) for index in range(draw.own(0 if draw.rank else 1, 4))],)


drive_uneven = Cases(lambda rank, n: {"": (TOKENS[rank],)}, _use_uneven, most_bytes=0)
vary_uneven = Vary(_draw_uneven, least_bytes=0.5, left_out={"bytes": "a count may travel as int32"} | TAKES_NO_GROUP)


def judge_uneven(evidence: Evidence) -> Iterator[Fault]:
    """One call."""
    for rank in evidence.records.ranks:
        if (number := len(calls(evidence, rank))) > 1:
            text = f"right weights, but rank {rank} made {number} calls"
            yield Fault("too many calls", f"{text} where one all_reduce of one number is enough")


def failure_uneven(error: RankError, world_size: int) -> Fault | None:
    """Name a hang or a mismatch that comes from ranks with different numbers of micro-batches."""
    text, is_mismatch = str(error), "do not make the same call" in str(error)
    counts = [len(own) for own in TOKENS[:world_size]]
    if is_mismatch and "float32[" in text and "int64[" in text:
        words = "torch.tensor([]) is float32, and the other ranks' whole numbers are int64: all must send one dtype"
        code, words = "dtypes differ", f"{words}; torch.tensor(sum(num_tokens)) is int64 everywhere"
    elif is_mismatch and any(f"[{count}]" in text for count in range(2, 10)):
        words = "each rank sends a list as long as its own, and all must send the same shape"
        code, words = "a list each", f"{words}: add up first, then all_reduce one number"
    elif not (is_mismatch or "has returned without it" in text or "deadlock" in text):
        return None
    elif 0 in counts:
        words = f"rank {counts.index(0)} has no micro-batch left and makes no call, and the others wait for it"
        code, words = "rank without data", f"{words}: a rank without data must all_reduce its 0"
    else:
        words = f"ranks have {' and '.join(map(str, counts))} micro-batches; a call for each is a different number of"
        code, words = "a call each", f"{words} calls on each rank: add up first, then call once"
    return Fault(code, f"{words}.\n{told(error)}")


_ORDER = "order = torch.randperm(num_samples, generator=shuffle)"
_CUT, _DOWN, _TO = "order[start : start + batch_size]", "len(batch) // world_size", "(rank + 1) * share"
WRONG_SAMPLER = (
    Mutant(
        "epoch left out", "epoch", "all epochs have one order; make the epoch part of the seed (set_epoch)", 1, 19
    ).edit('f"epoch {epoch}"', '"order"'),
    Mutant("rolled", "rolled", "epochs have one order, begun elsewhere; make the epoch part of the seed", 1)
    .edit('f"epoch {epoch}"', '"order"')
    .edit(_ORDER, f"{_ORDER}.roll(epoch)"),
    Mutant("seed left out", "seed ignored", "all seeds have one order; shuffle by seed and epoch", 1).edit(
        "(seed, 0,", "(0, 0,"
    ),
    Mutant(
        "position lost",
        "not repeatable",
        "a batch does not follow from the arguments alone, and a run that resumes sees other samples; compute it from "
        "nothing else",
        1,
        43,
    )
    .setup("kept = {}")
    .edit(
        "epoch, start = divmod(position, num_samples)",
        """
        key = (num_samples, batch_size, seed, rank, world_size)
        epoch, start = divmod(kept.get(key, 0), num_samples)
        kept[key] = kept.get(key, 0) + min(batch_size, num_samples - start)
        """,
    ),
    Mutant(
        "epoch restarts",
        "position",
        "batches of one epoch overlap; cut them one behind the other out of one order of it",
        1,
        72,
    ).edit(_CUT, "order[: min(batch_size, num_samples - start)]"),
    Mutant(
        "blocks of ranks",
        "depends on ranks",
        "what a batch holds depends on the number of ranks, and a run that resumes on fewer misses samples; cut the "
        "batch among ranks, not the data set",
        1,
        45,
    ).edit(_ORDER, f"{_ORDER}\norder = torch.cat([order[owner::world_size] for owner in range(world_size)])"),
    Mutant(
        "pads",
        "padded",
        "batches are filled up until they divide evenly, as by torch's DistributedSampler, and some samples are seen "
        "twice; give some ranks one less",
        1,
        45,
    ).edit(
        f"return {_CUT}[rank::world_size].tolist()",
        f"""
        batch = {_CUT}.tolist()
        while len(batch) % world_size:
            batch.append(int(order[len(batch) % num_samples]))
        return batch[rank::world_size]
        """,
    ),
    *(
        Mutant(f"rounded {way}", f"shares rounded {way}", f"{says}; deal it out, [rank::world_size]", 1).edit(
            f"return {_CUT}[rank::world_size].tolist()",
            f"batch = {_CUT}.tolist()\nshare = {share}\nreturn batch[rank * share : {end}]",
        )
        for way, says, share, end in (
            ("down", "shares are rounded down, and nobody gets the rest of a batch", _DOWN, _TO),
            ("up", "shares are rounded up, so that the last rank has much less", f"-(-{_DOWN})", _TO),
            ("unevenly", "the last rank gets the rest of a batch", _DOWN, f"{_TO} if rank + 1 < world_size else None"),
        )
    ),
    Mutant("drops the rest", "lost", "the end of an epoch is dropped; let its last batch be smaller", 1, 43).edit(
        _CUT, "order[start : start + batch_size if start + batch_size <= num_samples else start]"
    ),
    Mutant(
        "second epoch empty",
        "second epoch empty",
        "position is taken for the place in one epoch; it counts over all: position % num_samples is how far into its "
        "epoch it is",
        1,
    ).edit("epoch, start = divmod(position, num_samples)", "epoch, start = position // num_samples, position"),
    Mutant("a batch each", "a batch each", "every rank gets batch_size samples; it counts those of all ranks", 1).edit(
        f"{_CUT}[rank::world_size]",
        "order[start : min(start + batch_size * world_size, num_samples)][rank::world_size]",
    ),
    Mutant(
        "beyond the epoch", "beyond", "the last batch goes on beyond the end of its epoch; let it be smaller", 1
    ).edit(_ORDER, f"{_ORDER}.repeat(2)"),
    Mutant("not shuffled", "not shuffled", "samples come in the order of the data; shuffle each epoch", 1).edit(
        "torch.randperm(num_samples, generator=shuffle)", "torch.arange(num_samples)"
    ),
    Mutant("rank in the seed", "rank in seed", "ranks cut different orders; leave rank out of the seed", 1, 19).edit(
        "(seed, 0,", "(seed, rank,"
    ),
    Mutant("whole batch", "the same for all", "every rank gets the whole batch; give each its own part", 1).without(
        "[rank::world_size]"
    ),
    Mutant("same share", "the same for all", "every rank gets the same share; let rank choose each one's part", 1).edit(
        "[rank::world_size]", "[::world_size]"
    ),
    Mutant(
        "hash of a text",
        "hash",
        "hash() of a text differs from program to program, and a resumed run sees other samples; derive_seed does not",
        1,
    ).edit('derive_seed(seed, 0, f"epoch {epoch}")', 'hash(f"{seed}, epoch {epoch}") % 2**31'),
    Mutant(
        "batches for samples", "batches", "position is taken for the number of the batch; it counts samples", 1
    ).edit("divmod(position, num_samples)", "divmod(position * batch_size, num_samples)"),
)

_RETURN = "[count * dist.get_world_size() / int(total) for count in num_tokens]"
_MEAN_OF_MEANS = "every micro-batch counts the same, so a token in a short one counts for more; weight by tokens"
_OWN = "it divides by this rank's own tokens; all_reduce their number, and divide by that of all ranks"
WRONG_UNEVEN = (
    Mutant("mean of means", "mean of means", _MEAN_OF_MEANS, 1, 22).edit(
        _RETURN, "[1 / len(num_tokens) for _ in num_tokens]"
    ),
    Mutant("own tokens", "own tokens only", _OWN, 2, 23).body(
        "return [count / sum(num_tokens) for count in num_tokens]"
    ),
    Mutant("own tokens, all ranks", "own tokens only", _OWN, 2).body(
        "return [count * dist.get_world_size() / sum(num_tokens) for count in num_tokens]"
    ),
    Mutant(
        "no world_size", "too small", "the mean over ranks divides by world_size once more; multiply by it", 2, 63
    ).without(" * dist.get_world_size()"),
    Mutant("upside down", "upside down", "the weight is upside down; a micro-batch's own tokens go on top", 1).edit(
        _RETURN, "[int(total) / dist.get_world_size() / max(count, 1) for count in num_tokens]"
    ),
    Mutant("a call each", "a call each", "add up first, then call once", 2, 5, ends=True).edit(
        "total = torch.tensor(sum(num_tokens))\ndist.all_reduce(total)",
        """
        total = 0
        for count in num_tokens:
            everywhere = torch.tensor(count)
            dist.all_reduce(everywhere)
            total += int(everywhere)
        """,
    ),
    Mutant("empty stays away", "rank without data", "must all_reduce its 0", 3, 5, ends=True).edit(
        "total = torch", "if not num_tokens:\n    return []\ntotal = torch"
    ),
    Mutant("micro-batches counted", "mean of means", _MEAN_OF_MEANS, 2, 23)
    .edit("sum(num_tokens)", "len(num_tokens)")
    .edit("count * dist", "dist")
    .edit("for count in", "for _ in"),
    Mutant(
        "micro-batches for ranks", "not ranks", "it multiplies by the number of micro-batches, not of ranks", 1
    ).edit("dist.get_world_size() / int(total)", "len(num_tokens) / int(total)"),
    Mutant("through float32", "values", "expected", 2, "one dtype").edit(
        "int(total) for count in num_tokens]", "int(total) * float(torch.tensor(1 / 3)) * 3 for count in num_tokens]"
    ),
)
