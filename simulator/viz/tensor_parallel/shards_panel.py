"""Step through a feed-forward layer that is cut over ranks: its numbers after each step."""

from __future__ import annotations

import ipywidgets as widgets
from matplotlib.figure import Figure

from simulator.viz.drawing.panel import Panel
from simulator.viz.tensor_parallel.mlp_case import STEPS
from simulator.viz.tensor_parallel.mlp_shards import describe_mlp, mlp_figure


def shards_panel(num_ranks: int = 2) -> Panel:
    """Return a panel that plays a cut feed-forward layer, from its input to the all-reduce of the backward pass.

    In code: `panel.controls["step"].value = 3`, `panel.controls["ranks"].value = 4`.

    Args:
        num_ranks: where the choice of ranks begins: 1, 2 or 4.
    """

    def draw(step: int, ranks: int) -> tuple[Figure, str]:
        return mlp_figure(ranks, step), describe_mlp(ranks, step)

    last = len(STEPS) - 1
    return Panel(
        draw,
        step=widgets.Play(value=0, min=0, max=last, step=1, interval=2000, description="step"),
        ranks=widgets.Dropdown(options=[1, 2, 4], value=num_ranks),
    )
