"""Stands for pytest where it is not installed: the few things of it that the equality tests use, and no more."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any


class Skipped(Exception):
    """A test that says it cannot run here."""


class Mark:
    """`pytest.mark.name(...)` on a function notes (name, arguments, options) on it."""

    def __init__(self, name: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs or {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            args[0].pytestmark = [*getattr(args[0], "pytestmark", []), self]
            return args[0]
        return Mark(self.name, args, kwargs)


class _Marks:
    def __getattr__(self, name: str) -> Mark:
        return Mark(name)


mark = _Marks()


class Param(tuple):
    """Values of one set of parameters."""

    marks: Any = ()


def param(*values: Any, marks: Any = (), **_: Any) -> Param:
    """Return one set of parameters."""
    made = Param(values)
    made.marks = marks if isinstance(marks, (list, tuple)) else [marks]
    return made


def fixture(function: Any = None, *, scope: str = "function", autouse: bool = False, **_: Any) -> Any:
    """Note that a function makes a value for tests, once for each test or module."""
    if function is None:
        return lambda wrapped: fixture(wrapped, scope=scope, autouse=autouse)
    function.is_fixture, function.scope, function.autouse = True, scope, autouse
    return function


def skip(reason: str) -> None:
    """End a test that cannot run here."""
    raise Skipped(reason)


@contextlib.contextmanager
def raises(kind: Any, match: str | None = None) -> Iterator[Any]:
    """Expect an error in the block."""
    caught = type("Caught", (), {"value": None})()
    try:
        yield caught
    except kind as error:
        caught.value = error
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{error} does not match {match!r}") from error
    else:
        raise AssertionError(f"no {kind} was raised")


class approx:  # noqa: N801 (pytest's name)
    """Equals numbers, and lists of them, that are near."""

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected, self.rel, self.abs = expected, 1e-6 if rel is None else rel, abs or 1e-12
        if rel is None and abs is not None:
            self.rel = 0.0

    def __eq__(self, found: object) -> bool:
        if isinstance(self.expected, (list, tuple)):
            pairs = list(zip(self.expected, found, strict=False))  # type: ignore[call-overload]
            return len(found) == len(self.expected) and all(self._near(*pair) for pair in pairs)  # type: ignore[arg-type]
        return self._near(self.expected, found)

    def __repr__(self) -> str:
        return f"about {self.expected}"

    def _near(self, expected: Any, found: Any) -> bool:
        return math.isclose(float(expected), float(found), rel_tol=self.rel, abs_tol=self.abs)
