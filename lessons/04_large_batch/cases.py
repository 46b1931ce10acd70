"""What the checks of lesson 4 run: rates, micro-batches that differ, tensors of awkward norms, runs cut short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.grading.values import seeded

# 04.rate: (step, base rate, batch, base batch, updates of warmup)
RATES = (
    (100, 0.1, 32, 32, 10),  # nothing scaled, warmup over
    (100, 0.1, 1024, 32, 10),
    (100, 0.1, 16, 32, 10),
    (9, 0.1, 64, 32, 10),  # the last of the warmup has all of it
    (10, 0.1, 64, 32, 10),
    (4, 0.1, 64, 32, 10),
    (0, 0.1, 64, 32, 10),
    (0, 0.1, 64, 32, 0),
    (5, 0.1, 1437, 32, 0),
)

# 04.accumulate
SIZES = (3, 3, 1)
FEATURES, OUTPUTS = 4, 3

# 04.lars and 04.lamb
SETTINGS = {"lr": 0.5, "momentum": 0.9, "decay": 0.1, "coefficient": 0.02}
LAMB_SETTINGS = {"lr": 0.1, "decay": 0.1}

# 04.repair
PEAK_LR, NUM_WARMUP, NUM_UPDATES = 0.8, 5, 9
CUTS = (0, 2, 7)


def drive_rate(fn: Callable[..., Any]) -> list[Any]:
    """Ask for every rate."""
    return [
        fn(step, base_lr, batch=batch, base_batch=base_batch, num_warmup=num_warmup)
        for step, base_lr, batch, base_batch, num_warmup in RATES
    ]


def net() -> nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()


def data(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return a rank's micro-batches, of sizes that differ."""
    return [
        (seeded(rank, size, FEATURES, purpose=f"inputs {k}"), seeded(rank, size, OUTPUTS, purpose=f"targets {k}"))
        for k, size in enumerate(SIZES)
    ]


def _gradients(batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    model = net()
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    nn.functional.mse_loss(model(inputs), targets).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def drive_accumulate(fn: Callable[..., Any]) -> dict[str, Any]:
    """Accumulate over this rank's micro-batches; keep what one process, and each micro-batch alone, would give."""
    rank, model, calls = dist.get_rank(), net(), []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(len(outputs))
        return nn.functional.mse_loss(outputs, targets)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fn(model, data(rank), loss_fn)
    return {
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "parts": [_gradients([batch]) for batch in data(rank)],
        "calls": calls,
        "changed": [name for name, p in model.named_parameters() if not torch.equal(p, before[name])],
    }


def tensors(kind: str) -> tuple[Tensor, Tensor]:
    """Return a weight and a gradient of a kind."""
    shape = (4,) if kind == "a bias" else (3, 4)
    weight, gradient = 5 * seeded(0, *shape, purpose="weight"), seeded(0, *shape, purpose="gradient")
    if kind == "a weight of zeros":
        weight = torch.zeros_like(weight)
    if kind.startswith("a gradient of zeros"):
        gradient = torch.zeros_like(gradient)
    return weight, gradient


NO_UPDATE = "a gradient of zeros and no decay"
LARS_KINDS = ("a matrix", "a bias", "a weight of zeros", "a gradient of zeros", NO_UPDATE)
LAMB_KINDS = ("a matrix", "a weight of zeros", "a gradient of zeros", NO_UPDATE)


def _same(now: Tensor, was: Tensor) -> bool:
    return torch.equal(now.nan_to_num(7.0), was.nan_to_num(7.0))


LARS_RATES = (0.5, 0.5, 0.05)  # the last rate is lower: is it inside the buffer?
LAMB_UPDATES = 3


def drive_lars(fn: Callable[..., Any]) -> dict[str, Any]:
    """Make some updates of a tensor of each kind."""
    return {kind: lars_run(fn, kind) for kind in LARS_KINDS}


def lars_run(fn: Callable[..., Any], kind: str) -> dict[str, Any]:
    """Return the weight after each update, and whether an argument was changed."""
    weight, gradient = tensors(kind)
    buffer, weights, changed = torch.zeros_like(weight), [], ""
    settings = SETTINGS | ({"decay": 0.0} if kind == NO_UPDATE else {})
    for lr in LARS_RATES:
        given = [weight, gradient, buffer]
        before = [tensor.clone() for tensor in given]
        result = fn(weight, gradient, buffer, **{**settings, "lr": lr})
        pairs = zip(("weight", "gradient", "buffer"), given, before, strict=True)
        changed = changed or next((name for name, now, was in pairs if not _same(now, was)), "")
        if not (isinstance(result, tuple | list) and len(result) == 2):
            return {"returned": repr(result), "weights": weights, "changed": changed}
        weight, buffer = (tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in result)
        weights.append(weight)
    return {"weights": weights, "changed": changed}


def drive_lamb(fn: Callable[..., Any]) -> dict[str, Any]:
    """Make some updates of a tensor of each kind."""
    return {kind: lamb_run(fn, kind) for kind in LAMB_KINDS}


def lamb_run(fn: Callable[..., Any], kind: str) -> dict[str, Any]:
    """Return the weight after each update, and whether an argument was changed."""
    weight, gradient = tensors(kind)
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    weights, changed = [], ""
    settings = LAMB_SETTINGS | ({"decay": 0.0} if kind == NO_UPDATE else {})
    for step in range(1, LAMB_UPDATES + 1):
        given = [weight, gradient * (1 + step), mean, square]
        before = [tensor.clone() for tensor in given]
        result = fn(*given, **settings, step=step)
        pairs = zip(("weight", "gradient", "mean", "square"), given, before, strict=True)
        changed = changed or next((name for name, now, was in pairs if not _same(now, was)), "")
        if not (isinstance(result, tuple | list) and len(result) == 3):
            return {"returned": repr(result), "weights": weights, "changed": changed}
        weight, mean, square = (tensor.clone() if isinstance(tensor, Tensor) else tensor for tensor in result)
        weights.append(weight)
    return {"weights": weights, "changed": changed}


def optimizer_of(lr: float) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    return torch.optim.SGD([{"params": [weight]} for weight in weights], lr=lr)


def drive_warm_up(fn: Callable[..., Any]) -> dict[int, Any]:
    """Run whole, and cut at some updates: saved, loaded into a new optimizer and resumed. Log both groups' rates."""
    return {cut: _rates(fn, cut) for cut in CUTS}


def _rates(fn: Callable[..., Any], cut: int) -> list[Any]:
    logged: list[Any] = []
    state = None
    for first, last in ((0, cut), (cut, NUM_UPDATES)):
        if first == last:
            continue
        optimizer = optimizer_of(PEAK_LR)
        if state is not None:
            optimizer.load_state_dict(state)
        before_update = fn(optimizer, PEAK_LR, num_warmup=NUM_WARMUP, first_step=first)
        for _ in range(first, last):
            before_update()
            logged.append([group["lr"] for group in optimizer.param_groups])
        state = optimizer.state_dict()
    return logged
