"""torch.distributed.checkpoint's own planner and writer, and a reader of what they write that runs no code.

torch's reader runs what a pickle asks for, and changes a box of a different kind of numbers without a word. Here
`.metadata` goes through an unpickler that knows torch's records alone, and each box through torch.load with
weights_only; it must be what `.metadata` says. Only `dcp` imports this file, and late: torch's part takes a second.
"""

from __future__ import annotations

import math
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as torchs_save

from distlab.comm.checks import open_file
from distlab.comm.plain import restricted_load

METADATA = ".metadata"
Place = tuple[str | int, ...]
Box = tuple[Sequence[int], Sequence[int], Tensor]  # the whole tensor's shape, where the box begins, and its values
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

    def __init__(self, boxes: Mapping[Place, Sequence[Box]], values: Mapping[Place, Any]) -> None:
        super().__init__()
        self.boxes, self.values = boxes, values
        self.objects: dict[metadata.MetadataIndex, Any] = {}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Take nothing: what is held is known."""
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return what this rank could write."""
        names = {place: ".".join(map(str, place)) for place in [*self.boxes, *self.values]}
        items = []
        for place, boxes in self.boxes.items():
            for shape, corner, values in boxes:
                index = metadata.MetadataIndex(names[place], corner)
                chunk = metadata.ChunkStorageMetadata(torch.Size(corner), values.size())
                data = TensorWriteData(chunk, metadata.TensorProperties(values.dtype), torch.Size(shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self.objects[index] = values
        for place, value in self.values.items():
            index = metadata.MetadataIndex(names[place])
            items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self.objects[index] = value
        self.plan = SavePlan(items, planner_data={name: place for place, name in names.items()})
        return self.plan

    def lookup_object(self, index: metadata.MetadataIndex) -> Any:
        """Return what a name stands for."""
        return self.objects[index]


def write(path: Path, planner: SavePlanner, group: ProcessGroup | None, *, is_alone: bool) -> str | None:
    """Let torch write what all ranks hold; return what failed, the same on every rank, or None."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is")  # one process alone may write, too
            writer = filesystem.FileSystemWriter(path)
            torchs_save({}, storage_writer=writer, planner=planner, process_group=group, no_dist=is_alone)
    except CheckpointException as error:
        return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in error.failures.items())
    return None


def read(directory: Path) -> dict[Place, Any]:
    """Return everything that is saved, by places; a plain value that needs code is left out with a warning.

    Raises:
        ValueError: `.metadata` asks for code, or something is missing, damaged or not what it says.
        OSError: a file cannot be opened.
    """
    what = f"{directory.name}/{METADATA}"
    with open_file(directory / METADATA) as file:
        found = restricted_load(file, RECORDS, what)
    tree: dict[Place, Any] = {}
    try:
        for name, kind in found.state_dict_metadata.items():
            place = (found.planner_data or {}).get(name, (name,))
            if type(place) is not tuple or not place or not {*map(type, place)} <= {str, int}:
                raise ValueError(f"{name!r} stands at {place!r}")
            if isinstance(kind, metadata.TensorStorageMetadata):
                tree[place] = _whole(directory, name, kind, found.storage_data)
                continue
            try:
                tree[place] = _load(directory, found.storage_data[metadata.MetadataIndex(name)])
            except pickle.UnpicklingError:
                warnings.warn(f"left out {name}: it would need code to load", stacklevel=2)
    except OSError:
        raise
    except Exception as error:  # damaged data makes torch.load raise almost anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{what} is damaged, or a file that it names ({text}); copy the folder again, whole") from None
    return tree


def _whole(
    directory: Path, name: str, kind: metadata.TensorStorageMetadata, places: dict[metadata.MetadataIndex, Any]
) -> Tensor:
    """Read the boxes of a tensor and put them together."""
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
    """Load what lies at a place in a file of the directory."""
    name = place.relative_path
    if type(name) is not str or Path(name).name != name:
        raise ValueError(f"{name!r} is not a file of its directory")
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{name} was changed by an extension ({place.transform_descriptors}); save it without")
    with open_file(directory / name) as file:
        if not 0 <= place.offset <= place.offset + place.length <= os.fstat(file.fileno()).st_size:
            raise ValueError(f"{name} is too short")
        file.seek(place.offset)
        return torch.load(BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
