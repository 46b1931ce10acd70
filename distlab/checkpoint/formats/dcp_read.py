"""Read torch.distributed.checkpoint's layout: what torch's `dcp.save` wrote of any model, on any number of ranks.

`.metadata` goes through an unpickler that knows torch's records alone, and everything else through torch.load with
weights_only: no code runs. Files must be regular ones in the directory, and boxes must cover each tensor.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.checkpoint.formats.by_names import (
    Roots,
    is_per_element,
    named_state,
    parameter_names,
    shards_in,
    unfold,
)
from distlab.checkpoint.formats.dcp_metadata import Chunk, Item, read_metadata
from distlab.checkpoint.formats.dcp_write import METADATA, SUMS
from distlab.checkpoint.manifest import CheckpointError
from distlab.checkpoint.parts import Parts, Sharded, is_hook
from distlab.comm.checks import open_file
from distlab.comm.together import together
from distlab.modules.named_parts import PARAMETER, SavedPart, SavedShard


def read_dcp(directory: str | Path) -> dict[str, Any]:
    """Return a checkpoint of torch.distributed.checkpoint's layout as nested dictionaries of whole tensors.

    Values that would need code to load are left out, with a warning. There must be host memory for all tensors.

    Error: exact.

    Raises:
        ValueError: something is missing, damaged or not torch's; the text names it. A flipped bit is seen where
            SHA256SUMS stands next to the files (ours).
    """
    directory = Path(directory)
    items = read_metadata(directory / METADATA)
    _check_sums(directory)
    found = {}
    with ExitStack() as stack:
        opened: dict[str, BufferedReader] = {}
        for item in items:
            for chunk in item.chunks:
                if chunk.file not in opened:
                    opened[chunk.file] = stack.enter_context(_open(directory, chunk.file))
                if chunk.start + chunk.num_bytes > os.fstat(opened[chunk.file].fileno()).st_size:
                    raise ValueError(_too_short(directory, chunk, item))
            if item.shape is not None:
                found[item.place] = _tensor(item, opened, directory)
                continue
            try:
                found[item.place] = _load(item, item.chunks[0], opened, directory)
            except pickle.UnpicklingError:
                warnings.warn(f"left out {item.name} of {directory.name}: it would need code to load", stacklevel=2)
    return unfold(found)


def _open(directory: Path, name: str) -> BufferedReader:
    try:
        return open_file(directory / name)
    except OSError as error:
        raise ValueError(f"{directory.name}/{name} cannot be read ({error.strerror})") from None


def _check_sums(directory: Path) -> None:
    """Compare files with SHA256SUMS, where it stands."""
    if not (directory / SUMS).exists():
        return
    with _open(directory, SUMS) as file:
        lines = file.read().decode(errors="replace").splitlines()
    for line in lines:
        digest, _, name = line.partition("  ")
        if Path(name).name != name:
            raise ValueError(f"{directory.name}/{SUMS} names {name!r}, which is not a file of its directory")
        with _open(directory, name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{directory.name}/{name} was changed after it was written (its SHA-256 differs)")


def _load(item: Item, chunk: Chunk, opened: Mapping[str, BufferedReader], directory: Path) -> Any:
    file = opened[chunk.file]
    file.seek(chunk.start)
    data = file.read(chunk.num_bytes)
    if len(data) != chunk.num_bytes:
        raise ValueError(_too_short(directory, chunk, item))
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # torch.load raises anything on damaged data
        raise ValueError(
            f"{directory.name}/{chunk.file}: {item.name} is damaged ({type(error).__name__}: {error})"
        ) from None


def _too_short(directory: Path, chunk: Chunk, item: Item) -> str:
    return f"{directory.name}/{chunk.file} ends before {item.name} does: it was not copied whole; copy it again"


def _tensor(item: Item, opened: Mapping[str, BufferedReader], directory: Path) -> Tensor:
    """Put a tensor together from its boxes."""
    assert item.shape is not None, "a plain value has none"
    whole = torch.empty(item.shape, dtype=item.dtype)
    seen = torch.zeros(item.shape, dtype=torch.bool)
    for chunk in item.chunks:
        assert chunk.corner is not None, "only a plain value has none"
        try:
            box = _load(item, chunk, opened, directory)
        except pickle.UnpicklingError:
            raise ValueError(f"{directory.name}/{chunk.file}: {item.name} is not a tensor; not loaded") from None
        if not isinstance(box, Tensor) or tuple(box.shape) != chunk.sizes or box.dtype != item.dtype:
            kind = f"{box.dtype} {list(box.shape)}" if isinstance(box, Tensor) else type(box).__name__
            raise ValueError(
                f"{directory.name}/{chunk.file}: a box of {item.name} is {kind}; {METADATA} says {item.dtype} "
                f"{list(chunk.sizes)}; copy the folder again, whole"
            )
        where = tuple(slice(at, at + size) for at, size in zip(chunk.corner, chunk.sizes, strict=True))
        whole[where] = box
        seen[where] = True
    if not bool(seen.all()):
        missing = math.prod(item.shape) - int(seen.sum())
        raise ValueError(
            f"{directory.name}: {missing} elements of {item.name} are in no file; copy the folder again, whole"
        )
    return whole


def load_dcp(
    directory: str | Path,
    parts: Parts,
    *,
    group: ProcessGroup | None = None,
    model: str = "model",
    optimizer: str = "optimizer",
) -> None:
    """Take up a checkpoint of torch.distributed.checkpoint's layout; every rank of the group calls it.

    Each rank reads everything, and has host memory for it, before it takes its part.

    Args:
        directory: of `write_dcp`, or of torch's `dcp.save` of what `get_state_dict` returns.
        parts: as of `write_dcp`. Generators and hooks stay as they are.
        group: the ranks.
        model: where a sharded part's model is; "" for the top.
        optimizer: where its optimizer is.

    Cost: only the outcomes of reading and of taking up are exchanged.
    Error: exact.

    Raises:
        ValueError: on every rank, and nothing has changed: it is damaged, or of another model.
        CheckpointError: on every rank: a rank cannot read it.
    """

    def prepare() -> list[Callable[[], object]]:
        tree = read_dcp(directory)
        return [
            taking
            for name, part in parts.items()
            if not isinstance(part, torch.Generator) and not is_hook(part)
            for taking in [_prepare(name, part, tree, parts, Roots(model, optimizer))]
        ]

    kept: list[Callable[[], object]] = []
    what = f"load {str(directory)!r}"
    together(lambda: kept.extend(prepare()), group, what=what, failure=CheckpointError)
    together(lambda: [take() for take in kept] and None, group, what=what, failure=CheckpointError)


def _prepare(name: str, part: Any, tree: Mapping[str, Any], parts: Parts, roots: Roots) -> Callable[[], object]:
    """Check the saved state of one part; return a function that loads it into the part."""
    if isinstance(part, Sharded):
        saved = as_saved(part, name, tree, roots)
        part.check_shards(saved)
        return lambda: part.load_shards(saved)
    if name not in tree:
        raise ValueError(f"{name} is not in the checkpoint, which has {sorted(tree)}; pass the parts that were saved")
    if isinstance(part, nn.Module):
        state = tree[name]
        for key in [*part.state_dict(), *state]:
            here, there = part.state_dict().get(key), state.get(key)
            if _kind(here) != _kind(there):
                raise ValueError(
                    f"{name}.{key} is {_kind(here)} here and {_kind(there)} in the checkpoint; build the same model"
                )
        return lambda: part.load_state_dict(state)
    if isinstance(part, torch.optim.Optimizer):
        plain = _plain_state(part, tree[name], parts)
        return lambda: part.load_state_dict(plain)
    return lambda: part.load_state_dict(tree[name])


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else "nothing"


def as_saved(part: Sharded, name: str, tree: Mapping[str, Any], roots: Roots) -> list[dict[str, Any]]:
    """Return what is saved as the shards of one rank that held everything, for a sharded part to cut anew.

    Raises:
        ValueError: the part needs what is not there, or the checkpoint has more.
    """
    state = part.shard_state()
    own = shards_in(state, name)
    model, optimizer = (tree.get(root, {}) if root else tree for root in roots)
    saved = [_as_shard(one, model, optimizer).to_dict() for one in own]
    if "shards" in state:  # a mesh, where each rank has some of the model's tensors
        return [{"shards": saved}]
    used = {n for one in own for n in [*one.parts, *(one.buffers or {}), *(one.aliases or {})]}
    extra = [key for key in model if key not in used]
    if extra and roots.model and _has_model(own[0]):
        raise ValueError(f"{extra[0]} is in the checkpoint and not in the model: it is of another model")
    return saved


def _has_model(shard: SavedShard) -> bool:
    return any(PARAMETER in part.values for part in shard.parts.values())


def _as_shard(own: SavedShard, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> SavedShard:
    """Return everything that is saved of the tensors of a shard."""
    kept = optimizer.get("state", {}) if own.groups is not None else {}
    model = model if _has_model(own) else {}
    names = {name: name for name in own.parts} | {name: other for other, name in (own.aliases or {}).items()}
    parts = {}
    for name, part in own.parts.items():
        stored = next((model[one] for one in (name, names[name]) if one in model), None)
        values = {} if stored is None else {PARAMETER: stored}
        if stored is None and _has_model(own):
            raise ValueError(f"{name} is in the model and not in the checkpoint: it is of another model")
        state: Mapping[str, Any] = next((kept[one] for one in (name, names[name]) if one in kept), {})
        values |= {key: v for key, v in state.items() if is_per_element(key, v, part.shape)}
        numbers = {key: value for key, value in state.items() if key not in values}
        for key, value in values.items():
            if tuple(value.shape) != part.shape:
                there, here = list(value.shape), list(part.shape)
                raise ValueError(f"{key} of {name} is {there} in the checkpoint, {here} here; build the same model")
        flat = {key: value.reshape(-1) for key, value in values.items()}
        parts[name] = SavedPart(part.shape, 0, math.prod(part.shape), flat, numbers)
    buffers = {key: model[key] for key in own.buffers or {} if key in model}
    groups = None if own.groups is None else [_as_group(one) for one in optimizer.get("param_groups", ())]
    return SavedShard(0, 1, parts, groups or None, buffers, aliases=own.aliases)


def _as_group(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**{key: value for key, value in group.items() if key != "params"}, "names": list(group["params"])}


def _plain_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """Return a saved optimizer's state as a plain one takes it: by the numbers of its parameters."""
    named_state(optimizer, parts)
    names = parameter_names(parts)
    here = optimizer.state_dict()["param_groups"]
    groups = saved.get("param_groups", [])
    if [len(one["params"]) for one in here] != [len(one["params"]) for one in groups]:
        raise ValueError(
            f"groups of {[len(one['params']) for one in groups]} parameters in the checkpoint, of "
            f"{[len(one['params']) for one in here]} here; build the same optimizer"
        )
    state: dict[int, Any] = {}
    for group, numbers in zip(optimizer.param_groups, here, strict=True):
        for parameter, number in zip(group["params"], numbers["params"], strict=True):
            kept = saved.get("state", {}).get(names[id(parameter)])
            if kept:
                state[number] = kept
    options = [{**one, "params": now["params"]} for one, now in zip(groups, here, strict=True)]
    return {"state": state, "param_groups": options}
