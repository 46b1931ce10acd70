"""Devices: the one place that talks to `torch.cuda`. Where a device is the CPU, these functions do nothing.

On a GPU the host does not compute: it puts kernels and copies into queues, called streams, and goes on. Work in one
stream runs in order. Two streams run side by side until an event orders them: one stream records the event, the other
waits for it. From this follow the rules that the techniques keep:

- A collective of nccl runs in a stream of its own. It begins after what the current stream held when it was called.
  `work.wait()` makes the current stream wait for it, not the host.
- Copies between host and GPU run in a `CopyStream`, so that kernels need not wait for them. They need pinned memory.
- A tensor that a different stream uses must not be freed too early: its allocator knows one stream only. Keep it
  until the current stream has waited for the other one, or tell the allocator (`CopyStream.keep`).
- The host waits as rarely as it can: each wait (`synchronize`, `tensor.item()`, a copy to memory that is not pinned)
  leaves the GPU without work until the host has filled its queue again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.trace import SpanWriter

cuda = torch.cuda  # every call below goes through this name, so that a test can put a double in its place

GPU_TYPES = ("cuda",)  # and this one
Place = torch.device | str | int


def is_gpu(where: Tensor | torch.device) -> bool:
    """Return whether this device, or this tensor's device, is a GPU."""
    return (where if isinstance(where, torch.device) else where.device).type in GPU_TYPES


# What is there


def is_available() -> bool:
    """Return whether torch sees a GPU and was built for it."""
    return cuda.is_available()


def num_gpus() -> int:
    """Return how many GPUs torch sees."""
    return cuda.device_count()


def name(place: Place) -> str:
    """Return a GPU's name."""
    return str(cuda.get_device_name(place))


def capability(place: Place) -> tuple[int, int]:
    """Return a GPU's compute capability, such as (9, 0)."""
    return cuda.get_device_capability(place)


def nccl_version() -> tuple[int, ...]:
    """Return the version of nccl that torch was built with; () where there is none."""
    return tuple(cuda.nccl.version()) if dist.is_nccl_available() and cuda.is_available() else ()


def total_bytes(place: Place) -> int:
    """Return a GPU's memory."""
    return int(cuda.get_device_properties(place).total_memory)


def free_bytes(place: Place) -> int:
    """Return the memory of a GPU that no process holds."""
    return int(cuda.mem_get_info(place)[0])


# Which one is used


def start() -> None:
    """Begin to use CUDA in this process.

    Raises:
        RuntimeError: there is no driver, it is too old for torch, or no GPU can be used; the text is torch's.
    """
    cuda.init()


def use(place: torch.device) -> None:
    """Make a GPU the current one of this process."""
    if is_gpu(place):
        cuda.set_device(place)


def current() -> torch.device:
    """Return the current GPU."""
    return torch.device("cuda", cuda.current_device())


def device_of(kind: str, rank: int) -> torch.device:
    """Return a rank's device, and make a GPU the current one; ranks share GPUs in turn where there are fewer.

    Raises:
        ValueError: the caller asks for a GPU and there is none.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not is_available():
        raise ValueError(f"device {kind!r} was asked for, and torch sees no GPU here; pass --device cpu")
    place = torch.device("cuda", rank % num_gpus())
    use(place)
    return place


# The host waits


def synchronize(place: torch.device) -> None:
    """Let the host wait until a GPU has done all that it was given."""
    if is_gpu(place):
        cuda.synchronize(place)


def wait_for_event(event: Any) -> None:
    """Let the host wait until an event is reached; None is reached already."""
    if event is not None:
        event.synchronize()


def wait_in_stream(event: Any, place: torch.device) -> None:
    """Make a GPU's current stream wait for an event of a different stream; the host goes on."""
    if event is not None:
        cuda.current_stream(place).wait_event(event)


def event(place: torch.device, *, timing: bool = False) -> Any:
    """Record an event in a GPU's current stream and return it; None on a CPU, which is done already."""
    if not is_gpu(place):
        return None
    made = cuda.Event(enable_timing=timing)
    made.record(cuda.current_stream(place))
    return made


def seconds_between(first: Any, last: Any) -> float:
    """Return the GPU's time between two events with `timing=True`; the host waits for the last."""
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


# Copies between host and GPU


def pinned_empty(size: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory of the host that a GPU can read and write without the host's help."""
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=True)


def host_memory_for(tensor: Tensor) -> Tensor:
    """Return memory of the host for a tensor's values: pinned where the tensor is on a GPU.

    Shapes: any; the same
    """
    if is_gpu(tensor):
        return pinned_empty(tensor.shape, tensor.dtype)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


class CopyStream:
    """A GPU's stream for copies between host and GPU, next to the stream that computes.

    On a CPU there is one stream, the host's own: blocks run where they stand.
    """

    def __init__(self, place: torch.device) -> None:
        self.place = place
        self._stream: Any = cuda.Stream(place) if is_gpu(place) else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """Run the block in this stream, after all that the current stream holds so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(cuda.current_stream(self.place))
        with cuda.stream(self._stream):
            yield

    def keep(self, tensor: Tensor) -> None:
        """Tell the allocator that this stream uses a tensor of a different one, so it is not given away too early."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def to_gpu(self, host: Tensor) -> Tensor:
        """Copy a tensor from the host's memory to the GPU, in the current stream; the host does not wait.

        Shapes: any; the same
        """
        if self._stream is None:
            return host
        return torch.empty(host.shape, dtype=host.dtype, device=self.place).copy_(host, non_blocking=True)


# Memory


def allocated_bytes(place: torch.device) -> int:
    """Return the bytes of a GPU that torch's allocator has given to tensors; 0 on a CPU."""
    return int(cuda.memory_allocated(place)) if is_gpu(place) else 0


def peak_bytes(place: torch.device) -> int:
    """Return the most that `allocated_bytes` was since `reset_peak`; 0 on a CPU."""
    return int(cuda.max_memory_allocated(place)) if is_gpu(place) else 0


def reset_peak(place: torch.device) -> None:
    """Forget the peak of memory so far; from now on a new one is measured."""
    if is_gpu(place):
        cuda.reset_peak_memory_stats(place)


def empty_cache() -> None:
    """Give the memory that torch's allocator keeps for later back to the GPU."""
    if is_available():
        cuda.empty_cache()


# Random numbers


def random_state(place: torch.device | None = None) -> Tensor | None:
    """Return the state of a GPU's own generator (None: the current GPU's, once CUDA is in use); None without one."""
    if place is None:
        return cuda.get_rng_state() if is_available() and cuda.is_initialized() else None
    return cuda.get_rng_state(place) if is_gpu(place) else None


def set_random_state(state: Tensor, place: torch.device | None = None) -> None:
    """Put a GPU's generator back (None: the current GPU's); nothing happens on a machine without a GPU."""
    if is_available():
        cuda.set_rng_state(state, "cuda" if place is None else place)


# Times that the GPU, not the host, saw


class GpuClock:
    """Tells when a GPU's stream was somewhere: the host only records events, and reads their times at the end.

    CUDA gives the time between two events as a float32 of milliseconds: in steps of 10 us after 100 s.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._waiting = cuda.Stream(place)  # holds nothing but waits
        synchronize(place)
        _, self._first_ns, self._first = min((self._meet() for _ in range(5)), key=lambda one: one[0])

    def _meet(self) -> tuple[int, int, Any]:
        """Return how long the host and an idle GPU took to meet, when they did, and the event there."""
        before_ns, made = time.monotonic_ns(), event(self._place, timing=True)
        made.synchronize()
        taken_ns = time.monotonic_ns() - before_ns
        return taken_ns, before_ns + taken_ns // 2, made

    def now(self) -> Moment:
        """Return the moment at which the current stream reaches this place."""
        return Moment(self, event(self._place, timing=True))

    def end_of(self, work: dist.Work) -> Moment:
        """Return the moment at which a call of nccl is over, however late its result is waited for."""
        with cuda.stream(self._waiting):
            work.synchronize()  # what wait() does on nccl, without being taken for the program's own wait
            return Moment(self, event(self._place, timing=True))

    def ns_of(self, made: Any) -> int:
        """Return an event's time on the clock of `time.monotonic_ns`; the host waits for it."""
        made.synchronize()
        return self._first_ns + int(self._first.elapsed_time(made) * 1e6)


class Moment:
    """A time that is known once the GPU was there: `int(moment)` waits for it."""

    __slots__ = ("_clock", "_event")

    def __init__(self, clock: GpuClock, made: Any) -> None:
        self._clock, self._event = clock, made

    def __int__(self) -> int:
        return self._clock.ns_of(self._event)


def span_writer(rank: int, place: torch.device) -> SpanWriter:
    """Return what notes a rank's spans: on a GPU with the times of its events, so that real overlap is seen."""
    return SpanWriter(rank, GpuClock(place) if is_gpu(place) else None)
