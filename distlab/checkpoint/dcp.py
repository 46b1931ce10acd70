"""Write and read torch.distributed.checkpoint's layout: by torch's own planner and writer, and by a reader of our own.

A directory has a file per rank, in which tensors lie one after the other as torch.save writes them, and `.metadata`: a
pickle that says which box of which tensor lies where. Ranks write what they hold, and of equal copies only one is
written, so nothing is gathered but names; a tied tensor is written under each of its names, as torch does. A shard is a
row of elements, and the layout knows boxes alone, so a row that begins in the middle of a matrix becomes a few boxes.

torch sees a run as nested dictionaries: `{"model": {name: tensor}, "optimizer": {"state": {name: {"exp_avg": tensor,
"step": number}}, "param_groups": [{"lr": ..., "params": [names]}]}}`, as its `get_state_dict` returns. Our parts hold
the same as named parts of tensors (`modules.named_parts`). Plain optimizers and the rest are torch's own matter.

torch's reader runs what a pickle asks for, and changes numbers of a different kind without a word. Here `.metadata` is
read by an unpickler that knows torch's records alone, and each box by torch.load with weights_only. `SHA256SUMS` stands
next to the files, since the layout has no checksums: torch ignores it, `sha256sum -c` and our reader check it.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as torchs_save

from distlab.blocks.modules.named_parts import PARAMETER, SavedShard
from distlab.checkpoint import files
from distlab.checkpoint.manifest import CheckpointError
from distlab.checkpoint.parts import Parts, Sharded
from distlab.comm.plain import restricted_load
from distlab.comm.together import place_in, together

SUMS, METADATA = "SHA256SUMS", ".metadata"
Place = tuple[str | int, ...]
STATE: Place = ("optimizer", "state")
GROUPS: Place = ("optimizer", "param_groups")
_KINDS = ["Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"]
_KINDS += ["TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"]
RECORDS: dict[tuple[str, str], object] = {
    **{(metadata.__name__, name): getattr(metadata, name) for name in _KINDS},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    **{("torch", name): one for name, one in vars(torch).items() if isinstance(one, torch.dtype)},
    **{("pathlib", name): lambda *parts: "/".join(parts) for name in ("Path", "PosixPath", "PurePosixPath")},
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(parts),  # a path is only shown: text is enough
}


class Held(NamedTuple):
    """What this rank can write at a place: a box of a tensor, or a plain value.

    Attributes:
        place: the keys of the nested dictionaries; a tied tensor stands at several.
        value: the box's elements, or the plain value.
        shape: of the whole tensor; None: a plain value.
        corner: where the box begins.
    """

    place: Place
    value: Any
    shape: Sequence[int] | None = None
    corner: Sequence[int] = ()


def _whole(place: Place, value: Any) -> Held:
    is_tensor = isinstance(value, Tensor)
    return Held(place, value.detach(), value.shape, [0] * value.dim()) if is_tensor else Held(place, value)


def _held_by(part: Any, name: str) -> list[Held]:
    """Return the tensors and numbers that this rank holds of a part."""
    if isinstance(part, Sharded):
        return [*chain(*map(_held_in, _shards_in(part.shard_state(), name)))]
    if isinstance(part, nn.Module):
        return [_whole((name, key), value) for key, value in part.state_dict().items()]
    raise ValueError(
        f"{name} is a {type(part).__name__}; pass models, ShardedState(model, optimizer), a ShardedOptimizer or a "
        "Hybrid. Of a plain optimizer and the rest torch's own dcp.save and dcp.load are writer and reader"
    )


def _shards_in(state: Mapping[str, Any], name: str) -> list[SavedShard]:
    """Return the saved shards in a sharded part's state: the state is one, or has a list of them."""
    try:
        return [SavedShard.from_dict(one) for one in state.get("shards", [state])]
    except ValueError as error:
        raise ValueError(f"{name} does not save named parts of tensors, which other layouts need: {error}") from None


def _held_in(shard: SavedShard) -> Iterator[Held]:
    others: dict[str, list[str]] = {}
    for other, name in (shard.aliases or {}).items():
        others.setdefault(name, []).append(other)
    for name, part in shard.parts.items():
        places: dict[str, list[Place]] = {key: [(*STATE, name, key)] for key in part.values}
        places[PARAMETER] = [("model", one) for one in (name, *others.get(name, ()))]
        for corner, box in part.boxes():
            yield from (Held(at, value, part.shape, corner) for key, value in box.items() for at in places[key])
        yield from (_whole((*STATE, name, key), number) for key, number in part.numbers.items())
        for key, value in part.values.items() if 0 in part.shape else ():
            yield from (_whole(at, value.view(part.shape)) for at in places[key])
    for name, buffer in (shard.buffers or {}).items() if shard.shard == 0 else ():
        yield _whole(("model", name), buffer)
    if shard.groups is not None:
        yield Held(GROUPS, shard.groups)


def _named_groups(everyone: Iterable[Sequence[Mapping[str, Any]]]) -> Iterator[Held]:
    """Yield the groups of several holders, of which each may know its own names: the first one's options, all names."""
    for number, same in enumerate(zip(*everyone, strict=True)):
        names = dict.fromkeys(name for one in same for name in one["names"])
        options = {key: value for key, value in same[0].items() if key != "names"} | {"params": [*names]}
        yield from (Held((*GROUPS, number, key), value) for key, value in options.items())


class _Planner(DefaultSavePlanner):
    """Names what this rank holds as torch does; torch chooses who writes which of equal copies."""

    def __init__(self, held: Iterable[Held]) -> None:
        super().__init__()
        self.held = held
        self.objects: dict[metadata.MetadataIndex, Any] = {}

    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write."""
        items, places = {}, {}
        for place, value, shape, corner in self.held:
            name = ".".join(map(str, place))
            index, places[name] = metadata.MetadataIndex(name, None if shape is None else corner), place
            if shape is None:
                items[index] = WriteItem(index, WriteItemType.BYTE_IO)
            else:
                chunk = metadata.ChunkStorageMetadata(torch.Size(corner), value.size())
                data = TensorWriteData(chunk, metadata.TensorProperties(value.dtype), torch.Size(shape))
                items[index] = WriteItem(index, WriteItemType.SHARD, tensor_data=data)
            self.objects[index] = value
        self.plan = SavePlan([*items.values()], planner_data=places)
        return self.plan

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        """Return what a name stands for."""
        return self.objects[index]


def write_dcp(directory: str | Path, parts: Parts, *, group: ProcessGroup | None = None) -> Path:
    """Write parts in torch.distributed.checkpoint's layout; every rank of the group calls it.

    Plain torch reads it on any number of ranks: `torch.distributed.checkpoint` is dcp, its `state_dict` has the others.

        of_model, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=directory)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)

    Args:
        directory: a new one; it appears when it is complete.
        parts: models, `ShardedState`, `ShardedOptimizer`, `Hybrid`, by name as of `save`. The model and the optimizer
            of a sharded part go under `model` and `optimizer`, modules under their own names. Buffers may differ per
            rank; one rank's are saved.
        group: the ranks.

    Cost: nothing is sent but names and places; each rank writes what it holds, equal copies once.
    Error: exact.

    Raises:
        ValueError: on every rank: a part's state cannot be named.
        CheckpointError: on every rank: the directory exists, or a rank cannot write. Nothing is left behind.
    """
    rank, world_size = place_in(group)
    target = Path(directory)
    prepared = target.parent / f".saving-{target.name}"
    what, held = f"write {str(target)!r}", list[Held]()
    everywhere = partial(together, group=group, what=what, failure=CheckpointError)

    def look() -> list[Sequence[Mapping[str, Any]]]:
        found = [one for name, part in parts.items() for one in _held_by(part, name)]
        held.extend(one for one in found if one.place != GROUPS)
        if rank == 0:
            if target.exists() or target.is_symlink():
                raise FileExistsError(f"{str(target)!r} exists; nothing is overwritten: choose a different name")
            files.remove(prepared)
            prepared.mkdir(parents=True)
        return [one.value for one in found if one.place == GROUPS]

    try:
        planner = _Planner(chain(held, _named_groups(chain(*everywhere(look)))))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # one process alone may write, too
            writer = filesystem.FileSystemWriter(prepared)
            torchs_save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=world_size == 1)
        sums = everywhere(lambda: [_sum_of(path) for path in sorted(prepared.glob(f"__{rank}_*"))])
        everywhere(
            lambda: _publish(prepared, target, [*chain(*sums), _sum_of(prepared / METADATA)]) if rank == 0 else None
        )
    except CheckpointException as error:
        failures = "; ".join(f"rank {its}: {failure}" for its, (failure, _) in error.failures.items())
        raise CheckpointError(f"cannot {what}: {failures}") from None
    finally:
        if rank == 0:
            files.remove(prepared)
    return target


def _sum_of(path: Path) -> str:
    with open(path, "rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n"


def _publish(prepared: Path, target: Path, sums: Iterable[str]) -> None:
    files.write_bytes(prepared, SUMS, "".join(sums).encode())
    files.flush_directory(prepared)
    prepared.rename(target)
    files.flush_directory(target.parent)


def read_dcp(directory: str | Path) -> dict[str, Any]:
    """Return a checkpoint of torch.distributed.checkpoint's layout as nested dictionaries of whole tensors.

    `load_full_state_dict` of the technique takes up what is under "model" and "optimizer" (a `ShardedOptimizer`'s own
    one, the latter alone), on any number of ranks. Values that would need code to load are left out, with a warning.
    There must be host memory for all tensors.

    Error: exact.

    Raises:
        ValueError: something is missing, damaged or not torch's; the text names it. A flipped bit is seen where
            SHA256SUMS stands next to the files (ours).
    """
    directory = Path(directory)
    what = f"{directory.name}/{METADATA}"
    try:
        for line in (directory / SUMS).read_text(errors="replace").splitlines() if (directory / SUMS).exists() else ():
            name = line.partition("  ")[2]
            if _sum_of(directory / name) != f"{line}\n":
                raise ValueError(f"{directory.name}/{name} was changed after it was written (its SHA-256 differs)")
        with open(directory / METADATA, "rb") as file:
            found = restricted_load(file, RECORDS, what)
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror})") from None
    values: dict[str, Any] = {}
    try:
        for name, kind in found.state_dict_metadata.items():
            try:
                values[name] = _read(directory, name, kind, found.storage_data)
            except pickle.UnpicklingError:
                if isinstance(kind, metadata.TensorStorageMetadata):
                    raise
                warnings.warn(f"left out {name}: it would need code to load", stacklevel=2)
        return unflatten_state_dict(values, {name: (name,) for name in values} | (found.planner_data or {}))
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror})") from None
    except Exception as error:  # damaged data makes torch.load raise almost anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{what} is damaged, or a file that it names ({text}); copy the folder again, whole") from None


def _read(directory: Path, name: str, kind: Any, places: Mapping[metadata.MetadataIndex, Any]) -> Any:
    if not isinstance(kind, metadata.TensorStorageMetadata):
        return _load(directory, places[metadata.MetadataIndex(name)])
    dtype, boxes = kind.properties.dtype, []
    for chunk in kind.chunks:
        box = _load(directory, places[metadata.MetadataIndex(name, chunk.offsets)])
        if not isinstance(box, Tensor) or (box.dtype, box.shape) != (dtype, chunk.sizes):
            shown = f"{list(box.shape)} of {box.dtype}" if isinstance(box, Tensor) else type(box).__name__
            raise ValueError(f"{name} is {shown}, not {list(chunk.sizes)} of {dtype}")
        boxes.append((tuple(slice(at, at + n) for at, n in zip(chunk.offsets, chunk.sizes, strict=True)), box))
    missing = math.prod(kind.size) - sum(box.numel() for _, box in boxes)
    if missing <= 0:  # else there may be no memory for it
        whole, seen = torch.empty(kind.size, dtype=dtype), torch.zeros(kind.size, dtype=torch.bool)
        for where, box in boxes:
            whole[where], seen[where] = box, True
        missing = seen.numel() - int(seen.sum())
    if missing:
        raise ValueError(f"{missing} elements of {name} are in no file")
    return whole


def _load(directory: Path, place: Any) -> Any:
    name = place.relative_path
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file of its directory")
    with open(directory / name, "rb") as file:
        if not 0 <= place.offset <= place.offset + place.length <= os.fstat(file.fileno()).st_size:
            raise ValueError(f"{name} is too short")
        file.seek(place.offset)
        return torch.load(BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
