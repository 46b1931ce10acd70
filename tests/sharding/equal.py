"""What both equality tables share: a model that makes it hard, its data, and how far two results are apart."""

from __future__ import annotations

import torch

from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig
from distlab.rng import generator

BATCH_SIZE = 7  # no world size above 1 divides it
CONFIG = GPTConfig(vocab_size=257, context=12, num_layers=3, num_heads=2, hidden_size=24, tied=True)
CORPUS = ByteCorpus(python_documentation(), CONFIG.context)


def awkward_model(rank, dtype=torch.float64):
    """Odd vocabulary, tied weight, frozen parameters, biases not zero, other weights on every rank."""
    model = GPT(CONFIG, generator(0, rank, "weights")).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1, generator=generator(0, rank, name))
    model.blocks[0].feed_forward.widen.bias.requires_grad_(False)
    model.blocks[1].feed_forward.widen.weight.requires_grad_(False)  # what its inputs' gradient needs
    return model


def finals(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
