"""Tensor ranks times data ranks, sharded: norms, states and shards of one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from equal import Fully, Zero
from refused import message
from test_by_plan import MAX_NORM, MODELS, build
from zoo_kinds import KINDS
from zoo_techniques import UPDATES, adamw, axes

from distlab.comm import recorded
from distlab.sharding import full_state_dict, load_full_state_dict, load_sharded_state_dict, sharded_state_dict
from distlab.tensor_parallel import parallelize_module

STOP = 3
NAMES = ("nanoGPT", "ViT, fused qkv")


def kind_of(name):
    return KINDS[name]._replace(make=MODELS[name])


def alone(name, steps=range(UPDATES), start=None):
    """Train in one process; return the norms, the model's state and the optimizer's."""
    kind = kind_of(name)
    model = build(kind)
    optimizer, norms = adamw(model.parameters()), []
    if start is not None:
        model.load_state_dict(start[1])
        optimizer.load_state_dict(copy.deepcopy(start[2]))
    for step in steps:
        optimizer.zero_grad()
        kind.loss(model, *kind.batch(step)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return norms, {key: value.clone() for key, value in model.state_dict().items()}, optimizer.state_dict()


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


def on_a_grid(way, tasks):
    """Train on 2 x 2 ranks, or on 2 data ranks without cut layers; return norms and full states, and shards.

    A task is a model's name, its steps, and where it begins: a full state, or a model's state and shards, or None.
    """
    tensor, data, number = axes() if dist.get_world_size() == 4 else (None, None, dist.get_rank())
    found = []
    for name, steps, start, shards in tasks:
        one, kind = made(way, name, tensor, data)
        if start is not None:
            one.load(*start[1:])
        if shards is not None:
            one.load_shards(*shards)
        norms = train(one, kind, steps, number, 2)
        found.append(((norms, *one.full()), copy.deepcopy(one.part.shard_state())))
    return found


def check(name, expected, got, norms_from=0):
    assert got[0] == pytest.approx(expected[0][norms_from:], rel=1e-9)
    for key, value in expected[1].items():
        torch.testing.assert_close(got[1][key], value, rtol=0, atol=1e-9, msg=key)
    names = [key for key, _ in build(kind_of(name)).named_parameters()]
    for number, one in expected[2]["state"].items():
        kept = got[2]["state"][names[number] if names[number] in got[2]["state"] else number]
        for key, value in one.items():
            torch.testing.assert_close(kept[key], value, rtol=0, atol=1e-9)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", [Fully, Zero])
def test_norms_states_and_shards_are_those_of_one_process(way, ranks):
    begin, rest = range(STOP), range(STOP, UPDATES)
    whole, half = ({name: alone(name, steps) for name in NAMES} for steps in (range(UPDATES), begin))
    assert all(max(norms) > MAX_NORM for norms, *_ in whole.values())  # something was clipped
    first, other = (ranks(n).run(on_a_grid, way, [(name, begin, None, None) for name in NAMES]) for n in (4, 2))
    cut, uncut = (
        {name: (half[name][1], [each[at][1] for each in results]) for at, name in enumerate(NAMES)}
        for results in (first, other)
    )
    for at, name in enumerate(NAMES):
        for each in (*first, *other):
            check(name, half[name], each[at][0])
        check(name, whole[name], alone(name, rest, first[0][at][0]), STOP)  # plain torch goes on
    tasks = [task for name in NAMES for task in ((name, rest, half[name], None), (name, rest, None, cut[name]))]
    back = [(name, rest, None, uncut[name]) for name in NAMES]  # from shards of whole layers to cut ones
    for num_ranks, todo in ((4, tasks + back), (2, tasks)):  # 2: of a model that is not cut
        for each in ranks(num_ranks).run(on_a_grid, way, todo):
            for (name, *_), (full, _) in zip(todo, each, strict=True):
                check(name, whole[name], full, STOP)


def faults_and_costs():
    """Return what each fault says, and the bytes that a norm sends."""
    tensor, data, number = axes()
    one, kind = made(Fully, "ViT, fused qkv", tensor, data)
    states, others = [None] * 4, [None] * 4
    dist.all_gather_object(states, sharded_state_dict(one.model, one.optimizer))
    load_sharded_state_dict(one.model, states, one.optimizer)
    train(one, kind, [0], number, 2)
    backward(one, kind, 1, number, 2)
    with recorded() as clip:
        one.model.clip_gradients_(MAX_NORM)
    sent = clip.records.ring_equivalent_bytes(dist.get_rank()) + clip.records.sent_bytes(dist.get_rank())
    if dist.get_rank() == 3:
        for unit in one.model.units:
            unit.shard.grad.to_local()[:] = float("nan")
    dist.all_gather_object(others, sharded_state_dict(one.model, one.optimizer))
    state = full_state_dict(one.model)
    wrong = {**state, "patch_embed.weight": state["patch_embed.weight"][1:]}
    mixed, half = [*states[:2], *others[2:]], [states[number ^ 1]]
    return sent, {
        "(rank 3)": message(lambda: one.model.clip_gradients_(1.0)),
        "are from different saves": message(lambda: load_sharded_state_dict(one.model, mixed, one.optimizer)),
        "were not given": message(lambda: load_sharded_state_dict(one.model, half, one.optimizer)),
        "in the saved state": message(lambda: load_full_state_dict(one.model, wrong)),
    }


def test_a_norm_sends_eight_bytes_on_each_axis_and_what_does_not_fit_is_refused_on_every_rank(ranks):
    for sent, found in ranks(4).run(faults_and_costs):
        assert sent == 2 * 8
        assert all(words in text for words, text in found.items()), found
