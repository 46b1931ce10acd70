"""Every schedule trains like one process, repeats bit for bit, and does what its plan says, in its order."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded
from distlab.pipeline import Pipeline, find_tied, split_gpt, split_sequential
from distlab.plan import SCHEDULES, make_schedule, parse_schedule, validate
from distlab.rng import generator

SIZES = [5, 7, 3, 6, 4, 8, 2, 7, 5]  # nothing here is even
MICROBATCHES = {2: 3, 3: 4, 4: 5}  # no multiple of the ranks
UPDATES = 10
UNEVEN = {2: [3, 1], 3: [3, 1, 2], 4: [2, 1, 4, 1]}
NAMES = [name for name, family in SCHEDULES.items() if family.placement != "copies"]  # those hold a model twice
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}
CONFIG = GPTConfig(vocab_size=13, context=5, num_layers=4, num_heads=1, hidden_size=4, tied=True)


def own_schedule(num_ranks, num_microbatches):
    """Write a schedule as a learner would: all forward passes, then backward from the last, split on odd stages."""
    lines = []
    for stage in range(num_ranks):
        actions = [f"{stage}F{k}" for k in range(num_microbatches)]
        for k in reversed(range(num_microbatches)):
            actions += [f"{stage}I{k}", f"{stage}W{k}"] if stage % 2 else [f"{stage}B{k}"]
        lines.append(" ".join(actions))
    return parse_schedule("\n".join(lines))


def plan(name, num_ranks):
    if name == "own":
        return own_schedule(num_ranks, MICROBATCHES[num_ranks])
    return make_schedule(name.removesuffix(", again"), num_ranks, MICROBATCHES[num_ranks])


class Beside(nn.Module):
    """Two copies of a layer, for two optimizers: one step of the pipeline is a step of both models."""

    def __init__(self, sgd, adam):
        super().__init__()
        self.sgd, self.adam = sgd, adam

    def forward(self, x):
        """x [N, 2, I] -> [N, 2, O]"""
        return torch.stack([self.sgd(x[:, 0]), self.adam(x[:, 1])], dim=1)


def layers(world_size):
    torch.manual_seed(0)
    sizes = SIZES[: 2 * world_size + 1]
    made = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in zip(sizes, sizes[1:], strict=False)]
    made[1].append(nn.LayerNorm(sizes[2]))  # its gradients are made in I
    made[2][0].bias.requires_grad_(False)
    return nn.Sequential(*made).double()


def batch(step, world_size):
    num = 3 * MICROBATCHES[world_size]
    draw = generator(step, 0, "batch")
    inputs = torch.randn(num, SIZES[0], dtype=torch.float64, generator=draw)
    return inputs, torch.randn(num, SIZES[2 * world_size], dtype=torch.float64, generator=draw)


def one_process(world_size, optimizer_name):
    model, losses = layers(world_size), []
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for step in range(UPDATES):
        inputs, targets = batch(step, world_size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses


def in_stages(schedule, world_size):
    model = nn.Sequential(*map(Beside, layers(world_size), layers(world_size)))
    uneven = UNEVEN[world_size] if schedule.num_stages == world_size else None
    stages = split_sequential(model, schedule.num_stages, layers_per_stage=uneven)
    rank = dist.get_rank()
    return {stage: stages[stage] for stage, home in enumerate(schedule.home) if home == rank}


def message_bytes(schedule, world_size, rank):
    """Bytes that a rank sends in a step: each boundary's elements, for each micro-batch, in each direction."""
    counts = UNEVEN[world_size] if schedule.num_stages == world_size else [1] * (2 * world_size)
    home, total = list(schedule.home), 0
    for stage in range(schedule.num_stages - 1):
        if home[stage] != home[stage + 1]:
            features = 2 * SIZES[sum(counts[: stage + 1])]  # of both copies
            total += (rank in (home[stage], home[stage + 1])) * features * 3 * 8 * schedule.num_microbatches
    return total


def train(names):
    """Run on each rank: train with each schedule; return what came out and what was done."""
    rank, world_size, found = dist.get_rank(), dist.get_world_size(), {}
    for name in names:
        schedule = plan(name, world_size)
        stages = in_stages(schedule, world_size)
        pipeline = Pipeline(stages, schedule, loss=lambda y, wanted: 2 * nn.functional.mse_loss(y, wanted))
        optimizers = [
            make([p for stage in stages.values() for n, p in stage.named_parameters() if f".{optimizer_name}." in n])
            for optimizer_name, make in OPTIMIZERS.items()
        ]
        losses = []
        for step in range(UPDATES):
            inputs, targets = (torch.stack([part, part], dim=1) for part in batch(step, world_size))
            pipeline.zero_grad()
            with recorded() if step + 1 == UPDATES else nullcontext() as seen:
                loss = pipeline.step(inputs, targets)
            for optimizer in optimizers:
                optimizer.step()
            losses.append(None if loss is None else loss.item())
        pipeline.close()
        state = {n: p.detach() for stage in stages.values() for n, p in stage.named_parameters()}
        sent = seen.records.sent_bytes(rank)
        found[name] = state, losses, pipeline.peak_in_flight, pipeline.order, sent
    return found


def difference(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.equality("pipeline")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_schedule_equals_one_process_and_its_plan(ranks, world_size):
    oracles = {name: one_process(world_size, name) for name in OPTIMIZERS}
    expected = {
        f"{layer}.{optimizer_name}.{rest}": value
        for optimizer_name, (parameters, _) in oracles.items()
        for layer, _, rest, value in [(*name.partition("."), value) for name, value in parameters.items()]
    }
    losses = [sum(pair) for pair in zip(*(losses for _, losses in oracles.values()), strict=True)]
    # Where the same order has two names (the automatic ones find ZB-H1's), it is run once.
    names = list({str(plan(name, world_size)): name for name in reversed([*NAMES, "own"])}.values())
    names += ["zb_v, again", "interleaved, again"] if world_size == 3 else []
    results = ranks(world_size).run(train, names)
    together = {}
    for name in names:
        schedule = plan(name, world_size)
        report = validate(schedule)
        found = [result[name] for result in results]
        together[name] = {key: value for state, *_ in found for key, value in state.items()}
        assert difference(together[name], expected) <= 1e-10, name
        for rank, (_, own_losses, peak, order, sent) in enumerate(found):
            if rank == schedule.home[-1]:
                assert own_losses == pytest.approx(losses, rel=1e-12), name
            else:
                assert own_losses == [None] * UPDATES
            assert peak == report.peak_in_flight[rank], f"{name}: rank {rank}"
            assert order == [action for action in schedule.actions(rank) if action.kind in "FBIW"], name
            assert sent == message_bytes(schedule, world_size, rank), f"{name}: rank {rank}"
    for name in [name for name in names if name.endswith(", again")]:
        first = together[name.removesuffix(", again")]
        assert difference(together[name], first) == 0.0, f"{name}: repeats bit for bit"


def gpt_model():
    model = GPT(CONFIG, generator(0, 0, "weights")).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1, generator=generator(0, 0, name))
    return model


def gpt_batch(step):
    draw = generator(step, 0, "tokens")
    return [torch.randint(CONFIG.vocab_size, (8, CONFIG.context), generator=draw) for _ in range(2)]


def train_gpt(names):
    """One batch an update, then two: gradients accumulate over steps of the pipeline, tied ones too."""
    found, rank = {}, dist.get_rank()
    for name, optimizer_name in names:
        schedule = make_schedule(name, dist.get_world_size(), 4)
        by_costs = [2.0, 1, 1, 1, 1, 1] if schedule.num_stages < 4 else None
        stages = split_gpt(gpt_model(), schedule.num_stages, by_costs)
        tied = find_tied(stages)
        mine = {stage: stages[stage] for stage, home in enumerate(schedule.home) if home == rank}
        for parameter in mine[
            max(mine)
        ].parameters():  # as if each rank had loaded its own: the first copy's value wins
            if rank == 1 and parameter.shape == (CONFIG.vocab_size, CONFIG.hidden_size):
                parameter.data.add_(1.0)
        pipeline = Pipeline(mine, schedule, loss=GPT.loss, tied=tied)
        optimizer = OPTIMIZERS[optimizer_name](pipeline.parameters())
        for step in range(10):
            pipeline.zero_grad()
            for part in range(1 + step % 2):
                pipeline.step(*gpt_batch(2 * step + part))
            optimizer.step()
        pipeline.close()
        found[name, optimizer_name] = {n: v.detach() for stage in mine.values() for n, v in stage.state_dict().items()}
    return found


@pytest.mark.equality("pipeline")
def test_a_tied_gpt_equals_one_process(ranks):
    names = [("one_f_one_b", "adam"), ("zb_h1", "sgd"), ("zb_v", "adam")]
    results = ranks(2).run(train_gpt, names)
    oracles = {}
    for optimizer_name in OPTIMIZERS:
        model = gpt_model()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        for step in range(10):
            optimizer.zero_grad()
            for part in range(1 + step % 2):
                inputs, targets = gpt_batch(2 * step + part)
                GPT.loss(model(inputs), targets).backward()
            optimizer.step()
        oracles[optimizer_name] = model.state_dict()
    for name in names:
        for result in results:
            missing = oracles[name[1]].keys() - set().union(*(other[name].keys() for other in results))
            assert not missing
            assert all((value - oracles[name[1]][n]).abs().max() <= 1e-10 for n, value in result[name].items()), name
        both = [value for result in results for n, value in result[name].items() if n in TIED]
        assert len(both) == 2
        assert torch.equal(*both), f"{name}: the copies are the same bits"


TIED = ("token_embedding.weight", "output.weight")


def test_the_updates_are_not_trivial():
    before = dict(layers(3).named_parameters())
    for name, parameter in one_process(3, "sgd")[0].items():
        moved = (parameter - before[name]).abs().max().item()
        assert moved > 1e-4 if before[name].requires_grad else moved == 0.0, name
