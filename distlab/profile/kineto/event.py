"""Events of a trace that torch.profiler (Kineto) wrote: what lasts, where, and what calls say about themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from distlab.trace.foreign import durations

CATEGORIES = ("cpu_op", "user_annotation", "kernel", "cuda_runtime", "gpu_memcpy", "gpu_user_annotation")
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
SIZES = {"double": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "short": 2}
KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}
"""Words in the names of calls, the longer ones before those that they contain."""


class Event(NamedTuple):
    """Something that lasted, in nanoseconds, on a thread of the host or a stream of a GPU."""

    start_ns: int
    end_ns: int
    name: str
    category: str
    thread: str
    args: dict[str, Any]


class Range(NamedTuple):
    """A section on the host."""

    start_ns: int
    end_ns: int
    section: str


def is_kineto(document: Any, events: Sequence[Any]) -> bool:
    """Whether torch.profiler wrote the file."""
    if isinstance(document, dict) and ("distributedInfo" in document or "baseTimeNanoseconds" in document):
        return True
    return any(isinstance(event, dict) and event.get("cat") in CATEGORIES for event in events)


def events_of(document: Any, events: Sequence[Any]) -> list[Event]:
    """Return what lasts, on the clock of the file's base time.

    Raises:
        ValueError: an event is damaged.
    """
    base = document.get("baseTimeNanoseconds", 0) if isinstance(document, dict) else 0
    base_ns = base if type(base) is int else 0
    odd = next((event for event in events if not isinstance(event, dict)), None)
    if odd is not None:
        raise ValueError(f"an event is {str(odd)[:40]}; expected an object")
    found = []
    for event, start_ns, end_ns in durations(list(events)):
        if abs(end_ns + base_ns) >= 2**63 or abs(start_ns + base_ns) >= 2**63:
            raise ValueError(f"baseTimeNanoseconds is {str(base_ns)[:40]}; expected nanoseconds since 1970")
        args = event.get("args")
        words = str(event.get("name", "")), str(event.get("cat", "")), f"{event.get('pid')} {event.get('tid')}"
        found.append(Event(start_ns + base_ns, end_ns + base_ns, *words, args if isinstance(args, dict) else {}))
    return found


def is_call(name: str) -> bool:
    """Whether an event is a call of nccl or gloo that is under way."""
    return name.startswith(("nccl", "gloo:"))


def call_kind(name: str, args: dict[str, Any]) -> str:
    """Return the kind of a call, such as "all_reduce" for "nccl:all_reduce" or "ncclDevKernel_AllReduce_Sum_f32"."""
    told = f"{args.get('Collective name', '')} {name}".lower().replace("_", "")
    return next((kind for word, kind in KINDS.items() if word in told), "call")


def num_bytes(call: Event) -> int:
    """Return the bytes that a rank gives to a call, as far as the trace says."""
    elements, dtype = call.args.get("In msg nelems"), str(call.args.get("dtype", "")).lower()
    if type(elements) is int and elements > 0:
        return elements * SIZES.get(dtype, 1)
    shapes, types = call.args.get("Input Dims"), call.args.get("Input type")  # of gloo, with record_shapes=True
    if not isinstance(shapes, list) or not isinstance(types, list):
        return 0
    if not all(isinstance(shape, list) and all(type(size) is int for size in shape) for shape in shapes):
        return 0
    sizes = (SIZES.get(str(kind).lower(), 1) for kind in types)
    return sum(math.prod(shape) * size for shape, size in zip(shapes, sizes, strict=False) if shape)


def lane_of(call: Event, world_size: int) -> str:
    """Return the lane of a call: one for each group of ranks."""
    size, ranks = call.args.get("Group size"), call.args.get("Process Group Ranks")
    return "communication" if ranks is None or size == world_size else f"communication of ranks {ranks}"
