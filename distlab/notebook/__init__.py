"""What the lessons' notebooks have that plain Python lacks: `%load_ext distlab.notebook`.

The extension adds `%%ranks` and `%ranks` and puts the names that lessons use into the notebook. Names load on first
use, so that importing the package needs no IPython.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.notebook.course import course_map
    from distlab.notebook.display import show
    from distlab.notebook.extension import load_ipython_extension, unload_ipython_extension
    from distlab.notebook.magic import last_records
    from distlab.notebook.page import progress_page
    from distlab.notebook.prediction import predict
    from distlab.notebook.stuck import hint, saved_answers, solution
    from distlab.notebook.trouble import in_cells

_HOMES = {
    "course_map": "course",
    "show": "display",
    "load_ipython_extension": "extension",
    "unload_ipython_extension": "extension",
    "last_records": "magic",
    "predict": "prediction",
    "progress_page": "page",
    "hint": "stuck",
    "saved_answers": "stuck",
    "solution": "stuck",
    "in_cells": "trouble",
}
__all__ = [
    "course_map",
    "hint",
    "in_cells",
    "last_records",
    "load_ipython_extension",
    "predict",
    "progress_page",
    "saved_answers",
    "show",
    "solution",
    "unload_ipython_extension",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"distlab.notebook.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'distlab.notebook' has no attribute {name!r}")
