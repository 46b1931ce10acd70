"""A GPT with everything that makes a mesh hard, trained on a mesh and by one process, which tests share."""

from dataclasses import replace
from functools import cache, partial

import torch
import torch.distributed as dist
from equal import Row, Task, difference, trained_alone

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.expert_parallel import balance_loss, mix_experts
from distlab.hybrid import Hybrid
from distlab.rng import generator

# An odd vocabulary, tied weights, a context that is longer than the sequences.
CONFIG = GPTConfig(vocab_size=257, context=11, num_layers=2, num_heads=4, hidden_size=8, tied=True)
UNTIED, DEEP = replace(CONFIG, tied=False), replace(CONFIG, num_layers=4)
DEEP_UNTIED = replace(DEEP, tied=False)
LENGTH, BATCH, MAX_NORM = 8, 8, 0.25
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def make_model(seed, *, experts=0, config=CONFIG):
    """Make a model with other weights for each seed, biases that are not zero, and a frozen parameter."""
    model = GPT(config, generator(0, seed, "weights"))
    if experts:
        mix_experts(model, experts, generator(0, seed, "experts"))
    model = model.double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(std=0.3, generator=generator(0, seed, name))
    model.blocks[0].feed_forward_norm.bias.requires_grad_(False)
    return model


@cache
def corpus():
    return ByteCorpus(python_documentation(), LENGTH)


def batch_of(step):
    return corpus().batch(step, BATCH, seed=1)


def make_hybrid(plan, optimizer="sgd", *, experts=0, balance=0.0, config=CONFIG, order=None):
    """Run on each rank: a mesh whose ranks brought different weights."""
    model = make_model(dist.get_rank(), experts=experts, config=config)
    options = {} if order is None else {"order": order}
    return Hybrid(model, plan, OPTIMIZERS[optimizer], balance=balance, **options)


def train(plan, optimizer="sgd", *, steps=3, **options):
    """Run on each rank: return the whole state, losses and norms before clipping."""
    hybrid = make_hybrid(plan, optimizer, **options)
    losses, norms = [], []
    for step in range(steps):
        hybrid.zero_grad()
        losses.append(hybrid.step(*batch_of(step)).item())
        norms.append(hybrid.clip_gradients_(MAX_NORM).item())
        hybrid.update()
    state = hybrid.full_state_dict()
    hybrid.close()
    return state, losses, norms


@cache
def train_alone(optimizer="sgd", *, steps=3, balance=0.0, order=None, **options):
    """Do the same in one process, on whole batches."""
    more = (lambda model: balance * balance_loss(model)) if balance else None
    task = Task(partial(make_model, **options), batch_of, GPT.loss, more)
    state, norms, losses = trained_alone(Row(task, OPTIMIZERS[optimizer], clip=MAX_NORM), steps)
    return state, losses, norms


def assert_equal_to_one_process(results, expected, name=""):
    state, losses, norms = expected
    for rank, (found, found_losses, found_norms) in enumerate(results):
        assert difference(found, state) <= 1e-10, (name, rank)
        assert max(abs(a - b) for a, b in zip(found_losses, losses, strict=True)) <= 1e-10, (name, rank)
        assert max(abs(a - b) for a, b in zip(found_norms, norms, strict=True)) <= 1e-10, (name, rank)
        assert found_losses == results[0][1], f"{name}: ranks were told different losses"
        assert found_norms == results[0][2], f"{name}: ranks scale by different numbers"
        assert difference(found, results[0][0]) == 0.0, f"{name}: ranks differ"
