"""A double of `torch.cuda` that proves the order of work on a GPU, without a GPU.

`with fake_gpu() as gpu:` takes every tensor of the CPU for one of a GPU, and the collectives of gloo for nccl's. Work
runs at once, as ever; what the double follows is what a GPU would be *free* to do. Each stream has a vector clock (how
far every stream must be when this one goes on), and so have events, calls of torch.distributed and the host. Each
operator is an access to its tensors' storages, each as a whole, in the current stream. Two accesses to one storage, one
of them a write, that no event orders are a race: on a GPU the numbers could be wrong. (Parts of a storage that are sent
while others are written, as in a ring, look like one.) So is memory that is freed while a second stream may still use
it. The host's waits are written down.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from distlab.comm import device, p2p

Clock = Counter[str]
READ_BY_HOST = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "masked_select")
MAKES_MEMORY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_to_copy")


class FakeStream:
    """A queue: what runs in it comes after all that its clock holds."""

    def __init__(self, gpu: FakeGPU, name: str) -> None:
        self.gpu, self.name, self.clock = gpu, name, Clock()

    def wait_event(self, event: FakeEvent) -> None:
        self.clock |= event.clock

    def wait_stream(self, other: FakeStream) -> None:
        self.clock |= other.clock

    def synchronize(self) -> None:
        self.gpu.host_waits(f"stream {self.name}", self.clock)


class FakeEvent:
    """A place in a stream."""

    def __init__(self, gpu: FakeGPU) -> None:
        self.gpu, self.clock, self.stream = gpu, Clock(), ""

    def record(self, stream: FakeStream) -> None:
        self.clock, self.stream = Clock(stream.clock), stream.name

    def synchronize(self) -> None:
        self.gpu.host_waits(f"event of {self.stream}", self.clock)

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(sum(other.clock.values()) - sum(self.clock.values()))


class Memory:
    """Who used a storage, and in which stream it was allocated."""

    def __init__(self, storage: Any, stream: str, on_host: bool) -> None:
        self.alive = StorageWeakRef(storage)
        self.stream, self.on_host = stream, on_host
        self.written: tuple[str, int, str] | None = None
        self.reads: dict[str, tuple[int, str]] = {}
        self.kept_for: set[str] = set()  # streams that record_stream named


class FakeGPU:
    """What `torch.cuda` is for the seam, and what it saw.

    Attributes:
        races: accesses that nothing orders, in words.
        waits: what the host waited for, in order.
        pinned: number of pinned buffers that were made.
        launched: (stream, operator) in order, of calls of torch.distributed and of copies between host and GPU.
    """

    def __init__(self, deaf_to: str) -> None:
        self.deaf_to = deaf_to
        self.races: list[str] = []
        self.waits: list[str] = []
        self.pinned = 0
        self.launched: list[tuple[str, str]] = []
        self.host = FakeStream(self, "host")
        self._streams = [FakeStream(self, "compute")]
        self._nccl: dict[str, FakeStream] = {}
        self._num_streams = 0
        self._memory: dict[int, Memory] = {}
        self._works: dict[Any, tuple[bool, Clock]] = {}

    # What the seam asks of torch.cuda

    def Stream(self, place: Any = None) -> FakeStream:
        self._num_streams += 1
        made = FakeStream(self, f"stream {self._num_streams}")
        made.clock |= self.host.clock
        return made

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self, place: Any = None) -> FakeStream:
        return self._streams[-1]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    def synchronize(self, place: Any = None) -> None:
        for stream in (*self._streams, *self._nccl.values()):
            self.host_waits(f"device, {stream.name}", stream.clock)

    def is_available(self) -> bool:
        return False  # the host's generators are used

    def pinned_empty(self, size: Any, dtype: torch.dtype) -> torch.Tensor:
        self.pinned += 1
        made = torch.empty(size, dtype=dtype)
        self._memory[made.untyped_storage()._cdata] = Memory(made.untyped_storage(), "host", on_host=True)
        return made

    # What happens

    def host_waits(self, what: str, clock: Clock) -> None:
        self.waits.append(what)
        self.host.clock |= clock

    def keep(self, tensor: torch.Tensor, stream: FakeStream) -> None:
        self._of(tensor).kept_for.add(stream.name)

    def forget(self) -> None:
        """Begin to look anew: races, waits and launches so far are of no interest."""
        self.races, self.waits, self.launched = [], [], []

    def _of(self, tensor: torch.Tensor, *, on_host: bool = False) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memory.get(storage._cdata)
        if memory is None:
            memory = self._memory[storage._cdata] = Memory(storage, self.current_stream().name, on_host)
            if not on_host:  # memory may be given out while its last owner's kernels still run in this stream
                self._tick(self.current_stream())
                now = self.current_stream().clock[memory.stream]
                memory.written = memory.stream, now, "its allocation"
        return memory

    def _tick(self, stream: FakeStream) -> None:
        stream.clock |= self.host.clock
        stream.clock[stream.name] += 1

    def run(self, stream: FakeStream, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Put one piece of work into a stream and look for what does not come before it as it should."""
        self._look_for_freed()
        self._tick(stream)
        now = stream.clock[stream.name]
        for tensor in (*reads, *writes):
            memory = self._of(tensor)
            if memory.written is not None:
                by, when, before = memory.written
                self._require(stream, by, when, f"{what} in {stream.name} uses what {before} in {by} writes")
        for tensor in writes:
            memory = self._of(tensor)
            for by, (when, before) in memory.reads.items():
                self._require(stream, by, when, f"{what} in {stream.name} writes what {before} in {by} reads")
            memory.written, memory.reads = (stream.name, now, what), {}
        for tensor in reads:
            self._of(tensor).reads[stream.name] = now, what

    def _require(self, stream: FakeStream, by: str, when: int, words: str) -> None:
        if stream.clock[by] < when:
            self.races.append(words)

    def _look_for_freed(self) -> None:
        for key in [key for key, memory in self._memory.items() if memory.alive.expired()]:
            self.free(self._memory.pop(key))

    def free(self, memory: Memory) -> None:
        """Memory goes back to the allocator, which knows one stream: the others must have been waited for."""
        owner = next((one for one in self._streams if one.name == memory.stream), self._streams[0])
        if memory.on_host or owner.name != memory.stream:
            return
        writes = [] if memory.written is None else [memory.written]
        for by, when, what in [*writes, *((by, *read) for by, read in memory.reads.items())]:
            if by not in memory.kept_for:
                self._require(owner, by, when, f"memory of {owner.name} is freed while {what} in {by} may use it")

    def communicate(self, op: str, group: str, tensors: list[torch.Tensor], result: Any) -> None:
        """A call of torch.distributed: nccl's stream waits for the current one, and not the other way round.

        Tensors in the host's memory travel by gloo, whose calls the host waits for, and no stream.
        """
        by_host = False not in [self._of(tensor).on_host for tensor in tensors]  # all are known before nccl waits
        name = f"gloo {group}" if by_host else f"nccl {group}"
        stream = self._nccl.setdefault(name, FakeStream(self, name))
        stream.clock |= (self.host if by_host else self.current_stream()).clock
        self.launched.append((stream.name, op))
        self.run(stream, op, *((tensors, []) if op.startswith("send") else ([], tensors)))
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        if boxed is not None and op not in self.deaf_to.split():
            self._works[dist.Work.unbox(boxed)] = by_host, Clock(stream.clock)

    def wait(self, work: Any, *, look: bool = False) -> None:
        if work in self._works:
            by_host, clock = self._works[work] if look else self._works.pop(work)  # a wait frees its tensors
            waiting = self.host if by_host else self.current_stream()
            waiting.clock |= clock


class Watch(TorchDispatchMode):
    """Shows every operator to the double."""

    def __init__(self, gpu: FakeGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = kwargs or {}, self.gpu
        given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        if any(one.is_meta for one in given):  # shapes alone: nothing is computed
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        result = func(*args, **kwargs)
        op = func._schema.name.split("::")[1]
        if func.namespace == "c10d":
            index = names.index("process_group")
            gpu.communicate(op, dist.ProcessGroup.unbox(args[index]).group_name, given, result)
            return result
        self._follow(func, op, names, (args, kwargs, given), result)
        return result

    def _follow(self, func: Any, op: str, names: list[str], call: Any, result: Any) -> None:
        gpu, (args, kwargs, given) = self.gpu, call
        made = [one for one in tree_flatten(result)[0] if isinstance(one, torch.Tensor)]
        storages = {one.untyped_storage()._cdata for one in given}
        written = []
        for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
            info = func._schema.arguments[names.index(name)].alias_info
            if info is not None and info.is_write:
                written += [one for one in tree_flatten(value)[0] if isinstance(one, torch.Tensor)]
        fresh = [one for one in made if one.untyped_storage()._cdata not in storages]
        if not written and not fresh and made:
            return  # a view
        on_host = [one for one in given if gpu._of(one).on_host]
        if given and len(on_host) == len(given):
            for one in fresh:
                gpu._of(one, on_host=True)
            gpu.run(gpu.host, op, given, written + fresh)
            return
        if op in READ_BY_HOST and not on_host:
            gpu.host_waits(op, gpu.current_stream().clock)
        if on_host and op == "copy_":
            gpu.launched.append((gpu.current_stream().name, "copy"))
        gpu.run(gpu.current_stream(), op, given, written + ([] if op in MAKES_MEMORY and not given else fresh))
        non_blocking = kwargs.get("non_blocking", args[2] if op == "copy_" and len(args) > 2 else False)
        if on_host and op == "copy_" and not non_blocking:
            gpu.host_waits("a copy that blocks", gpu.current_stream().clock)


@contextlib.contextmanager
def fake_gpu(deaf_to: str = "") -> Iterator[FakeGPU]:
    """Take the CPU for a GPU and gloo for nccl here; the waits for `deaf_to`, operators of c10d, are not seen."""
    gpu = FakeGPU(deaf_to)
    real = dist.Work.wait, dist.Work.synchronize, torch.UntypedStorage.resize_
    before = device.cuda, device.GPU_TYPES, device.pinned_empty, p2p._backend

    def wait(work: Any, *args: Any) -> Any:
        with _disable_current_modes():  # gloo may copy its result only now
            done = real[0](work, *args)
        gpu.wait(work)
        return done

    def resize(storage: Any, size: int) -> Any:
        memory = gpu._memory.pop(storage._cdata, None)
        if memory is not None and size == 0:
            gpu.free(memory)
        return real[2](storage, size)

    device.cuda, device.GPU_TYPES, device.pinned_empty = gpu, ("cpu", "cuda"), gpu.pinned_empty
    p2p._backend = lambda config, kind: "nccl"
    dist.Work.wait, torch.UntypedStorage.resize_ = wait, resize
    dist.Work.synchronize = lambda work: gpu.wait(work, look=True)
    torch.Tensor.record_stream = lambda tensor, stream: gpu.keep(tensor, stream)
    try:
        with Watch(gpu):
            yield gpu
    finally:
        device.cuda, device.GPU_TYPES, device.pinned_empty, p2p._backend = before
        dist.Work.wait, dist.Work.synchronize, torch.UntypedStorage.resize_ = real
        del torch.Tensor.record_stream
