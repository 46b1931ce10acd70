"""I and W together make the gradients of one full backward pass, on any module, and hold only what W needs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from distlab.blocks.models import GPT, Block, GPTConfig
from distlab.pipeline.backward.two_parts import LinearPlainly, full_backward, prepare_split

CONFIG = GPTConfig(vocab_size=17, context=7, num_layers=2, num_heads=2, hidden_size=12, tied=True)


class Awkward(nn.Module):
    """Shares a Linear with a second call, ties a weight to a layer without a rule, freezes some, bends in place."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6, padding_idx=3)
        self.twice = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.frozen_weight = nn.Linear(6, 6)
        self.frozen_weight.weight.requires_grad_(False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.bend = nn.ReLU(inplace=True)
        self.own = nn.Parameter(torch.randn(6))
        self.unused = nn.Linear(2, 2)
        self.bilinear = nn.Bilinear(6, 6, 4)
        self.tied_to_bilinear = nn.Linear(6, 4)
        self.tied_to_bilinear.bias = self.bilinear.bias
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.bend(self.twice(self.embedding(tokens)))
        x = self.norm(x + self.twice(x)) * self.own
        x = self.frozen(self.bend(self.frozen_weight(x)))
        return self.output(x), {"more": self.bilinear(x, x) + self.tied_to_bilinear(x)}


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


def tensors_of(value):
    return [value] if isinstance(value, torch.Tensor) else [value[0], *value[1].values()]


def make(name):
    """Return a float64 module and a function that draws its input."""
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(CONFIG).double(), lambda: torch.randint(0, 17, (3, 7))
    if name == "awkward":
        return Awkward().double(), lambda: torch.randint(0, 11, (3, 5))
    if name == "blocks":
        return nn.Sequential(Block(CONFIG), Block(CONFIG)).double(), lambda: torch.randn(3, 7, 12).double()
    return convolutions().double(), lambda: torch.randn(2, 3, 8, 8).double()


def gradients(module):
    return {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


def same(one, other, tolerance=1e-12):
    assert one.keys() == other.keys()
    for name, mine in one.items():
        theirs = other[name]
        assert (mine is None) == (theirs is None), name
        assert mine is None or (mine - theirs).abs().max() <= tolerance * max(1.0, theirs.abs().max()), name


@pytest.mark.parametrize("name", ["gpt", "awkward", "blocks", "convolutions"])
def test_two_parts_equal_one_backward(name):
    module, draw = make(name)
    oracle = copy.deepcopy(module)
    split = prepare_split(module)
    inputs = [draw() for _ in range(3)]
    with torch.no_grad():
        assert all(map(torch.equal, tensors_of(module(inputs[0])), tensors_of(oracle(inputs[0]))))
    wants = inputs[0].is_floating_point()
    theirs = [x.clone().requires_grad_(wants) for x in inputs]
    mine = [x.clone().requires_grad_(wants) for x in inputs]
    for x in theirs:
        outputs = tensors_of(oracle(x))
        torch.autograd.backward([y.square().sum() for y in outputs])
    forwards = [tensors_of(module(x)) for x in mine]  # several forward passes before the first backward
    works = []
    for index in (1, 0):
        outputs = forwards[index]
        before = gradients(module)
        works.append(split.input_gradient(outputs, [2 * y.detach() for y in outputs]))
        for layer in split.report.deferred:  # none of their gradients has moved
            changed = [n for n, p in module.get_submodule(layer).named_parameters(recurse=False, prefix=layer)]
            same({n: gradients(module).get(n) for n in changed}, {n: before.get(n) for n in changed}, 0.0)
        assert works[-1].num_bytes > 0
    for work in works:
        split.weight_gradient(work)
        assert work.num_bytes == 0, "W lets go of what I kept"
    split.full_backward(forwards[2], [2 * y.detach() for y in forwards[2]])
    same(gradients(module), gradients(oracle))
    for x, y in zip(mine, theirs, strict=True):
        same({"x": x.grad}, {"x": y.grad})
    split.close()
    assert not any("forward" in vars(layer) for layer in module.modules())


def test_the_report_names_who_waits_and_who_does_not():
    module, _ = make("awkward")
    report = prepare_split(module).report
    assert report.deferred == ("embedding", "twice", "frozen_weight", "unused", "output")
    reasons = dict(report.kept)
    assert reasons.keys() == {"", "norm", "bilinear", "tied_to_bilinear"}
    assert reasons["tied_to_bilinear"] == "shares a parameter with bilinear"
    assert "in I: norm: " in str(report)
    assert dict(prepare_split(make("convolutions")[0]).report.kept).keys() == {"2", "4"}
    with pytest.raises(ValueError, match="in two parts already"):
        prepare_split(module)
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert prepare_split(linear).report.deferred == ()


def pruned():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2)).double()
    prune.l1_unstructured(module[0], "bias", 0.5)
    prune.l1_unstructured(module[2], "weight", 0.5)
    return module


def test_a_layer_whose_bias_or_weight_pruning_makes_gives_all_gradients():
    module, oracle = pruned(), pruned()
    split, x = prepare_split(module), torch.randn(5, 3, dtype=torch.float64)
    assert split.report.deferred == ("3",)
    y = module(x)
    split.full_backward([y], [torch.ones_like(y)])
    oracle(x).sum().backward()
    same(gradients(module), gradients(oracle))


def test_autocast_gives_the_same_types_and_nearly_the_same_numbers():
    module, draw = make("gpt")
    module.float()
    oracle = copy.deepcopy(module)
    split = prepare_split(module)
    x = draw()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = module(x), oracle(x)
    assert torch.equal(y, expected)
    assert y.dtype == torch.bfloat16
    split.weight_gradient(split.input_gradient([y], [torch.ones_like(y)]))
    expected.sum().backward()
    same(gradients(module), gradients(oracle), 0.02)


def test_what_waits_is_each_layers_input_and_the_gradient_of_its_output():
    layer = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    split = prepare_split(layer)
    y = layer(torch.randn(4, 5).double())
    work = split.input_gradient([y], [torch.ones_like(y)])
    assert work.num_bytes == 8 * 4 * (5 + 7 + 7 + 3)


def test_outputs_that_nobody_used_are_passed_over():
    x = torch.randn(3, requires_grad=True)
    full_backward([x * 2, x * 3, torch.zeros(3)], [torch.ones(3), None, None])
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_the_plain_way_on_one_screen():
    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    notes = []
    LinearPlainly.apply(x, w, notes).square().sum().backward()
    assert w.grad is None
    expected = torch.autograd.grad((x @ w.T).square().sum(), (x, w))
    assert torch.allclose(x.grad, expected[0])
    assert torch.allclose(sum(g.T @ kept for kept, g in notes), expected[1])
