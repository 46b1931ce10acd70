"""Parts of which each rank has its own values: layers that are cut over ranks, experts, stages of a pipeline.

What `save` writes for all is rank 0's. Wrapped in a `PerRank`, each rank's state goes into its own file and comes back
to that rank. Only as many ranks as saved can load it: nothing here knows how the parts were cut. A `Hybrid` does know,
and can be loaded on other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from distlab.checkpoint.parts import Stateful, check_fit, is_own, kinds_of
from distlab.comm.together import place_in


class PerRank:
    """Parts that each rank saves for itself.

        save(directory, step, parts={"training": PerRank({"model": model, "optimizer": optimizer})})

    Args:
        parts: by name: modules, optimizers and the like, as of `save`.
        group: the ranks that save together.

    Raises:
        ValueError: a part is each rank's own as it is, such as a generator.
    """

    def __init__(self, parts: Mapping[str, Stateful], group: ProcessGroup | None = None) -> None:
        for name, part in parts.items():
            if is_own(part):
                raise ValueError(f"{name} is saved per rank already; pass it to save() itself, not in a PerRank")
        self._parts = dict(parts)
        self._rank, self._world_size = place_in(group)

    def shard_state(self) -> dict[str, Any]:
        """Return this rank's states, and whose they are."""
        states = {name: part.state_dict() for name, part in self._parts.items()}
        place = {"rank": self._rank, "world_size": self._world_size}
        return {**place, "kinds": kinds_of(self._parts), "parts": states}

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError where these are not this rank's, or do not fit."""
        check_fit(self._parts, dict(self._own(states)), [])

    @torch.no_grad()
    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up this rank's states."""
        own = self._own(states)["parts"]
        for name, part in self._parts.items():
            part.load_state_dict(own[name])

    def _own(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        mine = [one for one in states if (one["rank"], one["world_size"]) == (self._rank, self._world_size)]
        if len(mine) != 1:
            there = sorted({one["world_size"] for one in states})
            raise ValueError(
                f"a PerRank was saved by {', '.join(map(str, there))} ranks and this job has {self._world_size}; it "
                "cannot be divided among a different number of ranks: start as many as saved it, or save a Hybrid"
            )
        return mine[0]
