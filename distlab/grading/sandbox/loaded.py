"""The library's functions and classes, by the module that defines them, as they stand when this file is loaded.

That is where ranks are forked: a rank that looked through these some thousand values itself would touch them all, and
copy the page of memory of each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import takewhile
from types import FunctionType, ModuleType
from typing import Any

Found = dict[str, list[tuple[ModuleType, str, Any]]]  # defining module -> where a value stands, its name there, itself


def library(names: Iterable[str]) -> list[ModuleType]:
    """Return those of these modules that are the library's."""
    modules = [sys.modules[name] for name in names if name.startswith(("distlab.", "simulator"))]
    return [module for module in modules if isinstance(module, ModuleType)]


def library_since() -> list[ModuleType]:
    """Return the library's modules that were loaded after this one."""
    return library(takewhile(lambda name: name != __name__, reversed(sys.modules)))


def look(modules: Iterable[ModuleType]) -> Found:
    """Return the functions and classes in modules."""
    found: Found = {}
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, (FunctionType, type)):
                found.setdefault(value.__module__, []).append((module, name, value))
    return found


FOUND = look(library(list(sys.modules)))
