"""What is wrong is told on every rank in the same words; nothing hangs, and the ranks go on."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab.pipeline import Pipeline, StageError, TiedParameter
from distlab.plan import gpipe, make_schedule, one_f_one_b, parse_schedule
from distlab.rng import generator

NUM_MICROBATCHES = 4


class Breaking(torch.autograd.Function):
    """Raises in backward where its gradient is told to."""

    @staticmethod
    def forward(ctx, x, breaks):
        ctx.breaks = breaks
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.breaks:
            raise ArithmeticError("the gradient broke")
        return gradient, None


class Fragile(nn.Module):
    """Raises in forward or backward of one call, and, where it is wary, on an input of zeros only."""

    def __init__(self, width=6):
        super().__init__()
        self.layer = nn.Linear(width, width).double()
        self.breaks, self.calls, self.is_wary = None, 0, False

    def forward(self, x):
        if x.is_meta:
            return self.layer(x)
        self.calls += 1
        if self.breaks == ("F", self.calls - 1):
            raise ArithmeticError("the input broke")
        if self.is_wary and not x.any():
            raise ArithmeticError("only a consequence")
        return Breaking.apply(self.layer(x).tanh(), self.breaks == ("B", self.calls - 1))


class NeedsNumbers(nn.Module):
    """Cannot run on the meta device; changes a buffer and draws a number in forward."""

    def __init__(self, width):
        super().__init__()
        self.layer, self.width = nn.Linear(width, width).double(), width
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        assert x.sum().item() is not None
        self.count += 1
        return self.layer(x) * torch.rand(1, dtype=x.dtype)


def mean_square(outputs, targets):
    return (outputs - targets).square().mean()


def batch(num_inputs=8, num_targets=8, width=6):
    random = generator(3, 0, "batch")
    inputs = torch.randn(num_inputs, width, dtype=torch.float64, generator=random)
    return inputs, torch.randn(num_targets, 6, dtype=torch.float64, generator=random)


def told(function, *args, **options):
    try:
        function(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


def build(schedule, modules=None, loss=mean_square, **options):
    """Build a pipeline of equal stages; the same weights each time."""
    torch.manual_seed(0)
    every = modules or [Fragile() for _ in range(schedule.num_stages)]
    mine = {stage: every[stage] for stage, rank in enumerate(schedule.home) if rank == dist.get_rank()}
    return Pipeline(mine, schedule, loss=loss, **options)


def assert_told_on_every_rank(results, expected):
    """Each rank tells the same for each case, and what was expected."""
    assert results[0].keys() == expected.keys()
    for case, words in expected.items():
        texts = {result[case] for result in results}
        assert len(texts) == 1, f"{case}: ranks tell different things: {texts}"
        assert words in texts.pop(), f"{case}: {results[0][case]}"


def test_what_cannot_be_built_is_refused_on_every_rank(ranks):
    def cases():
        rank, schedule = dist.get_rank(), gpipe(2, 4)
        one = {rank: Fragile()}
        return {
            "missing": told(Pipeline, one if rank else {}, schedule),
            "extra": told(Pipeline, {0: Fragile(), 1: Fragile()} if rank else one, schedule),
            "wrong": told(Pipeline, {1 - rank: Fragile()}, schedule),
            "no module": told(Pipeline, {rank: torch.tanh if rank else Fragile()}, schedule),
            "different": told(Pipeline, one, gpipe(2, 4 + 4 * rank)),
            "ranks": told(Pipeline, one, gpipe(3, 4)),
            "not a schedule": told(Pipeline, one, "0F0 1F0" if rank else schedule),
            "a text": told(Pipeline, one, "0F0 1F0"),
            "deadlock": told(Pipeline, one, parse_schedule("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")),
            "missing action": told(Pipeline, one, parse_schedule("0F0 0B0\n1F0")),
            "copies": told(Pipeline, {0: Fragile(), 1: Fragile()}, make_schedule("dualpipe", 2, 4)),
            "in between": told(build(one_f_one_b(2, 4)).step, *batch()),
        }

    expected = {
        "missing": "ValueError: rank 0: the schedule puts stages [0] here, got modules for []",
        "extra": "ValueError: rank 1: the schedule puts stages [1] here, got modules for [0, 1]",
        "wrong": "rank 0: the schedule puts stages [0] here, got modules for [1]",
        "no module": "rank 1: stage 1 is a builtin_function_or_method; pass an nn.Module",
        "different": "ValueError: ranks disagree on the schedule",
        "ranks": "ValueError: the schedule is for 3 ranks and the group has 2",
        "not a schedule": "ValueError: ranks disagree on the schedule",
        "a text": "ValueError: schedule is a str; pass a Schedule",
        "deadlock": "deadlock",
        "missing action": "1B0",
        "copies": "stage 0",
        "in between": "nothing was wrong",
    }
    assert_told_on_every_rank(ranks(2).run(cases), expected)


def test_a_batch_that_cannot_be_is_refused_on_every_rank_before_anything_runs(ranks):
    def cases():
        schedule = one_f_one_b(2, NUM_MICROBATCHES)
        modules = [Fragile(), Fragile()]
        pipeline = build(schedule, modules)
        inputs, targets = batch()
        found = {
            "not dividing": told(pipeline.step, *batch(10, 10)),
            "too few": told(pipeline.step, *batch(3, 3)),
            "no inputs": told(pipeline.step, None, targets),
            "no targets": told(pipeline.step, inputs, None),
            "unequal": told(pipeline.step, *batch(8, 4)),
            "no loss": told(build(schedule, loss=None).step, inputs, targets),
            "a set": told(pipeline.step, {1}, targets),
            "scalar": told(pipeline.step, torch.tensor(1.0), targets),
            "evaluate": told(pipeline.evaluate, inputs[:7]),
        }
        assert sum(module.calls for module in modules) == 0
        found["shape of inputs"] = told(pipeline.step, *batch(width=5))
        mixed = build(schedule, [Fragile(6), Fragile(8)])
        found["stages do not meet"] = told(mixed.step, inputs, targets)
        wants_numbers = [NeedsNumbers(6), NeedsNumbers(7)]
        found["stages do not meet, with numbers"] = told(build(schedule, wants_numbers).step, inputs, targets)
        assert all(module.count == 0 for module in wants_numbers)
        fits = [NeedsNumbers(6), NeedsNumbers(6)]
        numbers = build(schedule, fits)
        drawn = torch.get_rng_state()
        numbers._agree_on_layouts("step", *numbers._cut(inputs, targets, wants_loss=True))
        assert torch.equal(drawn, torch.get_rng_state())
        assert all(module.count == 0 for module in fits)
        found["numbers"] = told(numbers.step, inputs, targets)
        before = sum(module.calls for module in modules)  # what does not run without numbers is tried with zeros
        found["afterwards"] = told(pipeline.step, inputs, targets)
        assert sum(module.calls for module in modules) == before + NUM_MICROBATCHES
        return found

    expected = {
        "not dividing": "ValueError: rank 0: 4 micro-batches do not divide a batch of 10; plan 1, 2, 5, 10",
        "too few": "rank 0: a batch of 3 cannot fill 4 micro-batches",
        "no inputs": "ValueError: rank 0 has stage 0 and got no inputs",
        "no targets": "ValueError: rank 1 has stage 1 and got no targets",
        "unequal": "ValueError: a batch of 8 inputs (rank 0) has 4 targets (rank 1)",
        "no loss": "rank 1 has the last stage, 1, and no loss; pass loss=",
        "a set": "rank 0: stages hand over tensors in tuples, lists and dicts",
        "scalar": "rank 0: a batch is cut along dimension 0",
        "evaluate": "rank 0: 4 micro-batches do not divide a batch of 7",
        "shape of inputs": "rank 0: stage 0 (Fragile) cannot run on what the inputs have, [2, 5] float64: RuntimeError",
        "stages do not meet": "rank 1: stage 1 (Fragile) cannot run on what stage 0 gives, [2, 6] float64 (grad): ",
        "stages do not meet, with numbers": "rank 1: stage 1 (NeedsNumbers) cannot run on what stage 0 gives, [2, 6]",
        "numbers": "nothing was wrong",
        "afterwards": "nothing was wrong",
    }
    assert_told_on_every_rank(ranks(2).run(cases), expected)


class Moody(Fragile):
    """Makes one shape when it is tried and on its first call, and another afterwards."""

    def forward(self, x):
        made = super().forward(x)
        return made if self.calls < 2 else made[:, :4]


def raised_elsewhere(world_size):
    """What is told when a loss, a shape, a callback or an evaluation is at fault, or `mean_loss` is called wrongly."""
    found = {}
    inputs, targets = batch()
    schedule = one_f_one_b(world_size, NUM_MICROBATCHES)
    pipeline = build(schedule, loss=lambda outputs, targets: (outputs - targets).square().mean(1))
    found["not a number"] = told(pipeline.step, inputs, targets)
    modules = [Moody() if stage == 0 else Fragile() for stage in range(world_size)]
    found["other shape"] = told(build(schedule, modules).step, inputs, targets)
    pipeline, heard = build(schedule), []
    pipeline.on_failure = lambda error: heard.append(type(error))  # returns, so others are told as ever
    pipeline.on_stage_complete = lambda stage: 1 // (stage - 1)  # one of them raises
    found["callback"] = told(pipeline.step, inputs, targets)
    for number, stage in pipeline._stages.items():
        stage.module.calls, stage.module.breaks = 0, ("F", 1) if number == 0 else None
    found["evaluate"] = told(pipeline.evaluate, inputs)
    assert heard == {0: [ArithmeticError], 1: [ZeroDivisionError]}.get(dist.get_rank(), []), "whose failure it was"
    found["mean of nothing"] = told(pipeline.mean_loss, None)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stage_that_raises_is_told_on_every_rank_and_the_pipeline_goes_on(ranks, world_size):
    def cases():
        found = {}
        inputs, targets = batch()
        for name in ("one_f_one_b", "zb_h1", "zb_v"):
            schedule = make_schedule(name, world_size, NUM_MICROBATCHES)
            pipeline = build(schedule)
            pipeline.step(inputs, targets)
            expected = [parameter.grad.clone() for parameter in pipeline.parameters()]
            stages = {stage: pipeline._stages[stage].module for stage in pipeline._stages}
            last = schedule.num_stages - 1
            for stage, kind, call in ((0, "F", 1), (last, "F", 2), (0, "B", 3), (last, "B", 0), (1, "B", 1)):
                for number, module in stages.items():
                    module.calls, module.is_wary = 0, kind == "F"  # zeros that a failed rank sends break it, too
                    module.breaks = (kind, call) if number == stage else None
                pipeline.zero_grad()
                with pytest.raises(StageError) as raised:
                    pipeline.step(inputs, targets)
                found[name, stage, kind] = str(raised.value)
                assert (raised.value.action.stage, raised.value.rank) == (stage, schedule.home[stage])
                if stage in stages:
                    assert isinstance(raised.value.__cause__, ArithmeticError)
                assert not any(stage.kept for stage in pipeline._stages.values())
            for module in stages.values():
                module.breaks, module.is_wary = None, False
            pipeline.zero_grad()
            pipeline.step(inputs, targets)
            again = [parameter.grad for parameter in pipeline.parameters()]
            assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))
            pipeline.close()
        return found | raised_elsewhere(world_size)

    expected = {}
    for name in ("one_f_one_b", "zb_h1", "zb_v"):
        last, owner = (2 * world_size - 1, 0) if name == "zb_v" else (world_size - 1, world_size - 1)
        expected[name, 0, "F"] = "rank 0: stage 0 raised in 0F1 (forward of micro-batch 1): ArithmeticError: the input"
        expected[name, last, "F"] = f"rank {owner}: stage {last} raised in {last}F2 (forward of micro-batch 2)"
        expected[name, 0, "B"] = "rank 0: stage 0 raised in 0"
        expected[name, last, "B"] = f"rank {owner}: stage {last} raised in {last}"
        expected[name, 1, "B"] = "rank 1: stage 1 raised in 1"
    last = world_size - 1
    expected["not a number"] = (
        f"rank {last}: stage {last} raised in {last}F0 (forward of micro-batch 0): ValueError: the loss is a tensor of "
        "shape [2]; return one number"
    )
    expected["other shape"] = "stage 0 raised in 0F1 (forward of micro-batch 1): ValueError: it made [2, 4] float64"
    expected["callback"] = "StageError: rank 1: stage 1 raised in 1B3 (backward of micro-batch 3): ZeroDivisionError"
    expected["evaluate"] = "StageError: rank 0: stage 0 raised in 0F1"
    expected["mean of nothing"] = f"ValueError: rank {last}: mean_loss got None; pass what step() returned there"
    results = ranks(world_size).run(cases)
    assert_told_on_every_rank(results, expected)
    for case, text in results[0].items():
        assert "consequence" not in text
        if case[-1] == "B":
            assert "ArithmeticError: the gradient broke" in text


@pytest.mark.parametrize("name", ["zb_h1", "zb_v"])
def test_a_stage_that_raises_in_w_is_named_and_tied_gradients_of_earlier_steps_stay(ranks, name):
    def cases():
        schedule = make_schedule(name, 2, NUM_MICROBATCHES)
        last = schedule.num_stages - 1
        pipeline = build(schedule, tied=[TiedParameter("layer.weight", (0, 1))])
        modules = {number: stage.module for number, stage in pipeline._stages.items()}
        pipeline.step(*batch())
        first = [parameter.grad.clone() for parameter in pipeline.parameters()]

        def breaks(gradient):
            raise ArithmeticError("the product broke")

        hooks = [
            module.layer.bias.register_post_accumulate_grad_hook(breaks)
            for number, module in modules.items()
            if number == last
        ]
        with pytest.raises(StageError) as raised:
            pipeline.step(*batch())
        assert raised.value.action == next(a for a in pipeline.schedule.actions(raised.value.rank) if a.kind == "W")
        assert raised.value.rank == schedule.home[last]
        assert not any(stage.kept for stage in pipeline._stages.values())
        tied = modules[dist.get_rank()].layer.weight  # on both placements rank r holds stage r
        before = dict(zip(pipeline.parameters(), first, strict=True))
        assert torch.equal(tied.grad, before[tied])
        for hook in hooks:
            hook.remove()
        pipeline.zero_grad()
        pipeline.step(*batch())
        assert all(torch.equal(p.grad, before[p]) for p in pipeline.parameters())
        found = {"W": str(raised.value)}
        pipeline.on_stage_complete = lambda stage: stage == 1 and pipeline.evaluate(*batch())
        found["inside"] = told(pipeline.step, *batch())
        pipeline.close()
        found["closed"] = told(pipeline.step, *batch()).replace(f"rank {dist.get_rank()}", "a rank")
        return found

    owner, last = {"zb_h1": (1, 1), "zb_v": (0, 3)}[name]
    told_by_all = f"rank {owner}: stage {last} raised in {last}W0 (the weights' gradients of micro-batch 0): Arithmetic"
    expected = {
        "W": told_by_all,
        "inside": "ValueError: rank 1: evaluate was called on a pipeline that is in a step; call it between",
        "closed": "ValueError: a rank: step was called on a pipeline that is closed",
    }
    assert_told_on_every_rank(ranks(2).run(cases), expected)
