"""Generated slips: a reference with one place of its text changed, by name, text and words.

`slips` goes through the syntax tree; at each node `usual` gives the changes that mutation testing knows.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from usual import SHORT, New, apart, of_node

from distlab.grading.mutant import signature_and_body
from distlab.grading.sealed import is_sealed, text_of

Changed = tuple[ast.AST, New, str, str]  # a node, what stands in its place, the change for its name, and words or ""


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
    changes: list[Changed] = [(node, *each) for node in list(ast.walk(function)) for each in of_node(node)]
    for slip in _made(function, changes):
        line = slip.name.partition(":")[0]
        yield slip._replace(words=f"with one change in line {line} of its body") if is_sealed(reference) else slip


def _made(function: ast.FunctionDef, changes: Iterable[Changed]) -> Iterator[Slip]:
    """Make each change, print the function, and put back what was there."""
    module = ast.Module([function], [])
    original = _text(module)
    parents: dict[int, ast.AST] = {}
    for node in ast.walk(module):
        for child in ast.iter_child_nodes(node):
            parents.setdefault(id(child), node)
    seen, names = {original}, Counter[str]()
    for node, new, what, words in changes:
        around = _around(node, parents)
        before = "" if words else ast.unparse(around)
        with _put(parents[id(node)], node, new):
            text = _text(module)
            after = "" if words else ast.unparse(new if around is node and isinstance(new, ast.AST) else around)
        if text in seen:
            continue
        seen.add(text)
        name = f"{_first_difference(original, text)}: {what}"
        names[name] += 1  # a line may hold the same text twice
        words = words or "with `{1}` in the place of `{0}`".format(*apart(before, after))
        name = name if names[name] == 1 else f"{name} #{names[name]}"
        yield Slip(name, text, words)


def _text(module: ast.Module) -> str:
    """Return the body of a module's only function as text."""
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    return "\n".join(ast.unparse(ast.fix_missing_locations(statement)) for statement in function.body)


def _first_difference(one: str, other: str) -> int:
    lines = zip(one.splitlines(), other.splitlines(), strict=False)
    return next((number for number, (a, b) in enumerate(lines, start=1) if a != b), 1)


def _around(node: ast.AST, parents: dict[int, ast.AST]) -> ast.AST:
    """Return the largest expression around a node that is short enough to be shown."""
    around = node
    while isinstance(node, ast.expr) and isinstance(node := parents[id(node)], ast.expr | ast.keyword):
        if isinstance(node, ast.expr) and len(ast.unparse(node)) <= SHORT:
            around = node
    return around


@contextlib.contextmanager
def _put(parent: ast.AST, old: ast.AST, new: New) -> Iterator[None]:
    """Put a node, or statements, in another's place, for a while; None takes a statement away."""
    for field, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, field, new)
            yield
            setattr(parent, field, old)
            return
        if isinstance(value, list) and any(item is old for item in value):
            kept = [*value]
            at = next(number for number, item in enumerate(value) if item is old)
            value[at : at + 1] = new if isinstance(new, list) else [new] if new is not None else []
            if not value and field == "body":
                value.append(ast.Pass())
            yield
            value[:] = kept
            return
    raise AssertionError("a node is in its parent")
