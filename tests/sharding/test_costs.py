"""Calls of sharding, its state and the plain ways: what they send, hold and repeat is what their docstrings say."""

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, heard
from optimizer_net import Net, adam
from torch import nn

from distlab import sharding
from distlab.collectives import DirectGather, DirectScatter
from distlab.comm import recorded
from distlab.rng import generator
from distlab.sharding.plain import cut_shard, layout_of, plain_step

L = 6  # elements of a shard


def sent_elements(function):
    """Return what a function returns, and the elements of float32 that this rank sent, as a ring would."""
    with recorded() as seen:
        value = function()
    return value, (seen.records.ring_equivalent_bytes(dist.get_rank()) + seen.records.sent_bytes(dist.get_rank())) // 4


def gather_and_scatter():
    rank, n = dist.get_rank(), dist.get_world_size()
    shard = torch.randn(L, generator=generator(0, rank, "shard"))
    gradient = torch.randn(n * L, generator=generator(0, rank, "gradient"))
    whole, sums = {}, {}
    for call, other in (
        (sharding.gather_into, torch.empty(n * L + 1)),
        (sharding.scatter_sum, torch.empty(n * L).double()),
    ):
        with pytest.raises(ValueError, match=f"rank {rank}: .*pad with FlatLayout"):
            call(other, shard)
    for name in ("call", "direct"):
        full = torch.empty(n * L)
        if name == "call":
            full[rank * L : (rank + 1) * L] = shard
            own = full[rank * L : (rank + 1) * L]
            _, sent = sent_elements(lambda full=full, own=own: sharding.gather_into(full, own))
        else:
            _, sent = sent_elements(lambda full=full: DirectGather(full, shard).finish())
        whole[name] = full, sent
        results = []
        for _ in range(2):
            if name == "call":
                own = torch.empty(L)
                _, sent = sent_elements(lambda own=own: sharding.scatter_sum(gradient.clone(), own))
            else:
                scatter = DirectScatter(gradient)
                own = scatter.finish()
                is_shared = dist.get_backend() == "shared"  # one call, and the sum alone arrives
                assert [part.numel() for part in scatter.arriving] == [L] * (1 if is_shared else n - 1)
                made = calls_of(lambda: DirectScatter(gradient).finish())
                assert made == ([("reduce_scatter", 4 * n * L)] if is_shared else [("send", 4 * L)] * (n - 1))
                _, sent = sent_elements(lambda: DirectScatter(gradient).finish())
            results.append(own)
        sums[name] = results, sent
    return whole, sums


@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gathers_are_exact_and_sums_repeat_at_the_bytes_of_a_ring(ranks, world_size, backend, monkeypatch):
    monkeypatch.setenv("DISTLAB_BACKEND", backend)
    n = world_size
    shards = torch.cat([torch.randn(L, generator=generator(0, rank, "shard")) for rank in range(n)])
    total = sum(torch.randn(n * L, generator=generator(0, rank, "gradient")) for rank in range(n))
    for rank, (whole, sums) in enumerate(ranks(n).run(gather_and_scatter)):
        for full, sent in whole.values():
            assert torch.equal(full, shards)
            assert sent == (n - 1) * L
        for (first, again), sent in sums.values():
            assert torch.equal(first, again)
            assert torch.allclose(first, total.chunk(n)[rank], atol=1e-6)
            assert sent == (n - 1) * L


def test_a_plain_step_sends_three_times_the_parameters(ranks):
    def measure():
        modules = [nn.Linear(5, 7), nn.Linear(7, 3)]
        shards = [cut_shard(module) for module in modules]
        _, sent = sent_elements(lambda: plain_step(modules, shards, torch.randn(2, 5), lambda x: x.square().mean()))
        return sent, sum(layout_of(module, 3).padded_size for module in modules)

    for sent, padded in ranks(3).run(measure):
        assert sent == 3 * 2 * padded // 3


def test_zero_on_one_screen_broadcasts_each_parameter_and_keeps_a_share_of_the_state(ranks):
    def measure():
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
        optimizer = sharding.PlainSharded(model.parameters(), adam)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return calls_of(optimizer.step), sum(one["exp_avg"].numel() for one in optimizer.optimizer.state.values())

    for calls, moments in ranks(3).run(measure):
        assert calls == [("broadcast", 8 * 8 * 4)] * 6
        assert moments == 6 * 64 // 3


def states():
    """The calls of each function of a state, the bytes of a unit's shard, and whether nothing but checks was sent."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    module.register_buffer("seen", torch.arange(3.0))
    model = sharding.FullyShard(module, units=["0", "1"])
    model(torch.ones(2, 8)).sum().backward()
    model.synchronize()
    found = {"shards": [4 * unit.layout.shard_size for unit in model.units]}
    found["clip"] = calls_of(lambda: model.clip_gradients_(1.0))
    state, found["full"] = heard(lambda: sharding.full_state_dict(model))
    found["load"] = calls_of(lambda: sharding.load_full_state_dict(model, state))
    assert all(torch.equal(state[name], value) for name, value in sharding.full_state_dict(model).items())
    return found


def test_states_send_what_they_say(ranks):
    for found in ranks(2).run(states):
        assert found["clip"] == [("all_reduce", 8)]
        checks = found["load"]  # what the ranks call and whether any of them refuses
        assert {op for op, _ in checks} == {"all_gather"}
        assert sum(num_bytes for _, num_bytes in checks) < 100
        parts = found["full"][-3 * len(found["shards"]) :]  # for each unit: names and types, how long they are, bytes
        assert parts[::3] == [("all_gather", 8)] * len(found["shards"])
        for (op, num_bytes), shard in zip(parts[2::3], found["shards"], strict=True):
            assert op == "all_gather"
            assert 0 <= num_bytes - shard < 2 * 16, "16 bytes apart"
        assert len(found["full"]) == len(found["shards"]) * 3 + 1  # the call itself is compared


def test_sharded_optimizers_begin_with_the_broadcasts_they_say(ranks):
    def measure():
        model = Net()
        _, start = heard(lambda: sharding.ShardedOptimizer(model, adam, bucket_bytes=1_000))
        return [size for op, size in start if op == "broadcast"], [one.nbytes for one in model.state_dict().values()]

    for sent, sizes in ranks(2).run(measure):
        assert sorted(sent) == sorted(sizes), "frozen parameters and buffers too"
