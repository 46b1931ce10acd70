"""Write and read torch.distributed.checkpoint's layout (`torchs`: torch's own planner and writer, our reader).

A directory has a file per rank, in which tensors lie one after the other as torch.save writes them, and `.metadata`: a
pickle that says which box of which tensor lies where. Ranks write what they hold, and of equal copies only one is
written, so nothing is gathered but names; a tied tensor is written under each of its names, as torch does. A shard is a
row of elements, and the layout knows boxes alone, so a row that begins in the middle of a matrix becomes a few boxes.

torch sees a run as nested dictionaries: `{"model": {name: tensor}, "optimizer": {"state": {name: {"exp_avg": tensor,
"step": number}}, "param_groups": [{"lr": ..., "params": [names]}]}}`, which is what its `get_state_dict` returns. Our
parts hold the same as named parts of tensors (`modules.named_parts`). Plain optimizers and the rest are torch's own
matter.

The layout has no checksums, and torch loads a flipped bit without a word. `SHA256SUMS` stands next to the files: torch
ignores it, `sha256sum -c` and our reader check it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from distlab.blocks.modules.named_parts import ELSEWHERE, PARAMETER, SavedShard, whole_shard
from distlab.checkpoint import files
from distlab.checkpoint.manifest import CheckpointError
from distlab.checkpoint.parts import Parts, Sharded, check_module
from distlab.comm.checks import open_file
from distlab.comm.together import place_in, together

SUMS = "SHA256SUMS"
Place = tuple[str | int, ...]
Box = tuple[Sequence[int], Sequence[int], Tensor]  # the whole tensor's shape, where the box begins, and its values
STATE: Place = ("optimizer", "state")


class Held(NamedTuple):
    """What this rank can write, by places; a tied tensor has several. Of groups it may know its own tensors' names."""

    boxes: dict[Place, list[Box]]
    values: dict[Place, Any]
    groups: list[Sequence[Mapping[str, Any]]]


def held_by(parts: Parts) -> Held:
    """Return the tensors and numbers of `parts` that this rank holds.

    Raises:
        ValueError: a part is no module and saves no named parts of tensors.
    """
    held = Held({}, {}, [])
    for name, part in parts.items():
        if isinstance(part, Sharded):
            for shard in _shards_in(part.shard_state(), name):
                _add_shard(held, shard)
        elif isinstance(part, nn.Module):
            for key, value in part.state_dict().items():
                _add_value(held, (name, key), value)
        else:
            raise ValueError(
                f"{name} is a {type(part).__name__}; pass models, ShardedState(model, optimizer), a ShardedOptimizer "
                "or a Hybrid. Of a plain optimizer and the rest torch's own dcp.save and dcp.load are writer and reader"
            )
    return held


def _shards_in(state: Mapping[str, Any], name: str) -> list[SavedShard]:
    """Return the saved shards in a sharded part's state: the state is one, or has a list of them.

    Raises:
        ValueError: it is something else.
    """
    try:
        return [SavedShard.from_dict(one) for one in state.get("shards", [state])]
    except ValueError as error:
        raise ValueError(f"{name} does not save named parts of tensors, which other layouts need: {error}") from None


def _add_shard(held: Held, shard: SavedShard) -> None:
    others: dict[str, list[str]] = {}
    for other, name in (shard.aliases or {}).items():
        others.setdefault(name, []).append(other)
    for name, part in shard.parts.items():
        models: list[Place] = [("model", one) for one in (name, *others.get(name, ()))]
        for corner, box in part.boxes():
            for key, value in box.items():
                for place in models if key == PARAMETER else [(*STATE, name, key)]:
                    held.boxes.setdefault(place, []).append((part.shape, corner, value))
        for key, number in part.numbers.items():
            _add_value(held, (*STATE, name, key), number)
        for key, value in part.values.items() if 0 in part.shape else ():
            for place in models if key == PARAMETER else [(*STATE, name, key)]:
                _add_value(held, place, value.view(part.shape))
    for name, buffer in (shard.buffers or {}).items() if shard.shard == 0 else ():
        _add_value(held, ("model", name), buffer)
    if shard.groups is not None:
        held.groups.append(shard.groups)


def _add_value(held: Held, place: Place, value: Any) -> None:
    if isinstance(value, Tensor):
        held.boxes[place] = [(value.shape, (0,) * value.dim(), value.detach())]
    else:
        held.values[place] = value


def _named_groups(everyone: Iterable[Sequence[Mapping[str, Any]]]) -> dict[Place, Any]:
    """Return the groups of several holders as plain values: the options of the first, the names of all."""
    found: dict[Place, Any] = {}
    for number, same in enumerate(zip(*everyone, strict=True)):
        names = dict.fromkeys(name for one in same for name in one["names"])
        options = {key: value for key, value in same[0].items() if key != "names"} | {"params": [*names]}
        found |= {("optimizer", "param_groups", number, key): value for key, value in options.items()}
    return found


def write_dcp(directory: str | Path, parts: Parts, *, group: ProcessGroup | None = None) -> Path:
    """Write parts in torch.distributed.checkpoint's layout; every rank of the group calls it.

    Any of torch's programs reads it: `dcp.load` into plain tensors or DTensors, at any number of ranks. Names are those
    of `get_state_dict`: `model.<name>`, `optimizer.state.<name>.exp_avg`, `optimizer.param_groups.0.lr`.

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
    from distlab.checkpoint.formats import torchs

    rank, world_size = place_in(group)
    target = Path(directory)
    prepared = target.parent / f".saving-{target.name}"
    what, kept = f"write {str(target)!r}", list[Held]()
    everywhere = partial(together, group=group, what=what, failure=CheckpointError)

    def look() -> list[Any]:
        kept.append(held_by(parts))
        if rank == 0:
            _begin(target, prepared)
        return kept[0].groups

    try:
        groups = _named_groups(one for its in everywhere(look) for one in its)
        held = kept[0]._replace(values=kept[0].values | groups)
        if failed := torchs.write(
            prepared, torchs.SavePlanner(held.boxes, held.values), group, is_alone=world_size == 1
        ):
            raise CheckpointError(f"cannot {what}: {failed}")
        sums = everywhere(lambda: [_sum_of(path) for path in sorted(prepared.glob(f"__{rank}_*"))])
        everywhere(
            lambda: (
                _publish(prepared, target, [*chain(*sums), _sum_of(prepared / torchs.METADATA)]) if rank == 0 else None
            )
        )
    except BaseException:
        if rank == 0:
            files.remove(prepared)
        raise
    return target


def _begin(target: Path, prepared: Path) -> None:
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{str(target)!r} exists; nothing is overwritten: choose a different name")
    target.parent.mkdir(parents=True, exist_ok=True)
    files.remove(prepared)
    prepared.mkdir()


def _sum_of(path: Path) -> str:
    with open_file(path) as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n"


def _publish(prepared: Path, target: Path, sums: Iterable[str]) -> None:
    files.write_bytes(prepared, SUMS, "".join(sums).encode())
    files.flush_directory(prepared)
    prepared.rename(target)
    files.flush_directory(target.parent)


def read_dcp(directory: str | Path) -> dict[str, Any]:
    """Return a checkpoint of torch.distributed.checkpoint's layout as nested dictionaries of whole tensors.

    Values that would need code to load are left out, with a warning. There must be host memory for all tensors.

    Error: exact.

    Raises:
        ValueError: something is missing, damaged or not torch's; the text names it. A flipped bit is seen where
            SHA256SUMS stands next to the files (ours).
    """
    from distlab.checkpoint.formats import torchs

    directory = Path(directory)
    try:
        _check_sums(directory)
        tree: dict[str, Any] = unfold(torchs.read(directory))
        return tree
    except IndexError:
        raise ValueError(
            f"{directory.name}: one value stands inside of a different one; the layout is damaged"
        ) from None
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror})") from None


def _check_sums(directory: Path) -> None:
    """Compare files with SHA256SUMS, where it stands."""
    if not (directory / SUMS).exists():
        return
    with open_file(directory / SUMS) as file:
        lines = file.read().decode(errors="replace").splitlines()
    for line in lines:
        digest, _, name = line.partition("  ")
        if Path(name).name != name:
            raise ValueError(f"{directory.name}/{SUMS} names {name!r}, which is not a file of its directory")
        if _sum_of(directory / name) != f"{digest}  {name}\n":
            raise ValueError(f"{directory.name}/{name} was changed after it was written (its SHA-256 differs)")


def load_dcp(directory: str | Path, parts: Parts, *, group: ProcessGroup | None = None) -> None:
    """Take up a checkpoint of torch.distributed.checkpoint's layout; every rank of the group calls it.

    Each rank reads everything, and has host memory for it, before it takes its part.

    Args:
        directory: of `write_dcp`, or of torch's `dcp.save` of what `get_state_dict` returns.
        parts: as of `write_dcp`.
        group: the ranks.

    Cost: only the outcomes of reading and of taking up are exchanged.
    Error: exact.

    Raises:
        ValueError: on every rank, and nothing has changed: it is damaged, or was saved from a different model.
        CheckpointError: on every rank: a rank cannot read it.
    """
    kept: list[Callable[[], object]] = []

    def look() -> None:
        held_by(parts)
        tree = read_dcp(directory)
        kept.extend(_prepare(name, part, tree) for name, part in parts.items())

    everywhere = partial(together, group=group, what=f"load {str(directory)!r}", failure=CheckpointError)
    everywhere(look)
    everywhere(lambda: [take() for take in kept] and None)


def _prepare(name: str, part: Any, tree: dict[str, Any]) -> Callable[[], object]:
    """Check the saved state of one part; return a function that loads it into the part."""
    if isinstance(part, Sharded):
        saved = _as_saved(part, name, tree)
        part.check_shards(saved)
        return lambda: part.load_shards(saved)
    if name not in tree:
        raise ValueError(f"{name} is not in the checkpoint, which has {sorted(tree)}; pass the parts that were saved")
    check_module(part, name, tree[name])
    return lambda: part.load_state_dict(tree[name])


def _as_saved(part: Sharded, name: str, tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what is saved as the shard of one rank that held everything, for a sharded part to cut anew.

    Raises:
        ValueError: the part needs what is not there, or the checkpoint has more.
    """
    state = part.shard_state()
    own = _shards_in(state, name)
    shapes = {key: one.shape for shard in own for key, one in shard.parts.items()}
    others = {name: other for shard in own for other, name in (shard.aliases or {}).items()}
    buffers = {key for shard in own for key in shard.buffers or {}}
    has_model = any(PARAMETER in one.values for shard in own for one in shard.parts.values())
    has_optimizer = any(shard.groups is not None for shard in own)
    model, optimizer = tree.get("model", {}) if has_model else {}, tree.get("optimizer", {})
    moments, whole = optimizer.get("state", {}), dict[str, dict[str, Any]]()
    for key in shapes:
        names = (key, others.get(key, key))
        values = [{PARAMETER: model[one]} for one in names if one in model]
        if has_model and not values:
            raise ValueError(f"{key} is here and not in the checkpoint: {ELSEWHERE}")
        whole[key] = next((dict(moments[one]) for one in names if one in moments), {}) | (values or [{}])[0]
    extra = [key for key in model if key not in {*shapes, *buffers, *others.values()}]
    if extra and "shards" not in state:  # a mesh, where each rank has some of the model's tensors
        raise ValueError(f"{extra[0]} is in the checkpoint and not here: {ELSEWHERE}")
    groups = [
        {key: value for key, value in group.items() if key != "params"} | {"names": list(group["params"])}
        for group in optimizer.get("param_groups", ())
        if has_optimizer
    ]
    saved = whole_shard(whole, groups or None, shapes)
    found = replace(saved, buffers={key: model[key] for key in buffers if key in model}).to_dict()
    return [{"shards": [found]} if "shards" in state else found]


def unfold(tree: Mapping[Place, Any]) -> Any:
    """Return nested dictionaries from places; a dictionary whose keys are numbers is a list.

    Raises:
        IndexError: one value stands inside of a different one.
    """
    if tree.keys() == {()}:
        return tree[()]
    inside: dict[Any, dict[Place, Any]] = {}
    for place, value in tree.items():
        inside.setdefault(place[0], {})[place[1:]] = value
    if inside and all(isinstance(key, int) for key in inside):
        return [unfold(inside[key]) for key in sorted(inside)]
    return {key: unfold(one) for key, one in inside.items()}
