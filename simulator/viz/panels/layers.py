"""Play a layer that is cut over ranks: a feed-forward layer step by step, ring attention hop by hop."""

from __future__ import annotations

import ipywidgets as widgets
from matplotlib.figure import Figure

from simulator.viz.context_parallel.context import context_figure, describe_context
from simulator.viz.context_parallel.context_work import MAX_RANKS, ORDERS
from simulator.viz.panels.panel import Panel
from simulator.viz.tensor_parallel.mlp_case import STEPS
from simulator.viz.tensor_parallel.mlp_shards import describe_mlp, mlp_figure

ALL_HOPS = "all"


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
        hop=widgets.SelectionSlider(options=[ALL_HOPS, *range(MAX_RANKS)], value=ALL_HOPS),
    )
