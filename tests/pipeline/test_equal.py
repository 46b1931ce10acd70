"""Every schedule trains like one process, repeats bit for bit, and does what its plan says, in its order."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from equal import Row, Task, assert_stages_equal, awkward_model, calls_of, train, train_in_stages
from torch import nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.pipeline import split_gpt, split_sequential
from distlab.plan import SCHEDULES, make_schedule, validate
from distlab.rng import generator

SIZES = [5, 7, 3, 6, 4, 8, 2, 7, 5]  # nothing here is even
MICROBATCHES = {2: 3, 3: 4, 4: 5}  # no multiple of the ranks
COSTS = {2: [1, 1, 1, 3], 3: [2, 2, 2, 6, 3, 3], 4: [2, 2, 4, 1, 1, 1, 1, 4]}  # so that stages get as many layers:
UNEVEN = {2: [3, 1], 3: [3, 1, 2], 4: [2, 1, 4, 1]}
NAMES = [name for name, family in SCHEDULES.items() if family.placement != "copies"]  # those hold a model twice
CONFIG = GPTConfig(vocab_size=13, context=5, num_layers=4, num_heads=1, hidden_size=4, tied=True)


def plan(name, num_ranks):
    return make_schedule(name, num_ranks, MICROBATCHES[num_ranks])


def layers(world_size, rank=0):
    torch.manual_seed(rank)
    sizes = SIZES[: 2 * world_size + 1]
    made = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, sizes[1:], strict=False)]
    made[1].append(nn.LayerNorm(sizes[2]))  # its gradients are made in I
    made[2][0].bias.requires_grad_(False)
    return nn.Sequential(*made).double()


def batch(world_size, step):
    num, draw = 3 * MICROBATCHES[world_size], generator(step, 0, "batch")
    return [torch.randn(num, SIZES[end], dtype=torch.float64, generator=draw) for end in (0, 2 * world_size)]


def split(world_size, model, num_stages):
    return split_sequential(model, num_stages, COSTS[world_size] if num_stages == world_size else None)


def message_bytes(schedule, world_size, rank):
    """Bytes that a rank sends in a step: each boundary's elements, for each micro-batch, in each direction."""
    counts = UNEVEN[world_size] if schedule.num_stages == world_size else [1] * (2 * world_size)
    home, total = list(schedule.home), 0
    for stage in range(schedule.num_stages - 1):
        if home[stage] != home[stage + 1]:
            features = SIZES[sum(counts[: stage + 1])]
            total += (rank in (home[stage], home[stage + 1])) * features * 3 * 8 * schedule.num_microbatches
    return total


@pytest.mark.equality("pipeline")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.on_ranks
def test_every_schedule_equals_one_process_and_its_plan(world_size):
    rank, task = dist.get_rank(), Task(partial(layers, world_size), partial(batch, world_size))
    rows = [Row(task, "sgd"), Row(task, "adam")]
    alone = [train(row) for row in rows]
    # Where the same order has two names (the automatic ones find ZB-H1's), it is run once.
    names = list({str(plan(name, world_size)): name for name in reversed(NAMES)}.values())
    states = {}
    for number, name in enumerate([*names, "zb_v, again", "interleaved, again"]):
        first = name.removesuffix(", again")
        number = names.index(first) % 2
        schedule = plan(first, world_size)
        pipeline, own, losses = train_in_stages(rows[number], schedule, split=partial(split, world_size))
        states[name] = assert_stages_equal(own, alone[number].state(), name)
        if rank == schedule.home[-1]:
            assert [loss.item() for loss in losses] == pytest.approx(alone[number].losses, rel=1e-12), name
        else:
            assert losses == [None] * 10, name
        sent = sum(
            num_bytes for op, num_bytes in calls_of(lambda p=pipeline: p.step(*batch(world_size, 0))) if op == "send"
        )
        assert sent == message_bytes(schedule, world_size, rank), name
        assert pipeline.peak_in_flight == validate(schedule).peak_in_flight[rank], name
        assert pipeline.order == [action for action in schedule.actions(rank) if action.kind in "FBIW"], name
        pipeline.close()
        assert all(torch.equal(value, states[first][key]) for key, value in states[name].items()), "repeats bit for bit"


def tokens(step):
    draw = generator(step, 0, "tokens")
    return [torch.randint(CONFIG.vocab_size, (8, CONFIG.context), generator=draw) for _ in range(2)]


def by_costs(model, num_stages):
    return split_gpt(model, num_stages, [2.0, 1, 1, 1, 1, 1] if num_stages < 4 else None)


@pytest.mark.equality("pipeline")
@pytest.mark.on_ranks(2)
def test_a_tied_gpt_equals_one_process():
    task = Task(partial(awkward_model, config=CONFIG), tokens, GPT.loss)
    for name, optimizer in (("one_f_one_b", "adam"), ("zb_h1", "sgd"), ("zb_v", "adam")):
        row = Row(task, optimizer)
        pipeline, own, _ = train_in_stages(row, make_schedule(name, 2, 4), split=by_costs)
        state = assert_stages_equal(own, train(row).state(), name)
        pipeline.close()
        copies = [None, None]
        dist.all_gather_object(copies, [state[n] for n in ("token_embedding.weight", "output.weight") if n in state])
        assert torch.equal(*sum(copies, [])), f"{name}: the copies are the same bits"
