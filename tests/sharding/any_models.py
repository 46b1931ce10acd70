"""Small models of the kinds that people bring: written here, each in the manner of a well-known family.

Every model has `batch(step)`, rows of data that ranks share out, and `loss(model, rows)`, in which `model` is the
module or what wraps it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from language_models import ROWS, WIDTH, Decoder, EncoderDecoder, Experts, Translator, series
from torch import nn

from distlab.rng import generator


def images(step):
    return torch.randn(ROWS, 3, 8, 8, dtype=torch.float64, generator=generator(step, 0, "images"))


class InvertedResidual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1, bias=False),
            nn.GroupNorm(2, 2 * width),
            nn.ReLU6(inplace=True),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width),
            nn.Hardswish(inplace=True),
            nn.Conv2d(2 * width, width, 1),
        )
        self.gamma = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x):
        return x + self.gamma * self.body(x)


class Convolutions(nn.Module):
    """In the manner of MobileNet and ConvNeXt: changes in place, depthwise convolutions, a scale per layer."""

    batch = staticmethod(images)

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), *(InvertedResidual(4) for _ in range(2))
        )
        self.head = nn.Sequential(nn.Flatten(), nn.LayerNorm(256), nn.Linear(256, 3))

    def forward(self, x):
        return self.head(self.features(x))

    @staticmethod
    def loss(model, rows):
        return F.cross_entropy(model(rows), rows.mean((2, 3)).argmax(1))


class Windows(nn.Module):
    """In the manner of ViT and Swin: parameters of the root's own, a table of biases, a method for features."""

    batch = staticmethod(images)

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, 2)
        self.class_token, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True) for _ in range(2))
        )
        self.table = nn.Parameter(torch.randn(9, 3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward_features(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.places
        return self.norm(self.blocks(x))

    def forward_head(self, features):
        return self.head(features[:, 0]) + self.table[torch.arange(3) * 2].sum(0)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))

    @staticmethod
    def loss(model, rows):
        return F.cross_entropy(model(rows), rows.mean((2, 3)).argmax(1))


class Recurrent(nn.Module):
    """LSTM and GRU, in both directions, with states that come back."""

    batch = staticmethod(series)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True),
                nn.GRU(2 * WIDTH, WIDTH, batch_first=True),
            ]
        )
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x):
        x, (h, _) = self.layers[0](x)
        x, last = self.layers[1](x)
        return self.cell(last[0])[0] + h.mean(0), x

    @staticmethod
    def loss(model, rows):
        last, every = model(rows)
        return F.mse_loss(every, rows) + last.square().mean()


class Box:
    """An object that hands out its tensor through an iterator: nothing outside can see it."""

    def __init__(self, made):
        self.made = iter([made])


class Hiding(nn.Module):
    """Blocks whose outputs cannot be looked into: iterators, functions."""

    batch = staticmethod(series)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Wrapped() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = next(block(x).made)
        return lambda: x

    @staticmethod
    def loss(model, rows):
        return F.mse_loss(model(rows)(), rows.flip(-1))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x):
        return Box(self.linear(x).tanh() * self.scale)


class Features(nn.Module):
    """The loss looks only at what an inner block made; the model's output has no part in it."""

    batch = staticmethod(series)

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.before = nn.Parameter(torch.full((WIDTH,), 1.3))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.seen = None

    def forward(self, x):
        x = (self.first(x) * self.before).tanh()
        for index, block in enumerate(self.blocks):
            x = block(x).tanh()
            if index == 1:
                self.seen = x
        return x

    @staticmethod
    def loss(model, rows):
        model(rows)
        module = model if isinstance(model, Features) else getattr(model, "module", model)
        return F.mse_loss(module.seen, rows.flip(-1))


MODELS = [
    Decoder,
    EncoderDecoder,
    Experts,
    Convolutions,
    Windows,
    Recurrent,
    Translator,
    Hiding,
    Features,
]
