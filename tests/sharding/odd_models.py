"""Small models that are not a plain chain of blocks, beside those of the zoo: what each does, its docstring says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from distlab.rng import generator
from distlab.sharding import FullyShard

WIDTH, ROWS, STEPS = 6, 12, 4


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Odd(nn.Module):
    """Linear layers in a list; those below change what they do."""

    runs_twice = True  # whether a second backward may run through a loss

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [linear() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x

    @staticmethod
    def loss(model, rows):
        return F.mse_loss(model(rows), rows.flip(-1))


def train(make, *, sharded, **options):
    """Return all parameters after some steps, in the second of which backward runs twice, and an output."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if sharded else (0, 1)
    torch.manual_seed(rank)
    module = make().double()
    model = FullyShard(module, **options) if sharded else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.randn(STEPS, ROWS, WIDTH, dtype=torch.float64, generator=generator(0, 0, "data"))
    for step, rows in enumerate(data):
        optimizer.zero_grad()
        loss = make.loss(model, rows[rank::world_size])
        if step == 1 and make.runs_twice:
            loss.backward(retain_graph=True)
        loss.backward()
        if sharded:
            model.synchronize()
        optimizer.step()
    with torch.no_grad():
        output = make.loss(model, data[0]) if make.loss.__qualname__ == "Odd.loss" else torch.zeros(())
    if not sharded:
        return {"output": output, **{name: p.detach() for name, p in module.named_parameters()}}
    model.free_finished(root=True)
    assert not any(unit.buffer.untyped_storage().nbytes() for unit in model.units)
    with model.summon() as whole:
        return {"output": output, **{name: p.detach().clone() for name, p in whole.named_parameters()}}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()
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
        super().__init__(*(linear() for _ in range(4)))
        self.blocks[3].weight, self.calls = self.blocks[0].weight, 0

    def forward(self, x):
        self.calls += 1
        for index in (0, 1, 2, 3) if self.calls % 2 else (2, 0, 1, 3):
            x = self.blocks[index](x).tanh()
        return x


class Frozen(Odd):
    """Adapters beside frozen weights; one block is frozen as a whole, and inputs are changed in place."""

    def __init__(self):
        blocks = [nn.Sequential(linear(), nn.Hardtanh(inplace=True), linear()) for _ in range(3)]
        super().__init__(*blocks, nn.Sequential(nn.ReLU(inplace=True), linear()))
        for parameter in [*self.blocks[1].parameters(), *self.blocks[2][0].parameters()]:
            parameter.requires_grad_(False)
        self.code = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        nearest = x @ self.code.detach()
        return x + (nearest - x).detach() + 0.1 * x @ self.code


class FrozenLater(Odd):
    """Parameters that are frozen in some passes, as adapters are that are switched off."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.blocks[1].requires_grad_(self.calls % 3 > 0)
        self.blocks[2].bias.requires_grad = self.calls % 2 > 0
        return super().forward(x)


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


class Boxed(nn.Linear):
    """Hands out its tensor through an iterator: nothing outside can see it."""

    def forward(self, x):
        return iter([super().forward(x).tanh()])


class Hiding(Odd):
    """Blocks and a model whose outputs cannot be looked into: iterators, functions."""

    def __init__(self):
        super().__init__(*(Boxed(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x):
        for block in self.blocks:
            x = next(block(x))
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


class Penalised(nn.Linear):
    """Keeps a penalty of its own weight, of a value that it makes after its output or before."""

    comes_last = True

    def forward(self, x):
        made = super().forward(x) if self.comes_last else None
        self.penalty = ((self.weight @ self.weight.T).tanh() @ self.weight).square().mean()
        return super().forward(x) if made is None else made


class Penalties(Odd):
    """Penalties that no output leads to: blocks keep them in attributes."""

    kind = Penalised

    def __init__(self):
        super().__init__(*(self.kind(WIDTH, WIDTH) for _ in range(3)))

    @staticmethod
    def loss(model, rows):
        fit = F.mse_loss(model(rows), rows.flip(-1))
        return fit + sum(block.penalty for block in getattr(model, "module", model).blocks)


EQUAL = (Shared, Recomputed, Tied, Frozen, GradientPenalty, Normed, Hiding, Features, Penalties, FrozenLater)


class ReadsOthers(Odd):
    """Computes with the weight of a block outside of it."""

    def forward(self, x):
        return super().forward(x) @ self.blocks[0].weight


class OfWeight(nn.Linear):
    def forward(self, x):
        return {"row": self.weight[0]}


class Growing(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(1.1)
        return super().forward(x)


class InPlace(Odd):
    """A block that changes its own weight in forward, as an embedding with max_norm does."""

    def __init__(self):
        super().__init__(Growing(WIDTH, WIDTH))


class Returning(Odd):
    """A block that returns a part of its own weight."""

    def __init__(self):
        super().__init__(OfWeight(WIDTH, WIDTH))

    def forward(self, x):
        return x * self.blocks[0](x)["row"]


class Threads(Odd):
    """Blocks in threads."""

    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda block: block(x), self.blocks))


class Functional(Odd):
    """A block that is called with values which forward made."""

    def forward(self, x):
        values = {name: 0.9 * value for name, value in self.blocks[0].named_parameters()}
        return torch.func.functional_call(self.blocks[0], values, (x,))


class Early(Penalised):
    comes_last = False


class PenaltiesAlone(Penalties):
    """Backward through penalties alone, made before the outputs: no gradient of an output gathers their units."""

    kind = Early

    @staticmethod
    def loss(model, rows):
        model(rows)
        return sum(block.penalty for block in getattr(model, "module", model).blocks)


REFUSED = {
    PenaltiesAlone: "is at version 1; expected version 0 instead",
    Threads: "is called in a different thread than its model",
    Functional: "blocks.0.weight (unit 'blocks.0') is not here now",
    ReadsOthers: "blocks.0.weight (unit 'blocks.0') is not here now: its unit frees its parameters outside",
    Returning: "unit 'blocks.0' returns a parameter, or a part of one",
    InPlace: "unit 'blocks.0': its forward changed a parameter in place",
}
