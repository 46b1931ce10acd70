"""Samplers: data sets that do not divide evenly, on several numbers of ranks, asked for twice and from the end."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import describe

SAMPLER_CASES = ((10, 4), (13, 6), (3, 5))  # samples, batch; in the last a batch is larger than the data
SAMPLER_WORLDS = (1, 2, 3, 4)
SEEDS = (0, 1)
Case = tuple[int, int, int, int]  # samples, batch, ranks, seed


def _positions(num_samples: int, batch_size: int, num_epochs: int = 2) -> list[int]:
    """Return where each batch of the first epochs begins."""
    starts = range(0, num_samples, batch_size)
    return [epoch * num_samples + start for epoch in range(num_epochs) for start in starts]


def drive_sampler(fn: Callable[..., Any]) -> dict[Case, dict[str, Any]]:
    """Ask for two epochs of several data sets on several numbers of ranks; then ask again, from the end."""
    found: dict[Case, dict[str, Any]] = {}
    for case in itertools.product(SAMPLER_CASES, SAMPLER_WORLDS, SEEDS):
        (num_samples, batch_size), world_size, seed = case
        given = (num_samples, batch_size, world_size, seed)
        asked = _positions(num_samples, batch_size)
        first = [_ask(fn, position, given) for position in asked]
        with mock.patch("builtins.hash", _hash_in_a_later_program):
            again = [_ask(fn, position, given) for position in reversed(asked)][::-1]
        found[given] = {"positions": asked, "batches": first, "again": again}
    return found


def _hash_in_a_later_program(value: Any) -> int:
    """Return a hash as the program that resumes a run would: that of a text differs from program to program."""
    holds_text = isinstance(value, str | bytes) or (isinstance(value, tuple) and any(isinstance(v, str) for v in value))
    return value.__hash__() ^ 0x5EED if holds_text else value.__hash__()


def _ask(fn: Callable[..., Any], position: int, case: Case) -> list[Any]:
    """Return what each rank gets of one batch."""
    num_samples, batch_size, world_size, seed = case
    named = {"num_samples": num_samples, "seed": seed, "world_size": world_size}
    return [fn(position, batch_size, rank=rank, **named) for rank in range(world_size)]


def judge_sampler(evidence: Evidence) -> Iterator[Fault]:
    """Every epoch each sample once, in a new order, the same on any number of ranks and whenever one asks."""
    found: dict[Case, dict[str, Any]] = evidence.results[0]
    for case, result in found.items():
        yield from _judge_form(case, result)
    for case, result in found.items():
        yield from _judge_memory(case, result)
    for case, result in found.items():
        yield from _judge_ranks(case, result)
        yield from _judge_epochs(case, result)
        num_samples, batch_size, world_size, seed = case
        yield from _judge_world(case, result, found[num_samples, batch_size, SAMPLER_WORLDS[0], seed])
    yield from _judge_seeds(found)


def _named(case: Case, position: int) -> str:
    num_samples, batch_size, world_size, _ = case
    who = "one rank" if world_size == 1 else f"{world_size} ranks"
    return f"{num_samples} samples in batches of {batch_size} on {who}: the batch at position {position}"


def _rows(case: Case, result: dict[str, Any], key: str = "batches") -> Iterator[tuple[str, int, int, list[list[int]]]]:
    """Yield each batch's name, position, wanted size, and what each rank got."""
    num_samples, batch_size = case[:2]
    for position, batch in zip(result["positions"], result[key], strict=True):
        left = num_samples - position % num_samples
        yield _named(case, position), position, min(batch_size, left), batch


def _judge_form(case: Case, result: dict[str, Any]) -> Iterator[Fault]:
    for key in ("batches", "again"):
        for name, _, _, batch in _rows(case, result, key):
            for rank, samples in enumerate(batch):
                good = isinstance(samples, list | tuple) and all(type(index) is int for index in samples)
                if not good:
                    text = f"{name}: rank {rank} got {describe(samples)}"
                    yield Fault("returned", f"{text}; expected a list of whole numbers (a tensor has tolist())")
                if any(not 0 <= index < case[0] for index in samples):
                    yield Fault("no such sample", f"{name}: rank {rank} got {samples}; samples are 0 to {case[0] - 1}")


def _judge_memory(case: Case, result: dict[str, Any]) -> Iterator[Fault]:
    again = _rows(case, result, "again")
    for (name, _, _, first), (_, _, _, second) in zip(_rows(case, result), again, strict=True):
        if first != second:
            text = f"{name} was {first}, and {second} when asked for again"
            why = "a resumed run would see other samples; compute it from the arguments and from nothing else"
            yield Fault("not repeatable", f"{text}: {why}")


def _judge_ranks(case: Case, result: dict[str, Any]) -> Iterator[Fault]:
    """Inside one batch: as many samples as there should be, none on two ranks, shares that differ by one at most."""
    for name, position, wanted, batch in _rows(case, result):
        together = [index for samples in batch for index in samples]
        if len(together) > wanted:
            yield _too_many(case, result, position)
        twice = sorted({index for index in together if together.count(index) > 1})
        if twice:
            owners = [rank for rank, samples in enumerate(batch) if twice[0] in samples]
            yield _overlap(case, result, f"{name} gives sample {twice[0]} to ranks {owners}")
        if len(together) < wanted:
            yield _too_few(case, position, batch, wanted)
        shares = [len(samples) for samples in batch]
        if max(shares) - min(shares) > 1:
            yield Fault(
                "uneven shares", f"{name} is dealt in shares of {shares} samples; they may differ by one at most"
            )


def _overlap(case: Case, result: dict[str, Any], text: str) -> Fault:
    """Say why ranks get the same sample: one share for all of them, or an order for each."""
    if all(samples == batch[0] for _, _, _, batch in _rows(case, result) for samples in batch):
        return Fault("the same for all", f"{text}: every rank got the same share: let `rank` choose each one's part")
    return Fault("ranks overlap", f"{text}: all ranks must cut one and the same order; leave rank out of the seed")


def _too_many(case: Case, result: dict[str, Any], position: int) -> Fault:
    """Say why a batch has more samples than it should."""
    num_samples, batch_size, world_size, _ = case
    rows = list(_rows(case, result))
    name, _, wanted, batch = next(row for row in rows if row[1] == position)
    together = [index for samples in batch for index in samples]
    text = f"{name} has {len(together)} samples, {batch}, where it should have {wanted}"
    if world_size > 1 and all(samples == batch[0] for samples in batch):
        return Fault("the same for all", f"{text}: every rank got the whole batch; give each its own part")
    if world_size == 1 and _is_whole_when_cut(rows, position // num_samples, num_samples):
        return Fault("beyond the epoch", f"{text}: it goes on beyond the epoch's end; let the last batch be smaller")
    if world_size == 1:
        return Fault("values", text)
    if len(together) == len(set(together)) == batch_size * world_size:
        return Fault("a batch each", f"{text}: batch_size counts the samples of all ranks, not of one")
    epoch = [row[3] for row in rows if row[1] // num_samples == position // num_samples]
    shown = [index for given in epoch for samples in given for index in samples]
    if len(shown) > len(set(shown)):
        return Fault("padded", f"{text}: some are seen twice, as with torch's DistributedSampler; give fewer")
    return Fault("too many samples", f"{text}: cut the batch first, then deal it to the ranks")


def _is_whole_when_cut(rows: list[tuple[str, int, int, list[list[int]]]], epoch: int, num_samples: int) -> bool:
    """Whether the first samples of each batch, as many as it should have, are those of one epoch."""
    shown = [index for _, at, wanted, (samples,) in rows if at // num_samples == epoch for index in samples[:wanted]]
    return sorted(shown) == list(range(num_samples))


def _too_few(case: Case, position: int, batch: list[list[int]], wanted: int) -> Fault:
    """Say why a batch has fewer samples than it should."""
    num_samples, batch_size = case[:2]
    text = f"{_named(case, position)} has {sum(map(len, batch))} samples, {batch}, where it should have {wanted}"
    if position >= num_samples and not any(batch):
        why = "position counts over all epochs; position % num_samples is how far into its epoch it is"
        return Fault("second epoch empty", f"{text}: {why}")
    if wanted == batch_size and len(batch) == 1:
        return Fault("values", text)
    if wanted == batch_size:
        return Fault("samples lost", f"{text}: give out what does not divide evenly too; ranks may differ by one")
    return Fault("samples lost", f"{text}: the last batch is smaller, ranks may differ by one or have none")


def _judge_epochs(case: Case, result: dict[str, Any]) -> Iterator[Fault]:
    """In an epoch each sample once; in the next another order."""
    orders: list[list[int]] = [[], []]
    for _, position, _, batch in _rows(case, result):
        orders[position // case[0]] += [index for samples in batch for index in samples]
    batches = [sorted(index for samples in batch for index in samples) for batch in result["batches"]]
    num_batches = len(batches) // 2
    if num_batches > 1 and batches[0][: len(batches[1])] == batches[1][: len(batches[0])]:
        text = f"{_named(case, result['positions'][1])} is the batch at position 0 again"
        yield Fault("position ignored", f"{text}: a run that resumes there sees the epoch's first samples twice")
    for epoch, order in enumerate(orders):
        missing = sorted(set(range(case[0])) - set(order))
        if missing:
            twice = sorted(index for index in set(order) if order.count(index) > 1)
            text = f"epoch {epoch} of {case[0]} samples never shows samples {missing}"
            yield Fault("epoch incomplete", f"{text} and shows {twice} twice: cut one order of the whole epoch")
    if case[0] < 10:
        return  # so few samples may fall into the same order by chance
    if orders[0] == list(range(case[0])):
        yield Fault("not shuffled", f"the order of {case[0]} samples is 0, 1, 2 ...: shuffle each epoch")
    elif orders[0] == orders[1]:
        text = f"both epochs of {case[0]} samples have the order {orders[0]}"
        yield Fault("same order", f"{text}: the epoch must be part of the seed (what set_epoch does for torch's)")


def _judge_world(case: Case, result: dict[str, Any], alone: dict[str, Any]) -> Iterator[Fault]:
    """A batch must hold the same samples on any number of ranks, or a run resumed on fewer loses some."""
    for (name, _, _, batch), one in zip(_rows(case, result), alone["batches"], strict=True):
        together, expected = sorted(index for samples in batch for index in samples), sorted(one[0])
        if together != expected:
            text = f"{name} holds samples {together}, on one rank it holds {expected}"
            why = "resumed on another number of ranks, a run sees some samples twice and others never"
            yield Fault("depends on ranks", f"{text}: {why}; cut the batch among ranks, not the data set")


def _judge_seeds(found: dict[Case, dict[str, Any]]) -> Iterator[Fault]:
    num_samples, batch_size = SAMPLER_CASES[1]
    first, second = (found[num_samples, batch_size, 1, seed]["batches"] for seed in SEEDS)
    if first == second:
        yield Fault(
            "seed ignored",
            f"seeds {SEEDS[0]} and {SEEDS[1]} give one order: shuffle by seed and epoch",
        )


_ORDER = "order = torch.randperm(num_samples, generator=shuffle)"
_CUT = "order[start : start + batch_size]"
WRONG_SAMPLERS = (
    Mutant("epoch left out", "same order", "the epoch must be part of the seed", 1, 19).edit(
        'f"epoch {epoch}"', '"order"'
    ),
    Mutant("position lost", "not repeatable", "a resumed run would see other samples", 1, 43)
    .setup("kept = {}")
    .edit(
        "epoch, start = divmod(position, num_samples)",
        """
        key = (num_samples, batch_size, seed, rank, world_size)
        epoch, start = divmod(kept.get(key, 0), num_samples)
        kept[key] = kept.get(key, 0) + min(batch_size, num_samples - start)
        """,
    ),
    Mutant("epoch restarts", "position ignored", "the epoch's first samples twice", 1, 72).edit(
        _CUT, "order[: min(batch_size, num_samples - start)]"
    ),
    Mutant("blocks of ranks", "depends on ranks", "cut the batch among ranks", 1, 45).edit(
        _ORDER,
        f"""
        {_ORDER}
        order = torch.cat([order[owner::world_size] for owner in range(world_size)])
        """,
    ),
    Mutant("pads", "padded", "some are seen twice", 1, 45).edit(
        f"return {_CUT}[rank::world_size].tolist()",
        f"""
        batch = {_CUT}.tolist()
        while len(batch) % world_size:
            batch.append(int(order[len(batch) % num_samples]))
        return batch[rank::world_size]
        """,
    ),
    Mutant("drops the rest", "samples lost", "the last batch is smaller", 1, 43).edit(
        "order[start : start + batch_size]",
        "order[start : start + batch_size if start + batch_size <= num_samples else start]",
    ),
    Mutant("rank in the seed", "ranks overlap", "leave rank out of the seed", 1, 19).edit("(seed, 0,", "(seed, rank,"),
)
