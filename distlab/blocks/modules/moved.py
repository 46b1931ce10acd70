"""Parameters whose values are elsewhere: in a shard, or as parts on several ranks.

An optimizer that was built before, a closure or `functools.partial` may hold a parameter that its module has no more.
Each would go on with the old values and never see them train, and nothing would say so. So such a parameter refuses to
be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distlab.comm.together import place_in

# Properties and methods of a tensor that tell nothing of its values.
KNOWN = frozenset(Path(__file__).with_name("known.txt").read_text(encoding="utf-8").split())


class NotHere(Tensor):
    """A tensor that has a shape, and says where its values are.

    Attributes:
        label: its name in the model.
        reason: what it says when it is used.
        known: what it tells.
    """

    label, reason, known = "", "", KNOWN

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Tell what is known without the values; a RuntimeError: the function wants values, or a gradient."""
        name = name_of(func)
        if name in cls.known:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        one = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, NotHere))
        raise RuntimeError(f"rank {place_in(None)[0]}: {one.why(name)}")

    def why(self, use: str) -> str:
        """Return why it cannot be used in this way, and what to do."""
        return self.reason

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say what is known."""
        return f"{type(self).__name__}({self.label}, shape {list(self.shape)})"


class Absent(NotHere):
    """What stands for a gradient that is not there, or not yet."""

    known = KNOWN | {"data_ptr", "untyped_storage", "is_leaf", "_version"}


def absent(values: Tensor, reason: str) -> Absent:
    """Return what stands for a gradient while there is none to use: backward may still add to its memory.

    Args:
        values: give it a shape and memory.
        reason: what it says when it is used.

    Shapes: any; the same
    """
    one = values.detach().as_subclass(Absent)
    one.reason = reason
    return one


class MovedParameter(NotHere, nn.Parameter):
    """A parameter as it was before its values moved."""


def mark_moved(parameter: nn.Parameter, label: str, fate: str) -> None:
    """Let a parameter refuse to be used: its module has others in its place.

    Args:
        parameter: itself, whoever holds it.
        label: its name.
        fate: "FullyShard moved it into a shard".
    """
    if type(parameter) is nn.Parameter:
        parameter.__class__ = MovedParameter
        text = (
            f"this is {label} as it was before {fate}. It does not train any more. An optimizer must be built "
            "afterwards; code that keeps a parameter in a closure, a list or functools.partial must read it by its "
            "name in forward; for its first values keep a clone()"
        )
        parameter.label, parameter.reason = label, text  # type: ignore[attr-defined]


class NotCopied:
    """What is bound to the ranks and to the hooks on its module: it cannot be pickled or copied.

    Attributes:
        instead: what to do.
    """

    instead = ""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse, always and by a RuntimeError, to be pickled or copied."""
        text = f"rank {place_in(None)[0]}: a {type(self).__name__} cannot be pickled or copied: {self.instead}"
        raise RuntimeError(text)


def name_of(function: Any) -> str:
    """Return the name of a function, or of the attribute that is read; "set ..." where it is set."""
    name: str = getattr(function, "__name__", "")
    if name not in ("__get__", "__set__", "__delete__"):
        return name
    attribute = str(getattr(function.__self__, "__name__", ""))
    return attribute if name == "__get__" else f"set {attribute}"
