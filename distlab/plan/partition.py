"""Cutting a list into contiguous parts: layers into stages, elements into shards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CUTS = ("time", "blocks")  # how layers are cut into stages: see `balance` and `even_blocks`


def split_evenly(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut range(total) into ranges (start, stop); the first `total % parts` get one more than the others.

    A range is empty where there are more parts than things.

    Raises:
        ValueError: total is negative, or parts is below one.
    """
    if total < 0 or parts < 1:
        raise ValueError(f"cannot split {total} into {parts} parts; pass a total of at least 0 and at least 1 part")
    size, larger = divmod(total, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return tuple(zip(starts[:-1], starts[1:], strict=True))


def balance(costs: Sequence[float], stages: int) -> tuple[tuple[int, int], ...]:
    """Cut layers into contiguous stages so that the costliest stage is as cheap as can be; no stage is empty.

    Of equally good cuts it takes the one whose last stages have more layers: under 1F1B the first stages hold the most
    activations.

    Raises:
        ValueError: fewer layers than stages, or a cost that is negative or not a number.
    """
    return Cuts(costs).into(stages)


class Cuts:
    """The cuts of `balance` of one list of layers into any number of stages.

    Source: dynamic program over prefixes: the best cut of the first i layers into k stages ends with some last stage
        (j, i). It costs the larger of that stage and of the best cut of the first j layers into k - 1 stages.
    """

    def __init__(self, costs: Sequence[float]) -> None:
        """Take the costs.

        Raises:
            ValueError: a cost is negative or not a number.
        """
        for layer, cost in enumerate(costs):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"layer {layer} costs {cost}; pass finite costs of at least 0")
        prefix = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
        self._layers = np.arange(len(costs) + 1)
        after = self._layers < self._layers[:, None]
        self._stage_cost = np.where(after, prefix[:, None] - prefix, np.inf)  # [i, j]: layers j to i - 1
        self._best = self._stage_cost[:, 0]
        self._cuts: list[NDArray[np.int64]] = []  # the first layer of the last of 2, 3, ... stages

    def into(self, stages: int) -> tuple[tuple[int, int], ...]:
        """Return the first layer of each stage and one past its last.

        Raises:
            ValueError: fewer layers than stages.
        """
        num_layers = len(self._layers) - 1
        if not 1 <= stages <= num_layers:
            text = f"{num_layers} layers cannot fill {stages} stages; use at least 1 and at most {num_layers} stages"
            raise ValueError(text)
        while len(self._cuts) < stages - 1:
            candidates = np.maximum(self._best, self._stage_cost)
            cut = candidates.argmin(axis=1)
            self._best = candidates[self._layers, cut]
            self._cuts.append(cut)
        bounds = [num_layers]
        for cut in reversed(self._cuts[: stages - 1]):
            bounds.append(int(cut[bounds[-1]]))
        bounds = [0, *reversed(bounds)]
        return tuple(zip(bounds[:-1], bounds[1:], strict=True))


def even_blocks(first: int, stop: int, num_layers: int, stages: int) -> tuple[tuple[int, int], ...]:
    """Cut layers into stages with as many blocks each, whatever they cost; the blocks are layers first to stop - 1.

    Layers before the blocks go to the first stage, those behind to the last one. Where both together make the blocks
    divide, each of them counts as a block: 22 blocks fill 8 stages as 2, 3, ..., 3, 2.

    Raises:
        ValueError: the blocks do not divide.

    Source: Megatron-LM's stages; Llama 3 (2407.21783, section 3.3.2) and 2401.10241 (section 5.1) take a block off both
        ends.
    """
    count = stop - first
    ends = count % stages and not (count + 2) % stages
    if count % stages and not ends:
        raise ValueError(
            f"{count} blocks do not divide into {stages} equal stages, nor with the two ends counted as blocks; use a "
            f"divisor of {count} or of {count + 2} stages, or cut='time'"
        )
    each = (count + 2) // stages if ends else count // stages
    starts = [first + number * each - bool(ends) for number in range(1, stages)]
    bounds = [0, *starts, num_layers]
    return tuple(zip(bounds[:-1], bounds[1:], strict=True))
