"""Move through a data-parallel step, and see when compressing its gradients pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import ipywidgets as widgets
from matplotlib.figure import Figure

from distlab.plan import Cluster, Plan, Workload
from distlab.plan.compression import Compression
from distlab.trace import Trace
from simulator.sweeps.compression import (
    CompressionSweep,
    bandwidths,
    replica_link,
    sweep_compression,
)
from simulator.viz.compression.compression import compression_label, describe_compression, draw_compression
from simulator.viz.data_parallel.step_read import read_step
from simulator.viz.data_parallel.step_state import best_moment
from simulator.viz.data_parallel.train_step import describe_train_step, draw_train_step
from simulator.viz.panels.panel import Panel, by_name

COMPRESSIONS = (
    Compression("top_k", ratio=0.01),
    Compression("random_k", ratio=0.01),
    Compression("quantize", bits=8),
    Compression("sign"),
    Compression("powersgd", rank=4),
)
ALL_COMPRESSIONS = "all"


def train_step_panel(trace: Trace | Mapping[str, Trace], *, rank: int = 0) -> Panel:
    """Return a panel with a slider for the moment, in milliseconds since the step began.

    A mapping from names to traces (such as the four ways to average gradients, or "predicted" and "measured") adds a
    drop-down that switches between them; the slider then reaches to the end of the one that is shown.
    In code: `panel.controls["at_ms"].value = 12.5` and `panel.controls["version"].value = "flat"`.

    Args:
        trace: one step, or several by name; see `draw_train_step`.
        rank: whose timeline is drawn.

    Raises:
        ValueError: a trace is not a data-parallel step, or there is none.
    """
    traces = by_name(trace, "trace")
    steps = {name: read_step(each) for name, each in traces.items()}
    ends_ms = {name: step.duration_s * 1e3 for name, step in steps.items()}
    first = next(iter(traces))
    at_ms = widgets.FloatSlider(
        value=best_moment(steps[first]) * 1e3,
        min=0.0,
        max=ends_ms[first],
        step=ends_ms[first] / 200,
        description="moment (ms)",
        readout_format=".1f" if max(ends_ms.values()) >= 20 else ".2f",
        style={"description_width": "initial"},
        layout={"width": "32em"},
    )

    def draw(at_ms: float, version: str = first) -> tuple[Figure, str]:
        chosen, at_s = traces[version], at_ms / 1e3
        return draw_train_step(chosen, at_s, rank=rank), describe_train_step(chosen, at_s, rank=rank)

    if len(traces) == 1:
        return Panel(draw, at_ms=at_ms)
    names = [(name.replace("_", " "), name) for name in traces]
    version = widgets.Dropdown(options=names, value=first, description="gradients")

    def reach(change: Mapping[str, str]) -> None:
        end_ms = ends_ms[change["new"]]
        with at_ms.hold_trait_notifications():
            at_ms.value, at_ms.step, at_ms.max = min(at_ms.value, end_ms), end_ms / 200, end_ms

    version.observe(reach, "value")
    return Panel(draw, version=version, at_ms=at_ms)


def compression_panel(
    workload: Workload | Mapping[str, Workload],
    cluster: Cluster,
    plan: Plan,
    *,
    compressions: Sequence[Compression] = COMPRESSIONS,
    bytes_per_s: Sequence[float] | None = None,
) -> Panel:
    """Return a panel with a slider of bandwidths and drop-downs of compressors and, where there are several, models.

    In code: `panel.controls["log_bytes_per_s"].value = 9.0` (the power of ten: 1 GB/s) and
    `panel.controls["compressor"].value = "sign"`.

    Args:
        workload: the model, or several by name.
        cluster: the devices; the bandwidth of the link between replicas is what the slider changes.
        plan: how; its own compression is left aside.
        compressions: what to compare.
        bytes_per_s: bandwidths of the picture, 10 MB/s to 100 GB/s by default.

    Raises:
        ValueError: there is no model, or as `sweep_compression`.
    """
    workloads = by_name(workload, "model")
    speeds = tuple(bandwidths() if bytes_per_s is None else bytes_per_s)
    named = {compression_label(each): each for each in compressions}
    sweeps: dict[tuple[str, str], CompressionSweep] = {}

    def sweep_of(model: str, compressor: str) -> CompressionSweep:
        if (model, compressor) not in sweeps:
            chosen = compressions if compressor == ALL_COMPRESSIONS else [named[compressor]]
            sweeps[model, compressor] = sweep_compression(
                workloads[model], cluster, plan, compressions=chosen, bytes_per_s=speeds
            )
        return sweeps[model, compressor]

    def draw(log_bytes_per_s: float, compressor: str, model: str = next(iter(workloads))) -> tuple[Figure, str]:
        sweep, at = sweep_of(model, compressor), 10**log_bytes_per_s
        return draw_compression(sweep, at_bytes_per_s=at), describe_compression(sweep, at_bytes_per_s=at)

    low, high = math.log10(min(speeds)), math.log10(max(speeds))
    here = math.log10(max(protocol.bytes_per_s for protocol in replica_link(cluster, plan).protocols))
    slider = widgets.FloatSlider(
        value=min(max(here, low), high),
        min=low,
        max=high,
        step=(high - low) / 80,
        description="bandwidth: 10^x bytes/s",
        readout_format=".2f",
    )
    compressor = widgets.Dropdown(options=[ALL_COMPRESSIONS, *named], value=ALL_COMPRESSIONS)
    controls: dict[str, widgets.Widget] = {"log_bytes_per_s": slider, "compressor": compressor}
    if len(workloads) > 1:
        controls["model"] = widgets.Dropdown(options=list(workloads), value=next(iter(workloads)))
    return Panel(draw, **controls)
