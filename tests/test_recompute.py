"""Recompute gives the same bits as keeping everything, keeps inputs alone, and notices what is not the same twice."""

import copy

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from distlab.blocks.models import GPT, GPTConfig
from distlab.data_parallel import DataParallel
from distlab.precision import autocast
from distlab.recompute import RecomputePlainly, recompute, recompute_blocks
from distlab.rng import generator
from distlab.sharding import FullyShard


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As ranks have: on small tensors two threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CONFIG = GPTConfig(vocab_size=65, context=16, num_layers=3, num_heads=2, hidden_size=24, dropout=0.1)


def gpt(dtype=torch.float32, **changes):
    model = GPT(GPTConfig(**{**vars(CONFIG), **changes}), generator(0, 0, "weights")).to(dtype)
    tokens = torch.randint(65, (3, 16), generator=generator(0, 0, "tokens"))
    return model, tokens


def gradients_of(model, tokens, dtype="float32"):
    torch.manual_seed(5)
    model.zero_grad()
    with autocast(dtype):
        loss = GPT.loss(model(tokens), tokens)
    loss.backward()
    return [loss.detach(), torch.rand(1), *(p.grad.clone() for p in model.parameters())]  # the generator too


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.equality("recompute")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_with_dropout_and_autocast_give_the_same_bits(dtype):
    plain, tokens = gpt()
    expected = gradients_of(plain, tokens, dtype)
    for options, count in (({}, 3), ({"every": 2}, 2), ({"part": "attention"}, 3)):
        model, _ = gpt()
        names = recompute_blocks(model, **options)
        assert len(names) == count
        assert equal(gradients_of(model, tokens, dtype), expected), options
        assert list(model.state_dict()) == list(plain.state_dict())
    with_torch, _ = gpt()
    for block in with_torch.blocks:
        block.forward = lambda x, forward=block.forward: checkpoint(forward, x, use_reentrant=False)
    assert equal(gradients_of(with_torch, tokens, dtype), expected)


def test_a_copy_of_a_model_recomputes_its_own_blocks():
    model, tokens = gpt()
    recompute_blocks(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    plain, _ = gpt()
    assert equal(gradients_of(model, tokens), gradients_of(plain, tokens))
    assert not equal(gradients_of(twin, tokens), gradients_of(plain, tokens))


def test_any_inputs_and_outputs():
    weight = nn.Parameter(torch.randn(4, 4))

    def function(x, nested, *, scale, add):
        hidden = (x @ weight).tanh() * nested["a"][0]
        return {"sum": hidden + (nested["b"] if add else 0), "pair": (hidden.exp() * scale, nested["index"] + 1)}

    def run(call):
        torch.manual_seed(3)
        x, a = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
        b, index = torch.randn(2, 4), torch.arange(3)  # want no gradient
        weight.grad = None
        out = call(function, x, {"a": [a], "b": b, "index": index, "none": None}, scale=a[0], add=True)
        (out["sum"].sum() + out["pair"][0].square().sum()).backward()
        return [x.grad, a.grad, weight.grad, out["sum"].detach(), out["pair"][1]]

    assert equal(run(recompute), run(lambda function, *inputs, **options: function(*inputs, **options)))


def test_without_gradients_nothing_is_kept_and_plain_recompute_agrees_within_its_limits():
    layer, table = nn.Sequential(nn.Linear(3, 5), nn.Tanh()), nn.Embedding(5, 3)
    recompute(table, torch.tensor([1, 2])).sum().backward()
    assert table.weight.grad[1:3].eq(1).all(), "a first layer, whose input wants no gradient, learns"
    x = torch.randn(2, 3, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(recompute(layer, x), layer(x))
    results = []
    for call in (lambda: layer(x), lambda: recompute(layer, x), lambda: RecomputePlainly.apply(layer, x)):
        layer.zero_grad()
        x.grad = None
        call().square().sum().backward()
        results.append([x.grad.clone(), *(p.grad.clone() for p in layer.parameters())])
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])
    assert not RecomputePlainly.apply(layer, x.detach()).requires_grad, "the limit that its text speaks of"


def test_backward_twice_and_a_recompute_inside_another():
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def inner(x):
        return layers[1](x).tanh()

    def outer(x):
        return layers[2](recompute(inner, layers[0](x).tanh())).tanh()

    def run(call):
        x = torch.ones(2, 4, requires_grad=True)
        layers.zero_grad()
        loss = call(outer, x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad, *(p.grad.clone() for p in layers.parameters())]

    assert equal(run(recompute), run(lambda function, x: layers[2](inner(layers[0](x).tanh())).tanh()))


def test_what_is_not_the_same_twice_is_an_error():
    widths = iter([3, 4])

    def changing(x):
        return (x[:, : next(widths)] * x[:, :1]).exp()

    loss = recompute(changing, torch.randn(2, 5, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"changing saved .* first difference is number 1: \[2, 3\]"):
        loss.backward()
    x = torch.randn(2, 5, requires_grad=True) * 1
    out = recompute(torch.exp, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def saved_bytes(model, tokens):
    """Bytes of all storages that autograd keeps, parameters apart."""
    held = {p.untyped_storage()._cdata for p in model.parameters()}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in held:
            found[storage._cdata] = storage  # kept, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        x = model.token_embedding(tokens)
        for block in model.blocks:
            x = block(x)
        del x
    return sum(storage.nbytes() for storage in found.values())


def test_of_each_block_only_the_input_is_kept():
    model, tokens = gpt(dropout=0.0, tied=False)
    keeps_all = saved_bytes(model, tokens)
    recompute_blocks(model)
    inputs = 3 * (3 * 16 * 24 * 4)  # three blocks, [B, S, H] of float32
    assert saved_bytes(model, tokens) == inputs + tokens.nbytes
    assert keeps_all > 10 * inputs


def test_refusals():
    model, _ = gpt()
    recompute_blocks(model)
    for words, call in (
        ("at least 1", lambda: recompute_blocks(gpt()[0], 0)),
        ("0 blocks", lambda: recompute_blocks(nn.Linear(2, 2))),
        ("none has a 'mixture'", lambda: recompute_blocks(gpt()[0], part="mixture")),
        ("recompute already", lambda: recompute_blocks(model)),
    ):
        assert words in message(call)


@pytest.mark.equality("recompute")
def test_data_parallel_and_sharding_train_as_without(ranks):
    """Gradients arrive in the ordinary backward, so buckets fill and go as they would have, and units are whole."""

    def train(wrap, recomputing):
        model, _ = gpt(dropout=0.0)
        if recomputing:
            recompute_blocks(model)
        wrapped = wrap(model)
        called = wrapped if isinstance(wrapped, nn.Module) else model
        optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
        for step in range(2):
            tokens = torch.randint(65, (2, 16), generator=generator(1, dist.get_rank(), f"tokens {step}"))
            wrapped.zero_grad()
            GPT.loss(called(tokens), tokens).backward()
            wrapped.synchronize()
            optimizer.step()
        return [p.detach().clone() for p in called.parameters()]

    def both():
        ways = (lambda model: DataParallel(model, bucket_bytes=4000), FullyShard)
        return [(train(way, False), train(way, True)) for way in ways]

    for pairs in ranks(2).run(both):
        assert all(equal(plain, recomputed) for plain, recomputed in pairs)
