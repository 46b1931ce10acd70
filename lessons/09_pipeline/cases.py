"""What the checks of lesson 9 run: orders of a few pipelines, and real stages that sleep and note what they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distlab.grading.values import seeded
from distlab.plan import Action

ORDER_CASES = ((4, 8), (2, 3), (3, 7), (4, 2), (1, 3))  # ranks, micro-batches; the widest first: it names faults best
SPLIT_CASES = ((4, 8), (2, 3), (3, 7), (4, 4), (1, 3))  # at least as many micro-batches as ranks
BUBBLE_CASES = ((4, 1, 1), (4, 8, 1), (8, 32, 1), (4, 8, 2), (8, 32, 4), (1, 4, 1))
WIDTH = 6
SAMPLES = 2
NUM_MICROBATCHES = 4
SLEEP_S = 0.004


def drive_gpipe(fn: Callable[[int, int], Any]) -> list[list[Any]]:
    """Ask for the order of each rank in each case."""
    return [[fn(rank, count) for rank in range(ranks)] for ranks, count in ORDER_CASES]


def drive_one_f_one_b(fn: Callable[[int, int, int], Any]) -> list[list[Any]]:
    """Ask for the order of each rank in each case."""
    return [[fn(rank, ranks, count) for rank in range(ranks)] for ranks, count in ORDER_CASES]


def drive_zero_bubble(fn: Callable[[int, int, int], Any]) -> list[list[Any]]:
    """Ask for the order of each rank in each case."""
    return [[fn(rank, ranks, count) for rank in range(ranks)] for ranks, count in SPLIT_CASES]


def drive_bubble(fn: Callable[[int, int, int], Any]) -> list[Any]:
    """Ask for the bubble of each case."""
    return [fn(*case) for case in BUBBLE_CASES]


class Noted(torch.autograd.Function):
    """The identity; sleeps in backward and writes down which forward pass it belongs to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[Any], number: int) -> Tensor:  # noqa: D102
        ctx.log, ctx.number = log, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: D102
        start_ns = time.monotonic_ns()
        time.sleep(SLEEP_S)
        ctx.log.append(("B", ctx.number, start_ns, time.monotonic_ns(), grad.clone()))
        return grad, None, None


class Stage(nn.Module):
    """A layer that sleeps, and notes each pass: kind, which forward it was, start, end, what came in."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            self.layer.weight.copy_(seeded(rank, WIDTH, WIDTH, purpose="stage weight") / WIDTH**0.5)
            self.layer.bias.copy_(seeded(rank, WIDTH, purpose="stage bias"))
        self.log: list[Any] = []
        self.count = 0
        self.is_noted = True

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        if not self.is_noted:
            return torch.tanh(self.layer(x))
        number, start_ns = self.count, time.monotonic_ns()
        self.count += 1
        time.sleep(SLEEP_S)
        y = torch.tanh(self.layer(x))
        self.log.append(("F", number, start_ns, time.monotonic_ns(), x.detach().clone()))
        return Noted.apply(y, self.log, number)  # type: ignore[no-any-return, no-untyped-call]


def stages_of(world_size: int) -> list[Stage]:
    """Return all stages, as one process has them: without notes."""
    stages = [Stage(rank) for rank in range(world_size)]
    for stage in stages:
        stage.is_noted = False
    return stages


def inputs() -> list[Tensor]:
    """Return the micro-batches."""
    return [seeded(-1, SAMPLES, WIDTH, purpose=f"input {i}") for i in range(NUM_MICROBATCHES)]


def targets() -> list[Tensor]:
    """Return a target for each micro-batch."""
    return [seeded(-1, SAMPLES, WIDTH, purpose=f"target {i}") for i in range(NUM_MICROBATCHES)]


def like() -> Tensor:
    """Return a tensor shaped as what is handed over."""
    return torch.zeros(SAMPLES, WIDTH, dtype=torch.float64)


def plain_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean square."""
    return (output - target).square().mean()


def orders_of(rank: int, world_size: int) -> dict[str, list[Action]]:
    """Return what a rank is asked to run: GPipe, then 1F1B."""
    count = NUM_MICROBATCHES
    warm = min(world_size - 1 - rank, count)
    pairs = [("F", i) for i in range(warm)]
    for i in range(count):
        pairs += [("F", warm + i)] * (warm + i < count) + [("B", i)]
    gpipe = [("F", i) for i in range(count)] + [("B", i) for i in range(count)]
    return {
        "GPipe": [Action(rank, kind, i) for kind, i in gpipe],
        "1F1B": [Action(rank, kind, i) for kind, i in pairs],
    }


def drive_run(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run a rank in the order of GPipe and in that of 1F1B."""
    rank, n = dist.get_rank(), dist.get_world_size()
    results = {}
    for name, actions in orders_of(rank, n).items():
        stage, pairs = Stage(rank), []

        def loss_fn(output: Tensor, target: Tensor, pairs: list[Any] = pairs) -> Tensor:
            pairs.append((output.detach().clone(), target.clone()))
            return plain_loss(output, target)

        mine, wanted = (inputs() if rank == 0 else []), (targets() if rank == n - 1 else [])
        begin_ns = time.monotonic_ns()
        loss = fn(stage, list(actions), mine, wanted, loss_fn, like())
        results[name] = {
            "loss": loss,
            "gradients": [parameter.grad for parameter in stage.parameters()],
            "log": sorted(stage.log, key=lambda entry: entry[2]),
            "pairs": pairs,
            "run_ns": (begin_ns, time.monotonic_ns()),
        }
        dist.barrier()
    return results


def drive_forward(fn: Callable[..., Any]) -> dict[str, Any]:
    """Run all micro-batches forward."""
    rank = dist.get_rank()
    stage = Stage(rank)
    begin_ns = time.monotonic_ns()
    got = fn(stage, inputs() if rank == 0 else [], NUM_MICROBATCHES, like())
    return {"got": got, "log": stage.log, "run_ns": (begin_ns, time.monotonic_ns())}


class Products(TorchDispatchMode):
    """Count products of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        self.count += name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")
        return func(*args, **(kwargs or {}))


SPLIT_SIZES = ((3, 5, 4), (1, 3, 2))  # layers, width, samples


def split_stage(layers: int, width: int, samples: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return weights, activations and the gradient of the last one."""
    weights = [seeded(k, width, width, purpose="split") / width**0.5 for k in range(layers)]
    activations = [seeded(-1, samples, width, purpose="split input")]
    for weight in weights:
        activations.append(torch.tanh(activations[-1] @ weight))
    return weights, activations, seeded(-1, samples, width, purpose="split grad")


def drive_split(fn: Callable[..., Any]) -> list[dict[str, Any]]:
    """Split the backward pass of two stages; count products before and after the call of the deferred part."""
    results = []
    for sizes in SPLIT_SIZES:
        weights, activations, grad = split_stage(*sizes)
        kept = [tensor.clone() for tensor in (*weights, *activations, grad)]
        with Products() as now:
            got = fn(weights, activations, grad)
        grad_input, later = got if isinstance(got, tuple | list) and len(got) == 2 else (got, None)
        with Products() as after:
            gradients = later() if callable(later) else later
        same = all(map(torch.equal, kept, (*weights, *activations, grad)))
        results.append(
            {
                "input": grad_input,
                "callable": callable(later),
                "weights": gradients,
                "products": (now.count, after.count),
                "kept": same,
            }
        )
    return results
