"""Play a recorded ring, race all-reduces, move through a data-parallel step, and see when compressing it pays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial

import ipywidgets as widgets

from distlab.plan import Cluster, Plan, Workload
from distlab.plan.compression import Compression
from distlab.trace import Trace
from simulator.sweeps.compression import CompressionSweep, replica_link, sweep_compression
from simulator.units import format_bytes_per_s
from simulator.viz.collectives.messages import RecordedCall
from simulator.viz.collectives.race import draw_race
from simulator.viz.collectives.ring import draw_ring_frame, ring_steps
from simulator.viz.data_parallel.step import best_moment, read_step
from simulator.viz.data_parallel.train_step import draw_train_step
from simulator.viz.panels.panel import Panel, choice, logarithmic, slider
from simulator.viz.sweeps import compression_label, draw_compression

LINKS = ("ethernet-10g", "ethernet-100g", "pcie4-x16", "infiniband-hdr", "infiniband-ndr", "nvlink3", "nvlink4")
ALL_COMPRESSIONS = "all"


def ring_panel(record: Iterable[RecordedCall]) -> Panel:
    """Return a panel that plays the steps of a recorded ring; step 0 is what every rank holds before the first.

    In code: `panel.controls["step"].value = 3`.

    Args:
        record: the records of one ring (`ranks.records()`).

    Raises:
        ValueError: the record is not of a ring; the text says why.
    """
    steps = ring_steps(record)
    play = widgets.Play(value=0, min=0, max=len(steps.chunk), step=1, interval=1200, description="step")
    return Panel(lambda step: draw_ring_frame(steps, step), step=play)


def race_panel(num_ranks: int, algorithms: Sequence[str]) -> Panel:
    """Return a panel with a drop-down of links and a slider of ranks, 2 to 64.

    In code: `panel.controls["link"].value = "nvlink4"` and `panel.controls["num_ranks"].value = 16`.

    Args:
        num_ranks: where the slider begins.
        algorithms: as `draw_race`.
    """
    ranks = widgets.IntSlider(value=num_ranks, min=2, max=64, description="ranks")
    return Panel(partial(draw_race, algorithms=algorithms), link=choice("link", LINKS), num_ranks=ranks)


def train_step_panel(traces: Mapping[str, Trace]) -> Panel:
    """Return a panel that moves through one of several data-parallel steps: a drop-down of steps, a slider of moments.

    The slider counts milliseconds since the step began, and reaches to the end of the step that is shown.
    In code: `panel.controls["at_ms"].value = 12.5` and `panel.controls["version"].value = "flat"`.

    Args:
        traces: steps by name, such as the four ways to average gradients; see `draw_train_step`.

    Raises:
        ValueError: a trace is not a data-parallel step.
    """
    steps = {name: read_step(each) for name, each in traces.items()}
    ends_ms = {name: step.duration_s * 1e3 for name, step in steps.items()}
    first = next(iter(traces))
    look = {"readout_format": ".1f" if max(ends_ms.values()) >= 20 else ".2f", "layout": {"width": "32em"}}
    begin_ms, end_ms = best_moment(steps[first]) * 1e3, ends_ms[first]
    at_ms = slider("moment (ms)", begin_ms, 0.0, end_ms, end_ms / 200, **look)

    version = choice("gradients", [(name.replace("_", " "), name) for name in traces])

    def reach(change: Mapping[str, str]) -> None:
        end_ms = ends_ms[change["new"]]
        with at_ms.hold_trait_notifications():
            at_ms.value, at_ms.step, at_ms.max = min(at_ms.value, end_ms), end_ms / 200, end_ms

    version.observe(reach, "value")
    return Panel(lambda at_ms, version: draw_train_step(traces[version], at_ms / 1e3), version=version, at_ms=at_ms)


def compression_panel(
    workload: Workload,
    cluster: Cluster,
    plan: Plan,
    *,
    compressions: Sequence[Compression],
    bytes_per_s: Sequence[float],
) -> Panel:
    """Return a panel with a slider of bandwidths and a drop-down of compressors.

    In code: `panel.controls["bytes_per_s"].value = 1e9` (or 2e9, 5e9, ...); the other one is "compressor".

    Args:
        workload: the model.
        cluster: the devices; the bandwidth of the link between replicas is what the slider changes.
        plan: how; its own compression is left aside.
        compressions: what to compare.
        bytes_per_s: bandwidths of the picture, such as `bandwidths()` returns.

    Raises:
        ValueError: as `sweep_compression`.
    """
    named = {compression_label(each): each for each in compressions}

    @cache
    def sweep_of(compressor: str) -> CompressionSweep:
        some = compressions if compressor == ALL_COMPRESSIONS else [named[compressor]]
        return sweep_compression(workload, cluster, plan, compressions=some, bytes_per_s=bytes_per_s)

    low, high = min(bytes_per_s), max(bytes_per_s)
    here = max(protocol.bytes_per_s for protocol in replica_link(cluster, plan).protocols)
    powers = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return Panel(
        lambda bytes_per_s, compressor: draw_compression(sweep_of(compressor), bytes_per_s),
        bytes_per_s=logarithmic("bandwidth", min(max(here, low), high), *powers, format_bytes_per_s),
        compressor=choice("compressor", [ALL_COMPRESSIONS, *named]),
    )
