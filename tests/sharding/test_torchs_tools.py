"""Torch's tools on sharded models: refused in words on every rank, since each rank would get an answer of its own.

FSDP2 of torch 2.13 keeps each parameter's true dimensions and takes norms over all ranks. So `clip_grad_norm_`,
GradScaler and groups by `p.dim()` work there. Its Adafactor and LBFGS end in errors about placements of DTensor.
"""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from refused import message
from torch import nn
from torch.nn.utils import clip_grad_norm_

from distlab.large_batch import LAMB, LARS
from distlab.rng import generator
from distlab.sharding import FullyShard, ShardedOptimizer, full_state_dict


def net():
    """A matrix that odd numbers cut, biases and a norm."""
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator(0, 0, name))
    return model


def rows(step, ranks=None):
    """Return the rows of some ranks, or of this one."""
    ranks = [dist.get_rank()] if ranks is None else ranks
    return torch.cat([torch.randn(4, 7, generator=generator(step, r, "rows"), dtype=torch.float64) for r in ranks])


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def scaler():
    made = torch.amp.GradScaler("cpu", init_scale=8.0)
    made.scale(torch.ones(()))
    return made


NO_STEP = "call synchronize() before step()"


def steps_without_synchronize():
    """Torch's ZeroRedundancyOptimizer relies on DDP, which has averaged when backward ends; here a call is needed."""
    for stage in (1, 2):
        model = net()
        optimizer = ShardedOptimizer(model, adamw, stage=stage)
        start = [parameter.clone() for parameter in model.parameters()]
        yield NO_STEP, optimizer.step  # nothing at all has run
        model(rows(0)).square().mean().backward()
        yield NO_STEP, optimizer.step
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), start, strict=True))
        optimizer.synchronize()
        yield "no error", optimizer.step
        model(rows(0)).square().mean().backward()  # the old mean is still there, and is not that of this pass
        yield NO_STEP, optimizer.step
        optimizer.synchronize()
        optimizer.zero_grad()
        yield NO_STEP, optimizer.step
        with optimizer.no_sync():
            model(rows(0)).square().mean().backward()
        yield NO_STEP, optimizer.step


CLIP, SCALER = "clip_gradients_(max_norm)", "distlab.precision.LossScaler"
MEANS = "the module's parameters have no gradients after ShardedOptimizer.synchronize()"


def tools_on_zero():
    """On the model's own parameters and on pieces."""
    model = net()
    optimizer = ShardedOptimizer(model, adamw)
    model(rows(0)).square().mean().backward()
    optimizer.synchronize()
    yield MEANS, lambda: clip_grad_norm_(model.parameters(), 0.1)
    yield MEANS, lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    yield MEANS, lambda: model.zero_grad(set_to_none=False)
    yield SCALER, lambda: scaler().step(optimizer)
    pieces = [piece for _, piece in optimizer.named_pieces()]
    yield CLIP, lambda: clip_grad_norm_(pieces, 0.1)
    yield "sum of a shard", lambda: pieces[0].grad.pow(2).sum()
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
    alone = net()
    alone(rows(0, range(dist.get_world_size()))).square().mean().backward()
    expected = clip_grad_norm_(alone.parameters(), 0.1).item()
    assert optimizer.clip_gradients_(0.1).item() == pytest.approx(expected, rel=1e-12)
    yield "no error", optimizer.step
    small = nn.Sequential(nn.Linear(7, 5)).double()
    dealt = ShardedOptimizer(small, adamw, split="tensors")
    small(rows(0)).square().mean().backward()
    dealt.synchronize()
    assert (len([*dealt.named_pieces()]) == 0) == (dist.get_rank() == 2), "the last rank owns nothing"
    yield MEANS, lambda: clip_grad_norm_(small.parameters(), 0.1)
    yield SCALER, lambda: scaler().step(dealt)
    yield "no error", dealt.step


DIMENSIONS, NORM = "the number of dimensions of a shard", "a norm of a shard (Adafactor, LAMB and LARS take one)"


def tools_on_flat_shards():
    model = FullyShard(net())
    shards = list(model.parameters())

    def loss():
        model.zero_grad()
        value = model(rows(0)).square().mean()
        value.backward()
        model.synchronize()
        return value

    loss()
    yield f"LAMB updates a part of a tensor in a different way than the whole. It takes {NORM}", LAMB(shards, 0.1).step
    yield f"LARS updates a part of a tensor in a different way than the whole. It takes {NORM}", LARS(shards, 0.1).step
    yield DIMENSIONS, lambda: torch.optim.Muon(shards)  # it takes matrices only
    yield DIMENSIONS, lambda: [p for p in model.parameters() if p.dim() >= 2]
    yield "a norm of a shard or of its gradient is of this rank's part alone", lambda: shards[0].norm()
    for foreach in (False, True):
        yield NORM, torch.optim.Adafactor(shards, lr=0.1, foreach=foreach).step
        yield CLIP, lambda foreach=foreach: clip_grad_norm_(shards, 0.1, foreach=foreach)
    yield SCALER, lambda: scaler().step(torch.optim.AdamW(shards, lr=0.1))
    both = torch.optim.SGD([*shards, *FullyShard(net()).parameters()], lr=0.1)
    yield "the optimizer has shards of two models", both.step
    yield "step takes no closure on shards", lambda: torch.optim.SGD(shards, lr=0.1).step(loss)
    yield "seen as one long vector (LBFGS)", lambda: torch.optim.LBFGS(shards).step(loss)
    hooked = torch.optim.SGD(shards, lr=0.1)
    hooked.register_step_pre_hook(lambda *_: [p.grad.pow(2).sum() for p in shards])
    yield "sum of a shard", hooked.step
    for ask in STATISTICS:
        yield " of a shard", lambda ask=ask: ask(shards[0])


STATISTICS = [
    lambda p: (p.grad.detach() ** 2).sum().sqrt(),
    lambda p: p.grad.detach().clone().abs().max(),
    lambda p: p.detach().float().cpu().mean(),
    lambda p: F.mse_loss(p, torch.zeros_like(p)),
    lambda p: nn.utils.parameters_to_vector([p, p]),
    lambda p: p.detach().numpy(),
    lambda p: p.data[:1].item(),
    lambda p: torch._foreach_max([p.grad, p.grad]),
    lambda p: p.data.ndim,
    lambda p: torch.linalg.vector_norm(p.data.data),
    lambda p: torch.fft.fft(p.detach()),
    lambda p: p.detach().cummax(0),
]


def other_refusals():
    sparse = FullyShard(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)))
    tokens = torch.tensor([1, 2])
    yield "0.weight got a sparse gradient, and shards hold dense ones", lambda: sparse(tokens).sum().backward()
    bounded = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 1))
    yield "ShardedOptimizer would not tell other ranks", lambda: ShardedOptimizer(bounded, adamw)


def test_what_would_take_a_part_for_the_whole_is_refused_on_every_rank(ranks):
    def said():
        kinds = (steps_without_synchronize, tools_on_zero, tools_on_flat_shards, other_refusals)
        return [(words, message(action)) for cases in kinds for words, action in cases()]

    for rank, found in enumerate(ranks(3).run(said)):
        for words, text in found:
            assert words in text, (words, text)
            assert words == "no error" or words.startswith("LA") or f"rank {rank}: " in text, (words, text)


def replaced(name):
    """Gradients that a user puts in the place of others: signs; and none, for what shall stay as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    twin, make = copy.deepcopy(model), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    calls = []
    if name == "FullyShard":
        call = FullyShard(model)
        optimizer, synchronize, zero = make(call.parameters()), call.synchronize, call.zero_grad
    else:
        call, optimizer = model, ShardedOptimizer(model, make, stage=int(name[-1]))
        synchronize, zero = optimizer.synchronize, optimizer.zero_grad
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    plain = make(twin.parameters())
    for step in range(4):
        for one, its in ((call, optimizer), (twin, plain)):
            zero() if one is call else one.zero_grad()
            one(x * (step + 1)).square().mean().backward()
            synchronize() if one is call else None
            for group in its.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None if step == 2 else parameter.grad.sign() * 0.1
            its.step()
    state = full_state_dict(call) if name == "FullyShard" else model.state_dict()
    return {key: value.clone() for key, value in state.items()}, twin.state_dict(), calls


def by_element():
    """What people write by element is as on plain tensors; what they count; the norm of all."""
    model = FullyShard(net())
    model(torch.ones(2, 7, dtype=torch.float64) * (dist.get_rank() + 1)).square().mean().backward()
    model.synchronize()
    shard = next(model.parameters())
    plain, slope = shard.to_local().clone(), shard.grad.to_local().clone()
    average = shard.detach().clone()
    with torch.no_grad():
        shard.sub_(0.1 * shard.grad.sign() + 0.01 * shard)
        average.mul_(0.9).add_(shard.detach(), alpha=0.1)
    new = plain - (0.1 * slope.sign() + 0.01 * plain)
    assert torch.equal(shard.to_local(), new)
    assert torch.allclose(average.to_local(), 0.9 * plain + 0.1 * new)
    assert type(shard.to_local()) is type(average.to_local()) is torch.Tensor
    held = sum(one.numel() for one in model.parameters())
    assert (type(held), held, f"{shard.numel():,}") == (int, 20 + 5 + 9, "20")
    assert model.clip_gradients_(math.inf).item() > 0


def test_gradients_that_a_user_replaced_are_those_of_the_step_and_work_by_element_goes_on(ranks):
    def run():
        by_element()
        return {name: replaced(name) for name in ("FullyShard", "stage 1", "stage 2")}

    for found in ranks(2).run(run):
        for name, (state, expected, calls) in found.items():
            assert calls == ["before", "after"] * 4
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12, msg=f"{name}: {key}")
