"""What the GPU command refuses in one line, and what it notes: every case is a fake of the machine's facts."""

from dataclasses import replace

import pytest
from gpu import command
from gpu.facts import Facts, Gpu, judge
from gpu.job import PARTS

from distlab.cli import main

GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, (9, 0))
GOOD = Facts(torch="2.13.0", torch_cuda="13.0", driver="580.1", driver_cuda="13.0", gpus=(H100,), usable=1)
DEAD = replace(GOOD, usable=0)
NO_GPU = Facts(torch="2.13.0+cpu")


REFUSED = {
    "no driver": (NO_GPU, "no driver of NVIDIA is loaded"),
    "a driver without a GPU": (replace(NO_GPU, driver="580.1"), "it knows no GPU"),
    "old torch": (replace(GOOD, torch="2.9.1"), "distlab needs 2.11 or newer"),
    "hidden": (replace(DEAD, visible=""), "CUDA_VISIBLE_DEVICES is '', which hides every GPU; unset it"),
    "hidden by number": (replace(DEAD, visible="7"), "CUDA_VISIBLE_DEVICES is '7', and torch finds none of these"),
    "no CUDA in torch": (replace(DEAD, torch="2.13.0+cpu", torch_cuda=None), "is built without CUDA; install a build"),
    "an old driver": (
        replace(DEAD, driver="470.5", driver_cuda="11.4"),
        "supports CUDA 11.4, and torch 2.13.0 is built",
    ),
    "an old driver, by torch": (
        replace(DEAD, error="The NVIDIA driver on your system is too old"),
        "install a newer driver",
    ),
    "prohibited": (replace(GOOD, gpus=(replace(H100, mode="Prohibited"),)), "in compute mode Prohibited"),
    "exclusive and taken": (
        replace(DEAD, gpus=(replace(H100, mode="Exclusive_Process"),), error="all CUDA-capable devices are busy"),
        "in compute mode Exclusive_Process, and no process of ours may use it",
    ),
    "full": (replace(GOOD, gpus=(replace(H100, free_bytes=GIB),)), "has 1.0 GiB of 80.0 GiB free"),
    "full, before torch can use it": (replace(DEAD, gpus=(replace(H100, free_bytes=0),)), "0.0 GiB of 80.0 GiB free"),
    "one of two is full": (
        replace(GOOD, gpus=(replace(H100, free_bytes=GIB), H100), usable=2),
        "or set CUDA_VISIBLE_DEVICES=1",
    ),
    "anything else": (replace(DEAD, error="CUDA error:\n unknown"), "torch sees no GPU: CUDA error: unknown"),
}


@pytest.mark.parametrize(("facts", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_gpus_that_cannot_be_used_are_refused_in_one_line(facts, words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("gpu.command.read_facts", lambda: facts)
    assert main(["gpu", "--device", "cuda", "--out", str(tmp_path / "new")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert not (tmp_path / "new").exists()


NOTED = {
    "in use": (replace(H100, free_bytes=60 * GIB), "other processes hold 20.0 GiB of it"),
    "exclusive": (replace(H100, mode="Exclusive_Process"), "nothing with several ranks on one GPU is run"),
    "without bf16": (
        replace(H100, capability=(7, 5)),
        "no bfloat16 (compute capability 7.5): speed is measured in float16",
    ),
    "a slice": (replace(H100, name="H100 MIG 1g.10gb", mig=True), "is a slice (MIG): nothing is compared"),
}


@pytest.mark.parametrize(("card", "words"), NOTED.values(), ids=NOTED.keys())
def test_what_disturbs_a_run_is_said_once_and_told_to_the_parts(card, words, tmp_path):
    facts = replace(GOOD, gpus=(card,))
    verdict = judge(facts)
    assert (verdict.refused, verdict.no_gpu) == ("", "")
    assert len(verdict.notes) == 1
    assert words in verdict.notes[0]
    job = command.job_of(facts, "cuda", tmp_path)
    assert job.may_share == (card.mode == "Default")
    assert job.half == ("float16" if card.capability < (8, 0) else "bfloat16")
    assert job.whole == (not card.mig)


MISTAKES = {
    "an unknown part": (["--only", "perpetual_motion"], f"choose from machine, plans, {PARTS[2].name}"),
    "no minutes": (["--minutes", "0"], "pass a number above 0"),
    "negative minutes": (["--minutes", "-3"], "pass a number above 0"),
    "minutes in words": (["--minutes", "ten"], "pass a number above 0"),
    "a file as folder": (["--out", __file__], "expected the path of a folder"),
    "a folder in a file": (["--out", f"{__file__}/a"], "cannot be written"),
}


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_before_any_work(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr("gpu.command.read_facts", None)
    try:
        status = main(["gpu", *arguments])
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err
