"""DataParallel with what real models bring: unused, tied, frozen and sparse parameters, accumulation, groups."""

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from equal import square

from distlab.comm import recorded
from distlab.data_parallel import DataParallel, loss_weight
from distlab.trace import SpanWriter

ALL = ("first", "second", "third")


class Branches(torch.nn.Module):
    """Three layers; each call says which it uses."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, names):
        for name in names:
            x = getattr(self, name)(x)
        return x


def data(rank):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def branches():
    torch.manual_seed(0)
    return Branches().double()


def run(model, replicas, names=ALL):
    model(data(dist.get_rank()), names).square().mean().backward()
    replicas.synchronize()


def assert_gradients_are_those_of(model, uses, num_backwards=1, alone=None):
    """Gradients equal those of one process that has every rank's samples."""
    alone = branches() if alone is None else alone
    for _ in range(num_backwards):
        (sum(alone(data(rank), names).square().mean() for rank, names in enumerate(uses)) / len(uses)).backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        assert mine.grad is None or torch.allclose(mine.grad, theirs.grad, rtol=0, atol=1e-13), name


USES = {  # of each rank
    "one rank skips a layer": [ALL, ("first", "third"), ALL],
    "a layer nobody uses": [("first", "second"), ("first",), ("first",)],
    "each rank a different layer": [("third",), ("second",), ("first",)],
    "each rank a different order": [ALL, ("third", "second", "first"), ("second", "first", "third")],
}


@pytest.mark.on_ranks(3)
def test_zeros_for_what_is_unused_equal_one_process():
    rank = dist.get_rank()
    for uses in USES.values():
        model = branches()
        replicas = DataParallel(model, bucket_bytes=200, first_bucket_bytes=50, unused="zeros")
        for names in (uses[rank], ALL, uses[rank]):  # at the end with views in place, full of what is used no longer
            model.zero_grad()
            run(model, replicas, names)
        assert_gradients_are_those_of(model, uses)
    model = torch.nn.Linear(3, 2)
    replicas = DataParallel(model, unused="zeros")
    if rank == 0:  # the only one with samples
        (model(torch.ones(2, 3)).sum() * loss_weight(2, 2, 3)).backward()
    replicas.synchronize()
    assert model.bias.grad.tolist() == [2.0, 2.0]


@pytest.mark.on_ranks(2)
def test_gradients_stay_in_the_buckets_and_add_up_until_they_are_zeroed():
    model = branches()
    DataParallel(model).close()  # which takes the hooks off
    replicas, places = DataParallel(model, bucket_bytes=200), []
    for set_to_none in (True, True, False, False):
        model.zero_grad(set_to_none)
        run(model, replicas)
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    assert places == places[:1] * 4
    assert_gradients_are_those_of(model, [ALL] * 2)
    run(model, replicas)
    run(model, replicas)
    assert_gradients_are_those_of(model, [ALL] * 2, num_backwards=3)


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
            with replicas.no_sync() if last_inside else nullcontext():
                model(x).sum().backward()
            replicas.synchronize()
        counts.append((sent.records.num_calls(), model.bias.grad.tolist()))
    assert counts == [(1, [8.0, 8.0])] * 3


@pytest.mark.on_ranks(2)
def test_tied_parameters_are_sent_once_and_frozen_ones_never():
    model, alone = branches(), branches()
    for one in (model, alone):
        one.second.weight = one.first.weight
        one.third.requires_grad_(False)
    replicas = DataParallel(model)
    run(model, replicas)
    assert replicas.num_bytes == 256  # 8 * (16 + 4 + 4 gradients and a flag) = 200, rounded up to 2 ranks x 64
    assert_gradients_are_those_of(model, [ALL] * 2, alone=alone)


@pytest.mark.on_ranks(2)
def test_parameters_of_every_shape_and_kind():
    """A number, an empty one, a transposed one, a complex one, and half precision in buckets of their own."""

    turned, whole = torch.ones(2, 3).t(), torch.ones(2, dtype=torch.complex64)
    model = torch.nn.ParameterList([torch.tensor(1.0), torch.zeros(0, 3), turned, whole, torch.ones(3).bfloat16()])
    replicas = DataParallel(model)
    for _ in range(2):
        replicas.zero_grad()
        sum(one.abs().float().sum() * (1.0 + 2 * dist.get_rank()) for one in model).backward()
        replicas.synchronize()
    assert replicas.num_buckets == 3
    assert [one.grad.tolist() for one in model] == [2.0, [], [[2.0] * 2] * 3, [2.0] * 2, [2.0] * 3]


@pytest.mark.on_ranks(4)
def test_two_groups_average_apart_and_two_groups_of_one_rank_together():
    first, second = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    row, column = map(DataParallel, (first, second), square())
    x = torch.full((1, 2), float(dist.get_rank()))
    (first(x) + second(x)).sum().backward()
    row.synchronize()
    column.synchronize()
    found = first.weight.grad[0, 0].item(), second.weight.grad[0, 0].item()
    assert found == [(0.5, 1.0), (0.5, 2.0), (2.5, 1.0), (2.5, 2.0)][dist.get_rank()]


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, x, meeting):
        context.meeting = meeting
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        if context.meeting is not None:  # on a busy machine one rank may begin backward when the other has ended it
            dist.barrier(context.meeting)
        time.sleep(0.03 if context.meeting is None else 0.3)
        return gradient, None


@pytest.mark.on_ranks(2)
def test_communication_starts_before_backward_ends():
    """Layers that sleep in backward: the first buckets must be under way while the last layers still sleep."""
    layers, meeting = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4)), dist.new_group()
    spans = SpanWriter(dist.get_rank())
    replicas = DataParallel(layers, bucket_bytes=16_640, first_bucket_bytes=16_640, spans=spans)
    x = torch.randn(2, 64)
    for index, layer in enumerate(layers):
        x = Sleep.apply(layer(x), None if index else meeting)
    with spans.span("backward", kind="B"):
        x.sum().backward()
    replicas.synchronize()
    backward = next(span for span in spans.trace() if span.kind == "B")
    sent = [span for span in spans.trace() if span.kind == "all_reduce"]
    assert [span.name for span in sent] == [f"all_reduce bucket {index}" for index in range(4)]
    sizes = [4 * (64 * 64 + 64)] * 3 + [4 * (64 * 64 + 64 + 1)]  # the last one has the flag
    assert [span.num_bytes for span in sent] == [-(-size // 128) * 128 for size in sizes]  # to 2 ranks x 64 bytes
    assert all(span.lane == "communication" for span in sent)
    starts = [span.start_ns for span in sent]
    assert starts == sorted(starts)
    assert all(start < backward.end_ns - 20e6 for start in starts[:-1])
    assert all(span.end_ns < backward.end_ns for span in sent[:2])  # and over before it, seen by later hooks
