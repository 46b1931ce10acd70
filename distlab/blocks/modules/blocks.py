"""The blocks of a model: the parts that are recomputed, or sharded, one by one.

Most models hold their blocks in a list: `model.layers`, or deeper, as `model.encoder.layer`. So the items of the
outermost lists are the first guess. Models with lists in lists (a stage of blocks in a list of stages) need a choice:

    find_blocks(model)                                            # the items of each outermost ModuleList or Sequential
    find_blocks(model, Block)                                     # of this class, wherever they are
    find_blocks(model, "stages.*.blocks.*")                       # by a pattern of names
    find_blocks(model, lambda name, module: name.endswith("mlp")) # by a function
    find_blocks(model, ["encoder", Block])                        # by any of these
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

Choice: TypeAlias = "str | type[nn.Module] | Callable[[str, nn.Module], bool] | Sequence[Choice]"


def find_blocks(model: nn.Module, choice: Choice | None = None) -> dict[str, nn.Module]:
    """Return a model's blocks by name, in the order of `named_modules()`; never the model itself.

    Args:
        model: any module.
        choice: a class; a pattern of names, part by part between the dots ("layers.*" is not "layers.0.mlp"); a
            function of name and module; a sequence of these. None: the items of each outermost ModuleList and
            Sequential, of the model itself if it is one; of a list that is an item, its own items.

    Raises:
        ValueError: the choice is none of these, or nothing in the model is chosen.
    """
    if choice is None:
        return _items_of_lists(model)
    chosen = {name: module for name, module in model.named_modules() if name and _is_chosen(choice, name, module)}
    if not chosen:
        classes = sorted({type(module).__name__ for name, module in model.named_modules() if name})
        parents = [f"{name.rpartition('.')[0]}.*" for name in _items_of_lists(model) if "." in name]
        said = choice.__name__ if isinstance(choice, type) else repr(choice)
        raise ValueError(
            f"{type(model).__name__} has no part that {said} chooses; its lists are "
            f"{', '.join(dict.fromkeys(parents)) or 'none'} and its classes {', '.join(classes[:12])}"
        )
    return chosen


def matches(name: str, pattern: str) -> bool:
    """Say whether a module's name fits a pattern, part by part between the dots."""
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def outermost(blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Leave out the blocks that lie in others."""
    return {
        name: module
        for name, module in blocks.items()
        if not any(name.startswith(f"{other}.") for other in blocks if other != name)
    }


def _items_of_lists(module: nn.Module, prefix: str = "", *, is_item: bool = False) -> dict[str, nn.Module]:
    """Name the items of lists; a list, or a dict, in a list is never called, so its own items count."""
    found: dict[str, nn.Module] = {}
    is_list = is_item or isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        if is_list and is_called(child):
            found[f"{prefix}{name}"] = child
        else:
            found |= _items_of_lists(child, f"{prefix}{name}.", is_item=is_list)
    return found


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward, which lists and dicts have not."""
    return type(module).forward is not nn.Module.forward


def _is_chosen(choice: Choice, name: str, module: nn.Module) -> bool:
    if isinstance(choice, str):
        return matches(name, choice)
    if isinstance(choice, type):
        return isinstance(module, choice)
    if isinstance(choice, Sequence):
        return any(_is_chosen(one, name, module) for one in choice)
    if callable(choice):
        return bool(choice(name, module))
    text = f"blocks are chosen by {choice!r}; pass a class, a pattern of names, a function, or a list of these"
    raise ValueError(text)
