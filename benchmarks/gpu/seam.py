"""The few calls of torch.cuda that the parts need, by the names of `distlab.comm.device`."""

from __future__ import annotations

import torch


def start() -> None:
    """Begin to use GPUs; raises RuntimeError where they cannot be used."""
    torch.cuda.init()


def count() -> int:
    """Return the number of GPUs that torch sees."""
    return torch.cuda.device_count()


def name(place: torch.device | str) -> str:
    """Return a GPU's name."""
    return torch.cuda.get_device_name(place)


def total_bytes(place: torch.device | str) -> int:
    """Return a GPU's memory."""
    return int(torch.cuda.mem_get_info(place)[1])


def free_bytes(place: torch.device | str) -> int:
    """Return what is free of a GPU's memory."""
    return int(torch.cuda.mem_get_info(place)[0])


def capability(place: torch.device | str) -> tuple[int, int]:
    """Return a GPU's compute capability."""
    return torch.cuda.get_device_capability(place)


def nccl_version() -> tuple[int, ...]:
    """Return the version of nccl."""
    return tuple(torch.cuda.nccl.version())


def synchronize(place: torch.device | str) -> None:
    """Wait for all that the device has to do."""
    torch.cuda.synchronize(place)


def event(place: torch.device | str, timing: bool = False) -> torch.cuda.Event:
    """Return an event, recorded now on the current stream."""
    with torch.cuda.device(place):
        made = torch.cuda.Event(enable_timing=timing)
        made.record()
    return made


def seconds_between(first: torch.cuda.Event, last: torch.cuda.Event) -> float:
    """Return the seconds between two events; the host waits for the last."""
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def allocated_bytes(place: torch.device | str) -> int:
    """Return what the allocator has given out now."""
    return torch.cuda.memory_allocated(place)


def peak_bytes(place: torch.device | str) -> int:
    """Return the most that the allocator had given out since `reset_peak`."""
    return torch.cuda.max_memory_allocated(place)


def reset_peak(place: torch.device | str) -> None:
    """Count the peak from now on."""
    torch.cuda.reset_peak_memory_stats(place)


def empty_cache() -> None:
    """Give unused memory back to the device."""
    torch.cuda.empty_cache()
