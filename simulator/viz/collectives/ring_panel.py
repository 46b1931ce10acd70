"""Play a recorded ring step by step: a slider, play buttons, and one frame a step."""

from __future__ import annotations

import ipywidgets as widgets
from matplotlib.figure import Figure

from simulator.viz.collectives.ring_frame import describe_ring_frame, draw_ring_frame
from simulator.viz.collectives.ring_record import Record, ring_steps
from simulator.viz.drawing.panel import Panel


def ring_panel(record: Record, operation: str | None = None) -> Panel:
    """Return a panel that plays the steps of a recorded ring; step 0 is what every rank holds before the first.

    In code: `panel.controls["step"].value = 3`.

    Args:
        record: the records of one ring (`ranks.records()`), or a trace whose spans name their peers.
        operation: "all_reduce", "reduce_scatter" or "all_gather"; by default the number of steps decides.

    Raises:
        ValueError: the record is no ring's; the text says why.
    """
    steps = ring_steps(record, operation)
    last = len(steps.chunk)

    def draw(step: int) -> tuple[Figure, str]:
        return draw_ring_frame(steps, step), describe_ring_frame(steps, step)

    return Panel(draw, step=widgets.Play(value=0, min=0, max=last, step=1, interval=1200, description="step"))
