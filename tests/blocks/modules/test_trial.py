"""A trial leaves no trace: whatever a forward does, module and generators are byte for byte as before."""

import collections
import gc
import itertools
import threading
from functools import partial
from types import MethodType

import numpy as np
import pytest
import torch
from torch import nn

from distlab.blocks.modules.trial import call_a_copy
from distlab.rng import random_state

META, CPU = torch.device("meta"), torch.device("cpu")


def look(value, seen=None):
    """Describe an object and all that it holds: identities, and the bytes of tensors."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return f"again {seen[id(value)]}"
    if isinstance(value, (int, float, str, bytes, type(None), type, torch.dtype, torch.device)):
        return repr(value)
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        numbers = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        facts = tuple(value.shape), value.dtype, value.requires_grad
        return id(value), type(value), str(value.device), facts, numbers, [*vars(value)]
    if isinstance(value, dict):
        return id(value), [(repr(key), look(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, collections.deque)):
        return id(value), [look(item, seen) for item in value]
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, itertools.count):
        return id(value), repr(value)
    if isinstance(value, partial):
        return look(value.func, seen), look(value.args, seen), look(value.keywords, seen)
    if isinstance(value, MethodType):
        return value.__func__.__qualname__, look(value.__self__, seen)
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    return id(value), type(value), look(getattr(value, "__dict__", None), seen)


class TwoNames(nn.Module):
    """A layer and a weight under two names, and hooks that take themselves off."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second, self.second_weight, self.outside = self.first, self.first.weight, []
        self.plain = [nn.Parameter(torch.randn(4))]
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


class Caches(nn.Module):
    """Fills every kind of cache of its own at its first forward."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask, self.by_length, self.seen = None, {}, collections.deque(maxlen=2)
        self.register_buffer("table", None)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
            self.by_length["mask"] = self.mask * 1
            self.table = self.mask * 2
            self.register_buffer("more", self.mask * 3, persistent=False)
            self.late = nn.Parameter(self.mask * 4)
        y = self.layer(x) * self.mask + self.by_length["mask"] + self.late
        self.seen.append(y)
        return y + self.table + self.more


class Counts(nn.Module):
    """Counts in all ways, draws random numbers, and changes itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.own = nn.BatchNorm1d(4), torch.Generator().manual_seed(1)
        self.calls, self.ids, self.numbers = 0, itertools.count(), np.zeros(3)
        self.tables, self.to_drop = nn.ModuleList([nn.Embedding(4, 4, max_norm=0.1)]), nn.Linear(1, 1)

    def forward(self, x):
        self.calls += 1
        self.numbers += next(self.ids)
        x = x + torch.rand(1, generator=self.own).to(x) + np.random.rand() + torch.rand(1).to(x)
        x = self.norm(x) + self.tables[0](torch.zeros(1, dtype=torch.long, device=x.device))
        self.norm.momentum, self.norm.weight.requires_grad = 0.5, False
        del self.to_drop
        self.tables.append(nn.Linear(1, 1))
        self.norm.eval()
        return x


class Raises(Caches):
    def forward(self, x):
        super().forward(x)
        self.layer = None
        raise ArithmeticError("at the very end")


class ReadsNumbers(Counts):
    """Cannot run on the meta device."""

    def forward(self, x):
        y = super().forward(x)
        return y if x.sum().item() >= 0 else y + 1


def normed():
    """Weights that hooks or parametrizations compute; one has run and holds a tensor that is part of a graph."""
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    old(torch.randn(2, 4))
    return nn.Sequential(old, *map(nn.utils.parametrizations.orthogonal, (nn.Linear(4, 4), nn.Linear(4, 4))))


def attempt(module, device):
    try:
        return call_a_copy(module, (torch.zeros(3, 4, device=device),), device)
    except (ArithmeticError, RuntimeError) as error:
        return error


@pytest.mark.parametrize("kind", [TwoNames, Caches, Counts, normed, ReadsNumbers, Raises])
def test_a_trial_changes_nothing_at_all(kind):
    torch.manual_seed(0)
    module = kind()
    module.train()
    before, drawn = look(module), random_state()
    for device in (META, CPU):
        made = attempt(module, device)
        if (kind, device) in ((Raises, META), (Raises, CPU), (ReadsNumbers, META)):
            assert isinstance(made, ArithmeticError | RuntimeError)
        else:
            assert made.device == device
            assert made.requires_grad
        assert look(module) == before
        assert str(random_state()) == str(drawn)
    if kind is not Raises:
        module(torch.zeros(3, 4))  # and it still works
        assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_a_module_that_cannot_be_copied_is_named():
    locked = TwoNames()
    locked.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"copy.deepcopy cannot copy TwoNames \(TypeError: cannot pickle"):
        call_a_copy(locked, (torch.zeros(3, 4),), CPU)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, torch.fx.symbolic_trace], ids=["script", "fx"])
def test_modules_that_were_made_by_a_compiler_stay_as_they_were(make):
    module = make(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert call_a_copy(module, (torch.ones(3, 4),), CPU).shape == (3, 4)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_the_copy_is_gone_after_the_trial():
    module = TwoNames()
    call_a_copy(module, (torch.zeros(3, 4),), CPU)
    gc.collect()
    assert sum(type(one) is TwoNames for one in gc.get_objects()) == 1
