"""Lab 4: train the digits with a large batch on all ranks, with your LARS and LAMB: equal to one process, how good?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.data import Digits, digits, rank_slice
from distlab.data_parallel import DataParallel, loss_weight
from distlab.large_batch import LAMB, LARS, Trust

TOLERANCE = 1e-9  # float64
DECAY, MOMENTUM, COEFFICIENT = 1e-4, 0.9, 0.001
Rates = Callable[[int], float]
Step = Callable[[list[nn.Parameter], float], None]


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Train the digits with one large batch per update: SGD and AdamW, and the learner's LARS and LAMB.

    Attributes:
        batch: samples in a batch, over all ranks; 1,437 is all of them.
        epochs: passes over the data.
        layers: hidden layers of the network, of 128 each.
        sgd_lr: highest rate of SGD.
        adamw_lr: highest rate of AdamW.
        lars_lr: highest rate of LARS.
        lamb_lr: highest rate of LAMB.
    """

    batch: int = flag(1437, least=1)
    epochs: int = flag(20, least=1)
    layers: int = flag(1, least=1)
    sgd_lr: float = 1.0
    adamw_lr: float = 0.03
    lars_lr: float = 10.0
    lamb_lr: float = 0.095

    def __post_init__(self) -> None:
        if self.batch > 1437:
            raise ValueError(f"--batch is {self.batch}; there are 1,437 digits to train on: pass at most that")
        for name in ("sgd_lr", "adamw_lr", "lars_lr", "lamb_lr"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; pass a number above 0")

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse batches of which some rank gets no sample: also the last batch of an epoch, which may be smaller."""

        def smallest(batch: int) -> int:
            return 1437 % batch or batch

        if smallest(self.batch) < num_ranks:
            fits = (batch for batch in range(num_ranks, 1438) if smallest(batch) >= num_ranks)
            raise ValueError(
                f"--batch {self.batch} leaves a batch of {smallest(self.batch)} of the 1,437 digits, less than "
                f"{num_ranks} ranks; pass --batch {min(fits, key=lambda batch: abs(batch - self.batch))}"
            )


def network(layers: int) -> nn.Module:
    """Return a network without normalisation, the same on every rank, in float64."""
    draw = torch.Generator().manual_seed(0)
    widths, parts = (64, *[128] * layers, 10), []
    for wide, narrow in zip(widths, widths[1:], strict=False):
        layer = nn.Linear(wide, narrow, dtype=torch.float64)
        nn.init.normal_(layer.weight, std=math.sqrt(2 / wide), generator=draw)
        nn.init.zeros_(layer.bias)
        parts += [layer, nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class ByHand:
    """Updates made tensor by tensor with the learner's function, which keeps no state of its own."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function, self.updates = name, function, 0
        self.states: dict[int, list[Tensor]] = {}

    @torch.no_grad()
    def __call__(self, parameters: list[nn.Parameter], lr: float) -> None:
        """Update every parameter that has a gradient."""
        self.updates += 1
        for index, parameter in enumerate(parameters):
            count = 1 if self.name == "LARS" else 2
            state = self.states.setdefault(index, [torch.zeros_like(parameter) for _ in range(count)])
            settings: dict[str, Any] = {"lr": lr, "decay": DECAY}
            if self.name == "LARS":
                settings |= {"momentum": MOMENTUM, "coefficient": COEFFICIENT}
            else:
                settings |= {"step": self.updates}
            weight, *self.states[index] = self.function(parameter.detach(), parameter.grad, *state, **settings)
            parameter.copy_(weight)


def by_torch(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Step:
    """Return a step made by an optimizer object, which is built at the first call."""
    made: list[torch.optim.Optimizer] = []

    def step(parameters: list[nn.Parameter], lr: float) -> None:
        if not made:
            made.append(make(parameters))
        for group in made[0].param_groups:
            group["lr"] = lr
        made[0].step()

    return step


REFERENCES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 1.0, momentum=MOMENTUM, weight_decay=DECAY),
    "AdamW": lambda ps: torch.optim.AdamW(ps, 1.0, weight_decay=DECAY),
    "LARS": lambda ps: LARS(ps, 1.0, momentum=MOMENTUM, weight_decay=DECAY),
    "LAMB": lambda ps: LAMB(ps, 1.0, weight_decay=DECAY, trust=Trust(adapt="all")),
}


def run(lab: Lab[Settings]) -> None:
    """Train with each optimizer on all ranks and on rank 0 alone; report equality, calls, accuracy and time."""
    settings = lab.settings
    scale = lab.function("04.rate")
    own = {"LARS": lab.function("04.lars"), "LAMB": lab.function("04.lamb")}
    num_steps = settings.epochs * -(-1437 // settings.batch)
    for name in REFERENCES:
        peak = getattr(settings, f"{name.lower()}_lr")

        def rate(step: int, peak: float = peak) -> float:
            num_warmup = num_steps // 10
            return scale(step, peak, batch=1, base_batch=1, num_warmup=num_warmup) * (1 - step / num_steps)

        step = ByHand(name, own[name]) if name in own else by_torch(REFERENCES[name])
        wanted = alone(lab, by_torch(REFERENCES[name]), rate, num_steps)
        together(lab, name, step, rate, wanted=wanted)
    lab.report.note("Each run's accuracy is of one seed: the lesson has five and their spread.")


@cache
def data_of() -> Digits:
    """Return the digits, read once."""
    return digits()


def batch_of(lab: Lab[Settings], step: int, *, whole: bool) -> tuple[Tensor, Tensor, float]:
    """Return this rank's part of a batch, or the whole, and the weight of its loss."""
    data, batch = data_of(), lab.settings.batch
    rank, ranks = (0, 1) if whole else (lab.member.rank, lab.member.world_size)
    epoch, place = divmod(step, -(-1437 // batch))
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(epoch))
    chosen = order[place * batch : (place + 1) * batch]
    start, stop = rank_slice(len(chosen), rank, ranks)
    weight, chosen = loss_weight(stop - start, len(chosen), ranks), chosen[start:stop]
    device = lab.member.device
    return data.train_inputs[chosen].double().to(device), data.train_targets[chosen].to(device), weight


def alone(lab: Lab[Settings], step: Step, rate: Rates, num_steps: int) -> Tensor:
    """Train with torch's or the library's optimizer in one process, rank 0; return its weights on every rank."""
    model = network(lab.settings.layers).to(lab.member.device)
    if lab.member.rank == 0:
        for update in range(num_steps):
            one_update(lab, model, step, rate(update), update=update)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    dist.broadcast(weights, 0)
    return weights


def one_update(
    lab: Lab[Settings], model: nn.Module, step: Step, lr: float, *, update: int, replica: DataParallel | None = None
) -> None:
    """Make one update, alone or with all ranks."""
    inputs, targets, weight = batch_of(lab, update, whole=replica is None)
    model.zero_grad() if replica is None else replica.zero_grad()
    with lab.member.spans.span("forward", "F"):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    with lab.member.spans.span("backward", "B"):
        (loss * weight).backward()
    if replica is not None:
        with lab.member.spans.span("synchronize", "wait"):
            replica.synchronize()
    with lab.member.spans.span("optimizer", "optimizer"):
        step(list(model.parameters()), lr)


def together(lab: Lab[Settings], name: str, step: Step, rate: Rates, *, wanted: Tensor) -> None:
    """Train on all ranks; compare with one process and with each other, count, test and time."""
    settings, report = lab.settings, lab.report
    num_steps = settings.epochs * -(-1437 // settings.batch)
    model = network(settings.layers).to(lab.member.device)
    replica = DataParallel(model)
    seconds = []
    for update in range(num_steps):
        start_ns = lab.now_ns()
        one_update(lab, model, step, rate(update), update=update, replica=replica)
        seconds.append(lab.slowest((lab.now_ns() - start_ns) / 1e9))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = weights.clone()
    dist.broadcast(first, 0)
    difference = lab.slowest(float((weights - wanted).abs().max()))
    report.fact(f"{name}: equal to one process after {num_steps} updates", difference <= TOLERANCE, True)
    report.measured(f"{name}: largest difference of a weight", difference)
    report.fact(f"{name}: all ranks hold the same bits", lab.everywhere(torch.equal(first, weights)), True)
    data = data_of()
    with torch.no_grad():
        right = model(data.test_inputs.double().to(lab.member.device)).argmax(-1).cpu() == data.test_targets
    report.measured(f"{name}: test accuracy", float(right.double().mean()))
    report.measured(f"{name}: an update", statistics.median(seconds), "s")


if __name__ == "__main__":
    main("04", Settings, run)
