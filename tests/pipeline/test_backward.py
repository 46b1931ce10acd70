"""I and W together make the gradients of one full backward pass, on any module, and hold only what W needs.

A table of every rule and every way of calling a layer, and modules that make it hard; else a layer stays in I.
"""

import copy
from functools import partial

import pytest
import torch
from equal import Calls
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from distlab.blocks.models import GPT, GPTConfig
from distlab.pipeline.backward.two_parts import LinearPlainly, full_backward, prepare_split

REAL, COMPLEX = torch.float64, torch.complex128
CONFIG = GPTConfig(vocab_size=17, context=7, num_layers=2, num_heads=2, hidden_size=12, tied=True)


def slope(model, x):
    """The model's output, and a penalty on its slope: backward within forward, to be differentiated again."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    y = model.second(torch.tanh(model.first(x)))
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y + gradient.square().sum()


def implicit(model, x):
    """A backward of a hook's own inside of backward, as deep equilibria have: W must not count it."""
    y = model.second(torch.tanh(model.first(x)))
    start = x.detach().requires_grad_()
    again = model.second(torch.tanh(model.first(start)))
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient + torch.autograd.grad(again, start, gradient)[0])
    return y


def per_sample(model, x):
    """A gradient for each sample, by torch.func."""
    slopes = torch.func.vmap(lambda row: torch.func.grad(lambda r: model.first(r).tanh().sum())(row))(x)
    return slopes + sum(p.sum() for p in model.first.parameters())


class Awkward(nn.Module):
    """Shares a Linear with a second call, ties a weight to a layer without a rule, freezes some, bends in place."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=3)
        self.twice, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.frozen_weight, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.frozen_weight.weight.requires_grad_(False)
        self.bend, self.own, self.unused = nn.ReLU(inplace=True), nn.Parameter(torch.randn(6)), nn.Linear(2, 2)
        self.bilinear, self.tied_to_bilinear = nn.Bilinear(6, 6, 4), nn.Linear(6, 4)
        self.tied_to_bilinear.bias = self.bilinear.bias
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.bend(self.twice(self.embedding(tokens)))
        x = self.norm(x + self.twice(x)) * self.own
        x = self.frozen(self.bend(self.frozen_weight(x)))
        return self.output(x), self.bilinear(x, x) + self.tied_to_bilinear(x)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, stride=2, groups=3),
        nn.ReLU(inplace=True),
        nn.BatchNorm2d(6),
        nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Flatten(2),
        nn.Conv1d(4, 2, 3, dilation=2, bias=False),
    )


def two():
    return {"first": nn.Linear(4, 4, dtype=REAL), "second": nn.Linear(4, 4, dtype=REAL)}


def drawn(make):
    torch.manual_seed(0)
    return make().double()


def linear(*sizes, dtype=REAL):
    return nn.Linear(*sizes, dtype=dtype)


def rows(**options):
    return nn.Embedding(5, 3, dtype=REAL, **options)


def floats(*shape, dtype=REAL):
    return lambda: torch.randn(shape, dtype=dtype)


def tokens(*shape):
    return lambda: torch.randint(0, 5, shape)


def image(kind, rank, **options):
    return kind(3, 6, 3, dtype=REAL, **options), floats(2, 3, *[6] * rank)


SQUARE, IMAGES, LAST = floats(2, 4), floats(2, 3, 6, 6), torch.channels_last
CASES = {  # the module, its inputs, and the layers that wait where the case is about them
    "complex linear": (linear(4, 3, dtype=COMPLEX), floats(2, 4, dtype=COMPLEX), ("",)),
    "complex convolution": (nn.Conv1d(3, 2, 2, dtype=COMPLEX), floats(2, 3, 5, dtype=COMPLEX), ()),
    "keyword": (Calls(lambda m, x: m.second(input=m.first(input=x)), **two()), SQUARE, ("first", "second")),
    "more": (Calls(lambda m, x: m.up(x, output_size=(13, 13)), up=image(nn.ConvTranspose2d, 2, stride=2)[0]), IMAGES),
    "one row": (linear(4, 3), floats(4), ("",)),
    "no rows": (linear(4, 3), floats(0, 4)),
    "not contiguous": (Calls(lambda m, x: m.second(m.first(x.mT).mT).transpose(0, 2), **two()), floats(2, 4, 4)),
    "expanded": (Calls(lambda m, x: m.second(m.first(x).expand(3, 2, 4)).sum(), **two()), SQUARE),
    "one token": (rows(), tokens(), ("",)),
    "padding and frequencies": (rows(padding_idx=-1, scale_grad_by_freq=True), tokens(9)),
    "max norm": (rows(max_norm=0.5), tokens(9), ()),
    "one image": (image(nn.Conv2d, 2)[0], floats(3, 6, 6), ("",)),
    "channels last": (Calls(lambda m, x: m.conv(x.to(memory_format=LAST)), conv=image(nn.Conv2d, 2)[0]), IMAGES),
    "reflected": (*image(nn.Conv2d, 2, padding=1, padding_mode="reflect"), ()),
    "volume": (*image(nn.Conv3d, 3, dilation=2), ("",)),
    "signal up": (*image(nn.ConvTranspose1d, 1, groups=3, output_padding=1, stride=2), ("",)),
    "one layer twice": (Calls(lambda m, x: m.first(torch.tanh(m.first(x))) + m.first(x), **two()), SQUARE),
    "used beside its layer": (Calls(lambda m, x: F.linear(m.rows(x), m.rows.weight), rows=rows()), tokens(8)),
    "slope": (Calls(slope, **two()), SQUARE, ("first", "second")),
    "backward in a hook": (Calls(implicit, **two()), SQUARE),
    "per sample": (Calls(per_sample, **two()), SQUARE),
    "checkpoint": (Calls(lambda m, x: checkpoint(m.first, x, use_reentrant=False), **two()), SQUARE),
    "awkward": (drawn(Awkward), tokens(3, 5), ("embedding", "twice", "frozen_weight", "unused", "output")),
    "convolutions": (drawn(convolutions), floats(2, 3, 8, 8), ("0", "3", "6")),
    "gpt": (drawn(partial(GPT, CONFIG)), tokens(3, 7)),
    "spectral": (parametrizations.spectral_norm(linear(4, 3)), SQUARE, ()),
}


def gradients_of(module, draw, run):
    """Run several forward passes before the first backward; return gradients of inputs and parameters."""
    torch.manual_seed(1)
    inputs = [draw() for _ in range(3)]
    for x in inputs:
        x.requires_grad_(x.dtype in (REAL, COMPLEX))
    outputs = [y if isinstance(y, tuple) else (y,) for y in map(module, inputs)]
    for index in (1, 0, 2):
        run(outputs[index], [torch.cos(torch.arange(y.numel())).reshape(y.shape).to(y.dtype) for y in outputs[index]])
    return [x.grad for x in inputs] + [parameter.grad for parameter in module.parameters()]


def assert_equal(mine, theirs, rtol=1e-12):
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        scale = 1.0 if one is None or not one.numel() else max(1.0, float(other.abs().max()))
        assert one is None or torch.allclose(one, other, rtol=rtol, atol=rtol * scale)


def in_two_parts(split, outputs, gradients):
    split.weight_gradient(split.input_gradient(outputs, gradients))


@pytest.mark.parametrize("name", CASES)
def test_two_parts_equal_one_backward(name):
    torch.manual_seed(0)
    module, draw, *deferred = CASES[name]
    module = copy.deepcopy(module)
    plain, whole = copy.deepcopy(module), copy.deepcopy(module)
    split = prepare_split(module)
    if deferred:
        assert split.report.deferred == deferred[0]
    expected = gradients_of(plain, draw, torch.autograd.backward)
    assert_equal(gradients_of(module, draw, partial(in_two_parts, split)), expected)
    prepare_split(whole)
    assert_equal(gradients_of(whole, draw, torch.autograd.backward), expected)  # a plain backward of a split module


def test_the_report_names_who_waits_and_who_does_not():
    module = drawn(Awkward)
    report = prepare_split(module).report
    assert report.deferred == ("embedding", "twice", "frozen_weight", "unused", "output")
    reasons = dict(report.kept)
    assert reasons.keys() == {"", "norm", "bilinear", "tied_to_bilinear"}
    assert reasons["tied_to_bilinear"] == "shares a parameter with bilinear"
    assert "in I: norm: " in str(report)
    assert dict(prepare_split(drawn(convolutions)).report.kept).keys() == {"2", "4"}
    with pytest.raises(ValueError, match="in two parts already"):
        prepare_split(module)
    pruned = prune.l1_unstructured(prune.l1_unstructured(nn.Linear(2, 2), "bias", 0.5), "weight", 0.5)
    for one in (pruned, parametrizations.weight_norm(linear(2, 2))):
        assert prepare_split(one).report.deferred == ()


def test_a_layer_that_changes_after_the_split_is_computed_as_it_is():
    torch.manual_seed(0)
    plain = nn.Sequential(linear(4, 4), linear(4, 4), linear(4, 4))
    module = copy.deepcopy(plain)
    split = prepare_split(module)
    for one in (plain, module):
        parametrizations.weight_norm(one[0])
        one[1].weight = nn.Parameter(one[2].weight.detach() * 2)
        one[2].requires_grad_(False)
    expected = gradients_of(plain, SQUARE, torch.autograd.backward)
    assert_equal(gradients_of(module, SQUARE, partial(in_two_parts, split)), expected)


def test_a_hook_after_accumulation_runs_once_in_w_with_the_whole_gradient():
    layers, seen = nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4)), []
    layers[0].weight = layers[2].weight
    layers[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    alone, split = copy.deepcopy(layers), prepare_split(layers)
    x = torch.ones(2, 4, dtype=REAL)
    y = layers(x)
    alone(x).sum().backward()
    work = split.input_gradient([y], [torch.ones_like(y)])
    assert seen == []
    split.weight_gradient(work)
    assert_equal(seen, [alone[0].weight.grad])


def test_autocast_gives_the_same_types_and_nearly_the_same_numbers():
    module, x = drawn(partial(GPT, CONFIG)).float(), torch.randint(0, 17, (3, 7))
    oracle = copy.deepcopy(module)
    split = prepare_split(module)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = module(x), oracle(x)
    assert torch.equal(y, expected)
    assert y.dtype == torch.bfloat16
    in_two_parts(split, [y], [torch.ones_like(y)])
    expected.sum().backward()
    assert_equal([p.grad for p in module.parameters()], [p.grad for p in oracle.parameters()], 0.02)


def test_what_waits_is_each_layers_input_and_the_gradient_of_its_output():
    layer = nn.Sequential(linear(5, 7), nn.Tanh(), linear(7, 3))
    split = prepare_split(layer)
    y = layer(torch.randn(4, 5).double())
    work = split.input_gradient([y], [torch.ones_like(y)])
    assert work.num_bytes == 8 * 4 * (5 + 7 + 7 + 3)
    assert all(p.grad is None for p in layer.parameters())
    split.weight_gradient(work)
    assert work.num_bytes == 0, "W lets go of what I kept"
    assert all(p.grad is not None for p in layer.parameters())
    split.close()
    assert not any("forward" in vars(one) for one in layer), "their own methods are back"
    x = torch.randn(3, requires_grad=True)
    full_backward([x * 2, x * 3, torch.zeros(3)], [torch.ones(3), None, None])
    assert torch.equal(x.grad, torch.full((3,), 2.0)), "outputs that nobody used are passed over"


def test_the_plain_way_on_one_screen():
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    notes = []
    LinearPlainly.apply(x, w, notes).square().sum().backward()
    assert w.grad is None
    expected = torch.autograd.grad((x @ w.T).square().sum(), (x, w))
    assert torch.allclose(x.grad, expected[0])
    assert torch.allclose(sum(g.T @ kept for kept, g in notes), expected[1])
