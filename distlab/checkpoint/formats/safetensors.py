"""Write and read safetensors: a whole model in files that Hugging Face's programs load.

A file has a header of names, types, shapes and places, and the tensors' bytes; there is no code in it. The safetensors
library writes and reads it (`pip install 'distlab[labs]'`). Tensors that a model has under two names are written once,
and the other name stands in the header's metadata, as Hugging Face's own `save_model` does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from distlab.checkpoint import files
from distlab.comm.checks import open_file

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write_safetensors(directory: str | Path, state: Mapping[str, Tensor]) -> Path:
    """Write a whole model as `from_pretrained` and `safetensors.torch.load_model` read it; one process calls this.

    Sharded models: `full_state_dict(model, to_rank=0)` gives rank 0 the state.

    Args:
        directory: a new one, or one that has no model yet (a `config.json` may be there). The file appears when it is
            complete.
        state: whole tensors by name; names of one tensor must be the same object, or share all memory.

    Returns:
        The file.

    Error: exact.

    Raises:
        ValueError: there is a model already, or a tensor is of a type that the format has not.
        OSError: the disk refused.
    """
    from safetensors import torch as library

    directory = Path(directory)
    tensors, aliases = _once(state)
    directory.mkdir(parents=True, exist_ok=True)
    if found := sorted(path.name for path in directory.glob("model*.safetensors*")):
        raise ValueError(f"{str(directory)!r} has {found[0]} already; nothing is overwritten: choose a different one")
    prepared = directory / f".saving-{MODEL}"
    try:
        data = library.save(tensors, metadata={"format": "pt", **aliases})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"safetensors refuses the state ({type(error).__name__}: {error}); convert it") from None
    files.remove(prepared)
    try:
        files.write_bytes(directory, prepared.name, data)
        os.rename(prepared, directory / MODEL)
    except BaseException:
        files.remove(prepared)
        raise
    files.flush_directory(directory)
    return directory / MODEL


def _once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tell tensors from further names of the same memory."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is {type(value).__name__}; safetensors holds tensors")
        where = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else name
        if seen.setdefault(where, name) != name:
            aliases[name] = seen[where]
        else:
            tensors[name] = value.detach().cpu().contiguous()
    return tensors, aliases


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
    try:
        open_file(path).close()
        return _read_file(path) if not path.name.endswith(".index.json") else _read_index(path)
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read ({error.strerror or error})") from None


def _read_index(path: Path) -> dict[str, Tensor]:
    try:
        places: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
        names = sorted(set(places.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError(f"it names files outside of its directory: {names}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of safetensors files ({type(error).__name__}: {error})") from None
    state: dict[str, Tensor] = {}
    for name in names:
        open_file(path.parent / name).close()
        state |= _read_file(path.parent / name)
    if missing := [key for key in places if key not in state]:
        raise ValueError(f"{path} names {missing[0]}, which is not in {places[missing[0]]}")
    return state


def _read_file(path: Path) -> dict[str, Tensor]:
    import safetensors

    try:
        with safetensors.safe_open(path, "pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
            names = file.metadata() or {}
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} is not an intact safetensors file ({type(error).__name__}: {error})") from None
    return state | {other: state[name] for other, name in names.items() if name in state and other not in state}
