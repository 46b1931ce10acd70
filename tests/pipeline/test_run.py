"""Pipeline computes what one process does, whatever stages are and hand to each other, in the plan's order."""

import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from equal import Calls, own_stages as own
from torch import nn

import distlab.pipeline.wire as wire
from distlab.comm import recorded
from distlab.pipeline import Pipeline
from distlab.pipeline.plain import plain_step
from distlab.plan import add_communication, gpipe, interleaved, make_schedule, one_f_one_b, parse_schedule, validate
from distlab.rng import generator
from distlab.trace import SpanWriter

NUM_MICROBATCHES = 4
OWN_ORDER = "0F0,0F1,0I0,0W0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1I1,1F2,1B2,1W1,1F3,1B3"


def first(stage, tokens, scale):
    """Make a dict of a tuple, whole numbers, a mask that wants no gradient and an output that nobody uses."""
    x, mask = stage.embedding(tokens), (tokens % 2).double().unsqueeze(-1)
    return {"states": (x * scale, x.mean(1)), "tokens": tokens, "mask": mask, "off": stage.unused(x), "n": 3}


def second(stage, value):
    (each, mean), tokens = value["states"], value["tokens"]
    assert not value["mask"].requires_grad
    assert tokens.dtype == torch.int64
    return stage.layer(torch.tanh(each)) * value["mask"], stage.frozen(mean) / value["n"]


def third(stage, x, mean):
    return stage.layer(x).mean(1) + stage.layer(mean)


def make_model():
    torch.manual_seed(0)
    made = [Calls(first, embedding=nn.Embedding(11, 6), unused=nn.Linear(6, 2))]
    made.append(Calls(second, layer=nn.Linear(6, 5), frozen=nn.Linear(6, 5).requires_grad_(False)))
    return [module.double() for module in (*made, Calls(third, layer=nn.Linear(5, 3)))]


def make_batch(step, size=8, length=7):
    random = generator(step, 0, "batch")
    tokens = torch.randint(11, (size, length), generator=random)
    scale = torch.rand(size, 1, 1, dtype=torch.float64, generator=random)
    return (tokens, scale), torch.randn(size, 3, dtype=torch.float64, generator=random)


loss_fn = nn.functional.mse_loss


def whole(modules, inputs):
    value = modules[0](*inputs)
    for module in modules[1:]:
        value = module(*value) if type(value) is tuple else module(value)
    return value


def chain():
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in ((7, 7), (7, 3))]


def chain_batch(width=3):
    return [torch.randn(8, size, dtype=torch.float64, generator=generator(7, 0, "chain")) for size in (7, width)]


def gradients(modules):
    return {
        f"{stage}.{name}": parameter.grad.clone()
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def assert_close(found, expected):
    """What this rank has is what one process has under the same names."""
    assert found
    for name, value in found.items():
        assert (value - expected[name]).abs().max() <= 1e-10, name


@pytest.mark.on_ranks(3)
def test_nested_values_changing_shapes_and_accumulation_equal_one_process():
    modules, twins, is_last = make_model(), make_model(), dist.get_rank() == 2
    schedule = make_schedule("one_f_one_b", 3, NUM_MICROBATCHES)
    mine = own(modules, schedule)
    pipeline = Pipeline(mine, schedule, loss=loss_fn)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    alone = torch.optim.SGD([p for module in twins for p in module.parameters()], lr=0.1, momentum=0.9)
    for step, (size, length) in enumerate([(8, 7), (4, 7), (8, 7), (8, 5)]):
        inputs, targets = make_batch(step, size, length)
        loss, wanted = pipeline.step(inputs, targets), loss_fn(whole(twins, inputs), targets)
        wanted.backward()
        assert abs(pipeline.mean_loss(loss) - wanted.item()) <= 1e-10
        assert (loss is None) == (not is_last)
        if step % 2:  # two batches an update
            for one in (optimizer, alone):
                one.step()
                one.zero_grad()
    inputs, targets = make_batch(9)
    pipeline.step(inputs, targets)
    wanted = whole(twins, inputs)
    loss_fn(wanted, targets).backward()
    found = gradients(mine)
    for name in [name for name in found if "unused" in name]:  # in a pipeline their gradient is zero, not missing
        assert not found.pop(name).any()
    assert_close(found, gradients(dict(enumerate(twins))))
    outputs, loss = pipeline.evaluate(inputs), pipeline.evaluate(inputs, targets)
    assert_close(found, gradients(mine))
    assert (outputs is None) == (not is_last)
    if is_last:
        assert (outputs - wanted).abs().max() <= 1e-10
        assert (loss - loss_fn(wanted, targets)).abs() <= 1e-10


@pytest.mark.on_ranks(2)
def test_plain_own_order_explicit_messages_recompute_and_channels_equal_one_process():
    rank, (inputs, targets) = dist.get_rank(), chain_batch()
    twins, modules = chain(), chain()
    loss_fn(nn.Sequential(*twins)(inputs), targets).backward()
    expected = gradients(dict(enumerate(twins)))
    options = {"num_microbatches": NUM_MICROBATCHES, "between": [7], "loss_fn": loss_fn}
    plain_step(modules[rank], (inputs, targets), **options)
    assert_close(gradients({rank: modules[rank]}), expected)
    ways = {
        "gpipe": (gpipe(2, NUM_MICROBATCHES), {}),
        "own order": (parse_schedule(OWN_ORDER), {}),
        "explicit": (add_communication(one_f_one_b(2, NUM_MICROBATCHES)), {}),
        "channels": (parse_schedule(OWN_ORDER), {}),
        "recompute": (gpipe(2, NUM_MICROBATCHES), {"recompute": True}),
        "recompute, split": (parse_schedule(OWN_ORDER), {"recompute": True}),
    }
    found = {}
    for way, (schedule, options) in ways.items():
        mine = own(chain(), schedule)
        with mock.patch.object(wire, "needs_batches", return_value=way == "channels"):  # as on nccl
            pipeline = Pipeline(mine, schedule, loss=loss_fn, **options)
        pipeline.step(inputs if rank == 0 else None, targets if rank == 1 else None)
        found[way] = gradients(mine)
        assert_close(found[way], expected)
        assert pipeline.order == [action for action in schedule.actions(rank) if action.kind in "FBIW"], way
        assert pipeline.peak_in_flight == validate(schedule).peak_in_flight[rank], way
        pipeline.close()
    for name, gradient in found["gpipe"].items():  # computed again, not otherwise
        assert torch.equal(gradient, found["recompute"][name])


class Watched(nn.Module):
    """Counts its calls, and which of its inner activations are still there."""

    def __init__(self):
        super().__init__()
        self.layer, self.inner = nn.Linear(7, 7).double(), []

    def forward(self, x):
        inner = self.layer(x).sigmoid()
        if not x.is_meta:
            self.inner.append(weakref.ref(inner))
        return inner.square()


@pytest.mark.on_ranks(2)
def test_recompute_keeps_inputs_only_and_stages_report_complete_gradients():
    schedule, (inputs, targets) = interleaved(2, NUM_MICROBATCHES), chain_batch(7)
    for recompute in (False, True):
        modules, seen, complete = {stage: Watched() for stage in own([None] * 4, schedule)}, [], {}

        def loss(outputs, targets, modules=modules, seen=seen):
            seen.append(sum(inner() is not None for module in modules.values() for inner in module.inner))
            return loss_fn(outputs, targets)

        pipeline = Pipeline(modules, schedule, loss=loss, recompute=recompute)
        pipeline.on_stage_complete = lambda stage, complete=complete, modules=modules: complete.update(
            {stage: gradients({stage: modules[stage]})}
        )
        pipeline.step(inputs, targets)
        reported = {name: value for each in complete.values() for name, value in each.items()}
        assert list(complete) == sorted(modules, reverse=True)  # later stages end first
        assert all(torch.equal(value, reported[name]) for name, value in gradients(modules).items())
        assert sum(len(module.inner) for module in modules.values()) == (4 if recompute else 2) * NUM_MICROBATCHES
        if dist.get_rank() == 1:  # where the loss looks
            assert max(seen) <= 1 if recompute else max(seen) > 1


@pytest.mark.on_ranks(2)
def test_receives_are_posted_before_the_computation_that_precedes_their_use():
    rank, schedule = dist.get_rank(), one_f_one_b(2, NUM_MICROBATCHES)
    spans, modules = SpanWriter(rank), chain()
    modules[0].requires_grad_(False)  # its output wants no gradient, and none is sent
    pipeline = Pipeline(own(modules, schedule), schedule, loss=loss_fn, spans=spans)
    with recorded() as seen:
        pipeline.step(*chain_batch())
    calls, trace = list(seen.records.calls(rank)), list(spans.trace())
    assert [call.num_bytes for call in calls if call.op == "send"] == [[2 * 7 * 8] * NUM_MICROBATCHES, []][rank]
    lanes = {(span.lane, span.kind) for span in trace}
    message = ("receive", "RECV_F") if rank else ("send", "SEND_F")
    assert {("compute", "F"), message} <= lanes
    if rank == 1:
        assert ("compute", "B") in lanes
        received = [call.start_ns for call in calls if call.op == "recv"]
        forward = [span.start_ns for span in trace if span.kind == "F"]
        assert len(received) == len(forward) == NUM_MICROBATCHES
        assert all(map(int.__lt__, received[1:], forward))  # while micro-batch k is computed, k + 1 may arrive
        names = {(span.name, span.stage, span.microbatch) for span in trace if span.kind == "F"}
        assert names == {(f"1F{k}", 1, k) for k in range(NUM_MICROBATCHES)}
