"""The tour, short: two real ranks, a text file of the user's, everything that a stranger sees."""

import json
from dataclasses import replace

import pytest

from distlab.cli import main, tour
from distlab.comm.command import runnable
from distlab.measure import Window, judge
from distlab.trace import read_chrome


@pytest.fixture
def short(monkeypatch):
    """One window of five steps instead of ten of four; the median of an odd number of steps is one of them."""
    prepare = tour.prepare

    def prepare_short(arguments):
        training, data = prepare(arguments)
        return replace(training, num_windows=1, steps_per_window=5, num_updates=4, budget_s=0.0), data

    monkeypatch.setattr(tour, "prepare", prepare_short)


@pytest.mark.timeout(120)
def test_tour_of_two_ranks_on_my_own_text(short, tmp_path, capsys):
    text = tmp_path / "my.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    assert main(["tour", "--ranks", "2", "--data", str(text), "--output", str(tmp_path / "out"), "--json"]) == 0
    said = capsys.readouterr()
    facts = json.loads(said.out)
    parts = [line.partition(":")[0] for line in said.err.splitlines() if " of 3: " in line]
    assert parts == ["1 of 3", "2 of 3", "3 of 3"]
    assert facts["equal"] is True
    assert facts["ranks"] == 2
    compared = facts["losses"][:4]  # how many updates follow in the timed windows is a matter of this machine's speed
    assert compared[-1] < compared[0]
    assert compared == pytest.approx(facts["losses_one_process"], rel=1e-5)
    assert facts["sent_bytes"] == pytest.approx(facts["predicted_bytes"], rel=1e-3)
    assert facts["step"]["predicted_s"] > 0
    assert facts["machine"]["cores"] >= 1
    picture, chrome = (tmp_path / "out" / name for name in ("timeline.png", "timeline.json"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    traces = read_chrome(chrome)
    assert set(traces) == {"measured", "predicted"}
    drawn = traces["measured"]
    drawn_s = max(drawn.select(drawn.rank == rank).duration_s for rank in (0, 1))  # first to last span of a rank
    # The step is that of its slowest rank, which may begin late on a busy machine; a wrong unit is off by a thousand.
    assert 0.05 * facts["measured_step_s"] < drawn_s <= facts["measured_step_s"]
    for trace in traces.values():
        assert trace.ranks == (0, 1)
        kinds = {span.kind for span in trace}
        assert {"F", "B", "optimizer", "all_reduce"} <= kinds


JUDGED = judge([Window(0.1, 0.11, 0.11, 0.11)] * 10, bar=0.15)
SAID = {"ranks": 2, "device": "cpu", "parameters": 1, "updates": 1, "max_difference": 0.0, "equal": True}
SAID |= {"losses_one_process": [1.0], "losses": [1.0], "sent_bytes": 1, "predicted_bytes": 1, "exposed_s": 0.0}
SAID |= {"measured_step_s": 0.1, "predicted_step_s": 0.1, "step": {"holds": True}, "verdict": str(JUDGED)}


def test_the_table_says_what_was_found():
    lines = tour.text(SAID).splitlines()
    for words in ("weights equal?", "median step, as drawn", "error of the prediction"):
        assert [line for line in lines if line.startswith(words)], words
    assert lines[-1].endswith(": holds")
    for sent, words in ((3, "3 (2 more: the loss, flags that tell of faults, and padding)"), (1, "1")):
        (row,) = [row for row in tour.text(SAID | {"sent_bytes": sent}).splitlines() if row.startswith("bytes sent")]
        assert row.endswith(f" 1  {words}")


def test_a_tour_that_is_not_judged_says_what_it_saw_and_a_command_that_runs_here(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")  # as in a shell that has not activated .venv
    few = judge([Window(0.1, 0.11, 0.11, 0.11)] * 9, bar=0.15)
    lines = tour.text(SAID | {"step": {"holds": few.holds}, "verdict": str(few)}).splitlines()
    assert "of 9 windows (some steps between two calibrations) 9 were calm, and 10 are needed. Over all 9" in lines[-2]
    assert lines[-1] == f"Try again: {runnable('distlab tour --ranks 2 --device cpu')}"
