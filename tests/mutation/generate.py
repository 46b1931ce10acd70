"""Generated slips: a reference, or a function of the library, with one place of its text changed.

At each node of the syntax tree `of_node` gives the changes that mutation testing knows, and those of this field:
operators, constants, comparisons, dropped statements; swapped arguments such as ranks, a dropped `wait`, `clone` or
`group=`, a fixed dtype. The library's functions get two more: a condition turned, None returned; `find` finds
such mutations in a tree, `changed_source` makes them.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distlab.course.grading.causes.places import New, body_of, walk
from distlab.course.grading.mutant import signature_and_body
from distlab.course.grading.sealed import text_of

BOTH_WAYS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
BOTH_WAYS += ((ast.And, ast.Or), (ast.Add, ast.Sub))
OPERATORS: dict[type, type] = dict(BOTH_WAYS) | {new: old for old, new in BOTH_WAYS}
OPERATORS |= {ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
NAMES = {"min": "max", "max": "min", "all": "any", "any": "all", "isend": "irecv", "ceil": "floor", "floor": "ceil"}
COMMUTES = {"min", "max", "logaddexp", "exchange", "gcd", "allclose", "equal"}  # swapped arguments change nothing
HARMLESS_KEYWORDS = {"strict", "rcond"}  # the lengths are equal, the default serves
DROPPED_METHODS = ("clone", "contiguous", "detach", "copy", "abs", "item", "flatten", "sort", "double", "float")
SHORT = 60  # characters of a piece of text that is shown


class Slip(NamedTuple):
    """One wrong answer, or one that may be right.

    Attributes:
        name: the line of the function's body as the tree is printed, from 1, and the change: "3: a + b -> a - b".
        body: the whole body, as text.
    """

    name: str
    body: str


def slips(reference: Callable[..., Any]) -> Iterator[Slip]:
    """Yield the slips of a function, each changing one place; those that print alike are left out."""
    head, body = signature_and_body(textwrap.dedent(text_of(inspect.unwrap(reference))).rstrip())
    function = ast.parse(f"{head}\n{body}").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = ast.parse(textwrap.dedent(body)).body
    said: dict[int, str] = {}  # of what stands in a node's place: the change
    made: list[New] = []  # kept, so that no two have one id

    def of(node: ast.AST, line: int) -> Iterator[New]:
        for new, what in of_node(node):
            made.append(new)
            said[id(new)] = what
            yield new

    original, names = body_of(function), Counter[str]()
    for step in walk(function, of):
        pairs = zip(original.splitlines(), step.body.splitlines(), strict=False)
        line = next((number for number, (a, b) in enumerate(pairs, start=1) if a != b), 1)
        name = f"{line}: {said[id(step.new)]}"
        names[name] += 1  # a line may hold the same text twice
        yield Slip(name if names[name] == 1 else f"{name} #{names[name]}", step.body)


def of_node(node: ast.AST) -> Iterator[tuple[New, str]]:
    """Yield what may stand in a node's place, with the change for its name."""
    if isinstance(node, ast.expr):
        before = ast.unparse(node)
        for new in _of_expression(node):
            yield new, " -> ".join(apart(before, ast.unparse(new)))
    elif isinstance(node, ast.stmt):
        yield from _of_statement(node)


def _of_statement(node: ast.stmt) -> Iterator[tuple[New, str]]:
    shown = short(ast.unparse(node).splitlines()[0])
    is_place = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute)
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Continue | ast.Break) or is_place:
        yield [], f"without {shown}"
    if isinstance(node, ast.If | ast.While):
        for value in (True, False):
            new = copy.copy(node)
            new.test = ast.Constant(value)
            if not (isinstance(node, ast.While) and value):
                yield new, f"{shown} -> {'always' if value else 'never'}"
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        other, plain = copy.copy(node), ast.Assign([node.target], node.value)
        other.op = OPERATORS[type(node.op)]()
        for changed in (other, plain):
            yield changed, f"{shown} -> {short(ast.unparse(ast.fix_missing_locations(changed)))}"
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
        yield ast.Return(ast.Tuple(node.value.elts[::-1], ast.Load())), f"{shown} -> swapped"


def _of_expression(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.Constant) and not isinstance(node.value, str):
        yield from (ast.Constant(value) for value in _other_values(node.value))
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
        yield node.left
    elif isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            if type(op) in OPERATORS:
                ops: list[Any] = [*node.ops]
                ops[at] = OPERATORS[type(op)]()
                yield ast.Compare(node.left, ops, node.comparators)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(OPERATORS[type(node.op)](), node.values)
        yield node.values[0]
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Slice):
        yield from [ast.Slice(None, node.upper, node.step)] if node.lower is not None else []
        yield from [ast.Slice(node.lower, None, node.step)] if node.upper is not None else []
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield ast.Name(NAMES[node.id], node.ctx)
    elif isinstance(node, ast.Attribute):
        if node.attr in NAMES:
            yield ast.Attribute(node.value, NAMES[node.attr], node.ctx)
        if node.attr == "dtype" and isinstance(node.ctx, ast.Load):
            yield ast.Attribute(ast.Name("torch", ast.Load()), "float32", ast.Load())
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[ast.expr]:
    if isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_METHODS and not node.args:
        yield node.func.value
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    starred = any(isinstance(arg, ast.Starred) for arg in node.args[:2])
    if len(node.args) >= 2 and called not in COMMUTES and not starred:
        yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
    for at, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in HARMLESS_KEYWORDS:
            yield ast.Call(node.func, node.args, [*node.keywords[:at], *node.keywords[at + 1 :]])
    if isinstance(node.func, ast.Name) and node.func.id == "range":
        last = ast.BinOp(node.args[-1 if len(node.args) < 3 else 1], ast.Sub(), ast.Constant(1))
        yield ast.Call(node.func, [last] if len(node.args) == 1 else [node.args[0], last, *node.args[2:]], [])


def _other_values(value: object) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1] if value == 0 else [value + 1, value - 1]
    if isinstance(value, float):
        return [value * 2 or 1.0]
    return []


def apart(before: str, after: str) -> tuple[str, str]:
    """Return two texts shortened, from shortly before where they differ if they begin alike for too long."""
    if short(before) != short(after):
        return short(before), short(after)
    same = next(at for at, pair in enumerate(zip(before + "\0", after + "\0", strict=False)) if pair[0] != pair[1])
    start = max(before.rfind(" ", 0, same - 8) + 1, same - 30)
    return f"...{short(before[start:])}", f"...{short(after[start:])}"


def short(text: str) -> str:
    """Return a text of at most SHORT characters."""
    return text if len(text) <= SHORT else text[: SHORT - 3] + "..."


@dataclass
class Mutation:
    """One change: in a function, the nth statement or expression with this text becomes a different one."""

    module: str
    function: str
    text: str
    nth: int
    new: str


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function with its name: `Class.method`, `outer.inner`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inside + node.name, node
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from functions(node, f"{inside}{node.name}." if named else inside)  # type: ignore[attr-defined]


def pieces(body: list[ast.stmt]) -> Iterator[ast.stmt | ast.expr]:
    """Yield what may change in a function: no docstring, no annotation, no `raise`, no function or class inside."""
    for node in body:
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Return | ast.Break | ast.Continue):
            yield node
        elif isinstance(node, ast.AnnAssign) and node.value:
            yield node.value
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            yield node
        elif isinstance(node, ast.If | ast.While):
            node.test.is_condition = True  # type: ignore[attr-defined]
            yield node.test
        elif isinstance(node, ast.For):
            yield node.iter
        elif isinstance(node, ast.With):
            yield from (item.context_expr for item in node.items)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from pieces(getattr(node, inner, []))
            for handler in getattr(node, "handlers", []):
                yield from pieces(handler.body)


def changes(piece: ast.stmt | ast.expr) -> list[str]:
    """Return the texts that may replace a piece; what stands in an f-string is words and stays."""
    function = ast.parse("def holder(): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = [copy.deepcopy(piece) if isinstance(piece, ast.stmt) else ast.Expr(copy.deepcopy(piece))]
    said = [node for text in ast.walk(function) if isinstance(text, ast.JoinedStr) for node in ast.walk(text)]
    words, is_test = {id(node) for node in said}, isinstance(piece, ast.expr)

    def of(node: ast.AST, line: int) -> Iterator[New]:
        if id(node) not in words and not (is_test and node is function.body[0]):
            yield from (new for new, _ in of_node(node))

    made = [step.body for step in walk(function, of)]
    if isinstance(piece, ast.Return) and piece.value and not isinstance(piece.value, ast.Constant | ast.JoinedStr):
        made.append("return None")
    if hasattr(piece, "is_condition") and not isinstance(piece, ast.UnaryOp):
        made.append(f"not ({ast.unparse(piece)})")
    return made


def find(root: Path, mutation: Mutation) -> tuple[Path, ast.AST] | None:
    """Find a mutation's place in a tree: in its module, else in one of that name, else anywhere; None if it is gone."""
    home = Path(mutation.module)
    paths = [path.relative_to(root) for package in ("distlab", "simulator") for path in (root / package).rglob("*.py")]
    for path in sorted(paths, key=lambda path: (path != home, path.name != home.name, path)):
        source = (root / path).read_text(encoding="utf-8")
        if mutation.function.split(".")[-1] in source:
            for function, node in functions(ast.parse(source)):
                same = [piece for piece in pieces(node.body) if ast.unparse(piece) == mutation.text]
                if function == mutation.function and len(same) > mutation.nth:
                    return root / path, same[mutation.nth]
    return None


def changed_source(source: str, place: ast.AST, new: str) -> str:
    """Return the source with one place replaced; all other lines keep their numbers."""
    assert isinstance(place, ast.stmt | ast.expr)
    assert place.end_lineno is not None
    lines = source.encode().splitlines(keepends=True)
    first, last = place.lineno - 1, place.end_lineno - 1
    before, after = lines[first][: place.col_offset], lines[last][place.end_col_offset :]
    gap = "\n" * (last - first)
    text = f"({gap}{new})" if isinstance(place, ast.expr) else new + gap
    return b"".join([*lines[:first], before + text.encode() + after, *lines[last + 1 :]]).decode()
