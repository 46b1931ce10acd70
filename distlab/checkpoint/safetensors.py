"""Safetensors in and out, by its own library: a whole model in a file that Hugging Face's programs load.

Tensors that a model has under two names are written once, and the other name stands in the header's metadata, as the
library's own `save_model` does (`pip install 'distlab[labs]'`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from distlab.checkpoint import files
from distlab.checkpoint.snapshot import memory_of

MODEL = "model.safetensors"


def write_safetensors(directory: str | Path, state: Mapping[str, Tensor]) -> Path:
    """Write a whole model as `from_pretrained` and `safetensors.torch.load_model` read it; one process calls this.

    Sharded models: `full_state_dict(model, to_rank=0)` gives rank 0 the state.

    Args:
        directory: a new one, or one that has no model yet. The file appears when it is complete.
        state: whole tensors by name; names of one tensor must be the same object, or share all memory.

    Returns:
        The file.

    Error: exact.

    Raises:
        ValueError: there is a model already, or a value that the format has not.
        OSError: the disk refused.
    """
    from safetensors import torch as library

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if found := sorted(path.name for path in directory.glob("model*.safetensors*")):
        raise ValueError(f"{str(directory)!r} has {found[0]} already; nothing is overwritten: choose a different one")
    tensors, aliases, seen = {}, {}, dict[object, str]()
    try:
        for name, value in state.items():
            if (first := seen.setdefault(memory_of(value), name)) == name:
                tensors[name] = value.detach().cpu().contiguous()
            else:
                aliases[name] = first
        data = library.save(tensors, metadata={"format": "pt", **aliases})
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"safetensors refuses the state ({what}); convert it") from None
    try:
        files.write_bytes(directory, f".saving-{MODEL}", data)
        (directory / f".saving-{MODEL}").rename(directory / MODEL)
    finally:
        files.remove(directory / f".saving-{MODEL}")
    files.flush_directory(directory)
    return directory / MODEL


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of the one in a directory, whoever wrote it.

    Error: exact.

    Raises:
        ValueError: something is missing, damaged, or of a kind that torch has not (F6); the text names it. The format
            has no checksums, so a flipped bit in a number is not seen.
    """
    import safetensors

    path = Path(path) / MODEL if Path(path).is_dir() else Path(path)
    try:
        with safetensors.safe_open(path, "pt") as file:
            state: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
            names = file.metadata() or {}
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is damaged, or has numbers of a kind that torch has not ({what})") from None
    return state | {other: state[name] for other, name in names.items() if name in state and other not in state}
