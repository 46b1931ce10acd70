"""What several commands share: numbers and output paths that are refused at once, and scripts loaded by their path."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_RANKS = 1024
MOST_DEVICES = 100_000


def whole_number(*, least: int = 1, most: int | None = None) -> Callable[[str], int]:
    """Return a converter to a whole number in a range, for argparse's `type`; argparse names the flag."""
    limits = f"{least} or more" if most is None else f"{least} to {most}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; pass {limits}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{value} cannot be used; pass {limits}")
        return value

    return convert


def positive_number(text: str) -> float:
    """Convert, for argparse's `type`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number; pass one above 0, such as 2.5 or 1e12")
    return value


def counts_of_devices(text: str) -> tuple[int, ...]:
    """Convert a list of numbers of devices, for argparse's `type`."""
    one = whole_number(most=MOST_DEVICES)
    return tuple(dict.fromkeys(one(part) for part in text.split(",")))


def check_output(flag: str, path: Path | None, *, folder: bool = False, picture: bool = False) -> None:
    """Refuse a path that cannot be written, before the work whose result it is for; a file's folder is made, and told.

    Args:
        flag: the flag that names the path.
        path: of a file, or of a folder; None: the flag was not given.
        folder: whether it is a folder.
        picture: whether it is a picture, whose name must end as one that can be drawn.

    Raises:
        ValueError: saying what to pass instead.
    """
    if path is None:
        return
    expected, found = ("a folder", "a file") if folder else ("a file", "a folder")
    if path.exists() and path.is_dir() != folder:
        raise ValueError(f"{flag} {path}: expected the path of {expected}, got {found}; pass a different path")
    where = path if folder else path.parent
    is_new = not where.exists()
    try:
        where.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            path.open("r+b").close()
        elif not path.is_char_device():
            tempfile.TemporaryFile(dir=where).close()
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: cannot be written ({where}: {error.strerror}); pass a path where you may write"
        ) from None
    if is_new and not folder:
        print(f"{flag} {path}: made the folder {where}", file=sys.stderr)
    if picture:
        from matplotlib.backend_bases import FigureCanvasBase

        kinds = sorted(FigureCanvasBase.get_supported_filetypes())
        if path.suffix and path.suffix[1:].lower() not in kinds:
            wrong = f"expected a picture such as step.png, got {path.suffix}; kinds are {', '.join(kinds)}"
            raise ValueError(f"{flag} {path}: {wrong}")


def load_script(name: str, path: Path) -> Any:
    """Load a .py file as the module `name`, which need not be importable."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
