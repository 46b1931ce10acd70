"""Lab 3: train a small GPT on real text with each rung of the ladder: equal to one process, and how fast?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from distlab.collectives import RingAllReduce
from distlab.comm import Records
from distlab.course.lab import GPTSettings, Lab, flag, main
from distlab.data import ByteCorpus
from distlab.data_parallel import DataParallel
from distlab.data_parallel.steps import FlatBucket, in_buckets, trainable
from distlab.measure import Round, fit_cluster, measure_round, median_round, workload_from_module
from distlab.models import GPT
from distlab.plan import Plan, Workload
from simulator import Step, simulate

UPDATES, TOLERANCE = 10, 1e-5  # fp32, SGD with momentum
LEARNING_RATE, MOMENTUM = 0.03, 0.9
Batch = tuple[Tensor, Tensor]
Synchronize = Callable[[], None] | None


@dataclass(frozen=True)
class Settings(GPTSettings):
    """Train a small GPT: gradients averaged one by one, flat, in buckets, during backward, and by two libraries.

    Attributes:
        steps: timed steps of each way; all take turns, and the median counts.
        bucket_bytes: capacity of a gradient bucket.
        all_reduce: how DataParallel averages a bucket: torch's all_reduce, or the library's own ring.
    """

    steps: int = flag(12, least=1)
    hidden: int = flag(128, least=4)
    bucket_bytes: int = flag(250_000, least=1, size=True)
    all_reduce: Literal["native", "ring"] = "native"


@dataclass
class Rung:
    """One way to train on many ranks.

    Attributes:
        name: what the table calls it.
        prepare: takes a model whose replicas are equal; returns what to call, and what averages after backward, if any.
        gradient_sync: what the simulator calls it; empty where nothing is sent.
        all_reduces: calls per step that it must make, or None where torch decides.
    """

    name: str
    prepare: Callable[[nn.Module], tuple[nn.Module, Synchronize]]
    gradient_sync: str
    all_reduces: int | None
    step_s: list[float] = field(default_factory=list)
    window_ns: tuple[int, int] = (0, 0)


class Trainer:
    """A model on this rank, its optimizer and how its gradients are averaged."""

    def __init__(self, lab: Lab[Settings], rung: Rung, broadcast: Callable[[nn.Module], None] | None) -> None:
        seed = lab.member.rank if broadcast is not None else 0  # ranks start apart, so that a missing broadcast shows
        self.lab, self.rung = lab, rung
        self.model = GPT(lab.settings.model, torch.Generator().manual_seed(seed)).to(lab.member.device)
        if broadcast is not None:
            broadcast(self.model)
        self.module, self.synchronize = rung.prepare(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def step(self, batch: Batch) -> float:
        """Make one update; return this rank's mean loss before it."""
        inputs, targets = batch
        self.optimizer.zero_grad()
        with self._span("forward", "F"):
            loss = GPT.loss(self.module(inputs), targets)
        with self._span("backward", "B"):
            loss.backward()
        with self._span("synchronize", "wait"):
            if self.synchronize is not None:
                self.synchronize()
        with self._span("optimizer", "optimizer"):
            self.optimizer.step()
        return float(loss.detach())

    @contextmanager
    def _span(self, name: str, kind: str) -> Iterator[None]:
        with self.lab.member.spans.span(name, kind):
            yield
            self.lab.now()


def run(lab: Lab[Settings]) -> None:
    """Train in one process, then with every rung; then time those that are right."""
    corpus = lab.settings.corpus()
    wanted = train_alone(lab, corpus)
    broadcast = lab.function("03.broadcast")
    right = [trainer for rung in ladder(lab) if (trainer := train(lab, corpus, rung, broadcast, wanted)) is not None]
    alone = Trainer(lab, Rung("no averaging", lambda model: (model, None), "", 0), None)
    calibrate = partial(measure_round, lab.member.device, works={}, largest_bytes=wanted.nbytes)
    before = calibrate()
    time_steps(lab, corpus, [alone, *right])
    report_times(lab, alone, right, median_round([before, calibrate()]))


def ladder(lab: Lab[Settings]) -> list[Rung]:
    """Return the rungs, each made of the learner's functions or the lesson's."""
    average, flat = lab.function("03.average"), lab.function("03.flat")
    fill, overlap = lab.function("03.buckets"), lab.function("03.overlap")
    parameters = trainable(GPT(lab.settings.model).parameters())
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    num_buckets = len(fill(sizes, lab.settings.bucket_bytes))

    def buckets_of(model: nn.Module) -> list[FlatBucket]:
        own = trainable(model.parameters())
        return [FlatBucket([own[i] for i in members]) for members in fill(sizes, lab.settings.bucket_bytes)]

    def bucketed(model: nn.Module) -> tuple[nn.Module, Synchronize]:
        buckets = buckets_of(model)

        def synchronize() -> None:
            for bucket in buckets:
                bucket.start(None)
            for bucket in buckets:
                bucket.finish()

        return model, synchronize

    cap_mb = lab.settings.bucket_bytes / 2**20
    return [
        Rung("one by one", lambda model: (model, lambda: average(model)), "per_parameter", len(parameters)),
        Rung("flat", lambda model: (model, lambda: flat(model)), "flat", 1),
        Rung("buckets", bucketed, "bucketed", num_buckets),
        Rung("overlap", lambda model: (model, overlap(buckets_of(model))), "overlapped", num_buckets),
        data_parallel(lab, parameters),
        Rung("torch DDP", lambda m: (DistributedDataParallel(m, bucket_cap_mb=cap_mb), None), "overlapped", None),
    ]


def data_parallel(lab: Lab[Settings], parameters: list[nn.Parameter]) -> Rung:
    """Return the library's DataParallel as a rung, over torch's all_reduce or over the library's own ring."""
    size, ring = lab.settings.bucket_bytes, lab.settings.all_reduce == "ring"

    def prepare(model: nn.Module) -> tuple[nn.Module, Synchronize]:
        hook = RingAllReduce() if ring else None
        return model, DataParallel(model, bucket_bytes=size, first_bucket_bytes=size, hook=hook).synchronize

    if ring:  # it runs after backward; the only all-reduce is a flag: has any rank a fault to tell?
        return Rung("DataParallel", prepare, "bucketed", 1)
    return Rung("DataParallel", prepare, "overlapped", len(in_buckets(parameters, size, size)))


def batch_of(lab: Lab[Settings], corpus: ByteCorpus, step: int, *, whole: bool = False) -> Batch:
    """Return this rank's part of a step's batch, or the whole of it."""
    rank, ranks = (0, 1) if whole else (lab.member.rank, lab.member.world_size)
    inputs, targets = corpus.batch(step, lab.settings.samples * lab.member.world_size, rank=rank, world_size=ranks)
    return inputs.to(lab.member.device), targets.to(lab.member.device)


def train_alone(lab: Lab[Settings], corpus: ByteCorpus) -> Tensor:
    """Train on the whole batches in one process, rank 0; return its weights on every rank."""
    trainer = Trainer(lab, Rung("one process", lambda model: (model, None), "", 0), None)
    if lab.member.rank == 0:
        losses = [trainer.step(batch_of(lab, corpus, update, whole=True)) for update in range(UPDATES)]
        lab.report.measured("one process: loss before the first update", losses[0])
        lab.report.measured(f"one process: loss before update {UPDATES}", losses[-1])
    wanted = parameters_to_vector(trainer.model.parameters()).detach()
    dist.broadcast(wanted, 0)
    return wanted


def train(
    lab: Lab[Settings], corpus: ByteCorpus, rung: Rung, broadcast: Callable[[nn.Module], None], wanted: Tensor
) -> Trainer | None:
    """Train on the ranks, compare with one process, count calls and bytes; return the trainer when all is right."""
    report = lab.report
    with lab.watched():
        trainer = Trainer(lab, rung, broadcast)
        trainer.step(batch_of(lab, corpus, 0))
    with lab.watched() as seen:  # the second step: DDP makes its buckets after the first
        trainer.step(batch_of(lab, corpus, 1))
    for update in range(2, UPDATES):
        trainer.step(batch_of(lab, corpus, update))
    mine = parameters_to_vector(trainer.model.parameters()).detach()
    difference = lab.slowest(float((mine - wanted).abs().max()))
    first = mine.clone()
    dist.broadcast(first, 0)
    same = lab.everywhere(torch.equal(first, mine))
    equal = difference <= TOLERANCE
    report.fact(f"{rung.name}: equal to one process after {UPDATES} updates", equal, True)
    report.measured(f"{rung.name}: largest difference of a weight", difference)
    report.fact(f"{rung.name}: all ranks hold the same bits", same, True)
    assert seen.records is not None, "the block has ended"
    report_calls(lab, rung, seen.records, mine.nbytes)
    if not (equal and same):
        report.note(f"{rung.name} does not compute what one process computes, so it is not timed.")
        return None
    return trainer


def report_calls(lab: Lab[Settings], rung: Rung, records: Records, gradient_bytes: int) -> None:
    """Report calls and bytes of one step: all-reduces, and what the library's own ring sent."""
    report, ranks = lab.report, records.ranks
    calls = records.num_calls("all_reduce") // len(ranks)
    sent = max(records.payload_bytes(rank, "all_reduce") for rank in ranks)
    if rung.all_reduces is None:
        report.measured(f"{rung.name}: all-reduces a step", calls)
    else:
        report.fact(f"{rung.name}: all-reduces a step", calls, rung.all_reduces)
    if rung.name != "DataParallel":
        report.fact(f"{rung.name}: gradient bytes all-reduced a step", sent, gradient_bytes, "B")
    elif lab.settings.all_reduce == "native":  # its buckets are rounded up to cache lines
        report.measured(f"{rung.name}: bytes all-reduced a step", sent, "B")
    elif len(ranks) == lab.member.world_size:  # chunks differ by up to one element; their sum over ranks does not
        sent = sum(records.sent_bytes(rank) for rank in ranks)
        report.fact(f"{rung.name}: bytes sent by the ring, all ranks", sent, 2 * (len(ranks) - 1) * gradient_bytes, "B")


def time_steps(lab: Lab[Settings], corpus: ByteCorpus, trainers: list[Trainer]) -> None:
    """Time steps of all trainers in turns on the same batches; a step's time is that of its slowest rank."""
    for step in range(UPDATES, UPDATES + 1 + lab.settings.steps):
        batch = batch_of(lab, corpus, step)
        for trainer in trainers:
            dist.barrier()
            start_ns = lab.now_ns()
            trainer.step(batch)
            end_ns = lab.now_ns()
            seconds = lab.slowest((end_ns - start_ns) / 1e9)
            if step > UPDATES:  # the first warms up
                trainer.rung.step_s.append(seconds)
                if seconds <= statistics.median(trainer.rung.step_s):
                    trainer.rung.window_ns = (start_ns, end_ns)


def report_times(lab: Lab[Settings], alone: Trainer, right: list[Trainer], measured: Round) -> None:
    """Report step time, exposed communication and samples per second, each with the simulator's prediction."""
    num_ranks, settings, report = lab.member.world_size, lab.settings, lab.report
    if lab.member.rank > 0:  # rank 0 speaks for all; ranks that share cores would wait for each other's predictions
        for rung in (trainer.rung for trainer in right if trainer.rung.name == "overlap"):
            lab.mark_step(*rung.window_ns)
        return
    tokens = torch.zeros(settings.samples, settings.model.context, dtype=torch.int64, device=lab.member.device)
    model, samples = alone.model, settings.samples
    workload = workload_from_module(
        model, lambda: GPT.loss(model(tokens), tokens), optimizer=alone.optimizer, samples=samples, name="small GPT"
    )
    local_s = predict(workload, measured, 1, "flat", settings.bucket_bytes).duration_s
    report.measured("no averaging: step", statistics.median(alone.rung.step_s), "s", predicted=local_s)
    for rung in (trainer.rung for trainer in right):
        step = predict(workload, measured, num_ranks, rung.gradient_sync, settings.bucket_bytes)
        said_s, step_s = step.duration_s, statistics.median(rung.step_s)
        longer_s = statistics.median(a - b for a, b in zip(rung.step_s, alone.rung.step_s, strict=True))
        report.measured(f"{rung.name}: step", step_s, "s", predicted=said_s)
        report.measured(f"{rung.name}: exposed communication", max(longer_s, 0.0), "s", predicted=said_s - local_s)
        report.measured(f"{rung.name}: throughput", settings.samples * num_ranks / step_s, "samples/s")
        if rung.name == "overlap":
            lab.mark_step(*rung.window_ns, predicted=step.trace.from_zero())
    if settings.all_reduce == "ring":
        report.note("The ring runs after backward; predictions of DataParallel use torch's all_reduce, in buckets.")
    report.note("Exposed communication: how much longer a step takes than one without averaging (median difference).")
    report.note("Predictions come from a calibration in this run, before and after the timed steps.")


def predict(workload: Workload, measured: Round, num_ranks: int, gradient_sync: str, bucket_bytes: int) -> Step:
    """Simulate a step of the workload on this machine, as the calibration saw it."""
    plan = Plan(data=num_ranks, gradient_sync=gradient_sync, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
    return simulate(workload, fit_cluster(measured, num_ranks), plan)


if __name__ == "__main__":
    main("03", Settings, run)
