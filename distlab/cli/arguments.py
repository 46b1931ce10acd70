"""Kinds of arguments that several commands take, each with an error that says what to pass."""

from __future__ import annotations

import argparse
from collections.abc import Callable

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
