"""DataParallel with what real models bring: unused, tied, frozen and sparse parameters, accumulation, groups."""

import time
import uuid
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from equal import square
from refused import message

from distlab.comm import recorded
from distlab.data_parallel import DataParallel, micro_weights
from distlab.trace import SpanWriter


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


def gradients_of(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def whole_batch_gradients(uses, num_backwards=1):
    """Gradients of one process that has every rank's samples."""
    model = branches()
    for _ in range(num_backwards):
        (sum(model(data(rank), names).square().mean() for rank, names in enumerate(uses)) / len(uses)).backward()
    return gradients_of(model)


def assert_equal(gradients, expected):
    for name, gradient in expected.items():
        if gradient is None:
            assert gradients[name] is None, name
        else:
            assert torch.allclose(gradients[name], gradient, rtol=0, atol=1e-13), name


ALL = ("first", "second", "third")
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
            model(data(rank), names).square().mean().backward()
            replicas.synchronize()
        assert_equal(gradients_of(model), whole_batch_gradients(uses))


@pytest.mark.on_ranks(3)
def test_an_unused_parameter_is_named_on_every_rank():
    model = branches()
    replicas = DataParallel(model)
    rank = dist.get_rank()
    model(data(rank), ("first", "second") if rank == 1 else ALL).square().mean().backward()
    text = message(replicas.synchronize)
    model.zero_grad()
    model(data(rank), ALL).square().mean().backward()  # and it can go on
    replicas.synchronize()
    assert text.startswith(f"RuntimeError: rank {rank}: 2 parameters got no gradient")
    assert "third.weight (rank 1)" in text
    assert "third.bias (rank 1)" in text
    assert "first" not in text
    assert_equal(gradients_of(model), whole_batch_gradients([ALL] * 3))


@pytest.mark.on_ranks(2)
def test_both_ways_of_zeroing_keep_gradients_in_the_buckets():
    model = branches()
    replicas = DataParallel(model, bucket_bytes=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = []
    for set_to_none in (True, True, False, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(data(dist.get_rank()), ALL).square().mean().backward()
        replicas.synchronize()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    assert places == places[:1] * 4
    assert_equal(gradients_of(model), whole_batch_gradients([ALL] * 2))


@pytest.mark.on_ranks(2)
def test_gradients_that_are_never_zeroed_add_up_as_in_one_process():
    model = branches()
    replicas = DataParallel(model)
    for _ in range(3):
        model(data(dist.get_rank()), ALL).square().mean().backward()
        replicas.synchronize()
    assert_equal(gradients_of(model), whole_batch_gradients([ALL] * 2, num_backwards=3))


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
def test_a_rank_without_samples_can_still_take_part():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    replicas = DataParallel(model, unused="zeros")
    if dist.get_rank() == 0:
        (model(torch.ones(2, 3)).sum() * micro_weights([2], 2, 2)[0]).backward()
    replicas.synchronize()
    assert model.bias.grad.tolist() == [2.0, 2.0]


@pytest.mark.on_ranks(2)
def test_tied_parameters_are_sent_once_and_frozen_ones_never():
    model, alone = branches(), branches()
    for one in (model, alone):
        one.second.weight = one.first.weight
        one.third.requires_grad_(False)
    replicas = DataParallel(model)
    model(data(dist.get_rank()), ALL).square().mean().backward()
    replicas.synchronize()
    (sum(alone(data(rank), ALL).square().mean() for rank in range(2)) / 2).backward()
    assert replicas.num_bytes == 256  # 8 * (16 + 4 + 4 gradients and a flag) = 200, rounded up to 2 ranks x 64
    assert_equal(gradients_of(model), gradients_of(alone))


@pytest.mark.on_ranks(2)
def test_parameters_of_every_shape_and_kind():
    """A number, an empty one, a transposed one, a complex one, and half precision in buckets of their own."""

    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.number = torch.nn.Parameter(torch.tensor(2.0))
            self.empty = torch.nn.Parameter(torch.zeros(0, 3))
            self.turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
            self.complex = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
            self.low = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x):
            parts = (self.number * x, self.empty, self.turned * x, (self.complex * x).abs(), self.low.float() * x)
            return sum(part.sum() for part in parts)

    model = Odd()
    replicas = DataParallel(model)
    for _ in range(2):
        replicas.zero_grad()
        model(torch.tensor(1.0 + 2 * dist.get_rank())).backward()
        replicas.synchronize()
    number, empty, turned, complex_, low = [parameter.grad.tolist() for parameter in model.parameters()]
    assert replicas.num_buckets == 3
    assert (number, empty, turned, low) == (2.0, [], [[2.0] * 2] * 3, [2.0] * 3)
    assert complex_ == [2.0, 2.0]


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


def test_communication_starts_before_backward_ends(ranks):
    """Layers that sleep in backward: the first buckets must be under way while the last layers still sleep."""
    meeting = uuid.uuid4().hex

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            time.sleep(0.03)
            return gradient

    class Meet(Sleep):
        """Sleep once both ranks are here: on a busy machine one rank may begin backward when the other has ended it."""

        @staticmethod
        def backward(context, gradient):
            store, key = dist.distributed_c10d._get_default_store(), meeting
            store.add(key, 1)
            while store.add(key, 0) < 2:
                time.sleep(0.001)
            time.sleep(0.5)
            return gradient

    def train():
        layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        spans = SpanWriter(dist.get_rank())
        replicas = DataParallel(layers, bucket_bytes=16_640, first_bucket_bytes=16_640, spans=spans)
        x = torch.randn(2, 64)
        for index, layer in enumerate(layers):
            x = (Sleep if index else Meet).apply(layer(x))
        with spans.span("backward", kind="B"):
            x.sum().backward()
        replicas.synchronize()
        return list(spans.trace())

    for spans in ranks(2).run(train):
        backward = next(span for span in spans if span.kind == "B")
        sent = [span for span in spans if span.kind == "all_reduce"]
        assert [span.name for span in sent] == [f"all_reduce bucket {index}" for index in range(4)]
        sizes = [4 * (64 * 64 + 64)] * 3 + [4 * (64 * 64 + 64 + 1)]  # the last one has the flag
        assert [span.num_bytes for span in sent] == [-(-size // 128) * 128 for size in sizes]  # to 2 ranks x 64 bytes
        assert all(span.lane == "communication" for span in sent)
        starts = [span.start_ns for span in sent]
        assert starts == sorted(starts)
        assert all(start < backward.end_ns - 20e6 for start in starts[:-1])
        assert all(span.end_ns < backward.end_ns for span in sent[:2])  # and over before it, seen by later hooks


@pytest.mark.on_ranks(2)
def test_close_takes_the_hooks_off():
    model = branches()
    DataParallel(model).close()
    replicas = DataParallel(model)
    model(data(dist.get_rank()), ALL).square().mean().backward()
    replicas.synchronize()
    assert_equal(gradients_of(model), whole_batch_gradients([ALL] * 2))
