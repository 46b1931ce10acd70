"""DataParallel over the library's own ring: equal to one process, its bytes, and that the ring really sends them."""

import pytest
import torch
import torch.distributed as dist
from equal import DENSE, Row, assert_rows_equal_one_process, net, replicas, thirteen

from distlab.blocks.gradient_hook import GradientBucket, GradientHook
from distlab.collectives import RingAllReduce
from distlab.comm import recorded
from distlab.data_parallel import DataParallel

RING = replicas(hook=RingAllReduce())
ROWS = {"sgd": Row(DENSE, "sgd", RING), "adam": Row(DENSE, "adam", RING)}


@pytest.mark.soak_where(world_size=(2, 4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_updates_equal_one_process(ranks, world_size):
    assert_rows_equal_one_process(ranks(world_size), ROWS)


@pytest.mark.on_ranks(3)
def test_bytes_are_those_of_the_ring_and_one_flag():
    trained, sizes, rank = net(0, rare=False), [], dist.get_rank()

    class Counted(RingAllReduce):
        def start(self, bucket, group):
            sizes.append(bucket.buffer.numel())
            return super().start(bucket, group)

    made = DataParallel(trained, hook=Counted(), bucket_bytes=600, first_bucket_bytes=200)
    trained(thirteen(0)[0]).square().mean().backward()
    with recorded() as recording:
        made.synchronize()
    chunks = [[8 * (size // 3 + (c < size % 3)) for c in range(3)] for size in sizes]
    assert len(sizes) > 1
    sent = recording.records.sent_bytes(rank)
    assert sent == sum(2 * sum(c) - c[rank] - c[(rank + 1) % 3] for c in chunks), "by the own ring, and nothing else"
    flag = recording.records.num_calls("all_reduce"), recording.records.payload_bytes(rank)
    assert flag == (1, 4)  # which says whether any rank found a fault


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
