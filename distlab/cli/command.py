"""What a command is, and what several commands share: flags, output paths that are refused at once, scripts by path."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from distlab.course.flags import number

Run = Callable[[argparse.Namespace], int]
Declare = Callable[[argparse.ArgumentParser], object]
NUM_RANKS = number(least=1, most=1024)


class Command(NamedTuple):
    """What a command does (its docstring is the help), and what declares its arguments, in the help's order."""

    run: Run
    declare: tuple[Declare, ...] = ()


def flags(declare: Declare) -> Callable[[Run | Command], Command]:
    """Declare flags of the command below; it is done when they are needed, as some are made from records."""

    def add(below: Run | Command) -> Command:
        own = below if isinstance(below, Command) else Command(below)
        return Command(own.run, (declare, *own.declare))

    return add


def flag(*names: str, **options: Any) -> Callable[[Run | Command], Command]:
    """Declare one flag of the command below, in the words of argparse's `add_argument`; its help says the default."""
    if (default := options.get("default")) is not None:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default).removesuffix(".0")
        options["help"] += f" (default {shown})"
    return flags(lambda parser: parser.add_argument(*names, **options))


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
    return tuple(dict.fromkeys(map(number(least=1, most=100_000), text.split(","))))


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
        text = f"{flag} {path}: cannot be written ({where}: {error.strerror}); pass a path where you may write"
        raise ValueError(text) from None
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
