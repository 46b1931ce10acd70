"""Save a training run so that it can be killed at any moment and go on as if nothing had happened.

To repeat the uninterrupted run bit for bit a resumed run needs more than the weights: the optimizer's state (Adam's
moments), every generator of random numbers on every rank (dropout), and the place in the data. Rank 0 writes what all
ranks share; each rank writes what is its own. See `files` for how a checkpoint comes to be on disk.
"""

from __future__ import annotations

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from distlab.checkpoint import files
from distlab.checkpoint.find import checked, newest, read_manifest
from distlab.checkpoint.manifest import SHARED, CheckpointError, FileRecord, Manifest, rank_file
from distlab.rng import random_state, restore_random_state

Result = TypeVar("Result")
_PLAIN = (bool, int, float, str, bytes, torch.Tensor, torch.Size, torch.dtype, torch.device, type(None))


class Stateful(Protocol):
    """A module, an optimizer, a learning-rate schedule: what gives and takes its state as a dictionary."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state back."""


Parts = Mapping[str, Stateful | torch.Generator]


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        step: updates already made; the next one has this number.
        data_position: as given to `save`.
        path: the checkpoint that was loaded.
    """

    step: int
    data_position: Any
    path: Path


def save(
    directory: str | Path,
    step: int,
    *,
    parts: Parts,
    data_position: Any = 0,
    group: ProcessGroup | None = None,
    keep: int = 3,
) -> Path:
    """Save a run after `step` updates; every rank of the group calls it, and all see the same directory.

    The checkpoint exists once every rank's file is on the disk, and not before. Killed at any moment, the one before it
    is still the newest.

    Args:
        directory: where this run's checkpoints are; one run a directory.
        step: updates made so far.
        parts: what to save, by name: `{"model": model, "optimizer": optimizer}`, schedules, and generators that the run
            draws from. Python's, numpy's and torch's own generators are saved always, and each rank's module buffers.
        data_position: where to go on in the data: plain values, equal on all ranks.
        group: the ranks that save together; None is all, or this process alone where there are none.
        keep: newest checkpoints to leave in the directory.

    Returns:
        The new checkpoint.

    Raises:
        ValueError: ranks differ in step or data_position, or a part's state holds more than plain values and tensors.
        CheckpointError: on every rank, when any rank cannot write. What was saved before is untouched.
    """
    if not isinstance(step, int) or not 0 <= step < 10**10:
        raise ValueError(f"step is {step!r}; pass the number of updates made so far")
    if keep < 1:
        raise ValueError(f"keep is {keep}; pass at least 1, or every checkpoint would be deleted")
    rank, world_size = _place(group)
    directory = Path(directory)
    what = f"save step {step} in {str(directory)!r}"
    _together(group, what, lambda: _check_plain(parts, data_position))
    places = _together(group, what, lambda: (step, repr(data_position)))
    if len(set(places)) > 1:
        differ = ", ".join(f"rank {r}: {s} and {d}" for r, (s, d) in enumerate(places))
        raise ValueError(f"ranks save different steps or data positions ({differ}); call save at the same step")
    try:
        prepared = _together(group, what, lambda: files.begin(directory, step) if rank == 0 else None)[0]
        assert prepared is not None
        records = _together(group, what, lambda: _write(prepared, step, parts, data_position, rank))
        manifest = Manifest(step, world_size, tuple(record for own in records for record in own))
        path = _together(group, what, lambda: files.publish(prepared, manifest) if rank == 0 else None)[0]
    except CheckpointError:
        if rank == 0 and directory.is_dir():
            _quietly(lambda: files.discard(directory))
        raise
    if rank == 0:
        _quietly(lambda: files.prune(directory, step, keep))
    assert path is not None
    return path


def load(
    directory: str | Path,
    *,
    parts: Parts,
    group: ProcessGroup | None = None,
    other_world_size: bool = False,
) -> Resumed | None:
    """Take up the newest good checkpoint; None where nothing was saved yet. Every rank of the group calls it.

    Args:
        directory: as given to `save`.
        parts: as given to `save`, made in the same way.
        group: the ranks that load together.
        other_world_size: accept a checkpoint of another number of ranks: shared state is loaded, generators and a
            rank's own buffers are not, so the run is not the uninterrupted one bit for bit.

    Raises:
        ValueError: it was saved by another number of ranks, or the parts do not fit it. No part was changed.
        CheckpointError: on every rank, when any rank cannot read its files.
    """
    rank, world_size = _place(group)
    what = f"resume from {str(directory)!r}"
    found = _together(group, what, lambda: newest(directory) if rank == 0 else None)[0]
    if found is None:
        return None
    same_size = found.world_size == world_size
    if not same_size and not other_world_size:
        raise ValueError(
            f"rank {rank}: {found.path.name} was saved by {found.world_size} ranks, this job has {world_size}; resume "
            f"with {found.world_size}, or pass other_world_size=True to go on with the shared state alone"
        )
    names = [SHARED, rank_file(rank)] if same_size else [SHARED]
    states: list[dict[str, Any]] = []
    _together(group, what, lambda: states.extend(_read(found.path, names)))
    _together(group, what, lambda: _check_fit(parts, *states))
    _together(group, what, lambda: _take_up(parts, *states))
    return Resumed(states[0]["step"], states[0]["data_position"], found.path)


def _place(group: ProcessGroup | None) -> tuple[int, int]:
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _together(group: ProcessGroup | None, what: str, action: Callable[[], Result]) -> list[Result]:
    """Run an action on every rank and return all results; where it fails on one, fail on all with the same text."""
    rank, world_size = _place(group)
    outcome: tuple[str, Any]
    try:
        outcome = "done", action()
    except ValueError as error:
        outcome = "refused", str(error)
    except (OSError, RuntimeError) as error:
        outcome = "failed", str(error)
    outcomes: list[tuple[str, Any]] = [outcome]
    if world_size > 1:
        outcomes = [outcome] * world_size
        dist.all_gather_object(outcomes, outcome, group=group)
    for kind, failure in (("refused", ValueError), ("failed", CheckpointError)):
        texts = [f"rank {r}: {text}" for r, (outcome_kind, text) in enumerate(outcomes) if outcome_kind == kind]
        if texts:
            raise failure(f"cannot {what}: {'; '.join(texts)}")
    return [result for _, result in outcomes]


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except OSError as error:  # leftovers cost room, not correctness
        warnings.warn(f"old checkpoint files could not be removed: {error}", stacklevel=3)


def _write(prepared: Path, step: int, parts: Parts, data_position: Any, rank: int) -> tuple[FileRecord, ...]:
    if not prepared.is_dir():
        raise OSError(f"{prepared} was made by rank 0 and is not seen here; save to a file system that all ranks share")
    own = {
        "random": random_state(),
        "generators": {name: p.get_state() for name, p in parts.items() if isinstance(p, torch.Generator)},
        "buffers": {name: _saved_buffers(p) for name, p in parts.items() if isinstance(p, nn.Module)},
    }
    record = files.write_tensors(prepared, rank_file(rank), own)
    if rank != 0:
        return (record,)
    states = {name: p.state_dict() for name, p in parts.items() if not isinstance(p, torch.Generator)}
    shared = {"step": step, "data_position": data_position, "parts": states}
    return files.write_tensors(prepared, SHARED, shared), record


def _saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict()
    return {name: state[name] for name, _ in module.named_buffers() if name in state}


def _check_plain(parts: Parts, data_position: Any) -> None:
    """Refuse what could be saved but not loaded: loading takes plain values and tensors, and never runs code."""
    _require_plain(data_position, "data_position")
    for name, part in parts.items():
        if not isinstance(part, torch.Generator):
            _require_plain(part.state_dict(), name)


def _require_plain(value: Any, where: str) -> None:
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _require_plain(key, f"a key of {where}")
            _require_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            _require_plain(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN and type(value) is not nn.Parameter:
        raise ValueError(
            f"{where} is a {type(value).__name__}; a checkpoint holds numbers, strings, tensors, and lists and "
            "dictionaries of them: convert it in the part's state_dict()"
        )


def _read(path: Path, names: list[str]) -> list[dict[str, Any]]:
    records = {record.name: record for record in read_manifest(path).files}
    states = []
    for name in names:
        with checked(path, records[name]) as file:
            try:
                states.append(torch.load(file, map_location="cpu", weights_only=True))
            except pickle.UnpicklingError:
                raise ValueError(f"{path.name}/{name} holds more than plain values and tensors; not loaded") from None
    return states


def _check_fit(parts: Parts, shared: dict[str, Any], own: dict[str, Any] | None = None) -> None:
    """Refuse parts that are not those that were saved, before any of them is changed."""
    generators = {name for name, part in parts.items() if isinstance(part, torch.Generator)}
    saved = set(shared["parts"]) | set(own["generators"] if own else generators)
    if saved != set(parts):
        raise ValueError(f"the checkpoint has parts {sorted(saved)}; got {sorted(parts)}")
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            now = {key: _shape(value) for key, value in part.state_dict().items()}
            then = {key: _shape(value) for key, value in shared["parts"][name].items()}
            for key in [*then, *now]:
                if now.get(key) != then.get(key):
                    there, here = then.get(key, "nothing"), now.get(key, "nothing")
                    raise ValueError(f"{name}: {key} is {there} in the checkpoint and {here} in the model")
        elif isinstance(part, torch.optim.Optimizer):
            now_sizes = [len(group["params"]) for group in part.param_groups]
            then_sizes = [len(group["params"]) for group in shared["parts"][name]["param_groups"]]
            if now_sizes != then_sizes:
                raise ValueError(f"{name}: groups of {then_sizes} parameters in the checkpoint, of {now_sizes} here")


def _shape(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


@torch.no_grad()
def _take_up(parts: Parts, shared: dict[str, Any], own: dict[str, Any] | None = None) -> None:
    for name, part in parts.items():
        if isinstance(part, torch.Generator):
            if own is not None:
                part.set_state(own["generators"][name])
            continue
        part.load_state_dict(shared["parts"][name])
        if own is not None and isinstance(part, nn.Module):
            for key, buffer in _saved_buffers(part).items():
                buffer.copy_(own["buffers"][name][key])
    if own is not None:
        restore_random_state(own["random"])
