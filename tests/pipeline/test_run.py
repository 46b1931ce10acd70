"""Pipeline computes what one process does, whatever stages hand to each other, and does it in the plan's order."""

import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import distlab.pipeline.wire as wire
from distlab.pipeline import Pipeline
from distlab.pipeline.plain import plain_step
from distlab.plan import add_communication, gpipe, interleaved, make_schedule, one_f_one_b, parse_schedule, validate
from distlab.rng import generator
from distlab.trace import SpanWriter

NUM_MICROBATCHES = 4
OWN_ORDER = "0F0,0F1,0I0,0W0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1I1,1F2,1B2,1W1,1F3,1B3"


class States(NamedTuple):
    """What the first stage hands over, among other things."""

    each: torch.Tensor
    mean: torch.Tensor


class First(nn.Module):
    """Makes a dict of a NamedTuple, whole numbers, a mask that wants no gradient and an output that nobody uses."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.unused = nn.Linear(6, 2)

    def forward(self, tokens, scale):
        x = self.embedding(tokens)
        mask = (tokens % 2).to(x.dtype).unsqueeze(-1)
        return {
            "states": States(x * scale, x.mean(1)),
            "tokens": tokens,
            "mask": mask,
            "unused": self.unused(x),
            "n": 3,
        }


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.frozen = nn.Linear(6, 5).requires_grad_(False)

    def forward(self, value):
        states, tokens = value["states"], value["tokens"]
        assert not value["mask"].requires_grad
        assert tokens.dtype == torch.int64
        return self.layer(torch.tanh(states.each)) * value["mask"], self.frozen(states.mean) / value["n"]


class Third(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x, mean):
        return self.layer(x).mean(1) + self.layer(mean)


def make_model():
    torch.manual_seed(0)
    return [First().double(), Second().double(), Third().double()]


def make_batch(step, size=8, length=7):
    random = generator(step, 0, "batch")
    tokens = torch.randint(11, (size, length), generator=random)
    scale = torch.rand(size, 1, 1, dtype=torch.float64, generator=random)
    return (tokens, scale), torch.randn(size, 3, dtype=torch.float64, generator=random)


def loss_fn(outputs, targets):
    return (outputs - targets).square().mean()


def whole(modules, inputs):
    value = modules[0](*inputs)
    for module in modules[1:]:
        value = module(*value) if type(value) is tuple else module(value)
    return value


def chain(num_stages):
    torch.manual_seed(1)
    sizes = [5, 7, 3, 6, 4][: num_stages + 1]
    return [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in zip(sizes, sizes[1:], strict=False)]


def chain_batch(num_stages, size=8):
    random = generator(7, 0, "chain")
    inputs = torch.randn(size, 5, dtype=torch.float64, generator=random)
    return inputs, torch.randn(size, [5, 7, 3, 6, 4][num_stages], dtype=torch.float64, generator=random)


def own(modules, schedule):
    return {stage: modules[stage] for stage, rank in enumerate(schedule.home) if rank == dist.get_rank()}


def gradients(modules):
    return {
        f"{stage}.{name}": parameter.grad.clone()
        for stage, module in modules.items()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def merged(results):
    return {name: value for result in results for name, value in result.items()}


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-10, name


def test_nested_values_changing_shapes_and_accumulation_equal_one_process(ranks):
    shapes = [(8, 7), (4, 7), (8, 7), (8, 5)]

    def train():
        modules = make_model()
        schedule = make_schedule("one_f_one_b", 3, NUM_MICROBATCHES)
        pipeline = Pipeline(own(modules, schedule), schedule, loss=loss_fn)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step, (size, length) in enumerate(shapes):
            loss = pipeline.step(*make_batch(step, size, length))
            losses.append(pipeline.mean_loss(loss))
            assert (loss is None) == (dist.get_rank() != 2)
            if step % 2:  # two batches an update
                optimizer.step()
                pipeline.zero_grad()
        assert len(pipeline._known) == 3  # one of the four shapes came twice: nobody was asked again
        pipeline.step(*make_batch(9))
        grads = gradients(own(modules, schedule))
        outputs = pipeline.evaluate(make_batch(9)[0])
        loss = pipeline.evaluate(*make_batch(9))
        assert gradients(own(modules, schedule)).keys() == grads.keys()
        assert (outputs is None) == (dist.get_rank() != 2)
        return grads, losses, outputs, loss

    modules = make_model()
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1, momentum=0.9)
    losses = []
    for step, (size, length) in enumerate(shapes):
        inputs, targets = make_batch(step, size, length)
        loss = loss_fn(whole(modules, inputs), targets)
        loss.backward()
        losses.append(loss.item())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    inputs, targets = make_batch(9)
    outputs = whole(modules, inputs)
    loss_fn(outputs, targets).backward()
    expected = gradients(dict(enumerate(modules)))

    results = ranks(3).run(train)
    found = merged(result[0] for result in results)
    for name in ("0.unused.weight", "0.unused.bias"):  # in a pipeline their gradient is zero, not missing
        assert not found.pop(name).any()
    assert_close(found, expected)
    for result in results:
        assert max(abs(a - b) for a, b in zip(result[1], losses, strict=True)) <= 1e-10
    assert (results[2][2] - outputs).abs().max() <= 1e-10
    assert (results[2][3] - loss_fn(outputs, targets)).abs() <= 1e-10


def test_plain_own_order_explicit_messages_recompute_and_channels_equal_one_process(ranks):
    def train():
        rank, grads = dist.get_rank(), {}
        inputs, targets = chain_batch(2)
        modules = chain(2)
        options = {"num_microbatches": NUM_MICROBATCHES, "between": [7], "loss_fn": loss_fn}
        plain_step(modules[rank], (inputs, targets), **options)
        grads["plain"] = gradients({rank: modules[rank]})
        ways = {
            "gpipe": (gpipe(2, NUM_MICROBATCHES), {}),
            "own order": (parse_schedule(OWN_ORDER), {}),
            "explicit": (add_communication(one_f_one_b(2, NUM_MICROBATCHES)), {}),
            "channels": (parse_schedule(OWN_ORDER), {}),
            "channels again": (parse_schedule(OWN_ORDER), {}),
            "recompute": (gpipe(2, NUM_MICROBATCHES), {"recompute": True}),
            "recompute, split": (parse_schedule(OWN_ORDER), {"recompute": True}),
            "naive": (make_schedule("naive", 2, NUM_MICROBATCHES), {}),
        }
        for way, (schedule, options) in ways.items():
            modules = chain(2)
            real, wire.needs_batches = wire.needs_batches, lambda *_, way=way: "channels" in way  # as on nccl
            pipeline = Pipeline(own(modules, schedule), schedule, loss=loss_fn, **options)
            wire.needs_batches = real
            pipeline.step(inputs if rank == 0 else None, targets if rank == 1 else None)
            grads[way] = gradients(own(modules, schedule))
            plan = [action for action in schedule.actions(rank) if action.kind in "FBIW"]
            assert pipeline.order == plan, way
            assert pipeline.peak_in_flight == validate(schedule).peak_in_flight[rank], way
            assert len(pipeline._channels) == 2 * ("channels" in way)
            pipeline.close()
        return grads

    results = ranks(2).run(train)
    modules = chain(2)
    inputs, targets = chain_batch(2)
    loss_fn(nn.Sequential(*modules)(inputs), targets).backward()
    expected = gradients(dict(enumerate(modules)))
    for way in results[0]:
        assert_close(merged(result[way] for result in results), expected)
    for result in results:  # computed again, not otherwise
        assert all(torch.equal(result["gpipe"][name], result["recompute"][name]) for name in result["gpipe"])


class Watched(nn.Module):
    """Counts its calls, and which of its inner activations are still there."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(7, 7).double()
        self.calls, self.inner = [], []

    def forward(self, x):
        inner = self.layer(x).sigmoid()
        if not x.is_meta:
            self.calls.append(1)
            self.inner.append(weakref.ref(inner))
        return inner.square()

    @property
    def num_alive(self):
        return sum(reference() is not None for reference in self.inner)


def test_recompute_keeps_inputs_only_and_stages_report_complete_gradients(ranks):
    def train():
        schedule, alive, calls = interleaved(2, NUM_MICROBATCHES), {}, {}
        inputs, targets = chain_batch(1)
        inputs, targets = inputs.repeat(1, 2)[:, :7], targets
        for recompute in (False, True):
            modules = {stage: Watched() for stage in own([None] * 4, schedule)}
            watched = [modules[stage] for stage in modules]
            seen = []

            def loss(outputs, targets, watched=watched, seen=seen):
                seen.append(sum(module.num_alive for module in watched))
                return loss_fn(outputs, targets)

            pipeline = Pipeline(modules, schedule, loss=loss, recompute=recompute)
            complete = {}
            pipeline.on_stage_complete = lambda stage, complete=complete, modules=modules: complete.update(
                {stage: gradients({stage: modules[stage]})}
            )
            pipeline.step(inputs, targets)
            final = gradients(modules)
            reported = merged(complete.values())
            assert list(complete) == sorted(modules, reverse=True)  # later stages end first
            assert all(torch.equal(final[name], reported[name]) for name in final)
            alive[recompute], calls[recompute] = max(seen, default=0), sum(len(module.calls) for module in watched)
        return alive, calls

    results = ranks(2).run(train)
    for rank, (alive, calls) in enumerate(results):
        assert calls == {False: 2 * NUM_MICROBATCHES, True: 4 * NUM_MICROBATCHES}
        if rank == 1:  # where the loss looks
            assert alive[False] > 1
            assert alive[True] <= 1


def test_receives_are_posted_before_the_computation_that_precedes_their_use(ranks):
    def train():
        spans, schedule = SpanWriter(dist.get_rank()), one_f_one_b(2, NUM_MICROBATCHES)
        modules = chain(2)
        modules[0].requires_grad_(False)  # its output wants no gradient, and none is sent
        pipeline = Pipeline(own(modules, schedule), schedule, loss=loss_fn, spans=spans)
        pipeline.step(*chain_batch(2))
        return spans.trace()

    pool = ranks(2)
    traces = pool.run(train)
    records = pool.records()
    received = [call.start_ns for call in records.calls(1) if call.op == "recv"]
    forward = [span.start_ns for span in traces[1] if span.kind == "F"]
    assert len(received) == len(forward) == NUM_MICROBATCHES
    for later, earlier in zip(received[1:], forward, strict=False):
        assert later < earlier  # while micro-batch k is computed, k + 1 may arrive
    sent = [[call.num_bytes for call in records.calls(rank) if call.op == "send"] for rank in range(2)]
    assert sent == [[2 * 7 * 8] * NUM_MICROBATCHES, []]
    lanes = {(span.lane, span.kind) for trace in traces for span in trace}
    assert {("compute", "F"), ("compute", "B"), ("send", "SEND_F"), ("receive", "RECV_F")} <= lanes
    assert {(span.name, span.stage, span.microbatch) for span in traces[1] if span.kind == "F"} == {
        (f"1F{k}", 1, k) for k in range(NUM_MICROBATCHES)
    }


def test_tensors_that_were_sent_are_let_go_when_the_plan_says_that_they_were_used(ranks):
    def train():
        real, seen = wire.Wire.send, {}

        def send(self, action, tensors):
            real(self, action, tensors)
            seen[name] = max(seen.get(name, 0), len(self._alive))

        wire.Wire.send = send
        try:
            for name in ("gpipe", "one_f_one_b"):
                schedule = make_schedule(name, 2, 8)
                Pipeline(own(chain(2), schedule), schedule, loss=loss_fn).step(*chain_batch(2))
        finally:
            wire.Wire.send = real
        return seen

    first, last = ranks(2).run(train)
    assert first == {"gpipe": 8, "one_f_one_b": 2}  # as many as are in flight
    assert last["one_f_one_b"] <= 2


def test_one_rank_alone_runs_a_pipeline_too(ranks):
    def train():
        inputs, targets = chain_batch(2)
        found = []
        for name in ("zb_h1", "interleaved", "zb_v"):
            schedule = make_schedule(name, 1, NUM_MICROBATCHES)
            modules = chain(2)[: schedule.num_stages] if schedule.num_stages == 2 else [nn.Sequential(*chain(2))]
            pipeline = Pipeline(own(modules, schedule), schedule, loss=loss_fn)
            loss = pipeline.step(inputs, targets)
            assert (pipeline.evaluate(inputs, targets) - loss).abs() <= 1e-12
            found.append([parameter.grad for parameter in pipeline.parameters()])
        return found

    whole = nn.Sequential(*chain(2))
    inputs, targets = chain_batch(2)
    loss_fn(whole(inputs), targets).backward()
    for found in ranks(1).run(train)[0]:
        for mine, parameter in zip(found, whole.parameters(), strict=True):
            assert (mine - parameter.grad).abs().max() <= 1e-12
