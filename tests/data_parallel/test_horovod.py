"""The optimizer that averages: equal to one process, sends what it says, and refuses what would part the replicas."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab.comm import RankError, recorded
from distlab.data_parallel import HorovodOptimizer, broadcast_parameters, loss_weight

SAMPLES = 7  # no world size above 1 divides it
UPDATES = 10


class Tied(nn.Module):
    """A weight used twice, a frozen bias, and other weights on every rank."""

    def __init__(self, rank, dtype):
        super().__init__()
        torch.manual_seed(rank)
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.to(dtype)

    def forward(self, x):
        return self.third(self.second(self.first(x).tanh()).tanh())


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}
WAYS = [
    {},
    {"fusion_bytes": 300},
    {"backward_passes_per_step": 2, "fusion_bytes": 300},
    {"clip": 0.05, "fusion_bytes": 300},
    {"clip": 0.05, "backward_passes_per_step": 2},
]


def micro_batch(update, index, dtype):
    generator = torch.Generator().manual_seed(100 * update + index)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, x[:, :3].sin() + 1


def train(dtype, name, ways, alone=False):
    """Train with every way; alone is the oracle, without wrapper."""
    rank, world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    finals = []
    for way in ways:
        options, clip = {**way}, way.get("clip")
        options.pop("clip", None)
        model = Tied(rank, dtype)
        optimizer = OPTIMIZERS[name](model.parameters())
        if not alone:
            broadcast_parameters(model)
            optimizer = HorovodOptimizer(optimizer, model.named_parameters(), **options)
        passes = way.get("backward_passes_per_step", 1)
        for update in range(UPDATES):
            for index in range(passes):
                x, targets = (whole[rank::world_size] for whole in micro_batch(update, index, dtype))
                loss = (model(x) - targets).square().mean() * loss_weight(len(x), SAMPLES, world_size) / passes
                loss.backward()
            if clip is None:
                optimizer.step()
            elif alone:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            else:
                optimizer.synchronize()
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            optimizer.zero_grad()
        finals.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return finals


CASES = [(torch.float64, "sgd", 1e-10), (torch.float64, "adam", 1e-10), (torch.float32, "sgd", 1e-5)]


@pytest.fixture(scope="module")
def alone():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank's; layers so small gain nothing from more
    try:
        return [train(dtype, name, WAYS, alone=True) for dtype, name, _ in CASES]
    finally:
        torch.set_num_threads(before)


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, alone, world_size):
    def run():
        return [train(dtype, name, WAYS) for dtype, name, _ in CASES]

    results = ranks(world_size).run(run)
    for index, (dtype, name, bound) in enumerate(CASES):
        expected = alone[index]
        for way, options in enumerate(WAYS):
            difference = (results[0][index][way] - expected[way]).abs().max().item()
            assert difference <= bound, f"{dtype} {name} {options}: {difference}"
            assert all(torch.equal(result[index][way], results[0][index][way]) for result in results), options


def test_training_repeats_bit_for_bit(ranks):
    first, second = (ranks(3).run(train, torch.float32, "adam", WAYS[1:3]) for _ in range(2))
    assert all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def wrapped(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    return model, HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


@pytest.mark.on_ranks(2)
def test_buffers_go_during_backward_in_order_and_carry_the_gradients_bytes():
    model, optimizer = wrapped(fusion_bytes=80)
    rank = dist.get_rank()
    with recorded() as backward:
        model(torch.randn(2, 4)).sum().backward()
    with recorded() as step:
        optimizer.step()
    sizes = [call.num_bytes for call in backward.records.calls(rank)]
    assert sizes == [80, 80, 80]
    assert step.records.num_calls() == 0


@pytest.mark.on_ranks(2)
def test_only_the_last_of_the_passes_sends_and_nothing_is_averaged_twice():
    model, optimizer = wrapped(backward_passes_per_step=2)
    counts = []

    def count(action):
        with recorded() as sent:
            action()
        counts.append(sent.records.num_calls())

    count(lambda: model(torch.randn(2, 4)).sum().backward())
    count(lambda: model(torch.randn(2, 4)).sum().backward())
    count(optimizer.synchronize)
    count(optimizer.step)
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    count(optimizer.step)  # earlier than planned: what is there is sent
    assert counts == [0, 1, 0, 0, 1]


@pytest.mark.on_ranks(2)
def test_a_rank_without_a_batch_counts_as_zeros_and_waits_for_nobody():
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    (alone(torch.ones(1, 4)).sum() / 2).backward()
    model, optimizer = wrapped(fusion_bytes=100)
    if dist.get_rank() == 0:
        model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for found, parameter in zip(
        [parameter.grad.clone() for parameter in model.parameters()], alone.parameters(), strict=True
    ):
        assert torch.allclose(found, parameter.grad, rtol=0, atol=1e-6)


@pytest.mark.on_ranks(2)
def test_what_nobody_used_is_zeros_and_still_updated_as_documented():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    broadcast_parameters(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = HorovodOptimizer(sgd, model.named_parameters())
    before = model[1].weight.detach().clone()
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.allclose(model[1].weight, before * 0.95)
    assert model[1].weight.grad.abs().max().item() == 0.0


@pytest.mark.on_ranks(2)
def test_an_update_can_be_left_out_and_a_scheduler_takes_the_optimizer_inside():
    model, optimizer = wrapped()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    before = model[0].weight.detach().clone()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.synchronize()
    optimizer.zero_grad()  # say, because a gradient was not finite: all ranks see the same mean
    same = torch.equal(before, model[0].weight)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    schedule.step()
    assert same
    assert optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def backward(model):
    model(torch.ones(1, 4)).sum().backward()


def zero_between(num_passes=1):
    model, optimizer = wrapped(backward_passes_per_step=num_passes)
    backward(model)
    optimizer.zero_grad()


def too_many_passes():
    model, _ = wrapped(backward_passes_per_step=2)
    for _ in range(3):
        backward(model)


def nameless():
    model = nn.Linear(2, 2)
    HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), [("bias", model.bias)])


def frozen():
    model = nn.Linear(2, 2).requires_grad_(False)
    HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def never_broadcast():
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(2, 2)
    HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def other_shapes():
    model = nn.Linear(2, 2 + dist.get_rank())
    HorovodOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def thawed_later():
    model, optimizer = wrapped()
    model[0].bias.requires_grad_(False)
    optimizer.synchronize()


BAD = {
    thawed_later: "RuntimeError: rank {rank}: parameters were added, frozen or thawed",
    zero_between: "RuntimeError: rank {rank}: zero_grad() between backward() and step() would lose gradients",
    partial(zero_between, 3): "RuntimeError: rank {rank}: zero_grad() between backward() and step()",
    too_many_passes: "RuntimeError: rank {rank}: 2.bias got gradient 3 before step(), expected 2: call step()",
    nameless: "ValueError: named_parameters names 1 of the 2 that are trained",
    frozen: "ValueError: named_parameters names 0 of the 0 that are trained",
    never_broadcast: "ValueError: ranks disagree on the values (broadcast_parameters sends rank 0's)",
    other_shapes: "ValueError: ranks disagree on the values",
    lambda: wrapped(fusion_bytes=100 + dist.get_rank()): "ValueError: ranks disagree on the values",
}


@pytest.mark.parametrize("number", range(len(BAD)), ids=[getattr(action, "__name__", "options") for action in BAD])
def test_what_would_part_the_replicas_is_an_error_on_every_rank(ranks, number):
    action = list(BAD)[number]

    for rank, text in enumerate(ranks(2).run(message, action)):
        assert list(BAD.values())[number].format(rank=rank) in text


def test_a_rank_that_zeroes_alone_ends_the_job(ranks):
    def run():
        model, optimizer = wrapped()
        backward(model)
        if dist.get_rank() == 1:
            optimizer.zero_grad()
        optimizer.step()

    with pytest.raises(RankError, match=r"rank 1: zero_grad\(\) between backward\(\) and step\(\)"):
        ranks(2).run(run)
