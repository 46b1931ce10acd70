"""Record every call that a rank makes to torch.distributed, where a launcher can read it while the rank hangs.

with recorded() as seen:
    dist.all_reduce(x)
print(seen.records.ops(rank), seen.records.ring_equivalent_bytes(rank))
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm.record.file import Known, RecordWriter
from distlab.comm.record.intercept import FrontEnd
from distlab.comm.record.matching import channel_of, fingerprint_of
from distlab.comm.record.operations import Operation, Terms, describe_shapes, num_bytes_of, ring_bytes, tensors_in
from distlab.comm.record.read import Records, read_records
from distlab.comm.where.frames import Site

MAX_KNOWN = 8192


class Recorder:
    """Write this rank's calls to `folder/rank{rank}.rec` between start() and stop().

    It sees every call: those of Python code, of DDP's C++ reducer, of FSDP and of functional collectives. Several
    recorders may be on at once. Cost: about 30 us per call on gloo (benchmarks/recorder.py measures it).
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        self.folder, self.rank = Path(folder), rank
        self._writer = RecordWriter(folder, rank)
        self._known: dict[tuple[Any, ...], Known] = {}
        self._on = False

    def start(self) -> Recorder:
        """Begin to record; when it is on already, nothing changes."""
        if not self._on:
            self._on = True
            FrontEnd.add(self)
        return self

    def stop(self) -> None:
        """Stop recording; the last recorder to stop leaves torch as it was found."""
        if self._on:
            self._on = False
            FrontEnd.remove(self)

    def look(self) -> None:
        """Note which asynchronous calls are over by now; else this is noted when the next call is made."""
        FrontEnd.look()

    def reset(self) -> None:
        """Forget all calls and begin a new job, numbers from 1; on or off stays as it is."""
        self._known.clear()
        self._writer.reset()

    def finish(self) -> None:
        """Let those who watch know that this rank makes no more calls in this job."""
        self._writer.finish()

    def close(self) -> None:
        """Stop, and close the files; they stay readable."""
        self.stop()
        self._writer.close()

    def __enter__(self) -> Recorder:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def call(
        self, operation: Operation, group: Any, data: Any, terms: Terms, site: Site, aside: bool
    ) -> tuple[RecordWriter, int]:
        """Write down a call that is about to be made (called by the front end)."""
        if type(data) is Tensor:
            first: Tensor | None = data
            shape: Any = (data.shape, data.dtype)
        else:
            tensors = list(tensors_in(data))
            first, shape = tensors[0] if tensors else None, tuple([(t.shape, t.dtype) for t in tensors])
        key = (site, group.group_name, terms, operation.operator, shape)
        known = self._known.get(key)
        sparse = first is not None and first.layout is not torch.strided  # its bytes are not a matter of its shape
        if known is None or sparse:
            if len(self._known) > MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = self._describe(operation, group, list(tensors_in(data)), terms, site)
        return self._writer, self._writer.begin(known, aside)

    def group(self, event: str, what: str = "") -> None:
        """Write down that a group is "begun", "made" or "left" (called by the front end)."""
        self._writer.group(event, what)

    def _describe(self, operation: Operation, group: Any, tensors: list[Tensor], terms: Terms, site: Site) -> Known:
        op, name, size, peer, reduction = operation.op, group.group_name, group.size(), terms.peer, terms.reduction
        try:
            ranks = dist.get_process_group_ranks(group)
        except (KeyError, ValueError):  # a group that torch keeps no list for: number its members
            ranks = list(range(size))
        me, other = ranks[group.rank()], ranks[peer] if 0 <= peer < len(ranks) else -1
        is_pair, members = op in ("send", "recv"), f"{name} {ranks}"
        shapes = [(tuple(t.shape), str(t.dtype)) for t in tensors]
        num_bytes = sum(map(num_bytes_of, tensors))
        sent = ring_bytes(op, num_bytes, size, is_root=me == other, before_root=group.rank() == (peer - 1) % size)
        what = describe_shapes(tensors) + (f", tag {terms.tag}" if is_pair and terms.tag else "")
        what += f", {reduction}" if reduction not in ("", "sum") else ""
        what += ", gives {}, takes {}".format(*map(list, terms.splits)) if terms.splits else ""
        text = self._writer.text
        via = text(f"{site[2]}:{site[3]}") if site[2] else 0
        meets = channel_of(members, op, me, other, terms.tag), fingerprint_of(op, other, shapes, reduction)
        texts = (text(f"{site[0]}:{site[1]}"), via, text(what), text(members))
        parties = (2 if other >= 0 else 0) if is_pair else size
        return Known.of(op, *meets, (num_bytes, sent), texts, other, parties)


@dataclass
class Recording:
    """What a block sees that records its calls: `records` is there after the block."""

    records: Records | None = None
    recorder: Recorder | None = None


@contextmanager
def recorded(rank: int | None = None) -> Iterator[Recording]:
    """Record this rank's own calls inside a with block, for tests and grading.

    Args:
        rank: the rank to write down; torch.distributed's own by default.
    """
    with tempfile.TemporaryDirectory(prefix="recorded-") as folder:
        recorder = Recorder(folder, dist.get_rank() if rank is None else rank).start()
        recording = Recording(recorder=recorder)
        try:
            yield recording
        finally:
            recorder.stop()
            recording.records = read_records(folder)
            recorder.close()
