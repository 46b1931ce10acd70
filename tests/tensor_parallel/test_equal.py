"""A split GPT trains like one process, however it is split, and repeats bit for bit."""

from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist
from equal import Row, Task, Way, assert_rows_equal_one_process, awkward_model, corpus

from distlab import tensor_parallel
from distlab.blocks.models import GPT, GPTConfig
from distlab.recompute import recompute_blocks
from distlab.tensor_parallel import clip_tensor_parallel_, full_state_dict, parallelize

VOCABULARY = 257
CONFIG = GPTConfig(vocab_size=VOCABULARY, context=13, num_layers=2, num_heads=12, hidden_size=24, tied=True)
SHORT = replace(CONFIG, num_layers=1)  # for 3 and 4 ranks, that share two cores and wait at each exchange
UNTIED = replace(SHORT, hidden_size=12, tied=False)


def batch(step):
    """Return three samples of 12 bytes: 2, 3 and 4 ranks divide the length, and it is shorter than the context."""
    return corpus().batch(step, 3)


def loss(logits, targets):
    if dist.is_initialized():
        return tensor_parallel.vocabulary_parallel_cross_entropy(logits, targets, vocab_size=VOCABULARY)
    return GPT.loss(logits, targets)


def split(recomputed=False, **options):
    def technique(model, make):
        made = parallelize(model, dist.group.WORLD, **options)
        if recomputed:
            recompute_blocks(made)
        clip = partial(clip_tensor_parallel_, made)
        way = Way(made, make(made.parameters()), share=lambda x, y: (x, y, 1.0), clip=clip)
        way.state = partial(full_state_dict, made)
        return way

    return technique


def row(optimizer, config=CONFIG, clip=None, **options):
    return Row(Task(partial(awkward_model, config=config), batch, loss), optimizer, split(**options), clip=clip)


def two(config):
    """The first row is run a second time."""
    clipped = row("sgd", config, 0.05)
    return {"adam, sequence parallel": row("adam", config, sequence_parallel=True), "sgd, clipped": clipped}


ROWS = {
    1: two(CONFIG),
    2: two(CONFIG)
    | {"in parts, clipped": row("sgd", clip=0.05, num_parts=3), "recomputed": row("adam", recomputed=True)},
    3: two(SHORT) | {"untied": row("sgd", UNTIED, sequence_parallel=True)},
    4: two(SHORT),
}


@pytest.mark.equality("tensor_parallel")
@pytest.mark.soak_where(world_size=(1, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process_and_repeat(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), ROWS[world_size])
