"""The face of a package is its `__init__.py`: what it imports as itself (`from ... import X as X`) is public.

It stands apart from distlab's own face: a folder named distlab beside a script, such as a clone, hides that one alone.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


@cache
def public_names(face: str) -> dict[str, str]:
    """Return the module of each public name of a package that is imported already."""
    text = Path(str(sys.modules[face].__file__)).read_text(encoding="utf-8")
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in found for alias in node.names if alias.name == alias.asname}


def lazy(face: str) -> Callable[[str], Any]:
    """Make a package's `__getattr__`: names that it imports under TYPE_CHECKING load on first use."""

    def load(name: str) -> Any:
        if name in public_names(face):
            return getattr(importlib.import_module(public_names(face)[name]), name)
        raise AttributeError(f"module {face!r} has no attribute {name!r}")

    return load


def attributes_of(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class, and of those that it extends, say of each attribute."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        block = re.search(r"^Attributes:\n((?:[ ]+.*\n?)*)", inspect.cleandoc(each.__doc__ or ""), re.MULTILINE)
        for name, text in re.findall(r"^ {4}(\w+): (.+(?:\n {8,}.*)*)", block[1] if block else "", re.MULTILINE):
            found[name] = " ".join(text.split()).rstrip(".")
    return found


def version() -> str:
    """Return the version of this package, also where a folder named distlab hides its face."""
    text = Path(__file__).parents[1].joinpath("__init__.py").read_text(encoding="utf-8")
    return text.partition('__version__ = "')[2].partition('"')[0]
