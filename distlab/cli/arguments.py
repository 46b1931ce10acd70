"""What several commands share: numbers as arguments, and scripts that are loaded by their path."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_RANKS = 1024


def whole_number(what: str, *, least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """Return a converter to a whole number in a range, for argparse's `type`."""
    limits = f"{least} or more" if most is None else f"{least} to {most}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {what}; pass {limits}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{value} {what} cannot be used; pass {limits}")
        return value

    return convert


def load_script(name: str, path: Path) -> Any:
    """Load a .py file as the module `name`, which need not be importable."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
