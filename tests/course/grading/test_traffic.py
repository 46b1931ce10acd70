"""Bytes, calls and peaks are counted from what ranks really did."""

import pytest
import torch
import torch.distributed as dist

from distlab.collectives import ring_all_reduce
from distlab.course.grading import Evidence
from distlab.course.grading.diagnosis import traffic
from distlab.course.grading.diagnosis.memory import peak_bytes

SIZE = 120  # float64: 960 bytes


def ring():
    ring_all_reduce(torch.ones(SIZE, dtype=torch.float64))


def native():
    dist.all_reduce(torch.ones(SIZE, dtype=torch.float64))
    dist.barrier()


def whole_to_next():
    rank, n = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(SIZE, dtype=torch.float64)
    for _ in range(2):
        sending = dist.isend(tensor, (rank + 1) % n)
        dist.recv(torch.empty_like(tensor), (rank - 1) % n)
        sending.wait()


@pytest.mark.parametrize("n", [2, 3])
def test_bytes_and_calls_are_those_that_ranks_made(ranks, n):
    def seen(fn):
        return Evidence(n, ranks(n).run(fn), ranks(n).records())

    run, wanted = seen(ring), 2 * (n - 1) / n * SIZE * 8
    assert [traffic.sent_bytes(run, rank) for rank in range(n)] == [wanted] * n
    assert traffic.native_collectives(run) == ()
    assert traffic.over_budget(run, wanted, "a ring") is None
    assert traffic.sent_line(run, wanted, "a ring") == "sent {0} a rank (a ring needs {0})".format(
        traffic.in_megabytes(wanted)
    )
    run = seen(native)
    assert (traffic.sent_bytes(run, 1), traffic.native_collectives(run)) == (wanted, ("all_reduce",))
    assert [call.op for call in traffic.calls(run, 0)] == ["all_reduce", "barrier"]
    run = seen(whole_to_next)
    fault = traffic.over_budget(run, SIZE * 8, "one pass")
    assert fault.code == "too many bytes"
    assert fault.message == "right result, but 1.9 kB sent per rank where one pass needs 960 bytes"
    assert traffic.over_budget(run, 2 * SIZE * 8, "two passes") is None
    assert len(traffic.calls(run, 0, "send")) == 2
    run = seen(dist.get_rank)
    assert traffic.calls(run, 0) == []
    assert traffic.over_budget(run, 0, "nothing") is None


def test_bytes_in_words():
    words = {0: "0 bytes", 999: "999 bytes", 1500: "1.5 kB", 3e6: "3.0 MB", 12.04e9: "12040.0 MB"}
    assert {num_bytes: traffic.in_megabytes(num_bytes) for num_bytes in words} == words


def five_times(tensor):
    for _ in range(5):
        tensor = tensor + 1
    return tensor


def test_peak_counts_what_lives_at_once():
    x = torch.ones(1000)
    result, peak = peak_bytes(five_times, x)
    assert torch.equal(result, x + 5)
    assert peak == 2 * 4000
    assert peak_bytes(lambda tensor: [tensor + i for i in range(5)], x)[1] == 5 * 4000
    assert peak_bytes(lambda tensor: tensor.view(10, 100)[3].t(), x)[1] == 0
    assert (peak_bytes(lambda tensor: tensor.mul_(2), x)[1], peak_bytes(lambda: None)[1]) == (0, 0)
    x = torch.ones(1000, requires_grad=True)
    _, peak = peak_bytes(lambda tensor: tensor.exp().sum().backward(), x)
    assert x.grad is not None
    assert peak >= 2 * 4000
