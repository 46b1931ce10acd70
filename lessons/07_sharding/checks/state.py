"""A norm over shards, and a state dict that is put together from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import RankError
from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.norms import explain_norms, of_copies, of_parts
from distlab.grading.diagnosis.traffic import calls, in_megabytes, over_budget
from distlab.grading.diagnosis.values import close, compare, describe, seeded

SHAPES = {"embed.weight": torch.Size([5, 3]), "norm.bias": torch.Size([7]), "head.weight": torch.Size([2, 6])}
LIMITS = ("a third of the norm", "three times the norm")
CLIP_SHARDS = (6, 10)
CLIP_WHOLE = (4, 3)


def clip_gradients(rank: int) -> list[Tensor]:
    """Return a rank's parts of sharded gradients; ranks differ in size, so that no rank's own norm is the mean."""
    return [(rank + 1) * seeded(rank, size, purpose=f"clip {size}") for size in CLIP_SHARDS]


def clip_replicated() -> list[Tensor]:
    """Return gradients that all ranks hold."""
    return [3 * seeded(-1, size, purpose=f"whole {size}") for size in CLIP_WHOLE]


def true_norm(world_size: int) -> float:
    """Return the norm of all gradients as one process would have it."""
    parts = [part for rank in range(world_size) for part in clip_gradients(rank)] + clip_replicated()
    return float(torch.cat(parts).norm())


def drive_clip(fn: Callable[[list[Tensor], list[Tensor], float], Any]) -> list[dict[str, Any]]:
    """Clip to a third of the norm; then with a limit of three times the norm, where nothing may change."""
    rank, results = dist.get_rank(), []
    for factor in (1 / 3, 3.0):
        shards, whole = clip_gradients(rank), clip_replicated()
        norm = fn(shards, whole, factor * true_norm(dist.get_world_size()))
        results.append({"norm": norm, "shards": shards, "whole": whole})
    return results


def judge_clip(evidence: Evidence) -> Iterator[Fault]:
    """The norm of all shards and all replicated gradients, once each; scaled only where it is too large."""
    n = evidence.world_size
    for rank, result in enumerate(evidence.results):
        norm = result[0]["norm"]
        if not isinstance(norm, float) and not (isinstance(norm, Tensor) and norm.numel() == 1):
            text = f"rank {rank}: expected the norm, a tensor of one number, got {describe(norm)}"
            yield Fault("returned", text)
    yield from _judge_norms([float(result[0]["norm"]) for result in evidence.results], n)
    for rank, result in enumerate(evidence.results):
        for row, factor, limit in zip(result, (1 / 3, 1.0), LIMITS, strict=True):
            yield from _judge_scaled(row, rank, factor, limit, n)
    fault = over_budget(evidence, len(LIMITS) * 2 * (n - 1) / n * 8, "an all-reduce of one number per call", slack=0.05)
    if fault is not None and calls(evidence, 0, "all_gather"):
        text = f"{fault.message}: whole gradients travel, for the sake of one number"
        yield Fault("gradients gathered", f"{text}; each rank adds up the squares of its own first")
    many = len(calls(evidence, 0, "all_reduce")) // len(LIMITS)
    if fault is not None and many > 1:
        text = f"right result, but {many} all-reduces per call: each costs a message's delay"
        text += "; add up the squares of all shards first, then all_reduce once"
        yield Fault("a call per tensor", f"{text}; what is replicated needs none, every rank has it")
    yield from found(fault)


def _judge_norms(norms: list[float], n: int) -> Iterator[Fault]:
    true, limit = true_norm(n), true_norm(n) / 3
    squares = [sum(float(part.square().sum()) for part in clip_gradients(rank)) for rank in range(n)]
    whole = sum(float(part.square().sum()) for part in clip_replicated())
    if n > 1 and all(close(norm**2, square + whole) for norm, square in zip(norms, squares, strict=True)):
        first, last = (min(1.0, limit / norms[rank]) for rank in (0, -1))
        text = f"norm of the own shards only: rank 0 finds {norms[0]:.3g} and scales by {first:.2f}, rank"
        text += f" {n - 1} finds {norms[-1]:.3g} and scales by {last:.2f}, the true norm is {true:.3g}"
        yield Fault("own shards only", f"{text}: all_reduce the sum of squares")
    for rank, norm in enumerate(norms):
        if close(norm, true):
            continue
        for code, value, words in _wrong_norms(squares, whole, true):
            if close(norm, value):
                yield Fault(code, f"rank {rank}'s norm {norm:.4g} (expected {true:.4g}) {words}")
        if close(norm, limit):
            text = f"rank {rank} returns {norm:.4g}, the norm after clipping"
            yield Fault("norm after", f"{text}; return the norm that the gradients had before, {true:.4g}")
        if norm == 0:
            text = f"rank {rank}'s norm is 0, expected {true:.6g}: these tensors are the gradients, and have"
            text += " no .grad, where torch.nn.utils.clip_grad_norm_ looks"
            yield Fault("gradients of gradients", f"{text}; sum up their own squares")
        wrong = {other: one for other, one in enumerate(norms) if not close(one, true)}
        copies = of_copies("replicated", whole, n)
        if words := explain_norms([*wrong.values()], [(of_parts("shards", squares, r), copies) for r in wrong]):
            yield Fault("norm of other parts", f"rank {rank}'s norm {norm:.4g} (expected {true:.4g}) {words}")
        yield from found(compare(norm, true, f"rank {rank}'s norm"))


def _wrong_norms(squares: list[float], whole: float, true: float) -> Iterator[tuple[str, float, str]]:
    """Known mistakes: the norm that each makes of the ranks' sums of squares, and what to say."""
    n, total = len(squares), sum(squares)
    text = f"counts the replicated gradients {n} times, once for each rank that holds them: add their squares after the"
    yield "replicated counted n times", (total + n * whole) ** 0.5, f"{text} all-reduce"
    yield "replicated forgotten", total**0.5, "lacks the replicated gradients: they are part of the model too"
    norms = sum((square + whole) ** 0.5 for square in squares)
    text = "is the sum of the ranks' norms; lengths do not add, their squares do: all_reduce the squares, then sqrt"
    yield "norms added", norms, text
    text = "is made of the sum of the ranks' norms; lengths do not add, their squares do"
    yield "norms added", (sum(square**0.5 for square in squares) ** 2 + whole) ** 0.5, text
    parts = [part for rank in range(n) for part in clip_gradients(rank)] + clip_replicated()
    text = "is the sum of all tensors' norms; lengths do not add, their squares do"
    yield "norms added", sum(float(part.norm()) for part in parts), text
    text = "is the mean of the ranks' norms; the ranks hold different parts: all_reduce the squares, then sqrt"
    yield "norms averaged", norms / n, text
    text = f"is too small: the sum of squares was divided by world_size ({n}); the ranks hold different parts, and all"
    yield "averaged", (total / n + whole) ** 0.5, f"{text} of them count"
    yield "averaged", ((total + n * whole) / n) ** 0.5, f"{text} of them count"
    yield "norm is not a root", true**2, "is the square of the norm: take the root"


def _judge_scaled(row: dict[str, Any], rank: int, factor: float, limit: str, n: int) -> Iterator[Fault]:
    gradients = {"shards": clip_gradients(rank), "whole": clip_replicated()}
    for key, name in (("shards", "shards"), ("whole", "replicated gradients")):
        for index, (old, new) in enumerate(zip(gradients[key], row[key], strict=True)):
            what = f"with a limit of {limit}, rank {rank}'s {name} [{index}]"
            if torch.allclose(new, old * factor, rtol=1e-6):
                continue  # torch's clip_grad_norm_ adds 1e-6 to the norm, and so may a learner
            if factor < 1 and torch.equal(new, old):
                text = f"{what} are as before: scale in place what the caller holds, shards and replicated ones alike"
                yield Fault("not scaled", text)
            if factor == 1.0 and torch.allclose(new, old * 3):
                text = f"{what} were made 3x longer: a norm below the limit stays as it is"
                yield Fault("scaled up", f"{text}; clamp the factor at 1")
            yield from found(compare(new, old * factor, what, n))


def budget_clip(evidence: Evidence) -> list[str]:
    """Say what the norm cost."""
    made = len(calls(evidence, 0)) // len(LIMITS)
    return [f"{made} all-reduce of one number: {in_megabytes(2 * (evidence.world_size - 1) / evidence.world_size * 8)}"]


def whole_state() -> dict[str, Tensor]:
    """Return the state dict as one process has it."""
    return {name: seeded(-1, *shape, purpose=name) for name, shape in SHAPES.items()}


def state_shards(rank: int, world_size: int) -> dict[str, Tensor]:
    """Cut each tensor's row, filled up with NaN (a bias's with zeros), into equal shards."""
    shards = {}
    for name, tensor in whole_state().items():
        length = -(-tensor.numel() // world_size)
        filling = 0.0 if name.endswith("bias") else torch.nan  # so that dropping one value is not enough
        row = torch.full((length * world_size,), filling, dtype=torch.float64)
        row[: tensor.numel()] = tensor.flatten()
        shards[name] = row[rank * length : (rank + 1) * length].clone()
    return shards


def drive_state(fn: Callable[[dict[str, Tensor], dict[str, torch.Size]], Any]) -> dict[str, Any]:
    """Ask every rank for the whole state."""
    shards = state_shards(dist.get_rank(), dist.get_world_size())
    kept = {name: shard.clone() for name, shard in shards.items()}
    state = fn(shards, dict(SHAPES))
    return {
        "state": state,
        "kept": kept.keys() == shards.keys()
        and all(torch.equal(kept[name].nan_to_num(), shards[name].nan_to_num()) for name in kept),
    }


def judge_state(evidence: Evidence) -> Iterator[Fault]:
    """Rank 0 has all tensors as one process has them; the others keep nothing."""
    n, want = evidence.world_size, whole_state()
    got = evidence.results[0]["state"]
    if not isinstance(got, dict) or got.keys() != want.keys():
        states = [result["state"] for result in evidence.results]
        holders = [rank for rank, state in enumerate(states) if isinstance(state, dict) and state.keys() == want.keys()]
        if got == {} and holders:
            yield Fault("on another rank", f"rank 0's state is empty, rank {holders[0]} has all of it: rank 0 keeps it")
        yield from found(compare(got, want, "rank 0's state", n))
    for name, tensor in want.items():
        yield from _judge_tensor(name, got[name], tensor, n)
    for rank, result in enumerate(evidence.results[1:], start=1):
        state = result["state"]
        if isinstance(state, dict) and state.keys() == want.keys():
            kept = sum(tensor.numel() for tensor in state.values() if isinstance(tensor, Tensor))
            if kept < sum(tensor.numel() for tensor in want.values()):
                yield Fault("returned", f"rank {rank}: expected an empty dict, got one of tensors that are not whole")
            text = f"rank {rank} keeps all tensors too: on a node of 8 ranks that is 8 copies of the whole model in its"
            yield Fault("whole on every rank", f"{text} memory at once; take part, and keep them on rank 0 only")
        if state != {}:
            yield Fault("returned", f"rank {rank}: expected an empty dict, got {describe(state)}")
    if not all(result["kept"] for result in evidence.results):
        yield Fault("changed argument", "the shards were changed; training goes on with them")


def _judge_tensor(name: str, got: Any, want: Tensor, n: int) -> Iterator[Fault]:
    what, length = f"rank 0's {name}", -(-want.numel() // n)
    if isinstance(got, Tensor) and got.shape != want.shape:
        if got.numel() == length * n and got.numel() != want.numel():
            text = f"{what} has {got.numel()} elements, expected {want.numel()}: the row was filled up at its end"
            yield Fault("filled up", f"{text} to be cut equally; take the first {want.numel()} and .view(shape)")
        if got.numel() == want.numel():
            text = f"{what} has shape {list(got.shape)}, expected {list(want.shape)}"
            yield Fault("flat", f"{text}: a row has lost the shape; .view(shapes[name]) gives it back")
        if got.numel() == length:
            yield Fault("own shard", f"{what} is rank 0's own shard of {length} elements: gather the others'")
    if isinstance(got, Tensor) and got.shape == want.shape and bool(got.isnan().any()):
        text = f"{what} has numbers of the filling in it, which stands at the end of the row"
        yield Fault("filled up", f"{text}; take the first {want.numel()} and .view(shape)")
    for other, tensor in whole_state().items():
        if other != name and isinstance(got, Tensor) and torch.equal(got, tensor):
            yield Fault("names mixed", f"{what} is {other}: gather in one order on all ranks")
    yield from found(compare(got, want, what, n))


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
    return [f"{len(calls(evidence, 0))} gathers, one per tensor, by all ranks; whole on rank 0 only"]


_SQUARES = "square = sum((gradient.square().sum() for gradient in "
_REPLICATED = f"{_SQUARES}replicated), square)"
_ALL = "in [*shards, *replicated]), torch"

WRONG_CLIPS = (
    Mutant("own shards", "own shards only", "norm of the own shards only: rank 0", 2, 30).without(
        "dist.all_reduce(square)"
    ),
    Mutant("n times", "replicated counted n times", "add their squares", 3, 31)
    .without(_REPLICATED)
    .edit("in shards), torch", _ALL),
    Mutant("sum of norms", "norms added", "lengths do not add", 2, 30)
    .without(_REPLICATED)
    .edit("in shards), torch", _ALL)
    .edit("norm = square.sqrt()", "norm = square")
    .edit("dist.all_reduce(square)", "square = square.sqrt()\ndist.all_reduce(square)"),
    Mutant("mean of squares", "averaged", "hold different parts", 2, 30).edit(
        "dist.all_reduce(square)", "dist.all_reduce(square)\nsquare /= dist.get_world_size()"
    ),
    Mutant("stretches", "scaled up", "clamp the factor at 1", 1).without(".clamp(max=1.0)"),
    Mutant("a part", "not scaled", "replicated ones alike", 1, 31).edit("in [*shards, *replicated]:", "in shards:"),
    Mutant("gathers", "gradients gathered", "for the sake of one number", 2).edit(
        "dist.all_reduce(square)",
        """
        square = torch.zeros_like(square)
        for shard in shards:
            whole = shard.new_empty(shard.numel() * dist.get_world_size())
            gather_into(whole, shard)
            square += whole.square().sum()
        """,
    ),
)

_GATHER = "row = shard.new_empty(shard.numel() * dist.get_world_size())\ngather_into(row, shard)"
_GATHER_IN_LOOP, _GATHER_IN_IF = _GATHER.replace("\n", "\n    "), _GATHER.replace("\n", "\n        ")
_WHOLE = "row[: shapes[name].numel()].view(shapes[name]).clone()"

WRONG_STATES = (
    Mutant("only rank 0", "not on every rank", "inside it", 2, 41).edit(
        f"for name, shard in shards.items():\n    {_GATHER_IN_LOOP}\n    if dist.get_rank() == 0:\n        state",
        f"if dist.get_rank() == 0:\n    for name, shard in shards.items():\n        {_GATHER_IN_IF}\n        state",
    ),
    Mutant("filled up", "filled up", "take the first", 2).edit(_WHOLE, "row"),
    Mutant("flat", "flat", "has lost the shape", 1).without(".view(shapes[name])"),
    Mutant("on every rank", "whole on every rank", "8 copies of the whole model", 2).edit(
        "if dist.get_rank() == 0:", "if True:"
    ),
    Mutant("own shards", "own shard", "gather the others'", 2, 44).edit(_GATHER, "row = shard").edit(_WHOLE, "row"),
    Mutant("the last rank", "on another rank", "rank 1 has all of it", 2).edit(
        "dist.get_rank() == 0", "dist.get_rank() == dist.get_world_size() - 1"
    ),
    Mutant("from the end", "filled up", "take the first", 2).edit(
        "row[: shapes[name].numel()]", "row[-shapes[name].numel() :]"
    ),
    Mutant("None elsewhere", "returned", "expected an empty dict", 2).edit("return state", "return state or None"),
)
