"""The panels of the lessons draw at every position of their controls, and say what they draw."""

import pytest
from viz_traces import data_parallel, ring

pytest.importorskip("anywidget", reason="panels need the notebooks extra")

from simulator.viz import (
    race_panel,  # noqa: E402
    ring_panel,  # noqa: E402
    train_step_panel,  # noqa: E402
)
from simulator.viz.panels.communication import LINKS  # noqa: E402


def test_the_ring_plays_from_the_start_to_the_last_step():
    panel = ring_panel(ring(3))
    assert panel.text.startswith("Before the first step")
    pictures = [panel.png]
    for step in range(1, 5):
        panel.controls["step"].value = step
        assert panel.text.startswith(f"Step {step} of 4")
        pictures.append(panel.png)
    assert len(set(pictures)) == 5
    assert panel.error is None
    assert (panel.controls["step"].min, panel.controls["step"].max) == (0, 4)


def test_the_step_moves_in_milliseconds():
    panel = train_step_panel(data_parallel(2))
    assert set(panel.controls) == {"at_ms"}
    panel.controls["at_ms"].value = 20.0
    assert panel.text.startswith("At 20 ms: rank 0: forward 50 %")
    panel.controls["at_ms"].value = panel.controls["at_ms"].max
    assert "the step is done" in panel.text
    assert panel.error is None


def test_the_step_switches_between_versions_each_to_its_own_end():
    short, long = data_parallel(2, num_buckets=1), data_parallel(2, num_buckets=6)
    assert short.duration_s != long.duration_s
    panel = train_step_panel({"flat": short, "per_parameter": long})
    moment, ends_ms = panel.controls["at_ms"], [short.duration_s * 1e3, long.duration_s * 1e3]
    assert moment.max == pytest.approx(ends_ms[0])
    before = panel.png
    panel.controls["version"].value = "per_parameter"
    assert panel.png != before
    assert moment.max == pytest.approx(ends_ms[1])
    moment.value = moment.max
    panel.controls["version"].value = "flat"
    assert moment.value == pytest.approx(min(ends_ms))
    panel.controls["version"].value = "per_parameter"
    assert "6 all-reduces" in panel.text
    for at_ms in (0.0, 60.0, panel.controls["at_ms"].max):
        panel.controls["at_ms"].value = at_ms
        assert panel.error is None


def test_the_race_runs_on_every_link_and_number_of_ranks():
    panel = race_panel()
    for link in LINKS:
        panel.controls["link"].value = link
        for num_ranks in (2, 5, 64):
            panel.controls["num_ranks"].value = num_ranks
            assert panel.error is None
            assert f"among {num_ranks} ranks over {link}" in panel.text


def test_the_race_takes_algorithms():
    assert "ring of whole tensors" in race_panel(4, ("naive", "ring")).text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: train_step_panel({}), "no trace"),
        (lambda: ring_panel(data_parallel(2)), "no send"),
    ],
)
def test_what_cannot_be_a_panel_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
