"""Accumulation, clipping and unequal shares together equal one process, and each known slip is told apart."""

import pytest
import torch
import torch.distributed as dist
from equal import Mean
from torch.nn.utils import clip_grad_norm_

from distlab.blocks.clip import clip_gradients_
from distlab.blocks.data import rank_slice
from distlab.comm import recorded
from distlab.data_parallel import DataParallel, micro_weights

NUM_UPDATES = 10
MICRO_SIZE = 3
NUM_SAMPLES = 13  # a global batch that no world size above 1 divides, in micro-batches with a shorter last one
MAX_NORM = 0.3


class Net(torch.nn.Module):
    """Tied, frozen and rarely used parameters; parameters of two types."""

    def __init__(self, mixed):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.rare, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)
        self.first.bias.requires_grad_(False)
        self.double()
        if mixed:
            self.rare.float()
            self.head.float()

    def forward(self, x):
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        if bool(x.sum() > 2):  # data decides: some micro-batches of some ranks do not use it
            h = h + self.rare(h.to(self.rare.weight.dtype)).to(h.dtype)
        return self.head(h.to(self.head.weight.dtype)).double()


def samples(update):
    return torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(update), dtype=torch.float64)


def micro_batches(update, rank, world_size):
    start, stop = rank_slice(NUM_SAMPLES, rank, world_size)
    return samples(update)[start:stop].split(MICRO_SIZE)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}


def build(mixed, optimizer, rank):
    torch.manual_seed(rank)
    model = Net(mixed)
    return model, OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)


def train_alone(world_size, mixed, optimizer_name):
    """One process walks through every rank's micro-batches; its loss is the plain mean over the samples."""
    model, optimizer = build(mixed, optimizer_name, 0)
    norms = []
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        for rank in range(world_size):
            for x in micro_batches(update, rank, world_size):
                (model(x).square().sum() / NUM_SAMPLES).backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], norms


def train(mixed, optimizer_name, bucket_bytes=200, hooked=False):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(mixed, optimizer_name, rank)  # other weights on each rank
    hook = Mean() if hooked else None
    replicas = DataParallel(model, bucket_bytes=bucket_bytes, first_bucket_bytes=100, unused="zeros", hook=hook)
    norms = []
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        micros = micro_batches(update, rank, world_size)
        weights = micro_weights([len(x) for x in micros], NUM_SAMPLES, world_size)
        for x, weight in zip(micros[:-1], weights[:-1], strict=True):
            with replicas.no_sync():
                (model(x).square().mean() * weight).backward()
        (model(micros[-1]).square().mean() * weights[-1]).backward()
        replicas.synchronize()
        norms.append(clip_gradients_(model.named_parameters(), MAX_NORM).item())
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], norms


CASES = [
    (False, "sgd"),
    (False, "adam"),
    (True, "sgd"),
    (False, "sgd", 1),  # every tensor is larger than a bucket
    (False, "adam", 200, True),
    (True, "sgd", 10**9, True),
]


@pytest.mark.equality("data_parallel")
@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_clipped_updates_from_unequal_micro_batches_equal_one_process(ranks, world_size):
    results = ranks(world_size).run(lambda: [train(*case) for case in CASES])
    alone = {case[:2]: train_alone(world_size, *case[:2]) for case in CASES}
    for index, case in enumerate(CASES):
        mixed = case[0]
        expected, expected_norms = alone[case[:2]]
        bound = 1e-5 if mixed else 1e-10
        assert any(norm > MAX_NORM for norm in expected_norms)  # clipping took place
        for weights, norms in (result[index] for result in results):
            assert max((a - b).abs().max().item() for a, b in zip(weights, expected, strict=True)) <= bound, case
            assert max(abs(a - b) for a, b in zip(norms, expected_norms, strict=True)) <= bound, case
            assert all(map(torch.equal, weights, results[0][index][0])), f"{case}: replicas differ"


@pytest.mark.on_ranks(2)
def test_an_update_sends_once_whatever_number_of_micro_batches():
    """Where forward ran does not matter, nor that the last backward may be inside the block as well."""
    model = torch.nn.Linear(3, 2)
    replicas = DataParallel(model)
    x = torch.ones(2, 3)
    counts = []
    for forward_inside, last_inside in [(True, False), (False, False), (True, True)]:
        replicas.zero_grad()
        with recorded() as sent:
            for _ in range(3):
                loss = None if forward_inside else model(x).sum()
                with replicas.no_sync():
                    (model(x).sum() if loss is None else loss).backward()
            if last_inside:
                with replicas.no_sync():
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
            replicas.synchronize()
        counts.append((sent.records.num_calls(), model.bias.grad.tolist()))
    assert counts == [(1, [8.0, 8.0])] * 3


def test_micro_weights_are_those_of_the_mean_over_all():
    assert micro_weights([4, 4], 8, 1) == [0.5, 0.5]
    assert micro_weights([3, 1], 12, 2) == [0.5, 1 / 6]
    assert micro_weights([], 5, 2) == []  # a rank without samples takes part with zeros
    assert micro_weights([0, 2], 4, 2) == [0.0, 1.0]
    for num_local, num_total in [([3, 3], 5), ([-1], 5), ([0], 0)]:
        with pytest.raises(ValueError, match="their sum over all ranks"):
            micro_weights(num_local, num_total, 2)


def test_a_batch_smaller_than_the_world_is_refused_before_anything_is_sent():
    for rank in range(3):
        with pytest.raises(ValueError, match="a batch of 2 leaves some of 3 ranks without a sample"):
            rank_slice(2, rank, 3)


@pytest.mark.on_ranks(2)
def test_a_rank_without_samples_can_still_take_part():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    replicas = DataParallel(model, unused="zeros")
    if dist.get_rank() == 0:
        (model(torch.ones(2, 3)).sum() * micro_weights([2], 2, 2)[0]).backward()
    replicas.synchronize()
    assert model.bias.grad.tolist() == [2.0, 2.0]
