"""What a rank of a pipeline saves: its own stages and what its optimizer remembers of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


class StageState:
    """This rank's stages and their optimizer, as a part of a checkpoint of which each rank holds a shard.

        parts = {"training": StageState(stages, optimizer)}  # for distlab.checkpoint's save and load

    Cost: no communication; each rank writes the states of its own stages.
    """

    def __init__(self, stages: Mapping[int, nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.stages, self.optimizer = dict(sorted(stages.items())), optimizer

    def shard_state(self) -> dict[str, Any]:
        """Return the states of this rank's stages, by number, and of the optimizer."""
        stages = {
            str(number): {name: _steady(value) for name, value in module.state_dict(keep_vars=True).items()}
            for number, module in self.stages.items()
        }
        return {"stages": stages, "optimizer": self.optimizer.state_dict()}

    def check_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Refuse what was saved by other ranks or for other stages; change nothing.

        Raises:
            ValueError: the number of ranks, the stages of this rank, or the shape of a tensor is a different one.
        """
        if len(states) != 1:
            raise ValueError(
                f"the pipeline was saved by {len(states)} ranks, whose stages are on other ranks than here; "
                f"resume with {len(states)} ranks and the same schedule"
            )
        saved = states[0]["stages"]
        if sorted(map(int, saved)) != list(self.stages):
            raise ValueError(
                f"this rank has stages {list(self.stages)} and the checkpoint {sorted(map(int, saved))}; resume with "
                "the schedule that it was saved with"
            )
        for number, module in self.stages.items():
            _require_same(_kinds(module.state_dict(keep_vars=True)), _kinds(saved[str(number)]), f"stage {number}")
        sizes = [
            [len(group["params"]) for group in state["param_groups"]]
            for state in (self.optimizer.state_dict(), states[0]["optimizer"])
        ]
        _require_same({"parameters per group": sizes[0]}, {"parameters per group": sizes[1]}, "the optimizer")

    def load_shards(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what this rank saved."""
        for number, module in self.stages.items():
            module.load_state_dict(states[0]["stages"][str(number)])
        self.optimizer.load_state_dict(states[0]["optimizer"])


def _steady(value: Any) -> Any:
    """Return a value that the next forward leaves alone: buffers are copied, parameters change in updates only."""
    if isinstance(value, nn.Parameter):
        return value.detach()
    return value.clone() if isinstance(value, torch.Tensor) else value


def _kinds(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in state.items()}


def _require_same(here: Mapping[str, Any], saved: Mapping[str, Any], what: str) -> None:
    for name in sorted(here.keys() | saved.keys()):
        one, other = here.get(name, "nothing"), saved.get(name, "nothing")
        if one != other:
            raise ValueError(f"{what}: {name} is {one} here and {other} in the checkpoint; build the same model")
