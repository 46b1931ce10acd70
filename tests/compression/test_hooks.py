"""Hooks on real ranks: bytes as predicted, the same bits everywhere, nothing lost, faults named on every rank."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, same_everywhere
from refused import message

from distlab.blocks.gradient_hook import GradientBucket
from distlab.compression import Cast, PowerSGD, Quantize, RandomK, Sign, TopK, make_hook
from distlab.plan.compression import METHODS, Compression, exchanges

SHAPES = [(40, 31), (40,), (3, 5, 70)]  # 2,330 elements: three blocks, the last one short
COMPRESSIONS = {
    "top_k": Compression("top_k", ratio=0.05),
    "random_k": Compression("random_k", ratio=0.05),
    **{f"quantize to {bits}": Compression("quantize", bits=bits) for bits in (1, 3, 8)},
    "quantize by chance": Compression("quantize", bits=4, stochastic=True, error_feedback=False),
    "sign": Compression("sign"),
    "powersgd": Compression("powersgd", rank=2),
}
BY_CHANCE = ("random_k", "quantize by chance")  # they draw in each step, also in one that fails


def gradients(step, rank, dtype=torch.float64):
    source = torch.Generator().manual_seed(1000 * rank + step)
    return torch.cat([torch.randn(shape, generator=source).double().flatten() for shape in SHAPES]).to(dtype)


def bucket_of(vector, index=0):
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    views = [part.view(shape) for part, shape in zip(vector.split(sizes), SHAPES, strict=True)]
    return GradientBucket(index, vector, tuple(views))


def exchange(hook, vector, group=None, index=0):
    hook.start(bucket_of(vector, index), group).wait()
    return vector


def check_bytes(names, dtype):
    """Three steps: ranks get the same bits, and the last one sends what the plan says."""
    rank = dist.get_rank()
    for name in names:
        hook = make_hook(COMPRESSIONS[name], seed=3)
        for step in range(3):
            vector = gradients(step, rank, dtype)
            calls = calls_of(lambda hook=hook, vector=vector: exchange(hook, vector))
            assert vector.dtype == dtype
            assert same_everywhere(vector), name
        assert tuple(calls) == tuple(exchanges(COMPRESSIONS[name], SHAPES, dtype.itemsize)), name


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_bytes_are_predicted_and_ranks_get_the_same_bits(world_size):
    check_bytes(COMPRESSIONS, torch.float32)
    if world_size == 3:
        check_bytes(COMPRESSIONS, torch.float64)
        for dtype in (torch.float16, torch.bfloat16):  # half the bytes of values
            check_bytes(["top_k", "random_k", "quantize to 3", "sign"], dtype)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.on_ranks
def test_nothing_is_lost_what_was_sent_and_the_memories_are_the_sum(world_size):
    steps, rank = range(5), dist.get_rank()
    total = sum(gradients(step, other) for step in steps for other in range(world_size)) / world_size
    for name in ("top_k", "random_k", "quantize to 1", "quantize to 3", "quantize to 8", "sign", "powersgd"):
        hook = make_hook(COMPRESSIONS[name], seed=3)
        sent = sum(exchange(hook, gradients(step, rank)) for step in steps)
        state = hook.state_dict()
        memory = state["buckets"][0]["error"] if name == "powersgd" else state["memories"][0]
        dist.all_reduce(memory)
        assert (sent + memory / world_size - total).abs().max() < 1e-12, name
        assert (sent - total).abs().max() > 0.01, f"{name}: nothing was left out, so nothing was tested"


@pytest.mark.on_ranks(2)
def test_a_hook_goes_on_from_its_state_bit_for_bit():
    rank = dist.get_rank()
    for name in ("top_k", "random_k", "quantize to 3", "quantize by chance", "sign", "powersgd"):
        hook, resumed, afresh = (make_hook(COMPRESSIONS[name], seed=1) for _ in range(3))
        for step in range(3):
            exchange(hook, gradients(step, rank, torch.float32))
        resumed.load_state_dict(hook.state_dict())
        one, other = ([exchange(h, gradients(step, rank, torch.float32)) for step in (3, 4)] for h in (hook, resumed))
        assert all(map(torch.equal, one, other)), name
        assert not torch.equal(exchange(afresh, gradients(3, rank, torch.float32)), one[0]), name


@pytest.mark.on_ranks(3)
def test_what_is_not_finite_is_named_on_every_rank_and_spoils_nothing():
    rank = dist.get_rank()
    for name, build in {**{one: partial(make_hook, made) for one, made in COMPRESSIONS.items()}, "cast": Cast}.items():
        hook, clean = build(), build()
        for one in (hook, clean):
            exchange(one, gradients(0, rank, torch.float32))
        bad = gradients(1, rank, torch.float32)
        if rank == 1:
            bad[1999] = (float("nan"), float("inf"), -float("inf"))[len(name) % 3]
        text = message(lambda hook=hook, bad=bad: exchange(hook, bad))
        assert f"Error: rank {rank}: " in text, name
        assert "on rank 1" in text, name
        assert "bucket 0" in text, name
        after = exchange(hook, gradients(2, rank, torch.float32))
        assert after.isfinite().all(), name
        assert name in BY_CHANCE or torch.equal(after, exchange(clean, gradients(2, rank, torch.float32))), name


AGREEMENT, SIZE = ("all_gather", 40), 2330


def calls_of_steps(hook, num_steps, dtype=torch.float32):
    vectors = [gradients(step, dist.get_rank(), dtype) for step in range(num_steps)]
    return [calls_of(lambda vector=vector: exchange(hook, vector)) for vector in vectors]


@pytest.mark.on_ranks(2)
def test_a_memory_is_one_element_a_gradient_and_ranks_agree_once():
    for dtype in (torch.float16, torch.float32, torch.float64):
        hook = TopK(0.1)
        first, second = calls_of_steps(hook, 2, dtype)
        memory = hook.state_dict()["memories"][0]
        assert [AGREEMENT, *second] == first
        assert AGREEMENT not in second
        assert memory.numel() == SIZE
        assert memory.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    hook, whole = PowerSGD(2, start_step=2), ("all_reduce", 4 * SIZE)
    first, second, third = calls_of_steps(hook, 3)
    assert [first, second] == [[AGREEMENT, whole], [whole]], "it begins whole"
    assert tuple(third) == tuple(exchanges(COMPRESSIONS["powersgd"], SHAPES, 4))
    assert hook.state_dict()["buckets"][0]["error"].numel() == SIZE


@pytest.mark.on_ranks(2)
def test_a_step_that_was_given_up_leaves_nothing_for_the_next():
    """The first bucket raises, so nobody waits for the second; its answer must not arrive in the next step."""
    rank, same = dist.get_rank(), []
    for build in (TopK, Quantize, Sign, RandomK, Cast, PowerSGD):
        last = []
        for steps in ((0, 1, 2), (0, 2)):
            hook = build()
            for step in steps:
                vectors = [gradients(step + 10 * index, rank, torch.float32) for index in range(3)]
                if step == 1:
                    vectors[0][rank] = float("nan")
                under_way = [hook.start(bucket_of(vector, index), None) for index, vector in enumerate(vectors)]
                try:
                    for pending in under_way:
                        pending.wait()
                except RuntimeError:
                    assert step == 1
            last.append(vectors)
        if build is not RandomK:  # which has drawn once more
            same += map(torch.equal, *last)
    assert same == [True] * 15


@pytest.mark.on_ranks(3)
def test_a_cast_divides_shortens_for_each_addition_and_says_when_the_mean_is_too_large():
    parts = [gradients(0, rank, torch.float32) for rank in range(3)]
    mean, sizes = sum(parts) / 3, sum(part.abs() for part in parts) / 3
    for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8)):
        error = (exchange(Cast(dtype), parts[dist.get_rank()].clone()) - mean).abs()
        assert (error <= 3 * 2.0**-bits * sizes + 1e-6).all()  # three roundings of parts, and of their sums
        assert error.max() > 2.0 ** -(bits + 2) * sizes.mean(), "as exact as float32: nothing was shortened"
    vector = exchange(Cast(), torch.full_like(gradients(0, 0, torch.float32), 60_000.0))
    brain = exchange(Cast(torch.bfloat16), torch.full_like(vector, 2.0**100))
    texts = []
    calls = calls_of(lambda: texts.append(message(lambda: exchange(Cast(), torch.full_like(vector, 1e5)))))
    assert vector[0].item() == pytest.approx(60_000.0, rel=2**-10)
    assert brain[0].item() == pytest.approx(2.0**100, rel=2**-7)
    assert "are too large: their mean overflows" in texts[0]
    assert sum(num_bytes for op, num_bytes in calls if op == "all_reduce") == 2 * 2330


def differing(build):
    """Exchange by a hook that is made of the rank."""
    return lambda: exchange(build(dist.get_rank()), gradients(0, dist.get_rank()))


def ahead(rank):
    hook = RandomK(0.1)
    hook.load_state_dict({"compressor": hook.description, "num_steps": {0: rank}, "memories": {}})
    return hook


def shorter_bucket():
    hook, vector = TopK(0.1), torch.ones(5)
    exchange(hook, gradients(0, dist.get_rank()))
    hook.start(GradientBucket(0, vector, (vector,)), None)


def complex_for(method):
    gradients = (torch.ones(8, 3, dtype=torch.complex64),)
    make_hook(Compression(method)).start(GradientBucket(7, gradients[0].view(-1), gradients), None)


DISAGREE = "ranks disagree on compressor"
BAD = [
    (differing(lambda rank: TopK(0.1 if rank else 0.2)), f"{DISAGREE}(.|\n)*top_k of ratio 0.1"),
    (differing(lambda rank: RandomK(0.1, seed=rank)), DISAGREE),
    (differing(lambda rank: Sign(bool(rank))), DISAGREE),
    (differing(ahead), DISAGREE),
    (lambda: TopK(0.2).load_state_dict(TopK(0.1).state_dict()), "is of a compressor `top_k of ratio 0.1`, this one is"),
    (shorter_bucket, "bucket 0 has 5 elements and its memory 2330"),
    *((partial(complex_for, method), "bucket 7 holds gradients of torch.complex64, and") for method in METHODS),
    (lambda: TopK(0.0), "ratio is 0.0"),
    (lambda: TopK(4), "ratio is 4; pass the share of elements to send"),
    (lambda: Quantize(9), "bits is 9"),
    (lambda: Cast(torch.float32), "dtype is torch.float32; choose one of torch.float16"),
]


@pytest.mark.on_ranks(2)
def test_what_cannot_be_is_refused_on_every_rank():
    for action, words in BAD:
        assert re.search(words, message(action))
