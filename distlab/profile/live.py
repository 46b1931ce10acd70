"""Profiler: a rank marks the sections of its steps while they run, and the marks of all ranks come together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup

from distlab.comm import clock_offsets_ns, recorded
from distlab.comm.device import is_gpu, span_writer
from distlab.comm.record.read import Call
from distlab.comm.record.recorder import Recording
from distlab.comm.together import together
from distlab.profile.profile import Profile
from distlab.profile.sections import KIND_OF, STEP
from distlab.trace import SpanWriter, Trace, merge, rank_file, save_clocks, save_trace

Batch = TypeVar("Batch")


class Profiler:
    """Note what this rank does in each step, and what it sends.

        profiler = Profiler()
        for inputs, targets in profiler.steps(batches):
            with profiler.section("forward"):
                loss = loss_of(model(inputs), targets)
            with profiler.section("backward"):
                loss.backward()
            with profiler.section("sync"):
                replicas.synchronize()
            with profiler.section("optimizer"):
                optimizer.step()
        print(report(profiler.profile()))

    On a CPU every call to torch.distributed is recorded, also those of torch's own DDP and FSDP; what DDP waits inside
    of backward, in C++, counts as backward. On a GPU sections have the times of its events, and the calls are those of
    techniques that get `spans=profiler.spans`. For other programs read torch.profiler's traces, in which these sections
    appear too.

    Args:
        device: where this rank computes.
        skip: steps that warm up, which are not noted; what `spans` held before is forgotten with them.
        spans: where sections are marked; None: in spans of its own.

    Attributes:
        spans: what this rank marks.

    Cost: one span per section and step, and what recording costs per call; `benchmarks/profiling.py` measures both.
    """

    def __init__(self, device: torch.device | str = "cpu", *, skip: int = 1, spans: SpanWriter | None = None) -> None:
        self._device, self._skip = torch.device(device), skip
        self._rank = dist.get_rank()
        self.spans = span_writer(self._rank, self._device) if spans is None else spans
        self._calls: list[Trace] = []
        self._recorded = ExitStack()
        self._recording: Recording | None = None
        self._count = itertools.count()

    def steps(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, one per step; getting a batch is the step's section "data"."""
        source, now = iter(batches), self.spans.clock.now
        try:
            for number in self._count:
                if number == self._skip:
                    self.spans.clear()  # what warmed up
                if number >= self._skip and self._recording is None and not is_gpu(self._device):
                    self._recording = self._recorded.enter_context(recorded(self._rank))
                begin = now()
                try:
                    with self.section("data"):
                        batch = next(source)
                except StopIteration:
                    return
                yield batch
                self._look()
                if number >= self._skip:
                    self.spans.add(f"step {number}", STEP, begin, now(), lane=STEP)
        finally:
            self._stop()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Mark a section of a step: "data", "forward", "backward", "sync" or "optimizer".

        Raises:
            ValueError: there is no such section.
        """
        if name not in KIND_OF:
            raise ValueError(f"rank {self._rank}: no section is called {name!r}; choose from {', '.join(KIND_OF)}")
        with record_function(name), self.spans.span(name, KIND_OF[name]):
            yield
            self._look()

    def trace(self) -> Trace:
        """Return what this rank did in the steps so far, on its own clock.

        Raises:
            RuntimeError: no step was noted.
        """
        own = self.spans.trace()
        steps = own.select(own.is_word("kind", STEP))
        if not len(steps):
            raise RuntimeError(
                f"rank {self._rank}: no step was noted; loop over profiler.steps(batches), the first {self._skip} of "
                "which are skipped"
            )
        both = Trace.concatenate([own, *self._calls])
        first, last = steps.start_ns.min(), steps.end_ns.max()
        return both.select((both.start_ns >= first) & (both.end_ns <= last))

    def profile(self, group: ProcessGroup | None = None) -> Profile:
        """Merge the steps of all ranks, on the clock of the first; every rank of the group calls this.

        Raises:
            RuntimeError: on every rank, when one has noted no step.
        """
        traces = together(self.trace, group, what="profile the steps")
        return Profile.of(merge(traces, clock_offsets_ns(group)))

    def save(self, folder: str | Path, group: ProcessGroup | None = None) -> None:
        """Save the steps of all ranks in a folder, for `distlab profile FOLDER`; every rank calls this."""
        offsets = clock_offsets_ns(group)

        def write() -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            save_trace(self.trace(), rank_file(folder, self._rank))

        together(write, group, what="save the profile")
        if dist.get_rank(group) == 0:
            save_clocks(offsets, folder)

    def _look(self) -> None:
        if self._recording is not None and self._recording.recorder is not None:
            self._recording.recorder.look()

    def _stop(self) -> None:
        self._recorded.close()
        if self._recording is not None and self._recording.records is not None:
            self._calls.append(self._recording.records.to_trace(_lane))
        self._recording = None


def _lane(call: Call) -> str:
    """Return the lane of a call: one for each group, and for each pair of ranks that send."""
    if call.op in ("send", "recv"):
        return f"{call.rank} to {call.peer}" if call.op == "send" else f"{call.peer} to {call.rank}"
    is_all = len(call.group) == dist.get_world_size()
    return "communication" if is_all else f"communication of ranks {call.group}"
