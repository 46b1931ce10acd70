"""Name what is wrong with a norm over shards, and with a state dict that is put together from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_07 import cases
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault
from distlab.grading.traffic import calls, in_megabytes, over_budget
from distlab.grading.values import compare, describe, equal

LIMITS = ("a third of the norm", "three times the norm")


def judge_clip(evidence: Evidence) -> Iterator[Fault]:
    """The norm of all shards and all replicated gradients, once each; scaled only where it is too large."""
    n = evidence.world_size
    norms = [_number(result[0]["norm"]) for result in evidence.results]
    for rank, norm in enumerate(norms):
        if norm is None:
            got = describe(evidence.results[rank][0]["norm"])
            yield Fault("returned", f"rank {rank}: expected the norm, a tensor of one number, got {got}")
            return
    yield from _judge_norms([norm for norm in norms if norm is not None], n)
    for rank, result in enumerate(evidence.results):
        for place, (row, limit) in enumerate(zip(result, LIMITS, strict=True)):
            fault = _judge_scaled(row, rank, (1 / 3, 1.0)[place], limit, n)
            if fault is not None:
                yield fault
                return
    yield from _judge_norm_calls(evidence)


def _number(norm: Any) -> float | None:
    if isinstance(norm, Tensor) and norm.numel() == 1:
        return float(norm)
    return norm if isinstance(norm, float) else None


def _judge_norms(norms: list[float], n: int) -> Iterator[Fault]:
    true, limit = cases.true_norm(n), cases.true_norm(n) / 3
    squares = [sum(float(part.square().sum()) for part in cases.clip_gradients(rank)) for rank in range(n)]
    whole = sum(float(part.square().sum()) for part in cases.clip_replicated())
    own = [(square + whole) ** 0.5 for square in squares]
    if n > 1 and all(_close(norm, mine) for norm, mine in zip(norms, own, strict=True)):
        factors = [min(1.0, limit / norm) for norm in norms]
        text = f"norm of the own shards only: rank 0 finds {norms[0]:.3g} and scales by {factors[0]:.2f}, rank"
        text += f" {n - 1} finds {norms[-1]:.3g} and scales by {factors[-1]:.2f}, the true norm is {true:.3g}"
        yield Fault("own shards only", f"{text}: all_reduce the sum of squares")
        return
    for rank, norm in enumerate(norms):
        if _close(norm, true):
            continue
        for code, (value, words) in _wrong_norms(squares, whole, true).items():
            if _close(norm, value):
                yield Fault(code.partition(",")[0], f"rank {rank}'s norm {norm:.4g} (expected {true:.4g}) {words}")
                return
        if _close(norm, limit):
            text = f"rank {rank} returns {norm:.4g}, the norm after clipping"
            yield Fault("norm after", f"{text}; return the norm that the gradients had before, {true:.4g}")
            return
        yield Fault("values", f"rank {rank}'s norm is {norm:.6g}, expected {true:.6g}")
        return


def _wrong_norms(squares: list[float], whole: float, true: float) -> dict[str, tuple[float, str]]:
    """Return what each known fault makes of the ranks' sums of squares and the replicated gradients' sum."""
    n = len(squares)
    return {
        "replicated counted n times": (
            (sum(squares) + n * whole) ** 0.5,
            f"counts the replicated gradients {n} times, once for each rank that holds them: add their squares after"
            " the all-reduce",
        ),
        "replicated forgotten": (
            sum(squares) ** 0.5,
            "lacks the replicated gradients: they are part of the model too",
        ),
        "norms added": (
            sum((square + whole) ** 0.5 for square in squares),
            "is the sum of the ranks' norms; lengths do not add, their squares do: all_reduce the squares, then sqrt",
        ),
        "norms added, replicated apart": (
            (sum(square**0.5 for square in squares) ** 2 + whole) ** 0.5,
            "is made of the sum of the ranks' norms; lengths do not add, their squares do",
        ),
        "norms added, each tensor's": (
            sum(float(part.norm()) for part in _all_parts(n)),
            "is the sum of all tensors' norms; lengths do not add, their squares do",
        ),
        "norms averaged": (
            sum((square + whole) ** 0.5 for square in squares) / n,
            "is the mean of the ranks' norms; the ranks hold different parts: all_reduce the squares, then sqrt",
        ),
        "averaged": (
            (sum(squares) / n + whole) ** 0.5,
            f"is too small: the sum of squares was divided by world_size ({n}); the ranks hold different parts, and"
            " all of them count",
        ),
        "averaged, all": (
            ((sum(squares) + n * whole) / n) ** 0.5,
            f"is too small: the sum of squares was divided by world_size ({n}); the ranks hold different parts, and"
            " all of them count",
        ),
        "norm is not a root": (true**2, "is the square of the norm: take the root"),
    }


def _all_parts(n: int) -> list[Tensor]:
    return [part for rank in range(n) for part in cases.clip_gradients(rank)] + cases.clip_replicated()


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * abs(other)


def _judge_scaled(row: dict[str, Any], rank: int, factor: float, limit: str, n: int) -> Fault | None:
    shards, whole = cases.clip_gradients(rank), cases.clip_replicated()
    parts = (("shards", shards, row["shards"]), ("replicated gradients", whole, row["whole"]))
    for name, before, after in parts:
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            what = f"with a limit of {limit}, rank {rank}'s {name} [{index}]"
            if equal(new, old * factor):
                continue
            if isinstance(new, Tensor) and new.shape == old.shape and torch.allclose(new, old * factor, rtol=1e-6):
                continue  # torch's clip_grad_norm_ adds 1e-6 to the norm, and so may a learner
            if factor < 1 and equal(new, old):
                text = f"{what} are as before: scale in place what the caller holds, shards and replicated ones alike"
                return Fault("not scaled", text)
            if factor == 1.0 and equal(new, old * 3):
                text = f"{what} were made 3x longer: a norm below the limit stays as it is"
                return Fault("scaled up", f"{text}; clamp the factor at 1")
            return compare(new, old * factor, what, n)
    return None


def _judge_norm_calls(evidence: Evidence) -> Iterator[Fault]:
    n = evidence.world_size
    if n == 1:
        return
    wanted = len(LIMITS) * 2 * (n - 1) / n * 8
    fault = over_budget(evidence, wanted, "an all-reduce of one number a call", slack=0.05)
    if fault is None:
        return
    gathered = any(call.op == "all_gather" for call in calls(evidence, 0))
    if gathered:
        text = f"{fault.message}: whole gradients travel, for the sake of one number"
        yield Fault("gradients gathered", f"{text}; each rank adds up the squares of its own first")
        return
    many = len(calls(evidence, 0, "all_reduce")) // len(LIMITS)
    if many > 1:
        text = f"right result, but {many} all-reduces a call: each costs a message's delay"
        text += "; add up the squares of all shards first, then all_reduce once"
        yield Fault("a call a tensor", f"{text}; what is replicated needs none, every rank has it")
        return
    yield fault


def budget_clip(evidence: Evidence) -> list[str]:
    """Say what the norm cost."""
    made = len(calls(evidence, 0)) // len(LIMITS)
    return [f"{made} all-reduce of one number: {in_megabytes(2 * (evidence.world_size - 1) / evidence.world_size * 8)}"]


def judge_state(evidence: Evidence) -> Iterator[Fault]:
    """Rank 0 has all tensors as one process has them; the others keep nothing."""
    n, want = evidence.world_size, cases.whole_state()
    got = evidence.results[0]["state"]
    fault = None
    if not isinstance(got, dict) or got.keys() != want.keys():
        fault = compare(got, want, "rank 0's state", n)
    else:
        for name, tensor in want.items():
            fault = fault or _judge_tensor(name, got[name], tensor, n)
    if fault is not None:
        yield fault
        return
    for rank, result in enumerate(evidence.results[1:], start=1):
        if isinstance(result["state"], dict) and result["state"].keys() == want.keys():
            kept = [tensor for tensor in result["state"].values() if isinstance(tensor, Tensor)]
            if sum(tensor.numel() for tensor in kept) < sum(tensor.numel() for tensor in want.values()):
                yield Fault("returned", f"rank {rank}: expected an empty dict, got one of tensors that are not whole")
                return
            text = f"rank {rank} keeps all tensors too: on a node of 8 ranks that is 8 copies of the whole model in its"
            yield Fault("whole on every rank", f"{text} memory at once; take part, and keep them on rank 0 only")
            return
        if result["state"] != {}:
            yield Fault("returned", f"rank {rank}: expected an empty dict, got {describe(result['state'])}")
            return
    if not all(result["kept"] for result in evidence.results):
        yield Fault("changed argument", "the shards were changed; training goes on with them")


def _judge_tensor(name: str, got: Any, want: Tensor, n: int) -> Fault | None:
    what = f"rank 0's {name}"
    if isinstance(got, Tensor) and got.shape != want.shape:
        length = -(-want.numel() // n)
        if got.numel() == length * n and got.numel() != want.numel():
            text = f"{what} has {got.numel()} elements, expected {want.numel()}: the row was filled up at its end"
            return Fault("filled up", f"{text} to be cut equally; take the first {want.numel()} and .view(shape)")
        if got.numel() == want.numel():
            text = f"{what} has shape {list(got.shape)}, expected {list(want.shape)}"
            return Fault("flat", f"{text}: a row has lost the shape; .view(shapes[name]) gives it back")
        if got.numel() == length:
            return Fault("own shard", f"{what} is rank 0's own shard of {length} elements: gather the others'")
    if isinstance(got, Tensor) and got.shape == want.shape:
        for other, tensor in cases.whole_state().items():
            if other != name and tensor.shape == got.shape and torch.equal(got, tensor):
                return Fault("names mixed", f"{what} is {other}: gather in one order on all ranks")
    return compare(got, want, what, n)


def state_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a gather that only rank 0 calls."""
    text = str(error)
    if text.partition("do not make the same call")[2].partition("every rank must")[0].count(": all_gather") > 1:
        words = "the ranks gather different tensors at the same time: all must go through the names in one order"
        return Fault("names mixed", f"{words}, such as that of the dict, which is the same on every rank")
    if "has returned without it" in text or "do not make the same call" in text:
        words = f"on {world_size} ranks rank 0 waits in its gather; the others never call it: rank 0 alone holds only a"
        words += " shard, so a state dict needs every rank"
        return Fault("not on every rank", f"{words}. Gather outside the `if`, keep the result inside it")
    return None


def budget_state(evidence: Evidence) -> list[str]:
    """Say what was gathered."""
    made = len(calls(evidence, 0))
    return [f"{made} gathers, one a tensor, by all ranks; whole on rank 0 only"]
