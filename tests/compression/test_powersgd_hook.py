"""PowerSGD between ranks: the gradients of torch's hook, and the faults that it names."""

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


def gradient_bucket(index=0, shapes=SHAPES):
    flat = FlatBuffer([torch.zeros(shape, dtype=torch.float64) for shape in shapes])
    return GradientBucket(index, flat.buffer, flat.views)


def fill(bucket, step):
    """Write this rank's gradients of a step: a common part that moves slowly, and the rank's own."""
    size, rank = bucket.buffer.numel(), dist.get_rank()
    common = torch.randn(size, generator=generator(0, 0, f"common {bucket.index}"), dtype=torch.float64)
    own = torch.randn(size, generator=generator(0, rank, f"own {bucket.index} {step}"), dtype=torch.float64)
    bucket.buffer.copy_(common + 0.5 * own)


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
        mean = ours.buffer.clone()
        dist.all_reduce(mean)
        hook.start(ours, None).wait()
        theirs.buffer.copy_(powerSGD_hook(state, TorchBucket(theirs)).wait())
        differences.append((ours.buffer - theirs.buffer).abs().max().item())
        compressed.append((ours.buffer - mean / dist.get_world_size()).abs().max().item() > 1e-3)
    assert compressed == [False] * start_step + [True] * 5
    return max(differences)


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_gradients_are_those_of_torchs_hook(world_size):
    cases = [(1, True, True), (2, True, True), (3, True, True), (3, False, True), (2, True, False)]
    result = {case: beside_torch(*case) for case in cases}
    assert all(difference <= 1e-10 for difference in result.values()), result


@pytest.mark.on_ranks(3)
def test_bad_numbers_are_named_on_every_rank_and_leave_no_trace():
    for hook in (PowerSGD(2), PowerSGD(2, start_step=5)):
        buckets = [gradient_bucket(index, SHAPES[index:]) for index in range(2)]
        before = {}
        for step in range(3):
            for bucket in buckets:
                fill(bucket, step)
            if (step, dist.get_rank()) == (2, 1):
                buckets[1].buffer[3] = float("nan")
            if (step, dist.get_rank()) == (2, 2):
                buckets[1].gradients[0][0] = float("inf")
            texts = [message(one.wait) for one in [hook.start(bucket, None) for bucket in buckets]]
            before = hook.state_dict()["buckets"] if step < 2 else before
        named = f"rank {dist.get_rank()}: NaN or infinite gradients on rank 1, 2 in bucket 1 at step 2"
        assert named in texts[0]
        assert "belongs to a step that failed" in texts[1]
        for index, mine in hook.state_dict()["buckets"].items():
            assert mine["steps"] == before[index]["steps"]
            for was, now in ((before[index][name], mine[name]) for name in ("error", "right")):
                assert was is None or torch.equal(was, now)


def steps():
    hook = PowerSGD(2)
    hook.start(gradient_bucket(), None).wait()
    state = hook.state_dict()
    state["buckets"][0]["steps"] += dist.get_rank()
    hook.load_state_dict(state)
    hook.start(gradient_bucket(), None).wait()


def shapes():
    hook = PowerSGD(2)
    hook.start(gradient_bucket(), None).wait()
    hook.start(gradient_bucket(0, SHAPES[1:]), None).wait()


def other_seeds():
    PowerSGD(2, seed=dist.get_rank()).start(gradient_bucket(), None).wait()


BAD = [
    (other_seeds, r'rank 0 has .*"seed": 0.*; rank 1 has .*"seed": 1'),
    (steps, "steps so far"),
    (shapes, "build a different one"),
    (lambda: PowerSGD(0), "rank is 0"),
    (lambda: PowerSGD(2.5), "rank is 2.5"),
    (lambda: PowerSGD(start_step=-1), "start_step is -1"),
    (lambda: PowerSGD(min_saving=float("nan")), "min_saving is nan"),
    (lambda: PowerSGD(2).load_state_dict(PowerSGD(4).state_dict()), "rank=4"),
]


@pytest.mark.on_ranks(2)
def test_what_cannot_be_is_refused_on_every_rank():
    for action, words in BAD:
        assert re.search(words, message(action).replace("\n", " "))
