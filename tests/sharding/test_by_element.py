"""Optimizers that nobody here wrote: which of them may have a part of a tensor is found by trying them."""

import pytest
import torch
from refused import message
from torch import nn

from distlab.large_batch import LAMB, LARS
from distlab.sharding import FullyShard, ShardedOptimizer
from distlab.sharding.by_element import KNOWN, what_it_needs


def written():
    """Return optimizers as people write them, by name: classes of the process that calls this."""

    class Written(torch.optim.Optimizer):
        """An optimizer as people write them; `scale_of` says what its rate is multiplied with."""

        def __init__(self, params, step_size=0.1):
            super().__init__(params, {"lr": step_size})

        def scale_of(self, parameter):
            return 1.0

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                        average.mul_(0.9).add_(parameter.grad)
                        parameter.data.add_(average, alpha=-group["lr"] * float(self.scale_of(parameter)))

    class Lamb(Written):
        def scale_of(self, parameter):
            return parameter.data.norm() / (parameter.grad.norm() + 1e-6)

    class ByHand(Written):
        def scale_of(self, parameter):
            return parameter.detach().pow(2).sum().sqrt()

    class ByRows(Written):
        def scale_of(self, parameter):
            return len(parameter.shape)

    class Clips(Written):
        def step(self, closure=None):
            every = [one.grad.detach() for group in self.param_groups for one in group["params"]]
            norm = sum(one.square().sum() for one in every).sqrt()
            for one in every:
                one.div_(norm + 1.0)
            super().step()

    class Lion(Written):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])

    class Adam(torch.optim.Adam):
        pass

    kinds = (Written, Lamb, ByHand, ByRows, Clips, Lion, Adam, *hard_to_see(Written))
    return {kind.__name__: kind for kind in kinds}


def hard_to_see(Written):
    """Return optimizers that differ late, for some tensors, at some steps, or in what they ask of a closure."""

    class Late(Written):
        def scale_of(self, parameter):
            count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
            return 1.0 if count < 30 else self.state[parameter]["average"].pow(2).mean()

    class OfFilters(Written):
        def scale_of(self, parameter):
            return 0.5 if parameter.dim() == 4 else 1.0

    class OfLarge(Written):
        def scale_of(self, parameter):
            return parameter.pow(2).mean() if parameter.numel() > 4096 else 1.0

    class Skips(Written):
        def scale_of(self, parameter):
            return (parameter.grad * self.state[parameter]["average"]).sum() > 0

    class InOneGroup(Written):
        def __init__(self, params, step_size=0.1):
            super().__init__([{"params": list(params), "by_rows": False}], step_size)
            self.param_groups += [{**self.param_groups[0], "params": [], "by_rows": True}]

        def scale_of(self, parameter):
            return len(parameter.shape) if self.param_groups[-1]["by_rows"] else 1.0

    class Sam(Written):
        @torch.no_grad()
        def step(self, closure):
            every = [one for group in self.param_groups for one in group["params"]]
            norm = sum(one.grad.square().sum() for one in every).sqrt()
            moves = [0.5 * one.grad / norm for one in every]
            torch._foreach_add_(every, moves)
            closure()
            torch._foreach_sub_(every, moves)
            super().step()

    return Late, OfFilters, OfLarge, Skips, InOneGroup, Sam


HERE = written()
NEEDS = {
    "elements": (HERE["Written"], HERE["Lion"], HERE["Adam"], *sorted(KNOWN, key=lambda kind: kind.__name__)),
    "tensors": (HERE["Lamb"], HERE["ByHand"], HERE["ByRows"], LAMB, LARS, torch.optim.Adafactor, torch.optim.Muon),
    "all": (HERE["Clips"], HERE["Sam"], torch.optim.LBFGS),
    "tensors, in some cases": tuple(HERE[name] for name in ("Late", "OfFilters", "OfLarge", "Skips", "InOneGroup")),
}


@pytest.mark.parametrize(("kind", "needs"), [(kind, needs) for needs, kinds in NEEDS.items() for kind in kinds])
def test_what_an_optimizer_needs_is_found_by_trying_it(kind, needs):
    parameter = nn.Parameter(torch.ones(3, 2))
    options = {"lr": 0.1} if kind in (LAMB, LARS) else {}
    optimizer = kind([parameter], **options)
    parameter.grad = torch.ones(3, 2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = torch.get_rng_state()
    assert what_it_needs(optimizer) == needs.split(",")[0]
    assert torch.equal(torch.get_rng_state(), before)
    assert parameter.tolist() == [[1.0, 1.0]] * 3, "it is untouched"
    assert parameter.grad.tolist() == [[1.0, 1.0]] * 3
    assert not any(state for state in optimizer.state.values() if float(state.get("step", 0)))
    assert schedule.last_epoch == 0


def test_a_rate_that_is_zero_at_first_hides_nothing():
    optimizer = HERE["ByHand"]([nn.Parameter(torch.ones(3, 2))])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)
    assert optimizer.param_groups[0]["lr"] == 0
    assert what_it_needs(optimizer) == "tensors"


def test_an_optimizer_that_cannot_be_tried_is_refused_with_the_reason():
    class Strange(HERE["Written"]):
        def step(self, closure=None):
            raise KeyError("no such state")

    with pytest.raises(ValueError, match="Strange could not be tried on a few numbers.*KeyError: 'no such state'"):
        what_it_needs(Strange([nn.Parameter(torch.ones(2))]))


def steps_on_shards(name):
    kind, model = written()[name], FullyShard(nn.Linear(5, 3))
    optimizer = kind(model.parameters())
    model(torch.ones(2, 5)).square().mean().backward()
    model.synchronize()
    before = [one.detach().clone() for one in model.parameters()]
    text = message(optimizer.step)
    return text, all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))


def sharded(name, split):
    return message(lambda: ShardedOptimizer(nn.Linear(5, 3), written()[name], split=split))


@pytest.mark.parametrize("name", ["Lamb", "ByHand", "Clips"])
def test_shards_refuse_it_on_every_rank_before_they_change(ranks, name):
    for rank, (text, is_untouched) in enumerate(ranks(2).run(steps_on_shards, name)):
        assert text.startswith(f"ValueError: rank {rank}: {name} updates a part of a tensor in a different way")
        assert is_untouched
    for split in ("elements", "tensors"):
        texts = ranks(2).run(sharded, name, split)
        if name == "Clips":
            assert all("Clips looks at all parameters at once" in text for text in texts)
        elif split == "elements":
            assert all(f"{name} looks at whole tensors" in text for text in texts)
        else:
            assert texts == ["no error"] * 2
