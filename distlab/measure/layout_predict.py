"""Predict a step of any layout: one count of the whole model, this machine's speeds, and the simulator.

Where there are more ranks than cores, ranks take turns at computing: one that waits gives its core to the others, so a
pipeline's bubbles are filled with the other ranks' work. What is predicted then is the sum of what all ranks do over
the cores, and no longer when each of them waits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from distlab.measure.calibrate import Round, fit_cluster, median_round
from distlab.measure.layout_calls import Seconds, layout_links, median_layout_calls
from distlab.plan.axes import AXES
from distlab.plan.records import Layer, Plan, Work, Workload
from simulator import Measured, Step, simulate


@dataclass(frozen=True)
class LayoutRound:
    """What the ranks observed in a round: the same values on every rank.

    Attributes:
        compute: how fast ranks compute, all of them at once.
        calls: seconds of each kind of call that the plan makes.
        pass_s: seconds that a block's forward, or its backward, costs beyond its work and its calls: entering autograd
            functions, copies on the way to a call, waiting for the slower rank.
    """

    compute: Round
    calls: Seconds
    pass_s: float = 0.0


def median_layout_round(rounds: Sequence[LayoutRound]) -> LayoutRound:
    """Combine rounds taken one after the other into one."""
    return LayoutRound(
        median_round([each.compute for each in rounds]),
        median_layout_calls([each.calls for each in rounds]),
        float(np.median([each.pass_s for each in rounds])),
    )


def predict_layout(workload: Workload, measured: LayoutRound, plan: Plan, *, order: Sequence[str] = AXES) -> Step:
    """Simulate a step of a whole model (see `count_gpt`) on this machine, as a calibration round saw it.

    Each kind of call takes the line that was fitted to its times, whatever axis makes it.
    """
    cluster = fit_cluster(measured.compute, plan.world_size)
    flops = measured.pass_s * cluster.device.matmul_flops_per_s
    costed = replace(workload, layers=tuple(_with_passes(layer, flops, plan) for layer in workload.layers))
    return simulate(costed, cluster, plan, order=order, measured=Measured(links=layout_links(measured.calls, plan)))


def predicted_step_s(step: Step, num_cores: int) -> float:
    """Return the seconds of a step whose ranks share so many cores.

    With a core for each rank that is the simulated step. With fewer, idle ranks give theirs away: the mean over ranks
    of what each does, in seconds of a rank that computes while all others do.
    """
    if step.plan.world_size <= num_cores:
        return step.duration_s
    return step.duration_s - step.bubble_fraction * step.pipeline_s


def num_cores() -> int:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_blocks(layer: Layer) -> int:
    """Count a layer's blocks: of a stage that is one layer there are several."""
    return sum(region.attention is not None for region in layer.regions)


def _with_passes(layer: Layer, flops: float, plan: Plan) -> Layer:
    """Add what a pass costs to each block; the simulator divides what is outside of regions by positions."""
    along = plan.context * (plan.tensor if plan.sequence_parallel else 1)
    more = Work(num_blocks(layer) * flops * along)
    return replace(layer, forward=layer.forward + more, input_gradient=layer.input_gradient + more)
