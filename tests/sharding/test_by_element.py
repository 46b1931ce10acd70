"""Optimizers that nobody here wrote: which of them may have a part of a tensor is found by trying them."""

import pytest
import torch
from torch import nn

from distlab.large_batch import LAMB, LARS
from distlab.sharding.by_element import KNOWN, what_it_needs


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


class Clips(Written):
    def step(self, closure=None):
        every = [one.grad.detach() for group in self.param_groups for one in group["params"]]
        norm = sum(one.square().sum() for one in every).sqrt()
        for one in every:
            one.div_(norm + 1.0)
        super().step()


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


class InOneGroup(Written):
    def __init__(self, params, step_size=0.1):
        super().__init__([{"params": list(params), "by_rows": False}], step_size)
        self.param_groups += [{**self.param_groups[0], "params": [], "by_rows": True}]

    def scale_of(self, parameter):
        return len(parameter.shape) if self.param_groups[-1]["by_rows"] else 1.0


def late(self, parameter):
    count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
    return 1.0 if count < 30 else self.state[parameter]["average"].pow(2).mean()


SIZES = []  # of the tensors that an optimizer was tried on
SCALES = {  # by tensors; the last four late, for some tensors or at some steps
    "ByHand": lambda self, one: one.detach().pow(2).sum().sqrt(),
    "ByRows": lambda self, one: SIZES.append(one.numel()) or len(one.shape),
    "OfFilters": lambda self, one: 0.5 if one.dim() == 4 else 1.0,
    "OfLarge": lambda self, one: one.pow(2).mean() if one.numel() > 4096 else 1.0,
    "Skips": lambda self, one: (one.grad * self.state[one]["average"]).sum() > 0,
    "Late": late,
}
SCALED = {name: type(name, (Written,), {"scale_of": scale}) for name, scale in SCALES.items()}
NEEDS = {
    "elements": (Written, type("Adam", (torch.optim.Adam,), {}), *sorted(KNOWN, key=lambda kind: kind.__name__)),
    "tensors": (*SCALED.values(), InOneGroup, LAMB, LARS, torch.optim.Adafactor, torch.optim.Muon),
    "all": (Clips, Sam, torch.optim.LBFGS),
}


def test_what_an_optimizer_needs_is_found_by_trying_it():
    for needs, kind in ((needs, kind) for needs, kinds in NEEDS.items() for kind in kinds):
        parameter = nn.Parameter(torch.ones(3, 2))
        optimizer = kind([parameter], **({"lr": 0.1} if kind in (LAMB, LARS) else {}))
        parameter.grad = torch.ones(3, 2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        before = torch.get_rng_state()
        assert what_it_needs(optimizer) == needs, kind
        assert torch.equal(torch.get_rng_state(), before)
        assert parameter.tolist() == parameter.grad.tolist() == [[1.0, 1.0]] * 3, "it is untouched"
        assert not any(state for state in optimizer.state.values() if float(state.get("step", 0)))
        assert schedule.last_epoch == 0
    assert max(SIZES) == 12, "what a few numbers show is not tried on many: Shampoo makes a matrix of a row's length"


def test_a_rate_of_zero_hides_nothing_and_what_cannot_be_tried_is_refused_with_the_reason():
    optimizer = SCALED["ByHand"]([nn.Parameter(torch.ones(3, 2))])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)
    assert (optimizer.param_groups[0]["lr"], what_it_needs(optimizer)) == (0, "tensors")

    class Strange(Written):
        def step(self, closure=None):
            raise KeyError("no such state")

    with pytest.raises(ValueError, match="Strange could not be tried on a few numbers.*KeyError: 'no such state'"):
        what_it_needs(Strange([nn.Parameter(torch.ones(2))]))
