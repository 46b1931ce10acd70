"""What the checks of lesson 7 run on every rank: rows of parameters cut into shards, units that watch themselves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.grading.memory import peak_bytes
from distlab.grading.values import seeded

SHARD_CASES = (
    ((6, 6), 2),
    ((5, 3), 2),
    ((7,), 3),
    ((2, 9, 1), 4),
    ((3, 4, 0, 5), 3),
    ((1, 2), 4),
    ((10, 7), 1),
)
ROW = 24  # elements of the row of ZeRO-1: 1, 2, 3 and 4 ranks divide it
UPDATES = 2
WIDTH = 48  # a unit has WIDTH x WIDTH parameters
NUM_UNITS = 4
SAMPLES = 2
SLEEP_S = 0.004
SHAPES = {"embed.weight": torch.Size([5, 3]), "norm.bias": torch.Size([7]), "head.weight": torch.Size([2, 6])}


def drive_pieces(fn: Callable[[list[int], int, int], Any]) -> list[list[Any]]:
    """Call fn for each shard of each case."""
    return [[fn(list(sizes), count, shard) for shard in range(count)] for sizes, count in SHARD_CASES]


class Momentum:
    """An optimizer with state for what it is given: SGD with momentum; writes down what that was."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, shard: Tensor, gradient: Tensor) -> None:
        """Update a shard in place."""
        self.seen.append((shard.clone(), gradient.clone()))
        if self.buffer is None:
            self.buffer = torch.zeros_like(shard)
        self.buffer.mul_(0.9).add_(gradient)
        shard.sub_(self.buffer, alpha=0.1)


def row_gradient(rank: int, step: int) -> Tensor:
    """Return a rank's own gradient in a step."""
    return seeded(rank, ROW, purpose=f"zero 1 {step}")


def drive_step(fn: Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], None]], Any]) -> dict[str, Any]:
    """Make two updates of one row; every rank begins with the same."""
    row, update = seeded(-1, ROW, purpose="row"), Momentum()
    after = []
    for step in range(UPDATES):
        fn(row, row_gradient(dist.get_rank(), step), update)
        after.append(row.clone())
    state = 0 if update.buffer is None else update.buffer.numel()
    return {"after": after, "seen": update.seen, "state": state}


def weights_of(unit: int) -> Tensor:
    """Return a unit's whole row of parameters."""
    return seeded(-1, WIDTH * WIDTH, purpose=f"unit {unit}") / WIDTH**0.5


def shards_here() -> list[Tensor]:
    """Return this rank's shard of each unit; only the shard lives on."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return [weights_of(unit).chunk(n)[rank].clone() for unit in range(NUM_UNITS)]


def forward_of(whole: Tensor, x: Tensor) -> Tensor:
    """Run a unit."""
    return torch.tanh(x @ whole.view(WIDTH, WIDTH))


def input_of(rank: int) -> Tensor:
    """Return a rank's own samples."""
    return seeded(rank, SAMPLES, WIDTH, purpose="x")


def inputs_of(rank: int) -> list[Tensor]:
    """Return what each unit of a rank reads, and last what the last one gives."""
    found = [input_of(rank)]
    for unit in range(NUM_UNITS):
        found.append(forward_of(weights_of(unit), found[-1]))
    return found


def settle(whole: Tensor) -> None:
    """Wait until gloo's thread, which has filled a row, has let go of it: it may do so a moment after the call."""
    end_s = time.monotonic() + 0.05
    while torch._C._storage_Use_Count(whole.untyped_storage()._cdata) > 2 and time.monotonic() < end_s:
        time.sleep(0.0005)


def least_peak(fn: Callable[..., Any], *args: Any) -> int:
    """Return the least peak of memory of three runs: what a function holds itself, it holds in each of them."""
    return min(peak_bytes(fn, *args)[1] for _ in range(3))


def drive_forward(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run the units, write down when each computes and with what; then once more for the peak of memory."""
    shards, log = shards_here(), []

    def compute(unit: int, whole: Tensor, x: Tensor) -> Tensor:
        start_ns = time.monotonic_ns()
        time.sleep(SLEEP_S)  # long enough that a gather which was started before runs beside it
        result = forward_of(whole, x) if whole.numel() == WIDTH * WIDTH else x
        log.append((unit, whole.numel(), bool(torch.equal(whole, weights_of(unit))), start_ns, time.monotonic_ns()))
        return result

    kept = [shard.clone() for shard in shards]
    begin_ns = time.monotonic_ns()
    got = fn(shards, input_of(dist.get_rank()), compute)
    done_ns = time.monotonic_ns()
    kept_equal = all(torch.equal(one, other) for one, other in zip(kept, shards, strict=True))

    def plain(unit: int, whole: Tensor, x: Tensor) -> Tensor:
        settle(whole)
        return forward_of(whole, x) if whole.numel() == WIDTH * WIDTH else x

    peak = least_peak(fn, shards, input_of(dist.get_rank()), plain)
    return {"got": got, "log": log, "peak": peak, "kept": kept_equal, "run_ns": (begin_ns, done_ns)}


def backward_of(whole: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a unit's parameters and of its input."""
    if whole.numel() != WIDTH * WIDTH:  # it goes on, so that the judge can say what was wrong
        return x.new_zeros(WIDTH * WIDTH), grad
    inner = grad * (1 - forward_of(whole, x).square())
    return (x.T @ inner).flatten(), inner @ whole.view(WIDTH, WIDTH).T


def grad_of(rank: int) -> Tensor:
    """Return the gradient of a rank's last output."""
    return seeded(rank, SAMPLES, WIDTH, purpose="grad")


def drive_backward(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run backward through the units; write down the order and what each got; then once more for the peak of memory."""
    rank = dist.get_rank()
    shards, inputs, log = shards_here(), inputs_of(rank)[:-1], []

    def compute(unit: int, whole: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        right = bool(torch.equal(whole, weights_of(unit)))
        log.append((unit, whole.numel(), right, bool(torch.equal(x, inputs[unit]))))
        return backward_of(whole, x, grad)

    kept = [shard.clone() for shard in shards]
    begin_ns = time.monotonic_ns()
    got = fn(shards, inputs, grad_of(rank), compute)
    done_ns = time.monotonic_ns()
    kept_equal = all(torch.equal(one, other) for one, other in zip(kept, shards, strict=True))

    def plain(unit: int, whole: Tensor, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        settle(whole)
        return backward_of(whole, x, grad)

    peak = least_peak(fn, shards, inputs, grad_of(rank), plain)
    return {"got": got, "log": log, "peak": peak, "kept": kept_equal, "run_ns": (begin_ns, done_ns)}


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
        "kept": all(torch.equal(kept[name].nan_to_num(), shards[name].nan_to_num()) for name in kept),
    }
