"""LoRA, and small models that do one thing each which some technique refuses."""

import torch
import torch.nn.functional as F
from torch import nn

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


class Mapped(Odd):
    """Blocks inside a transform of torch.func."""

    def body(self, x):
        return torch.vmap(super().body)(x)


class MadeInForward(Odd):
    """A layer that the first forward makes."""

    def body(self, x):
        x = super().body(x)
        if not hasattr(self, "late"):
            self.late = nn.Linear(WIDTH, WIDTH).double()
        return self.late(x)


class Overlap(Odd):
    """Two parameters with the same memory, which torch counts as two."""

    def __init__(self):
        super().__init__()
        self.blocks[1][0].weight.data = self.blocks[0][0].weight.data

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.blocks[1][0].weight.data = self.blocks[0][0].weight.data
        return self


def two_backwards(call, images, targets):
    """A loss whose graph is used twice: backward runs here too, and keeps the graph."""
    loss = F.cross_entropy(call(images), targets)
    (0.5 * loss).backward(retain_graph=True)
    return 0.5 * loss


class ParameterHooks(Odd):
    """Hooks that change gradients on their way to parameters."""

    def __init__(self):
        super().__init__()
        self.blocks[0][0].weight.register_hook(lambda gradient: 0.5 * gradient)
        self.head.bias.register_hook(lambda gradient: 2 * gradient)


class Hides(Odd):
    """`named_parameters()`, and so `parameters()`, leaves the embedding out."""

    def named_parameters(self, *args, **options):
        return ((n, p) for n, p in super().named_parameters(*args, **options) if not n.startswith("embed"))
