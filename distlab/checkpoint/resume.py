"""Save a training run so that it can be killed at any moment and go on as if nothing had happened.

To repeat the uninterrupted run bit for bit a resumed run needs more than the weights: the optimizer's state (Adam's
moments), every generator of random numbers on every rank (dropout), and the place in the data. Rank 0 writes what all
ranks share; each rank writes what is its own: see `parts`. See `files` for how a checkpoint comes to be on disk.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from distlab.checkpoint import files, parts as of_parts
from distlab.checkpoint.manifest import SHARED, CheckpointError, FileRecord, Manifest, rank_file
from distlab.comm.together import place_in, together

Everywhere = Callable[[Callable[[], Any]], list[Any]]  # `together`, in one group and with its words for errors
OWN = "own"  # what a rank writes for itself, until its file has the rank's name


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        step: updates already made; the next one has this number.
        data_position: as given to `save`.
        path: the checkpoint that was loaded.
        is_own: whether what was each rank's own, such as generators, was loaded; not after shards were cut anew.
    """

    step: int
    data_position: Any
    path: Path
    is_own: bool = True


def save(
    directory: str | Path,
    step: int,
    *,
    parts: of_parts.Parts,
    data_position: Any = 0,
    group: ProcessGroup | None = None,
    keep: int = 3,
) -> Path:
    """Save a run after `step` updates; every rank of the group calls it, and all see the same directory.

    The checkpoint exists once every rank's file is on the disk, and not before. Killed at any moment, the one before it
    is still the newest.

    Args:
        directory: where this run's checkpoints are; one run per directory.
        step: updates made so far.
        parts: what to save, by name: `{"model": model, "optimizer": optimizer}`, schedules, generators that the run
            draws from, and the GradientHook of data parallelism. Rank 0 writes what ranks share; each rank writes its
            own generators, hooks, shards (`distlab.sharding.ShardedState`) and module buffers, and always Python's,
            numpy's and torch's own generators.
        data_position: where to go on in the data: plain values, equal on all ranks.
        group: the ranks that save together; None is all, or this process alone where there are none.
        keep: newest checkpoints to leave in the directory.

    Returns:
        The new checkpoint.

    Raises:
        ValueError: ranks differ in step, data_position or a module's parameters, or a part's state holds more than
            plain values and tensors.
        CheckpointError: on every rank, when any rank cannot write. What was saved before is untouched.
    """
    rank, world_size = place_in(group)
    directory = Path(directory)
    everywhere: Everywhere = partial(
        together, group=group, what=f"save step {step} in {str(directory)!r}", failure=CheckpointError
    )
    contents, _ = agreed_contents(everywhere, step, keep, parts, data_position)
    try:
        prepared = everywhere(lambda: files.begin(directory, step) if rank == 0 else None)[0]
        records = everywhere(lambda: write(prepared, contents, rank))
        manifest = Manifest(step, world_size, tuple(record for own in records for record in own))
        path: Path = everywhere(lambda: files.publish(prepared, manifest) if rank == 0 else None)[0]
    except CheckpointError:
        if rank == 0 and directory.is_dir():
            files.quietly(lambda: files.discard(directory))
        raise
    if rank == 0:
        files.quietly(lambda: files.prune(directory, step, keep))
    return path


def load(
    directory: str | Path, *, parts: of_parts.Parts, group: ProcessGroup | None = None, reshard: bool = False
) -> Resumed | None:
    """Take up the newest good checkpoint; None where nothing was saved yet. Every rank of the group calls it.

    Args:
        directory: as given to `save`.
        parts: as given to `save`, made in the same way.
        group: the ranks that load together.
        reshard: accept a checkpoint of a different number of ranks or plan: shared state is loaded, and shards are
            cut anew from those of all ranks; generators, hooks and a rank's own buffers are not loaded, so the run is
            not the uninterrupted one bit for bit.

    Raises:
        ValueError: it was saved by a different number of ranks, or the parts do not fit it. No part was changed.
        CheckpointError: on every rank, when any rank cannot read its files.
    """
    rank, world_size = place_in(group)
    everywhere = partial(together, group=group, what=f"resume from {str(directory)!r}", failure=CheckpointError)
    found = everywhere(lambda: files.newest(directory) if rank == 0 else None)[0]
    if found is None:
        return None
    path, same = found.path, found.world_size == world_size
    if not same and not reshard:
        raise ValueError(
            f"rank {rank}: {path.name} was saved by {found.world_size} ranks, this job has {world_size}; resume "
            f"with {found.world_size}, or pass reshard=True to go on without what was each rank's own"
        )
    states: list[dict[str, Any]] = []
    wanted = any(isinstance(part, of_parts.Sharded) for part in parts.values())
    if same:
        everywhere(lambda: states.extend(_read(path, [SHARED, rank_file(rank)])))
        same = not (reshard and wanted) or all(everywhere(lambda: _fits(parts, states)))
    if not same:  # shards are cut anew, from those of all ranks
        names = [rank_file(other) for other in range(found.world_size if wanted else 0)]
        everywhere(lambda: states.__setitem__(slice(None), _read(path, [SHARED, *names])))
    shared, *owns = states
    everywhere(lambda: of_parts.check_fit(parts, shared, owns))
    everywhere(lambda: of_parts.take_up(parts, shared, owns, own=owns[0] if same else None))
    return everywhere(lambda: Resumed(shared["step"], shared["data_position"], path, same))[0]


def _fits(parts: of_parts.Parts, states: list[dict[str, Any]]) -> bool:
    """Return whether this rank's own file is all that it needs; under a different plan it needs other ranks' files."""
    try:
        of_parts.check_fit(parts, states[0], states[1:])
    except ValueError:
        return False
    return True


def agreed_contents(
    everywhere: Everywhere,
    step: int,
    keep: int,
    parts: of_parts.Parts,
    data_position: Any,
    *,
    begin: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> tuple[dict[str, Any], list[Any]]:
    """Return what rank 0 writes for all, and this rank's own: by the names of files, with the parts' own tensors.

    `begin` is called with them before ranks have compared, so that one exchange will do; its results come from all.

    Raises:
        ValueError: on every rank: arguments or parts are wrong, or ranks differ.
    """
    kept: list[dict[str, Any]] = []

    def look() -> tuple[int, str, dict[str, tuple[str, int]], Any]:
        if not isinstance(step, int) or not 0 <= step < 10**10:
            raise ValueError(f"step is {step!r}; pass the number of updates made so far")
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep is {keep!r}; pass at least 1, or every checkpoint would be deleted")
        of_parts.refuse_shards(parts)
        shared, own = of_parts.shared_state(parts), of_parts.own_state(parts)
        of_parts.require_plain({"data_position": data_position, **shared, **own["hooks"], **own["shards"]})
        kinds = {name: type(one).__name__ for name, one in parts.items() if isinstance(one, torch.optim.Optimizer)}
        facts = {"step": step, "data_position": data_position, "kinds": kinds}
        kept.append({SHARED: {**facts, "parts": shared}, OWN: own})
        return step, repr(data_position), of_parts.sums_of(parts), begin(kept[0])

    looks = everywhere(look)
    if len({(step, place) for step, place, *_ in looks}) > 1:
        differ = ", ".join(f"rank {r}: {s} and {d}" for r, (s, d, *_) in enumerate(looks))
        raise ValueError(f"ranks save different steps or data positions ({differ}); call save at the same step")
    of_parts.require_equal([sums for _, _, sums, _ in looks])
    return kept[0], [begun for *_, begun in looks]


def write(prepared: Path, contents: dict[str, Any], rank: int) -> tuple[FileRecord, ...]:
    """Write a rank's files; rank 0 has the shared one too."""
    if not prepared.is_dir():
        raise OSError(f"{prepared} was made by rank 0 and is not seen here; save to a file system that all ranks share")
    names = {SHARED: SHARED, OWN: rank_file(rank)} if rank == 0 else {OWN: rank_file(rank)}
    return tuple(files.write_tensors(prepared, name, contents[what]) for what, name in names.items())


def _read(path: Path, names: list[str]) -> list[dict[str, Any]]:
    records = {record.name: record for record in files.read_manifest(path).files}
    states = []
    for name in names:
        with files.checked(path, records[name]) as file:
            try:
                states.append(torch.load(file, map_location="cpu", weights_only=True))
            except pickle.UnpicklingError:
                raise ValueError(f"{path.name}/{name} holds more than plain values and tensors; not loaded") from None
            except Exception as error:  # its SHA-256 is right: it was never a file of torch.save
                raise CheckpointError(f"{path.name}/{name} cannot be read ({type(error).__name__}: {error})") from None
    return states
