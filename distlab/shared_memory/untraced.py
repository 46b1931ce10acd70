"""Keep torch.compile out of what is Python here and C++ in gloo: it follows functions, and fails in these.

A graph of a model ends at a call of torch.distributed that it cannot hold. The call then runs as it is. But what runs
is Python, and torch.compile tries to make a graph of that, too.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_Function = TypeVar("_Function", bound=Callable[..., Any])


def untraced(function: _Function) -> _Function:
    """Mark a function: torch.compile follows neither it nor what it calls. Costs nothing at a call."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


def keep_untraced(*kinds: type) -> None:
    """Mark all methods of classes."""
    for kind in kinds:
        for method in vars(kind).values():
            if isinstance(method, FunctionType):
                untraced(method)
