"""Flags of commands and of labs: a mistake is one line that says what to pass, and exit status 2."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from distlab.comm.command import runnable

_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Parser(argparse.ArgumentParser):
    """A parser of flags whose refusal is one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where help is."""
        self.exit(2, f"{self.prog}: {message} (see {runnable(self.prog)} --help)\n")


def number(
    kind: type = int, *, least: float | None = None, most: float | None = None, size: bool = False
) -> Callable[[str], Any]:
    """Return a converter to a number in a range, for argparse's `type`; `size` reads bytes, such as 64KiB."""
    limits = f"{least:g} or more" if most is None and least is not None else f"{least} to {most}"
    limits = "a number" if least is None and most is None else limits
    what = "a size such as 65536, 64KiB or 1MB" if size else ("a whole number" if kind is int else "a number")

    def convert(text: str) -> Any:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGKi]*B?)", text.strip()) if size else None
        try:
            value = kind(float(found[1]) * _UNITS[found[2]]) if found else kind(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}; pass {limits}") from None
        if not (value == value and (least is None or value >= least) and (most is None or value <= most)):
            raise argparse.ArgumentTypeError(f"{text} cannot be used; pass {limits}")
        return value

    return convert
