"""Gradients that a loop forgets or sets by hand, models that change, copies, two techniques: right, or told."""

import contextlib
import copy
import io
import pickle

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


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def equal(got, expected):
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=1e-10, msg=key)


def too_early():
    model = FullyShard(net())
    start = full_state_dict(model)
    optimizer = adamw(model.parameters())
    loss_of(model, 0).backward()
    texts = [message(optimizer.step), message(lambda: model.clip_gradients_(1.0))]
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


def given_up(wraps):
    """A loop that gives some steps up: one fails in backward, one has a loss of no use, one stops under no_sync."""
    module = net()
    model = FullyShard(module, offload=True, reshard_after_forward=False) if wraps else module
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


def computed_again(wraps, reentrant):
    """Torch's checkpoint around the whole model."""
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


def other_ways_to_a_gradient():
    model = FullyShard(net())
    changed = {name: 2 * one for name, one in model.named_parameters()}
    texts = [
        message(lambda: torch.func.functional_call(model, changed, (rows(0),))),
        message(lambda: torch.autograd.grad(loss_of(model, 0), list(model.parameters()), allow_unused=True)),
    ]
    return texts, message(lambda: loss_of(model, 0).backward())


def test_a_unit_whose_gradients_are_on_their_way_says_so_and_its_own_zero_grad_forgets_them(ranks):
    def all_of_it():
        return too_early(), given_up(True), [computed_again(True, x) for x in (True, False)], other_ways_to_a_gradient()

    for rank, ((texts, unmoved, right), forgotten, again, (others, goes_on)) in enumerate(ranks(2).run(all_of_it)):
        assert all(f"rank {rank}: " in text for text in (*texts, *others))
        assert all("the gradients of FullyShard's shards are on their way" in text for text in texts)
        assert unmoved
        assert right == goes_on == "no error"
        equal(forgotten, given_up(False))
        for got in again:
            equal(got, computed_again(False, False))
        assert "shards.0 was added after FullyShard was built, or replaced by a different tensor (by f" in others[0]
        assert "torch.autograd.grad by a shard" in others[1]


def forgotten(model, where=0):
    if dist.get_rank() == where:
        model[0][0].bias.grad = None


TOUCHES = (
    lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    lambda model: [one.grad.data.mul_(0.5) for one in model.parameters() if one.grad is not None],
    lambda model: setattr(model[2][0].bias, "grad", model[2][0].bias.grad.clone()),
    lambda model: model.zero_grad(set_to_none=False),
    forgotten,
    lambda model: model.zero_grad(),
    lambda model: setattr(model[2][0].bias, "grad", torch.ones(5).double()),
)


def touched(wrap):
    """Touch gradients between backward and synchronize; return what was said, and how all goes on."""
    model, texts = net(), []
    synchronize, optimizer = wrap(model)
    for touch in TOUCHES:
        loss_of(model, 0).backward()
        texts.append(message(lambda touch=touch: (touch(model), synchronize())))
        if touch in TOUCHES[:4]:
            synchronize()
        optimizer.zero_grad()
    loss_of(model, 0).backward()
    synchronize()
    optimizer.step()
    return texts, model.state_dict()


def by_hand(wrap, zeroes):
    """Gradients from torch.autograd.grad, put where the optimizer looks for them."""
    model = net()
    synchronize, optimizer = wrap(model)
    for step in range(4):
        if zeroes:
            optimizer.zero_grad()
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss_of(model, step), parameters), strict=True):
            parameter.grad = gradient
        synchronize()
        optimizer.step()
    return model.state_dict()


def by_zero(**options):
    def wrap(model):
        optimizer = ShardedOptimizer(model, adamw, bucket_bytes=200, **options)
        return optimizer.synchronize, optimizer

    return wrap


HANDS = [  # how it is done, and whether gradients are forgotten before
    (lambda model: (DataParallel(model).synchronize, adamw(model.parameters())), True),
    (by_zero(unused="zeros"), False),
    (by_zero(stage=2, split="tensors", unused="zeros"), True),
    (by_zero(stage=2, unused="zeros"), False),
]


def test_gradients_set_by_hand_are_averaged_and_none_is_touched_on_its_way(ranks):
    def alone(model):
        return lambda: None, adamw(model.parameters())

    for rank, (found, touches) in enumerate(
        ranks(3).run(lambda: ([by_hand(*one) for one in HANDS], [touched(wrap) for wrap, _ in HANDS]))
    ):
        for (_, zeroes), got in zip(HANDS, found, strict=True):
            equal(got, by_hand(alone, zeroes))
        for texts, state in touches:
            equal(state, touches[0][1])
            for text in texts:
                assert text.startswith(f"RuntimeError: rank {rank}: ")
                assert "gradients are on their way between backward() and synchronize()" in text


def around(split):
    """Change pieces after a step, as an optimizer around it (Lookahead) does."""
    model = nn.Sequential(nn.Linear(4, 1))  # the last rank of three owns nothing where tensors are dealt out
    sharded = ShardedOptimizer(model, sgd, split=split)
    texts = []
    for changes in (False, True, False):
        sharded.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model[0].weight.clamp_(-1, 1)  # on all ranks
        texts.append(message(sharded.synchronize))
        if texts[-1] == "no error":
            sharded.step()
        with torch.no_grad():
            for _, piece in sharded.named_pieces() if changes else ():
                (piece if split == "elements" else piece.data).mul_(0.5)
    return texts


def unfrozen(stage):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = ShardedOptimizer(model, sgd, stage=stage)
    texts = []
    for step in range(2):
        model[0].weight.requires_grad_(step == 1)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        texts.append(message(optimizer.synchronize))
    return texts


def test_pieces_that_others_change_and_what_was_unfrozen_are_told_on_every_rank(ranks):
    def all_of_it():
        return [around(split) for split in ("elements", "tensors")], [unfrozen(stage) for stage in (1, 2)]

    for rank, (changed, freed) in enumerate(ranks(3).run(all_of_it)):
        for *fine, last in changed:
            assert fine == ["no error"] * 2
            assert last.startswith(f"RuntimeError: rank {rank}: step 2: pieces were changed outside of step()"), last
            assert "build it in make_optimizer" in last
        for first, second in freed:
            assert first == "no error"
            assert second.startswith(f"RuntimeError: rank {rank}: step 0: 0.weight was frozen when ShardedOptimizer")


def built_twice():
    model = net()
    first = DataParallel(model)
    texts = [message(lambda: DataParallel(model)), message(lambda: ShardedOptimizer(model[1], adamw))]
    first.close()
    second = ShardedOptimizer(model, adamw)
    texts.append(message(lambda: ShardedOptimizer(model, adamw, stage=2)))
    second.close()
    return texts, message(lambda: DataParallel(model))


def copies():
    """What each way to copy or to save says, of each wrapped thing; what may still be done."""
    ways = (lambda one: torch.save(one, io.BytesIO()), pickle.dumps, copy.deepcopy)
    sharded = FullyShard(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2)), units=["0"])
    module, other = (nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
    things = {"full_state_dict(model) returns the whole state": sharded}
    things["Save state_dict() on every rank; build a new one"] = ShardedOptimizer(module, sgd)
    things["Save or copy the module"] = DataParallel(other)
    texts = [(words, message(lambda way=way, one=one: way(one))) for words, one in things.items() for way in ways]
    texts.append(("full_state_dict(model)", message(lambda: copy.deepcopy(sharded.module[0]))))
    return texts, [message(lambda way=way, one=one: way(one)) for way in ways for one in (module, other)]


def test_two_techniques_and_copies_are_refused(ranks):
    for rank, ((twice, goes_on), (copied, free)) in enumerate(ranks(2).run(lambda: (built_twice(), copies()))):
        for text in twice:
            assert f"rank {rank}: gradients of this module are averaged already" in text
        assert {goes_on, *free} == {"no error"}
        for words, text in copied:
            assert text.startswith(f"RuntimeError: rank {rank}: "), text
            assert "cannot be pickled or copied" in text
            assert words in text
