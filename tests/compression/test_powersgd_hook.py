"""PowerSGD between ranks: the gradients of torch's hook, what error feedback keeps, and the faults that it names."""

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from refused import message
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket
from distlab.compression import PowerSGD
from distlab.rng import generator

SHAPES = ((24, 20), (24,), (24, 20), (24,), (9, 4, 3), (7,), (24, 20), (30, 6), (2, 3), ())


def gradient_bucket(index=0, shapes=SHAPES, dtype=torch.float64):
    flat = FlatBuffer([torch.zeros(shape, dtype=dtype) for shape in shapes])
    return GradientBucket(index, flat.buffer, flat.views)


def fill(bucket, step, rank=None, seed=0):
    """Write this rank's gradients of a step: a common part that moves slowly, and the rank's own."""
    rank = dist.get_rank() if rank is None else rank
    size, dtype = bucket.buffer.numel(), bucket.buffer.dtype
    common = torch.randn(size, generator=generator(seed, 0, f"common {bucket.index}"), dtype=torch.float64)
    own = torch.randn(size, generator=generator(seed, rank, f"own {bucket.index} {step}"), dtype=torch.float64)
    bucket.buffer.copy_((common + 0.5 * own).to(dtype))


def mean_gradient(bucket, step):
    world_size, other = dist.get_world_size(), GradientBucket(bucket.index, bucket.buffer.clone(), ())
    total = torch.zeros_like(bucket.buffer)
    for rank in range(world_size):
        fill(other, step, rank)
        total += other.buffer / world_size
    return total


def run_steps(hook, steps, dtype=torch.float32, first=0, num_buckets=2):
    """Several steps of several buckets, all started before any is waited for; return the last gradients."""
    buckets = [gradient_bucket(index, SHAPES[index:], dtype) for index in range(num_buckets)]
    for step in range(first, first + steps):
        for bucket in buckets:
            fill(bucket, step)
        for pending in [hook.start(bucket, None) for bucket in buckets]:
            pending.wait()
    return [bucket.buffer.clone() for bucket in buckets]


class TorchBucket(NamedTuple):
    """What torch's hook asks of a bucket of DDP, which needs no DDP."""

    bucket: GradientBucket

    def buffer(self):
        return self.bucket.buffer

    def gradients(self):
        return list(self.bucket.gradients)

    def index(self):
        return self.bucket.index

    def is_last(self):
        return True


class FromTorchsDraws(PowerSGD):
    """The hook with the numbers that torch's hook draws, in torch's order."""

    def _first_factors(self, index, memory):
        if not hasattr(self, "draws"):
            self.draws = np.random.RandomState(0)
        torch.manual_seed(self.draws.randint(1_000_000_000))
        drawn = [
            torch.randn(1, batch.columns, batch.rank, dtype=torch.float64).flatten()
            for batch in memory.layout.batches
            for _ in range(batch.num_matrices)
        ]
        return torch.cat(drawn)


def beside_torch(rank, feedback, warm):
    start_step = 2
    hook = FromTorchsDraws(rank, error_feedback=feedback, warm_start=warm, start_step=start_step)
    state = PowerSGDState(
        None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start_step,
        use_error_feedback=feedback,
        warm_start=warm,
        random_seed=0,
    )
    ours, theirs = (gradient_bucket(shapes=SHAPES[:-1]) for _ in range(2))  # torch takes no number alone
    differences, compressed = [], []
    for step in range(7):
        fill(ours, step)
        fill(theirs, step)
        hook.start(ours, None).wait()
        theirs.buffer.copy_(powerSGD_hook(state, TorchBucket(theirs)).wait())
        differences.append((ours.buffer - theirs.buffer).abs().max().item())
        compressed.append((ours.buffer - mean_gradient(ours, step)).abs().max().item() > 1e-3)
    assert compressed == [False] * start_step + [True] * 5
    return max(differences)


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_gradients_are_those_of_torchs_hook(world_size):
    cases = [(1, True, True), (2, True, True), (3, True, True), (3, False, True), (2, True, False)]
    result = {case: beside_torch(*case) for case in cases}
    assert all(difference <= 1e-10 for difference in result.values()), result


@pytest.mark.on_ranks(2)
def test_full_rank_is_the_mean_and_starts_whole():
    hooks = {
        "full rank": PowerSGD(100, min_saving=1e-3),
        "not started": PowerSGD(1, start_step=3),
        "nothing worth it": PowerSGD(100),
    }
    for name, hook in hooks.items():
        bucket = gradient_bucket()
        for step in range(3):
            fill(bucket, step)
            hook.start(bucket, None).wait()
            assert (bucket.buffer - mean_gradient(bucket, step)).abs().max() < 1e-12, name


def share_that_moved(error_feedback):
    """A weak direction that stays, beside a strong one that turns round in every step: what of the weak one arrives."""
    left, right = (torch.linalg.qr(torch.randn(16, 2, generator=generator(0, 0, name))).Q for name in ("left", "right"))
    weak, strong = torch.outer(left[:, 0], right[:, 0]), torch.outer(left[:, 1], right[:, 1])
    hook, bucket = PowerSGD(1, error_feedback=error_feedback), gradient_bucket(0, ((16, 16),))
    applied, steps = torch.zeros(16, 16, dtype=torch.float64), 100
    for step in range(steps):
        bucket.gradients[0].copy_(0.1 * weak * (1 + dist.get_rank()) / 1.5 + (-1) ** step * strong)
        hook.start(bucket, None).wait()
        applied += bucket.gradients[0]
    return (applied * weak).sum().item() / (0.1 * steps)


@pytest.mark.on_ranks(2)
def test_a_weak_direction_moves_with_error_feedback_alone():
    assert share_that_moved(True) > 0.8
    assert share_that_moved(False) < 0.2


@pytest.mark.parametrize("start_step", [0, 5])
@pytest.mark.on_ranks(3)
def test_bad_numbers_are_named_on_every_rank_and_leave_no_trace(start_step):
    hook = PowerSGD(2, start_step=start_step)
    run_steps(hook, 2)
    before = hook.state_dict()
    buckets = [gradient_bucket(index, SHAPES[index:], torch.float32) for index in range(2)]
    for bucket in buckets:
        fill(bucket, 2)
    if dist.get_rank() == 1:
        buckets[1].buffer[3] = float("nan")
    if dist.get_rank() == 2:
        buckets[1].gradients[0][0] = float("inf")
    pending = [hook.start(bucket, None) for bucket in buckets]
    first, second = (message(one.wait) for one in pending)
    assert f"rank {dist.get_rank()}: NaN or infinite gradients on rank 1, 2 in bucket 1 at step 2" in first
    assert "belongs to a step that failed" in second
    after = hook.state_dict()
    for index in range(2):
        mine, was = after["buckets"][index], before["buckets"][index]
        assert mine["steps"] == was["steps"]
        assert all(was[name] is None or torch.equal(was[name], mine[name]) for name in ("error", "right"))
    assert all(torch.isfinite(buffer).all() for buffer in run_steps(hook, 2, first=3))


def steps():
    hook = PowerSGD(2)
    run_steps(hook, 1)
    state = hook.state_dict()
    state["buckets"][0]["steps"] += dist.get_rank()
    hook.load_state_dict(state)
    run_steps(hook, 1)


def shapes():
    hook = PowerSGD(2)
    hook.start(gradient_bucket(), None).wait()
    hook.start(gradient_bucket(0, SHAPES[1:]), None).wait()


BAD = [
    (
        lambda: PowerSGD(2, seed=dist.get_rank()).start(gradient_bucket(), None).wait(),
        r'rank 0 has .*"seed": 0.*; rank 1 has .*"seed": 1',
    ),
    (steps, "steps so far"),
    (shapes, "build a different one"),
    (lambda: PowerSGD(0), "rank is 0"),
    (lambda: PowerSGD(2.5), "rank is 2.5"),
    (lambda: PowerSGD(start_step=-1), "start_step is -1"),
    (lambda: PowerSGD(min_saving=0.0), "min_saving is 0.0"),
    (lambda: PowerSGD(min_saving=float("nan")), "min_saving is nan"),
    (lambda: PowerSGD(2).load_state_dict(PowerSGD(4).state_dict()), "rank=4"),
]


@pytest.mark.on_ranks(2)
def test_what_cannot_be_is_refused_on_every_rank():
    for action, words in BAD:
        assert re.search(words, message(action).replace("\n", " "))


@pytest.mark.on_ranks(2)
def test_a_step_that_was_given_up_is_dropped():
    hook, other = PowerSGD(2), PowerSGD(2)
    bucket = gradient_bucket()
    for one in (hook, other):
        fill(bucket, 0)
        one.start(bucket, None).wait()
    fill(bucket, 1)
    hook.start(bucket, None)  # and then something else failed
    results = []
    for one in (hook, other):
        fill(bucket, 2)
        one.start(bucket, None).wait()
        results.append(bucket.buffer.clone())
    assert torch.equal(*results)
