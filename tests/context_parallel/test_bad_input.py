"""Bad input: one clear error on every rank, before anything is sent that others would wait for."""

import re

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.context_parallel import (
    all_to_all_attention,
    average_gradients_,
    context_parallel,
    gather_sequence,
    ring_attention,
    scatter_sequence,
    zigzag_positions,
)

CONFIG = GPTConfig(vocab_size=7, context=12, num_layers=1, num_heads=2, hidden_size=4)


def heads(num_heads=2, length=4, dtype=torch.float32, size=4):
    return torch.ones(1, num_heads, length, size, dtype=dtype)


def same(function, *shapes, **options):
    made = [heads(**(shape if isinstance(shape, dict) else {})) for shape in shapes]
    return lambda: function(*made, **options)


def run_model(length, also=0, **options):
    """Run a model on so many tokens; rank 1 on some more."""

    def run():
        tokens = torch.zeros(1, length + also * (dist.get_rank() == 1), dtype=torch.int64)
        context_parallel(GPT(CONFIG), **options)(tokens)

    return run


def sparse():
    layer = nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    average_gradients_(layer)


def no_grad_on_one():
    model = context_parallel(GPT(CONFIG))
    with torch.set_grad_enabled(dist.get_rank() == 0):
        model(torch.zeros(1, 2, dtype=torch.int64))


BAD = {
    "sequence": (lambda: scatter_sequence(torch.ones(1, 10)), "10 cannot be cut.*multiple of 6, such as 6 or 12"),
    "no such dim": (lambda: scatter_sequence(torch.ones(3), dim=1), "dim 1 of a tensor of shape"),
    "odd parts": (lambda: gather_sequence(torch.ones(1, 3)), "sequence of 9"),
    "parts differ": (lambda: gather_sequence(torch.ones(1, 2 + 2 * dist.get_rank())), "ranks disagree on part"),
    "no such rank": (lambda: zigzag_positions(6, 3, 3), "rank 3 of 3"),
    "odd length, ring": (same(ring_attention, *[{"length": 3}] * 3), "sequence of 9"),
    "heads": (same(all_to_all_attention, {}, {}, {}), "2 heads cannot be dealt out to 3 ranks"),
    "key heads": (same(all_to_all_attention, {"num_heads": 6}, {}, {}), "key: 2 heads"),
    "shared heads": (same(ring_attention, {"num_heads": 3}, {}, {}), "2 key heads cannot be shared by 3"),
    "key and value": (same(ring_attention, {}, {}, {"length": 2}), "key and value alike"),
    "head size": (same(ring_attention, {}, {"size": 2}, {"size": 2}), "in their number of heads alone"),
    "dtypes": (same(ring_attention, {}, {"dtype": torch.float64}, {}), "one kind"),
    "integers": (same(ring_attention, *[{"dtype": torch.int64}] * 3), "floating-point"),
    "dimensions": (lambda: ring_attention(torch.ones(4), torch.ones(4), torch.ones(4)), "expected .batch"),
    "dropout": (same(ring_attention, {}, {}, {}, dropout=1.5), "dropout is 1.5"),
    "kind": (lambda: context_parallel(GPT(CONFIG), kind="star"), "kind is 'star'; choose one of ring, all_to_all"),
    "kinds differ": (lambda: context_parallel(GPT(CONFIG), kind=["ring", "star", "ring"][dist.get_rank()]), "disagree"),
    "no GPT": (lambda: context_parallel(nn.Linear(2, 2)), "expected a distlab.models.GPT, got Linear"),
    "twice": (lambda: context_parallel(context_parallel(GPT(CONFIG))), "ContextParallelAttention already"),
    "models differ": (lambda: context_parallel(GPT(GPTConfig(7, 12, 1, 2, 4 + 2 * dist.get_rank()))), "disagree on"),
    "model heads": (run_model(2, kind="all_to_all"), "2 heads cannot be dealt out to 3"),
    "too long": (run_model(6), "sequence of 18, which does not fit a context of 12"),
    "token counts": (run_model(2, also=2), "ranks disagree on batch"),
    "grad on one": (no_grad_on_one, "ranks disagree on batch"),
    "sparse": (sparse, "sparse gradient"),
}


@pytest.mark.on_ranks(3)
def test_bad_input_is_refused_on_every_rank():
    for name, (function, words) in BAD.items():
        text = message(function)
        assert text.startswith("ValueError: "), f"{name}: {text}"
        assert re.search(words, text), f"{name}: {text}"
