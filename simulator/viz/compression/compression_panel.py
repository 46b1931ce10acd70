"""Choose a model, a bandwidth and compressors, and see when compression pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import ipywidgets as widgets
from matplotlib.figure import Figure

from distlab.plan import Cluster, Plan, Workload
from distlab.plan.compression import Compression
from simulator.gradients.compression import MeasuredCodec
from simulator.sweeps.buckets_and_compression import CompressionSweep, bandwidths, replica_link, sweep_compression
from simulator.viz.compression.compression import compression_label, describe_compression, draw_compression
from simulator.viz.drawing.panel import Panel

COMPRESSIONS = (
    Compression("top_k", ratio=0.01),
    Compression("random_k", ratio=0.01),
    Compression("quantize", bits=8),
    Compression("sign"),
    Compression("powersgd", rank=4),
)
ALL = "all"


def compression_panel(
    workload: Workload | Mapping[str, Workload],
    cluster: Cluster,
    plan: Plan,
    *,
    compressions: Sequence[Compression] = COMPRESSIONS,
    bytes_per_s: Sequence[float] | None = None,
    codecs: Mapping[Compression, MeasuredCodec] | None = None,
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
        codecs: measured times of encoding and decoding; what is left out is counted.

    Raises:
        ValueError: there is no model, or as `sweep_compression`.
    """
    workloads = {"": workload} if isinstance(workload, Workload) else dict(workload)
    if not workloads:
        raise ValueError("there is no model; pass one workload, or a mapping from names to workloads")
    speeds = tuple(bandwidths() if bytes_per_s is None else bytes_per_s)
    named = {compression_label(each): each for each in compressions}
    sweeps: dict[tuple[str, str], CompressionSweep] = {}

    def sweep_of(model: str, compressor: str) -> CompressionSweep:
        if (model, compressor) not in sweeps:
            chosen = compressions if compressor == ALL else [named[compressor]]
            sweeps[model, compressor] = sweep_compression(
                workloads[model], cluster, plan, compressions=chosen, bytes_per_s=speeds, codecs=codecs
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
    compressor = widgets.Dropdown(options=[ALL, *named], value=ALL)
    controls: dict[str, widgets.Widget] = {"log_bytes_per_s": slider, "compressor": compressor}
    if len(workloads) > 1:
        controls["model"] = widgets.Dropdown(options=list(workloads), value=next(iter(workloads)))
    return Panel(draw, **controls)
