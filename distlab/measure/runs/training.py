"""Train the small GPT on real ranks in windows, with a calibration round before and after each window.

The machine's speed drifts, so a prediction is only as good as the calibration beside it: round, window, round, window,
..., round. What a window measures is compared with what its two neighbouring rounds predict.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from statistics import median

import torch
import torch.distributed as dist

from distlab.measure.count.module import workload_from_module
from distlab.measure.machine.once import on_first_rank
from distlab.measure.machine.speed import Round, fit_cluster, measure_round, median_round, now
from distlab.measure.runs.beside import BusyRanks
from distlab.measure.runs.calls import CallTimes, links_of, measure_calls, median_calls, without_accumulation
from distlab.measure.runs.codec_beside import BusyCodec
from distlab.measure.runs.compression import measure_codec, median_codec
from distlab.measure.runs.programs import device_of, make_program
from distlab.measure.runs.timed import Batch, batches_of, sgd, time_windows
from distlab.measure.runs.windows import Window, windows_between
from distlab.models import GPT, GPTConfig
from distlab.plan import Plan, Sharding, Work, Workload
from distlab.plan.compression import Compression
from distlab.trace import SpanWriter, Trace
from simulator import Measured, MeasuredCodec, Step, simulate


@dataclass(frozen=True)
class Training:
    """A training run of the small GPT, the same in one process and on any number of ranks.

    Attributes:
        model: sizes of the GPT.
        batch_size: samples of a step over all ranks.
        seed: of the weights and of the order of the data.
        device: where ranks compute: "cpu" or "cuda".
        num_updates: updates after which weights are compared with one process.
        num_windows: calm windows of steps to time after that; 0 for none.
        steps_a_window: steps in a window.
        budget_s: seconds after which no further window starts.
        bucket_bytes: capacity of a gradient bucket.
        first_bucket_bytes: capacity of the first bucket.
        num_microbatches: parts of a rank's batch whose gradients are accumulated; only the last part's backward sends.
        compression: what ranks send in place of their gradients.
        sharding: which states the ranks split among them; its units are blocks.
    """

    model: GPTConfig
    batch_size: int
    seed: int = 0
    device: str = "cpu"
    num_updates: int = 10
    num_windows: int = 10
    steps_a_window: int = 4
    budget_s: float = 36.0
    bucket_bytes: int = 1_000_000
    first_bucket_bytes: int = 250_000
    num_microbatches: int = 1
    compression: Compression | None = None
    sharding: Sharding = Sharding()


@dataclass
class RankReport:
    """What one rank saw.

    Attributes:
        losses: mean loss over all ranks, before each update and after each window.
        weights: a copy of the model's parameters after num_updates updates, by name, on the CPU.
        workload: what the model asks of a device at this rank's batch.
        rounds: calibration rounds, one more than windows.
        codecs: encoding and decoding as timed alone in each round, where gradients are compressed.
        codec_slowdowns: how much slower these are in a step, as seen in each round.
        calls: gathers and scatters as timed in each round, where states are sharded.
        measured_s: seconds of a step in each window, the mean over its steps and over all ranks.
        step_ns: start and end of each timed step on the machine's monotonic clock.
        trace: what the rank did: forward, backward, optimizer, waiting, and each bucket's way.
    """

    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    workload: Workload | None = None
    rounds: list[Round] = field(default_factory=list)
    codecs: list[MeasuredCodec] = field(default_factory=list)
    codec_slowdowns: list[float] = field(default_factory=list)
    calls: list[CallTimes] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    step_ns: list[tuple[int, int]] = field(default_factory=list)
    trace: Trace = field(default_factory=lambda: Trace.from_spans([]))


def train(training: Training, data: bytes, progress: Callable[[int], None] = lambda done: None) -> RankReport:
    """Run on every rank: train, keep the weights after num_updates updates, then time windows of further steps."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = device_of(training.device, rank)
    model = GPT(training.model, torch.Generator().manual_seed(training.seed + rank)).to(device)
    spans = SpanWriter(rank)
    program = make_program(  # starts from rank 0's weights
        model,
        sgd,
        sharding=training.sharding,
        compression=training.compression,
        bucket_bytes=training.bucket_bytes,
        first_bucket_bytes=training.first_bucket_bytes,
        spans=spans,
    )
    batches = batches_of(training, data, device, rank=rank, world_size=world_size)
    report = RankReport()

    def step(batch: Batch) -> torch.Tensor:
        program.zero_grad()
        total = torch.zeros((), device=device)
        parts = _microbatches(training, batch)
        for index, (inputs, targets) in enumerate(parts):
            last = index == len(parts) - 1
            with contextlib.nullcontext() if last else program.no_sync():
                with _on_device(spans, "forward", "F", device):
                    loss = model.loss(program.model(inputs), targets) * (len(inputs) / len(batch[0]))
                with _on_device(spans, "backward", "B", device):
                    loss.backward()
            total += loss.detach()
        with _on_device(spans, "synchronize", "wait", device):
            program.synchronize()
        with _on_device(spans, "optimizer", "optimizer", device):
            program.update()
        return total

    for update in range(training.num_updates):
        report.losses.append(_mean_over_ranks(step(next(batches))))
        progress(update + 1)
    report.weights = program.weights()
    if training.num_windows:
        first = _microbatches(training, next(batches))[0]
        report.workload = on_first_rank(lambda: _count(training, *first))
        _time_windows(training, report, step, batches, progress=progress)
    report.trace = spans.trace()
    return report


def _count(training: Training, inputs: torch.Tensor, targets: torch.Tensor) -> Workload:
    """Count the work of a rank's step on a model of its own, which no hook watches."""
    model = GPT(training.model).to(inputs.device)
    optimizer = sgd(list(model.parameters()))
    counted = workload_from_module(
        model, lambda: model.loss(model(inputs), targets), optimizer=optimizer, samples=len(inputs), name="small GPT"
    )
    return without_accumulation(counted) if training.sharding.stage else counted


def _time_windows(
    training: Training,
    report: RankReport,
    step: Callable[[Batch], torch.Tensor],
    batches: Iterator[Batch],
    *,
    progress: Callable[[int], None],
) -> None:
    """Time windows between calibration rounds until enough of them are calm, or time is up."""
    device = device_of(training.device, dist.get_rank())
    works: dict[str, Work] = {}
    busy = BusyRanks(training.sharding, device) if training.sharding.stage else None
    codec = BusyCodec(training.compression, device) if training.compression is not None else None

    def calibrate() -> None:
        report.rounds.append(measure_round(device, works=works))
        if codec is not None:
            cluster = fit_cluster(report.rounds[-1], dist.get_world_size())
            report.codecs.append(measure_codec(codec.compression, cluster, device=device))
            report.codec_slowdowns.append(codec.measure(report.rounds[-1], report.codecs[-1]))
        if busy is not None:
            report.calls.append(busy.measure(report.rounds[-1], measure_calls(device)))

    def window() -> float:
        step(next(batches))  # a warm cache, as in the middle of training
        ready = [next(batches) for _ in range(training.steps_a_window)]
        dist.barrier()
        begin = now(device)
        for batch in ready:
            start_ns = time.monotonic_ns()
            loss = step(batch)
            report.step_ns.append((start_ns, time.monotonic_ns()))
        seconds = torch.tensor((now(device) - begin) / training.steps_a_window, dtype=torch.float64)
        report.losses.append(_mean_over_ranks(loss))
        return _mean_over_ranks(seconds.to(device))

    time_windows(
        training,
        report,
        window=window,
        calibrate=calibrate,
        windows_from=lambda start: windows_of(training, report, dist.get_world_size(), start=start),
        progress=progress,
    )


def windows_of(training: Training, report: RankReport, num_ranks: int, *, start: int = 0) -> list[Window]:
    """Predict each window from number `start` on, from the calibrations around it.

    A window's speeds come from the two rounds before it and the two after it. How much computing and communicating slow
    each other down, in general, at each of sharding's calls and in a codec, is a difference of times, hard to measure
    and slow to drift: it is the median of all rounds.
    """
    contention = median_round(report.rounds).contention
    beside = median_calls(report.calls).beside if report.calls else ()
    slowdown = median(report.codec_slowdowns) if report.codec_slowdowns else 1.0
    assert report.workload is not None, "windows are timed after the workload was counted"
    workload = report.workload

    def predicted_s(first: int, stop: int) -> float:
        speeds = replace(median_round(report.rounds[first:stop]), contention=contention)
        codec = median_codec(report.codecs[first:stop]).slower(slowdown) if report.codecs else None
        calls = replace(median_calls(report.calls[first:stop]), beside=beside) if report.calls else None
        return predict(training, workload, speeds, num_ranks, codec=codec, calls=calls).duration_s

    return windows_between(report.measured_s, predicted_s, start=start)


def predict(
    training: Training,
    workload: Workload,
    measured: Round,
    num_ranks: int,
    *,
    codec: MeasuredCodec | None = None,
    calls: CallTimes | None = None,
) -> Step:
    """Simulate a step of the workload on this machine, as a calibration round saw it."""
    plan = Plan(
        data=num_ranks,
        gradient_sync="overlapped",
        bucket_bytes=training.bucket_bytes,
        first_bucket_bytes=training.first_bucket_bytes,
        num_microbatches=training.num_microbatches,
        compression=training.compression,
        sharding=training.sharding,
    )
    apart = Measured(codec, {} if calls is None else links_of(calls, num_ranks))
    return simulate(workload, fit_cluster(measured, num_ranks), plan, measured=apart)


@contextlib.contextmanager
def _on_device(spans: SpanWriter, name: str, kind: str, device: torch.device) -> Iterator[None]:
    """Mark a span that ends when the device has done the work, not when the work has been handed to it."""
    with spans.span(name, kind=kind):
        yield
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _microbatches(training: Training, batch: Batch) -> list[Batch]:
    """Cut a rank's batch into parts as even as can be."""
    inputs, targets = (part.tensor_split(training.num_microbatches) for part in batch)
    return [(x, y) for x, y in zip(inputs, targets, strict=True) if len(x)]


def _mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
