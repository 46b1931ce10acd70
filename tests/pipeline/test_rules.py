"""Every rule and every way of calling a layer: I and W make what one backward pass makes, or the layer stays in I."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from distlab.pipeline.backward.two_parts import prepare_split

REAL, COMPLEX = torch.float64, torch.complex128


class Calls(nn.Module):
    """A module whose forward is a function of it and of x."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


class Scaled(nn.Module):
    """A parametrization."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=REAL))

    def forward(self, weight):
        return weight * self.scale


def slope(model, x):
    """The model's output, and a penalty on its slope: backward within forward, to be differentiated again."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    y = model.second(torch.tanh(model.first(x)))
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y + gradient.square().sum()


def saliency(model, x):
    """The same, where the slope is a number and no more."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model.second(torch.tanh(model.first(x))).square().sum(), x)
    return model.second(torch.tanh(model.first(x))) * gradient.square().sum()


def inner_step(model, x):
    """One update inside of forward, through which the gradients go (MAML)."""
    named = dict(model.first.named_parameters())
    loss = torch.tanh(model.first(x)).square().sum()
    gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
    return torch.func.functional_call(model.first, moved, (x,))


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
    names = dict(model.first.named_parameters())
    slopes = torch.func.vmap(lambda row: torch.func.grad(lambda r: model.first(r).tanh().sum())(row))(x)
    return slopes + sum(p.sum() for p in names.values())


def low_rank(model, x):
    return model.base(x) + model.up(model.down(x)) * 0.5


def two(first=4, second=4, dtype=REAL):
    return {"first": nn.Linear(4, first, dtype=dtype), "second": nn.Linear(first, second, dtype=dtype)}


def floats(*shape, dtype=REAL):
    return lambda: torch.randn(shape, dtype=dtype)


def tokens(*shape):
    return lambda: torch.randint(0, 5, shape)


def image(kind, rank, **options):
    return kind(3, 6, 3, dtype=REAL, **options), floats(2, 3, *[6] * rank)


CASES = {
    "complex linear": (nn.Linear(4, 3, dtype=COMPLEX), floats(2, 4, dtype=COMPLEX), ("",)),
    "complex linear twice": (
        Calls(lambda m, x: m.second(m.first(x) * 1j), **two(dtype=COMPLEX)),
        floats(2, 4, dtype=COMPLEX),
    ),
    "complex without bias": (nn.Linear(4, 3, bias=False, dtype=COMPLEX), floats(4, dtype=COMPLEX)),
    "complex convolution": (nn.Conv1d(3, 2, 2, dtype=COMPLEX), floats(2, 3, 5, dtype=COMPLEX), ()),
    "keyword": (Calls(lambda m, x: m.second(input=m.first(input=x)), **two()), floats(2, 4), ("first", "second")),
    "keyword of an embedding": (Calls(lambda m, x: m.rows(input=x), rows=nn.Embedding(5, 3, dtype=REAL)), tokens(2, 4)),
    "more arguments": (
        Calls(lambda m, x: m.up(x, output_size=(13, 13)), up=image(nn.ConvTranspose2d, 2, stride=2)[0]),
        floats(2, 3, 6, 6),
    ),
    "more keywords": (
        Calls(lambda m, x: m.up(input=x, output_size=(13, 13)), up=image(nn.ConvTranspose2d, 2, stride=2)[0]),
        floats(2, 3, 6, 6),
    ),
    "one row": (nn.Linear(4, 3, dtype=REAL), floats(4), ("",)),
    "no rows": (nn.Linear(4, 3, dtype=REAL), floats(0, 4)),
    "no features": (nn.Linear(0, 3, dtype=REAL), floats(2, 0)),
    "many dimensions": (nn.Linear(4, 3, dtype=REAL), floats(2, 1, 3, 4)),
    "not contiguous": (
        Calls(lambda m, x: m.second(m.first(x.transpose(0, 1)).transpose(0, 1)).transpose(0, 2), **two()),
        floats(2, 3, 4),
    ),
    "expanded": (Calls(lambda m, x: m.second(m.first(x).expand(3, 2, 4)).sum(), **two()), floats(2, 4)),
    "one token": (nn.Embedding(5, 3, dtype=REAL), tokens(), ("",)),
    "no tokens": (nn.Embedding(5, 3, dtype=REAL), tokens(0)),
    "padding and frequencies": (nn.Embedding(5, 3, padding_idx=-1, scale_grad_by_freq=True, dtype=REAL), tokens(9)),
    "max norm": (nn.Embedding(5, 3, max_norm=0.5, dtype=REAL), tokens(9), ()),
    "one image": (image(nn.Conv2d, 2)[0], floats(3, 6, 6), ("",)),
    "no images": (image(nn.Conv2d, 2)[0], floats(0, 3, 6, 6)),
    "channels last": (
        Calls(lambda m, x: m.conv(x.contiguous(memory_format=torch.channels_last)), conv=image(nn.Conv2d, 2)[0]),
        floats(2, 3, 6, 6),
    ),
    "reflected": (*image(nn.Conv2d, 2, padding=1, padding_mode="reflect"), ()),
    "volume": (*image(nn.Conv3d, 3, dilation=2), ("",)),
    "signal up": (*image(nn.ConvTranspose1d, 1, groups=3, output_padding=1, stride=2), ("",)),
    "one layer twice": (Calls(lambda m, x: m.first(torch.tanh(m.first(x))) + m.first(x), **two()), floats(2, 4)),
    "used beside its layer": (
        Calls(lambda m, x: F.linear(m.rows(x), m.rows.weight), rows=nn.Embedding(5, 3, dtype=REAL)),
        tokens(2, 4),
        ("rows",),
    ),
    "slope": (Calls(slope, **two()), floats(2, 4), ("first", "second")),
    "complex slope": (
        Calls(lambda m, x: slope(m, torch.view_as_real(x).sum(-1)), **two()),
        floats(2, 4, dtype=COMPLEX),
    ),
    "slope of an image": (
        Calls(slope, first=nn.Conv2d(3, 4, 2, dtype=REAL), second=nn.ConvTranspose2d(4, 3, 2, dtype=REAL)),
        floats(2, 3, 4, 4),
    ),
    "saliency": (Calls(saliency, **two()), floats(2, 4)),
    "backward in a hook": (Calls(implicit, **two()), floats(2, 4)),
    "inner step": (Calls(inner_step, **two()), floats(2, 4)),
    "per sample": (Calls(per_sample, **two()), floats(2, 4)),
    "checkpoint": (
        Calls(lambda m, x: checkpoint(lambda z: m.second(m.first(z)), x, use_reentrant=False), **two()),
        floats(2, 4),
    ),
    "reentrant checkpoint": (
        Calls(lambda m, x: checkpoint(lambda z: m.second(m.first(z)), x * 1, use_reentrant=True), **two()),
        floats(2, 4),
    ),
    "low rank": (
        Calls(
            low_rank,
            base=nn.Linear(4, 3, dtype=REAL).requires_grad_(False),
            down=nn.Linear(4, 2, bias=False, dtype=REAL),
            up=nn.Linear(2, 3, bias=False, dtype=REAL),
        ),
        floats(2, 4),
        ("down", "up"),
    ),
    "spectral": (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3, dtype=REAL)), floats(2, 4), ()),
    "spectral, by a hook": (nn.utils.spectral_norm(nn.Linear(4, 3, dtype=REAL)), floats(2, 4), ()),
}


def gradients_of(module, draw, run):
    torch.manual_seed(1)
    random = []
    for _ in range(2):  # the second call, with other data
        x = draw()
        x.requires_grad_(x.dtype in (REAL, COMPLEX))
        y = module(x)
        run([y], [torch.cos(torch.arange(y.numel(), dtype=REAL)).reshape(y.shape).to(y.dtype)])
        random.append(x.grad)
    return random + [parameter.grad for parameter in module.parameters()]


def equal(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def in_two_parts(split, outputs, gradients):
    split.weight_gradient(split.input_gradient(outputs, gradients))


@pytest.mark.parametrize("name", CASES)
def test_each_rule_and_each_way_of_calling_a_layer(name):
    torch.manual_seed(0)
    module, draw, *deferred = CASES[name]
    module = copy.deepcopy(module)
    plain, whole = copy.deepcopy(module), copy.deepcopy(module)
    split = prepare_split(module)
    if deferred:
        assert split.report.deferred == deferred[0]
    expected = gradients_of(plain, draw, torch.autograd.backward)
    equal(gradients_of(module, draw, partial(in_two_parts, split)), expected)
    prepare_split(whole)
    equal(gradients_of(whole, draw, torch.autograd.backward), expected)  # a plain backward of a split module


def test_hooks_see_what_they_see_without_a_split():
    def told(module, run):
        seen = []

        def note(name):
            return lambda *values: seen.append((name, [v.detach().clone() for v in values if torch.is_tensor(v)]))

        layer = module.first
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 2,))
        layer.register_forward_hook(lambda _, inputs, output: output + 1)
        layer.register_full_backward_pre_hook(lambda _, gradients: note("before")(*gradients))
        layer.register_full_backward_hook(lambda _, to_inputs, gradients: note("after")(*to_inputs, *gradients))
        layer.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        module.second.weight.register_post_accumulate_grad_hook(lambda p: note("weight")(p.grad))
        return gradients_of(module, floats(2, 4), run), seen

    torch.manual_seed(0)
    plain = Calls(lambda m, x: F.linear(m.second(m.first(m.first(x))), m.first.weight), **two())
    module = copy.deepcopy(plain)
    expected, calls = told(plain, torch.autograd.backward)
    found, seen = told(module, partial(in_two_parts, prepare_split(module)))
    equal(found, expected)
    assert sorted(name for name, _ in seen) == sorted(name for name, _ in calls)
    for kind in ("before", "after", "weight"):
        mine, theirs = ([value for name, values in one if name == kind for value in values] for one in (seen, calls))
        equal(mine, theirs)


def test_a_layer_that_changes_after_the_split_is_computed_as_it_is():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4, dtype=REAL), nn.Linear(4, 4, dtype=REAL), nn.Linear(4, 4, dtype=REAL))
    module = copy.deepcopy(plain)
    split = prepare_split(module)
    for one in (plain, module):
        nn.utils.parametrize.register_parametrization(one[0], "weight", Scaled())
        one[1].weight = nn.Parameter(one[2].weight.detach() * 2)
        one[2].requires_grad_(False)
    expected = gradients_of(plain, floats(2, 4), torch.autograd.backward)
    equal(gradients_of(module, floats(2, 4), partial(in_two_parts, split)), expected)
