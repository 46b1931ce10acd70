"""What a checkpoint needs of a part of which every rank has a state of its own (`distlab.checkpoint.parts.Sharded`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class _Stateful(Protocol):
    """Whoever gives and takes a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take it back, or raise ValueError and change nothing."""


class SavesOwnState:
    """Give `state_dict` and `load_state_dict` to checkpoints as this rank's own: written by each rank, not by rank 0.

    Such a state goes back to the rank it came from. For another number of ranks there is the full state.
    """

    def shard_state(self: _Stateful) -> dict[str, Any]:
        """Return this rank's state."""
        return self.state_dict()

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse the states of more than this rank.

        Raises:
            ValueError: they were saved by another number of ranks.
        """
        if len(states) != 1:
            raise ValueError(
                f"a {type(self).__name__}'s state goes back to the rank that saved it, and {len(states)} ranks saved; "
                "save full_state_dict() beside it, and load that with load_full_state_dict()"
            )

    def load_shards(self: _Stateful, states: Sequence[Mapping[str, Any]]) -> None:
        """Take this rank's state back."""
        self.load_state_dict(states[0])
