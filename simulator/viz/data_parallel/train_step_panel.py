"""Move through a data-parallel step with a slider of milliseconds, and switch between ways to average gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as widgets
from matplotlib.figure import Figure

from distlab.trace import Trace
from simulator.viz.data_parallel.step_read import read_step
from simulator.viz.data_parallel.step_state import best_moment
from simulator.viz.data_parallel.train_step import describe_train_step, draw_train_step
from simulator.viz.drawing.panel import Panel


def train_step_panel(
    trace: Trace | Mapping[str, Trace], buckets: Sequence[str] | None = None, *, rank: int = 0
) -> Panel:
    """Return a panel with a slider for the moment, in milliseconds since the step began.

    A mapping from names to traces (such as the four ways to average gradients, or "predicted" and "measured") adds a
    drop-down that switches between them; the slider then reaches to the end of the one that is shown.
    In code: `panel.controls["at_ms"].value = 12.5` and `panel.controls["version"].value = "flat"`.

    Args:
        trace: one step, or several by name; see `draw_train_step`.
        buckets: what each all-reduce carries, in the order in which they are sent; only for a single trace.
        rank: whose timeline is drawn.

    Raises:
        ValueError: a trace is no data-parallel step, or there is none.
    """
    traces = {"": trace} if isinstance(trace, Trace) else dict(trace)
    if not traces:
        raise ValueError("there is no trace; pass one, or a mapping from names to traces")
    if buckets is not None and len(traces) > 1:
        raise ValueError("buckets names the all-reduces of one trace; leave it out where there are several")
    steps = {name: read_step(each, buckets) for name, each in traces.items()}
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
        chosen = traces[version]
        at_s = at_ms / 1e3
        text = describe_train_step(chosen, at_s, buckets=buckets, rank=rank)
        return draw_train_step(chosen, at_s, buckets=buckets, rank=rank), text

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
