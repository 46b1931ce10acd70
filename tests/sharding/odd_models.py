"""Small models that do odd things with their parameters: compute them, detach them, change inputs in place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from language_models import VOCABULARY, WIDTH, series, tokens
from torch import nn


class Odd(nn.Module):
    """Linear layers in a list; those below change what they do."""

    batch = staticmethod(series)

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

    @classmethod
    def loss(cls, model, rows):
        return F.mse_loss(model(rows), rows.flip(-1))


class GradientPenalty(Odd):
    """A loss of gradients: backward runs twice through one graph."""

    @classmethod
    def loss(cls, model, rows):
        rows = rows.clone().requires_grad_()
        output = model(rows)
        (gradient,) = torch.autograd.grad(output.sum(), rows, create_graph=True)
        return F.mse_loss(output, rows.detach().flip(-1)) + gradient.square().mean()


class InPlace(Odd):
    """Changes inputs in place, also views; one block is frozen, one parameter is detached."""

    def __init__(self):
        super().__init__(
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
            nn.Sequential(nn.Hardtanh(inplace=True), nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
        )
        self.code = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        nearest = x @ self.code.detach()
        return x + (nearest - x).detach() + 0.1 * nearest + 0.1 * x @ self.code


class Normed(Odd):
    """Weights that are computed from parameters: by hooks and by parametrizations."""

    def __init__(self):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        nn.utils.spectral_norm(layers[0])
        nn.utils.parametrizations.weight_norm(layers[1])
        nn.utils.parametrizations.orthogonal(layers[2])
        super().__init__(*layers)


class Listed(Odd):
    """Lists and dicts of parameters, in the root; a call with other values of the same parameters."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x):
        for block, weight in zip(self.blocks, self.weights, strict=True):
            x = block(x @ weight).tanh() + self.named["a"]
        return torch.func.functional_call(self.blocks[0], dict(self.blocks[0].named_parameters()), (x,))


class Container(nn.Module):
    """Adds to the list that it is given and hands on the dict."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, info):
        info["seen"].append(self.layer(x) * self.gain)
        return {"x": (info["seen"][-1] * info["scale"][0],), "info": info}


class Nested(Odd):
    """Blocks that are called with dicts of lists, and answer with them."""

    def __init__(self):
        super().__init__(Container(), Container())

    def forward(self, x):
        for block in self.blocks:
            x = block(x, {"scale": [2.0], "seen": []})["x"][0]
        return x


ODD = [GradientPenalty, InPlace, Normed, Listed, Nested]


class FastWeights(Odd):
    """Calls a block with weights of its own making."""

    def forward(self, x):
        block = self.blocks[1]
        fast = {name: parameter * 0.9 for name, parameter in block.named_parameters()}
        return torch.func.functional_call(block, fast, (self.blocks[0](x),))


class ReadsOthers(Odd):
    """A root that computes with the weight of a block."""

    def forward(self, x):
        return super().forward(x) @ self.blocks[0].weight


class Returning(Odd):
    """A block that returns its own weight."""

    def __init__(self):
        super().__init__(*(OfWeight(WIDTH, WIDTH) for _ in range(2)))

    def forward(self, x):
        return x @ self.blocks[0](x)


class OfWeight(nn.Linear):
    def forward(self, x):
        return self.weight


class MaxNorm(Odd):
    """An embedding that changes its own weight in forward."""

    batch = staticmethod(tokens)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, max_norm=0.5)

    def forward(self, ids):
        return super().forward(self.embed(ids))

    @classmethod
    def loss(cls, model, rows):
        return model(rows).square().mean()
