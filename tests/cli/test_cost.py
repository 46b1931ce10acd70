"""`distlab cost`: days, dollars, goodput and the curve of a plan file; mistakes in one line."""

import json

import pytest

from distlab.cli import main

TEXT = """
[workload]
hidden_size = 512
num_layers = 4
num_heads = 8
vocab_size = 8000
sequence_length = 256
[cluster]
name = "dgx-a100"
[plan]
data = 2
pipeline = 2
num_microbatches = 8
"""
RUN = """
[run]
num_tokens = 1e12
price = 2.0
failures = { rate = 1e-3, save_s = 20, restart_s = 300 }
"""


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "plan.toml"
    found.write_text(TEXT + RUN)
    return found


def said(capsys, *flags):
    assert main(["cost", *map(str, flags)]) == 0
    found = capsys.readouterr().out
    assert "nan" not in found.lower()
    return found


def test_the_run_its_goodput_and_its_curve(capsys, path):
    found = json.loads(said(capsys, path, "--json"))
    failures = found["failures"]
    assert found["devices"] == 4
    assert found["dollars"] == pytest.approx(found["days"] * 24 * 4 * 2.0)
    assert sum(failures[name] for name in ("useful", "saving", "lost", "restarting", "slow")) == pytest.approx(1)
    assert failures["mtbf_s"] == pytest.approx(3600 / 4e-3)
    best = failures["best_interval_s"]
    assert failures["interval_s"] == best["exact"]
    for name, within in (("young", 0.02), ("daly", 1e-3), ("monte_carlo", 0.05)):
        assert best[name] == pytest.approx(best["exact"], rel=within), name
    drawn = failures["drawn_days"]
    assert drawn["low"] < drawn["mean"] < drawn["high"]
    assert drawn["mean"] == pytest.approx(found["days"], rel=0.01)
    assert [row["devices"] for row in found["curve"]] == [2, 4, 8, 16, 32]
    days = [row["days"] for row in found["curve"]]
    assert days[found["shortest"]] == min(days)
    assert found["curve"][found["cheapest"]]["dollars"] == min(row["dollars"] for row in found["curve"])


def test_the_same_in_words(capsys, path):
    text = said(capsys, path, "--gpus", "2,4,6")
    for words in ("goodput", "one in 10.4 days", "best interval", "young", "monte carlo", "in 8 of 10", "<- shortest"):
        assert words in text, words
    assert "6 devices  left out: 3 replicas do not divide the batch of 16 micro-batches" in text


def test_seeds_draw_other_failures_and_repeat(capsys, path):
    one, same, other = (json.loads(said(capsys, path, "--json", "--seed", seed)) for seed in (1, 1, 2))
    assert one == same
    assert one["failures"]["drawn_days"] != other["failures"]["drawn_days"]
    assert one["days"] == other["days"]


def test_flags_say_what_the_file_does_not(capsys, tmp_path):
    bare = tmp_path / "bare.toml"
    bare.write_text(TEXT)
    found = json.loads(said(capsys, bare, "--tokens", "1e9", "--json"))
    assert (found["dollars"], found["failures"], found["goodput"]) == (None, None, 1.0)
    found = json.loads(said(capsys, bare, "--tokens", "1e9", "--price", "3", "--failures", "llama-3", "--json"))
    assert found["price"] == 3.0
    assert "2407.21783" in found["failures"]["source"]
    found = json.loads(said(capsys, bare, "--tokens", "1e9", "--failures", "none", "--json"))
    assert found["failures"]["mtbf_s"] is None
    assert "no failures" in said(capsys, bare, "--tokens", "1e9", "--failures", "none")


def test_pictures_are_saved(capsys, path, tmp_path):
    curve, good = tmp_path / "curve.png", tmp_path / "good.png"
    said(capsys, path, "--curve", curve, "--goodput", good)
    for picture in (curve, good):
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_in_the_file_is_no_hindrance_to_simulate(capsys, path):
    assert main(["simulate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


MISTAKES = [
    ((TEXT, []), "has no [run] with num_tokens"),
    ((TEXT, ["--tokens", "1e9", "--failures", "weekly"]), "one of llama-3"),
    ((TEXT, ["--tokens", "1e9", "--failures", "-1"]), "rate is -1.0"),
    ((TEXT, ["--tokens", "1e9", "--failures", "1e9"]), "does not get on"),
    ((TEXT + "[run]\ntokens = 1e9\n", []), "did you mean 'num_tokens'?"),
    ((TEXT + '[run]\nnum_tokens = "many"\n', []), "write a finite number"),
    ((TEXT + "[run]\nprice = 2.0\n", []), "[run] lacks num_tokens"),
    ((TEXT + "[run]\nnum_tokens = 1e9\nfailures = { restart = 5 }\n", []), "units are in names: write restart_s"),
    ((TEXT + "[run]\nnum_tokens = 1e9\nfailures = { restart_s = -5 }\n", []), "restart_s is -5"),
    ((TEXT + RUN.replace("2.0", "-2.0"), []), "the price is -2.0"),
    ((TEXT + RUN, ["--curve", "curve.txt"]), "expected a picture"),
    ((TEXT, ["--tokens", "1e9", "--goodput", "good.png"]), "the run has none"),
    ((TEXT.replace("hidden_size = 512", "hidden_size = 40960"), ["--tokens", "1e9"]), "does not fit"),
]


@pytest.mark.parametrize(("made", "words"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(refused, tmp_path, monkeypatch, made, words):
    monkeypatch.chdir(tmp_path)
    text, flags = made
    (tmp_path / "plan.toml").write_text(text)
    assert words in refused("cost", "plan.toml", *flags)
