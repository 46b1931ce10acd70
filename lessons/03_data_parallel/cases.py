"""What the checks of lesson 3 run on every rank: small models whose ranks differ in every way that matters."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.data_parallel.steps import FlatBucket
from distlab.grading.values import seeded

SLEEP_S = 0.004
NUM_LAYERS = 4
PLAIN, AGAIN, REORDERED, UNUSED = RUNS = ("plain", "again", "reordered", "unused")


class Net(nn.Module):
    """A shared (tied) weight, a frozen layer, buffers, and a branch that is last, so that a rank may leave it out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(3, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.branch = nn.Linear(5, 2)
        self.double()


def _filled(rank: int, tensor: Tensor, name: str) -> Tensor:
    """Return values for a tensor that no other rank has; whole numbers where it holds such."""
    return seeded(rank, *(tensor.shape or (1,)), purpose=name).mul(10).view_as(tensor).to(tensor.dtype)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Copy parameters and buffers, by name."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors}


def kinds_of(module: nn.Module) -> dict[str, str]:
    """Say of every tensor whether it is a parameter, a frozen parameter or a buffer."""
    kinds = {name: "parameter" if p.requires_grad else "frozen parameter" for name, p in module.named_parameters()}
    return kinds | {name: "buffer" for name, _ in module.named_buffers()}


def drive_broadcast(fn: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Give every rank other parameters and buffers, then call fn."""
    rank, net = dist.get_rank(), Net()
    with torch.no_grad():
        for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
            tensor.copy_(_filled(rank, tensor, name))
    before, objects = state_of(net), {id(tensor) for tensor in net.parameters()}
    fn(net)
    kept = objects == {id(tensor) for tensor in net.parameters()}
    return {"before": before, "after": state_of(net), "kinds": kinds_of(net), "kept": kept}


def drive_gradients(fn: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Give every rank other gradients, and none to the branch on rank 0 when there are others; then call fn."""
    rank, net = dist.get_rank(), Net()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(_filled(rank, parameter, name))
    own: dict[str, Tensor] = {}
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith("branch") and rank == 0 and dist.get_world_size() > 1:
            own[name] = torch.zeros_like(parameter)  # what a missing gradient counts as
            continue
        own[name] = seeded(rank, *parameter.shape, purpose=name)
        parameter.grad = own[name].clone()
    before = state_of(net)
    fn(net)
    changed = [name for name, tensor in state_of(net).items() if not torch.equal(tensor, before[name])]
    gradients = {name: parameter.grad for name, parameter in net.named_parameters() if name in own}
    frozen = [name for name, p in net.named_parameters() if not p.requires_grad and p.grad is not None]
    return {"own": own, "gradients": gradients, "changed": changed, "frozen": frozen}


class _Pause(torch.autograd.Function):
    """Does nothing in forward; in backward writes down that its layer's backward begins, and sleeps."""

    @staticmethod
    def forward(context: Any, x: Tensor, log: list[tuple[int, int]], layer: int) -> Tensor:
        context.log, context.layer = log, layer
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        context.log.append((context.layer, time.monotonic_ns()))
        time.sleep(SLEEP_S)
        return gradient, None, None


class Layers(nn.Module):
    """Layers of one shape, run in any order, that write down when each one's backward begins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same model on every rank
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(NUM_LAYERS)).double()
        self.log: list[tuple[int, int]] = []

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        """Run the layers in this order, to a scalar."""
        for layer in order:
            x = _Pause.apply(self.layers[layer](x), self.log, layer)
        return x.square().mean()


def orders(rank: int, world_size: int) -> Iterator[tuple[str, list[int]]]:
    """Yield runs: twice the same; then odd ranks go backwards; then rank 0 leaves out layer 0."""
    forward = list(range(NUM_LAYERS))
    yield PLAIN, forward
    yield AGAIN, forward
    yield REORDERED, forward[::-1] if rank % 2 else forward
    yield UNUSED, forward[1:] if rank == 0 and world_size > 1 else forward


def drive_overlap(fn: Callable[[list[FlatBucket]], Callable[[], Any]]) -> dict[str, Any]:
    """Run four steps on layers that sleep in backward; two buckets of two layers each, the last layers first."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, alone = Layers(), Layers()
    members = [[*model.layers[a].parameters(), *model.layers[b].parameters()] for a, b in ((3, 2), (1, 0))]
    synchronize = fn([FlatBucket(parameters) for parameters in members])
    if not callable(synchronize):
        return {"returned": repr(synchronize)}
    runs = {}
    for number, (name, order) in enumerate(orders(rank, world_size)):
        x = seeded(rank, 3, 4, purpose=name)
        for module in (alone, model):
            module.zero_grad()
            module.log.clear()
        alone(x, order).backward()
        loss = model(x, order)
        loss.backward()
        end_ns = time.monotonic_ns()
        synchronize()
        runs[name] = {
            "number": number,
            "own": {key: zeros_if_none(p) for key, p in alone.named_parameters()},
            "gradients": {key: None if p.grad is None else p.grad.clone() for key, p in model.named_parameters()},
            "log": list(model.log),
            "backward_ns": (model.log[0][1], end_ns),
            "done_ns": time.monotonic_ns(),
        }
    return runs


def zeros_if_none(parameter: nn.Parameter) -> Tensor:
    """Return a copy of the gradient, or what a missing one counts as."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def drive_hooks(fn: Callable[[nn.Module], Any]) -> dict[str, Any]:
    """Register hooks on a model, then run two backward passes of different data a rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].bias.requires_grad_(False)
    alone, before = copy.deepcopy(model), state_of(model)
    fn(model)
    steps = []
    for step in range(2):
        if step == 1:  # what hooks do to weights shows only where ranks hold different ones
            with torch.no_grad():
                for parameter in (*model.parameters(), *alone.parameters()):
                    parameter += 0.1 * rank
            before = state_of(model)
        x = seeded(rank, 5, 3, purpose=f"step {step}")
        for module in (alone, model):
            module.zero_grad()
            module(x).square().mean().backward()
        steps.append(
            {
                "own": {name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None},
                "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
                "changed": [name for name, tensor in state_of(model).items() if not torch.equal(tensor, before[name])],
            }
        )
    return {"steps": steps}


BUCKET_CASES: tuple[tuple[list[int], int], ...] = (
    ([40, 30, 20, 10], 30),  # 3 and 2 fill the first exactly
    ([10, 20, 30, 40, 50], 60),
    ([8, 100, 8, 8], 16),  # a parameter larger than a bucket
    ([5], 100),
    ([], 100),
    ([7] * 10, 21),
    ([1, 2, 3], 1),
)


def drive_buckets(fn: Callable[[list[int], int], Any]) -> list[tuple[Any, list[int]]]:
    """Call fn on each case; return what it returned and what it left of its argument."""
    results = []
    for sizes, capacity in BUCKET_CASES:
        given = list(sizes)
        results.append((fn(given, capacity), given))
    return results
