"""Lab 9: train a small GPT as a pipeline, by every schedule: losses of one process, messages, memory, bubble, time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distlab.course.lab import GPTSettings, Lab, flag, main
from distlab.measure import RunResult, TrainingRun, measure_messages, time_training
from distlab.models import GPT, GPTConfig
from distlab.pipeline import Pipeline, split_gpt
from distlab.plan import (
    SCHEDULES,
    ActionTimes,
    Plan,
    Schedule,
    add_communication,
    make_schedule,
    parse_schedule,
    validate,
)
from distlab.trace import Trace
from simulator import PipelineRun, simulate_schedule

LEARNING_RATE = 1e-3
SAME = 1e-3  # by how much losses of float32 may differ, sums being formed in other orders
KINDS = ("F", "B", "I", "W")
RUNNABLE = tuple(name for name, family in SCHEDULES.items() if family.placement != "copies")
ALL = ("naive", "gpipe", "one_f_one_b", "interleaved", "zb_h1", "interleaved_zero_bubble", "zb_v")


@dataclass(frozen=True)
class Settings(GPTSettings):
    """Train a small GPT as a pipeline by every schedule, or by one, or by your own order of actions.

    Attributes:
        schedule: a schedule's name, a file with an order (one line per rank), or all.
        updates: of each schedule.
        microbatches: in an update; a file's order has its own number.
        samples: in a micro-batch.
        layers: blocks of the model; at least as many as there are stages.
    """

    schedule: str = "all"
    updates: int = flag(5, least=3)
    microbatches: int = flag(8, least=1)
    samples: int = flag(2, least=1)
    layers: int = flag(8, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule in ("all", *RUNNABLE):
            return
        if not Path(self.schedule).is_file():
            names = ", ".join(RUNNABLE)
            raise ValueError(f"schedule is {self.schedule!r}, which is not a file; pass one, or all, or one of {names}")
        validate(self.order)
        object.__setattr__(self, "microbatches", self.order.num_microbatches)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse an order for other ranks, and more stages than layers."""
        most = max(each.num_stages for each in self.schedules(num_ranks).values())
        if most > self.layers:
            raise ValueError(f"layers is {self.layers}; {most} stages need one each, so pass --layers {most} or more")

    def schedules(self, n: int) -> dict[str, Schedule]:
        """Return the schedules that were asked for, for n ranks, by what the table calls them."""
        if self.schedule in ("all", *RUNNABLE):
            names = ALL if self.schedule == "all" else (self.schedule,)
            return {SCHEDULES[name].title: make_schedule(name, n, self.microbatches) for name in names}
        if (lines := self.order.num_ranks) != n:
            raise ValueError(f"{self.schedule} has {lines} lines, one per rank; run this lab on {lines} ranks, not {n}")
        return {"your schedule": self.order}

    @property
    def model(self) -> GPTConfig:
        """Sizes of the GPT."""
        return replace(super().model, context=32, tied=False)

    @property
    def order(self) -> Schedule:
        """The learner's order."""
        return parse_schedule(Path(self.schedule).read_text(encoding="utf-8"))


@dataclass
class Way:
    """One schedule and what it did.

    Attributes:
        name: what the table calls it.
        schedule: who runs what, in which order.
        step_s: seconds of each step that was timed, of the slowest rank.
        steps_ns: start and end of each on this rank.
    """

    name: str
    schedule: Schedule
    step_s: list[float] = field(default_factory=list)
    steps_ns: list[tuple[int, int]] = field(default_factory=list)


class Batches:
    """The batches of all updates, and the losses of one process that trains on them."""

    def __init__(self, lab: Lab[Settings]) -> None:
        settings = lab.settings
        corpus = settings.corpus()
        self.device = lab.member.device
        self.config = settings.model
        size = settings.microbatches * settings.samples
        pairs = [corpus.batch(number, size) for number in range(settings.updates)]
        self.pairs = [(inputs.to(self.device), targets.to(self.device)) for inputs, targets in pairs]

    def new_model(self) -> GPT:
        """Return the model that every schedule starts from."""
        return GPT(self.config, torch.Generator().manual_seed(0)).to(self.device)

    def train_alone(self) -> list[float]:
        """Train in one process."""
        model, losses = self.new_model(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        for inputs, targets in self.pairs:
            optimizer.zero_grad()
            loss = GPT.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def run(lab: Lab[Settings]) -> None:
    """Train with every schedule; then run the learner's own functions."""
    batches = Batches(lab)
    wanted = batches.train_alone()
    for way in ways(lab):
        train(lab, batches, way, wanted)
    time_calibrated(lab)
    run_own_rank(lab, batches)
    split_own_backward(lab)
    lab.report.note("Ranks that share cores, or one GPU, make each other slower: a step is no faster than the cores.")
    lab.report.note(
        "Predicted: the schedule, with the mean times of each stage's actions in the same step and of a message alone."
    )


def ways(lab: Lab[Settings]) -> list[Way]:
    """Return the schedules to run: those asked for, and the orders that the learner wrote."""
    settings, n = lab.settings, lab.member.world_size
    m = settings.microbatches
    found = [Way(name, schedule) for name, schedule in settings.schedules(n).items()]
    if settings.schedule == "all":
        gpipe, alternate, zero = (lab.function(f"09.{name}") for name in ("gpipe", "one_f_one_b", "zero_bubble"))
        found.append(Way("your GPipe", from_orders([gpipe(rank, m) for rank in range(n)])))
        found.append(Way("your 1F1B", from_orders([alternate(rank, n, m) for rank in range(n)])))
        found.append(Way("your zero bubble", from_orders([zero(rank, n, m) for rank in range(n)])))
    return found


def from_orders(orders: Sequence[Sequence[str]]) -> Schedule:
    """Read each rank's list of actions."""
    schedule = parse_schedule("\n".join(",".join(order) for order in orders))
    validate(schedule)
    return schedule


def train(lab: Lab[Settings], batches: Batches, way: Way, wanted: list[float]) -> None:
    """Train from the same start, then report losses, messages, memory, bubble and time."""
    schedule, rank = way.schedule, lab.member.rank
    modules = split_gpt(batches.new_model(), schedule.num_stages)
    own = {stage: modules[stage] for stage, home in enumerate(schedule.home) if home == rank}
    pipeline = Pipeline(own, schedule, loss=GPT.loss, spans=lab.member.spans)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=LEARNING_RATE)
    losses, sent = [], 0
    for number, (inputs, targets) in enumerate(batches.pairs):
        optimizer.zero_grad()
        dist.barrier()
        start_ns = lab.now_ns()
        if number == 1:
            with lab.watched() as seen:
                loss = pipeline.step(inputs, targets)
            assert seen.records is not None, "the block has ended"
            sent = seen.records.rank(rank).num_calls("send")
        else:
            loss = pipeline.step(inputs, targets)
            way.steps_ns.append((start_ns, lab.now_ns()))
            way.step_s.append(lab.slowest((way.steps_ns[-1][1] - start_ns) / 1e9))
        optimizer.step()
        losses.append(pipeline.mean_loss(loss))
    gap = max(abs(one - other) for one, other in zip(losses, wanted, strict=True))
    lab.report.fact(f"{way.name}: losses as in one process", gap < SAME, True)
    report(lab, way, sent, pipeline.peak_in_flight)
    pipeline.close()


def report(lab: Lab[Settings], way: Way, sent: int, peak: int) -> None:
    """Compare what was measured with what the schedule says."""
    rank, schedule = lab.member.rank, way.schedule
    kinds = [action.kind for action in add_communication(schedule).actions(rank)]
    planned = kinds.count("SEND_F") + kinds.count("SEND_B")
    lab.report.fact(f"{way.name}: messages as planned", lab.everywhere(sent == planned), True)
    middle = sorted(range(1, len(way.step_s)), key=lambda step: way.step_s[step])[(len(way.step_s) - 1) // 2]
    start_ns, end_ns = way.steps_ns[middle]
    trace = lab.member.spans.trace()
    work = trace.select((trace.start_ns >= start_ns) & (trace.end_ns <= end_ns) & trace.is_word("kind", *KINDS))
    expected = predicted(lab, schedule, work)
    in_flight = lab.everywhere(peak == expected.peak_in_flight[rank])
    lab.report.fact(f"{way.name}: peak in flight as planned", in_flight, True)
    first, last = lab.slowest(-int(work.start_ns.min()) / 1e9), lab.slowest(int(work.end_ns.max()) / 1e9)
    busy = lab.mean(float((work.end_ns - work.start_ns).sum()) / 1e9) / (first + last)
    lab.report.measured(f"{way.name}: bubble", 1 - busy, predicted=expected.bubble_fraction)
    lab.report.measured(f"{way.name}: forward and backward", first + last, "s", predicted=expected.duration_s)
    lab.mark_step(start_ns, end_ns, predicted=expected.trace, title=way.name)


def predicted(lab: Lab[Settings], schedule: Schedule, work: Trace) -> PipelineRun:
    """Simulate the schedule with the mean times of each stage's actions in a step, and measured messages."""
    device = lab.member.device
    times = torch.zeros(len(KINDS), schedule.num_stages, dtype=torch.float64, device=device)
    for code, kind in enumerate(KINDS):
        spans = work.select(work.is_word("kind", kind))
        for stage in set(spans.stage.tolist()):
            times[code, stage] = float((spans.end_ns - spans.start_ns)[spans.stage == stage].mean()) / 1e9
    dist.all_reduce(times)  # each stage is on one rank: the others add nothing
    forward, whole, inputs, weights = times.tolist()
    inputs = [one or other / 2 for one, other in zip(inputs, whole, strict=True)]
    weights = [one or other / 2 for one, other in zip(weights, whole, strict=True)]
    size = 4 * lab.settings.samples * lab.settings.model.context * lab.settings.hidden
    messages = measure_messages(device)
    message_s = float(np.interp(size, messages.num_bytes, messages.seconds))
    return simulate_schedule(schedule, ActionTimes(forward, inputs, weights, message_s), unit_s=1.0)


def time_calibrated(lab: Lab[Settings]) -> None:
    """Time windows of steps between calibrations of this machine, and compare them with a simulation from these."""
    settings = lab.settings
    if settings.schedule not in ("all", *RUNNABLE):
        return
    name = "one_f_one_b" if settings.schedule == "all" else settings.schedule
    n, m, device = lab.member.world_size, settings.microbatches, lab.member.device.type
    stages = SCHEDULES[name].stages_per_rank(None)
    plan = Plan(pipeline=n, schedule=name, num_microbatches=m, stages_per_rank=stages)
    training = TrainingRun(settings.model, plan, m * settings.samples, device=device, num_windows=4, budget_s=15.0)
    windows = RunResult(training, [time_training(training)]).windows
    measured, expected = (median(getattr(window, what) for window in windows) for what in ("measured_s", "predicted_s"))
    lab.report.measured(f"{SCHEDULES[name].title}, calibrated: step", measured, "s", predicted=expected)


def run_own_rank(lab: Lab[Settings], batches: Batches) -> None:
    """Run the learner's rank, in the order of 1F1B, and compare its gradients with one process's."""
    n, rank, m = lab.member.world_size, lab.member.rank, lab.settings.microbatches
    stage = split_gpt(batches.new_model(), n)[rank]
    inputs, targets = batches.pairs[0]
    order = make_schedule("one_f_one_b", n, m).actions(rank)
    like = torch.empty(lab.settings.samples, batches.config.context, batches.config.hidden_size, device=batches.device)
    mine = list(inputs.chunk(m)) if rank == 0 else []
    wanted = list(targets.chunk(m)) if rank == n - 1 else []
    lab.function("09.run_rank")(stage, order, mine, wanted, GPT.loss, like)
    whole = batches.new_model()
    GPT.loss(whole(inputs), targets).backward()
    right = True
    for got, want in zip(stage.parameters(), split_gpt(whole, n)[rank].parameters(), strict=True):
        assert want.grad is not None, "every parameter was used"
        right = right and got.grad is not None and torch.allclose(got.grad, want.grad, atol=1e-5)
    lab.report.fact("your rank: gradients as in one process", lab.everywhere(right), True)
    outputs: list[Tensor] = lab.function("09.repair")(torch.nn.Identity(), [like] * m if rank == 0 else [], m, like)
    lab.report.fact("your forward passes: one output a micro-batch", lab.everywhere(len(outputs) == m), True)


def split_own_backward(lab: Lab[Settings]) -> None:
    """Compare the learner's halves of a backward pass with autograd's whole one."""
    generator, width = torch.Generator().manual_seed(lab.member.rank), lab.settings.hidden
    weights = [(torch.randn(width, width, generator=generator) / width**0.5).requires_grad_() for _ in range(3)]
    activations = [torch.randn(4, width, generator=generator).requires_grad_()]
    for weight in weights:
        activations.append(torch.tanh(activations[-1] @ weight))
    activations[-1].sum().backward()
    plain = [tensor.detach() for tensor in activations]
    grad, later = lab.function("09.split")([w.detach() for w in weights], plain, torch.ones_like(plain[-1]))
    pairs = zip([activations[0].grad, *(weight.grad for weight in weights)], [grad, *later()], strict=True)
    right = all(want is not None and torch.allclose(want, got, atol=1e-4) for want, got in pairs)
    lab.report.fact("your I and W: gradients as autograd's", lab.everywhere(right), True)


if __name__ == "__main__":
    main("09", Settings, run)
