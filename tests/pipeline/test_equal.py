"""Every schedule trains like one process, repeats bit for bit, does what its plan says in its order, and sends that."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from equal import Row, Task, assert_stages_equal, awkward_model, train, train_in_stages
from torch import nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded
from distlab.pipeline import Pipeline, StageState, TiedParameter, split_gpt, split_sequential
from distlab.pipeline.faults import gather_numbers, raise_together, refuse_together
from distlab.pipeline.model.tied import TiedGradients
from distlab.pipeline.plain import plain_step
from distlab.plan import SCHEDULES, gpipe, make_schedule, validate
from distlab.rng import generator

SIZES = [5, 7, 3, 6, 4, 8, 2, 7, 5]  # nothing here is even
MICROBATCHES = {2: 3, 3: 4, 4: 5}  # no multiple of the ranks
COSTS = {2: [1, 1, 1, 3], 3: [2, 2, 2, 6, 3, 3], 4: [2, 2, 4, 1, 1, 1, 1, 4]}  # layers that no split shares evenly
NAMES = [name for name, family in SCHEDULES.items() if family.placement != "copies"]  # those hold a model twice
CONFIG = GPTConfig(vocab_size=13, context=5, num_layers=4, num_heads=1, hidden_size=4, tied=True)


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


@pytest.mark.equality("pipeline")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.on_ranks
def test_every_schedule_equals_one_process_and_its_plan(world_size):
    rank, task = dist.get_rank(), Task(partial(layers, world_size), partial(batch, world_size))
    rows = [Row(task, "sgd"), Row(task, "adam")]
    alone = [train(row) for row in rows]
    # Where the same order has two names (the automatic ones find ZB-H1's), it is run once.
    plans = {name: make_schedule(name, world_size, MICROBATCHES[world_size]) for name in NAMES}
    names = list({str(plan): name for name, plan in reversed(plans.items())}.values())
    states = {}
    for number, name in enumerate([*names, "zb_v, again", "interleaved, again"]):
        first = name.removesuffix(", again")
        number = names.index(first) % 2
        schedule = plans[first]
        pipeline, own, losses = train_in_stages(rows[number], schedule, split=partial(split, world_size))
        states[name] = assert_stages_equal(own, alone[number].state(), name)
        if rank == schedule.home[-1]:
            assert [loss.item() for loss in losses] == pytest.approx(alone[number].losses, rel=1e-12), name
        else:
            assert losses == [None] * 10, name
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


P, M, B, WIDTH = 3, 4, 2, 7  # stages, micro-batches, samples of each, features between stages
MESSAGE = 4 * B * WIDTH


def stage_of(rank):
    torch.manual_seed(rank)
    return nn.Linear(WIDTH, WIDTH)


def ones():
    return torch.ones(M * B, WIDTH), torch.zeros(M * B, WIDTH)


def heard(function):
    """Return what a function returns, and this rank's calls: (operation, bytes, peer)."""
    with recorded() as seen:
        value = function()
    return value, [(call.op, call.num_bytes, call.peer) for call in seen.records.calls(dist.get_rank())]


@pytest.mark.on_ranks(P)
def test_each_hand_over_is_one_message_and_a_step_adds_two_small_sums():
    rank, schedule, options = dist.get_rank(), gpipe(P, M), {"loss_fn": nn.functional.mse_loss, "num_microbatches": M}
    pipeline = Pipeline({rank: stage_of(rank)}, schedule, loss=nn.functional.mse_loss)
    _, first = heard(lambda: pipeline.step(*ones()))
    loss, second = heard(lambda: pipeline.step(*ones()))
    _, plain = heard(lambda: plain_step(stage_of(rank), ones(), between=[WIDTH], **options))
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < P]
    for calls in (first, second, plain):
        sent = sorted(call for call in calls if call[0] == "send")
        assert sent == sorted(("send", MESSAGE, other) for other in neighbours for _ in range(M))
    sums = [("all_reduce", 8 * P, -1)]
    assert [call for call in second if call[0] not in ("send", "recv")] == 2 * sums
    assert {op for op, *_ in plain} == {"send", "recv"}
    shapes = [num_bytes for op, num_bytes, _ in first if op == "broadcast"]
    assert len(shapes) == 2 * P  # of each stage: how long the answer is, and the answer
    assert max(shapes) < 1_000
    assert heard(lambda: pipeline.mean_loss(loss))[1] == [("broadcast", 16, P - 1)]
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    assert heard(StageState({rank: stage_of(rank)}, optimizer).shard_state)[1] == []
    assert heard(lambda: gather_numbers(rank)) == (list(range(P)), sums)
    assert heard(lambda: raise_together(None, schedule))[1] == sums
    assert sum(num_bytes for _, num_bytes, _ in heard(lambda: refuse_together(""))[1]) < 100
    pipeline.close()


@pytest.mark.on_ranks(3)
def test_holders_of_a_tied_parameter_send_it_to_each_other():
    """Three holders of a parameter of 5 x 5 elements: the calls at construction, those of two steps, and errors."""
    rank = dist.get_rank()
    modules, tied, owners = {rank: nn.Linear(5, 5, bias=False)}, [TiedParameter("weight", (0, 1, 2))], [0, 1, 2]
    weight = modules[rank].weight
    first, others = weight.detach().clone(), [("send", 100, other) for other in range(3) if other != rank]
    dist.broadcast(first, 0)
    gradients, start = heard(lambda: TiedGradients(tied, modules, owners))
    assert torch.equal(weight, first), "all copies have the first holder's value"
    assert [num_bytes for op, num_bytes, _ in start if op == "send"] == [100] * (2 if rank == 0 else 0)
    expected = torch.zeros(5, 5)
    for step in range(2):  # an earlier step's sum counts once
        gradients.begin()
        modules[rank](torch.full((1, 5), 0.1 + rank + step)).sum().backward()
        parts = [torch.empty(5, 5) for _ in range(3)]
        dist.all_gather(parts, weight.grad)
        _, sent = heard(gradients.finish)
        assert sorted(call for call in sent if call[0] == "send") == others
        expected += parts[0] + parts[1] + parts[2]
        assert torch.equal(weight.grad, expected), "in the order of stages"
    narrow = {rank: nn.Linear(3, 2, bias=False)} if rank == 1 else modules
    for wrong, stages, words in (
        ([TiedParameter("weight", (0, 5))], modules, "tied parameter.*stage 5 is not in the pipeline"),
        ([TiedParameter("bias", (0, 1))], modules, "tied parameter.*stage 0 on rank 0 has no parameter 'bias'"),
        (tied if rank == 0 else [], modules, "tied parameter"),
        (tied, narrow, r"stage 1 has \[2, 3\] torch.float32.*must be alike"),
    ):
        with pytest.raises(ValueError, match=words):
            TiedGradients(wrong, stages, owners)
