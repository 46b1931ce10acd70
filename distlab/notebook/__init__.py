"""What the lessons' notebooks have that plain Python lacks: `%load_ext distlab.notebook`.

The `extension` adds `%%ranks` and `%ranks` (`magics`) and puts the names that lessons use into the notebook; `display`
shows pictures with their words. `learner` is what you have and did, `jupyter` the server behind `make lessons`. Names
load on first use, so that importing the package needs no IPython.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.notebook.display import show
    from distlab.notebook.extension import load_ipython_extension, unload_ipython_extension
    from distlab.notebook.learner.course import course_map
    from distlab.notebook.learner.page import progress_page
    from distlab.notebook.learner.prediction import predict
    from distlab.notebook.learner.stuck import hint, saved_answers, solution
    from distlab.notebook.magics.magic import last_records
    from distlab.notebook.magics.trouble import in_cells

_HOMES = {
    "course_map": "learner.course",
    "show": "display",
    "load_ipython_extension": "extension",
    "unload_ipython_extension": "extension",
    "last_records": "magics.magic",
    "predict": "learner.prediction",
    "progress_page": "learner.page",
    "hint": "learner.stuck",
    "saved_answers": "learner.stuck",
    "solution": "learner.stuck",
    "in_cells": "magics.trouble",
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
