"""Stages on a rank that computes more slowly than the others (a straggler)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from simulator.gradients.buckets import BucketCost
from simulator.pipeline.jitter import slow_factors
from simulator.stage.pass_timeline import CallInPass
from simulator.stage.stage import Stage
from simulator.stage.step_times import layer_times


def slow_down(stages: Sequence[Stage], slow_ranks: Mapping[int, float] | None, num_ranks: int) -> tuple[Stage, ...]:
    """Return the stages with all computation of each slow rank stretched: passes, copies, the update; not its messages.

    Raises:
        ValueError: a rank does not exist, or a factor is not positive.
    """
    if not slow_ranks:
        return tuple(stages)
    factors = slow_factors(slow_ranks, num_ranks).tolist()
    return tuple(stage if factors[stage.rank] == 1 else _slow(stage, factors[stage.rank]) for stage in stages)


def _slow(stage: Stage, factor: float) -> Stage:
    forward, backward, inputs = (
        layer_times(times, factor) for times in (stage.forward_ns, stage.backward_ns, stage.input_gradient_ns)
    )
    weights, calls = stage.weight_gradient_ns, stage.calls
    if calls:
        passes = [
            [_slow_pass(*layer, factor) for layer in zip(times, calls, strict=True)]
            for times, calls in zip(stage.passes_ns, calls, strict=True)
        ]
        forward, backward, inputs, weights = (tuple(time for time, _ in each) for each in passes)
        calls = tuple(tuple(calls for _, calls in each) for each in passes)
    else:
        inputs = tuple(min(whole, part) for whole, part in zip(backward, inputs, strict=True))
    return replace(
        stage,
        forward_ns=forward,
        backward_ns=backward,
        input_gradient_ns=inputs,
        weight_gradient_ns=weights,
        calls=calls,
        optimizer_ns=round(stage.optimizer_ns * factor),
        buckets=tuple(_slow_bucket(bucket, factor) for bucket in stage.buckets),
        units=tuple(
            unit._replace(
                pack_ns=round(unit.pack_ns * factor),
                unpack_ns=round(unit.unpack_ns * factor),
                show_ns=round(unit.show_ns * factor),
            )
            for unit in stage.units
        ),
    )


def _slow_pass(duration_ns: int, calls: Sequence[CallInPass], factor: float) -> tuple[int, tuple[CallInPass, ...]]:
    """Stretch the computation of a pass that has calls inside; a call's exposed time is kept.

    Error: the time by which a call outlasts the computation that hides it is kept, although that computation becomes
        longer.
    """
    spare = sum(call.exposed_ns for call in calls)
    waited, moved = 0, []
    for call in calls:
        begin = round((call.start_ns - waited) * factor) + waited
        end = round((call.end_ns - waited - call.exposed_ns) * factor) + waited + call.exposed_ns
        waited += call.exposed_ns
        moved.append(call._replace(start_ns=begin, end_ns=end))
    return round((duration_ns - spare) * factor) + spare, tuple(moved)


def _slow_bucket(bucket: BucketCost, factor: float) -> BucketCost:
    later = bucket.later and bucket.later._replace(
        between_ns=round(bucket.later.between_ns * factor), after_ns=round(bucket.later.after_ns * factor)
    )
    pack, unpack = round(bucket.pack_ns * factor), round(bucket.unpack_ns * factor)
    return bucket._replace(pack_ns=pack, unpack_ns=unpack, later=later)
