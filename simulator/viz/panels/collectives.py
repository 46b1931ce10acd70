"""Play a recorded ring step by step, and see which all-reduce wins at which size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as widgets
from matplotlib.figure import Figure

from distlab.plan import Link
from simulator.hardware import presets as hardware
from simulator.viz.collectives.race import describe_race, draw_race
from simulator.viz.collectives.ring_frame import describe_ring_frame, draw_ring_frame
from simulator.viz.collectives.ring_record import Record, ring_steps
from simulator.viz.panels.panel import Panel

LINKS = ("ethernet-10g", "ethernet-100g", "pcie4-x16", "infiniband-hdr", "infiniband-ndr", "nvlink3", "nvlink4")


def ring_panel(record: Record, operation: str | None = None) -> Panel:
    """Return a panel that plays the steps of a recorded ring; step 0 is what every rank holds before the first.

    In code: `panel.controls["step"].value = 3`.

    Args:
        record: the records of one ring (`ranks.records()`), or a trace whose spans name their peers.
        operation: "all_reduce", "reduce_scatter" or "all_gather"; by default the number of steps decides.

    Raises:
        ValueError: the record is not of a ring; the text says why.
    """
    steps = ring_steps(record, operation)
    last = len(steps.chunk)

    def draw(step: int) -> tuple[Figure, str]:
        return draw_ring_frame(steps, step), describe_ring_frame(steps, step)

    return Panel(draw, step=widgets.Play(value=0, min=0, max=last, step=1, interval=1200, description="step"))


def race_panel(
    links: Mapping[str, Link] | Sequence[str] | None = None,
    num_ranks: int = 8,
    algorithms: Sequence[str] | None = None,
) -> Panel:
    """Return a panel with a drop-down of links and a slider of ranks, 2 to 64.

    In code: `panel.controls["link"].value = "nvlink4"` and `panel.controls["num_ranks"].value = 16`.

    Args:
        links: names of presets, or links by name (such as one fitted to this machine); by default the presets of
            Ethernet, PCIe, InfiniBand and NVLink.
        num_ranks: where the slider begins.
        algorithms: as `draw_race`.

    Raises:
        ValueError: an unknown link, no links, or fewer than 2 ranks.
    """
    if isinstance(links, Mapping):
        table = dict(links)
    else:
        table = {name: hardware.link(name) for name in (LINKS if links is None else links)}
    if not table or num_ranks < 2:
        raise ValueError(f"{len(table)} links and {num_ranks} ranks; pass at least one link and 2 ranks")

    def draw(link: str, num_ranks: int) -> tuple[Figure, str]:
        return draw_race(table[link], num_ranks, algorithms), describe_race(table[link], num_ranks, algorithms)

    return Panel(
        draw,
        link=widgets.Dropdown(options=list(table), value=next(iter(table)), description="link"),
        num_ranks=widgets.IntSlider(value=num_ranks, min=2, max=max(64, num_ranks), description="ranks"),
    )
