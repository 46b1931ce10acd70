"""DataParallel with what real models bring: unused, tied, frozen and sparse parameters, accumulation, groups."""

import time
import uuid

import pytest
import torch
import torch.distributed as dist
from equal import square
from refused import message

from distlab.comm import RankError, recorded
from distlab.data_parallel import DataParallel
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
USES = [
    pytest.param([ALL, ("first", "third")], id="one rank skips a layer"),
    pytest.param([("first", "second"), ("first",)], id="a layer nobody uses"),
    pytest.param([("third",), ("second",), ("first",)], id="each rank a different layer"),
    pytest.param([ALL, ("third", "second", "first"), ("second", "first", "third")], id="each rank a different order"),
]


@pytest.mark.parametrize("uses", USES)
def test_zeros_for_what_is_unused_equal_one_process(ranks, uses):
    def gradients():
        model = branches()
        replicas = DataParallel(model, bucket_bytes=200, first_bucket_bytes=50, unused="zeros")
        rank = dist.get_rank()
        for names in (uses[rank], ALL, uses[rank]):  # at the end with views in place, full of what is used no longer
            model.zero_grad()
            model(data(rank), names).square().mean().backward()
            replicas.synchronize()
        return gradients_of(model)

    for result in ranks(len(uses)).run(gradients):
        assert_equal(result, whole_batch_gradients(uses))


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


def test_synchronize_without_backward_is_an_error_and_no_hang(ranks):
    def train():
        model = branches()
        replicas = DataParallel(model)
        if dist.get_rank() == 0:
            model(data(0), ALL).sum().backward()
        replicas.synchronize()

    with pytest.raises(RankError, match="6 parameters got no gradient on some rank"):
        ranks(2).run(train)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.on_ranks(2)
def test_both_ways_of_zeroing_keep_gradients_in_the_buckets(set_to_none):
    model = branches()
    replicas = DataParallel(model, bucket_bytes=200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = []
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(data(dist.get_rank()), ALL).square().mean().backward()
        replicas.synchronize()
        places.append([parameter.grad.data_ptr() for parameter in model.parameters()])
    assert places[0] == places[1] == places[2]
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
def test_accumulation_sends_once_and_equals_one_process():
    expected = whole_batch_gradients([ALL] * 2)
    more = whole_batch_gradients([("second",)] * 2)
    expected = {name: g if more[name] is None else g + more[name] for name, g in expected.items()}
    model = branches()
    replicas = DataParallel(model, bucket_bytes=200, unused="zeros")
    rank = dist.get_rank()
    with recorded() as sent:
        with replicas.no_sync():
            model(data(rank), ALL).square().mean().backward()
        model(data(rank), ("second",)).square().mean().backward()  # first and third only accumulated
        replicas.synchronize()
    gradients = gradients_of(model)
    assert sent.records.num_calls() == replicas.num_buckets
    assert_equal(gradients, expected)


def test_ranks_with_different_models_are_named_at_construction(ranks):
    def build(change):
        torch.manual_seed(dist.get_rank())
        model = Branches()
        if dist.get_rank() == 1:
            change(model)
        DataParallel(model)

    def wider(model):
        model.second = torch.nn.Linear(4, 5)

    def frozen(model):
        model.first.bias.requires_grad_(False)

    def other_type(model):
        model.third.double()

    for change in (wider, frozen, other_type):
        with pytest.raises(RankError, match=r"ranks disagree on parameters(.|\n)*rank 1 has"):
            ranks(2).run(build, change)


def test_options_that_cannot_be_are_refused(ranks):
    def build(options, freeze):
        model = Branches()
        if freeze:
            model.requires_grad_(False)
        return message(lambda: DataParallel(model, **options))

    for options, freeze, words in [
        ({"unused": "ignore"}, False, "unused is 'ignore'; choose one of error, zeros"),
        ({"bucket_bytes": 0}, False, "bucket_bytes is 0"),
        ({"bucket_bytes": -5}, False, "bucket_bytes is -5"),
        ({"first_bucket_bytes": 0}, False, "first_bucket_bytes is 0"),
        ({}, True, "no parameter of the module requires a gradient"),
    ]:
        assert all(words in text for text in ranks(2).run(build, options, freeze))


def test_tied_parameters_are_sent_once_and_frozen_ones_never(ranks):
    def train():
        model = branches()
        model.second.weight = model.first.weight
        model.third.requires_grad_(False)
        replicas = DataParallel(model)
        model(data(dist.get_rank()), ALL).square().mean().backward()
        replicas.synchronize()
        return replicas.num_bytes, model.third.weight.grad, model.first.weight.grad

    def alone():
        model = branches()
        model.second.weight = model.first.weight
        (sum(model(data(rank), ALL).square().mean() for rank in range(2)) / 2).backward()
        return model.first.weight.grad

    expected = alone()
    for num_bytes, frozen, tied in ranks(2).run(train):
        assert num_bytes == 256  # 8 * (16 + 4 + 4 gradients and a flag) = 200, rounded up to 2 ranks x 64
        assert frozen is None
        assert torch.allclose(tied, expected, rtol=0, atol=1e-13)


def test_a_parameter_that_thaws_later_is_an_error(ranks):
    def train():
        model = branches()
        model.third.requires_grad_(False)
        replicas = DataParallel(model)
        model.third.bias.requires_grad_(True)
        model(data(0), ALL).sum().backward()
        replicas.synchronize()

    with pytest.raises(RankError, match="third.bias was frozen when DataParallel was built"):
        ranks(2).run(train)


def test_a_sparse_gradient_is_refused_by_name(ranks):
    def train():
        model = torch.nn.Embedding(5, 2, sparse=True)
        replicas = DataParallel(model)
        model(torch.tensor([1, 2])).sum().backward()
        replicas.synchronize()

    with pytest.raises(RankError, match="got a sparse gradient.*: weight.*sparse=False"):
        ranks(2).run(train)


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


def test_two_groups_average_apart_and_two_groups_of_one_rank_together(ranks):
    def train():
        first, second = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
        row, column = map(DataParallel, (first, second), square())
        x = torch.full((1, 2), float(dist.get_rank()))
        (first(x) + second(x)).sum().backward()
        row.synchronize()
        column.synchronize()
        return first.weight.grad[0, 0].item(), second.weight.grad[0, 0].item()

    assert ranks(4).run(train) == [(0.5, 1.0), (0.5, 2.0), (2.5, 1.0), (2.5, 2.0)]


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
