"""What FullyShard claims: bytes sent, when gathers start, what is whole when, and its types."""

import time

import pytest
import torch
import torch.distributed as dist
from equal import square
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import recorded
from distlab.plan import Precision
from distlab.rng import generator
from distlab.sharding import FullyShard, full_state_dict
from distlab.trace import SpanWriter

CONFIG = GPTConfig(vocab_size=257, context=12, num_layers=3, num_heads=2, hidden_size=24, tied=True)
HALF = Precision(compute="bfloat16", master=True, reduce="float32")


def step_of(model, *, seed=0):
    tokens = torch.randint(257, (2, 12), generator=generator(seed, dist.get_rank(), "tokens"))
    GPT.loss(model(tokens), tokens).backward()


def sent(seen):
    """Bytes that this rank sent: in collectives as a ring would, and in messages."""
    rank = dist.get_rank()
    return seen.records.ring_equivalent_bytes(rank) + seen.records.sent_bytes(rank)


@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_sends_three_times_the_parameters_and_two_where_they_stay(ranks, world_size):
    def bytes_sent():
        found = {}
        for name, options in {
            "let go": {},
            "stay": {"reshard_after_forward": False},
            "half": {"precision": HALF},
            "far": {"prefetch": 2},
        }.items():
            model = FullyShard(GPT(CONFIG), **options)
            for step in range(2):  # the second gathers ahead
                with recorded() as seen:
                    step_of(model)
                    model.synchronize()
                with recorded() as evaluation, torch.no_grad():
                    model(torch.zeros(1, 5, dtype=torch.long))
                counts = [seen.records.num_calls(op) for op in ("send", "recv", "all_gather", "reduce_scatter")]
                sizes = [sent(one) for one in (seen, evaluation)]
                found[name, step] = (sizes, counts, sum(unit.layout.padded_size for unit in model.units))
        return found, dist.get_backend()

    for result, backend in ranks(world_size).run(bytes_sent):
        for (name, _), (sizes, counts, elements) in result.items():
            share = elements * 4 * (world_size - 1) // world_size
            same_order = 40 * (world_size - 1)  # do all ranks run the same units?
            times = {"let go": 3, "far": 3, "stay": 2, "half": 2}[name]  # half: gathers of 2 bytes, sums of 4
            expected = [times * share, share // (2 if name == "half" else 1)]
            # Compared once in each forward and once in each backward; evaluation has no backward.
            assert sizes == [expected[0] + 2 * same_order, expected[1] + same_order], name
            gathers, scatters, compared = 4 * (1 if name == "stay" else 2), 4, 2  # three blocks and the root
            messages = (world_size - 1) * (gathers + scatters)
            if backend == "shared":
                assert counts == [0, 0, gathers + compared, scatters], name
            else:
                assert counts == [messages, messages, compared, 0], name


def test_replicas_add_an_all_reduce_of_a_shard(ranks):
    def bytes_sent():
        row, column = square()
        model = FullyShard(GPT(CONFIG), row, replicas=column)
        with recorded() as seen:
            step_of(model)
            model.synchronize()
        shard_bytes = sum(unit.layout.shard_size for unit in model.units) * 4
        return sent(seen), 3 * shard_bytes + 2 * shard_bytes // 2 + 2 * 40

    assert all(sent == expected for sent, expected in ranks(4).run(bytes_sent))


class Noting(nn.Module):
    """A layer that notes when its forward and its backward compute, and takes its time."""

    def __init__(self, index, spans):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.index, self.spans = index, spans

    def forward(self, x):
        x = _NoteBackward.apply(x, self)  # its backward runs when the layer's has been computed
        with self.spans.span(f"forward {self.index}"):
            time.sleep(0.005)
            y = self.linear(x)
        return _NoteBackward.apply(y, self)


class _NoteBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        with ctx.layer.spans.span(f"backward {ctx.layer.index}"):
            time.sleep(0.005)
        return gradient, None


def test_gathers_start_one_unit_ahead_and_travel_while_it_computes(ranks):
    def starts(prefetch):
        spans = SpanWriter(dist.get_rank())
        model = FullyShard(nn.Sequential(*(Noting(i, spans) for i in range(4))), prefetch=prefetch, spans=spans)
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        model.synchronize()
        return [(span.name, span.start_ns) for span in spans.trace()]

    def of(rows, name):
        return [start for found, start in rows if found == name]

    for rows in ranks(2).run(starts, 1):
        for index in range(4):
            (forward,) = of(rows, f"forward {index}")
            backward = max(of(rows, f"backward {index}"))
            if index < 3:
                assert of(rows, f"all_gather unit {index + 1}")[0] < forward  # forward: the next
            if index > 0:
                assert of(rows, f"all_gather unit {index - 1}")[1] < backward  # backward: the one before
                assert of(rows, f"reduce_scatter unit {index}")[0] < max(of(rows, f"backward {index - 1}"))
    for rows in ranks(2).run(starts, 0):
        for index in range(3):
            assert of(rows, f"all_gather unit {index + 1}")[0] > of(rows, f"forward {index}")[0]


class Looking(nn.Module):
    """A layer that calls somebody in the middle of its forward and of its backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.look = None

    def forward(self, x):
        y = self.linear(x)
        self.look()
        y.register_hook(lambda _: self.look())
        return y.tanh()


def test_only_units_at_work_are_whole(ranks):
    def most(prefetch, reshard):
        model = FullyShard(
            nn.Sequential(*(Looking() for _ in range(6))), prefetch=prefetch, reshard_after_forward=reshard
        )
        seen = []

        def look():
            seen.append(sum(unit.buffer.untyped_storage().nbytes() > 0 for unit in model.units))

        for layer in model.module:
            layer.look = look
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            model.synchronize()
            look()
        return max(seen), min(seen[:6]), seen[-1]

    def all_of_them():
        return [most(0, True), most(1, True), most(2, True), most(1, False)]

    for result in ranks(2).run(all_of_them):
        assert result == [(1, 1, 0), (2, 1, 0), (3, 1, 0), (6, 2, 0)]


def test_half_precision_follows_torchs_rule(ranks):
    def train(ours):
        torch.manual_seed(0)
        module = GPT(CONFIG)
        if ours:
            model = FullyShard(module, precision=HALF)
            assert all(unit.shard.dtype == torch.float32 for unit in model.units)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            mesh = dist.init_device_mesh("cpu", (2,))
            for block in module.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            model = fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        corpus = ByteCorpus(python_documentation(), CONFIG.context)
        for step in range(5):
            inputs, targets = corpus.batch(step, 4, seed=1, rank=dist.get_rank(), world_size=2)
            optimizer.zero_grad()
            GPT.loss(model(inputs).float(), targets).backward()
            if ours:
                model.synchronize()
            optimizer.step()
        if not ours:
            return {name: p.full_tensor().detach() for name, p in model.state_dict().items()}
        with model.summon():  # in the type of compute
            assert model.module.norm.weight.dtype == torch.bfloat16
        return full_state_dict(model)

    for mine, torchs in ranks(2).run(lambda: (train(True), train(False))):
        assert mine.keys() == torchs.keys()
        assert max((mine[name] - torchs[name]).abs().max().item() for name in mine) <= 1e-6
