"""What is wrong is told on every rank in the same words; nothing hangs, and the ranks go on."""

import re

import pytest
import torch
import torch.distributed as dist
from equal import own_stages, same_everywhere
from refused import message
from torch import nn

from distlab.pipeline import Pipeline, StageError, TiedParameter
from distlab.plan import gpipe, make_schedule, one_f_one_b, parse_schedule
from distlab.rng import generator

NUM_MICROBATCHES = 4


def broken(gradient):
    raise ArithmeticError("the gradient broke")


class Fragile(nn.Module):
    """Raises in forward or backward of one call, and, where it is wary, on an input of zeros only."""

    def __init__(self, width=6):
        super().__init__()
        self.layer = nn.Linear(width, width).double()
        self.breaks, self.calls, self.is_wary = None, 0, False

    def forward(self, x):
        self.calls += 1
        if x.is_meta:
            return self.layer(x)
        if self.breaks == ("F", self.calls - 1):
            raise ArithmeticError("the input broke")
        if self.is_wary and not x.any():
            raise ArithmeticError("only a consequence")
        y = self.layer(x).tanh()
        if self.breaks == ("B", self.calls - 1):
            y.register_hook(broken)
        return y


class Overwrites(Fragile):
    """Begins with nn.ReLU(inplace=True), or the like."""

    def forward(self, x):
        return super().forward(x.relu_())


class Moody(Fragile):
    """Makes one shape when it is tried and on its first call, and a different one afterwards."""

    def forward(self, x):
        made = super().forward(x)
        return made if self.calls < 2 else made[:, :4]


def batch(num_inputs=8, num_targets=8, width=6):
    random = generator(3, 0, "batch")
    return [torch.randn(size, generator=random).double() for size in ((num_inputs, width), (num_targets, 6))]


def own(schedule, modules=None):
    """Return this rank's stages; the same weights each time."""
    torch.manual_seed(0)
    every = modules or [Fragile() for _ in range(schedule.num_stages)]
    return own_stages(every, schedule)


def build(schedule, modules=None, loss=nn.functional.mse_loss, **options):
    return Pipeline(own(schedule, modules), schedule, loss=loss, **options)


def assert_told(case, words):
    """Every rank tells the same, and what was expected."""
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, message(case))
    assert len(set(texts)) == 1, f"ranks tell different things: {texts}"
    assert words in texts[0], f"{words}: {texts[0]}"


@pytest.mark.on_ranks(2)
def test_what_cannot_be_built_is_refused_on_every_rank():
    rank, schedule = dist.get_rank(), gpipe(2, 4)
    one, two = {rank: Fragile()}, {0: Fragile(), 1: Fragile()}
    cases = [
        (one if rank else {}, schedule, "ValueError: rank 0: the schedule puts stages [0] here, got modules for []"),
        (two if rank else one, schedule, "rank 1: the schedule puts stages [1] here, got modules for [0, 1]"),
        ({rank: torch.tanh if rank else Fragile()}, schedule, "rank 1: stage 1 is a builtin_function_or_method; pass"),
        (one, gpipe(2, 4 + 4 * rank), "ValueError: ranks disagree on the schedule"),
        (one, gpipe(3, 4), "ValueError: the schedule is for 3 ranks and the group has 2"),
        (one, "0F0 1F0", "ValueError: schedule is a str; pass a Schedule"),
        (one, parse_schedule("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"), "deadlock"),
        (one, parse_schedule("0F0 0B0\n1F0"), "1B0"),
        (two, parse_schedule("0F0 0B0\n0F1 0B1"), "all actions of stage 0 on one rank"),
    ]
    working = build(one_f_one_b(2, 4))
    for modules, plan, words in cases:
        assert_told(lambda modules=modules, plan=plan: Pipeline(modules, plan), words)
        assert_told(lambda: working.step(*batch()), "no error")


@pytest.mark.on_ranks(2)
def test_a_batch_that_cannot_be_is_refused_on_every_rank_before_anything_runs():
    schedule, modules = one_f_one_b(2, NUM_MICROBATCHES), [Fragile(), Fragile()]
    pipeline, (inputs, targets) = build(schedule, modules), batch()
    cannot_run = "rank 1: stage 1 (Fragile) cannot run on what stage 0 gives, [2, 6] float64 (grad): "
    for arguments, words in [
        (batch(10, 10), "ValueError: rank 0: 4 micro-batches do not divide a batch of 10; plan 1, 2, 5, 10"),
        (batch(3, 3), "rank 0: a batch of 3 cannot fill 4 micro-batches"),
        ((None, targets), "ValueError: rank 0 has stage 0 and got no inputs"),
        ((inputs, None), "ValueError: rank 1 has stage 1 and got no targets"),
        (batch(8, 4), "ValueError: a batch of 8 inputs (rank 0) has 4 targets (rank 1)"),
        (({1}, targets), "rank 0: stages hand over tensors in tuples, lists and dicts"),
        ((torch.tensor(1.0), targets), "rank 0: a batch is cut along dimension 0"),
        (batch(width=5), "rank 0: stage 0 (Fragile) cannot run on what the inputs have, [2, 5] float64: RuntimeError"),
    ]:
        assert_told(lambda arguments=arguments: pipeline.step(*arguments), words)
    assert_told(lambda: pipeline.evaluate(inputs[:7]), "rank 0: 4 micro-batches do not divide a batch of 7")
    lossless, mixed = build(schedule, loss=None), build(schedule, [Fragile(6), Fragile(8)])
    assert_told(lambda: lossless.step(inputs, targets), "rank 1 has the last stage, 1, and no loss; pass loss=")
    assert_told(lambda: mixed.step(inputs, targets), cannot_run)
    overwrites = build(schedule, [Fragile(), Overwrites()])
    words = "requires grad is being used in an in-place operation. Nothing"
    assert_told(lambda: overwrites.step(inputs, targets), words)
    before = sum(module.calls for module in modules)  # the copies that are tried count for themselves
    assert_told(lambda: pipeline.step(inputs, targets), "no error")
    assert sum(module.calls for module in modules) == before + NUM_MICROBATCHES


@pytest.mark.on_ranks(2)
def test_what_is_raised_by_a_loss_a_shape_a_callback_or_an_evaluation_is_told_too():
    (inputs, targets), schedule = batch(), one_f_one_b(2, NUM_MICROBATCHES)
    pipeline = build(schedule, loss=lambda outputs, targets: (outputs - targets).square().mean(1))
    words = "ValueError: the loss is a tensor of shape [2]; return one number"
    assert_told(lambda: pipeline.step(inputs, targets), f"stage 1 raised in 1F0 (forward of micro-batch 0): {words}")
    moody = build(schedule, [Moody(), Fragile()])
    words = "stage 0 raised in 0F1 (forward of micro-batch 1): ValueError: it made [2, 4] float64"
    assert_told(lambda: moody.step(inputs, targets), words)
    modules, heard = own(schedule), []
    pipeline = Pipeline(modules, schedule, loss=nn.functional.mse_loss)
    pipeline.on_failure = lambda error: heard.append(type(error))  # returns, so others are told as ever
    pipeline.on_stage_complete = lambda stage: 1 // (stage - 1)  # one of them raises
    words = "StageError: rank 1: stage 1 raised in 1B3 (backward of micro-batch 3): ZeroDivisionError"
    assert_told(lambda: pipeline.step(inputs, targets), words)
    for number, module in modules.items():
        module.calls, module.breaks = 0, ("F", 1) if number == 0 else None
    assert_told(lambda: pipeline.evaluate(inputs), "StageError: rank 0: stage 0 raised in 0F1")
    assert heard == [[ArithmeticError], [ZeroDivisionError]][dist.get_rank()], "whose failure it was"
    assert_told(lambda: pipeline.mean_loss(None), "ValueError: rank 1: mean_loss got None; pass what")


@pytest.mark.on_ranks(3)
def test_a_stage_that_raises_is_told_on_every_rank_and_the_pipeline_goes_on():
    inputs, targets = batch()
    for name in ("one_f_one_b", "zb_h1", "zb_v"):
        schedule = make_schedule(name, 3, NUM_MICROBATCHES)
        stages = own(schedule)
        pipeline = Pipeline(stages, schedule, loss=nn.functional.mse_loss)
        pipeline.step(inputs, targets)
        expected, peak = [parameter.grad.clone() for parameter in pipeline.parameters()], pipeline.peak_in_flight
        last = schedule.num_stages - 1
        for stage, kind, call in ((0, "F", 1), (last, "F", 2), (0, "B", 3), (last, "B", 0), (1, "B", 1)):
            for number, module in stages.items():
                module.calls, module.is_wary = 0, kind == "F"  # zeros that a failed rank sends break it, too
                module.breaks = (kind, call) if number == stage else None
            pipeline.zero_grad()
            where = f"{stage}F{call} (forward of micro-batch {call})" if kind == "F" else f"{stage}"
            words = f"rank {schedule.home[stage]}: stage {stage} raised in {where}"
            with pytest.raises(StageError, match=re.escape(words)) as raised:
                pipeline.step(inputs, targets)
            error = raised.value
            assert same_everywhere(torch.tensor(list(str(error).encode())))
            assert (error.action.stage, error.rank) == (stage, schedule.home[stage])
            assert f"ArithmeticError: the {'input' if kind == 'F' else 'gradient'} broke" in str(error)
            assert stage not in stages or isinstance(error.__cause__, ArithmeticError)
        for module in stages.values():
            module.breaks, module.is_wary = None, False
        pipeline.zero_grad()
        pipeline.step(inputs, targets)
        assert all(map(torch.equal, expected, [parameter.grad for parameter in pipeline.parameters()]))
        assert pipeline.peak_in_flight == peak, "nothing is kept of the steps that failed"
        pipeline.close()


@pytest.mark.on_ranks(2)
def test_a_stage_that_raises_in_w_is_named_and_tied_gradients_of_earlier_steps_stay():
    for name, owner, last in (("zb_h1", 1, 1), ("zb_v", 0, 3)):
        schedule = make_schedule(name, 2, NUM_MICROBATCHES)
        modules, tied = own(schedule), [TiedParameter("layer.weight", (0, 1))]
        pipeline = Pipeline(modules, schedule, loss=nn.functional.mse_loss, tied=tied)
        pipeline.step(*batch())
        before = {parameter: parameter.grad.clone() for parameter in pipeline.parameters()}
        if last in modules:
            hook = modules[last].layer.bias.register_post_accumulate_grad_hook(lambda _: 1 // 0)
        words = f"rank {owner}: stage {last} raised in {last}W0 (the weights' gradients of micro-batch 0): ZeroDivision"
        assert_told(lambda pipeline=pipeline: pipeline.step(*batch()), words)
        tied = modules[dist.get_rank()].layer.weight  # on both placements rank r holds stage r
        assert torch.equal(tied.grad, before[tied])
        if last in modules:
            hook.remove()
        pipeline.zero_grad()
        pipeline.step(*batch())
        assert all(torch.equal(parameter.grad, gradient) for parameter, gradient in before.items())
        pipeline.on_stage_complete = lambda stage, pipeline=pipeline: stage == 1 and pipeline.evaluate(*batch())
        words = "ValueError: rank 1: evaluate was called on a pipeline that is in a step; call it between"
        assert_told(lambda pipeline=pipeline: pipeline.step(*batch()), words)
        pipeline.close()
        closed = message(lambda pipeline=pipeline: pipeline.step(*batch()))
        assert closed.startswith(f"ValueError: rank {dist.get_rank()}: step was called on a pipeline that is closed")
