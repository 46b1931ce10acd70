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


def facts(capsys, *flags):
    return json.loads(said(capsys, *flags, "--json"))


def test_the_run_its_goodput_and_its_curve(capsys, path):
    found = facts(capsys, path)
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
    same, other = (facts(capsys, path, "--seed", seed) for seed in (0, 2))
    assert same == found
    assert other["failures"]["drawn_days"] != drawn
    assert other["days"] == found["days"]
    assert main(["simulate", str(path), "--json"]) == 0, "a run in the file is no hindrance"
    assert json.loads(capsys.readouterr().out)["fits"]


def test_the_same_in_words_and_in_pictures(capsys, path, tmp_path):
    pictures = tmp_path / "curve.png", tmp_path / "good.png"
    text = said(capsys, path, "--gpus", "2,4,6", "--curve", pictures[0], "--goodput", pictures[1])
    for words in ("goodput", "one in 10.4 days", "best interval", "young", "monte carlo", "in 8 of 10", "<- shortest"):
        assert words in text, words
    assert "6 devices  left out: 3 replicas do not divide the batch of 16 micro-batches" in text
    assert [picture.read_bytes()[:4] for picture in pictures] == [b"\x89PNG"] * 2


def test_flags_say_what_the_file_does_not(capsys, tmp_path):
    bare = tmp_path / "bare.toml"
    bare.write_text(TEXT)
    tokens = (bare, "--tokens", "1e9")
    found = facts(capsys, *tokens)
    assert (found["dollars"], found["failures"], found["goodput"]) == (None, None, 1.0)
    found = facts(capsys, *tokens, "--price", "3", "--failures", "llama-3")
    assert found["price"] == 3.0
    assert "2407.21783" in found["failures"]["source"]
    assert facts(capsys, *tokens, "--failures", "none")["failures"]["mtbf_s"] is None
    assert "no failures" in said(capsys, *tokens, "--failures", "none")


TOKENS = ["--tokens", "1e9"]
MISTAKES = [
    (TEXT, [], "has no [run] with num_tokens"),
    (TEXT, [*TOKENS, "--failures", "weekly"], "one of llama-3"),
    (TEXT, [*TOKENS, "--failures", "-1"], "rate is -1.0"),
    (TEXT, [*TOKENS, "--failures", "1e9"], "does not get on"),
    (TEXT, [*TOKENS, "--goodput", "good.png"], "the run has none"),
    (TEXT + "[run]\ntokens = 1e9\n", [], "did you mean 'num_tokens'?"),
    (TEXT + "[run]\nprice = 2.0\n", [], "[run] lacks num_tokens"),
    (TEXT + RUN.replace("2.0", "-2.0"), [], "the price is -2.0"),
    (TEXT + RUN, ["--curve", "curve.txt"], "expected a picture"),
    (TEXT.replace("hidden_size = 512", "hidden_size = 40960"), TOKENS, "does not fit"),
]


@pytest.mark.parametrize(("text", "flags", "words"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(refused, tmp_path, monkeypatch, text, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(text)
    assert words in refused("cost", "plan.toml", *flags)
