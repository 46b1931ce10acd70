"""Faults on a plan: the same for a seed, each once, and lost packets on a wire of their own."""

import os
import subprocess
import time

import pytest
import torch
from elastic_job import torchrun
from packets import lossy_loopback

from distlab.checkpoint import CheckpointError, save
from distlab.elastic import Fault, Faults, InjectedFault, plan_faults
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
        ({"kinds": ["kill", "packets"]}, r"kinds is \['kill', 'packets'\]; pass some of kill, "),
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
        Faults(plan, tmp_path).before_step(number, 1, 4, {})
    Faults(plan, tmp_path).before_step(5, 0, 4, {})
    with pytest.raises(InjectedFault, match="rank 1: fault 0 of the plan raises here"):
        Faults(plan, tmp_path).before_step(7, 1, 4, {})
    Faults(plan, tmp_path).before_step(7, 1, 4, {})
    with pytest.raises(InjectedFault):  # of two ranks, rank 3's faults are rank 1's
        Faults([Fault("exception", 0, 3)], tmp_path / "other").before_step(0, 1, 2, {})


def test_a_slow_rank_sleeps(tmp_path):
    begin = time.monotonic()
    Faults([Fault("slow", 0, 0, 0.2)], tmp_path).before_step(0, 0, 1, {})
    assert time.monotonic() - begin >= 0.2


def bits_of(tensors):
    return [tensor.detach().contiguous().view(-1).view(torch.uint8).clone() for tensor in tensors]


def changed(now, before):
    return sum(int(byte).bit_count() for new, old in zip(now, before, strict=True) for byte in (new ^ old).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bit_is_flipped_and_its_mark_says_which(tmp_path, dtype):
    model = torch.nn.Conv2d(3, 5, 3, bias=False).to(dtype).to(memory_format=torch.channels_last)
    before = bits_of(model.parameters())
    Faults([Fault("flip", 0, 0)], tmp_path).before_step(0, 0, 1, {"model": model})
    after = bits_of(model.parameters())
    assert changed(after, before) == 1
    (place,) = (after[0] ^ before[0]).nonzero().flatten().tolist()
    index = [int(one) for one in torch.unravel_index(torch.tensor(place // dtype.itemsize), model.weight.shape)]
    bit = 8 * (place % dtype.itemsize) + int((after[0] ^ before[0])[place]).bit_length() - 1
    assert (tmp_path / "fault-0").read_text() == f"bit {bit} of element {index} of weight"


@pytest.mark.parametrize("kind", ["flip gradient", "flip moment"])
def test_a_bit_of_a_gradient_is_flipped_before_the_update_and_of_a_moment_after_it(tmp_path, kind):
    def update(*faults):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        marks = Faults([Fault(*fault) for fault in faults], tmp_path)
        for number in range(2):
            marks.before_step(number, 0, 1, {"model": model, "optimizer": optimizer})
            if kind == "flip gradient":
                optimizer.step()  # without a gradient: nothing to flip yet
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
            moments = bits_of(optimizer.state[one]["momentum_buffer"] for one in model.parameters())
            yield bits_of(one.grad for one in model.parameters()), bits_of(model.parameters()), moments
            optimizer.zero_grad()

    healthy, faulty = [*update()], [*update((kind, 1, 0))]
    assert all(changed(*each) == 0 for each in zip(faulty[0], healthy[0], strict=True))
    gradients, weights, moments = (changed(*each) for each in zip(faulty[1], healthy[1], strict=True))
    said = (tmp_path / "fault-0").read_text()
    if kind == "flip gradient":
        assert gradients == 1
        assert weights > 0, "the update read the wrong gradient"
        assert " of the gradient of " in said
    else:
        assert (gradients, weights, moments) == (0, 0, 1)
        assert " of momentum_buffer of optimizer's parameter " in said


@pytest.mark.parametrize("kind", ["flip", "flip gradient", "flip moment"])
def test_where_there_is_nothing_to_flip_one_line_says_so(tmp_path, kind):
    with pytest.raises(ValueError, match="there is no weight, gradient or moment to flip a bit of") as caught:
        Faults([Fault(kind, 0, 0)], tmp_path).before_step(0, 0, 1, {"model": torch.nn.Tanh()})
    assert "\n" not in str(caught.value)


def test_a_full_disk_refuses_the_next_save_alone(tmp_path):
    faults, parts = Faults([Fault("disk", 2, 0)], tmp_path / "marks"), {"model": torch.nn.Linear(2, 2)}
    with faults.full_disk():
        save(tmp_path / "saved", 1, parts=parts)
    faults.before_step(2, 0, 1, {})
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
