"""DataParallel over the library's own ring: equal to one process, its bytes, and that the ring really sends them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.gradient_hook import GradientBucket, GradientHook
from distlab.collectives import RingAllReduce, ring
from distlab.comm import recorded
from distlab.data_parallel import DataParallel

SAMPLES = 12  # every number of ranks here divides it
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}
BUCKETS = {"bucket_bytes": 300, "first_bucket_bytes": 100}


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def batch(step):
    return torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(optimizer_name, own_ring):
    """Return the weights after ten updates; every rank starts with other weights, so that the first rank's count."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if own_ring else (0, 1)
    trained = model(rank)
    replicas = DataParallel(trained, hook=RingAllReduce(), **BUCKETS) if own_ring else None
    optimizer = OPTIMIZERS[optimizer_name](trained.parameters())
    for step in range(10):
        optimizer.zero_grad()
        trained(batch(step)[rank::num_ranks]).square().mean().backward()
        if replicas is not None:
            replicas.synchronize()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])


@pytest.mark.soak_where(num_ranks=(2, 4))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, num_ranks, optimizer):
    alone = train(optimizer, own_ring=False)
    results = ranks(num_ranks).run(train, optimizer, True)
    assert (results[0] - alone).abs().max() <= 1e-10
    assert all(torch.equal(result, results[0]) for result in results), "replicas differ"


def chunk_bytes(num_elements, num_ranks, itemsize):
    return [itemsize * (num_elements // num_ranks + (c < num_elements % num_ranks)) for c in range(num_ranks)]


def sent_in_a_step():
    """Return the sizes of the buckets, and what this rank sent in one step."""
    trained, sizes = model(0), []

    class Counted(RingAllReduce):
        def start(self, bucket, group):
            sizes.append(bucket.buffer.numel())
            return super().start(bucket, group)

    replicas = DataParallel(trained, hook=Counted(), **BUCKETS)
    trained(batch(0)).square().mean().backward()
    with recorded() as recording:
        replicas.synchronize()
    rank, records = dist.get_rank(), recording.records
    return sizes, records.sent_bytes(rank), records.num_calls("all_reduce"), records.payload_bytes(rank)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_bytes_are_those_of_the_ring_and_one_flag(ranks, num_ranks):
    for rank, (sizes, sent, all_reduces, others) in enumerate(ranks(num_ranks).run(sent_in_a_step)):
        assert len(sizes) > 1
        expected = 0
        for size in sizes:
            chunks = chunk_bytes(size, num_ranks, 8)
            expected += 2 * sum(chunks) - chunks[rank] - chunks[(rank + 1) % num_ranks]
        assert sent == expected
        assert (all_reduces, others) == (1, 4)  # the flag, which says whether any rank found a fault


@pytest.mark.on_ranks(3)
def test_what_travels_is_sent_by_the_own_ring():
    called = []
    run = ring._run
    ring._run = lambda flat, *more: called.append(flat.num_ranks) or run(flat, *more)
    try:
        sizes, *_ = sent_in_a_step()
    finally:
        ring._run = run
    assert called == [3] * len(sizes)


@pytest.mark.on_ranks(2)
def test_float16_gradients_whose_sum_overflows_have_a_mean():
    buffer = torch.full((6,), 60_000.0, dtype=torch.float16)  # the largest number is 65,504
    RingAllReduce().start(GradientBucket(0, buffer, (buffer,)), None).wait()
    assert torch.equal(buffer, torch.full((6,), 60_000.0, dtype=torch.float16))


def test_the_hook_keeps_no_state_and_refuses_that_of_another():
    hook = RingAllReduce()
    assert isinstance(hook, GradientHook)
    hook.load_state_dict(hook.state_dict())
    with pytest.raises(ValueError, match=r"expected an empty state, got \['memories'\]"):
        hook.load_state_dict({"memories": {}})
