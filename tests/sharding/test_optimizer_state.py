"""ShardedOptimizer's claims (bytes, calls, memory), its own states, and what it says when something is wrong."""

import math

import pytest
import torch
import torch.distributed as dist
from optimizer_net import Net, adam, batch_of, run_steps, same
from refused import message
from torch import nn

from distlab.blocks.clip import NotFiniteError
from distlab.comm import recorded
from distlab.comm.nodes.wire import ring_bytes
from distlab.sharding import ShardedOptimizer
from distlab.sharding.zero.scatter_in_backward import MAX_UNDER_WAY
from distlab.trace import SpanWriter


def count_a_step(forms):
    """Return, for each form, what one step sends by operation, the sizes of the buckets and the spans."""
    rank, found = dist.get_rank(), {}
    for stage, split in forms:
        spans = SpanWriter(rank)
        model = Net(rank)
        optimizer = ShardedOptimizer(model, adam, stage=stage, split=split, bucket_bytes=1_000, spans=spans)
        run_steps(model, optimizer, [0])
        with recorded() as seen:
            run_steps(model, optimizer, [1])
        optimizer.close()
        sizes = [(one.num_bytes, one.layout.num_elements * one.kind[0].itemsize) for one in optimizer.buckets]
        names = [(span.lane, span.name) for span in spans.trace()]
        calls = [(call.op, call.num_bytes, call.peer) for call in seen.records.calls(rank)]
        found[stage, split] = calls, sizes, names, model.num_wanting
    return found, dist.get_backend()


@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_sends_two_psi(ranks, world_size):
    n = world_size
    forms = [(stage, split) for stage in (1, 2) for split in ("elements", "tensors")]
    results = ranks(n).run(count_a_step, forms)
    for form in forms:
        sent = {}
        for (calls, sizes, names, num_wanting), backend in ((found[form], backend) for found, backend in results):
            for op, num_bytes, _ in calls:
                sent[op] = sent.get(op, 0) + num_bytes
            psi = sum(padded for padded, _ in sizes)
            most = n * 8 if form[1] == "elements" else n * 4 * 8  # less than an element a rank; or than 4
            assert all(0 <= padded - whole < most for padded, whole in sizes)
            assert len(sizes) > 2
            assert sum(b for op, b, _ in calls if op == "all_reduce") == 6 * num_wanting
            buckets = {f"bucket {index}" for index in range(len(sizes))}
            assert {name for lane, name in names if lane == "gather"} == {f"all_gather {one}" for one in buckets}
            if form[1] == "elements":
                halves = [(op, b) for op, b, _ in calls if op in ("send", "all_gather", "reduce_scatter")]
                assert sum(b if op == "send" else ring_bytes(op, b, n) for op, b in halves) == 2 * psi * (n - 1) // n
                own_calls = {"all_gather", "reduce_scatter"} if backend == "shared" else {"send"}
                assert {op for op, _ in halves} == own_calls
                scattered = {name for lane, name in names if lane == "scatter"}
                assert scattered == {f"reduce_scatter {one}" for one in buckets}
        if form[1] == "tensors":
            assert sent["reduce"] == sent["broadcast"] == n * psi, "each rank gives all buckets; (n-1)/n of it travels"


class Watch:
    """Bytes of gradients that live, seen after each gradient of a backward pass: each storage once."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.peak = model, optimizer, 0
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.look())

    def look(self):
        tensors = [*(parameter.grad for parameter in self.model.parameters()), *self.optimizer.gradient_tensors]
        storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
        self.peak = max(self.peak, sum({one.data_ptr(): one.nbytes() for one in storages}.values()))


def measure_memory(num_layers=12, width=64):
    found = {}
    for stage in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))
        optimizer = ShardedOptimizer(model, adam, stage=stage, bucket_bytes=width * width * 4)
        watch = Watch(model, optimizer)
        for _ in range(3):
            model(torch.randn(2, width)).square().mean().backward()
            optimizer.synchronize()
            optimizer.step()
            watch.look()
            optimizer.zero_grad()
        optimizer.close()
        found[stage] = watch.peak
    return found


def test_gradients_take_what_the_formula_says(ranks):
    layer, n = 64 * 64 * 4, 4
    psi, arriving = 12 * layer, MAX_UNDER_WAY * layer * (n - 1) // n
    for found in ranks(n).run(measure_memory):
        assert found[1] <= psi + layer + arriving, "all gradients, the one that was made last, sums under way"
        assert found[2] <= psi // n + (MAX_UNDER_WAY + 1) * layer + layer + arriving < psi


def fail_in_many_ways():
    """Return the first words of each error, and what was said; all ranks go on after each."""
    rank, found = dist.get_rank(), []

    def attempt(words, call):
        found.append((words, message(call)))

    def build(model=None, make=adam, **options):
        return ShardedOptimizer(Net() if model is None else model, make, **{"bucket_bytes": 1_000, **options})

    def step(optimizer, *, skip=False, change=None, times=1):
        def call():
            for _ in range(times):
                loss = optimizer.module(batch_of(0), spare=not skip).square().mean()
                (loss if change is None else change(loss)).backward()
            optimizer.synchronize()

        return call

    attempt("stage (3 is FullyShard) is '3'; choose one of 1, 2", lambda: build(stage=3))
    attempt("ranks disagree on stage, bucket_bytes, split, unused, check_finite", lambda: build(stage=1 + rank))
    attempt("split is 'rows'; choose one of elements, tensors", lambda: build(split="rows"))
    attempt("unused is 'ignore'", lambda: build(unused="ignore"))
    attempt("bucket_bytes is 0", lambda: build(bucket_bytes=0))
    attempt("ranks disagree on parameters", lambda: build(nn.Linear(3 + rank, 2)))
    attempt("no parameter of the module requires a gradient", lambda: build(nn.Linear(3, 2).requires_grad_(False)))
    attempt("ranks disagree on optimizer", lambda: build(make=adam if rank else lambda p: torch.optim.SGD(p, lr=0.1)))
    whole = 'Adafactor looks at whole tensors, and split="elements" cuts them'
    attempt(whole, lambda: build(make=torch.optim.Adafactor))
    attempt("LBFGS looks at all parameters at once", lambda: build(nn.Linear(2, 2), torch.optim.LBFGS, split="tensors"))
    for stage in (1, 2):
        optimizer = build(stage=stage)
        attempt("got no gradient on some rank of the group: spare.bias (rank 1); ", step(optimizer, skip=rank == 1))
        optimizer.zero_grad()
        attempt("got a second gradient before synchronize(): ", step(optimizer, times=2))
        optimizer.zero_grad()
        not_finite = step(optimizer, change=lambda loss: loss * (math.nan if rank == 1 else 1))
        attempt("got a gradient that is not finite (NaN or infinite): ", not_finite)
        assert found[-1][1].startswith(NotFiniteError.__name__)
        assert "first.weight" in found[-1][1]
        optimizer.zero_grad()
        run_steps(optimizer.module, optimizer, [0, 1])  # and it goes on
        attempt("takes no closure", lambda one=optimizer: one.step(lambda: 0))
        attempt("takes no further parameters", lambda one=optimizer: one.add_param_group({"params": []}))
        optimizer.module.first.weight.data = optimizer.module.first.weight.data.clone()
        moved = "1 parameter left the buckets: the parameter's memory was replaced since construction: first.weight"
        attempt(moved, step(optimizer))
        optimizer.close()
    sparse = build(nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)))
    sparse.module(torch.tensor([1, 2])).sum().backward()
    attempt("0.weight (rank 0, 1). Build the layer with sparse=False", sparse.synchronize)
    state, states = build().state_dict(), [None] * 2
    dist.all_gather_object(states, state)
    attempt("are from different saves", lambda: build().load_state_dict({**state, "shard": 5}))
    attempt("were not given; pass the saved shards of all ranks", lambda: build().load_state_dict(states[1 - rank]))
    attempt("this is not a saved shard", lambda: build().load_state_dict({"state": {}, "param_groups": []}))
    return found


def test_every_misuse_is_named_on_every_rank(ranks):
    for found in ranks(2).run(fail_in_many_ways):
        for words, text in found:
            assert words in text, (words, text)


def more_ranks_than_elements():
    model = nn.Linear(1, 1, bias=False)
    seen = []

    def make(given):
        seen.extend(one.shape for one in given)
        return adam(given)

    optimizer = ShardedOptimizer(model, make, stage=2)
    (model(torch.full((1, 1), float(dist.get_rank()))) * 2).sum().backward()
    optimizer.synchronize()
    norm = optimizer.clip_gradients_(1e9)
    optimizer.step()
    optimizer.close()
    assert seen == [(1, 1)], "groups are made of whole parameters on every rank"
    assert norm.item() == pytest.approx(2.0)  # the mean of 0, 2 and 4
    return model.weight.item()


def test_a_rank_may_own_nothing_and_the_first_rank_gives_its_values(ranks):
    def both():
        model = Net(dist.get_rank())
        ShardedOptimizer(model, adam).close()
        assert same(Net(0).state_dict(), model.state_dict()), "weights and buffers"
        pairs = nn.ParameterList([torch.ones(3), torch.ones(2, 2), torch.ones(1)])
        ShardedOptimizer(pairs, adam, split="tensors").close()
        assert torch.view_as_complex(pairs[1]).tolist() == [1 + 1j] * 2
        return more_ranks_than_elements()

    assert len(set(ranks(3).run(both))) == 1
