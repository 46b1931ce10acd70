"""What the magics call inside a rank; it needs no IPython."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping, Sized

GIVEN = ("rank", "world_size", "torch", "dist")  # names that a rank begins with
MAX_NAMES = 12


def take(values: Mapping[str, object]) -> None:
    """Put these names into the namespace in which a rank's cells run."""
    sys.modules["__main__"].__dict__.update(values)


def holdings() -> list[str]:
    """Return the names that cells have made on this rank, each with what it is."""
    names = sys.modules["__main__"].__dict__
    own = [
        f"{name} ({_describe(value)})"
        for name, value in names.items()
        if not name.startswith("_")
        and name not in GIVEN
        and not isinstance(value, types.ModuleType)
        and not getattr(value, "__module__", "").startswith("distlab.comm")  # what a rank itself is made of
    ]
    return own if len(own) <= MAX_NAMES else [*own[:MAX_NAMES], f"and {len(own) - MAX_NAMES} more"]


def _describe(value: object) -> str:
    kind, shape = type(value).__name__, getattr(value, "shape", None)
    if shape is not None:
        return f"{kind} {list(shape)}"
    if isinstance(value, bool | int | float):
        return repr(value)
    return f"{kind} of {len(value)}" if isinstance(value, Sized) else kind
