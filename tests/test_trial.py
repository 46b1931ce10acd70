"""A trial leaves no trace: whatever a forward does, module, hooks and generators are byte for byte as before."""

import collections
import gc
import itertools
import random
import weakref
from functools import partial
from types import FunctionType, MethodType

import numpy as np
import pytest
import torch
from torch import nn

from distlab.modules.trial import Copier, call_a_copy, clone, without_numbers
from distlab.rng import random_state

META, CPU = torch.device("meta"), torch.device("cpu")
GLOBAL_CACHE: dict = {}


def look(value, seen=None):
    """Describe an object and all that it holds: identities, and the bytes of tensors."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return f"again {seen[id(value)]}"
    if isinstance(value, (int, float, str, bytes, type(None), type, torch.dtype, torch.device)):
        return repr(value)
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        lazy = nn.parameter.is_lazy(value)
        numbers = b"" if lazy else value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        shape = "lazy" if lazy else tuple(value.shape)
        return (
            id(value),
            type(value),
            str(value.device),
            value.dtype,
            shape,
            value.requires_grad,
            numbers,
            [*vars(value)],
        )
    if isinstance(value, dict):
        return id(value), [(repr(key), look(item, seen)) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, collections.deque)):
        return id(value), [look(item, seen) for item in value]
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes()
    if isinstance(value, (itertools.count, type(iter([])))):
        return id(value), repr(value.__reduce__())
    if isinstance(value, partial):
        return look(value.func, seen), look(value.args, seen), look(value.keywords, seen)
    if isinstance(value, MethodType):
        return value.__func__.__qualname__, look(value.__self__, seen)
    if isinstance(value, FunctionType):
        return id(value), [look(cell.cell_contents, seen) for cell in value.__closure__ or ()]
    if isinstance(value, torch.Generator):
        return id(value), value.get_state().numpy().tobytes()
    slots = [(name, look(getattr(value, name), seen)) for name in getattr(type(value), "__slots__", ())]
    return id(value), type(value), look(getattr(value, "__dict__", None), seen), slots


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = self.first
        self.second_weight = self.first.weight
        self.plain = [nn.Parameter(torch.randn(4))]

    def forward(self, x):
        return self.second(self.first(x)) @ self.second_weight * self.plain[0]


class Caches(nn.Module):
    """Fills every kind of cache at its first forward."""

    shared = {}
    newest = None

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask, self.by_length, self.seen, self.last = None, {}, [], collections.deque(maxlen=2)
        self.register_buffer("table", None)

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        for cache in (self.by_length, self.shared, GLOBAL_CACHE):
            if "mask" not in cache:
                cache["mask"] = self.mask * 1
        if self.table is None:
            self.table = self.mask * 2
            self.register_buffer("more", self.mask * 3, persistent=False)
            self.late = nn.Parameter(self.mask * 4)
        Caches.newest = self.mask
        y = self.layer(x) * self.mask + self.by_length["mask"] + self.shared["mask"] + GLOBAL_CACHE["mask"] + self.late
        self.seen.append(y)
        self.last.append(y.detach())
        return y + self.table + self.more


class Slotted:
    __slots__ = ("count", "tensor")

    def __init__(self):
        self.count, self.tensor = 0, torch.zeros(1)


class Counts(nn.Module):
    """Counts in all ways, draws random numbers, and changes itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.own = nn.BatchNorm1d(4), torch.Generator().manual_seed(1)
        self.calls, self.ids, self.items = 0, itertools.count(), iter([1, 2, 3])
        self.numbers, self.slotted, self.tally = np.zeros(3), Slotted(), collections.Counter()
        self.tables = nn.ModuleList([nn.Embedding(4, 4, max_norm=0.1)])
        self.parent = weakref.ref(self)
        self.to_drop = nn.Linear(1, 1)

    def forward(self, x):
        self.calls += 1
        self.numbers += next(self.ids) + next(self.items)
        self.slotted.count += 1
        self.slotted.tensor += 1
        self.tally["calls"] += 1
        self.parent().slotted.count += 1
        x = x + torch.rand(1, generator=self.own).to(x) + random.random() + np.random.rand() + torch.rand(1).to(x)
        x = self.norm(x) + self.tables[0](torch.zeros(1, dtype=torch.long, device=x.device))
        self.norm.momentum, self.norm.weight.requires_grad = 0.5, False
        del self.to_drop
        self.tables.append(nn.Linear(1, 1))
        self.norm.eval()
        return x


class Hooked(nn.Module):
    """Hooks that write to lists outside, count in a closure, take themselves off, and belong to the module."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outside, calls = [], 0

        def count(module, inputs, output):
            nonlocal calls
            calls += 1
            return output * calls

        self.layer.register_forward_hook(lambda module, inputs, output: self.outside.append(output))
        self.layer.register_forward_hook(count)
        self.layer.register_forward_pre_hook(self.once)
        self.handle = self.other.register_forward_hook(partial(self.scale, factor=2.0))
        self.keep = self.outside.append

    def once(self, module, inputs):
        self.handle.remove()
        module._forward_pre_hooks.clear()

    def scale(self, module, inputs, output, factor):
        self.keep(output)
        return output * factor

    def forward(self, x):
        return self.layer(self.other(x))


class Raises(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind()

    def forward(self, x):
        self.inner(x)
        self.inner = None
        raise ArithmeticError("at the very end")


class ReadsNumbers(Counts):
    """Cannot run on the meta device."""

    def forward(self, x):
        y = super().forward(x)
        return y if x.sum().item() >= 0 else y + 1


def recurrent():
    return nn.LSTM(4, 4)


def lazy():
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())


def normed():
    """Weights that hooks or parametrizations compute; one has run and holds a tensor that is part of a graph."""
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    with_vectors = nn.utils.spectral_norm(nn.Linear(4, 4))
    with_vectors(old(torch.randn(2, 4)))
    return nn.Sequential(
        old,
        with_vectors,
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    )


ODD = [TwoNames, Caches, Counts, Hooked, recurrent, lazy, normed, ReadsNumbers]


def attempt(module, device):
    try:
        made = call_a_copy(module, (torch.zeros(3, 4, device=device),), device)
    except (ArithmeticError, RuntimeError) as error:
        return error
    return made[0] if isinstance(made, tuple) else made


def name_of(kind):
    return f"raises after {kind.args[0].__name__}" if isinstance(kind, partial) else kind.__name__


@pytest.mark.parametrize("kind", [*ODD, *(partial(Raises, one) for one in (Caches, Counts, Hooked))], ids=name_of)
def test_a_trial_changes_nothing_at_all(kind):
    torch.manual_seed(0)
    GLOBAL_CACHE.clear()
    Caches.shared.clear()
    Caches.newest = None
    module = kind()
    module.train()
    outside = [GLOBAL_CACHE, Caches.shared, vars(Caches)["newest"]]
    before, drawn, described = look(module), random_state(), look(outside)
    for device in (META, CPU):
        made = attempt(module, device)
        if "Raises" in str(kind):
            assert isinstance(made, ArithmeticError)
        elif kind is ReadsNumbers and device == META:
            assert isinstance(made, RuntimeError)
        else:
            assert made.device == device
            assert made.requires_grad
        assert look(module) == before
        assert str(random_state()) == str(drawn)
        if device == META:
            assert look(outside) == described
            assert Caches.newest is None
    if "Raises" not in str(kind):
        module(torch.zeros(3, 4))  # and it still works
        assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def test_a_copy_computes_what_the_module_computes_and_shares_no_tensor_with_it():
    for kind in ODD:
        torch.manual_seed(0)
        if kind is lazy:
            continue  # it has no weights yet
        module, x = kind(), torch.randn(3, 4)
        with torch.random.fork_rng():
            state = random.getstate(), np.random.get_state()
            twin = Copier(clone).copy(module)
            own = {t.data_ptr() for t in (*module.parameters(), *module.buffers())}
            assert not own & {t.data_ptr() for t in (*twin.parameters(), *twin.buffers())}
            assert [*twin.state_dict()] == [*module.state_dict()]
            theirs = twin(x)
            random.setstate(state[0])
            np.random.set_state(state[1])
        mine = module(x)
        if isinstance(mine, tuple):
            theirs, mine = theirs[0], mine[0]
        if kind not in (Caches, Counts, ReadsNumbers):  # these two classes cache and draw for all of their kind
            assert torch.equal(mine, theirs), kind


def test_what_is_one_object_stays_one_and_what_cannot_be_copied_is_shared():
    import threading

    lock, mark = threading.Lock(), object()
    weight = nn.Parameter(torch.randn(3))
    weight.origin = "row"
    cycle = [weight]
    cycle.append(cycle)
    held = {"lock": lock, "mark": mark, "same": [weight, weight.view(3, 1)], "cycle": cycle, "kind": nn.Linear}
    copied = Copier(without_numbers).copy(held)
    assert copied["lock"] is lock
    assert copied["mark"] is mark
    assert copied["kind"] is nn.Linear
    assert copied["cycle"][1] is copied["cycle"]
    assert copied["same"][0] is copied["cycle"][0] is not weight
    assert isinstance(copied["same"][0], nn.Parameter)
    assert copied["same"][0].origin == "row"
    assert copied["same"][1].shape == (3, 1)


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
