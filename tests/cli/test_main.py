"""The command line: one clear line and exit 2 for a user's mistake, JSON where a program reads it."""

import inspect
import json
import subprocess
import sys

import pytest

from distlab.cli import bench, main

SPLIT = ["--sharding", "3", "--pipeline", "8", "--data", "2", "--layers", "30", "--schedule", "zb_h1"]
MISTAKES = [
    ([], ""),
    (["fly"], ""),
    (["tour", "--ranks", "0"], "0 cannot be used; pass 1 to 1024"),
    (["tour", "--ranks", "four"], "'four' is not a whole number; pass 1 to 1024"),
    (["tour", "--ranks", "100000"], "100000 cannot be used; pass 1 to 1024"),
    (["tour", "--data", "/nowhere/at/all.txt"], "/nowhere/at/all.txt"),
    (["tour", "--data", "/"], "/"),
    (["tour", "--data", "/dev/null"], "/dev/null"),
    (["tour", "--device", "abacus"], "abacus"),
    (["tour", "--device", "cuda"], ""),
    (["tour", "--output", __file__], "expected the path of a folder, got a file"),
    (["calibrate", "--ranks", "4", "--nodes", "3"], ""),
    (["calibrate", "--between", "1MB/s"], ""),
    (["calibrate", "--output", "/"], "--output /: expected the path of a file, got a folder"),
    (["calibrate", "--output", f"{__file__}/a/b.json"], "cannot be written"),
    (["bench", "--save", __file__], "expected results of distlab bench"),
    (["bench", "perpetual_motion"], "no benchmark is called 'perpetual_motion'"),
    (["simulate", "--memory", "step.docx"], "expected a picture such as step.png, got .docx"),
    (["lesson", "start", "--port", "80000"], "80000 cannot be used; pass 1 to 65535"),
    (["simulate", "--cluster", "abacus"], "'abacus' is neither a preset nor a file"),
    (["simulate", "--cluster", __file__], "is not a calibration"),
    (["simulate", "--stack", "abacus"], "no preset 'abacus' among the stacks"),
    (["simulate", "--layers", "2", "--pipeline", "64", "--data", "1"], "64 pipeline stages"),
    (["simulate", "--layers", "0"], "is 0; pass a whole number of at least 1"),
    (["simulate", "--hidden", "100", "--heads", "3"], "3 heads do not divide"),
    (["simulate", "--data", "100000000"], "100,000,000 ranks; simulate takes at most 1,000,000"),
    (["simulate", "--pipeline", "8", "--microbatches", "1000000"], "8,000,000 passes"),
    (["simulate", "--schedule", "chaos"], "schedule is 'chaos'; choose one of naive, "),
    (["simulate", "--schedule", "dualpipe"], "schedule is 'dualpipe'; choose one of naive, "),
    (["simulate", "--sharding", "4"], "choose 0, 1, 2 or 3"),
    (["simulate", "--sharding", "two"], '--sharding is "two"; write a whole number'),
    (["simulate", "--experts", "0"], "--experts is 0; pass a whole number of at least 1"),
    (["simulate", "--recompute-layers", "2"], "--recompute-method and --recompute-layers choose blocks of recompute"),
    (["simulate", "--model", "llama-2-7b", "--feed-forward", "8"], "leave out --feed-forward"),
    (["simulate", "--float8", "products"], "a100-sxm-80gb has no products of 8 bits"),
    (["simulate", "none.toml"], "distlab simulate: none.toml: No such file or directory\n"),
    # A script whose variable is empty was once told the step of the default plan.
    *(([*command, ""], "directory") for command in (["simulate"], ["export", "--to", "torchtitan"])),
    *((["simulate", *SPLIT], words) for words in ("splits them", "--memory")),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_2_before_any_work(arguments, words, refused, monkeypatch):
    for work in (
        "distlab.measure.calibrate",
        "distlab.cli.measure.tour.run_training",
        "distlab.cli.measure.bench.load",
    ):
        monkeypatch.setattr(work, None)
    if "cuda" in arguments:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU, so asking for one is no mistake")
    assert words in refused(*arguments)


def test_doctor_finds_what_ranks_need_here(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["healthy"] is True
    assert facts["works"]["ranks on the CPU (distlab tour)"] is True
    assert {check["name"] for check in facts["checks"]} >= {"torch", "gloo", "nccl", "gpus", "loopback", "browser"}


def test_a_place_that_cannot_be_written_is_refused_before_torch_is_loaded():
    code = "import sys; from distlab.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = ["calibrate", "--output", "/"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False\n"


def test_every_benchmark_has_rows_of_which_few_can_be_asked_for(capsys):
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out.split() == bench.names()
    for name in bench.names():
        rows = bench.load(name).rows
        assert inspect.isgeneratorfunction(rows), name
        assert "quick" in inspect.signature(rows).parameters, name
