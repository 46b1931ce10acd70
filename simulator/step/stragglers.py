"""Slowed: stages on a rank that computes more slowly than the others (a straggler)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from simulator.gradients.buckets import Sync
from simulator.pipeline.jitter import slow_factors
from simulator.stage.pass_timeline import Piece
from simulator.stage.stage import Stage
from simulator.stage.step_times import layer_times


def slowed(stages: Sequence[Stage], slow_ranks: Mapping[int, float] | None, num_ranks: int) -> tuple[Stage, ...]:
    """Return the stages with what each slow rank computes stretched: passes, copies, the update; no message.

    Raises:
        ValueError: there is no such rank, or a factor is not positive.
    """
    if not slow_ranks:
        return tuple(stages)
    factors = slow_factors(slow_ranks, num_ranks).tolist()
    return tuple(stage if factors[stage.rank] == 1 else _slow(stage, factors[stage.rank]) for stage in stages)


def _slow(stage: Stage, factor: float) -> Stage:
    forward, backward, inputs = (
        layer_times(times, factor) for times in (stage.forward_ns, stage.backward_ns, stage.input_gradient_ns)
    )
    weights, pieces = stage.weight_gradient_ns, stage.pieces
    if pieces:
        passes = [
            [_slow_pass(*layer, factor) for layer in zip(times, calls, strict=True)]
            for times, calls in zip(stage.passes_ns, pieces, strict=True)
        ]
        forward, backward, inputs, weights = (tuple(time for time, _ in each) for each in passes)
        pieces = tuple(tuple(calls for _, calls in each) for each in passes)
    else:
        inputs = tuple(min(whole, part) for whole, part in zip(backward, inputs, strict=True))
    return replace(
        stage,
        forward_ns=forward,
        backward_ns=backward,
        input_gradient_ns=inputs,
        weight_gradient_ns=weights,
        pieces=pieces,
        optimizer_ns=round(stage.optimizer_ns * factor),
        syncs=tuple(_slow_sync(sync, factor) for sync in stage.syncs),
        units=tuple(
            unit._replace(
                pack_ns=round(unit.pack_ns * factor),
                unpack_ns=round(unit.unpack_ns * factor),
                show_ns=round(unit.show_ns * factor),
                sum_ns=round(unit.sum_ns * factor),
            )
            for unit in stage.units
        ),
    )


def _slow_pass(duration_ns: int, pieces: Sequence[Piece], factor: float) -> tuple[int, tuple[Piece, ...]]:
    """Stretch the work of a pass with calls inside; what was exposed of a call stays as long as it was.

    Error: a call that stuck out of the work beside it does so as far as before, though that work takes longer.
    """
    spare = sum(piece.exposed_ns for piece in pieces)
    waited, moved = 0, []
    for piece in pieces:
        begin = round((piece.start_ns - waited) * factor) + waited
        end = round((piece.end_ns - waited - piece.exposed_ns) * factor) + waited + piece.exposed_ns
        waited += piece.exposed_ns
        moved.append(piece._replace(start_ns=begin, end_ns=end))
    return round((duration_ns - spare) * factor) + spare, tuple(moved)


def _slow_sync(sync: Sync, factor: float) -> Sync:
    later = sync.later and sync.later._replace(
        between_ns=round(sync.later.between_ns * factor), after_ns=round(sync.later.after_ns * factor)
    )
    pack, unpack = round(sync.pack_ns * factor), round(sync.unpack_ns * factor)
    return sync._replace(pack_ns=pack, unpack_ns=unpack, later=later)
