"""Name what is wrong with accumulation, a sampler or the weights of uneven batches."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from distlab_lesson_03 import data_cases
from distlab_lesson_03.judges import told
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls
from distlab.grading.values import compare, describe, times_of

SMALL = 1e-6
WANTED = data_cases.NUM_ACCUMULATED


def judge_accumulate(evidence: Evidence) -> Iterator[Fault]:
    """Each update must hold the mean of its own micro-batches of all ranks, and be sent once."""
    num_updates = data_cases.NUM_MICROBATCHES // WANTED
    for rank, result in enumerate(evidence.results):
        made = len(result["updates"])
        if made != num_updates:
            text = f"rank {rank} made {made} updates of {data_cases.NUM_MICROBATCHES} micro-batches"
            yield Fault("updates", f"{text}, {num_updates} are asked: one for each {WANTED}")
            return
        if not result["quiet"]:
            text = f"rank {rank} never called model(inputs): model.module goes around DDP, which then sends nothing"
            yield Fault("around DDP", f"{text}; call model(inputs)")
            return
    own = [result["own"] for result in evidence.results]
    for update in range(num_updates):
        for rank, result in enumerate(evidence.results):
            fault = _judge_update(own, result["updates"][update], update, rank)
            if fault is not None:
                yield fault
                return
    yield from _judge_memory(evidence)
    yield from _judge_calls(evidence, num_updates)


def _judge_memory(evidence: Evidence) -> Iterator[Fault]:
    """Each micro-batch must have a forward of its own, and its backward before the next one's forward."""
    for rank, result in enumerate(evidence.results):
        made, wanted = len(result["quiet"]), data_cases.NUM_MICROBATCHES
        if made != wanted:
            text = f"right gradients, but rank {rank} ran {made} forward passes for {wanted} micro-batches"
            yield Fault("all at once", f"{text}: run them one by one; together they may not fit into memory")
            return
        if result["most_open"] > 1:
            text = (
                f"right gradients, but rank {rank} held the activations of {result['most_open']} micro-batches at once"
            )
            yield Fault("backward too late", f"{text}: run each one's backward before the next one's forward")
            return


def _judge_update(own: Sequence[Sequence[Tensor]], got: Tensor, update: int, rank: int) -> Fault | None:
    """Say which micro-batches of which ranks are in one update, and how often, where that is not what was asked."""
    world_size, num_each = len(own), len(own[0])
    parts = torch.stack([gradient for each in own for gradient in each])
    window = range(update * WANTED, (update + 1) * WANTED)
    want = torch.stack([own[r][m] for r in range(world_size) for m in window]).mean(0)
    what = f"rank {rank}'s gradient at update {update}"
    fault = compare(got, want, what, 1)
    if fault is None:
        return None
    share = torch.linalg.lstsq(parts.T, got[:, None]).solution[:, 0]
    if float((share @ parts - got).abs().max()) > SMALL:
        return fault
    share = share.view(world_size, num_each)
    held = [m for m in range(num_each) if bool((share[:, m].abs() > SMALL).any())]
    if held != list(window):
        return _wrong_window(held, list(window), what, update)
    others = [m for m in window if all(abs(float(share[r, m])) < SMALL for r in range(world_size) if r != rank)]
    if world_size > 1 and others:
        return _not_averaged(others, what)
    ratios = share[:, window.start : window.stop].flatten() * world_size * WANTED
    ratio = float(ratios.mean())
    if float((ratios - ratio).abs().max()) > SMALL:
        return Fault("uneven shares", f"{what} counts its micro-batches for different amounts: {_shown(ratios)}")
    if abs(ratio - WANTED) < SMALL:
        text = f"{what} is {WANTED}x too large: it is the sum of {WANTED} micro-batches, not their mean"
        return Fault("loss not divided", f"{text}; divide each loss by num_accumulated")
    if abs(ratio * WANTED - 1) < SMALL:
        text = f"{what} is {WANTED}x too small: it was divided by num_accumulated once too often"
        return Fault("divided twice", text)
    if abs(ratio * world_size - 1) < SMALL:
        text = f"{what} is {world_size}x too small: it was divided by world_size once too often"
        return Fault("divided by ranks", f"{text}; DDP averages by itself")
    return Fault("scale", f"{what} is {times_of(ratio)}")


def _shown(ratios: Tensor) -> str:
    return ", ".join(f"{ratio:.3g}" for ratio in ratios.tolist())


def _wrong_window(held: list[int], window: list[int], what: str, update: int) -> Fault:
    text = f"{what} holds {_batches(held)}, not {_batches(window)}"
    if not held:
        return Fault("zeroed early", f"{text}: it is zero; zero_grad() belongs after step(), not before it")
    if set(window) < set(held) and min(held) < min(window):
        return Fault(
            "old gradients", f"{text}: what the update before it used is still there; zero_grad() after step()"
        )
    if update == 0 and held == [0]:
        why = f"it comes after the first micro-batch. Counted from 0, index % {WANTED} == 0 is true at once"
        return Fault("early update", f"{text}: {why}; ask for (index + 1) % {WANTED} == 0")
    if held == window[-1:]:
        return Fault("only the last", f"{text}: the others were thrown away; zero_grad() belongs after step() only")
    return Fault("wrong micro-batches", text)


def _batches(numbers: list[int]) -> str:
    if not numbers:
        return "no micro-batch"
    return f"micro-batch{'es' if len(numbers) > 1 else ''} {_listed(numbers)}"


def _listed(numbers: list[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def _not_averaged(alone: list[int], what: str) -> Fault:
    if len(alone) == WANTED:
        text = f"{what} holds nothing of the other ranks: it was never averaged"
        return Fault("never averaged", f"{text}; the last micro-batch of an update must run outside no_sync()")
    text = f"{what} holds {_batches(alone)} of this rank only, not averaged"
    why = "DDP decides in forward whether the backward that follows sends"
    return Fault("last not averaged", f"{text}, so replicas drift apart; {why}: set it before forward")


def _judge_calls(evidence: Evidence, num_updates: int) -> Iterator[Fault]:
    for rank, result in enumerate(evidence.results):
        made = [call for call in calls(evidence, rank, "all_reduce") if call.start_ns >= result["start_ns"]]
        if len(made) <= num_updates:
            continue
        text = f"right gradients, but rank {rank} made {len(made)} all-reduces for {num_updates} updates"
        if result["num_entered"] == 0:
            yield Fault("sends every time", f"{text}: no_sync() was never entered, so each backward sends")
        elif not any(result["quiet"]):
            why = f"no_sync() was entered {result['num_entered']} times, but every forward ran outside of it, and DDP"
            yield Fault("forward outside", f"{text}: {why} decides in forward: put forward and backward inside")
        elif all(result["quiet"]):
            why = "every micro-batch ran inside no_sync(), and your own calls do the averaging"
            yield Fault("own calls", f"{text}: {why}; run the last one outside, and DDP sends its buckets")
        elif result["quiet"] == [number % WANTED == 0 for number in range(1, len(result["quiet"]) + 1)]:
            why = "the last micro-batch of an update ran inside no_sync() and the others outside"
            yield Fault("the wrong ones quiet", f"{text}: {why}; it must be the other way round")
        else:
            yield Fault("too many calls", f"{text}: only the last of {WANTED} micro-batches should send")
        return


def budget_accumulate(evidence: Evidence) -> list[str]:
    """Say how often it sent."""
    start_ns = evidence.results[0]["start_ns"]
    made = sum(call.start_ns >= start_ns for call in calls(evidence, 0, "all_reduce"))
    return [f"{made} all-reduces for {data_cases.NUM_MICROBATCHES} micro-batches of one bucket"]


def judge_tokens(evidence: Evidence) -> Iterator[Fault]:
    """Weights must make every token of all ranks count the same, for one small all-reduce."""
    world_size = evidence.world_size
    counts = data_cases.TOKENS[:world_size]
    total, parts = sum(map(sum, counts)), sum(map(len, counts))
    for rank, (result, own) in enumerate(zip(evidence.results, counts, strict=True)):
        got = result["weights"]
        if result["left"] != own:
            yield Fault("changed argument", f"rank {rank} changed the list that it was given to {result['left']}")
            return
        numbers = isinstance(got, list | tuple) and all(isinstance(w, int | float | Tensor) for w in got)
        if not numbers or len(got) != len(own):
            text = f"rank {rank} got {describe(got)} for the tokens {own}"
            yield Fault("returned", f"{text}; expected a list of {len(own)} numbers")
            return
        want = [count * world_size / total for count in own]
        if _close(got, want):
            continue
        yield _wrong_weights([float(w) for w in got], own, (world_size, total, parts), f"rank {rank}: tokens {own}")
        return
    for rank in evidence.records.ranks:
        made = calls(evidence, rank)
        if len(made) > 1:
            text = f"right weights, but rank {rank} made {len(made)} calls"
            yield Fault("too many calls", f"{text} where one all_reduce of one number is enough")
            return


def _close(got: Sequence[Any], want: Sequence[float]) -> bool:
    return all(abs(float(g) - w) <= 1e-6 * abs(w) for g, w in zip(got, want, strict=True))


def _wrong_weights(got: list[float], own: list[int], world: tuple[int, int, int], who: str) -> Fault:
    world_size, total, parts = world
    want = [count * world_size / total for count in own]
    text = f"{who} got the weights {_rounded(got)}, expected {_rounded(want)}"
    if world_size > 1 and _close(got, [count / total for count in own]):
        return Fault("divided twice", f"{text}: {world_size}x too small; the mean over ranks divides by it once more")
    for each in (1 / len(own), world_size / parts, 1.0):
        if _close(got, [each] * len(own)):
            why = "every micro-batch counts the same, so a token in a short one counts for more"
            return Fault("mean of means", f"{text}: {why}; weight by tokens")
    if world_size > 1 and _close(got, [count / sum(own) for count in own]):
        why = f"divided by this rank's own {sum(own)} tokens"
        return Fault("own tokens only", f"{text}: {why}, where all ranks together have {total}; all_reduce the sum")
    if world_size > 1 and _close(got, [count * world_size / sum(own) for count in own]):
        why = f"{world_size} ranks, but only this rank's own {sum(own)} tokens"
        return Fault("own tokens only", f"{text}: {why}, where all ranks together have {total}; all_reduce the sum")
    return Fault("weights", f"{text} = tokens x {world_size} ranks / {total} tokens of all ranks")


def _rounded(weights: Sequence[float]) -> str:
    return "[" + ", ".join(f"{weight:.3g}" for weight in weights) + "]"


def tokens_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a hang or a mismatch that comes from ranks with different numbers of micro-batches."""
    text = str(error)
    if "do not make the same call" in text and "float32[" in text and "int64[" in text:
        cause = "torch.tensor([]) is float32, and the other ranks' whole numbers are int64: all must send one dtype"
        return Fault("dtypes differ", f"{cause}; torch.tensor(sum(num_tokens)) is int64 everywhere.\n{told(text)}")
    if "do not make the same call" in text and re.search(r"\b(int|float)\d+\[[2-9]", text):
        cause = "each rank sends a list as long as its own, and all must send the same shape"
        return Fault("a list each", f"{cause}: add up first, then all_reduce one number.\n{told(text)}")
    if not ("do not make the same call" in text or "has returned without it" in text or "deadlock" in text):
        return None
    counts = [len(own) for own in data_cases.TOKENS[:world_size]]
    if 0 in counts:
        cause = f"rank {counts.index(0)} has no micro-batch left and makes no call, and the others wait for it"
        return Fault("rank without data", f"{cause}: a rank without data must all_reduce its 0.\n{told(text)}")
    cause = f"ranks have {_listed(counts)} micro-batches; a call for each is a different number of calls on each rank"
    return Fault("a call each", f"{cause}: add up first, then call once.\n{told(text)}")
