"""Choose a bucket size with a slider: see where it stands beside the optimum, or the step that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ipywidgets as widgets
from matplotlib.figure import Figure

from distlab.plan import Cluster, Plan, Workload
from simulator.step.simulate import simulate
from simulator.sweeps.buckets_and_compression import BucketSweep, sweep_buckets, with_bucket_bytes
from simulator.units import format_bytes
from simulator.viz.data_parallel.bucket_sweep import describe_bucket_sweep, draw_bucket_sweep, nearest
from simulator.viz.data_parallel.train_step import describe_train_step, draw_train_step
from simulator.viz.drawing.panel import Panel


def bucket_panel(
    workload: Workload,
    cluster: Cluster | Mapping[str, Cluster],
    plan: Plan,
    *,
    sizes: Sequence[int] | None = None,
) -> Panel:
    """Return a panel with a slider of bucket sizes, and a drop-down of clusters where there are several.

    In code: `panel.controls["bucket_bytes"].value = panel.controls["bucket_bytes"].options[5][1]` and
    `panel.controls["picture"].value = "step"` for the step at that size in place of all sizes.

    Args:
        workload: the model.
        cluster: what it runs on, or several by name.
        plan: how; its bucket size is where the slider begins.
        sizes: bucket sizes to choose from; by default from a thousandth of the gradients to all of them.

    Raises:
        ValueError: there is no cluster or no size, or as `simulate`.
    """
    clusters = {"": cluster} if isinstance(cluster, Cluster) else dict(cluster)
    if not clusters:
        raise ValueError("there is no cluster; pass one, or a mapping from names to clusters")
    sweeps: dict[str, BucketSweep] = {}

    def sweep_of(name: str) -> BucketSweep:
        if name not in sweeps:
            sweeps[name] = sweep_buckets(workload, clusters[name], plan, sizes=sizes)
        return sweeps[name]

    first = next(iter(clusters))
    choices = sweep_of(first).bucket_bytes

    def draw(bucket_bytes: int, picture: str, cluster: str = first) -> tuple[Figure, str]:
        if picture == "sizes":
            sweep = sweep_of(cluster)
            return draw_bucket_sweep(sweep, at_bytes=bucket_bytes), describe_bucket_sweep(sweep, at_bytes=bucket_bytes)
        trace = simulate(workload, clusters[cluster], with_bucket_bytes(plan, bucket_bytes)).layer_trace
        return draw_train_step(trace), describe_train_step(trace)

    controls: dict[str, widgets.Widget] = {
        "bucket_bytes": widgets.SelectionSlider(
            options=[(format_bytes(size), size) for size in choices],
            value=choices[nearest(sweep_of(first), plan.bucket_bytes)],
            description="bucket size",
        ),
        "picture": widgets.Dropdown(options=[("all sizes", "sizes"), ("one step", "step")], description="show"),
    }
    if len(clusters) > 1:
        controls["cluster"] = widgets.Dropdown(options=list(clusters), value=first, description="cluster")
    return Panel(draw, **controls)
