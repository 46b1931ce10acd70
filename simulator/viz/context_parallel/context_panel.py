"""Play ring attention hop by hop: which blocks each rank computes, in the zig-zag order or the straight one."""

from __future__ import annotations

import ipywidgets as widgets
from matplotlib.figure import Figure

from simulator.viz.context_parallel.context import context_figure, describe_context
from simulator.viz.context_parallel.context_work import MAX_RANKS, ORDERS
from simulator.viz.drawing.panel import Panel

ALL = "all"


def context_panel(num_ranks: int = 4, order: str = "straight") -> Panel:
    """Return a panel with a slider of ranks, the order of the positions, and the hop.

    In code: `panel.controls["order"].value = "zigzag"`, `panel.controls["hop"].value = 2`; hop "all" shows them all.
    A hop beyond the last shows the last.

    Args:
        num_ranks: where the slider begins.
        order: "zigzag" or "straight".
    """

    def draw(ranks: int, order: str, hop: int | str) -> tuple[Figure, str]:
        at = None if isinstance(hop, str) else min(hop, ranks - 1)
        return context_figure(ranks, order, hop=at), describe_context(ranks, order, hop=at)

    return Panel(
        draw,
        ranks=widgets.IntSlider(num_ranks, min=1, max=MAX_RANKS),
        order=widgets.Dropdown(options=list(ORDERS), value=order),
        hop=widgets.SelectionSlider(options=[ALL, *range(MAX_RANKS)], value=ALL),
    )
