"""Read what stands after %%ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

USAGE = "%%ranks 4, %%ranks [0,2], %%ranks 4 [0,2], %%ranks --new 4, %%ranks --push a,b, %%ranks --timeout 10"
_TOKEN = re.compile(r"\[[^\]]*\]?|[^\s\[]+")


@dataclass(frozen=True)
class Line:
    """What a %%ranks line asks for.

    Attributes:
        world_size: how many ranks, or None: those that run already.
        chosen: ranks that execute the cell, or None: all.
        new: whether to begin with fresh ranks.
        push: names to copy from the notebook into the ranks first.
        timeout_s: how long the cell may take, or None: the usual limit.
    """

    world_size: int | None = None
    chosen: tuple[int, ...] | None = None
    new: bool = False
    push: tuple[str, ...] = ()
    timeout_s: float | None = None


def read_line(text: str) -> Line:
    """Read the arguments of %%ranks.

    Raises:
        ValueError: something there cannot be read; the text says what, and what can stand there.
    """
    world_size: int | None = None
    chosen: tuple[int, ...] | None = None
    push: tuple[str, ...] = ()
    new, timeout_s = False, None
    tokens = _TOKEN.findall(text)
    while tokens:
        token = tokens.pop(0)
        option, equals, value = token.partition("=")
        if option in ("--push", "--timeout") and not equals:
            value = _value(option, tokens)
        if token == "--new":
            new = True
        elif option == "--push":
            push = _names(value)
        elif option == "--timeout":
            timeout_s = _seconds(value)
        elif token.startswith("["):
            chosen = _chosen(token)
        elif token.isdecimal() and int(token) > 0:
            world_size = int(token)
        else:
            raise ValueError(f"%%ranks cannot read {token!r}; write one of: {USAGE}")
    return Line(world_size, chosen, new, push, timeout_s)


def _value(option: str, tokens: list[str]) -> str:
    if not tokens:
        raise ValueError(f"{option} needs a value; write one of: {USAGE}")
    value = tokens.pop(0)
    while tokens and (value.endswith(",") or tokens[0].startswith(",")):  # --push a, b
        value += tokens.pop(0)
    return value


def _chosen(token: str) -> tuple[int, ...]:
    numbers = [part.strip() for part in token.strip("[]").split(",")]
    if not token.endswith("]") or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"%%ranks cannot read {token!r}; name ranks such as [0,2]")
    return tuple(sorted({int(number) for number in numbers}))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name for name in text.split(",") if name)
    if wrong := [name for name in names if not name.isidentifier()]:
        raise ValueError(f"--push wants names such as --push model,data; {wrong[0]!r} is not a name")
    return names


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"--timeout wants seconds such as --timeout 10; got {text!r}")
    return seconds
