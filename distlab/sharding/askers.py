"""Who asks a shard: code that knows that it holds a part, or a user's, which takes a part for the whole.

Two know: this package, and an optimizer's step, which was tried on parts before (`by_element`). A closure that a step
calls is a user's again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

HERE = __name__.partition(".")[0]
STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


def knows_of_parts() -> bool:
    """Return whether the code that asks, some frames above, knows that a shard is a part."""
    called, frame, is_outside = sys._getframe(0), sys._getframe(1), False
    while frame.f_back is not None and frame.f_code is not _USERS_CLOSURE:
        if not is_outside and (package := _package(frame)):
            if package == HERE:
                return True
            is_outside = True
        if _is_step(frame, called) or _builds_optimizer(frame):
            return True
        called, frame = frame, frame.f_back
    return False


def for_a_user(closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure of which no part is an optimizer's step."""

    def users_closure() -> Any:
        return closure()

    return users_closure


_USERS_CLOSURE = for_a_user(lambda: None).__code__


_ANSWERS = (__name__, "distlab.sharding.shard_gradient")


def _package(frame: FrameType) -> str:
    """Return whose code a frame runs; nothing for torch's, and for one in which a shard answers."""
    name = frame.f_globals.get("__name__", "?")
    return "" if name.startswith("torch.") or name == "torch" or name in _ANSWERS else str(name.partition(".")[0])


def _is_step(frame: FrameType, called: FrameType) -> bool:
    """Return whether a frame runs an optimizer's own step, and not a hook before or after it."""
    if frame.f_code is not STEP or frame.f_globals is not torch_optimizer.__dict__:
        return False
    return called.f_code is getattr(frame.f_locals["func"], "__code__", called.f_code)


def _builds_optimizer(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)
