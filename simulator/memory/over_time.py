"""What a rank holds while it runs its passes, in any order and for any of its stages.

While one stage works, the rank's other stages rest: they hold the activations of the micro-batches that they have in
flight, and the gradients that they have made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.memory.model_states import GRADIENTS, KINDS
from simulator.memory.stage import AFTER, FIRST, LAST, MIDDLE, NONE, ONLY, Ints, StageBytes
from simulator.pipeline.schedule_arrays import CHANGE, B, F, I, ScheduleArrays, W

WAITS = np.array([0, 0, 1, -1])  # of what has had its I and not its W


class RankPasses(NamedTuple):
    """What a rank runs, in order.

    Attributes:
        stage: of each pass [A].
        kind: F, B, I or W [A].
    """

    stage: Ints
    kind: Ints

    @property
    def stages(self) -> tuple[int, ...]:
        """The rank's stages."""
        return tuple(np.unique(self.stage).tolist())

    @property
    def peak_in_flight(self) -> int:
        """The largest number of micro-batches (per stage) in flight: forward has run, and B or W has not."""
        return int(np.cumsum(CHANGE[self.kind]).max(initial=0))


def passes_of_ranks(order: ScheduleArrays) -> tuple[RankPasses, ...]:
    """Return what each rank runs."""
    bounds = zip(order.offsets[:-1].tolist(), order.offsets[1:].tolist(), strict=True)
    stage, kind = order.stage.astype(np.int64), order.kind.astype(np.int64)
    return tuple(RankPasses(stage[first:stop], kind[first:stop]) for first, stop in bounds)


def one_f_one_b_passes(stage: int, in_flight: int, total: int) -> RankPasses:
    """Return the order of one stage: forwards until `in_flight` are held, then one backward for one forward."""
    steady = np.tile([B, F], total - in_flight)
    kind = np.concatenate([np.full(in_flight, F), steady, np.full(in_flight, B)])
    return RankPasses(np.full(len(kind), stage), kind)


@dataclass(frozen=True, eq=False)
class TimedPasses:
    """When a rank's passes run, in its order.

    Attributes:
        order: what each pass is.
        start_ns: [A].
        end_ns: [A].
        layers_ns: of each stage, times of each layer in an F, B, I and W; a pass that takes longer is stretched.
        update_ns: start and end of the optimizer's update.
    """

    order: RankPasses
    start_ns: Ints
    end_ns: Ints
    layers_ns: Mapping[int, Sequence[Sequence[int]]]
    update_ns: tuple[int, int]

    def moments(self) -> Ints:
        """Return when each layer of each pass begins, and the pass ends, and the update's two; as `rows_of`."""
        stage, kind = self.order
        places, size = _places(stage, {number: len(layers[F]) for number, layers in self.layers_ns.items()})
        moments = np.empty(size, np.int64)
        for number, layers_ns in self.layers_ns.items():
            mine = np.flatnonzero(stage == number)
            passes = [np.array(layers, np.int64)[:: 1 if code == F else -1] for code, layers in enumerate(layers_ns)]
            shares = np.stack([_shares(layers) for layers in passes])[kind[mine]]
            inside = np.rint(shares * (self.end_ns - self.start_ns)[mine, None]).astype(np.int64)
            moments[places[number]] = self.start_ns[mine, None] + inside
        return np.append(moments, self.update_ns)


def untimed(order: RankPasses, num_layers: Mapping[int, int]) -> TimedPasses:
    """Return passes one after the other, where a layer's forward takes 1, and its backward 2 (I and W 1 each)."""
    layers = np.array([num_layers.get(stage, 0) for stage in range(int(order.stage.max(initial=0)) + 1)])
    length = np.array([1, 2, 1, 1])[order.kind] * layers[order.stage]
    end = np.cumsum(length)
    each = {stage: [[unit] * count for unit in (1, 2, 1, 1)] for stage, count in num_layers.items()}
    last = int(end[-1])
    return TimedPasses(order, end - length, end, each, (last, last + sum(num_layers.values())))


def rows_of(own: Mapping[int, StageBytes], order: RankPasses) -> Ints:
    """Return what a rank holds all through a step: as each layer of each pass begins, after the pass, at the update.

    Shapes: A passes of L layers -> [A (L + 1) + 2, K], where L may differ between stages
    """
    return _evaluate(own, order, *_states(own, order))


def peaks_of(own: Mapping[int, StageBytes], order: RankPasses) -> tuple[Ints, Ints]:
    """Return the most of each kind, and the kinds at the fullest moment; each state of the rank is looked at once."""
    table = np.unique(np.column_stack([*order, *_states(own, order)]), axis=0)
    order, states = RankPasses(table[:, 0], table[:, 1]), np.split(table[:, 2:], 3, axis=1)
    rows = _evaluate(own, order, *states)
    return rows.max(axis=0), rows[rows.sum(axis=1).argmax()]


def _states(own: Mapping[int, StageBytes], order: RankPasses) -> tuple[Ints, Ints, Ints]:
    """Return, for each pass, what every stage of the rank has in flight, without the one at work, and its phase.

    Of what is in flight, the second array counts the micro-batches that wait for their W.
    """
    stage, kind = order
    others, waiting, phases = [], [], []
    for number in own:
        mine = stage == number
        in_flight = np.cumsum(np.where(mine, CHANGE[kind], 0))
        others.append(in_flight - (mine & ((kind == F) | (kind == I))))
        waits = np.cumsum(np.where(mine, WAITS[kind], 0))
        waiting.append(waits - (mine & (kind == I)))
        weighs = mine & ((kind == B) | (kind == W))
        made = np.cumsum(weighs)
        total = int(made[-1])
        rest = np.where(made == 0, NONE, np.where(made == total, AFTER, MIDDLE))
        at_work = np.where(made == 1, FIRST if total > 1 else ONLY, np.where(made == total, LAST, MIDDLE))
        phases.append(np.where(weighs, at_work, rest))
    return np.stack(others, axis=1), np.stack(waiting, axis=1), np.stack(phases, axis=1)


def _evaluate(own: Mapping[int, StageBytes], order: RankPasses, others: Ints, waiting: Ints, phase: Ints) -> Ints:
    always = np.sum([each.always for each in own.values()], axis=0)
    places, size = _places(order.stage, {number: len(each.kept) for number, each in own.items()})
    out = np.empty((size + 2, len(KINDS)), np.int64)
    for at, (number, each) in enumerate(own.items()):
        mine = order.stage == number
        rows = each.working(order.kind[mine], others[mine, at], waiting[mine, at], phase[mine, at])
        for place, other in enumerate(own.values()):
            if place != at:
                rows += other.resting(others[mine, place], waiting[mine, place], phase[mine, place])[:, None]
        out[places[number]] = rows + always
    out[-1] = always
    out[-1, GRADIENTS] += sum(int(each.gradients[-1]) for each in own.values())
    out[-2] = out[-1] + np.max([each.update for each in own.values()], axis=0)
    return out


def _places(stage: Ints, num_layers: Mapping[int, int]) -> tuple[dict[int, Ints], int]:
    """Return where each stage's passes stand among all rows [A of the stage, L + 1], and how many rows there are."""
    lengths = np.zeros(int(stage.max(initial=0)) + 1, np.int64)
    for number, count in num_layers.items():
        lengths[number] = count + 1
    ends = np.cumsum(lengths[stage])
    begins = ends - lengths[stage]
    places = {number: begins[stage == number, None] + np.arange(count + 1) for number, count in num_layers.items()}
    return places, int(ends[-1])


def _shares(layers_ns: Ints) -> NDArray[np.float64]:
    """Return where in a pass each layer begins, and the end, from 0 to 1; equal parts where nothing takes time."""
    if not layers_ns.any():
        layers_ns = np.ones_like(layers_ns)
    return np.concatenate([[0.0], np.cumsum(layers_ns) / layers_ns.sum()])
