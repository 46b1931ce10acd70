"""Generated slips: a reference with one place of its text changed, by name, text and words.

`slips` goes through the syntax tree; at each node `usual` gives the changes that mutation testing knows. With `more`,
`other` adds what people mistake for one another. `mends` goes through an answer's tree: a change that makes it right
tells where its fault is.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from distlab.grading.mutant import signature_and_body
from distlab.grading.sealed import is_sealed, text_of
from distlab.grading.slips.missing import Around, of_lacking_node
from distlab.grading.slips.other import Scope, of_other_node
from distlab.grading.slips.usual import SHORT, New, apart, of_node

_MESSAGES = re.compile(r"\b(i?send|i?recv|exchange\w*|Send|Receive|all_to_all\w*|barrier)\b")
_CALLS = re.compile(r"\bdist\.(?!get_|ReduceOp)|\b(gather_into|scatter_sum|\w+_(to|from)_ranks|collectives|work)\b")


Changed = tuple[ast.AST, New, str, str]  # a node, what stands in its place, the change for its name, and words or ""
_TURNS = re.compile(r"\s*(if|elif|else|while|for|with|continue|break)\b")
_WORD = re.compile(r"[A-Za-z_]\w*")


class Slip(NamedTuple):
    """One wrong answer, or one that may be right.

    Attributes:
        name: the line of the function's body as the tree is printed, from 1, and the change: "3: a + b -> a - b".
        body: the whole body, as text.
        words: the change in words, which follow "the reference".
        risk: 0, or 1 where a changed line calls a collective, or 2 where it sends or receives.
        line: number of the line that is changed, in the text that was read.
    """

    name: str
    body: str
    words: str
    risk: int
    line: int = 0


def slips(reference: Callable[..., Any], *, more: bool = False) -> Iterator[Slip]:
    """Yield the slips of a function, each changing one place; those that print alike are left out.

    Args:
        reference: the right function.
        more: whether other changes come after those of mutation testing.
    """
    head, body = signature_and_body(textwrap.dedent(text_of(inspect.unwrap(reference))).rstrip())
    function = ast.parse(f"{head}\n{body}").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = ast.parse(textwrap.dedent(body)).body
    nodes, scope = list(ast.walk(function)), Scope.of(function)
    changes: list[Changed] = [(node, *each) for node in nodes for each in of_node(node)]
    if more:
        changes += [(node, *each) for node in nodes for each in of_other_node(node, scope)]
    for slip in _made(function, changes):
        line = slip.name.partition(":")[0]
        yield slip._replace(words=f"with one change in line {line} of its body") if is_sealed(reference) else slip


def mends(function: ast.FunctionDef) -> Iterator[Slip]:
    """Yield an answer with one place changed: each of its slips undone, if it is one, and what it may lack.

    Args:
        function: the answer, parsed, without its docstring.
    """
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    scope, around = Scope.of(function), Around.of(function)
    changes: list[Changed] = [(node, *each) for node in nodes for each in of_node(node)]
    changes += [(node, *each) for node in nodes for each in of_other_node(node, scope)]
    changes += [(node, *each) for node in [*nodes, function] for each in of_lacking_node(node, around)]
    yield from _made(function, changes)


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
        yield Slip(name, text, words, _risk(original, text), _line(node, parents))


def _line(node: ast.AST, parents: dict[int, ast.AST]) -> int:
    """Return the line of a node, or of the nearest node around it that has one."""
    while not hasattr(node, "lineno"):
        node = parents[id(node)]
    return int(node.lineno)


def last_call(function: ast.FunctionDef) -> int:
    """Return the last line in which a function calls a collective or sends or receives; 0 for none."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    texts = [(node.end_lineno or 0, ast.unparse(node.func)) for node in nodes]
    return max((line for line, text in texts if _MESSAGES.search(text) or _CALLS.search(text)), default=0)


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


def _risk(original: str, text: str) -> int:
    """Return whether ranks may no longer meet, by the lines that differ and what messages depend on."""
    old, new = original.splitlines(), text.splitlines()
    odd = [*(Counter(old) - Counter(new)), *(Counter(new) - Counter(old))]
    odd = odd or [line for pair in zip(old, new, strict=True) if pair[0] != pair[1] for line in pair]
    depends = {word for line in old if _MESSAGES.search(line) for word in _WORD.findall(line)}
    for line in reversed(old):
        if depends & {*_WORD.findall(_set_by(line))}:
            depends |= {*_WORD.findall(line)}
    sends = [
        line
        for line in odd
        if _MESSAGES.search(line) or (depends and (_TURNS.match(line) or depends & {*_WORD.findall(_set_by(line))}))
    ]
    return 2 if sends else int(any(map(_CALLS.search, odd)))


def _set_by(line: str) -> str:
    """Return what stands left of the first = of a line."""
    return line.partition("=")[0] if "=" in line else ""


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
