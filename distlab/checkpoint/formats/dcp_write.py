"""Write torch.distributed.checkpoint's layout: what `torch.distributed.checkpoint.load` and FSDP2 take up.

A directory has a file per rank, in which tensors lie one after the other as torch.save writes them, and `.metadata`: a
pickle that says which box of which tensor lies where. Ranks write what they hold, and of equal copies only one is
written, so nothing is gathered but names. A shard is a row of elements, and the layout knows boxes alone, so a row that
begins in the middle of a matrix becomes a few boxes.

The layout has no checksums, and torch loads a flipped bit without a word. `SHA256SUMS` stands next to the files: torch
ignores it, `sha256sum -c` and our reader check it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from distlab.checkpoint import files
from distlab.checkpoint.formats import by_names
from distlab.checkpoint.formats.by_names import Box, Held, Roots, held_by
from distlab.checkpoint.manifest import CheckpointError, FileRecord
from distlab.checkpoint.parts import Parts
from distlab.comm.together import place_in, together

METADATA = ".metadata"
SUMS = "SHA256SUMS"


class Said(NamedTuple):
    """What a rank tells of a box: everything but the values."""

    path: by_names.Path
    shape: tuple[int, ...]
    corner: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


class Written(NamedTuple):
    """Where a saved value stands: in which rank's file, and from which byte (`start`) on."""

    path: by_names.Path
    corner: tuple[int, ...] | None
    file: str
    start: int
    num_bytes: int


def write_dcp(
    directory: str | Path,
    parts: Parts,
    *,
    group: ProcessGroup | None = None,
    model: str = "model",
    optimizer: str = "optimizer",
) -> Path:
    """Write parts in torch.distributed.checkpoint's layout; every rank of the group calls it.

    Any of torch's programs reads it: `dcp.load` into plain tensors or DTensors, at any number of ranks. Names are those
    of `get_state_dict`: `model.<name>`, `optimizer.state.<name>.exp_avg`, `optimizer.param_groups.0.lr`.

    Args:
        directory: a new one; it appears when it is complete.
        parts: as of `save`: modules, optimizers, sharded parts, schedules. A plain optimizer needs its module. The
            model and the optimizer of a sharded part go under the two names below, other parts under their own.
        group: the ranks.
        model: where a sharded part's model goes; "" for the top.
        optimizer: where its optimizer goes.

    Cost: nothing is sent but names and places; each rank writes what it holds, equal copies once.
    Error: exact.

    Raises:
        ValueError: on every rank: a part's state cannot be named.
        CheckpointError: on every rank: the directory exists, or a rank cannot write. Nothing is left behind.
    """
    rank, _ = place_in(group)
    target = Path(directory)
    prepared = target.parent / f".saving-{target.name}"

    def everywhere(action: Any) -> list[Any]:
        return together(action, group, what=f"write {str(target)!r}", failure=CheckpointError)

    held_here: list[Held] = []

    def look() -> tuple[list[Said], Any, Any, Any]:
        held_here.append(held_by(parts, Roots(model, optimizer), rank))
        held = held_here[0]
        return [_said(box) for box in held.boxes], held.groups, held.aliases, list(held.values)

    told = everywhere(look)
    held = held_here[0]
    everywhere(lambda: _begin(target, prepared) if rank == 0 else None)
    try:
        own = choose_writers([said for said, *_ in told])[rank]
        values = _values_of(rank, held, told)
        results = everywhere(lambda: _write(prepared, f"__{rank}_0.distcp", [held.boxes[i] for i in own], values))
        says = {(one.path, one.corner): one for said, *_ in told for one in said}
        written = [one for found, _ in results for one in found]
        aliases = {other: name for _, _, its, _ in told for other, name in its.items()}
        records = [record for _, record in results]
        everywhere(lambda: _finish(prepared, target, (says, written, aliases), records) if rank == 0 else None)
    except BaseException:
        if rank == 0:
            files.remove(prepared)
        raise
    return target


def _said(box: Box) -> Said:
    value = box.values
    sizes = tuple(value.shape)
    return Said(box.path, box.shape, box.corner, sizes, value.dtype, value.numel() * value.element_size())


def choose_writers(told: Sequence[Sequence[Said]]) -> list[list[int]]:
    """Give each box to one of the ranks that hold it, the one with the least to write; return indices by rank."""
    holders: dict[tuple[by_names.Path, tuple[int, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
    for rank, said in enumerate(told):
        for index, one in enumerate(said):
            holders.setdefault((one.path, one.corner, one.sizes), []).append((rank, index))
    chosen: list[list[int]] = [[] for _ in told]
    load = [0] * len(told)
    for held in holders.values():
        rank, index = min(held, key=lambda pair: (load[pair[0]], pair[0]))
        chosen[rank].append(index)
        load[rank] += told[rank][index].num_bytes
    return chosen


def _values_of(rank: int, held: Held, told: Sequence[Any]) -> dict[by_names.Path, Any]:
    """Return the plain values that this rank writes: those that no earlier rank has; rank 0 the groups of all."""
    earlier = {path for *_, paths in told[:rank] for path in paths}
    values = {path: value for path, value in held.values.items() if path not in earlier}
    if rank != 0:
        return values
    for root in dict.fromkeys(root for _, groups, *_ in told for root in groups):
        merged = by_names.merge_names([groups[root] for _, groups, *_ in told if root in groups])
        for number, one in enumerate(merged):
            options = {key: value for key, value in one.items() if key != "names"}
            for key, value in {**options, "params": one["names"]}.items():
                values[(*root, "param_groups", number, key)] = value
    return values


def _begin(target: Path, prepared: Path) -> None:
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{str(target)!r} exists; nothing is overwritten: choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    files.remove(prepared)
    prepared.mkdir()


def _write(
    prepared: Path, name: str, boxes: Sequence[Box], values: dict[by_names.Path, Any]
) -> tuple[list[Written], FileRecord]:
    if not prepared.is_dir():
        raise OSError(
            f"{prepared} was made by rank 0 and is not seen here; write to a file system that all ranks share"
        )
    found = []
    with files.new_file(prepared / name) as file:
        start = 0
        items = [*((box.path, box.corner, box.values) for box in boxes), *((p, None, v) for p, v in values.items())]
        for path, corner, value in items:
            stream = io.BytesIO()
            torch.save(value.cpu().clone() if isinstance(value, torch.Tensor) else value, stream)
            num_bytes = file.write(stream.getbuffer())
            found.append(Written(path, corner, name, start, num_bytes))
            start += num_bytes
        return found, file.finish(name)


def _finish(prepared: Path, target: Path, what: tuple[Any, ...], records: Sequence[FileRecord]) -> None:
    metadata = pickle.dumps(_metadata(*what), protocol=4)
    with files.new_file(prepared / METADATA) as file:
        file.write(metadata)
        sums = [*records, file.finish(METADATA)]
    files.write_bytes(prepared, SUMS, "".join(f"{one.sha256}  {one.name}\n" for one in sums).encode())
    files.flush_directory(prepared)
    prepared.rename(target)
    files.flush_directory(target.parent)


def _metadata(says: dict[Any, Said], written: Sequence[Written], aliases: dict[by_names.Path, by_names.Path]) -> Any:
    """Return torch's own record of a checkpoint: what is in it, how it is nested, and where it lies."""
    from torch.distributed.checkpoint import metadata as torchs
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    others: dict[by_names.Path, list[by_names.Path]] = {}
    for other, path in aliases.items():
        others.setdefault(path, []).append(other)
    items: dict[str, Any] = {}
    nesting, places = {}, {}
    for one in written:
        for path in [one.path, *others.get(one.path, ())]:
            name = ".".join(map(str, path))
            nesting[name] = path
            info = _StorageInfo(one.file, one.start, one.num_bytes)
            if one.corner is None:
                items[name] = torchs.BytesStorageMetadata()
                places[torchs.MetadataIndex(name)] = info
                continue
            said = says[one.path, one.corner]
            whole = torchs.TensorStorageMetadata(torchs.TensorProperties(said.dtype), torch.Size(said.shape), [])
            chunks = items.setdefault(name, whole).chunks
            places[torchs.MetadataIndex(name, one.corner, len(chunks))] = info
            chunks.append(torchs.ChunkStorageMetadata(torch.Size(one.corner), torch.Size(said.sizes)))
    return torchs.Metadata(items, nesting, places, torchs.StorageMeta(), "1.0.0")
