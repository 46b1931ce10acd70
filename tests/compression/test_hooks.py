"""Hooks on real ranks: bytes as predicted, the same bits everywhere, nothing lost, faults named on every rank."""

import pytest
import torch
import torch.distributed as dist

from distlab.blocks.gradient_hook import GradientBucket
from distlab.comm import recorded
from distlab.compression import Cast, Quantize, RandomK, Sign, TopK, make_hook
from distlab.plan.compression import METHODS, Compression, exchanges

SHAPES = [(40, 31), (40,), (3, 5, 70)]  # 2,330 elements: three blocks, the last one short
COMPRESSIONS = {
    "top_k": Compression("top_k", ratio=0.05),
    "random_k": Compression("random_k", ratio=0.05),
    **{f"quantize to {bits}": Compression("quantize", bits=bits) for bits in range(1, 9)},
    "quantize by chance": Compression("quantize", bits=4, stochastic=True, error_feedback=False),
    "sign": Compression("sign"),
    "powersgd": Compression("powersgd", rank=2),
}
EXACT_SUMS = [
    "top_k",
    "random_k",
    "quantize to 1",
    "quantize to 2",
    "quantize to 3",
    "quantize to 8",
    "sign",
    "powersgd",
]


def gradients(step, rank, dtype=torch.float64):
    source = torch.Generator().manual_seed(1000 * rank + step)
    return torch.cat([torch.randn(shape, generator=source, dtype=torch.float64).flatten() for shape in SHAPES]).to(
        dtype
    )


def bucket_of(vector, index=0):
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    views = [part.view(shape) for part, shape in zip(vector.split(sizes), SHAPES, strict=True)]
    return GradientBucket(index, vector, tuple(views))


def exchange(hook, vector, group=None, index=0):
    hook.start(bucket_of(vector, index), group).wait()
    return vector


def same_everywhere(vector):
    gathered = [torch.empty_like(vector) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, vector)
    return all(torch.equal(one, gathered[0]) for one in gathered)


def run_all(compressions, dtype, num_steps):
    """Per compression: calls and bytes of the last step, whether all ranks got the same bits, the means, the memory."""
    results = {}
    rank = dist.get_rank()
    for name, compression in compressions.items():
        hook = make_hook(compression, seed=3)
        means = [exchange(hook, gradients(step, rank, dtype)) for step in range(num_steps - 1)]
        with recorded() as sent:
            means.append(exchange(hook, gradients(num_steps - 1, rank, dtype)))
        calls = tuple((call.op, call.num_bytes) for call in sent.records.calls(rank))
        results[name] = (calls, all(map(same_everywhere, means)), means, hook.state_dict())
    return results


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bytes_are_predicted_and_ranks_get_the_same_bits(ranks, world_size):
    for dtype in (torch.float32, torch.float64) if world_size == 3 else (torch.float32,):
        results = ranks(world_size).run(run_all, COMPRESSIONS, dtype, 3)
        for name, compression in COMPRESSIONS.items():
            for result in results:
                calls, same, _, _ = result[name]
                assert calls == exchanges(compression, SHAPES, dtype.itemsize), name
                assert same, name


def test_half_precision_gradients_cost_half_the_values(ranks):
    chosen = {name: COMPRESSIONS[name] for name in ("top_k", "random_k", "quantize to 3", "sign")}
    for dtype in (torch.float16, torch.bfloat16):
        for result in ranks(2).run(run_all, chosen, dtype, 2):
            for name, compression in chosen.items():
                calls, same, means, _ = result[name]
                assert calls == exchanges(compression, SHAPES, 2), name
                assert same, name
                assert means[0].dtype == dtype


@pytest.mark.parametrize("world_size", [1, 3])
def test_nothing_is_lost_what_was_sent_and_the_memories_are_the_sum(ranks, world_size):
    num_steps = 5
    chosen = {name: COMPRESSIONS[name] for name in EXACT_SUMS}
    results = ranks(world_size).run(run_all, chosen, torch.float64, num_steps)
    total = sum(gradients(step, rank) for step in range(num_steps) for rank in range(world_size)) / world_size
    for name in EXACT_SUMS:
        sent = sum(results[0][name][2])
        states = [result[name][3] for result in results]
        memory = sum(memory_of(name, state) for state in states) / world_size
        assert (sent + memory - total).abs().max() < 1e-12, name
        assert (sent - total).abs().max() > 0.01, f"{name}: nothing was left out, so nothing was tested"


def memory_of(name, state):
    return state["buckets"][0]["error"] if name == "powersgd" else state["memories"][0]


def test_everything_kept_is_the_mean(ranks):
    def means():
        rank = dist.get_rank()
        hooks = [TopK(1.0), RandomK(1.0, 5), RandomK(1.0, error_feedback=False), TopK(1.0, error_feedback=False)]
        return [exchange(hook, gradients(0, rank)) for hook in hooks]

    for world_size in (1, 2, 4):
        expected = sum(gradients(0, rank) for rank in range(world_size)) / world_size
        for result in ranks(world_size).run(means):
            for mean in result:
                assert torch.allclose(mean, expected, rtol=0, atol=1e-15)


def test_random_k_and_rounding_by_chance_are_right_on_average(ranks):
    num_steps = 300

    def deviations():
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        expected = sum(gradients(0, r) for r in range(num_ranks)) / num_ranks
        found = []
        for hook in (RandomK(0.2, 1, error_feedback=False), Quantize(2, stochastic=True, error_feedback=False)):
            total, squares = torch.zeros_like(expected), torch.zeros_like(expected)
            for _ in range(num_steps):
                mean = exchange(hook, gradients(0, rank))
                total += mean
                squares += mean.square()
            spread = (squares / num_steps - (total / num_steps).square()).clamp(min=1e-30).sqrt()
            found.append(((total / num_steps - expected) / spread * num_steps**0.5).abs().max().item())
        return found

    assert all(deviation < 5 for deviation in ranks(2).run(deviations)[0])  # standard errors, largest of 2,330


def test_a_hook_goes_on_from_its_state_bit_for_bit(ranks):
    def both():
        rank = dist.get_rank()
        apart = {}
        for name in ("top_k", "random_k", "quantize to 3", "quantize by chance", "sign"):
            hook = make_hook(COMPRESSIONS[name], seed=1)
            for step in range(3):
                exchange(hook, gradients(step, rank, torch.float32))
            saved = hook.state_dict()
            going_on = [exchange(hook, gradients(step, rank, torch.float32)) for step in (3, 4)]
            resumed = make_hook(COMPRESSIONS[name], seed=1)
            resumed.load_state_dict(saved)
            again = [exchange(resumed, gradients(step, rank, torch.float32)) for step in (3, 4)]
            afresh = exchange(make_hook(COMPRESSIONS[name], seed=1), gradients(3, rank, torch.float32))
            same = all(map(torch.equal, going_on, again))
            apart[name] = same, not torch.equal(afresh, going_on[0])
        return apart

    for world_size in (1, 2):
        for result in ranks(world_size).run(both):
            assert all(value == (True, True) for value in result.values()), result


@pytest.mark.on_ranks(2)
def test_buckets_have_memories_of_their_own_and_travel_at_once():
    rank = dist.get_rank()
    apart, together = (TopK(0.1), TopK(0.1)), TopK(0.1)
    same = []
    for step in range(3):
        parts = gradients(step, rank), gradients(step + 50, rank)[:700].clone()
        expected = [one.clone() for one in parts]
        for hook, vector in zip(apart, expected, strict=True):
            hook.start(GradientBucket(0, vector, (vector,)), None).wait()
        buckets = [GradientBucket(index, vector, (vector,)) for index, vector in enumerate(parts)]
        for pending in [together.start(bucket, None) for bucket in buckets]:
            pending.wait()
        same += map(torch.equal, parts, expected)
    assert same == [True] * 6


@pytest.mark.on_ranks(3)
def test_what_is_not_finite_is_named_on_every_rank_and_spoils_nothing():
    rank = dist.get_rank()
    texts = {}
    hooks = {name: make_hook(COMPRESSIONS[name]) for name in COMPRESSIONS} | {"cast": Cast()}
    for name, hook in hooks.items():
        clean = {"cast": Cast()}.get(name) or make_hook(COMPRESSIONS[name])
        for one in (hook, clean):
            exchange(one, gradients(0, rank, torch.float32))
        bad = gradients(1, rank, torch.float32)
        if rank == 1:
            bad[1999] = (float("nan"), float("inf"), -float("inf"))[len(name) % 3]
        try:
            exchange(hook, bad)
        except RuntimeError as error:
            texts[name] = str(error)
        after = exchange(hook, gradients(2, rank, torch.float32))
        assert after.isfinite().all(), name
        if name not in ("random_k", "quantize by chance"):  # those have drawn once more
            assert torch.equal(after, exchange(clean, gradients(2, rank, torch.float32))), name
    assert len(texts) == len(COMPRESSIONS) + 1
    for name, text in texts.items():
        assert text.startswith(f"rank {rank}: "), name
        assert "on rank 1" in text, name
        assert "bucket 0" in text, name


@pytest.mark.on_ranks(2)
def test_a_step_that_was_given_up_leaves_nothing_for_the_next():
    """The first bucket raises, so nobody waits for the second; its answer must not arrive in the next step."""
    rank = dist.get_rank()
    same = []
    for build in (TopK, Quantize, Sign, RandomK, Cast):
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
    assert same == [True] * 12


def test_ranks_of_a_group_are_named_as_the_user_knows_them(ranks):
    def train():
        pairs = [dist.new_group(members) for members in ([0, 1], [2, 3])]
        group = pairs[dist.get_rank() // 2]
        texts = []
        for hook in (Sign(), RandomK(0.1)):
            vector = gradients(0, dist.get_rank())
            if dist.get_rank() == 3:
                vector[7] = float("nan")
            try:
                exchange(hook, vector, group)
            except RuntimeError as error:
                texts.append(str(error))
        return texts

    first, second, third, fourth = ranks(4).run(train)
    assert first == second == []
    assert all("NaN or inf on rank 3;" in text for text in third + fourth)
    assert len(third) == len(fourth) == 2


@pytest.mark.on_ranks(2)
def test_ranks_that_compress_differently_are_told_before_anything_hangs():
    rank = dist.get_rank()
    texts = []
    for hook in (TopK(0.1 if rank else 0.2), RandomK(0.1, seed=rank), Quantize(4 + rank), Sign(bool(rank))):
        try:
            exchange(hook, gradients(0, rank))
        except ValueError as error:
            texts.append(str(error))
    ahead = RandomK(0.1)
    ahead.load_state_dict({"compressor": ahead.description, "num_steps": {0: rank}, "memories": {}})
    try:
        exchange(ahead, gradients(0, rank))
    except ValueError as error:
        texts.append(str(error))
    assert len(texts) == 5
    assert all("ranks disagree on compressor" in text for text in texts)
    assert "top_k of ratio 0.1" in texts[0]


@pytest.mark.on_ranks(2)
def test_a_state_that_does_not_fit_is_refused():
    hook = TopK(0.1)
    exchange(hook, gradients(0, dist.get_rank()))
    texts = []
    try:
        TopK(0.2).load_state_dict(hook.state_dict())
    except ValueError as error:
        texts.append(str(error))
    try:
        vector = torch.ones(5)
        hook.start(GradientBucket(0, vector, (vector,)), None)
    except ValueError as error:
        texts.append(str(error))
    assert "the state is of a compressor `top_k of ratio 0.1`, this one is `top_k of ratio 0.2`" in texts[0]
    assert "bucket 0 has 5 elements and its memory 2330" in texts[1]


@pytest.mark.on_ranks(2)
def test_a_cast_divides_before_it_shortens_and_says_when_the_mean_is_too_large():
    vector = exchange(Cast(), torch.full_like(gradients(0, 0, torch.float32), 60_000.0))
    brain = exchange(Cast(torch.bfloat16), torch.full_like(vector, 2.0**100))
    with recorded() as sent:
        try:
            exchange(Cast(), torch.full_like(vector, 1e5))
        except RuntimeError as error:
            text = str(error)
    brain, num_bytes = brain[0].item(), sent.records.payload_bytes(dist.get_rank(), "all_reduce")
    assert vector[0].item() == 60_000.0
    assert brain == 2.0**100
    assert "are too large: their mean overflows" in text
    assert num_bytes == 2 * 2330


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: TopK(0.0), "ratio is 0.0"),
        (lambda: TopK(4), "ratio is 4; pass the share of elements to send"),
        (lambda: RandomK(-0.1), "ratio is -0.1"),
        (lambda: Quantize(9), "bits is 9"),
        (lambda: Quantize(0.5), "bits is 0.5"),
        (lambda: Cast(torch.float32), "dtype is torch.float32; choose one of torch.float16"),
    ],
)
def test_options_that_cannot_be_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_every_method_has_a_hook():
    assert [type(make_hook(Compression(method))).__name__ for method in METHODS] == [
        "TopK",
        "RandomK",
        "Quantize",
        "Sign",
        "PowerSGD",
    ]


@pytest.mark.on_ranks(2)
def test_complex_gradients_are_refused_in_words():
    told = {}
    for method in METHODS:
        gradients = (torch.ones(8, 3, dtype=torch.complex64),)
        bucket = GradientBucket(7, gradients[0].view(-1), gradients)
        try:
            make_hook(Compression(method)).start(bucket, None)
        except ValueError as error:
            told[method] = str(error)
    rank = dist.get_rank()
    words = f"rank {rank}: bucket 7 holds gradients of torch.complex64, and compressors take real numbers"
    assert all(words in told.get(method, "") for method in METHODS), told
