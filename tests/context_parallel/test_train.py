"""A GPT on a sequence that is spread over ranks trains like one process on the whole of it."""

from dataclasses import replace
from functools import partial
from operator import methodcaller

import pytest
import torch
import torch.distributed as dist
from equal import Row, Task, Way, assert_rows_equal_one_process, awkward_model, calls_of, heard

from distlab.blocks.models import GPT, GPTConfig
from distlab.context_parallel import average_gradients_, context_parallel, gather_sequence, scatter_sequence
from distlab.recompute import recompute_blocks
from distlab.rng import generator

CONFIG = GPTConfig(vocab_size=29, context=30, num_layers=2, num_heads=12, hidden_size=24, tied=True)
SHORT = replace(CONFIG, num_layers=1)  # for 3 and 4 ranks, that share two cores and wait at each exchange
LENGTH = 24  # shorter than the context, a multiple of 2n for 1 to 4 ranks


def batch(step):
    draw = generator(step, 0, "tokens")
    return [torch.randint(CONFIG.vocab_size, (3, LENGTH), generator=draw) for _ in range(2)]


def in_context(kind, recomputed=False):
    def technique(model, make):
        optimizer = make(model.parameters())  # before the change: the parameters stay the same ones
        model = context_parallel(model, kind=kind)
        if recomputed:
            recompute_blocks(model)
        own_positions = lambda x, y: (scatter_sequence(x), scatter_sequence(y), 1.0)  # noqa: E731
        return Way(model, optimizer, lambda: average_gradients_(model), share=own_positions)

    return technique


def rows_for(world_size):
    config = CONFIG if world_size <= 2 else SHORT
    task = Task(partial(awkward_model, config=config), batch, GPT.loss)
    return {
        "ring": Row(task, "sgd", in_context("ring"), cut=methodcaller("split", 2)),
        "all to all": Row(task, "adam", in_context("all_to_all")),
        "ring, recomputed": Row(task, "adam", in_context("ring", recomputed=True)),
    }


@pytest.mark.equality("context_parallel")
@pytest.mark.soak_where(world_size=(1, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), rows_for(world_size))


@pytest.mark.on_ranks(3)
def test_gradients_are_averaged_in_one_sum_also_where_a_rank_has_none():
    """Gradients on rank 0 alone for one parameter, on no rank for a different one."""
    model, rank = awkward_model(0, config=SHORT), dist.get_rank()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    model.norm.bias.grad = torch.ones_like(model.norm.bias) if rank == 0 else None
    model.norm.weight.grad = None
    calls = calls_of(lambda: average_gradients_(model))
    count = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert calls == [("all_reduce", 8 * (sum(count) + len(count)))]
    assert model.norm.bias.grad[0].item() == pytest.approx(1 / 3)
    assert model.norm.weight.grad is None
    assert model.output.weight.grad[0, 0].item() == pytest.approx(2.0)


B, S, H = 2, 24, 24


def sends(calls):
    return [num_bytes for op, num_bytes in calls if op == "send"]


@pytest.mark.on_ranks(3)
def test_a_sequence_and_a_model_send_what_they_say():
    n, size = 3, 4 * B * S * H
    whole, part = torch.ones(B, S, H, requires_grad=True), torch.ones(B, S // n, H, requires_grad=True)
    scattered, calls = heard(lambda: scatter_sequence(whole))
    assert calls == []
    assert heard(scattered.sum().backward)[1] == [("all_gather", size // n)]
    joined, calls = heard(lambda: gather_sequence(part))
    assert sorted(calls) == [("all_gather", 40), ("all_gather", size // n)]
    assert heard(joined.sum().backward)[1] == []
    tokens, ring, forwards = torch.zeros(B, S, dtype=torch.long), 2 * (n - 1) * size // n, []  # of each block
    for check in (True, False):
        model, calls = heard(lambda check=check: context_parallel(GPT(CONFIG), kind="ring", check=check))
        parameters = sum(4 * parameter.numel() for parameter in model.parameters())
        assert sum(num_bytes for op, num_bytes in calls if op == "broadcast") == parameters
        inputs = scatter_sequence(tokens)
        loss, calls = heard(lambda model=model, inputs=inputs: GPT.loss(model(inputs), inputs))
        forwards.append(sends(calls))
        assert [call for call in calls if call[0] != "send"] == [("all_gather", 40)] * check
        assert sum(sends(calls)) == CONFIG.num_layers * ring
        assert sum(sends(heard(loss.backward)[1])) == CONFIG.num_layers * 2 * ring
    assert forwards[0] == forwards[1]
