"""PowerSGD between ranks: the planned bytes, state, what error feedback keeps, and the faults that it must name."""

import pytest
import torch
import torch.distributed as dist

from distlab.blocks.flat import FlatBuffer
from distlab.blocks.gradient_hook import GradientBucket
from distlab.comm import RankError, recorded
from distlab.compression import PowerSGD
from distlab.plan.compression import Compression, exchanges
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


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_claims_hold_on_any_number_of_ranks(ranks, world_size):
    def body():
        hook = PowerSGD(2, seed=5)
        run_steps(hook, 1)
        with recorded() as seen:
            once = run_steps(hook, 1, first=1)
        sent = [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]
        saved = hook.state_dict()
        after = run_steps(hook, 3, first=2)
        resumed = PowerSGD(2, seed=5)
        resumed.load_state_dict(saved)
        again = run_steps(resumed, 3, first=2)
        error = [saved["buckets"][index]["error"] for index in range(2)]
        return once, sent, after, again, error

    results = ranks(world_size).run(body)
    planned = [exchanges(Compression("powersgd", rank=2), SHAPES[index:]) for index in range(2)]
    expected = sorted(("all_reduce", exchange.num_bytes) for bucket in planned for exchange in bucket)
    for once, sent, after, again, error in results:
        assert sorted(sent) == expected
        assert all(map(torch.equal, after, again)), "a resumed hook goes on with other bits"
        assert all(map(torch.equal, once, results[0][0])), "replicas differ"
        assert all(map(torch.equal, after, results[0][2])), "replicas differ"
        assert all(part.any() for part in error)
    if world_size > 1:
        assert not torch.equal(results[0][4][0], results[1][4][0]), "a memory is the rank's own"


@pytest.mark.on_ranks(3)
def test_nothing_is_lost_with_error_feedback():
    hook, bucket = PowerSGD(1), gradient_bucket()
    applied, wanted = torch.zeros_like(bucket.buffer), torch.zeros_like(bucket.buffer)
    for step in range(6):
        fill(bucket, step)
        hook.start(bucket, None).wait()
        applied += bucket.buffer
        wanted += mean_gradient(bucket, step)
    left_out = hook.state_dict()["buckets"][0]["error"]
    own = left_out.norm().item()
    dist.all_reduce(left_out)
    difference = (applied + left_out / dist.get_world_size() - wanted).abs().max().item()
    assert difference < 1e-12
    assert own > 1


@pytest.mark.on_ranks(2)
def test_full_rank_is_the_mean_and_starts_whole():
    found = {}
    for name, hook in {
        "full rank": PowerSGD(100, min_saving=1e-3),
        "not started": PowerSGD(1, start_step=3),
        "nothing worth it": PowerSGD(100),
    }.items():
        bucket, differences = gradient_bucket(), []
        for step in range(3):
            fill(bucket, step)
            hook.start(bucket, None).wait()
            differences.append((bucket.buffer - mean_gradient(bucket, step)).abs().max().item())
        found[name] = max(differences)
    result = found
    assert all(difference < 1e-12 for difference in result.values()), result


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


def test_a_weak_direction_moves_with_error_feedback_alone(ranks):
    for with_feedback, without in ranks(2).run(lambda: (share_that_moved(True), share_that_moved(False))):
        assert with_feedback > 0.8
        assert without < 0.2


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
    texts = []
    pending = [hook.start(bucket, None) for bucket in buckets]
    for one in pending:
        try:
            one.wait()
        except RuntimeError as error:
            texts.append(str(error))
    after = hook.state_dict()
    same = all(
        after["buckets"][index]["steps"] == before["buckets"][index]["steps"]
        and all(
            before["buckets"][index][name] is None
            or torch.equal(before["buckets"][index][name], after["buckets"][index][name])
            for name in ("error", "right")
        )
        for index in range(2)
    )
    rank = dist.get_rank()
    goes_on = all(torch.isfinite(buffer).all() for buffer in run_steps(hook, 2, first=3))
    assert f"rank {rank}: NaN or infinite gradients on rank 1, 2 in bucket 1 at step 2" in texts[0]
    assert "belongs to a step that failed" in texts[1]
    assert same
    assert goes_on


def test_ranks_that_differ_are_told_so(ranks):
    def seeds():
        PowerSGD(2, seed=dist.get_rank()).start(gradient_bucket(), None).wait()

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

    for wrong, text in (
        (seeds, r'rank 0 has .*"seed": 0.*; rank 1 has .*"seed": 1'),
        (steps, "steps so far"),
        (shapes, "build a different one"),
    ):
        with pytest.raises(RankError, match=text):
            ranks(2).run(wrong)


def test_a_step_that_was_given_up_is_dropped(ranks):
    def body():
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
        return torch.equal(*results)

    assert all(ranks(2).run(body))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 2.5}, "rank is 2.5"),
        ({"start_step": -1}, "start_step is -1"),
        ({"min_saving": 0.0}, "min_saving is 0.0"),
        ({"min_saving": float("nan")}, "min_saving is nan"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        PowerSGD(**options)


def test_a_state_of_another_rank_is_refused():
    with pytest.raises(ValueError, match="rank=4"):
        PowerSGD(2).load_state_dict(PowerSGD(4).state_dict())
