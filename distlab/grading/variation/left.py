"""What a call may leave behind where values do not show it: hooks, attributes, options of optimizers, torch's switches.

`marks` looks at an argument, `SWITCHES` at the process. Both give plain values by name, to be compared after the call.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Switch(NamedTuple):
    """One thing that the whole process uses: how to read it, and how to set it."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


DEFAULTS = {  # no call may change them, not even in a drive that compares nothing else
    "torch's default dtype": Switch(torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": Switch(torch.get_default_device, torch.set_default_device),
}
SWITCHES = {
    "the grad mode": Switch(torch.is_grad_enabled, torch.set_grad_enabled),
    "the number of threads of torch": Switch(torch.get_num_threads, torch.set_num_threads),
    "the deterministic mode": Switch(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "torch's anomaly mode": Switch(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "the working directory": Switch(lambda: os.path.realpath("/proc/self/cwd"), os.chdir),  # its folder may be gone
}


def marks(name: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield kind, place and value of what hangs on an argument: "hooks", "attributes" or "option"."""
    if isinstance(value, Tensor):
        yield "hooks", name, sum(len(getattr(value, hooks, None) or ()) for hooks in _TENSOR_HOOKS)
        yield "attributes", name, sorted(vars(value))
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            place = f"{name}.{path}" if path else name
            own = vars(module)
            hooks = [each for key, each in own.items() if key.endswith("_hooks") and isinstance(each, dict)]
            yield "hooks", place, sum(map(len, hooks))
            yield "attributes", place, sorted(own)
            yield "option", f"{place}.training", module.training
        for path, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield from marks(f"{name}.{path}", tensor)
    elif isinstance(value, torch.optim.Optimizer):
        yield "hooks", name, sum(len(getattr(value, hooks, ())) for hooks in _OPTIMIZER_HOOKS)
        groups = {f"{name}.param_groups[{index}]": group for index, group in enumerate(value.param_groups)}
        for place, group in {**groups, f"{name}.defaults": value.defaults}.items():
            yield "option", f"the number of parameters in {place}", len(group.get("params", ()))
            for key, option in group.items():
                if key != "params":
                    yield "option", f"{place}[{key!r}]", option if isinstance(option, bool | int) else repr(option)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from marks(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from marks(f"{name}[{index}]", item)


def left_on(before: list[tuple[str, str, Any]], after: list[tuple[str, str, Any]]) -> list[list[str]]:
    """Return kind and place of each mark that differs, and what is to be said of it."""
    old = {(kind, place): value for kind, place, value in before}
    return [
        [kind, place, _words(kind, place, old[kind, place], value)]
        for kind, place, value in after
        if (kind, place) in old and old[kind, place] != value
    ]


def _words(kind: str, place: str, old: Any, new: Any) -> str:
    if kind == "hooks":
        if new < old:
            return f"it took {old - new} of the caller's hooks from {place}; leave them there"
        many = "a hook" if new - old == 1 else f"{new - old} hooks"
        return f"it leaves {many} on {place}; keep what the register function returns, and call its remove()"
    if kind == "attributes":
        put, gone = sorted({*new} - {*old}), sorted({*old} - {*new})
        what = f"it leaves the attribute {put[0]!r} on" if put else f"it took the attribute {gone[0]!r} from"
        return f"{what} {place}, which belongs to the caller"
    return f"it changed {place} from {old} to {new}; put it back"


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Put back, at the end, what one call may switch: a later one shall show that it switches it too."""
    old = {name: switch.get() for name, switch in SWITCHES.items()}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name, switch in SWITCHES.items():
            if switch.get() != old[name]:
                switch.put(old[name])


def from_to(old: Any, new: Any) -> str:
    """Say what a state was and is, where that is a word or a number."""
    if isinstance(old, bool) and isinstance(new, bool):
        return f" (it was {'on' if old else 'off'}, and is {'on' if new else 'off'})"
    is_short = all((type(each) is int and abs(each) < 10**6) or isinstance(each, str) for each in (old, new))
    return f" (it was {old}, and is {new})" if is_short and len(f"{old}{new}") <= 60 else ""
