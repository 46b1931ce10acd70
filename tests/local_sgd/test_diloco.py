"""DiLoCo: with H = 1 data parallelism, else what replicas in one process do; every rank hears of a fault."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from equal import BYTES, DENSE, Mean, Row, Way, assert_rows_equal_one_process, calls_of, net, same_everywhere, thirteen
from refused import message

from distlab.blocks.data import rank_slice
from distlab.blocks.replicate import broadcast_flat
from distlab.checkpoint import load, save
from distlab.compression import PowerSGD, Quantize, RandomK
from distlab.data_parallel import DataParallel, train_step
from distlab.local_sgd import DiLoCo, PlainDiLoCo

ALWAYS = {"every": 1, "lr": 1.0, "momentum": 0.0}


def diloco(**options):
    return lambda model, make: Way(model, DiLoCo(model, make(model.parameters()), **(ALWAYS | options)))


def plainly(model, make):
    broadcast_flat([one.detach() for one in model.parameters()])
    trained = [one for one in model.parameters() if one.requires_grad]
    made = PlainDiLoCo(trained, inner := make(trained), **ALWAYS)
    made.zero_grad = inner.zero_grad
    return Way(model, made)


def with_momentum_outside(model, make):
    return Way(model, DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=1, lr=0.7, momentum=0.9))


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.07, momentum=0.9, nesterov=True)


ROWS = {
    "DiLoCo": Row(DENSE, "plain", diloco()),
    "DiLoCo, momentum inside": Row(BYTES, "sgd", diloco()),
    "DiLoCo, momentum outside": Row(DENSE, nesterov, with_momentum_outside),
    "DiLoCo, hooked": Row(DENSE, "plain", diloco(hook=Mean())),
    "plain": Row(DENSE, "plain", plainly),
}


@pytest.mark.equality("local_sgd")
@pytest.mark.soak_where(world_size=(2, 3))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_meeting_every_step_equals_one_process(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), ROWS)


def part_of(step, rank, world_size):
    return [part[slice(*rank_slice(13, rank, world_size))] for part in thirteen(step)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model, optimizer, steps, rank, world_size, synchronize=None):
    loss_fn = torch.nn.functional.mse_loss
    for step in steps:
        batch = tuple(part_of(step, rank, world_size))
        train_step(model, optimizer, batch=batch, loss_fn=loss_fn, synchronize=synchronize)
    return [one.detach().clone() for one in model.parameters()]


class InOneProcess:
    """Replicas as copies, an outer optimizer of torch; each parameter is a fragment of its own at a given step."""

    def __init__(self, num_replicas, every, dues, delay, keep):
        self.models = [net(0, rare=False) for _ in range(num_replicas)]
        self.inner = [adamw(model) for model in self.models]
        self.every, self.dues, self.delay, self.keep, self.under_way = every, dues, delay, keep, {}
        self.agreed = [one.detach().clone() for one in self.models[0].parameters()]
        self.outer = [torch.optim.SGD([one], lr=0.7, momentum=0.9, nesterov=True) for one in self.agreed]

    @torch.no_grad()
    def meet(self, step):
        replicas = [list(model.parameters()) for model in self.models]
        for number, due in self.dues.items():
            if step % self.every == due % self.every:
                self.under_way[number] = (
                    step,
                    sum(self.agreed[number] - own[number] for own in replicas) / len(replicas),
                )
        for number, (start, change) in list(self.under_way.items()):
            if step == start + self.delay:
                del self.under_way[number]
                self.agreed[number].grad = change
                self.outer[number].step()
                for own in replicas:
                    kept = self.keep if self.delay else 0
                    own[number].copy_((1 - kept) * self.agreed[number] + kept * own[number])

    def train(self, num_steps):
        for step in range(num_steps):
            for rank, (model, inner) in enumerate(zip(self.models, self.inner, strict=True)):
                train(model, inner, [step], rank, len(self.models))
            self.meet(step + 1)
        return [[one.detach() for one in model.parameters()] for model in self.models]


def train_diloco(num_steps, options):
    model = net(dist.get_rank(), rare=False)
    optimizer = DiLoCo(model, adamw(model), **options)
    found = train(model, optimizer, range(num_steps), dist.get_rank(), dist.get_world_size())
    numbers = {one: number for number, one in enumerate(model.parameters())}
    dues = {numbers[one]: fragment.due for fragment in optimizer.fragments for one in fragment.parameters}
    optimizer.synchronize()
    return found, dues, same_everywhere(torch.cat([one.detach().flatten() for one in model.parameters()]))


@pytest.mark.parametrize(("every", "fragments", "delay"), [(4, 1, 0), (4, 2, 0), (6, 3, 2), (5, 2, 4)])
def test_replicas_do_as_in_one_process(ranks, every, fragments, delay):
    options = {"every": every, "fragments": fragments, "delay": delay, "keep": 0.25}
    results = ranks(3).run(train_diloco, 17, options)
    dues = results[0][1]
    assert len(set(dues.values())) == fragments
    wanted = InOneProcess(3, every, dues, delay, 0.25).train(17)
    for (found, _, equal_at_the_end), replica in zip(results, wanted, strict=True):
        torch.testing.assert_close(found, replica, rtol=1e-10, atol=1e-10)
        assert equal_at_the_end


@pytest.mark.on_ranks(2)
def test_bytes_and_memory_are_as_they_say():
    every, rank, models = 4, dist.get_rank(), [net(0, rare=False) for _ in range(4)]
    num_bytes = sum(one.nbytes for one in models[0].parameters() if one.requires_grad)
    replicas = DataParallel(models[0], bucket_bytes=10**6)
    trained = [one for one in models[1].parameters() if one.requires_grad]
    made = [
        adamw(models[0]),
        PlainDiLoCo(trained, adamw(models[1]), every),
        DiLoCo(models[2], adamw(models[2]), every=every),
        DiLoCo(models[3], adamw(models[3]), every=every, fragments=3, delay=1),
    ]
    sent = []
    for model, optimizer in zip(models, made, strict=True):
        optimizer.zero_grad = lambda model=model: model.zero_grad()
        synchronize = replicas.synchronize if model is models[0] else None
        seen = calls_of(partial(train, model, optimizer, range(2 * every), rank, 2, synchronize))
        assert {name for name, _ in seen} == {"all_reduce"}
        sent.append([size for _, size in seen])
    assert [sum(one) for one in sent[1:]] == [2 * num_bytes] * 3
    assert max(sent[3]) < num_bytes / 2
    assert all(sum(one) * every <= sum(sent[0]) for one in sent[1:])
    assert sum(2 * one.nbytes for one in made[1].agreed) == 2 * num_bytes
    held = [tensor for one in made[3].fragments for tensor in (one.agreed.buffer, one.momentum, one.change)]
    assert sum(one.nbytes for one in held) == 3 * num_bytes


def spoil(model, optimizer):
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.head.bias[0] = torch.nan


def overflow(model, optimizer):
    with torch.no_grad():
        model.head.bias.fill_(1.7e308 * (-1) ** dist.get_rank())
    optimizer.fragments[0].agreed.buffer.fill_(-1.7e308)


@pytest.mark.on_ranks(2)
def test_a_fault_of_one_rank_is_named_on_every_rank_and_the_agreed_values_stand():
    for hook in (None, RandomK(0.3, 0), Quantize(8), PowerSGD(2)):
        for act, words in (
            (spoil, ["NotFiniteError", "step 2: 1 parameters are not finite (head.bias)", "(rank 1)", "learning rate"]),
            (overflow, ["NotFiniteError", "mean of the ranks' changes is not finite"]),
        ):
            model = net(0, rare=False)
            optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.0), every=2, hook=hook)
            before = optimizer.fragments[0].agreed.buffer.clone()
            optimizer.step()
            act(model, optimizer)
            text = message(optimizer.step)
            assert all(word in text for word in (f"rank {dist.get_rank()}: ", *words)), text
            assert act is overflow or torch.equal(before, optimizer.fragments[0].agreed.buffer)
            assert not optimizer.fragments[0].momentum.any()


REFUSED = [
    ({"every": 0}, "every"),
    ({"every": 4, "fragments": 5}, "pass at most 4 fragments"),
    ({"every": 4, "delay": 4}, "a delay below it"),
    ({"every": 4, "keep": 1.0}, "keep is 1"),
    ({"every": 4, "lr": -1.0}, "lr"),
]


@pytest.mark.on_ranks(2)
def test_what_cannot_be_is_refused_on_every_rank():
    model = net(0)
    for options, words in REFUSED:
        assert words in message(DiLoCo, model, adamw(model), **options)
    assert "every" in message(DiLoCo, model, adamw(model), every=3 + dist.get_rank())
    alone = [dist.new_group([one]) for one in range(2)][dist.get_rank()]
    assert "every" in message(DiLoCo(model, adamw(model), alone, every=3 + dist.get_rank()).regroup, None)
    frozen = net(0).requires_grad_(False)
    assert "nothing to agree on" in message(DiLoCo, frozen, adamw(model), every=2)
    assert "shard_state()" in message(copy.copy, DiLoCo(model, adamw(model), every=2))


def resume(folder, stop):
    """Train 11 steps; or stop, save, and go on in a new optimizer of a new model."""
    rank, options = dist.get_rank(), {"every": 4, "fragments": 2, "delay": 3, "hook": Quantize(8)}
    model = net(rank, rare=False)
    optimizer = DiLoCo(model, adamw(model), **options)
    train(model, optimizer, range(stop), rank, 2)
    if stop < 11:
        save(folder, stop, parts={"replica": optimizer})
        model = net(rank + 7, rare=False)
        optimizer = DiLoCo(model, adamw(model), **options | {"hook": Quantize(8)})
        assert load(folder, parts={"replica": optimizer}).step == stop
    found = train(model, optimizer, range(stop, 11), rank, 2)
    return [*found, *(one.momentum for one in optimizer.fragments)]


def test_a_resumed_run_repeats_the_uninterrupted_one(ranks, tmp_path):
    wanted = ranks(2).run(resume, tmp_path, 11)
    for stop in (4, 6, 9):  # at a meeting, with changes under way
        found = ranks(2).run(resume, tmp_path / str(stop), stop)
        for one, other in zip(found, wanted, strict=True):
            assert all(map(torch.equal, one, other)), stop
    assert not torch.equal(wanted[0][0], wanted[1][0]), "replicas differ between meetings"
    text = ranks(1).run(lambda: message(load, tmp_path / "6", parts={"replica": fresh()}, reshard=True))[0]
    assert "2 replicas saved fragments of" in text


def fresh():
    model = net(0, rare=False)
    return DiLoCo(model, adamw(model), every=4, fragments=2, delay=3, hook=Quantize(8))


def leave_and_come(hook):
    """Rank 3 of 4 leaves in a meeting whose end rank 0 alone has seen, and comes back as a new one."""
    rank, groups = dist.get_rank(), [dist.new_group([0, 1, 2]), *(dist.new_group([one]) for one in range(4))]
    model = net(0, rare=False)
    optimizer = DiLoCo(model, adamw(model), every=3, hook=copy.deepcopy(hook))
    train(model, optimizer, range(4), rank, 4)
    own = [one.detach().clone() for one in model.parameters()]
    if rank == 0:  # its meeting is over, and the others' failed
        with torch.no_grad():
            optimizer.fragments[0].agreed.buffer.add_(1)
        optimizer.fragments[0].rounds += 1
    if rank < 3:
        told = calls_of(partial(optimizer.regroup, groups[0]))
        assert told[:2] == [("all_gather", 40), ("all_gather", 16)]
        assert told[2:] == [("broadcast", one.nbytes) for one in held_by(optimizer)]
        assert same_everywhere(optimizer.fragments[0].agreed.buffer, groups[0])
        kept = all(map(torch.equal, model.parameters(), own))
        assert kept == (rank == 0), "who was behind takes the agreed values"
        train(model, optimizer, range(4, 6), rank, 3)
    else:
        model = net(9, rare=False)
        optimizer = DiLoCo(model, adamw(model), groups[4], every=3, hook=hook)
    optimizer.regroup(None)
    assert (optimizer.num_steps, optimizer.fragments[0].rounds) == (6, 3)
    train(model, optimizer, range(6, 9), rank, 4)
    return [one.detach() for one in model.parameters()]


def held_by(optimizer):
    return [tensor for one in optimizer.fragments for tensor in (one.agreed.buffer, one.momentum)]


@pytest.mark.parametrize("hook", [None, Quantize(4), RandomK(0.3), PowerSGD(2)], ids=lambda one: type(one).__name__)
def test_replicas_leave_and_come(ranks, hook):
    results = ranks(4).run(leave_and_come, hook)
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0])), "a meeting makes them equal"
