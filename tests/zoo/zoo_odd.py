"""Odd models: each does one thing that people do and that a wrapper may not expect."""

import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CLASSES, WIDTH = 5, 8


class Odd(nn.Module):
    """Patches of an image through two blocks, which a subclass changes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(24, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images):
        x = self.embed(images.flatten(1).unflatten(1, (8, 24)))
        return self.head(self.body(x).mean(1))

    def body(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class TwoNames(Odd):
    """One block stands under two names."""

    def __init__(self):
        super().__init__()
        self.again = self.blocks[0]

    def body(self, x):
        return self.again(super().body(x))


class Scalar(Odd):
    """A parameter without dimensions, used by every block."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def body(self, x):
        return self.scale * super().body(self.scale * x)


class CachesMask(Odd):
    """Makes a mask at its first forward: one as an attribute, one as a buffer."""

    def body(self, x):
        if not hasattr(self, "mask"):
            self.mask = torch.ones(x.shape[1], 1, dtype=x.dtype)
            self.register_buffer("places", torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None], persistent=False)
        return super().body(x * self.mask + self.places)


class Penalised(Odd):
    """A penalty over `self.parameters()` inside forward."""

    def forward(self, images):
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().forward(images) + 0.01 * penalty


class BlockPenalty(Odd):
    """Each block adds a penalty over its own weights, and counts its calls in a list."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(WithPenalty() for _ in range(2))


class WithPenalty(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x):
        self.calls.append(len(x))
        return self.linear(x).tanh() + 0.1 * sum(p.square().mean() for p in self.parameters())


class Lora(Odd):
    """Small trained matrices beside frozen weights."""

    def __init__(self):
        super().__init__()
        for parameter in self.blocks.parameters():
            parameter.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(WIDTH, 2) * 0.3 for _ in self.blocks)
        self.up = nn.ParameterList(torch.zeros(2, WIDTH) for _ in self.blocks)

    def body(self, x):
        for block, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = x + block(x) + x @ down @ up
        return x


class Complex(Odd):
    """Filters in the frequency domain: complex parameters."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, WIDTH, dtype=torch.complex128))

    def body(self, x):
        return super().body(torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.filter, n=x.shape[1], dim=1))


class Spectral(Odd):
    """Spectral and weight norm: parametrizations, one of which changes a buffer at each forward."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.blocks[0][0])
        nn.utils.parametrizations.weight_norm(self.blocks[1][0])


class Recomputes(Odd):
    """torch's own checkpoint around each block."""

    def body(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class OwnFunction(Odd):
    """An autograd function of its own, and a hook on a tensor."""

    def body(self, x):
        y = Square.apply(super().body(x))
        y.register_hook(lambda gradient: 0.5 * gradient)
        return y


class Nested(Odd):
    """Blocks that take keyword arguments and return a dict with a dtype, a string and nested lists of tensors."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NestedBlock() for _ in range(2))

    def body(self, x):
        for block in self.blocks:
            out = block(x=x, options={"scale": [x.new_ones(1), None]})
            x = x + out["states"][0][1]
        return x


class NestedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x, options):
        y = self.linear(x).tanh() * options["scale"][0]
        return {"states": [(None, y)], "dtype": x.dtype, "name": "nested"}


class SometimesUnused(Odd):
    """Some blocks are left out at some steps; all ranks leave out the same ones."""

    def __init__(self):
        super().__init__()
        self.step = 0

    def body(self, x):
        self.step += 1
        return x + self.blocks[self.step % 2](x)


class InList(Odd):
    """A parameter that hides in a plain list: no optimizer finds it."""

    def __init__(self):
        super().__init__()
        self.hidden = [nn.Parameter(torch.ones(WIDTH))]

    def body(self, x):
        return super().body(x) * self.hidden[0].to(x.dtype)


class GradientInside(Odd):
    """An energy: forward itself asks for a gradient, and backward for the gradient of that one."""

    def body(self, x):
        (force,) = torch.autograd.grad(super().body(x).square().sum(), x, create_graph=True)
        return x - 0.1 * force


class Mapped(Odd):
    """Blocks inside a transform of torch.func."""

    def body(self, x):
        return torch.vmap(super().body)(x)


class Threads(Odd):
    """Two branches in two threads."""

    def body(self, x):
        with ThreadPoolExecutor(2) as pool:
            return x + sum(pool.map(lambda block: block(x), self.blocks))


class Scripted(Odd):
    """A block that torch.jit compiled."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.blocks[0] = torch.jit.script(self.blocks[0])


class Clamped(Odd):
    """Weights that forward keeps small."""

    def body(self, x):
        for block in self.blocks:
            block[0].weight.data.clamp_(-0.2, 0.2)
        return super().body(x)


def with_gradient_penalty(call, images, targets):
    """A loss that asks for a gradient of a gradient."""
    images = images.clone().requires_grad_()
    logits = call(images)
    (slope,) = torch.autograd.grad(logits.square().sum(), images, create_graph=True)
    return F.cross_entropy(logits, targets) + 0.1 * slope.square().mean()
