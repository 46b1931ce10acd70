"""The command line: one clear line and exit 2 for a mistake, JSON where a program reads it; and the tour, short."""

import inspect
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from distlab.cli import claims, main, tour
from distlab.comm.command import runnable
from distlab.measure import Window, judge
from distlab.trace import read_chrome

MISTAKES = Path(__file__).with_name("mistakes.txt").read_text("utf-8").format(file=__file__)
WORK = ("measure.calibrate", "cli.tour.run_training", "cli.claims.load", "comm.launch.ranks.run_script")


@pytest.mark.parametrize("row", MISTAKES.splitlines())
def test_a_mistake_is_one_line_and_exit_2_before_any_work(row, refused, monkeypatch):
    for work in WORK:
        monkeypatch.setattr(f"distlab.{work}", None)
    command, _, words = row.partition("| ")
    assert words in refused(*shlex.split(command))


def test_a_schedule_file_with_an_idle_rank_is_refused(refused, tmp_path):
    (order := tmp_path / "my_order.txt").write_text("0F0,0B0\n,")
    assert "rank 1 has no action in the schedule" in refused("lab", "09", "--ranks", "2", "--schedule", str(order))


def test_doctor_finds_what_ranks_need_here(facts):
    found = facts("doctor")
    assert found["healthy"] is True
    assert found["works"]["ranks on the CPU (distlab tour)"] is True
    assert {check["name"] for check in found["checks"]} >= {"torch", "gloo", "nccl", "gpus", "loopback", "browser"}


def test_a_place_that_cannot_be_written_is_refused_before_torch_is_loaded():
    code = "import sys; from distlab.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = ["calibrate", "--output", "/"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=250)
    assert done.stdout == "2 False\n"


def test_check_lists_exercises_with_what_they_take(said):
    first = said("check", "06", "--list").splitlines()[0]
    assert first == "06.states  what training holds, however small the batch (about 8 minutes, difficulty 1 of 3)"


def test_every_benchmark_has_rows_of_which_few_can_be_asked_for(said):
    assert said("bench", "--list").split() == claims.names()
    for name in claims.names():
        rows = claims.load(name).rows
        assert inspect.isgeneratorfunction(rows), name
        assert "quick" in inspect.signature(rows).parameters, name


@pytest.fixture
def short(monkeypatch):
    """One window of five steps instead of ten of four; the median of an odd number of steps is one of them."""
    prepare = tour.prepare

    def prepare_short(arguments):
        training, data = prepare(arguments)
        return replace(training, num_windows=1, steps_per_window=5, num_updates=4, budget_s=0.0), data

    monkeypatch.setattr(tour, "prepare", prepare_short)


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
