"""Write and read torch.distributed.checkpoint's layout (`torchs`: torch's own planner and writer, our reader).

A directory has a file per rank, in which tensors lie one after the other as torch.save writes them, and `.metadata`: a
pickle that says which box of which tensor lies where. Ranks write what they hold, and of equal copies only one is
written, so nothing is gathered but names; a tied tensor is written under each of its names, as torch does. A shard is a
row of elements, and the layout knows boxes alone, so a row that begins in the middle of a matrix becomes a few boxes.

The layout has no checksums, and torch loads a flipped bit without a word. `SHA256SUMS` stands next to the files: torch
ignores it, `sha256sum -c` and our reader check it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.checkpoint import files
from distlab.checkpoint.formats.by_names import METADATA, Held, as_saved, held_by, named_groups, unfold
from distlab.checkpoint.manifest import CheckpointError
from distlab.checkpoint.parts import Parts, Sharded
from distlab.comm.checks import open_file
from distlab.comm.together import place_in, together

SUMS = "SHA256SUMS"


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
        groups = named_groups(one for its in everywhere(look) for one in its)
        held = kept[0]._replace(values=kept[0].values | groups)
        if failed := torchs.write(prepared, held, group, is_alone=world_size == 1):
            raise CheckpointError(f"cannot {what}: {failed}")
        sums = everywhere(lambda: [_sum_of(path) for path in sorted(prepared.glob(f"__{rank}_*"))])
        everywhere(lambda: _publish(prepared, target, chain(*sums)) if rank == 0 else None)
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
    files.write_bytes(prepared, SUMS, "".join([*sums, _sum_of(prepared / METADATA)]).encode())
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
        saved = as_saved(part, name, tree)
        part.check_shards(saved)
        return lambda: part.load_shards(saved)
    if name not in tree:
        raise ValueError(f"{name} is not in the checkpoint, which has {sorted(tree)}; pass the parts that were saved")
    now, then = part.state_dict(), tree[name]
    for key in [*now, *then]:
        here, there = _kind(now.get(key)), _kind(then.get(key))
        if here != there:
            raise ValueError(f"{name}.{key} is {here} here and {there} in the checkpoint; build the same model")
    return lambda: part.load_state_dict(then)


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else "nothing"
