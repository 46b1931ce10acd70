"""Tensor ranks times data ranks, sharded: norms, states and shards of one process."""

import copy
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
import zoo_gpt
import zoo_images
from equal import Fully, Zero, square
from refused import message
from zoo_kinds import KINDS
from zoo_techniques import adamw

from distlab.comm import recorded
from distlab.large_batch import LAMB, Muon
from distlab.sharding import ShardedOptimizer, WholeTensorOptimizer, full_state_dict, load_full_state_dict
from distlab.tensor_parallel import parallelize_module

STOP, STEPS, MAX_NORM = 2, 4, 0.1
MODELS = {  # of one layer: the zoo trains three
    "nanoGPT": partial(zoo_gpt.TiedGPT, depth=1),
    "ViT, fused qkv": partial(zoo_images.ViT, depth=1),
}


def kind_of(name):
    return KINDS[name]._replace(make=MODELS[name])


def build(kind, rank=0):
    """Return the model with weights of a size at which rounding does not grow from update to update."""
    model = kind.build(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3)
    return model


@cache
def alone(name, num_steps=STEPS):
    """Train in one process; return the norms, the model's state and the optimizer's, by names."""
    kind = kind_of(name)
    model = build(kind)
    optimizer, norms = adamw(model.parameters()), []
    for step in range(num_steps):
        optimizer.zero_grad()
        kind.loss(model, *kind.batch(step)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return norms, model.state_dict(), {key: optimizer.state[one] for key, one in model.named_parameters()}


def made(way, name, tensor, data):
    """Return FullyShard or ShardedOptimizer over a model that is cut, or is not where there is one tensor rank."""
    kind = kind_of(name)
    module = build(kind, dist.get_rank())
    if tensor is not None:
        parallelize_module(module, kind.plan, tensor, example=kind.batch(9)[:1])
    options = {} if way is Fully else {"stage": 2, "bucket_bytes": 2000}
    return way(module, adamw, data, tensor, **options), kind


def backward(one, kind, step, number, num):
    one.gradients.zero_grad()
    kind.loss(one.model, *kind.batch(step, number, num)).backward()
    one.gradients.synchronize()


def train(one, kind, steps, number, num):
    norms = []
    for step in steps:
        backward(one, kind, step, number, num)
        norms.append(float(one.gradients.clip_gradients_(MAX_NORM)))
        one.optimizer.step()
    return norms


def on_a_grid(way, name, tasks):
    """Train on 2 x 2 ranks, or on 2 data ranks without cut layers; return norms and full states, and shards.

    A task is its steps, and where it begins: the shards of a model, or None.
    """
    is_grid = dist.get_world_size() == 4
    (tensor, data), number = square() if is_grid else (None, None), dist.get_rank() // (2 if is_grid else 1)
    found = []
    for steps, shards in tasks:
        one, kind = made(way, name, tensor, data)
        if shards is not None:
            one.load_shards(*shards)
        norms = train(one, kind, steps, number, 2)
        found.append(((norms, *one.full()), copy.deepcopy(one.part.shard_state())))
    return found


def check(name, got, num_steps=STEPS):
    norms, state, kept = alone(name, num_steps)
    assert max(norms) > MAX_NORM, "something was clipped"
    assert got[0] == pytest.approx(norms[-len(got[0]) :], rel=1e-9)
    for key, value in state.items():
        torch.testing.assert_close(got[1][key], value, rtol=0, atol=1e-9, msg=key)
    for key, one in kept.items():
        torch.testing.assert_close(dict(got[2]["state"][key]), one, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("way", "name"), [(Fully, "ViT, fused qkv"), (Zero, "nanoGPT")])
def test_norms_states_and_shards_are_those_of_one_process(way, name, ranks):
    first, other = (ranks(n).run(on_a_grid, way, name, [(range(STOP), None)]) for n in (4, 2))
    for ((got, _),) in (*first, *other):
        check(name, got, STOP)
    cut, uncut = ((each[0][0][0][1], [shards for ((_, shards),) in each]) for each in (first, other))
    for num_ranks, begins in ((4, [cut, uncut]), (2, [cut])):  # into cut layers; 2: into whole ones
        for each in ranks(num_ranks).run(on_a_grid, way, name, [(range(STOP, STEPS), one) for one in begins]):
            for got, _ in each:
                check(name, got)


def faults_and_costs():
    """Return what each fault says, and the bytes that a norm sends."""
    (tensor, data), number = square(), dist.get_rank() // 2
    one, kind = made(Fully, "ViT, fused qkv", tensor, data)
    states = [None] * 4
    dist.all_gather_object(states, one.part.shard_state())
    one.part.load_shards(states)
    train(one, kind, [0], number, 2)
    backward(one, kind, 1, number, 2)
    with recorded() as clip:
        one.model.clip_gradients_(MAX_NORM)
    sent = clip.records.ring_equivalent_bytes(dist.get_rank()) + clip.records.sent_bytes(dist.get_rank())
    if dist.get_rank() == 3:
        for unit in one.model.units:
            unit.shard.grad.to_local()[:] = float("nan")
    state, whole = full_state_dict(one.model), build(kind)
    parallelize_module(whole, kind.plan, tensor, example=kind.batch(9)[:1])
    wrong = {**state, "patch_embed.weight": state["patch_embed.weight"][1:]}
    return sent, {
        "(rank 3)": message(lambda: one.model.clip_gradients_(1.0)),
        "LAMB looks at whole tensors, and tensor parallelism has cut ": message(
            WholeTensorOptimizer, one.model, partial(LAMB, lr=0.1)
        ),
        "Muon looks at whole tensors, and tensor parallelism has cut ": message(
            ShardedOptimizer, whole, lambda given: Muon([one for one in given if one.ndim == 2]), data, split="tensors"
        ),
        "in the saved state": message(lambda: load_full_state_dict(one.model, wrong)),
    }


def test_a_norm_sends_eight_bytes_on_each_axis_and_what_does_not_fit_is_refused_on_every_rank(ranks):
    for sent, found in ranks(4).run(faults_and_costs):
        assert sent == 2 * 8
        assert all(words in text for words, text in found.items()), found
