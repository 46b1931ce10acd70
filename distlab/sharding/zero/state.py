"""What `ShardedOptimizer` saves: each rank its own parts by tensor names, or the whole state for any program.

Both load at any number of ranks, with any buckets and at either stage. See `distlab.sharding.state` for the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from distlab.comm import agree
from distlab.modules.named_parts import SavedShard, check_tensors
from distlab.plan.sharding import Piece
from distlab.sharding.cut_layers import CutLayers, check_saves
from distlab.sharding.state.assemble import HeldRow
from distlab.sharding.state.optimizer_parts import (
    SharedBuffer,
    as_one_shard,
    assemble_rows,
    gather_whole,
    prepare_optimizer,
    save_parts,
)
from distlab.sharding.state.plain_state import by_names, kept_once
from distlab.sharding.zero.scatter_in_backward import KeptAlike
from distlab.sharding.zero.shard_bucket import ShardBucket


class SavesShards:
    """The states of an optimizer that works on this rank's pieces of buckets.

    As a part of a checkpoint each rank writes its own shard; another number of ranks takes the shards of all.
    """

    optimizer: torch.optim.Optimizer
    buckets: Sequence[ShardBucket]
    group: ProcessGroup | None
    cut: CutLayers
    _kept: KeptAlike
    group_names: list[list[str]]  # of all parameters in the optimizer's groups, in the order of one process

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state, in host memory; every rank saves its own, and nothing is sent."""
        return SavedShard.from_dict(self.shard_state()).copied().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned on this rank.

        Raises:
            ValueError: it is of a different model, a different rank or a different number of ranks.
        """
        first = self.buckets[0]
        saved = SavedShard.from_dict(state_dict)
        for what, got, expected in (
            ("number of ranks", saved.num_shards, first.num_ranks),
            ("rank", saved.shard, first.rank),
        ):
            if got != expected:
                raise ValueError(
                    f"rank {first.rank}: the state's {what} is {got}, expected {expected}; load the state of this "
                    "model, rank and number of ranks, or a full one with load_full_state_dict"
                )
        self._prepare([saved])()

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's shard, for a checkpoint: views, to save or copy before the next update."""
        first = self.buckets[0]
        parts, groups = save_parts(self._shared(), self.optimizer, parameters=False)
        return SavedShard(first.rank, first.num_ranks, self.cut.named_for_all(parts), groups).to_dict()

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse the shards of a different model; change nothing.

        Raises:
            ValueError: they do not fit, or shards are missing.
        """
        self._prepare([SavedShard.from_dict(state) for state in states])

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load this rank's parts out of all ranks' states, or its own state as it saved it."""
        self._prepare([SavedShard.from_dict(state) for state in states])()

    def full_state_dict(self, *, to_rank: int | None = None) -> dict[str, Any] | None:
        """Return the whole state, by names: {"state": {name: {key: value}}, "param_groups": [{..., "params": names}]}.

        Every rank calls this. Groups have their parameters in the order of one process. So a plain optimizer, built of
        the same groups of the whole model, loads it by its own `load_state_dict`.

        Args:
            to_rank: the only rank of the group that wants it; others get None. None: every rank does.

        Shapes: pieces -> moments in the parameter's whole shape, in host memory.
        Cost: one all-gather per bucket and moment, and names and plain values; and each moment of a cut layer.
        """
        agree("full_state_dict", self.group, what="the call that is made")
        keeps = to_rank in (None, dist.get_rank(self.group))
        shared = self._shared()
        state, groups = gather_whole(
            shared, *save_parts(shared, self.optimizer, parameters=False), self.group, keeps=keeps
        )
        return self.cut.whole_state(state, groups, self.group_names) if keeps else None

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's pieces out of what `full_state_dict` returned, at any number of ranks.

        Args:
            state_dict: of `full_state_dict`, or of a plain optimizer of the same groups of the whole model.

        Raises:
            ValueError: the state is of other parameters or shapes; nothing was loaded then. The same on every rank.
        """
        state, groups = by_names(state_dict, self.group_names)
        state = {name: {key: self.cut.own(name, value) for key, value in one.items()} for name, one in state.items()}
        shapes = self._shapes()
        self._prepare([as_one_shard(state, groups, shapes, kept_once(state, shapes))])()

    def _shared(self) -> list[SharedBuffer]:
        shapes = self._shapes()
        return [
            SharedBuffer(
                bucket.layout,
                bucket.edges,
                [
                    HeldRow(one.parameter, (one.name,), (shapes[one.name],), (Piece(0, one.start, one.stop, 0),))
                    for one in bucket.pieces
                ],
            )
            for bucket in self.buckets
        ]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        layouts = [bucket.layout for bucket in self.buckets]
        return {name: shape for one in layouts for name, shape in zip(one.names, one.shapes, strict=True)}

    def _prepare(self, given: Sequence[SavedShard]) -> Callable[[], None]:
        check_saves(given)
        shapes = self._shapes()
        saved = self.cut.of_this_rank(given, shapes)
        check_tensors(saved, {name: (shape, None) for name, shape in shapes.items()})
        shared = self._shared()
        take = prepare_optimizer(self.optimizer, shared, saved, assemble_rows(shared, saved))

        def taking() -> None:
            take()
            self._kept.note()  # whoever loads a state loads the parameters too, on all ranks

        return taking
