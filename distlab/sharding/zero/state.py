"""What `ShardedOptimizer` saves: each rank its own parts by tensor names, or the whole state for any program.

Both load at any number of ranks, with any buckets and at either stage. See `distlab.sharding.state` for the format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from distlab.blocks.modules.named_parts import SavedShard
from distlab.sharding.cut_layers import CutLayers, OwnPieces
from distlab.sharding.state.parts import (
    SavedInShards,
    gather_optimizer,
    prepare,
    prepare_optimizer,
    save_parts,
)
from distlab.sharding.zero.shard_bucket import ShardBucket


class SavesShards(SavedInShards):
    """The states of an optimizer that works on this rank's pieces of buckets."""

    optimizer: torch.optim.Optimizer
    buckets: Sequence[ShardBucket]
    group: ProcessGroup | None
    cut: CutLayers
    _versions: list[int]
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
        self.load_shards([state_dict])

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's shard, for a checkpoint: views, to save or copy before the next update."""
        first = self.buckets[0]
        parts, groups = save_parts(self._pieces(), self.optimizer, parameters=False)
        return SavedShard(first.rank, first.num_ranks, parts, groups).to_dict()

    def full_state_dict(self, *, to_rank: int | None = None) -> dict[str, Any] | None:
        """Return the whole state, by names: {"state": {name: {key: value}}, "param_groups": [{..., "params": names}]}.

        Every rank calls this. Groups have their parameters in the order of one process. So a plain optimizer, built of
        the same groups of the whole model, loads it by its own `load_state_dict`.

        Args:
            to_rank: the only rank of the group that wants it; others get None. None: every rank does.

        Shapes: pieces -> moments in the parameter's whole shape, in host memory.
        Cost: one all-gather per bucket of all moments; where layers are cut, one more over the tensor ranks.
        """
        return gather_optimizer(self._pieces(), self.optimizer, self.group_names, "full_state_dict", to_rank)

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's pieces out of what `full_state_dict` returned, at any number of ranks.

        Args:
            state_dict: of `full_state_dict`, or of a plain optimizer of the same groups of the whole model.

        Raises:
            ValueError: the state is of other parameters or shapes; nothing was loaded then. The same on every rank.
        """
        self._taking(prepare_optimizer(self._pieces(), self.optimizer, self.group_names, state_dict))()

    def prepare_shards(self, saved: Sequence[SavedShard]) -> Callable[[], None]:
        """Assemble this rank's pieces from saved shards; return a function that loads them. Nothing changes yet.

        Raises:
            ValueError: they do not fit, or shards are missing.
        """
        return self._taking(prepare(self._pieces(), self.optimizer, saved, parameters=False))

    def _taking(self, take: Callable[[], None]) -> Callable[[], None]:
        def taking() -> None:
            take()
            self._note_values()  # whoever loads a state loads the parameters too, on all ranks

        return taking

    def _note_values(self) -> None:
        """Take what the buckets hold now for equal on all ranks: only `step` sends what changes."""
        self._versions = [bucket.whole._version for bucket in self.buckets]

    def _pieces(self) -> OwnPieces:
        held = [(bucket.layout, bucket.kind[0], bucket.pieces) for bucket in self.buckets]
        return OwnPieces.of(held, self.cut, self.group)
