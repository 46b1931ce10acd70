"""Gradients that a loop forgets before `synchronize()`, sets by hand, or asks for without backward."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from refused import message
from torch import nn
from torch.utils.checkpoint import checkpoint

from distlab.data_parallel import DataParallel
from distlab.sharding import FullyShard, ShardedOptimizer, full_state_dict


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))).double()


def rows(step, number=0):
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    every = torch.randn(12, 5, generator=torch.Generator().manual_seed(9 * step + number), dtype=torch.float64)
    return every.chunk(size)[rank]


def loss_of(model, step, number=0):
    x = rows(step, number)
    return (model(x) - x.flip(1)).square().mean()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def too_early():
    model = FullyShard(net())
    start = full_state_dict(model)
    optimizer = adamw(model.parameters())
    loss_of(model, 0).backward()
    texts = [message(optimizer.step), message(lambda: model.clip_gradients_(1.0))]
    texts.append(message(lambda: torch._foreach_add_([model.units[0].shard], [model.units[0].shard.grad])))
    texts += [message(lambda zero=zero: zero(set_to_none=False)) for zero in (optimizer.zero_grad, model.zero_grad)]
    model.zero_grad()
    with model.no_sync():
        loss_of(model, 0).backward()
    model.synchronize()
    texts.append(message(optimizer.step))
    for forget in (lambda: loss_of(model, 1).backward(), model.synchronize):  # an optimizer knows nothing of the way
        optimizer.zero_grad()
        texts.append(message(forget))
        model.zero_grad()
        with model.no_sync():
            loss_of(model, 0).backward()
    model.zero_grad()
    unmoved = all(torch.equal(value, start[name]) for name, value in full_state_dict(model).items())
    loss_of(model, 1).backward()
    model.synchronize()
    return texts, unmoved, message(optimizer.step)


def test_a_step_or_an_optimizers_zero_grad_before_the_gradients_have_come_says_so(ranks):
    for rank, (texts, unmoved, right) in enumerate(ranks(2).run(too_early)):
        for text in texts:
            assert f"rank {rank}: " in text
            assert "the gradients of FullyShard's shards are on their way" in text
        assert unmoved
        assert right == "no error"


def given_up(wraps, options):
    """A loop that gives some steps up: one fails in backward, one has a loss of no use, one stops under no_sync."""
    module = net()
    model = FullyShard(module, **options) if wraps else module
    no_sync = model.no_sync if wraps else contextlib.nullcontext
    optimizer = adamw(model.parameters())
    for step in range(6):
        if step == 1:
            handle = module[1].register_full_backward_hook(lambda *_: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                loss_of(model, step).backward()
            handle.remove()
        if step == 3:
            loss_of(model, step, 1).backward()
        with no_sync():
            (loss_of(model, step) / 2).backward()
        if step not in (1, 3, 4):
            (loss_of(model, step, 1) / 2).backward()
            if wraps:
                model.synchronize()
            optimizer.step()
        model.zero_grad()
    return full_state_dict(model) if wraps else module.state_dict()


@pytest.mark.parametrize("options", [{}, {"offload": True, "reshard_after_forward": False}], ids=str)
def test_zero_grad_of_the_model_forgets_what_is_on_its_way(ranks, options):
    expected = given_up(False, {})
    for got in ranks(2).run(given_up, True, options):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-10, msg=name)


def by_hand(wrap, zeroes):
    """Gradients from torch.autograd.grad, put where the optimizer looks for them."""
    model = net()
    synchronize, optimizer = wrap(model)
    for step in range(4):
        if zeroes:
            optimizer.zero_grad()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, step), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        synchronize()
        optimizer.step()
    return model.state_dict()


def by_zero(**options):
    def wrap(model):
        optimizer = ShardedOptimizer(model, adamw, bucket_bytes=200, **options)
        return optimizer.synchronize, optimizer

    return wrap


HANDS = {
    "alone": lambda model: (lambda: None, adamw(model.parameters())),
    "DataParallel": lambda model: (DataParallel(model).synchronize, adamw(model.parameters())),
    "stage 1": by_zero(unused="zeros"),
    "stage 2": by_zero(stage=2),
    "whole tensors": by_zero(stage=2, split="tensors", unused="zeros"),
}


@pytest.mark.parametrize("zeroes", [True, False])
@pytest.mark.parametrize("name", list(HANDS)[1:])
def test_gradients_that_are_set_by_hand_are_averaged(ranks, name, zeroes):
    expected = by_hand(HANDS["alone"], zeroes)
    for got in ranks(3).run(by_hand, HANDS[name], zeroes):
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, rtol=0, atol=1e-10, msg=key)


def other_ways_to_a_gradient():
    model = FullyShard(net())
    changed = {name: 2 * one for name, one in model.named_parameters()}
    texts = [
        message(lambda: torch.func.functional_call(model, changed, (rows(0),))),
        message(lambda: torch.autograd.grad(loss_of(model, 0), list(model.parameters()), allow_unused=True)),
    ]
    return texts, message(lambda: loss_of(model, 0).backward())


def test_what_would_pass_shards_by_is_refused(ranks):
    for rank, (texts, right) in enumerate(ranks(2).run(other_ways_to_a_gradient)):
        assert (
            f"rank {rank}: shards.0 was added after FullyShard was built, or replaced by a different tensor (by f"
            in texts[0]
        )
        assert f"rank {rank}: torch.autograd.grad by a shard" in texts[1]
        assert right == "no error"


def computed_again(wraps, reentrant):
    module = net()
    model = FullyShard(module) if wraps else module
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        x = rows(step).requires_grad_()
        (checkpoint(model, x, use_reentrant=reentrant) - x.flip(1)).square().mean().backward()
        if wraps:
            model.synchronize()
        optimizer.step()
    return full_state_dict(model) if wraps else module.state_dict()


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchs_checkpoint_around_the_whole_model(ranks, reentrant):
    expected = computed_again(False, reentrant)
    for got in ranks(2).run(computed_again, True, reentrant):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=1e-10, msg=name)


def built_twice():
    model = net()
    first = DataParallel(model)
    texts = [message(lambda: DataParallel(model)), message(lambda: ShardedOptimizer(model[1], adamw))]
    first.close()
    second = ShardedOptimizer(model, adamw)
    texts.append(message(lambda: ShardedOptimizer(model, adamw, stage=2)))
    second.close()
    return texts, message(lambda: DataParallel(model))


def test_gradients_are_averaged_by_one_technique_alone(ranks):
    """Two would both divide them: the first step would be wrong, and only the second one told."""
    for rank, (texts, right) in enumerate(ranks(2).run(built_twice)):
        for text in texts:
            assert f"rank {rank}: gradients of this module are averaged already" in text
        assert right == "no error"
