"""Read `.metadata` of torch.distributed.checkpoint, which is a pickle: without running anything that it asks for.

A pickle names the functions that rebuild its objects, and Python calls whatever it names. Here only names of a short
list are looked up: torch's records of a checkpoint, sizes, types of numbers, and paths. Anything else is refused before
it is imported. What comes out is copied into our own records, with every name and number checked.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch

from distlab.checkpoint.formats.by_names import Path as Place
from distlab.comm.checks import open_file

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
}
_PATHS = {("pathlib", name) for name in ("Path", "PosixPath", "PurePosixPath")} | {("pathlib._local", "PosixPath")}


class Chunk(NamedTuple):
    """A box of a tensor, or the whole of a plain value, and where it lies.

    Attributes:
        corner: where the box begins in the tensor; None for a plain value.
        sizes: of the box.
        file: a name in the checkpoint's directory.
        start: first byte.
        num_bytes: as torch.save wrote it.
    """

    corner: tuple[int, ...] | None
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


class Item(NamedTuple):
    """A tensor (with its shape and type) or a plain value (without)."""

    name: str
    place: Place
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


class _RecordsOnly(pickle.Unpickler):
    """An unpickler that knows the records of a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the records.

        Raises:
            pickle.UnpicklingError: it is none of them; nothing was imported.
        """
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return _joined  # a path is only shown, and a string is enough for that
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not a record of a checkpoint")


def _joined(*parts: object) -> str:
    return "/".join(map(str, parts))


def read_metadata(path: Path) -> list[Item]:
    """Read a `.metadata` file, whoever wrote it.

    Raises:
        ValueError: it cannot be read, asks for code, or is damaged; the text says what.
    """
    where = f"{path.parent.name}/{path.name}"
    try:
        with open_file(path) as file:
            data = file.read()
    except OSError as error:
        raise ValueError(f"{where} cannot be read ({error.strerror})") from None
    try:
        metadata = _RecordsOnly(io.BytesIO(data)).load()
        nesting, places = metadata.planner_data or {}, metadata.storage_data
        return [_item(name, kind, nesting.get(name, (name,)), places) for name, kind in _items(metadata)]
    except pickle.UnpicklingError as error:
        raise ValueError(f"{where} was not loaded: {' '.join(str(error).split())}") from None
    except Exception as error:  # an unpickler raises anything on damaged data
        raise ValueError(
            f"{where} is damaged, or of a version of torch that this distlab does not know "
            f"({type(error).__name__}: {error}); use another checkpoint"
        ) from None


def _items(metadata: Any) -> list[tuple[str, Any]]:
    from torch.distributed.checkpoint.metadata import Metadata

    if type(metadata) is not Metadata:
        raise ValueError(f"it holds a {type(metadata).__name__}")
    return [*metadata.state_dict_metadata.items()]


def _item(name: Any, kind: Any, place: Any, places: Any) -> Item:
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex, TensorStorageMetadata

    if type(name) is not str or type(place) is not tuple or not place or not {*map(type, place)} <= {str, int}:
        raise ValueError(f"{name!r} stands at {place!r}")
    if isinstance(kind, BytesStorageMetadata):
        return Item(name, tuple(place), None, None, (_chunk(name, None, (), places[MetadataIndex(name)]),))
    if not isinstance(kind, TensorStorageMetadata):
        raise ValueError(f"{name} is neither a tensor nor a value")
    shape, dtype = _numbers(kind.size), kind.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has numbers of type {dtype!r}")
    chunks = []
    for one in kind.chunks:
        corner, sizes = _numbers(one.offsets), _numbers(one.sizes)
        fits = len(corner) == len(sizes) == len(shape)
        if not fits or any(at + size > end for at, size, end in zip(corner, sizes, shape, strict=True)):
            raise ValueError(f"{name} {list(shape)} has a box {list(sizes)} at {list(corner)}")
        chunks.append(_chunk(name, corner, sizes, places[MetadataIndex(name, corner)]))
    stored = sum(one.num_bytes for one in chunks)
    if math.prod(shape) * dtype.itemsize > stored:  # also bounds the memory that reading takes
        raise ValueError(f"{name} {list(shape)} of {dtype} does not fit in the {stored} bytes that are stored of it")
    return Item(name, tuple(place), shape, dtype, tuple(chunks))


def _chunk(name: str, corner: tuple[int, ...] | None, sizes: tuple[int, ...], info: Any) -> Chunk:
    file, (start, num_bytes) = info.relative_path, _numbers((info.offset, info.length))
    if type(file) is not str or Path(file).name != file:
        raise ValueError(f"{name} lies in {file!r}, which is not a file of the checkpoint's directory")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} was changed by an extension ({info.transform_descriptors}); save it without")
    return Chunk(corner, sizes, file, start, num_bytes)


def _numbers(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} are not sizes")
    return tuple(values)
