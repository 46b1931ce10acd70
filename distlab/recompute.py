"""Activation recompute: keep a function's inputs, not what it computed, and compute it again when backward comes.

Backward needs what forward computed on its way. A block of a GPT keeps about 34 bytes for each number of its input
(16-bit); its input alone is 2. So keep the input, let the rest go, and run forward a second time in backward: about a
third more compute for a small part of the memory.

1. `RecomputePlainly`: the idea on one screen, as an autograd function of tensors.
2. `recompute`: any function and any inputs. autograd asks for one saved tensor after the other; the first that it asks
   for runs the function again and catches all of them. The graph is the ordinary one, so every gradient arrives where
   and when it would have: hooks on parameters run once (data parallelism counts on it), tied weights add up.
3. `recompute_blocks`: a model's blocks.

Attention needs no recompute of its own where torch runs its fused kernel: that keeps query, key, value, output and one
number per row, no score matrix [S, S]. On CPU this is so without dropout; with dropout torch falls back to a plain
product and keeps three matrices of scores, and `recompute_blocks(model, part="attention")` is worth its time.

Symbols: L blocks, X bytes of a block's input, A bytes of all that it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from inspect import getclosurevars
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from distlab.blocks.modules.blocks import Choice, find_blocks, outermost
from distlab.comm import device
from distlab.rng import RandomState, keep_random_state, random_state, restore_random_state


class RecomputePlainly(torch.autograd.Function):
    """The simplest recompute: `RecomputePlainly.apply(function, *tensors)`, for a function of tensors to one tensor.

    Its limits show why `recompute` exists: parameters inside the function get their gradients from a backward within
    backward; nothing is recomputed unless some input requires grad; dropout would draw other numbers.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Compute without a graph: no activation is kept."""
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)  # an autograd function's forward records nothing

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute again, with a graph, and go back through it."""
        inputs = [saved.detach().requires_grad_(saved.requires_grad) for saved in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.function(*inputs)
        torch.autograd.backward(output, gradient)
        return None, *(one.grad for one in inputs)


def recompute(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Call `function(*inputs, **options)` and keep only tensors among its inputs for backward.

    The function must compute the same again. What it reads in addition to its inputs must not change before backward.
    It may draw from torch's, numpy's and Python's own generators (their states are kept), not from one of its own.

    The second run begins with the buffers that the first one began with, and leaves them as it finds them. So running
    statistics (BatchNorm) and the vectors of spectral norm are updated once. This holds for the modules that the
    function is, belongs to, or names. Both runs change everything else that it writes to: plain attributes, lists.

    In a graph of torch.compile the graph computes again, as torch's own checkpoint tells it to; the order of
    `recompute_blocks` and compiling makes no difference.

    Cost: X bytes in place of A, and a second forward, in backward, of which A is alive until its backward is done. A
        copy of each buffer that is written, or is small (at most 64 Ki elements), is kept for backward.
    Error: exact, bit for bit: outputs, gradients, random numbers and buffers, dropout and autocast included.

    Raises:
        RuntimeError: in backward, when the second run kept other tensors than the first; in forward, when the function
            asks for gradients (torch.autograd.grad).

    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost, section 4.
    """
    if not torch.is_grad_enabled():
        return function(*inputs, **options)
    if torch.compiler.is_dynamo_compiling():  # a graph saves what it likes: torch's own marks what it computes again
        return checkpoint(partial(function, **options), *inputs, use_reentrant=False)
    run = _Run(function, inputs, options)
    with saved_tensors_hooks(run.pack, run.unpack):
        made = function(*inputs, **options)
    run.end_forward()
    return made


def recompute_blocks(
    model: nn.Module, every: int = 1, *, part: str | None = None, blocks: Choice | None = None
) -> list[str]:
    """Make a model's blocks keep only their inputs, from now on; return the names of those that do.

    Hooks on a block (sharding's, say) stay outside of what is run again.

    Args:
        model: changed in place; its parameters and names stay.
        every: recompute one block in `every`, the first included: 2 gives half the saving for half the time.
        part: name of a submodule of each block; only that is recomputed ("attention").
        blocks: which parts of the model are its blocks: a class, a pattern of names, a function (`modules.blocks`).
            None: the items of each outermost ModuleList and Sequential. Of blocks in blocks the outer ones count.

    Cost: per block X bytes in place of A; at most one block's A is alive in backward, so L X + A in all for L A.
    Error: exact.

    Raises:
        ValueError: no blocks, blocks without the part, or blocks that recompute already.
    """
    if every < 1:
        raise ValueError(f"every is {every}; pass at least 1")
    found_blocks = outermost(find_blocks(model, blocks))
    chosen = dict(list(found_blocks.items())[::every])
    if part is not None:
        found = {f"{name}.{part}": dict(block.named_modules()).get(part) for name, block in chosen.items()}
        chosen = {name: module for name, module in found.items() if module is not None}
    if not chosen:
        raise ValueError(
            f"{type(model).__name__} has {len(found_blocks)} blocks{f' and none has a {part!r}' if part else ''}; "
            "a block is an item of a ModuleList or Sequential. Pass blocks= (a class, a pattern of names, a function), "
            "or call recompute(function, *inputs) inside the model"
        )
    twice = [name for name, one in chosen.items() if getattr(vars(one).get("forward"), "func", None) is recompute]
    if twice:
        raise ValueError(f"{', '.join(twice)} recompute already; build the model anew")
    plain = nn.Module.forward
    never = [n for n, one in chosen.items() if type(one).forward is plain and "forward" not in vars(one)]
    if never:
        text = f"{', '.join(never)} are never called (lists have no forward); pass blocks= that name their items"
        raise ValueError(text)
    for module in chosen.values():
        module.forward = partial(recompute, module.forward)
    return list(chosen)


class _Keep(torch.autograd.Function):
    """Saves inputs as autograd saves its own, so that changes in place are noticed and memory is counted as theirs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class _Run:
    """One call of a function: its inputs until backward, what it saves once backward has come."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.function = function
        self.values, self.structure = tree_flatten((inputs, options))
        given = {id(one): one for one in self.values if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)}
        tensors, number = list(given.values()), {key: index for index, key in enumerate(given)}
        # A tensor that is passed twice is one tensor in the second run too: attention asks whether query is key.
        self.places = {place: number[id(one)] for place, one in enumerate(self.values) if id(one) in given}
        for place in self.places:
            self.values[place] = None  # autograd keeps the tensors
        self.wants_gradient = [tensor.requires_grad for tensor in tensors]
        empty = torch.empty(0, requires_grad=True)
        self.kept = _Keep.apply(empty, *(tensor.detach() for tensor in tensors))  # type: ignore[no-untyped-call]
        kinds = {tensor.device.type for tensor in tensors} | {"cpu"}
        self.modes = [_autocast_mode(kind) for kind in sorted(kinds)]
        self.random, self.random_on_gpus = random_state(), _states_of_gpus(tensors)
        self.buffers = _EarlierBuffers(function)
        self.is_in_forward = True
        self.promised: list[tuple[torch.Size, torch.dtype]] = []  # of each tensor that was saved the first time
        self.caught: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        """Keep a number in place of the tensor."""
        self.promised.append((tensor.shape, tensor.dtype))
        return len(self.promised) - 1

    def end_forward(self) -> None:
        """Note that the first run is over."""
        self.is_in_forward = False
        self.buffers.forget_unwritten()

    def unpack(self, index: int) -> Tensor:
        """Give the tensor of that number; the first asked for runs the function again."""
        if self.is_in_forward:
            raise RuntimeError(
                f"{_name_of(self.function)} asks for gradients while its first run goes on, and what they need is not "
                "kept; do not recompute a function that calls torch.autograd.grad or backward"
            )
        if index not in self.caught:
            self._run_again()
        return self.caught.pop(index)  # let it go as soon as backward has passed

    def _run_again(self) -> None:
        saved = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(self.kept.grad_fn.saved_tensors, self.wants_gradient, strict=True)
        ]
        values = list(self.values)
        for place, index in self.places.items():
            values[place] = saved[index]
        inputs, options = tree_unflatten(values, self.structure)
        caught: list[Tensor] = []

        def catch(tensor: Tensor) -> int:
            caught.append(tensor.detach())
            return len(caught) - 1

        with ExitStack() as stack:
            stack.enter_context(_restored(self.random, self.random_on_gpus))
            stack.enter_context(self.buffers.rewound())
            for mode in self.modes:
                stack.enter_context(torch.autocast(**mode))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(catch, caught.__getitem__))
            self.function(*inputs, **options)
        found = [(tensor.shape, tensor.dtype) for tensor in caught]
        if found != self.promised:
            raise RuntimeError(_explain(self.function, self.promised, found))
        self.caught = dict(enumerate(caught))


SMALL = 65_536  # elements of a buffer that is kept whether it was written or not


class _EarlierBuffers:
    """The buffers of a function's modules as they were before its first run.

    A buffer that was written has a new version. Batch norm's kernel writes and gives no new version. So small buffers
    are kept in any case.

    Args:
        function: a module, one of its methods, or a function that names modules.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._before = [
            (module, name, buffer, buffer.detach().clone(), buffer._version)
            for module in _modules_of(function)
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def forget_unwritten(self) -> None:
        """Drop the large buffers that the first run has not written."""
        self._before = [
            (module, name, buffer, value, version)
            for module, name, buffer, value, version in self._before
            if module._buffers.get(name) is not buffer or buffer._version != version or buffer.numel() <= SMALL
        ]

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """Give the modules the buffers that the first run began with; put today's back afterwards."""
        today = {module: dict(module._buffers) for module, *_ in self._before}
        values = [(buffer, buffer.detach().clone()) for _, _, buffer, _, _ in self._before]
        try:
            for module, name, buffer, before, _ in self._before:
                buffer.data.copy_(before)  # .data: autograd need not hear of a change that is undone
                module._buffers[name] = buffer
            yield
        finally:
            for buffer, value in values:
                buffer.data.copy_(value)
            for module, buffers in today.items():
                module._buffers.clear()
                module._buffers.update(buffers)


def _modules_of(function: Any) -> list[nn.Module]:
    """Return all modules that a function is, belongs to, is given in advance, or names; with those inside of them."""
    found: dict[nn.Module, None] = {}
    todo, seen = [function], set()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            found |= dict.fromkeys(one.modules())
        elif isinstance(one, partial):
            todo += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            todo += [one.__self__, one.__func__]
        elif isinstance(one, FunctionType):
            known: list[Any] = [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
            with suppress(ValueError):  # a name that has no value yet
                names = getclosurevars(one)
                known += [*names.nonlocals.values(), *names.globals.values()]
            todo += [value for value in known if isinstance(value, nn.Module | MethodType | partial)]
    return list(found)


def _autocast_mode(device_type: str) -> dict[str, Any]:
    """Return the current autocast settings: backward runs outside of forward's `with` block and must set them again."""
    dtype, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    cache = torch.is_autocast_cache_enabled()
    return {"device_type": device_type, "dtype": dtype, "enabled": enabled, "cache_enabled": cache}


def _states_of_gpus(tensors: list[Tensor]) -> dict[torch.device, Tensor]:
    """Return the states of the generators of each GPU that an input lies on."""
    states = {place: device.random_state(place) for place in {tensor.device for tensor in tensors}}
    return {place: state for place, state in states.items() if state is not None}


@contextmanager
def _restored(state: RandomState, on_gpus: dict[torch.device, Tensor]) -> Iterator[None]:
    """Draw the same numbers again inside, and leave the generators as they were."""
    with keep_random_state(), torch.random.fork_rng(devices=list(on_gpus)):
        restore_random_state(state)
        for place, numbers in on_gpus.items():
            device.set_random_state(numbers, place)
        yield


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _explain(function: Callable[..., Any], first: list[Any], second: list[Any]) -> str:
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    place = next(differ, min(len(first), len(second)))
    was, now = (f"{list(x[place][0])} {x[place][1]}" if place < len(x) else "nothing" for x in (first, second))
    return (
        f"{_name_of(function)} saved {len(first)} tensors in forward, and {len(second)} when it ran again in backward; "
        f"the first difference is number {place}: {was} before, {now} now. It must compute the same both times: keep "
        "no state that changes in between, and no generator of its own"
    )
