"""Faults on a plan: the same for a seed, each once, and lost packets on a wire of their own."""

import copy
import os
import subprocess
import time

import pytest
import torch
from elastic_job import torchrun

from distlab.checkpoint import CheckpointError, save
from distlab.elastic import Fault, Faults, InjectedFault, lossy_loopback, plan_faults
from distlab.elastic.faults import KINDS


def test_a_seed_makes_the_same_plan_and_every_kind_and_rank_comes():
    plan = plan_faults(3, 60, num_steps=20, world_size=4, within_s=0.5)
    assert plan == plan_faults(3, 60, num_steps=20, world_size=4, within_s=0.5)
    assert plan != plan_faults(4, 60, num_steps=20, world_size=4, within_s=0.5)
    assert {fault.kind for fault in plan} == set(KINDS)
    assert {fault.rank for fault in plan} == set(range(4))
    assert [fault.step for fault in plan] == sorted(fault.step for fault in plan)
    assert all(0 <= fault.step < 20 and 0 <= fault.seconds <= 0.5 for fault in plan)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kinds": ["kill", "packets"]}, r"kinds is \['kill', 'packets'\]; pass some of kill, .*lossy_loopback"),
        ({"kinds": []}, r"kinds is \[\]"),
        ({"count": -1}, "count -1"),
        ({"world_size": 0}, "world_size 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        plan_faults(**({"seed": 0, "count": 1, "num_steps": 5, "world_size": 2} | arguments))
    with pytest.raises(ValueError, match="of no known kind"):
        Faults([Fault("fire", 0, 0)], "unused")


def test_a_fault_happens_once_to_its_rank_in_its_step_or_the_first_after_it(tmp_path):
    plan = [Fault("exception", 5, 1)]
    for number in range(5):
        Faults(plan, tmp_path).before_step(number, 1, 4, [])
    Faults(plan, tmp_path).before_step(5, 0, 4, [])
    with pytest.raises(InjectedFault, match="rank 1: fault 0 of the plan raises here"):
        Faults(plan, tmp_path).before_step(7, 1, 4, [])
    Faults(plan, tmp_path).before_step(7, 1, 4, [])
    with pytest.raises(InjectedFault):  # of two ranks, rank 3's faults are rank 1's
        Faults([Fault("exception", 0, 3)], tmp_path / "other").before_step(0, 1, 2, [])


def test_a_slow_rank_sleeps(tmp_path):
    begin = time.monotonic()
    Faults([Fault("slow", 0, 0, 0.2)], tmp_path).before_step(0, 0, 1, [])
    assert time.monotonic() - begin >= 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bit_is_flipped(tmp_path, dtype):
    model = torch.nn.Linear(3, 5).to(dtype)
    before = copy.deepcopy(model)
    Faults([Fault("flip", 0, 0)], tmp_path).before_step(0, 0, 1, [model])
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    bits = [
        int(byte).bit_count()
        for new, old in pairs
        for byte in (new.detach().view(-1).view(torch.uint8) ^ old.detach().view(-1).view(torch.uint8)).tolist()
    ]
    assert sum(bits) == 1
    with pytest.raises(ValueError, match="no parameter to flip a bit of"):
        Faults([Fault("flip", 0, 0)], tmp_path / "none").before_step(0, 0, 1, [torch.nn.Tanh()])


def test_a_full_disk_refuses_the_next_save_alone(tmp_path):
    faults, parts = Faults([Fault("disk", 2, 0)], tmp_path / "marks"), {"model": torch.nn.Linear(2, 2)}
    with faults.full_disk():
        save(tmp_path / "saved", 1, parts=parts)
    faults.before_step(2, 0, 1, [])
    with faults.full_disk(), pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path / "saved", 2, parts=parts)
    with faults.full_disk():
        save(tmp_path / "saved", 3, parts=parts)
    assert sorted(os.listdir(tmp_path / "saved")) == ["step-0000000001", "step-0000000003"]


def lossy_or_skip(share):
    try:
        with lossy_loopback(share):
            return
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.soak
def test_packets_are_lost_and_the_job_goes_on(tmp_path):
    lossy_or_skip(0.02)
    with lossy_loopback(0.02) as words:
        with torchrun(tmp_path, 2, before=words, num_epochs=1) as job:
            assert job.wait(100) == 0, (tmp_path / "output.txt").read_text()
        shown = subprocess.run([*words, "tc", "-s", "qdisc", "show", "dev", "lo"], capture_output=True, text=True)
    dropped = int(shown.stdout.split("dropped ")[1].split(",")[0])
    assert "loss 2%" in shown.stdout
    assert dropped > 0, shown.stdout
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert words[-1] not in left


def test_where_packets_cannot_be_lost_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    words = r"cannot be lost on purpose here \(.*'ip'.*needs Linux"
    with pytest.raises(RuntimeError, match=words) as caught:
        with lossy_loopback(0.1):
            raise AssertionError("there is no ip to make it with")
    assert "\n" not in str(caught.value)
    for share in (-0.1, 1, 5, float("nan")):
        with pytest.raises(ValueError, match="pass the part of packets"):
            with lossy_loopback(share):
                raise AssertionError(share)
