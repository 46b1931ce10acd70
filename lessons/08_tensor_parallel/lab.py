"""Lab 8: train a small GPT with its layers cut over ranks: losses of one process, bytes, what ranks hold, and time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.course.lab import GPTSettings, Lab, flag, main
from distlab.grading import load_lesson
from distlab.measure import RunResult, TrainingRun, time_training
from distlab.models import GPT, GPTConfig
from distlab.pipeline import Pipeline, split_gpt
from distlab.plan import Plan, make_schedule
from distlab.tensor_parallel import clip_tensor_parallel_, parallelize

LEARNING_RATE, MAX_NORM = 1e-3, 1.0
SAME = 1e-3  # by how much losses of float32 may differ, sums being formed in other orders
Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Settings(GPTSettings):
    """Train a small GPT cut over ranks in several ways, with the library's layers and with your own functions.

    Attributes:
        updates: of each way.
        samples: in a batch; every rank has the same ones.
        hidden: hidden size of the model.
        heads: attention heads; must divide the hidden size, and the number of ranks must divide them.
        layers: blocks of the model; at least as many as there are ranks.
        context: tokens in a sample; the number of ranks must divide them.
    """

    updates: int = flag(6, least=3)
    hidden: int = flag(96, least=4)
    heads: int = flag(24, least=1)
    layers: int = flag(8, least=1)
    context: int = flag(48, least=4)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse what cannot be cut into so many parts."""
        for name in ("heads", "context"):
            value = getattr(self, name)
            if value % num_ranks:
                raise ValueError(
                    f"{name} is {value}, which {num_ranks} ranks do not divide; pass a multiple of {num_ranks}"
                )
        if self.layers < num_ranks:
            text = f"layers is {self.layers}; naive model parallelism needs one for each of {num_ranks} ranks"
            raise ValueError(f"{text}, so pass at least {num_ranks}")

    @property
    def model(self) -> GPTConfig:
        """Sizes of the GPT."""
        sizes = {"num_layers": self.layers, "num_heads": self.heads, "hidden_size": self.hidden}
        return GPTConfig(context=self.context, tied=False, **sizes)


class Way(NamedTuple):
    """One way to cut the model.

    Attributes:
        name: what the table calls it.
        prepare: takes the full model; returns what makes an update and returns the loss, and the parameters held here.
        sent: bytes that a rank must send in an update, or None where no formula is given.
    """

    name: str
    prepare: Callable[[GPT], tuple[Step, list[Tensor]]]
    sent: float | None = None


def run(lab: Lab[Settings]) -> None:
    """Train in every way; then time windows of steps between calibrations."""
    settings = lab.settings
    corpus = settings.corpus()
    batches = [corpus.batch(number, settings.samples) for number in range(settings.updates)]
    device = lab.member.device
    pairs = [(inputs.to(device), targets.to(device)) for inputs, targets in batches]
    wanted = train_alone(lab, pairs)
    for way in ways(lab):
        train(lab, way, pairs, wanted)
    use_own_parts(lab)
    time_calibrated(lab)
    lab.report.note("On ranks that share cores, or one GPU, times say little: there is no wire, and no core to spare.")
    lab.report.note("Busy: the part of a recorded update in which a rank waits for no call. Recording costs time too.")


def new_model(lab: Lab[Settings]) -> GPT:
    """Return the model that every way starts from."""
    return GPT(lab.settings.model, torch.Generator().manual_seed(0)).to(lab.member.device)


def train_alone(lab: Lab[Settings], pairs: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train in one process; every rank does the same."""
    model, times = new_model(lab), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for inputs, targets in pairs:
        start_ns = lab.now_ns()
        optimizer.zero_grad()
        loss = GPT.loss(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
        times.append((lab.now_ns() - start_ns) / 1e9)
    lab.report.measured("one process: update", lab.slowest(median(times[1:])), "s")
    lab.report.measured("one process: parameters", model.num_parameters)
    return losses


def ways(lab: Lab[Settings]) -> list[Way]:
    """Return the ways, from layers on different ranks to every layer on all of them."""
    settings, t = lab.settings, lab.member.world_size
    once = (t - 1) / t * 4
    positions, h, layers = settings.samples * settings.context, settings.hidden, settings.layers
    numbers = (8 * layers + 4) * positions * h + 6 * positions
    in_sequence = numbers + 2 * (4 * layers + 2) * h + settings.context * h
    norm = 2 * (t - 1) / t * 8  # of the gradients, one float64
    return [
        Way("naive model parallel", lambda model: naive(lab, model)),
        Way("tensor parallel", lambda model: cut(model), once * numbers + norm),
        Way("with the sequence split", lambda model: cut(model, sequence_parallel=True), once * in_sequence + norm),
        Way("your functions", lambda model: own(lab, model), once * numbers + norm),
    ]


def naive(lab: Lab[Settings], model: GPT) -> tuple[Step, list[Tensor]]:
    """Put layers on different ranks, and send the whole batch through."""
    n, rank = lab.member.world_size, lab.member.rank
    pipeline = Pipeline({rank: split_gpt(model, n)[rank]}, make_schedule("naive", n, 1), loss=GPT.loss)
    parameters: list[Tensor] = list(pipeline.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    clip = lab.function("08.clip")

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = pipeline.step(inputs, targets)
        clip([p.grad for p in parameters], [], [], MAX_NORM)  # each lies on one rank: all are parts of one norm
        optimizer.step()
        return pipeline.mean_loss(loss)

    return step, parameters


def cut(model: GPT, *, sequence_parallel: bool = False) -> tuple[Step, list[Tensor]]:
    """Cut every layer, as the library does it."""
    parallel = parallelize(model, sequence_parallel=sequence_parallel)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=LEARNING_RATE)

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = parallel.loss(parallel(inputs), targets)
        loss.backward()
        clip_tensor_parallel_(parallel, MAX_NORM)
        optimizer.step()
        return float(loss.detach())

    return step, list(parallel.parameters())


def own(lab: Lab[Settings], model: GPT) -> tuple[Step, list[Tensor]]:
    """Cut every layer with the learner's functions, and train with them."""
    load_lesson("08")  # its files can be imported from here on
    from distlab_lesson_08.own_model import OwnModel

    made = OwnModel(model, lab.function, lab.member.rank, lab.member.world_size)
    optimizer = torch.optim.AdamW(made.parameters, lr=LEARNING_RATE)
    clip = lab.function("08.clip")

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = made.loss(inputs, targets)
        loss.backward()
        clip([p.grad for p in made.split], [p.grad for p in made.whole], [], MAX_NORM)
        optimizer.step()
        return float(loss.detach())

    return step, made.parameters


def train(lab: Lab[Settings], way: Way, pairs: list[tuple[Tensor, Tensor]], wanted: list[float]) -> None:
    """Train from the same start; report losses, bytes, what is held, and time."""
    step, parameters = way.prepare(new_model(lab))
    losses, times, rank = [], [], lab.member.rank
    for number, pair in enumerate(pairs):
        dist.barrier()
        start_ns = lab.now_ns()
        if number == 1:
            with lab.watched() as seen:
                window_ns = [time.monotonic_ns()]
                losses.append(step(*pair))
                window_ns.append(lab.now_ns())
        else:
            losses.append(step(*pair))
            times.append(lab.slowest((lab.now_ns() - start_ns) / 1e9))
    gap = max(abs(one - other) for one, other in zip(losses, wanted, strict=True))
    lab.report.fact(f"{way.name}: losses as in one process", lab.everywhere(gap < SAME), True)
    records = seen.records
    assert records is not None, "the block has ended"
    sent = records.sent_bytes(rank) + records.ring_equivalent_bytes(rank)
    if way.sent is not None:
        lab.report.fact(f"{way.name}: bytes by the formula", lab.everywhere(abs(sent - way.sent) <= 8), True)
    lab.report.measured(f"{way.name}: sent per rank in an update", lab.mean(float(sent)), "B", predicted=way.sent)
    lab.report.measured(
        f"{way.name}: parameters of the fullest rank", int(lab.slowest(sum(p.numel() for p in parameters)))
    )
    waited_ns = sum(max(call.end_ns - (call.wait_ns or call.start_ns), 0) for call in records.calls(rank))
    lab.report.measured(f"{way.name}: busy", lab.mean(1 - waited_ns / (window_ns[1] - window_ns[0])))
    lab.report.measured(f"{way.name}: update", median(times[1:]), "s")
    lab.mark_step(*window_ns, title=way.name)


def use_own_parts(lab: Lab[Settings]) -> None:
    """Use the learner's pair for sequences and their masks."""
    n, device = lab.member.world_size, lab.member.device
    gather, scatter = lab.function("08.sequence")()
    part = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(lab.member.rank)).to(device).requires_grad_()
    back = scatter(gather(part))  # all ranks add up what all of them have: n times the own part
    back.sum().backward()
    assert part.grad is not None, "it took part"
    right = torch.allclose(back, n * part, atol=1e-4) and torch.allclose(part.grad, torch.full_like(part, n))
    lab.report.fact("your sequence pair: joined and added up, there and back", lab.everywhere(right), True)
    ones, seen = torch.ones(64, device=device), {}
    for is_split in (False, True):
        seen[is_split] = [torch.empty_like(ones) for _ in range(n)]
        dist.all_gather(seen[is_split], lab.function("08.dropout")(ones, 0.5, 0, is_split))
    same = {is_split: sum(torch.equal(mask, masks[0]) for mask in masks) for is_split, masks in seen.items()}
    lab.report.fact("your masks: equal where ranks hold the same, else not", same == {False: n, True: 1}, True)


def time_calibrated(lab: Lab[Settings]) -> None:
    """Time windows of steps between calibrations of this machine, and compare them with a simulation from these."""
    settings = lab.settings
    training = TrainingRun(
        model=settings.model,
        plan=Plan(tensor=lab.member.world_size),
        batch_size=settings.samples,
        device=lab.member.device.type,
        num_windows=4,
        budget_s=15.0,
    )
    windows = RunResult(training, [time_training(training)]).windows
    measured, expected = (median(getattr(window, what) for window in windows) for what in ("measured_s", "predicted_s"))
    lab.report.measured("tensor parallel, calibrated: step", measured, "s", predicted=expected)


if __name__ == "__main__":
    main("08", Settings, run)
