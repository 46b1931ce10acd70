"""torch.distributed.checkpoint's own planners and storage, for what `dcp` writes and reads without running code.

torch's reader runs what a pickle asks for. Here `.metadata` goes through an unpickler that knows torch's records alone,
and everything else through torch.load with weights_only. Only `dcp` imports this file, and late: torch's part takes a
second to import.
"""

from __future__ import annotations

import math
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as torchs_load
from torch.distributed.checkpoint.state_dict_saver import save as torchs_save
from torch.futures import Future

from distlab.checkpoint.formats.by_names import Held, Place
from distlab.comm.checks import open_file
from distlab.comm.plain import restricted_load

METADATA = ".metadata"
_KINDS = (
    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
    *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
)
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


class SavePlanner(DefaultSavePlanner):
    """Names what this rank holds as torch does; torch chooses who writes which of equal copies."""

    def __init__(self, held: Held, aliases: dict[Place, Place]) -> None:
        super().__init__()
        self.mappings = {_name(place): place for place in [*held.boxes, *held.values, *aliases]}
        self.objects: dict[metadata.MetadataIndex, Any] = {}
        self.items = []
        for place, boxes in held.boxes.items():
            for shape, corner, values in boxes:
                index = metadata.MetadataIndex(_name(place), corner)
                chunk = metadata.ChunkStorageMetadata(torch.Size(corner), values.size())
                data = TensorWriteData(chunk, metadata.TensorProperties(values.dtype), torch.Size(shape))
                self.objects[index] = values
                self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        for place, value in held.values.items():
            index = metadata.MetadataIndex(_name(place))
            self.objects[index] = value
            self.items.append(WriteItem(index, WriteItemType.BYTE_IO))

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Take nothing: what is held is known."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write."""
        self.plan = SavePlan(self.items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        """Return what a name stands for."""
        return self.objects[index]


class Writer(filesystem.FileSystemWriter):
    """Gives tensors of two names both of them; their values are written once."""

    def __init__(self, path: Path, aliases: dict[Place, Place]) -> None:
        super().__init__(path)
        self.aliases = aliases

    def finish(self, metadata: metadata.Metadata, results: list[list[Any]]) -> None:
        """Write `.metadata`."""
        places: dict[str, list[Any]] = {}
        for one in (one for every in results for one in every):
            places.setdefault(one.index.fqn, []).append(one)
        for other, place in self.aliases.items():
            metadata.state_dict_metadata[_name(other)] = metadata.state_dict_metadata[_name(place)]
            written = places[_name(place)]
            results = [*results, [_replaced(one, _name(other)) for one in written]]
        super().finish(metadata, results)


def _replaced(result: Any, name: str) -> Any:
    index = metadata.MetadataIndex(name, result.index.offset, result.index.index)
    return type(result)(index, result.size_in_bytes, result.storage_data)


def _name(place: Place) -> str:
    return ".".join(map(str, place))


class Reader(filesystem.FileSystemReader):
    """torch's reader, for `.metadata` that `read_metadata` has read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.found = read_metadata(directory)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Return what was read without running code."""
        return self.found

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        """Read each box; torch's own way would change one of a different kind of numbers without a word."""
        for item in plan.items:
            stored, kind = self.storage_data[item.storage_index], self.found.state_dict_metadata[item.dest_index.fqn]
            with open(Path(self.path) / stored.relative_path, "rb") as file:
                file.seek(stored.offset)
                data = BytesIO(file.read(stored.length))
            if not isinstance(kind, metadata.TensorStorageMetadata):
                planner.load_bytes(item, data)
                continue
            box, wanted = torch.load(data, map_location="cpu", weights_only=True), kind.properties.dtype
            if not isinstance(box, torch.Tensor) or (box.dtype, box.shape) != (wanted, torch.Size(item.lengths)):
                shown = f"{list(box.shape)} of {box.dtype}" if isinstance(box, torch.Tensor) else type(box).__name__
                raise ValueError(f"{item.dest_index.fqn} is {shown}, not {list(item.lengths)} of {wanted}")
            planner.resolve_tensor(item).copy_(box)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def read_metadata(directory: Path) -> metadata.Metadata:
    """Read `.metadata`, whoever wrote it, without running code, and check it.

    Raises:
        ValueError: it asks for code, or is damaged.
        OSError: a file cannot be opened.
    """
    what = f"{directory.name}/{METADATA}"
    with open_file(directory / METADATA) as file:
        found = restricted_load(file, RECORDS, what)
    try:
        _check_files(directory, found.storage_data)
        for name, kind in found.state_dict_metadata.items():
            place = (found.planner_data or {}).get(name, (name,))
            if type(place) is not tuple or not place or not {*map(type, place)} <= {str, int}:
                raise ValueError(f"{name!r} stands at {place!r}")
            if isinstance(kind, metadata.TensorStorageMetadata):
                _check_boxes(name, kind, [found.storage_data[index].length for index in _indices(name, kind)])
        return metadata.Metadata(**vars(found))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{what} is damaged ({type(error).__name__}: {error}); copy the folder again, whole") from None


def _check_files(directory: Path, stored: dict[Any, Any]) -> None:
    """Refuse files outside of the directory, and those that end too early."""
    sizes: dict[str, int] = {}
    for index, one in stored.items():
        name = one.relative_path
        if type(name) is not str or Path(name).name != name:
            raise ValueError(f"{index.fqn} lies in {name!r}, which is not a file of its directory")
        if getattr(one, "transform_descriptors", None):
            raise ValueError(f"{index.fqn} was changed by an extension ({one.transform_descriptors}); save it without")
        if name not in sizes:
            with open_file(directory / name) as file:
                sizes[name] = os.fstat(file.fileno()).st_size
        if not 0 <= one.offset <= one.offset + one.length <= sizes[name]:
            raise ValueError(f"{name} ends before {index.fqn} does")


def _indices(name: str, kind: metadata.TensorStorageMetadata) -> list[metadata.MetadataIndex]:
    return [metadata.MetadataIndex(name, chunk.offsets) for chunk in kind.chunks]


def _check_boxes(name: str, kind: metadata.TensorStorageMetadata, stored: Sequence[int]) -> None:
    """Refuse a tensor that would take more memory than is stored, or of which boxes leave elements out."""
    if math.prod(kind.size) * kind.properties.dtype.itemsize > sum(stored):
        raise ValueError(f"{name} {list(kind.size)} does not fit in the {sum(stored)} bytes that are stored of it")
    seen = torch.zeros(kind.size, dtype=torch.bool)
    for chunk in kind.chunks:
        seen[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = True
    if missing := seen.numel() - int(seen.sum()):
        raise ValueError(f"{missing} elements of {name} are in no file")


class LoadPlanner(DefaultLoadPlanner):
    """Asks for everything that is saved, as whole tensors. Plain values are loaded without code."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Make room for all tensors."""
        tensors = {
            name: torch.empty(kind.size, dtype=kind.properties.dtype) if hasattr(kind, "size") else None
            for name, kind in metadata.state_dict_metadata.items()
        }
        self.places = metadata.planner_data or {}
        super().set_up_planner(tensors, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        """Load a plain value, or leave it out where that would need code."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            del self.state_dict[name]
            warnings.warn(f"left out {name}: it would need code to load", stacklevel=2)


def save(
    path: Path, held: Held, aliases: dict[Place, Place], group: ProcessGroup | None, *, is_alone: bool
) -> str | None:
    """Let torch write what all ranks hold; return what failed, the same on every rank, or None."""
    planner, writer = SavePlanner(held, aliases), Writer(path, aliases)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # one process alone may write, too
            torchs_save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=is_alone)
    except CheckpointException as error:
        return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
    return None


def load(directory: Path) -> dict[Place, Any]:
    """Let torch read everything; return it by places.

    Raises:
        ValueError: something is missing or damaged.
        OSError: a file cannot be opened.
    """
    planner, reader = LoadPlanner(), Reader(directory)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")
            torchs_load({}, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        (failure, _), *_ = error.failures.values()
        text = " ".join(f"{type(failure).__name__}: {failure}".split())
        raise ValueError(f"{directory} is not an intact checkpoint of torch: {text}") from None
    return {planner.places.get(name, (name,)): value for name, value in planner.state_dict.items()}
