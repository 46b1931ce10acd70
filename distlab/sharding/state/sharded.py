"""The state of a sharded model and its optimizer in shards: saved by one number of ranks and loaded by another.

1. `shard_state`: this rank's shard, which says what it holds (see `named_parts`). Ranks exchange nothing.
2. `sharded_state_dict`: the same, and the ranks' digests, so that shards of two saves are never taken for one.
3. `load_sharded_state_dict`: from the shards that *any* number of ranks saved.
4. `ShardedState`: model and optimizer as one part of a checkpoint (`distlab.checkpoint`), one file per rank.

Whole tensors, as the module has them without sharding, are in `full`. Functions that communicate are collective: every
rank of the group calls them. What one rank must refuse, all refuse, before anything has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from distlab.comm import agree
from distlab.modules.named_parts import PARAMETER, SavedShard, check_tensors
from distlab.sharding.cut_layers import check_saves
from distlab.sharding.fsdp.fully_shard import FullyShard
from distlab.sharding.state.model_tensors import (
    aliases,
    check_buffers,
    copied_buffers,
    expected_tensors,
    refuse_together,
    shared_buffer,
)
from distlab.sharding.state.optimizer_parts import Optimizer, assemble_rows, prepare_optimizer, save_parts


def shard_state(model: FullyShard, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return this rank's shard of the model, and of the optimizer's state: views; nothing is sent.

    Raises:
        ValueError: the optimizer is of a different model, or keeps what cannot be cut.
    """
    parts, groups = save_parts([shared_buffer(unit) for unit in model.units], optimizer, parameters=True)
    shard, num_shards = dist.get_rank(model.group), dist.get_world_size(model.group)
    tied = {name: same for name, same in aliases(model).items() if name != same}
    parts = model.cut.named_for_all(parts)
    return SavedShard(shard, num_shards, parts, groups, copied_buffers(model), aliases=tied).to_dict()


def sharded_state_dict(model: FullyShard, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return this rank's shard, with the digests of all shards of this save; every rank of the group calls it.

    The dictionary holds plain values and tensors in host memory: save it with torch.save, one file per rank.

    Cost: one all-gather of 64 bytes per rank; this rank's shards are hashed.

    Raises:
        ValueError: on every rank, when a rank has an optimizer of a different model, or one whose state cannot be cut.
    """
    agree(["sharded_state_dict", optimizer is not None], model.group, what="sharded_state_dict (with an optimizer)")
    state = refuse_together(model, "save the shards", lambda: shard_state(model, optimizer))
    saved = SavedShard.from_dict(state).copied()
    digests = [""] * saved.num_shards
    dist.all_gather_object(digests, saved.digest(), group=model.group)
    return dataclasses.replace(saved, digests=tuple(digests)).to_dict()


def load_sharded_state_dict(
    model: FullyShard,
    states: Sequence[Mapping[str, Any]],
    optimizer: Optimizer | None = None,
    *,
    convert: bool = False,
) -> None:
    """Load a state that any number of ranks saved, with any units. Every rank of the group calls this.

    Args:
        model: of the same tensors; nothing of it has changed when an error is raised.
        states: what `sharded_state_dict` returned on all ranks, in any order. A rank that had the same shard then may
            pass its own alone.
        optimizer: takes its state from the same shards.
        convert: round values of another type to the model's.

    Cost: only the outcome of the checks is exchanged.
    Error: exact where the types are the same.

    Raises:
        ValueError: on every rank, with the text of the ranks that refused: a different model or precision, a missing
            shard, shards of two saves, or an optimizer of other groups.
    """
    agree(["load_sharded_state_dict", optimizer is not None, convert], model.group, what="load_sharded_state_dict")
    apply = refuse_together(model, "load the shards", lambda: prepare(model, states, optimizer, convert=convert))
    apply()


def prepare(
    model: FullyShard, states: Sequence[Mapping[str, Any]], optimizer: Optimizer | None = None, *, convert: bool = False
) -> Callable[[], None]:
    """Check saved shards against a model and assemble this rank's; return a function that loads it.

    Raises:
        ValueError: they do not fit; nothing has changed.
    """
    given, expected = [SavedShard.from_dict(state) for state in states], expected_tensors(model)
    check_saves(given)
    saved = model.cut.of_this_rank(given, {name: shape for name, (shape, _) in expected.items()})
    check_tensors(saved, expected, convert=convert)
    shared = [shared_buffer(unit) for unit in model.units]
    mine = assemble_rows(shared, saved)
    rank = dist.get_rank(model.group)
    own = min(saved, key=lambda one: (one.shard != rank, one.shard))  # buffers: its own, or those of the first shard
    buffers = check_buffers(model, own.buffers or {})
    take_state = None if optimizer is None else prepare_optimizer(optimizer, shared, saved, mine)

    def apply() -> None:
        with torch.no_grad():
            for unit in model.units:
                unit.shard.copy_(mine[id(unit.shard)][0][PARAMETER])
            for take in buffers:
                take()
        if take_state is not None:
            take_state()

    return apply


class ShardedState:
    """A sharded model and its optimizer, as one part of a checkpoint: each rank saves its own shard.

        parts = {"training": ShardedState(model, optimizer), "schedule": schedule}
        save(directory, step, parts=parts)

    At another number of ranks `load(..., reshard=True)` gives it the shards of all ranks that saved.
    """

    def __init__(self, model: FullyShard, optimizer: Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's state: views, to save or copy before the next update."""
        return shard_state(self.model, self.optimizer)

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse states that do not fit, before anything has changed.

        Raises:
            ValueError: as `load_sharded_state_dict`.
        """
        prepare(self.model, states, self.optimizer)

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's shard from the states of all ranks, or from the state that this rank saved."""
        prepare(self.model, states, self.optimizer)()
