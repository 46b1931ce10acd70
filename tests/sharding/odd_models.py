"""Small models that are not a plain chain of blocks, beside those of the zoo: what each does, its docstring says."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS = 6, 12


class Odd(nn.Module):
    """Linear layers in a list; those below change what they do."""

    runs_twice = True  # whether a second backward may run through a loss

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

    @staticmethod
    def loss(model, rows):
        return F.mse_loss(model(rows), rows.flip(-1))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(3, 3)  # gets no gradient

    def forward(self, *, x, scale=1.0):
        return {"y": (self.linear(x) * scale).tanh(), "constant": 3, "none": None}


class Shared(Odd):
    """A block used twice in a row and twice side by side; keyword arguments, dicts out."""

    def __init__(self):
        super().__init__(Scaled(), Scaled())

    def forward(self, x):
        first, second = self.blocks
        x = first(x=first(x=x)["y"], scale=2.0)["y"]
        return second(x=x)["y"] + second(x=x.tanh())["y"]


class Recomputed(Odd):
    """Blocks that torch's own checkpoint runs again in backward, hooks and all; both of its kinds."""

    def forward(self, x):
        x = checkpoint(self.blocks[0], x, use_reentrant=False).tanh()
        return checkpoint(self.blocks[2], checkpoint(self.blocks[1], x, use_reentrant=True), use_reentrant=False)


class Tied(Odd):
    """Two blocks that share a weight, and an order that changes from step to step."""

    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.blocks[3].weight = self.blocks[0].weight
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for index in (0, 1, 2, 3) if self.calls % 2 else (2, 0, 1, 3):
            x = self.blocks[index](x).tanh()
        return x


class Frozen(Odd):
    """Adapters beside frozen weights; one block is frozen as a whole, and inputs are changed in place."""

    def __init__(self):
        super().__init__(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Hardtanh(inplace=True), nn.Linear(WIDTH, WIDTH))
                for _ in range(3)
            ),
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
        )
        for parameter in [*self.blocks[1].parameters(), *self.blocks[2][0].parameters()]:
            parameter.requires_grad_(False)
        self.code = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        nearest = x @ self.code.detach()
        return x + (nearest - x).detach() + 0.1 * x @ self.code


class GradientPenalty(Odd):
    """A loss of gradients: backward runs twice through one graph."""

    runs_twice = False  # more often than that is too much

    @staticmethod
    def loss(model, rows):
        rows = rows.clone().requires_grad_()
        output = model(rows)
        (gradient,) = torch.autograd.grad(output.sum(), rows, create_graph=True)
        return F.mse_loss(output, rows.detach().flip(-1)) + gradient.square().mean()


class Normed(Odd):
    """Weights that are computed from parameters: by hooks and by parametrizations."""

    def __init__(self):
        super().__init__()
        nn.utils.spectral_norm(self.blocks[0])
        nn.utils.parametrizations.weight_norm(self.blocks[1])
        nn.utils.parametrizations.orthogonal(self.blocks[2])


class Listed(Odd):
    """Lists and dicts of parameters in the root; dicts of blocks in the list; a call with the parameters it has."""

    def __init__(self):
        super().__init__(*(nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH)}) for _ in range(2)))
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH))})

    def forward(self, x):
        for block, weight in zip(self.blocks, self.weights, strict=True):
            x = block["up"](x @ weight).tanh() + self.named["a"]
        last = self.blocks[0]["up"]
        return torch.func.functional_call(last, dict(last.named_parameters()), (x,))


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
    """Blocks that are called with dicts of lists, and answer with them; the loss looks at what the list holds, too."""

    def __init__(self):
        super().__init__(Container(), Container())

    def forward(self, x):
        info = {"scale": [2.0], "seen": []}
        for block in self.blocks:
            x = block(x, info)["x"][0]
        return x + info["seen"][0].sin()


class Box:
    """An object that hands out its tensor through an iterator: nothing outside can see it."""

    def __init__(self, made):
        self.made = iter([made])


class Boxed(nn.Linear):
    def forward(self, x):
        return Box(super().forward(x).tanh())


class Hiding(Odd):
    """Blocks and a model whose outputs cannot be looked into: iterators, functions."""

    def __init__(self):
        super().__init__(*(Boxed(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x):
        for block in self.blocks:
            x = next(block(x).made)
        return lambda: x

    @staticmethod
    def loss(model, rows):
        return F.mse_loss(model(rows)(), rows.flip(-1))


class Features(Odd):
    """The loss looks only at what an inner block made; the model's output has no part in it."""

    def __init__(self):
        super().__init__()
        self.before, self.seen = nn.Parameter(torch.full((WIDTH,), 1.3)), None

    def forward(self, x):
        x = x * self.before
        for index, block in enumerate(self.blocks):
            x = block(x).tanh()
            self.seen = x if index == 1 else self.seen
        return x

    @staticmethod
    def loss(model, rows):
        model(rows)
        return F.mse_loss(getattr(model, "module", model).seen, rows.flip(-1))


EQUAL = (
    Shared, Recomputed,
 Tied, Frozen, GradientPenalty, Normed, Listed, Nested, Hiding, Features
)  # fmt: skip


class ReadsOthers(Odd):
    """Computes with the weight of a block outside of it."""

    def forward(self, x):
        return super().forward(x) @ self.blocks[0].weight


class OfWeight(nn.Linear):
    def forward(self, x):
        return {"row": self.weight[0]}


class Returning(Odd):
    """A block that returns a part of its own weight."""

    def __init__(self):
        super().__init__(OfWeight(WIDTH, WIDTH))

    def forward(self, x):
        return x * self.blocks[0](x)["row"]


class MaxNorm(Odd):
    """An embedding that changes its own weight in forward."""

    def __init__(self):
        super().__init__(nn.Embedding(ROWS, WIDTH, max_norm=0.5))

    def forward(self, x):
        return x * self.blocks[0](torch.arange(len(x)))


REFUSED = {
    ReadsOthers: "blocks.0.weight (unit 'blocks.0') is not here now: its unit frees its parameters outside",
    Returning: "unit 'blocks.0' returns a parameter, or a part of one",
    MaxNorm: "unit 'blocks.0': its forward changed a parameter in place",
}
