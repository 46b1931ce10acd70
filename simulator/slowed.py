"""Slowed: stages on a rank that computes more slowly than the others (a straggler)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from simulator.jitter import slow_factors
from simulator.stages import Stage
from simulator.syncs import Sync
from simulator.times import layer_times


def slowed(stages: Sequence[Stage], slow_ranks: Mapping[int, float] | None, num_ranks: int) -> tuple[Stage, ...]:
    """Return the stages with what each slow rank computes stretched: passes, copies, the update; no message.

    Raises:
        ValueError: there is no such rank, or a factor is not positive.
    """
    factors = slow_factors(slow_ranks, num_ranks).tolist()
    return tuple(stage if factors[stage.rank] == 1 else _slow(stage, factors[stage.rank]) for stage in stages)


def _slow(stage: Stage, factor: float) -> Stage:
    return replace(
        stage,
        forward_ns=layer_times(stage.forward_ns, factor),
        backward_ns=layer_times(stage.backward_ns, factor),
        input_gradient_ns=tuple(
            min(whole, part)
            for whole, part in zip(
                layer_times(stage.backward_ns, factor), layer_times(stage.input_gradient_ns, factor), strict=True
            )
        ),
        optimizer_ns=round(stage.optimizer_ns * factor),
        syncs=tuple(_slow_sync(sync, factor) for sync in stage.syncs),
        units=tuple(
            replace(
                unit,
                pack_ns=round(unit.pack_ns * factor),
                unpack_ns=round(unit.unpack_ns * factor),
                show_ns=round(unit.show_ns * factor),
                sum_ns=round(unit.sum_ns * factor),
            )
            for unit in stage.units
        ),
    )


def _slow_sync(sync: Sync, factor: float) -> Sync:
    later = sync.later and sync.later._replace(
        between_ns=round(sync.later.between_ns * factor), after_ns=round(sync.later.after_ns * factor)
    )
    pack, unpack = round(sync.pack_ns * factor), round(sync.unpack_ns * factor)
    return replace(sync, pack_ns=pack, unpack_ns=unpack, later=later)
