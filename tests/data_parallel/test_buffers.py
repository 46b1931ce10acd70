"""SyncBatchNorm equals one process, also with uneven and empty parts; buffers are broadcast."""

import copy

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, same_everywhere
from hypothesis import given, settings, strategies as st
from refused import message
from torch import nn

from distlab.data_parallel import SyncBatchNorm, broadcast_buffers, convert_sync_batchnorm
from distlab.data_parallel.buffers import local_statistics, merge

CHANNELS = 3
PARTS = {1: [7], 2: [5, 2], 3: [4, 0, 3], 4: [3, 1, 0, 3]}  # samples of each rank: uneven, and none
TORCH = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CASES = [  # the shape behind batch and channels, and options
    ((), {}),
    ((4,), {"momentum": None}),
    ((2, 3), {"momentum": 0.3, "eps": 1e-3}),
    ((2, 1, 2), {"affine": False}),
    ((2, 2), {"track_running_stats": False}),
]


def make_layer(case):
    layer = TORCH[2 + len(case[0])](CHANNELS, **case[1]).double()
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, -1.0, 2.0]))
            layer.bias.copy_(torch.tensor([1.0, 0.0, -3.0]))
    return layer


def sample(case, step, purpose):
    shape = (sum(PARTS[1]), CHANNELS, *case[0])
    seed = torch.Generator().manual_seed(10 * step + purpose)
    return torch.randn(shape, generator=seed, dtype=torch.float64) * 2 + 5


def three_steps(case, layer, part):
    """Three forward and backward passes of a part of the batch, then one in eval."""
    found = {}
    for step in range(3):
        x = sample(case, step, 0)[part].requires_grad_()
        out = layer(x)
        out.backward(sample(case, step, 1)[part])
        found |= {f"output {step}": out.detach(), f"input gradient {step}": x.grad}
    found |= {f"{name} gradient": parameter.grad for name, parameter in layer.named_parameters()}
    found |= {name: buffer.clone() for name, buffer in layer.named_buffers()}
    if layer.track_running_stats:
        found["eval"] = layer.eval()(sample(case, 9, 0)[part]).detach()
    return found


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.on_ranks
def test_forward_backward_and_running_statistics_equal_one_process(world_size):
    sizes, rank = PARTS[world_size], dist.get_rank()
    part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for case in CASES:
        whole = three_steps(case, make_layer(case), slice(None))
        for name, found in three_steps(case, convert_sync_batchnorm(make_layer(case)), part).items():
            expected = whole[name]
            if name.startswith(("output", "input", "eval")):
                expected = expected[part]
            elif name.endswith("gradient"):  # of a parameter: each rank has that of its own samples
                dist.all_reduce(found)
            else:
                assert same_everywhere(found), f"{case}: {name} differs by rank"
            assert torch.allclose(found, expected, rtol=0, atol=1e-10), f"{case}: {name}"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 1), st.integers(0, 99))
def test_merged_statistics_are_those_of_all_values_together(counts, seed):
    """Also where the mean is large, of which sums of squares would lose all digits of the variance."""
    generator = torch.Generator().manual_seed(seed)
    for shift, bound in ((0, 1e-13), (1e7, 1e-6)):
        parts = [torch.randn(count, 2, 3, generator=generator, dtype=torch.float64) + shift for count in counts]
        merged = merge([local_statistics(part) for part in parts])
        variance, mean = torch.var_mean(torch.cat(parts) - shift, (0, 2), correction=0)
        assert merged.num_values == 3 * sum(counts)
        assert torch.allclose(merged.mean - shift, mean, rtol=0, atol=bound)
        assert torch.allclose(merged.squares / merged.num_values, variance, rtol=0, atol=bound)


@pytest.mark.on_ranks(2)
def test_calls_and_bytes_are_as_documented_and_eval_sends_nothing():
    gather, reduce = ("all_gather", 4 * (2 * 5 + 1)), ("all_reduce", 4 * 2 * 5)
    layer, own = convert_sync_batchnorm(nn.BatchNorm2d(5)), SyncBatchNorm(5)
    x = torch.randn(3, 5, 2, 2, requires_grad=True)
    assert calls_of(lambda: layer(x)) == [gather]
    assert calls_of(lambda: layer(x).sum().backward()) == [gather, reduce]
    assert calls_of(lambda: layer(x.detach()).sum().backward()) == [gather]
    assert calls_of(lambda: layer.eval()(x).sum().backward()) == []
    assert calls_of(lambda: SyncBatchNorm(5, track_running_stats=False).eval()(x)) == []
    assert [len(calls_of(lambda: own(x))) for _ in range(2)] == [2, 1], "one that nobody converted agrees once"


@pytest.mark.on_ranks(2)
def test_buffers_of_all_types_are_broadcast_and_parameters_left_alone():
    model, rank = nn.Linear(2, 2), dist.get_rank()
    nn.init.constant_(model.weight, rank)
    model.register_buffer("mask", torch.tensor([True, False]) ^ bool(rank))
    model.register_buffer("mean", torch.full((3,), float(rank)))
    model.register_buffer("variance", torch.full((2,), float(rank)), persistent=False)
    model.register_buffer("count", torch.tensor(rank))
    calls = calls_of(lambda: broadcast_buffers(model))
    assert [b.tolist() for b in model.buffers()] == [[True, False], [0.0] * 3, [0.0] * 2, 0]
    assert model.weight[0, 0].item() == rank
    assert sorted(calls) == [("broadcast", 2), ("broadcast", 8), ("broadcast", 4 * 5)]  # bool, int64, float32
    assert calls_of(lambda: broadcast_buffers(nn.Linear(2, 2))) == []


@pytest.mark.on_ranks(2)
def test_conversion_keeps_objects_names_sharing_and_mode():
    shared = nn.BatchNorm1d(4, momentum=None)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.Linear(4, 4), shared, shared)})
    model["c"] = nn.BatchNorm3d(2, affine=False, eps=0.1).eval()
    model["d"] = nn.SyncBatchNorm(3, track_running_stats=False)
    model["d"].weight.requires_grad_(False)
    before, torchs = dict(model.named_parameters()), copy.deepcopy(model)
    assert convert_sync_batchnorm(model) is model
    a, b, c, d = model.values()
    assert list(before.items()) == list(model.named_parameters())
    assert a is b[1] is b[2]
    assert all(type(layer) is SyncBatchNorm for layer in (a, c, d))
    assert (a.training, c.training, c.eps, a.momentum, d.weight.requires_grad) == (True, False, 0.1, None, False)
    assert torchs.load_state_dict(model.state_dict()).missing_keys == []
    assert type(convert_sync_batchnorm(nn.Linear(1, 1))) is nn.Linear


def twice_differentiated():
    x = torch.randn(4, 2, requires_grad=True)
    first = torch.autograd.grad(SyncBatchNorm(2)(x).square().sum(), x, create_graph=True)
    first[0].sum().backward()


class WithRelu(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


FEW = "ValueError: rank {rank}: SyncBatchNorm got"
BAD = [
    (lambda: convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d())), "0: a lazy layer has no channels"),
    (lambda: convert_sync_batchnorm(nn.Sequential(WithRelu(2))), "0 (WithRelu) has a forward of its own"),
    (lambda: convert_sync_batchnorm(nn.BatchNorm1d(2, eps=0.1 + dist.get_rank())), "ranks disagree on batch norms"),
    (lambda: SyncBatchNorm(2, momentum=0.1 * dist.get_rank())(torch.randn(4, 2)), "ranks disagree on SyncBatchNorm"),
    (lambda: SyncBatchNorm(2)(torch.randn(int(dist.get_rank() == 1), 2)), f"{FEW} 1 values per channel from all ranks"),
    (lambda: SyncBatchNorm(2)(torch.randn(0, 2, 5)), f"{FEW} 0 values per channel"),
    (twice_differentiated, "RuntimeError: trying to differentiate twice"),
    (lambda: SyncBatchNorm(0), "ValueError: SyncBatchNorm: num_features 0 must be at least 1"),
    (lambda: SyncBatchNorm(2, eps=0), "ValueError: SyncBatchNorm: num_features 2 must be at least 1, eps 0 above 0"),
    (lambda: SyncBatchNorm(2, momentum=1.5), "momentum 1.5 in [0, 1] or None"),
    (lambda: SyncBatchNorm(2)(torch.randn(3, 4)), "SyncBatchNorm of 2 channels expects [B, 2, ...]; got [3, 4]"),
    (lambda: SyncBatchNorm(2)(torch.randn(2)), "got [2]: pass samples first"),
]


@pytest.mark.on_ranks(2)
def test_bad_input_is_an_error_on_every_rank():
    for action, words in BAD:
        assert words.format(rank=dist.get_rank()) in message(action)
