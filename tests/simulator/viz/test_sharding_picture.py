"""The picture of units: its figures are the sweep's, its text says the same, and the panel redraws it."""

import numpy as np
import pytest
from sharding_cases import cluster_of, plan_of, workload_of

from simulator import cluster, gpt_workload, simulate, sweep_units
from simulator.viz import describe_sharding, draw_sharding, draw_timeline, to_png

WORKLOAD = workload_of([3.0] * 6, [40_000] * 6, ends=1000)
PLAN = plan_of(3, unit_layers=2)
SWEEP, STEP = sweep_units(WORKLOAD, cluster_of(4), PLAN), simulate(WORKLOAD, cluster_of(4), PLAN)


def line_of(figure, gid):
    (line,) = [line for axes in figure.axes for line in axes.lines if line.get_gid() == gid]
    return np.asarray(line.get_ydata())


def test_the_curves_are_the_sweeps():
    figure = draw_sharding(SWEEP, STEP)
    assert line_of(figure, "step") == pytest.approx(np.array(SWEEP.duration_s) * 1e3)
    assert line_of(figure, "memory") == pytest.approx(np.array(SWEEP.memory_bytes) / 1e6)
    assert to_png(figure).startswith(b"\x89PNG")


def test_the_text_names_the_chosen_size_and_the_best():
    text = describe_sharding(SWEEP, STEP)
    assert "Chosen: 2 layers per unit, 3 units" in text
    assert "Fastest: " in text
    assert "1 unit gathered ahead" in text


@pytest.mark.parametrize(
    "options", [{}, {"replicas": 2}, {"offload": "all"}, {"offload": "optimizer"}, {"prefetch": 0}]
)
def test_every_sharding_can_be_drawn(options):
    plan = plan_of(3, **options)
    step = simulate(WORKLOAD, cluster_of(4), plan)
    assert draw_sharding(sweep_units(WORKLOAD, cluster_of(4), plan, sizes=[1, 3]), step).axes
    assert draw_timeline(step.layer_trace).axes
    assert draw_timeline(step.trace).axes


def test_the_panel_follows_its_controls():
    pytest.importorskip("ipywidgets")
    from simulator.viz import sharding_panel

    small = gpt_workload(
        hidden_size=512, num_layers=2, num_heads=8, sequence_length=256, vocab_size=1000, microbatch_size=1
    )
    panel = sharding_panel(small, cluster("dgx-h100", 16), num_devices=(8, 16))
    texts = [panel.text]
    for name, value in (
        ("unit_layers", 2),
        ("gpus", 16),
        ("sets", "inside each node"),
        ("keep", True),
    ):
        panel.controls[name].value = value
        assert panel.error is None
        texts.append(panel.text)
    assert len(set(texts)) == len(texts)
    assert "in 2 sets of 8" in texts[-1]
    assert "parameters kept after forward" in texts[-1]
