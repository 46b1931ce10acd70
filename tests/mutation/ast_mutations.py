"""Generated wrong answers: small changes of a reference's syntax tree, each one place, all of a fixed order.

The kinds are those of mutation testing (operators, constants, comparisons, dropped statements), and those of this
field: swapped arguments such as ranks, a dropped `wait`, `clone` or `group=`, a fixed dtype, an answer that is kept.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from distlab.grading.mutant import signature_and_body

OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "isend": "irecv", "ceil": "floor", "floor": "ceil"}
COMMUTES = {"min", "max", "logaddexp", "exchange", "gcd", "allclose", "equal"}  # swapped arguments change nothing
HARMLESS_KEYWORDS = {"strict", "rcond"}  # the lengths are equal, the default serves
DROPPED_METHODS = ("clone", "contiguous", "detach", "copy", "abs", "item", "flatten", "sort", "double", "float")


class Mutation(NamedTuple):
    """One wrong answer.

    Attributes:
        name: the line of the function's body as the tree is printed, from 1, and the change: "3: a + b -> a - b".
        body: the whole body, as text.
    """

    name: str
    body: str


def mutations(reference: Callable[..., Any]) -> list[Mutation]:
    """Return the mutations of a function, each changing one place; those that print alike are left out."""
    head, body = signature_and_body(textwrap.dedent(inspect.getsource(inspect.unwrap(reference))).rstrip())
    function = ast.parse(f"{head}\n{body}").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = ast.parse(textwrap.dedent(body)).body
    original = _text(function)
    seen, found = {original}, []
    for changed, what in _changes(function):
        text = _text(changed)
        if text not in seen:
            seen.add(text)
            name = f"{_first_difference(original, text)}: {what}"
            number = (
                sum(one.name.partition(" #")[0] == name for one in found) + 1
            )  # a line may hold the same text twice
            found.append(Mutation(name if number == 1 else f"{name} #{number}", text))
    return found


def _text(function: ast.FunctionDef) -> str:
    return "\n".join(ast.unparse(ast.fix_missing_locations(statement)) for statement in function.body)


def _first_difference(one: str, other: str) -> int:
    lines = zip(one.splitlines(), other.splitlines(), strict=False)
    return next((number for number, (a, b) in enumerate(lines, start=1) if a != b), 1)


def _changes(function: ast.FunctionDef) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Yield copies of the function with one node changed, and the change in words."""
    for index, node in enumerate(ast.walk(function)):
        for number, (_, what) in enumerate(_of_node(copy.deepcopy(node))):
            changed = copy.deepcopy(function)
            parent, place = _place_of(changed, index)
            new = list(_of_node(place))[number][0]
            if parent is not None:
                _put(parent, place, new)
            yield changed, what


def _place_of(function: ast.FunctionDef, index: int) -> tuple[ast.AST | None, ast.AST]:
    nodes = list(ast.walk(function))
    place = nodes[index]
    parent = next((node for node in nodes if any(child is place for child in ast.iter_child_nodes(node))), None)
    return parent, place


def _put(parent: ast.AST, old: ast.AST, new: ast.AST | None) -> None:
    """Put a node in another's place; None takes a statement away."""
    for field, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, field, new)
        elif isinstance(value, list) and any(item is old for item in value):
            at = next(number for number, item in enumerate(value) if item is old)
            value[at : at + 1] = [new] if new is not None else []
            if not value and field == "body":
                value.append(ast.Pass())


def _of_node(node: ast.AST) -> Iterator[tuple[ast.AST | None, str]]:
    """Yield what may stand in a node's place, with the change in words."""
    if isinstance(node, ast.expr):
        before = ast.unparse(node)
        for new in _of_expression(node):
            yield new, " -> ".join(_apart(before, ast.unparse(new)))
    elif isinstance(node, ast.stmt):
        yield from _of_statement(node)


def _of_statement(node: ast.stmt) -> Iterator[tuple[ast.AST | None, str]]:
    shown = _short(ast.unparse(node).splitlines()[0])
    is_place = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute)
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Continue | ast.Break) or is_place:
        yield None, f"without {shown}"
    if isinstance(node, ast.If | ast.While):
        for value in (True, False):
            new = copy.deepcopy(node)
            new.test = ast.Constant(value)
            if not (isinstance(node, ast.While) and value):
                yield new, f"{shown} -> {'always' if value else 'never'}"
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        other, plain = copy.deepcopy(node), ast.Assign([copy.deepcopy(node.target)], copy.deepcopy(node.value))
        other.op = OPERATORS[type(node.op)]()
        for changed in (other, plain):
            text = ast.unparse(ast.fix_missing_locations(changed))
            yield changed, f"{shown} -> {_short(text)}"
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
        new_return = copy.deepcopy(node)
        assert isinstance(new_return.value, ast.Tuple)
        new_return.value.elts.reverse()
        yield new_return, f"{shown} -> swapped"


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
        yield node.body
        yield node.orelse
    elif isinstance(node, ast.Slice):
        if node.lower is not None:
            yield ast.Slice(None, node.upper, node.step)
        if node.upper is not None:
            yield ast.Slice(node.lower, None, node.step)
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


def _apart(before: str, after: str) -> tuple[str, str]:
    """Return two texts shortened, from shortly before where they differ if they begin alike for too long."""
    if _short(before) != _short(after):
        return _short(before), _short(after)
    same = next(at for at, pair in enumerate(zip(before + "\0", after + "\0", strict=False)) if pair[0] != pair[1])
    start = max(before.rfind(" ", 0, same - 8) + 1, same - 30)
    return f"...{_short(before[start:])}", f"...{_short(after[start:])}"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
