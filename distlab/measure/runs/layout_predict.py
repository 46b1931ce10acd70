"""Predict a step of any layout: one count of the whole model, this machine's speeds, and the simulator.

Where there are more ranks than cores, ranks take turns at computing: one that waits gives its core to the others, so a
pipeline's bubbles are filled with the other ranks' work. What is predicted then is the sum of what all ranks do over
the cores, and no longer when each of them waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from distlab.measure.machine.speed import Round, fit_cluster, median_round
from distlab.measure.runs.layout_calls import Seconds, layout_links, median_layout_calls
from distlab.plan import AXES, Layer, Plan, Work, Workload
from simulator import Measured, Step, simulate


class PassCost(NamedTuple):
    """What a pass of a block cost in a model, beyond its work and its calls.

    Attributes:
        row_bytes: of what a block hands on, a micro-batch of all positions.
        seconds: of a forward, or of a backward.
    """

    row_bytes: float
    seconds: float


@dataclass(frozen=True)
class LayoutRound:
    """What the ranks observed in a round: the same values on every rank.

    Attributes:
        compute: how fast ranks compute, all of them at once.
        calls: seconds of each kind of call that the plan makes.
        passes: what a block's forward, or its backward, costs beyond its work and its calls in other models: entering
            autograd functions, copies on the way to a call, waiting for the slower rank.
        alone: how many times faster a rank computes while the others wait; measured where experts may be uneven.
    """

    compute: Round
    calls: Seconds
    passes: tuple[PassCost, ...] = ()
    alone: float = 1.0


def median_layout_round(rounds: Sequence[LayoutRound]) -> LayoutRound:
    """Combine rounds taken one after the other into one."""
    return LayoutRound(
        median_round([each.compute for each in rounds]),
        median_layout_calls([each.calls for each in rounds]),
        tuple(
            PassCost(rows[0].row_bytes, float(np.median([row.seconds for row in rows])))
            for rows in zip(*(each.passes for each in rounds), strict=True)
        ),
        float(np.median([each.alone for each in rounds])),
    )


def predict_layout(
    workload: Workload,
    measured: LayoutRound,
    plan: Plan,
    *,
    order: Sequence[str] = AXES,
    cores: int | None = None,
) -> Step:
    """Simulate a step of a whole model (see `count_gpt`) on this machine, as a calibration round saw it.

    Each kind of call takes the line that was fitted to its times, whatever axis makes it. Where ranks outnumber the
    `cores` that they share, those that wait in a pipeline lend theirs to the others; None: a core for each.
    """
    cluster = replace(fit_cluster(measured.compute, plan.world_size), num_cores=cores)
    fixed_s, s_per_byte = fit_passes(measured.passes)
    rate = cluster.device.matmul_flops_per_s
    layers = [
        _with_passes(layer, rate * (num_blocks(layer) * fixed_s + row_bytes(layer) * s_per_byte), plan)
        for layer in workload.layers
    ]
    costed = replace(workload, layers=tuple(layers))
    return simulate(costed, cluster, plan, order=order, measured=Measured(links=layout_links(measured.calls, plan)))


def predicted_step_s(step: Step, num_cores: int) -> float:
    """Return the seconds of a step whose ranks share so many cores.

    With a core for each rank that is the simulated step. With fewer, idle ranks give theirs away: the mean over ranks
    of what each does, in seconds of a rank that computes while all others do.
    """
    if step.plan.world_size <= num_cores:
        return step.duration_s
    return step.duration_s - step.bubble_fraction * step.pipeline_s


def num_blocks(layer: Layer) -> int:
    """Count a layer's blocks: of a stage that is one layer there are several."""
    return sum(region.attention is not None for region in layer.regions)


def row_bytes(layer: Layer) -> float:
    """Return the bytes that a layer's blocks hand on, all together."""
    return float(sum(region.input_bytes for region in layer.regions if region.attention is not None))


def fit_passes(passes: Sequence[PassCost]) -> tuple[float, float]:
    """Fit seconds = fixed + bytes x rate with the least squares, neither negative.

    Returns:
        fixed seconds, seconds a byte.
    """
    if not passes:
        return 0.0, 0.0
    x, y = np.array(passes, np.float64).T
    slope = 0.0 if np.ptp(x) == 0 else float(np.cov(x, y, bias=True)[0, 1] / x.var())
    fits = (
        (float(y.mean()) - slope * float(x.mean()), slope),
        (float(y.mean()), 0.0),
        (0.0, float((x @ y) / (x @ x))),
        (0.0, 0.0),
    )
    allowed = [fit for fit in fits if min(fit) >= 0]
    return min(allowed, key=lambda fit: float(((fit[0] + fit[1] * x - y) ** 2).sum()))


def _with_passes(layer: Layer, flops: float, plan: Plan) -> Layer:
    """Add what passes cost to a layer's work; the simulator divides what is outside of regions by positions."""
    more = Work(flops * plan.context * (plan.tensor if plan.sequence_parallel else 1))
    return replace(layer, forward=layer.forward + more, input_gradient=layer.input_gradient + more)
