"""A trial leaves no trace: whatever a forward does, module and generators are as before."""

import collections
import gc
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from distlab.pipeline.negotiate import call_a_copy
from distlab.rng import random_state

META, CPU = torch.device("meta"), torch.device("cpu")


class TwoNames(nn.Module):
    """A layer and a weight under two names, and hooks that take themselves off."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second, self.second_weight, self.outside = self.first, self.first.weight, []
        self.handle = self.first.register_forward_hook(partial(self.scale, factor=2.0))
        self.first.register_forward_pre_hook(self.once)

    def once(self, module, inputs):
        self.handle.remove()
        module._forward_pre_hooks.clear()

    def scale(self, module, inputs, output, factor):
        self.outside.append(output)
        return output * factor

    def forward(self, x):
        return self.second(self.first(x)) @ self.second_weight


class Changes(nn.Module):
    """Fills caches at its first forward, counts, draws random numbers, and changes itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.own, self.mask = nn.BatchNorm1d(4), torch.Generator().manual_seed(1), None
        self.calls, self.numbers, self.seen = 0, np.zeros(3), collections.deque(maxlen=2)
        self.tables, self.to_drop = nn.ModuleList([nn.Embedding(4, 4, max_norm=0.1)]), nn.Linear(1, 1)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
            self.late = nn.Parameter(self.mask * 4)
            self.register_buffer("more", self.mask * 3, persistent=False)
        self.calls += 1
        self.numbers += self.calls
        x = x + torch.rand(1, generator=self.own).to(x) + np.random.rand() + torch.rand(1).to(x)
        x = self.norm(x) + self.tables[0](torch.zeros(1, dtype=torch.long, device=x.device))
        self.norm.momentum, self.norm.weight.requires_grad = 0.5, False
        self.norm.eval()
        self.seen.append(x)
        del self.to_drop
        return x * self.mask + self.more + self.late


class Raises(Changes):
    def forward(self, x):
        super().forward(x)
        self.norm = None
        raise ArithmeticError("at the very end")


class ReadsNumbers(Changes):
    """Cannot run on the meta device."""

    def forward(self, x):
        y = super().forward(x)
        return y if x.sum().item() >= 0 else y + 1


def facts(module):
    """Describe what a module and those in it hold, by their texts, and its tensors by identity and numbers."""
    state = [(id(one), one.requires_grad, one.tolist()) for one in (*module.parameters(), *module.buffers())]
    own = module.own.get_state().tolist() if hasattr(module, "own") else None
    return state, own, [repr({name: str(value) for name, value in vars(one).items()}) for one in module.modules()]


@pytest.mark.parametrize("kind", [TwoNames, Changes, ReadsNumbers, Raises])
def test_a_trial_changes_nothing_at_all(kind):
    torch.manual_seed(0)
    module = kind()
    before, drawn = facts(module), str(random_state())
    for device in (META, CPU):
        fails = kind is Raises or (kind, device) == (ReadsNumbers, META)
        try:
            made = call_a_copy(module, (torch.zeros(3, 4, device=device),), device)
            assert not fails
            assert (made.device, made.requires_grad) == (device, True)
        except (ArithmeticError, RuntimeError):
            assert fails
        assert (facts(module), str(random_state())) == (before, drawn)
    if kind is not Raises:
        module(torch.zeros(3, 4))  # and it still works
        assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_a_module_that_cannot_be_copied_is_named_and_a_copy_is_gone_after_the_trial():
    module = TwoNames()
    call_a_copy(module, (torch.zeros(3, 4),), CPU)
    gc.collect()
    assert sum(type(one) is TwoNames for one in gc.get_objects()) == 1
    module.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"copy.deepcopy cannot copy TwoNames \(TypeError: cannot pickle"):
        call_a_copy(module, (torch.zeros(3, 4),), CPU)
