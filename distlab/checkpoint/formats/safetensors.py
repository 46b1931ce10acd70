"""Write and read safetensors: a whole model in files that Hugging Face's programs load.

The format is small enough to write by hand. A file is

1. 8 bytes: the length N of the header, little-endian;
2. N bytes: a JSON object, {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}}, and under
   "__metadata__" a dictionary of strings; spaces fill it up to a multiple of 8;
3. the tensors' bytes, one after the other, without gaps.

There is no code in it, and nothing but names, sizes and numbers; a reader needs no more than this page. Tensors that a
model has under two names are written once, and the other name stands in the metadata, as Hugging Face's own
`save_model` does. A model too large for a file goes to several, with an index of names next to them.

Source: https://huggingface.co/docs/safetensors; files and names as of transformers' `save_pretrained`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from distlab.checkpoint import files
from distlab.comm.checks import open_file

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # as of the safetensors package
_CHUNK_BYTES = 1 << 24


def write_safetensors(directory: str | Path, state: Mapping[str, Tensor], *, max_bytes: int = 5_000_000_000) -> Path:
    """Write a whole model as `from_pretrained` and `safetensors.torch.load_model` read it; one process calls this.

    Sharded models: `full_state_dict(model, to_rank=0)` gives rank 0 the state.

    Args:
        directory: a new one, or one that has no model yet (a `config.json` may be there). The model's files appear one
            by one, each when it is complete; the index last.
        state: whole tensors by name; names of one tensor must be the same object, or share all memory.
        max_bytes: of tensors in one file; a larger tensor has a file of its own.

    Returns:
        The file, or the index where there are several.

    Error: exact.

    Raises:
        ValueError: there is a model already, or a tensor is of a type that the format has not.
        OSError: the disk refused.
    """
    directory = Path(directory)
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; pass at least 1")
    tensors, aliases = _once(state)
    for name, value in tensors.items():
        if not isinstance(value, Tensor) or value.dtype not in NAMES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name} is {kind}; safetensors holds tensors of {', '.join(sorted(DTYPES))}: convert it")
    directory.mkdir(parents=True, exist_ok=True)
    if found := sorted(path.name for path in directory.glob("model*.safetensors*")):
        raise ValueError(f"{str(directory)!r} has {found[0]} already; nothing is overwritten: choose another directory")
    groups = _by_size(tensors, max_bytes)
    if len(groups) == 1:
        return _write_file(directory, MODEL, groups[0], aliases)
    places = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_file(directory, name, group, {other: one for other, one in aliases.items() if one in group})
        places.update(dict.fromkeys(group, name))
    total = sum(one.numel() * one.element_size() for one in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return _write(directory, INDEX, [json.dumps(index, indent=2).encode() + b"\n"])


def _once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tell tensors from further names of the same memory."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.numel():
            where = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
            if where in seen:
                aliases[name] = seen[where]
                continue
            seen[where] = name
        tensors[name] = value
    return tensors, aliases


def _by_size(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in tensors.items():
        num_bytes = value.numel() * value.element_size()
        if groups[-1] and size + num_bytes > max_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = value
        size += num_bytes
    return groups


def _write_file(directory: Path, name: str, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> Path:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    at = 0
    for key, value in sorted(tensors.items()):
        end = at + value.numel() * value.element_size()
        header[key] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _write(directory, name, [len(text).to_bytes(8, "little"), text, *(v for _, v in sorted(tensors.items()))])


def _write(directory: Path, name: str, contents: list[Any]) -> Path:
    """Write a file under another name, and give it its own when it is complete and on the disk."""
    prepared = directory / f".saving-{name}"
    files.remove(prepared)
    try:
        with files.new_file(prepared) as file:
            for one in contents:
                file.write(one if isinstance(one, bytes) else _bytes(one))
            file.finish(name)
        os.rename(prepared, directory / name)
    except BaseException:
        files.remove(prepared)
        raise
    files.flush_directory(directory)
    return directory / name


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, an index, or a directory that has one of them, whoever wrote it.

    Error: exact.

    Raises:
        ValueError: something is missing or damaged; the text names it. The format has no checksums, so a flipped bit in
            a number is not seen.
    """
    path = Path(path)
    if path.is_dir():
        path = path / (INDEX if (path / INDEX).exists() else MODEL)
    if not path.name.endswith(".index.json"):
        return _read_file(path)
    try:
        with open_file(path) as file:
            places = _json(file.read())["weight_map"]
        names = sorted(set(places.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError(f"it names files outside of its directory: {names}")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of safetensors files ({type(error).__name__}: {error})") from None
    state: dict[str, Tensor] = {}
    for name in names:
        state |= _read_file(path.parent / name)
    if missing := [key for key in places if key not in state]:
        raise ValueError(f"{path} names {missing[0]}, which is not in {places[missing[0]]}")
    return state


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        with open_file(path) as file:
            return _tensors_in(file)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an intact safetensors file ({type(error).__name__}: {error})") from None


def _json(data: bytes) -> Any:
    """Read JSON in which no name stands twice: of two tensors of one name a reader would take either.

    Raises:
        ValueError: it is none.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        if twice := [name for name, number in names.items() if number > 1]:
            raise ValueError(f"{twice[0]!r} stands in it {names[twice[0]]} times")
        return dict(pairs)

    return json.loads(data, object_pairs_hook=once)


def _tensors_in(file: BinaryIO) -> dict[str, Tensor]:
    num_bytes = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(_LARGEST_HEADER, num_bytes - 8):
        raise ValueError(f"its header would have {length} bytes, and the file has {num_bytes}")
    header = _json(file.read(length))
    metadata = header.pop("__metadata__", {})
    data = bytearray(num_bytes - 8 - length)
    view = memoryview(data)
    while (at := len(data) - len(view)) < len(data):
        got = file.readinto(view[:_CHUNK_BYTES])  # type: ignore[attr-defined]
        if not got:
            raise ValueError(f"it ends after {at} bytes of tensors")
        view = view[got:]
    state, reached = {}, 0
    for name, one in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = DTYPES[one["dtype"]], one["shape"], one["data_offsets"]
        sizes_fit = all(type(size) is int and size >= 0 for size in shape)
        if begin != reached or not sizes_fit or end - begin != math.prod(shape) * dtype.itemsize or end > len(data):
            raise ValueError(f"{name} {shape} of {one['dtype']} cannot be bytes {begin} to {end}, after {reached}")
        flat = torch.frombuffer(data, dtype=torch.uint8, count=end - begin, offset=begin) if end > begin else None
        empty = torch.empty(shape, dtype=dtype)
        state[name] = empty if flat is None else empty.copy_(flat.clone().view(dtype).view(shape))
        reached = end
    if reached != len(data):
        raise ValueError(f"{len(data) - reached} bytes belong to no tensor")
    return state | {other: state[name] for other, name in metadata.items() if name in state and other not in state}
