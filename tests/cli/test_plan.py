"""`distlab plan`: the best plans, why, what it costs, and wrong flags in one line."""

import json
from types import SimpleNamespace

import pytest

from distlab.cli import main

SMALL = ["--hidden=512", "--layers=4", "--heads=8", "--vocabulary=8000", "--sequence=256", "--batch=8"]


def said(capsys, *flags):
    assert main(["plan", *SMALL, *flags]) == 0
    return capsys.readouterr().out


def test_the_best_plans_with_reasons_and_a_file_of_the_first(capsys, tmp_path):
    path = tmp_path / "best.toml"
    found = json.loads(said(capsys, "--gpus", "4", "--top", "2", "--save", str(path), "--json"))
    first, second = found["plans"]
    assert first["step_s"] <= second["step_s"]
    assert found["searched"] > found["simulated"] > 0
    assert found["is_complete"]
    assert all(reason["rule"] for reason in found["why"])
    assert main(["simulate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steady_s"] == pytest.approx(first["step_s"])


def test_a_curve_over_clusters_and_counts_with_days_and_dollars(capsys):
    flags = ["--cluster", "dgx-a100:1.5", "--cluster", "dgx-h100:3", "--gpus", "1,2", "--tokens", "1e9", "--top", "1"]
    found = json.loads(said(capsys, *flags, "--wish", "cheapest", "--json"))
    rows = [(row["devices"], row["cluster"]) for row in found["curve"]]
    assert rows == [(count, name) for name in ("dgx-a100", "dgx-h100") for count in (1, 2)]
    cheapest = min(found["curve"], key=lambda row: row["dollars"])
    assert found["plans"][0] == cheapest == found["curve"][found["cheapest"]]
    shown = said(capsys, *flags)
    assert all(words in shown for words in ("dollars", "sweet spot", "1. "))


def test_failures_make_runs_longer_and_the_file_keeps_the_run(capsys, tmp_path):
    path, picture = tmp_path / "best.toml", tmp_path / "curve.png"
    flags = ["--cluster", "dgx-a100:2", "--gpus", "1,2", "--tokens", "1e9", "--top", "1"]
    plain = json.loads(said(capsys, *flags, "--json"))
    found = json.loads(
        said(capsys, *flags, "--failures", "1e-2", "--curve", str(picture), "--save", str(path), "--json")
    )
    for row, other in zip(plain["curve"], found["curve"], strict=True):
        assert other["goodput"] < 1
        assert other["days"] == pytest.approx(row["days"] / other["goodput"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["cost", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["days"] == pytest.approx(found["plans"][0]["days"])
    assert "goodput" in said(capsys, *flags, "--failures", "llama-3")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--curve", "curve.png"], "add --tokens"),
        (["--failures", "weekly"], "one of llama-3"),
        (["--hidden", "65536", "--gpus", "2"], "no plan fits: on 2 devices each holds at least "),
        (["--gpus", "12"], "--gpus 12 does not fill nodes of 8"),
        (["--microbatch", "2"], "--microbatch is what the search chooses"),
        (["--days", "3"], "add --tokens"),
        (["--days", "1e-9", "--tokens", "1e12"], "no plan ends within 1e-09 days: the shortest takes "),
        (["--cluster", "dgx-x"], "'dgx-x' is neither a preset nor a file"),
        (["--cluster", "dgx-a100:1", "--cluster", "dgx-h100"], "some clusters have a price and others none"),
        (["--model", "gpt-3-175b"], "has its own sizes"),
        *((flags, "distlab plan: ") for flags in (["--gpus", "0"], ["--tokens", "-1"], ["--cluster", "dgx-a100:x"])),
        (["--headroom", "100"], "distlab plan: "),
    ],
)
def test_what_cannot_be_answered_is_told_in_one_line(refused, flags, text):
    assert text in refused("plan", *SMALL, *flags)


def test_a_search_that_is_interrupted_before_it_found_a_plan_does_not_say_that_none_fits(capsys, monkeypatch):
    nothing = SimpleNamespace(best=lambda top, tell: [], is_complete=False)
    monkeypatch.setattr("simulator.search", lambda question: nothing)
    assert main(["plan", *SMALL]) == 2
    assert "no plan that fits had been found when the search was interrupted" in capsys.readouterr().err
