"""Optimizers of whole tensors on shards: exact, of uneven shapes and few matrices; what they send, save and refuse."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, difference, heard, muon
from refused import message
from torch import nn

from distlab.large_batch import LAMB, newton_schulz
from distlab.sharding import ByTensor, FullyShard, ShardedOptimizer, WholeTensorOptimizer, full_state_dict
from distlab.sharding.whole.plain import by_everyone, by_owners, whole_norms

SHAPES = ((1, 9), (7, 5), (5, 1))  # a matrix of one row, none that is even, fewer than four ranks


class Products(nn.Module):
    """Matrices whose gradients are what the data says; the last one may be left out."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.matrices = nn.ParameterList(torch.randn(shape, generator=made, dtype=dtype) for shape in (*SHAPES, (6,)))

    def forward(self, data):
        return sum((one * own).sum() for one, own in zip(self.matrices, data, strict=False))


def data_of(step, rank, scale=1.0):
    """Return whole numbers, whose mean over two or four ranks is exact."""
    made = torch.Generator().manual_seed(100 * step + rank)
    return [scale * torch.randint(-8, 9, shape, generator=made) for shape in (*SHAPES, (6,))]


def update(model, optimizer, data):
    model(data).backward()
    if isinstance(model, FullyShard):
        model.synchronize()
    optimizer.step()
    optimizer.zero_grad()


def torchs_muon(named):
    return torch.optim.Muon([one for _, one in named if one.ndim == 2], lr=0.02)


def spoiled(step, data):
    """Return data with NaN for one matrix in the last step, and nothing for one in the first."""
    data[0][0, 0] = float("nan") if step == 2 else data[0][0, 0]
    return data[:2] if step == 0 else data


def by_torch(by):
    model = FullyShard(Products())
    optimizer = WholeTensorOptimizer(model, torchs_muon, by=by)
    for step in range(3):
        update(model, optimizer, spoiled(step, data_of(step, dist.get_rank())))
    return {name: value.clone() for name, value in full_state_dict(model).items()}


@pytest.mark.parametrize("by", ["owners", "everywhere"])
def test_torchs_muon_makes_the_same_bits_with_more_ranks_than_matrices_and_nan_stays_in_its_own(ranks, by):
    model = Products()
    optimizer = torchs_muon([*model.named_parameters()])
    for step in range(3):
        every = zip(*(spoiled(step, data_of(step, rank)) for rank in range(4)), strict=True)
        update(model, optimizer, [sum(own) / 4 for own in every])
    for found in ranks(4).run(by_torch, by):
        for name, one in model.state_dict().items():
            torch.testing.assert_close(found[name], one, rtol=0, atol=0, equal_nan=True)
        assert [bool(found[f"matrices.{at}"].isnan().any()) for at in range(3)] == [True, False, False]


def make_lamb(named):
    return LAMB(named, lr=1e-2)


def half(shard, make, by, steps, saved=None):
    module = Products(torch.float64)
    if saved is not None:
        module.load_state_dict(saved[0])
    model = shard(module)
    optimizer = WholeTensorOptimizer(model, make, by=by)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2)
    if saved is not None:
        optimizer.load_shards(saved[1])
        schedule.load_state_dict(saved[2])
    for step in steps:
        update(model, optimizer, [own.double() for own in data_of(step, 0)])
        schedule.step()
    state = model.full_state() if isinstance(model, ByTensor) else full_state_dict(model)
    num_matrices = sum(one.ndim == 2 for one in optimizer.optimizer.state)
    return state, optimizer.shard_state(), schedule.state_dict(), num_matrices


@pytest.mark.parametrize(("shard", "later"), [(FullyShard, FullyShard), (FullyShard, ByTensor), (ByTensor, FullyShard)])
@pytest.mark.parametrize("make", [muon, make_lamb])
def test_a_state_saved_by_owners_goes_on_everywhere_and_on_other_numbers_of_ranks(ranks, make, shard, later):
    model = Products(torch.float64)
    optimizer = make([*model.named_parameters()])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(6):
        update(model, optimizer, [own.double() for own in data_of(step, 0)])
        schedule.step()
    before = ranks(3).run(half, shard, make, "owners", range(3))
    assert sum(count for *_, count in before) == 3, "each at its owner alone"
    for by in ("everywhere", "owners"):
        saved = before[0][0], [one for _, one, *_ in before], before[0][2]
        after = ranks(2).run(half, later, make, by, range(3, 6), saved)
        assert all(difference(found, dict(model.state_dict())) <= 1e-10 for found, *_ in after)


def sent_and_order(by):
    """Return the calls of a step, the owners, and how many states there are."""
    model = FullyShard(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))))
    optimizer = WholeTensorOptimizer(model, torchs_muon, by=by)
    model(torch.ones(2, 8)).sum().backward()
    model.synchronize()
    return calls_of(optimizer.step), optimizer.owners, len(optimizer.optimizer.state)


@pytest.mark.parametrize("by", ["owners", "everywhere"])
def test_bytes_are_those_promised_and_a_round_is_computed_while_two_others_travel(ranks, by):
    psi, results = 6 * 64 * 4, ranks(2).run(sent_and_order, by)
    for calls, owners, count in results:
        assert sorted(owners.values()) == [0, 0, 0, 1, 1, 1]
        assert count == (3 if by == "owners" else 6), "a state at its owner, or at everyone"
        there, back, everywhere = (("all_to_all", size) for size in (psi // 3, psi // 6, 2 * psi // 3))
        # A round has a matrix of each owner; the next leaves before it is computed, and what it became after it.
        assert calls == ([there, there, back, there, back, back] if by == "owners" else [everywhere] * 3)


def owned(make):
    """Return what each sharded optimizer gives to this rank of matrices of 64, 80 and 80 elements, by their places."""
    shapes = ((8, 8), (2, 40), (2, 40))
    models = [nn.ParameterList(torch.ones(shape) for shape in shapes) for _ in range(2)]
    by_stage = ShardedOptimizer(models[0], make, split="tensors")
    whole = WholeTensorOptimizer(FullyShard(models[1]), lambda named: make([one for _, one in named]))
    mine = [int(name) for name, owner in whole.owners.items() if owner == dist.get_rank()]
    return sorted(int(name) for name, _ in by_stage.named_pieces()), sorted(mine)


def test_owners_are_balanced_by_newton_schulz_and_by_elements_for_what_has_none(ranks):
    for make, first in ((lambda ps: torch.optim.Muon(ps), [0]), (lambda ps: LAMB(ps, 0.1), [0, 1])):
        found = ranks(2).run(owned, make)
        assert first in found[0][:1] + found[1][:1], "the square one has more than twice the work of both others"
        assert all(one == other for one, other in found), "one rule for both"


def plain_ways():
    torch.manual_seed(0)
    matrices = [torch.randn(2 * rows, 5, dtype=torch.float64) for rows in (1, 3, 2)]
    rank, exact = dist.get_rank(), partial(newton_schulz, compute="float64")
    rows = [one.chunk(2)[rank] for one in matrices]
    wanted = [exact(one).chunk(2)[rank] for one in matrices]
    by_these = (partial(by_owners, rows, owners, exact) for owners in ((1, 1, 0), (1, 1, 1)))
    for way in (partial(by_everyone, rows, exact), *by_these):
        found, calls = heard(way)
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        yield calls
    norms, calls = heard(lambda: whole_norms(rows))
    torch.testing.assert_close(norms, torch.stack([one.norm() for one in matrices]))
    yield calls


def test_both_plain_ways_are_exact_and_send_what_they_say(ranks):
    sizes = [8 * 5 * rows for rows in (1, 3, 2)]  # of a rank's rows
    for everyone, owners, at_one, norms in ranks(2).run(lambda: list(plain_ways())):
        assert everyone == [("all_gather", size) for size in sizes]
        assert [op for op, _ in owners + at_one] == ["all_to_all"] * 4
        assert norms == [("all_reduce", 3 * 8)]


def refusals():
    model, other = FullyShard(Products()), nn.Parameter(torch.ones(2, 2))
    made, build = WholeTensorOptimizer(model, make_lamb), partial(message, WholeTensorOptimizer, model)
    model(data_of(0, 0)).backward()
    return [
        message(WholeTensorOptimizer, nn.Linear(2, 2), make_lamb),
        build(make_lamb, by="nobody"),
        build(torch.optim.LBFGS),
        build(lambda named: torch.optim.Muon([other])),
        build(lambda named: torch.optim.SGD(named, lr=0.1 + dist.get_rank())),
        message(made.step),
    ]


SAID = """
ValueError: the model is a Linear; pass a FullyShard or a ByTensor
ValueError: by is 'nobody'; choose one of owners, everywhere
ValueError: LBFGS looks at all parameters at once, and each rank has some; use it without sharding
ValueError: make_optimizer made an optimizer of other parameters; build it of those that it is called with
ValueError: ranks disagree on optimizer: rank 0 has
RuntimeError: rank {rank}: the gradients of FullyShard's shards are on their way
""".strip().splitlines()


def test_what_cannot_be_is_refused_on_every_rank_in_one_line_and_nobody_waits(ranks):
    for rank, found in enumerate(ranks(3).run(refusals)):
        for text, said in zip(found, SAID, strict=True):
            assert said.format(rank=rank) in text, (said, text)
            assert "\n" not in text
