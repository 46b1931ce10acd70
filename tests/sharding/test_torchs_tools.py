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

from distlab.data_parallel import DataParallel
from distlab.large_batch import LAMB, LARS
from distlab.rng import generator
from distlab.sharding import FullyShard, ShardedOptimizer, full_state_dict


def net():
    """A matrix that odd numbers cut, biases and a norm."""
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator(0, 0, name))
    return model


def rows(step, ranks):
    return torch.cat([torch.randn(4, 7, generator=generator(step, r, "rows"), dtype=torch.float64) for r in ranks])


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def steps_without_synchronize(stage):
    model = net()
    optimizer = ShardedOptimizer(model, adamw, stage=stage)
    x, texts = rows(0, [dist.get_rank()]), []
    start = [parameter.clone() for parameter in model.parameters()]
    texts.append(message(optimizer.step))  # nothing at all has run
    model(x).square().mean().backward()
    texts.append(message(optimizer.step))
    unmoved = all(torch.equal(one, other) for one, other in zip(model.parameters(), start, strict=True))
    optimizer.synchronize()
    texts.append(message(optimizer.step))
    model(x).square().mean().backward()  # the old mean is still there, and is not that of this pass
    texts.append(message(optimizer.step))
    optimizer.synchronize()
    optimizer.zero_grad()
    texts.append(message(optimizer.step))
    with optimizer.no_sync():
        model(x).square().mean().backward()
    texts.append(message(optimizer.step))
    return texts, unmoved


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_without_synchronize_says_so(ranks, stage):
    """Torch's ZeroRedundancyOptimizer relies on DDP, which has averaged when backward ends; here a call is needed."""
    for rank, (texts, unmoved) in enumerate(ranks(2).run(steps_without_synchronize, stage)):
        assert unmoved
        assert texts.pop(2) == "no error"
        assert all(f"rank {rank}: step" in text and "call synchronize() before step()" in text for text in texts)
        assert len(texts) == 5


def tools_on_whole_parameters(split):
    """Torch's tools on the model's own parameters and on pieces; rank 2 owns no piece where tensors are dealt out."""
    model = net() if split == "elements" else nn.Sequential(nn.Linear(7, 5)).double()
    optimizer = ShardedOptimizer(model, adamw, split=split)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    model(rows(0, [dist.get_rank()])).square().mean().backward()
    optimizer.synchronize()
    texts = [
        message(lambda: clip_grad_norm_(model.parameters(), 0.1)),
        message(lambda: clip_grad_norm_(model.parameters(), 0.1, foreach=False)),
        message(lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)),
        message(lambda: model.zero_grad(set_to_none=False)),
        message(lambda: scaler.step(optimizer)),
    ]
    pieces = [piece for _, piece in optimizer.named_pieces()]
    if pieces:
        texts.append(message(lambda: clip_grad_norm_(pieces, 0.1)))
    shapes = [parameter.grad.shape == parameter.shape for parameter in model.parameters()]
    norm = optimizer.clip_gradients_(0.1)
    optimizer.step()
    return texts, all(shapes), norm.item(), [p.detach().clone() for p in model.parameters()], len(pieces)


@pytest.mark.parametrize("split", ["elements", "tensors"])
def test_clip_and_scaler_on_the_models_parameters_are_refused_and_the_own_clip_is_right(ranks, split):
    model = net() if split == "elements" else nn.Sequential(nn.Linear(7, 5)).double()
    model(rows(0, range(3))).square().mean().backward()
    expected = clip_grad_norm_(model.parameters(), 0.1).item()
    results = ranks(3).run(tools_on_whole_parameters, split)
    for rank, (texts, shapes, norm, _, _) in enumerate(results):
        for text in texts[:4]:
            assert f"rank {rank}: the module's parameters have no gradients after" in text
            assert "clip_gradients_(max_norm)" in text
        assert "distlab.precision.LossScaler" in texts[4]
        assert all("call clip_gradients_(max_norm)" in text for text in texts[5:])
        assert shapes
        if split == "elements":
            assert norm == pytest.approx(expected, rel=1e-12)
        assert norm == results[0][2]
    if split == "tensors":
        assert [count for *_, count in results] == [1, 1, 0]


def of_whole_tensors(make, of_ranks=None):
    """Train where each rank owns whole tensors; or in one process, on the rows of these ranks."""
    model = net()
    parameters = list(model.parameters())
    optimizer = make(parameters) if of_ranks else ShardedOptimizer(model, make, split="tensors", stage=2)
    for step in range(3):
        optimizer.zero_grad()
        model(rows(step, of_ranks or [dist.get_rank()])).square().mean().backward()
        if not of_ranks:
            optimizer.synchronize()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, LAMB, LARS])
def test_optimizers_of_whole_tensors_equal_one_process(ranks, kind):
    def make(parameters):
        return kind(parameters, lr=0.02)

    expected = of_whole_tensors(make, range(3))
    for found in ranks(3).run(of_whole_tensors, make):
        assert all(torch.allclose(*pair, atol=1e-10, rtol=0) for pair in zip(found, expected, strict=True))


def on_flat_shards():
    model = FullyShard(net())
    shards = list(model.parameters())
    texts = {
        "LAMB": message(lambda: LAMB(shards, lr=0.1)),
        "LARS": message(lambda: LARS(shards, lr=0.1)),
        "Muon": message(lambda: torch.optim.Muon(shards)),
        "dim": message(lambda: [p for p in model.parameters() if p.dim() >= 2]),
        "ndim": message(lambda: [p for p in model.parameters() if p.ndim >= 2]),
        "norm": message(lambda: shards[0].norm()),
    }
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))

    def loss():
        model.zero_grad()
        value = model(rows(0, [dist.get_rank()])).square().mean()
        value.backward()
        model.synchronize()
        return value

    loss()
    for foreach in (False, True):
        adafactor = torch.optim.Adafactor(shards, lr=0.1, foreach=foreach)
        texts[f"Adafactor {foreach}"] = message(adafactor.step)
        texts[f"clip {foreach}"] = message(lambda foreach=foreach: clip_grad_norm_(shards, 0.1, foreach=foreach))
    texts["scaler"] = message(lambda: scaler.step(torch.optim.AdamW(shards, lr=0.1)))
    texts["scaler, fused"] = message(lambda: scaler.step(torch.optim.AdamW(shards, lr=0.1, fused=True)))
    both = torch.optim.SGD([*shards, *FullyShard(net()).parameters()], lr=0.1)
    texts["two models"] = message(both.step)
    texts["closure"] = message(lambda: torch.optim.SGD(shards, lr=0.1).step(loss))
    texts["LBFGS"] = message(lambda: torch.optim.LBFGS(shards).step(loss))
    return texts


def test_what_looks_at_more_than_elements_is_refused_on_flat_shards(ranks):
    for rank, texts in enumerate(ranks(3).run(on_flat_shards)):
        assert "LAMB takes the norm of each tensor" in texts["LAMB"]
        assert "LARS takes the norm of each tensor" in texts["LARS"]
        for name in ("dim", "ndim", "Muon"):  # Muon takes matrices only
            assert f"rank {rank}: the number of dimensions of a shard" in texts[name]
        assert "a norm of a shard or of its gradient is of this rank's part alone" in texts["norm"]
        for name in ("Adafactor False", "Adafactor True"):
            assert "a norm of a shard (Adafactor, LAMB and LARS take one)" in texts[name], name
        for name in ("clip False", "clip True"):
            assert "call clip_gradients_(max_norm)" in texts[name], name
        for name in ("scaler", "scaler, fused"):
            assert "distlab.precision.LossScaler" in texts[name], name
        assert f"rank {rank}: step takes no closure on shards" in texts["closure"]
        assert f"rank {rank}: the optimizer has shards of two models" in texts["two models"]
        assert "seen as one long vector (LBFGS)" in texts["LBFGS"]


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


def test_gradients_that_a_user_replaced_are_those_of_the_step_and_hooks_of_steps_run(ranks):
    for name in ("FullyShard", "stage 1", "stage 2"):
        for state, expected, calls in ranks(2).run(replaced, name):
            assert calls == ["before", "after"] * 4
            for key, value in expected.items():
                torch.testing.assert_close(state[key], value, rtol=0, atol=1e-12, msg=f"{name}: {key}")


def sparse():
    model = FullyShard(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1)))
    return message(lambda: model(torch.tensor([1, 2])).sum().backward())


def test_sparse_gradients_are_refused_in_words(ranks):
    for rank, text in enumerate(ranks(2).run(sparse)):
        assert text.startswith(f"RuntimeError: rank {rank}: 0.weight got a sparse gradient")
        assert "sparse=False" in text


def with_max_norm():
    def model():
        return nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 1))

    ways = {"DataParallel": DataParallel, "ShardedOptimizer": lambda one: ShardedOptimizer(one, torch.optim.SGD)}
    return {name: message(lambda way=way: way(model())) for name, way in ways.items()}


def test_weights_that_forward_changes_on_each_rank_are_refused(ranks):
    for rank, texts in enumerate(ranks(2).run(with_max_norm)):
        for name, text in texts.items():
            assert text.startswith(f"ValueError: rank {rank}: 0 has max_norm"), text
            assert f"{name} would not tell other ranks" in text


def trained():
    model = FullyShard(net())
    model(torch.ones(2, 7, dtype=torch.float64) * (dist.get_rank() + 1)).square().mean().backward()
    model.synchronize()
    return model


STATISTICS = {
    "square and sum": lambda p: p.grad.pow(2).sum(),
    "clip by hand": lambda p: (p.grad.detach() ** 2).sum().sqrt(),
    "of data": lambda p: (p.data * p.data).sum(),
    "of a copy": lambda p: p.grad.detach().clone().abs().max(),
    "of a different type": lambda p: p.detach().float().cpu().mean(),
    "not finite": lambda p: p.grad.isfinite().all(),
    "a penalty": lambda p: F.mse_loss(p, torch.zeros_like(p)),
    "one vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "numpy": lambda p: p.detach().numpy(),
    "a number": lambda p: p.data[:1].item(),
    "a row": lambda p: p[0],
    "of a list": lambda p: torch._foreach_max([p.grad, p.grad]),
    "a direction": lambda p: F.normalize(p.grad, dim=0),
    "by product": lambda p: torch.dot(p.detach(), p.grad),
    "dimensions of data": lambda p: p.data.ndim,
    "norm of data": lambda p: p.grad.data.norm(),
    "norms of a list": lambda p: torch._foreach_norm([p.grad.data]),
    "norm, twice data": lambda p: torch.linalg.vector_norm(p.data.data),
    "frequencies": lambda p: torch.fft.fft(p.detach()),
    "largest so far": lambda p: p.detach().cummax(0),
    "order": lambda p: torch.argsort(p.detach()),
}


ELSE = ("one vector", "dimensions of data", "norm of data", "norms of a list", "norm, twice data")  # words of their own


def asked():
    shard = next(trained().parameters())
    return {name: message(lambda ask=ask: ask(shard)) for name, ask in STATISTICS.items()}


def test_a_number_of_a_part_is_refused_on_every_rank(ranks):
    for rank, texts in enumerate(ranks(3).run(asked)):
        for name, text in texts.items():
            assert text.startswith(f"ValueError: rank {rank}: "), (name, text)
            assert " of a shard" in text, (name, text)
            assert "to_local()" in text or name in ELSE, (name, text)


def by_element():
    """What people write by element, beside the same on plain tensors; what they count."""
    model = trained()
    shard = next(model.parameters())
    plain, slope = shard.to_local().clone(), shard.grad.to_local().clone()
    average = shard.detach().clone()
    with torch.no_grad():
        shard.sub_(0.1 * shard.grad.sign() + 0.01 * shard)
        average.mul_(0.9).add_(shard.detach(), alpha=0.1)
    new = plain - (0.1 * slope.sign() + 0.01 * plain)
    held = sum(one.numel() for one in model.parameters())
    norm = model.clip_gradients_(math.inf)
    return (
        bool(torch.equal(shard.to_local(), new)),
        bool(torch.allclose(average.to_local(), 0.9 * plain + 0.1 * new)),
        (type(held), held, f"{shard.numel():,}"),
        [type(one) for one in (shard.to_local(), average.to_local())],
        norm.item(),
    )


def test_work_by_element_and_counts_of_memory_go_on(ranks):
    for moved, averaged, (kind, held, shown), types, norm in ranks(2).run(by_element):
        assert moved
        assert averaged
        assert types == [torch.Tensor] * 2
        assert (kind, held, shown) == (int, 20 + 5 + 9, "20")
        assert norm > 0


def in_a_hook():
    model = trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: [p.grad.pow(2).sum() for p in model.parameters()])
    return message(optimizer.step)


def test_a_hook_around_a_step_is_the_users(ranks):
    for rank, text in enumerate(ranks(2).run(in_a_hook)):
        assert text.startswith(f"ValueError: rank {rank}: sum of a shard"), text


def of_pieces():
    model = net()
    optimizer = ShardedOptimizer(model, lambda p: torch.optim.AdamW(p, lr=0.1))
    model(torch.ones(2, 7, dtype=torch.float64)).square().mean().backward()
    optimizer.synchronize()
    return [message(lambda p=p: p.grad.pow(2).sum()) for _, p in optimizer.named_pieces()]


def test_pieces_of_zero_refuse_it_too(ranks):
    for rank, texts in enumerate(ranks(2).run(of_pieces)):
        assert texts
        assert all(text.startswith(f"ValueError: rank {rank}: sum of a shard") for text in texts), texts
