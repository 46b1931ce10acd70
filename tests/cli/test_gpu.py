"""The GPU command: its parts die, hang and run out of memory alone; what it refuses, and what it does without a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gpu import command, run
from gpu.facts import Facts, Gpu, judge
from gpu.job import PARTS, Part, choose
from gpu.results import resume
from waiting import wait_for

from distlab.cli import main

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, (9, 0))
GOOD = Facts(torch="2.13.0", torch_cuda="13.0", driver="580.1", driver_cuda="13.0", gpus=(H100,), usable=1)
NO_GPU = Facts(torch="2.13.0+cpu")


@pytest.fixture
def use_fakes(monkeypatch):
    """Make `use_fakes(choices)` put fake parts in the place of all, and a CPU in that of this machine."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setattr("gpu.command.read_facts", lambda: replace(NO_GPU, machine="a fake"))

    def use(*choices, seconds=40.0):
        parts = tuple(Part(choice.replace(" ", "_"), seconds, "fake_part", choice) for choice in choices)
        for module in ("job", "results", "report"):
            monkeypatch.setattr(f"gpu.{module}.PARTS", parts)

    return use


def gpu(out, *arguments):
    return main(["gpu", "--device", "cpu", "--out", str(out), *arguments])


def kept(out):
    return json.loads((out / "gpu.json").read_text())


def test_a_part_that_raises_dies_or_runs_out_of_memory_costs_itself_alone(use_fakes, tmp_path, capsys):
    use_fakes("raise", "segfault", "memory", "memory in a rank", "rows")
    assert gpu(tmp_path) == 1
    parts = kept(tmp_path)["parts"]
    assert list(parts) == ["raise", "segfault", "memory", "memory_in_a_rank", "rows"]
    assert [part["status"] for part in parts.values()] == ["failed", "killed", "done", "out of memory", "done"]
    assert all(part["findings"][0]["row"]["claim"].endswith("on cpu") for part in parts.values())
    assert [part["shrunk"] for part in parts.values()] == [False, False, True, True, False]
    assert "RuntimeError: the wire is cut" in parts["raise"]["output"]
    assert parts["segfault"]["reason"] == "it was ended by SIGSEGV"
    report = (tmp_path / "GPU.md").read_text()
    for words in (
        "5 of 6 bars hold; 2 of 5 parts done. Small runs on the CPU",
        "| rows | a bar that is missed | 3 s |  |  | 3 to 3 | <= 2 s | **no** |  |",
        "- memory: ran out of memory once, so all its sizes are halved",
        "![what it shows](picture.png)",
        "- rows: nothing travels",
        "- raise: failed; it ended with status 1",
        "## Output of raise",
        "RuntimeError: the wire is cut",
        "torch 2.13.0+cpu",
    ):
        assert words in report, words
    assert "rows: done after" in capsys.readouterr().out


def test_a_part_that_hangs_is_ended_with_all_that_it_started_and_says_where_it_stood(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    seen = []
    monkeypatch.setattr(run, "marked", lambda mark, real=run.marked: seen.append(real(mark)) or seen[-1])
    job, real_wait = command.job_of(NO_GPU, "cpu", tmp_path), run._wait

    def wait_for_stack(process, _):  # which it prints 3 s before its time is over
        wait_for(lambda: "in findings" in (tmp_path / "parts" / "hang.log").read_text())
        return real_wait(process, 0.1)

    monkeypatch.setattr(run, "_wait", wait_for_stack)
    outcome = run.run_part(Part("hang", 6.0, "fake_part", "hang"), replace(job, seconds=6.0))
    assert (outcome.status, len(outcome.findings)) == ("out of time", 1)
    assert "fake_part.py" in outcome.output
    assert "in findings" in outcome.output
    assert len(seen[0]) == 1, "the process that the part had started, in a session of its own"
    assert seen[-1] == []


def test_a_second_run_goes_on_where_the_first_ended(use_fakes, tmp_path, capsys):
    use_fakes("rows", "raise")
    assert (gpu(tmp_path, "--minutes", "0.001"), kept(tmp_path)["not_run"].keys()) == (0, {"rows", "raise"})
    assert "- rows: no time was left" in (tmp_path / "GPU.md").read_text()
    assert gpu(tmp_path, "--only", "rows") == 0
    first = kept(tmp_path)["parts"]["rows"]
    capsys.readouterr()
    assert gpu(tmp_path) == 1
    said = capsys.readouterr().out
    assert "1 parts are done (rows)" in said
    assert "raise: up to" in said
    assert "rows: up to" not in said
    assert (kept(tmp_path)["parts"]["rows"], kept(tmp_path)["not_run"]) == (first, {})


def test_results_of_a_different_machine_or_program_are_not_mixed(use_fakes, said, refused, tmp_path):
    use_fakes("rows")
    said("gpu", "--device", "cpu", "--out", tmp_path)
    newer = replace(NO_GPU, machine="a fake", torch="2.14.0")
    assert resume(tmp_path, newer, "cpu")[1].endswith("was measured with torch '2.13.0+cpu' (now '2.14.0').")
    assert resume(tmp_path, newer, "cpu")[0].parts == {}
    assert "gpus" in resume(tmp_path, GOOD, "cuda")[1]
    (tmp_path / "gpu.json").write_text("[1, 2]")
    told = refused("gpu", "--device", "cpu", "--out", tmp_path)
    assert "is not what this command writes; pass a different folder" in told


def test_without_a_gpu_it_says_what_it_would_run_in_the_order_of_worth(said, refused, monkeypatch, tmp_path):
    monkeypatch.setattr("gpu.command.read_facts", lambda: NO_GPU)
    out = tmp_path / "new"
    told = said("gpu", "--out", out)
    assert all(f"{part.name} " in told for part in PARTS)
    assert "no GPU: no driver of NVIDIA is loaded on this machine" in told
    assert not out.exists()
    refused("gpu", "--device", "cuda", "--out", out)
    lines = said("gpu", "--list").splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [part.name for part in PARTS] == [p.name for p in choose(None)]
    assert [part.name for part in choose(["tour", "machine"])] == ["machine", "tour"]
    assert sum(part.seconds for part in PARTS if not part.name.startswith("lab_")) <= 900


ONLY_TORCH = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] in {blocked} else find(name, *rest)
"""
BLOCKED = {"IPython", "ipykernel", "ipywidgets", "anywidget", "jupyterlab", "jupyter_client", "nbformat", "nbclient"}
BLOCKED |= {"psutil", "pytest", "_pytest", "hypothesis", "pytorch_optimizer", "playwright", "jupytext"}


@pytest.mark.soak
def test_every_part_runs_small_with_nothing_but_torch_numpy_cloudpickle_and_matplotlib(tmp_path, monkeypatch):
    """Python finds none of the blocked packages."""
    (tmp_path / "sitecustomize.py").write_text(ONLY_TORCH.format(blocked=BLOCKED))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"
    words = ["gpu", "--device", "cpu", "--out", str(out), "--minutes", "60"]
    done = subprocess.run([sys.executable, "-m", "distlab", *words], cwd=run.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr + (out / "GPU.md").read_text()
    found = kept(out)["parts"]
    assert {name: part["status"] for name, part in found.items()} == {part.name: "done" for part in PARTS}
    assert (out / "tour" / "timeline.png").is_file()
    rows = [entry["row"] for part in found.values() for entry in part["findings"] if "row" in entry]
    claims = " ".join(row["claim"] for row in rows)
    assert "matrix product [256, 256] x [256, 256] in float32" in claims
    assert "recomputes every block" in claims
    assert not [row["claim"] for row in rows if row["holds"] is False]


DEAD = replace(GOOD, usable=0)


REFUSED = [
    (NO_GPU, "no driver of NVIDIA is loaded"),
    (replace(GOOD, torch="2.9.1"), "distlab needs 2.11 or newer"),
    (replace(DEAD, visible=""), "CUDA_VISIBLE_DEVICES is '', which hides every GPU; unset it"),
    (replace(DEAD, torch="2.13.0+cpu", torch_cuda=None), "is built without CUDA; install a build"),
    (replace(DEAD, driver="470.5", driver_cuda="11.4"), "supports CUDA 11.4, and torch 2.13.0 is built"),
    (replace(DEAD, error="The NVIDIA driver on your system is too old"), "install a newer driver"),
    (replace(GOOD, gpus=(replace(H100, mode="Prohibited"),)), "in compute mode Prohibited"),
    (replace(GOOD, gpus=(replace(H100, free_bytes=GIB),)), "has 1.0 GiB of 80.0 GiB free"),
    (replace(GOOD, gpus=(replace(H100, free_bytes=GIB), H100), usable=2), "or set CUDA_VISIBLE_DEVICES=1"),
    (replace(DEAD, error="CUDA error:\n unknown"), "torch sees no GPU: CUDA error: unknown"),
]


def test_gpus_that_cannot_be_used_are_refused_in_one_line(monkeypatch, refused, tmp_path):
    for facts, words in REFUSED:
        monkeypatch.setattr("gpu.command.read_facts", lambda facts=facts: facts)
        assert words in refused("gpu", "--device", "cuda", "--out", tmp_path / "new")
        assert not (tmp_path / "new").exists()
    monkeypatch.setattr("distlab.cli.claims.NEEDED", (tmp_path / "benchmarks" / "gpu",))
    assert "clone the repository and run `python -m distlab gpu` in it" in refused("gpu")


NOTED = [
    (replace(H100, free_bytes=60 * GIB), "other processes hold 20.0 GiB of it"),
    (replace(H100, mode="Exclusive_Process"), "nothing with several ranks on one GPU is run"),
    (replace(H100, capability=(7, 5)), "no bfloat16 (compute capability 7.5): speed is measured in float16"),
    (replace(H100, name="H100 MIG 1g.10gb", mig=True), "is a slice (MIG): nothing is compared"),
]


def test_what_disturbs_a_run_is_said_once_and_told_to_the_parts(tmp_path):
    for card, words in NOTED:
        facts = replace(GOOD, gpus=(card,))
        verdict = judge(facts)
        assert (verdict.refused, verdict.no_gpu) == ("", "")
        assert [words in note for note in verdict.notes] == [True]
        job = command.job_of(facts, "cuda", tmp_path)
        half = "float16" if card.capability < (8, 0) else "bfloat16"
        assert (job.may_share, job.half, job.whole) == (card.mode == "Default", half, not card.mig)
