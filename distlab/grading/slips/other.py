"""What people mistake for one another, beyond the operators and constants of mutation testing.

A slip may leave out a term or a step, or do a step twice or too early. It may take another argument, axis or neighbour.
It may round the other way, walk a list from its other end, or confuse a sum with a mean.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from distlab.grading.slips.usual import COMMUTES, New, short

FEW = 4  # other arguments, texts or fields that are tried in one's place
MIRRORED: dict[type, type] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
CONFUSED = {
    "sum": ("mean", "amax"),
    "mean": ("sum", "amax"),
    "amax": ("amin", "mean"),
    "max": ("mean",),
    "min": ("mean",),
    "round": ("floor", "ceil"),
    "floor": ("round", "ceil"),
    "sorted": ("list",),
    "abs": ("square",),
    "median": ("mean",),
    "median_low": ("median_high", "median", "mean"),
    "log2": ("log",),
    "exp": ("exp2",),
    "square": ("abs",),
    "index_add_": ("index_copy_",),
    "prod": ("sum",),
    "logaddexp": ("maximum", "minimum"),
}
_WITH_DIM = ("chunk", "tensor_split", "split", "cat", "stack", "unbind", "repeat_interleave")
SIZES = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult, ast.Pow)


class Scope(NamedTuple):
    """What a function's parts may be confused with.

    Attributes:
        alike: for each parameter, the others of its type.
        texts: the texts by which it asks dicts, and those that it returns.
        fields: for each name, the fields that are read of it.
        names: all names that are given a value more than once, parameters among them.
    """

    alike: dict[str, list[str]]
    texts: list[str]
    fields: dict[str, list[str]]
    names: set[str]

    @classmethod
    def of(cls, function: ast.FunctionDef) -> Scope:
        """Return the scope of a function."""
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        kinds = {one.arg: ast.unparse(one.annotation) if one.annotation else "" for one in arguments}
        alike = {one: [other for other in kinds if other != one and kinds[other] == kinds[one] != ""] for one in kinds}
        nodes = [*ast.walk(function)]
        asked: list[ast.AST] = [node.slice for node in nodes if isinstance(node, ast.Subscript)]
        asked += [part for node in nodes if isinstance(node, ast.Return) for part in ast.walk(node)]
        texts = [node.value for node in asked if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        fields: dict[str, list[str]] = {}
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in kinds:
                fields.setdefault(node.value.id, []).append(node.attr)
        stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        again = {name for name in stored if stored.count(name) > 1 or name in kinds}
        return cls(alike, [*dict.fromkeys(texts)], {one: [*dict.fromkeys(each)] for one, each in fields.items()}, again)


def of_other_node(node: ast.AST, scope: Scope) -> Iterator[tuple[New, str, str]]:
    """Yield what may stand in a node's place, with the change for its name, and words or ""."""
    if isinstance(node, ast.expr):
        for new in _of_expression(node, scope):
            yield new, "confused", ""
    elif isinstance(node, ast.comprehension):
        yield from _of_comprehension(node)
    elif isinstance(node, ast.stmt):
        yield from _of_statement(node, scope)


def _of_expression(node: ast.expr, scope: Scope) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp):
        yield from _of_operation(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in MIRRORED:
        yield ast.Compare(node.left, [MIRRORED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        for at in range(len(node.values)):
            others = [*node.values[:at], *node.values[at + 1 :]]
            yield ast.BoolOp(node.op, others) if len(others) > 1 else others[0]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.BinOp):
        inner = node.operand
        if isinstance(inner.op, ast.FloorDiv) and isinstance(inner.left, ast.UnaryOp):  # -(-a // b) rounds up
            yield ast.BinOp(inner.left.operand, ast.FloorDiv(), inner.right)
            yield ast.BinOp(inner.left.operand, ast.Div(), inner.right)
    elif isinstance(node, ast.Constant):
        yield from (ast.Constant(value) for value in _other_values(node.value, scope))
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield from (ast.Name(other, ast.Load()) for other in scope.alike.get(node.id, [])[:FEW])
        yield from (ast.Name(other, ast.Load()) for other in CONFUSED.get(node.id, ()))
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        fields = scope.fields.get(node.value.id, []) if isinstance(node.value, ast.Name) else []
        names = [other for other in fields if other != node.attr][:FEW]
        if node.attr in ("T", "mT"):
            yield node.value
        yield from (ast.Attribute(node.value, name, ast.Load()) for name in [*names, *CONFUSED.get(node.attr, ())])
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name | ast.BinOp):
        for op in (ast.Add(), ast.Sub()):
            yield ast.Subscript(node.value, ast.BinOp(node.slice, op, ast.Constant(1)), node.ctx)
        yield from (ast.Subscript(node.value, ast.Constant(place), node.ctx) for place in (0, -1))
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_operation(node: ast.BinOp) -> Iterator[ast.expr]:
    if isinstance(node.op, SIZES):
        yield node.right
    if isinstance(node.op, ast.Sub | ast.Div | ast.MatMult | ast.Pow | ast.Mod):
        yield ast.BinOp(node.right, node.op, node.left)
    if isinstance(node.op, ast.Mult | ast.Div):
        yield ast.BinOp(node.left, node.op, ast.BinOp(node.right, ast.Pow(), ast.Constant(2)))
    if isinstance(node.op, ast.FloorDiv):
        yield ast.BinOp(node.left, ast.Div(), node.right)
        yield ast.UnaryOp(ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right))
    if isinstance(node.op, ast.Add | ast.Sub) and not isinstance(node.right, ast.Constant):
        yield ast.BinOp(node.left, node.op, ast.BinOp(ast.Constant(2), ast.Mult(), node.right))


def _of_call(node: ast.Call) -> Iterator[ast.expr]:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if isinstance(node.func, ast.Attribute) and not isinstance(node.func.value, ast.Name | ast.Constant):
        yield node.func.value  # x.square().sqrt() -> x.square()
    elif isinstance(node.func, ast.Attribute) and not node.args:
        yield node.func.value
    if called in COMMUTES and len(node.args) > 1:
        yield from node.args
    if called in ("sorted", "reversed", "list", "set", "sum", "float", "int", "abs") and len(node.args) == 1:
        yield node.args[0]
    if called == "range" and len(node.args) == 1:
        yield ast.Call(node.func, [ast.Constant(1), *node.args], [])
        yield ast.Call(node.func, [ast.BinOp(node.args[0], ast.Add(), ast.Constant(1))], [])
    if called in _WITH_DIM and len(node.args) <= 1 and not any(each.arg == "dim" for each in node.keywords):
        yield ast.Call(node.func, node.args, [*node.keywords, ast.keyword("dim", ast.Constant(1))])
    if called in ("topk", "sort", "argsort", "sorted") and not any(each.arg == "largest" for each in node.keywords):
        key = ast.keyword("largest", ast.Constant(False)) if called == "topk" else None
        turned = key or ast.keyword("reverse" if called == "sorted" else "descending", ast.Constant(True))
        yield ast.Call(node.func, node.args, [*node.keywords, turned])


def _other_values(value: object, scope: Scope) -> list[Any]:
    if isinstance(value, str):
        return [other for other in scope.texts if other != value][:FEW] if value in scope.texts else []
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return []
    return [value * 2, value / 2] if isinstance(value, float) else [value * value, 2 * value, -value]


def _turns(iterated: ast.expr) -> Iterator[tuple[ast.expr, str]]:
    shown = short(ast.unparse(iterated))
    whole = ast.Call(ast.Name("list", ast.Load()), [iterated], [])
    one, minus_one = ast.Constant(1), ast.UnaryOp(ast.USub(), ast.Constant(1))
    for cut, words in (
        (ast.Slice(one, None, None), "leaving out the first"),
        (ast.Slice(None, minus_one, None), "leaving out the last"),
        (ast.Slice(None, None, minus_one), "from back to front"),
        (ast.Slice(None, one, None), "and stopping after the first"),
    ):
        yield ast.Subscript(whole, cut, ast.Load()), f"going through `{shown}` {words}"


def _of_comprehension(node: ast.comprehension) -> Iterator[tuple[New, str, str]]:
    for iterated, words in _turns(node.iter):
        new = copy.copy(node)
        new.iter = iterated
        yield new, "another turn", words
    for at, test in enumerate(node.ifs):
        new = copy.copy(node)
        new.ifs = [*node.ifs[:at], *node.ifs[at + 1 :]]
        yield new, "without a condition", f"without the condition `{short(ast.unparse(test))}`"


def _of_statement(node: ast.stmt, scope: Scope) -> Iterator[tuple[New, str, str]]:
    shown = short(ast.unparse(node).splitlines()[0])
    if isinstance(node, ast.Expr | ast.AugAssign):
        yield [node, node], "twice", f"with `{shown}` done twice"
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in scope.names:
        yield None, "without", f"without `{shown}`"
    elif isinstance(node, ast.For):
        for iterated, words in _turns(node.iter):
            new = copy.copy(node)
            new.iter = iterated
            yield new, "another turn", words
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
        parts = node.value.elts
        for one in range(len(parts)):
            for other in range(one + 1, len(parts)):
                turned = [*parts]
                turned[one], turned[other] = turned[other], turned[one]
                words = f"with results {one} and {other} in each other's places"
                yield ast.Return(ast.Tuple(turned, ast.Load())), "swapped", words
    yield from _in_another_order(node)


def _in_another_order(node: ast.stmt) -> Iterator[tuple[New, str, str]]:
    """Yield a compound statement with two neighbours in its body in the other order."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or isinstance(node, ast.ClassDef):
        return
    for at, (first, second) in enumerate(pairwise(body)):
        if any(
            isinstance(each, ast.FunctionDef | ast.ClassDef | ast.Return | ast.Continue) for each in (first, second)
        ):
            continue
        new = copy.copy(node)
        new.body = [*body[:at], second, first, *body[at + 2 :]]  # type: ignore[attr-defined]
        texts = [short(ast.unparse(each).splitlines()[0]) for each in (second, first)]
        yield new, "another order", "with `{}` before `{}`".format(*texts)
