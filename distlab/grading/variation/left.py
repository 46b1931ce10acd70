"""What a call may leave on its arguments where values do not show it: hooks, attributes, options of optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


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
