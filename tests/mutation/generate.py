"""Generated slips: a reference with one place of its text changed, by name, text and words.

At each node of the syntax tree `usual` gives the changes that mutation testing knows.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from usual import apart, of_node

from distlab.course.grading.causes.places import New, body_of, walk
from distlab.course.grading.mutant import signature_and_body
from distlab.course.grading.sealed import is_sealed, text_of


class Slip(NamedTuple):
    """One wrong answer, or one that may be right.

    Attributes:
        name: the line of the function's body as the tree is printed, from 1, and the change: "3: a + b -> a - b".
        body: the whole body, as text.
        words: the change in words, which follow "the reference".
    """

    name: str
    body: str
    words: str


def slips(reference: Callable[..., Any]) -> Iterator[Slip]:
    """Yield the slips of a function, each changing one place; those that print alike are left out."""
    head, body = signature_and_body(textwrap.dedent(text_of(inspect.unwrap(reference))).rstrip())
    function = ast.parse(f"{head}\n{body}").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = ast.parse(textwrap.dedent(body)).body
    said: dict[int, tuple[str, str]] = {}  # of what stands in a node's place: the change, and words or ""
    made: list[New] = []  # kept, so that no two have one id

    def of(node: ast.AST, line: int) -> Iterator[New]:
        for new, what, words in of_node(node):
            made.append(new)
            said[id(new)] = (what, words)
            yield new

    original, names = body_of(function), Counter[str]()
    for step in walk(function, of):
        what, words = said[id(step.new)]
        line = _first_difference(original, step.body)
        name = f"{line}: {what}"
        names[name] += 1  # a line may hold the same text twice
        words = words or "with `{1}` in the place of `{0}`".format(*apart(step.before, step.after))
        words = f"with one change in line {line} of its body" if is_sealed(reference) else words
        yield Slip(name if names[name] == 1 else f"{name} #{names[name]}", step.body, words)


def _first_difference(one: str, other: str) -> int:
    lines = zip(one.splitlines(), other.splitlines(), strict=False)
    return next((number for number, (a, b) in enumerate(lines, start=1) if a != b), 1)
