"""What an answer may lack, or have in another place: what only a search for its mend tries.

A division or a copy may be missing, or a name, a place or a neighbour be another one. A statement may stand outside its
loop, or inside, or be needed once more in each turn.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from distlab.grading.slips.usual import New, short

FEW = 8  # names that are tried in another's place
SCALARS = 4  # numbers by which something may have to be divided
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign)
METHODS = {
    "copy_": ("add_",),
    "add_": ("copy_", "sub_"),
    "sub_": ("add_",),
    "div_": ("mul_",),
    "mul_": ("div_",),
    "SUM": ("MAX",),
    "MAX": ("SUM", "MIN"),
    "MIN": ("MAX", "SUM"),
    "amin": ("amax",),
    "argmin": ("argmax",),
    "argmax": ("argmin",),
    "floor": ("ceil",),
    "append": ("extend",),
    "median": ("median_low",),
    "median_high": ("median_low",),
}
ORDERED = (ast.Eq, ast.Gt, ast.GtE, ast.Lt, ast.LtE)
ROUNDED = {"int": "round", "round": "int"}


class Around(NamedTuple):
    """What there is in an answer to be taken in a piece's place.

    Attributes:
        names: its parameters and local names, each with the line from which on it has a value.
        scalars: expressions that are numbers: parameters that say so, what is made by len() or a world's size.
        fresh: statements that give a name a value that depends on nothing, such as `total = 0`.
        loops: the statements inside loops, by id.
    """

    names: dict[str, int]
    scalars: list[ast.expr]
    fresh: list[ast.Assign]
    loops: set[int]

    @classmethod
    def of(cls, function: ast.FunctionDef) -> Around:
        """Return what there is in a function."""
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = {one.arg: 0 for one in arguments}
        numbers = [one.arg for one in arguments if one.annotation and ast.unparse(one.annotation) in ("int", "float")]
        nodes = [node for statement in function.body for node in ast.walk(statement)]
        for node in nodes:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, node.lineno)
        assigned = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
        for node in assigned:
            if any(word in ast.unparse(node.value) for word in ("get_world_size", "len(", ".numel()", ".size()")):
                numbers.insert(0, node.targets[0].id)  # type: ignore[attr-defined]
        scalars: list[ast.expr] = []
        scalars += [ast.Name(name, ast.Load()) for name in dict.fromkeys(numbers)][:SCALARS]
        if any(isinstance(node, ast.Name) and node.id == "dist" for node in nodes):
            scalars.append(ast.parse("dist.get_world_size()", mode="eval").body)
        inside = [loop for loop in nodes if isinstance(loop, ast.For | ast.While)]
        loops = {id(node) for loop in inside for part in loop.body for node in ast.walk(part)}
        return cls(names, scalars, [node for node in assigned if _is_fresh(node.value)], loops)

    def before(self, line: int) -> list[str]:
        """Return a few names that have a value before a line."""
        return [name for name, given in self.names.items() if given < line][-FEW:]


def _is_fresh(value: ast.expr) -> bool:
    if isinstance(value, ast.List | ast.Dict):
        return not ast.unparse(value).strip("[]{}")
    return isinstance(value, ast.Constant) or ast.unparse(value) in ("set()", "list()", "dict()")


def of_lacking_node(node: ast.AST, around: Around) -> Iterator[tuple[New, str, str]]:
    """Yield what may stand in a node's place, with the change for its name, and words or ""."""
    if isinstance(node, ast.expr):
        for new in _of_expression(node, around):
            yield new, "mended", ""
    elif isinstance(node, ast.stmt):
        yield from _of_statement(node, around)


def _of_expression(node: ast.expr, around: Around) -> Iterator[ast.expr]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in around.names:
        if any(isinstance(one, ast.Name) and one.id == node.id for one in around.scalars):
            yield from (ast.BinOp(node, op, ast.Constant(1)) for op in (ast.Sub(), ast.Add()))
        yield from (ast.Name(name, ast.Load()) for name in around.before(node.lineno) if name != node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield from (ast.Attribute(node.value, name, ast.Load()) for name in METHODS.get(node.attr, ()))
        if node.attr == "shape":
            yield node.value
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.FloorDiv):
        for op in (ast.Add(), ast.Sub()):
            yield ast.BinOp(node, op, ast.Constant(1))
        if isinstance(node.op, ast.Mult):
            yield from (ast.BinOp(node.left, node.op, scalar) for scalar in around.scalars)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Mod):
        yield from (ast.BinOp(node.left, node.op, scalar) for scalar in around.scalars)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        side = node.comparators[0]
        if isinstance(node.ops[0], ORDERED):
            others = (one for one in ORDERED if not isinstance(node.ops[0], one))
            yield from (ast.Compare(node.left, [one()], node.comparators) for one in others)
        for op in (ast.Add(), ast.Sub()):
            yield ast.Compare(node.left, node.ops, [ast.BinOp(side, op, ast.Constant(1))])
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ROUNDED:
        yield ast.Call(ast.Name(ROUNDED[node.func.id], ast.Load()), node.args, node.keywords)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and type(node.slice.value) is int:
        places: list[ast.expr] = [ast.Constant(place) for place in (0, -1, -2)]
        places += [ast.Name(name, ast.Load()) for name in around.before(node.lineno)]
        yield from (ast.Subscript(node.value, place, node.ctx) for place in places)


def _scaled(value: ast.expr, around: Around) -> Iterator[ast.expr]:
    """Yield a value divided by, or times, each of a few numbers; and a copy of it."""
    if isinstance(value, ast.Constant | ast.List | ast.Dict | ast.ListComp | ast.JoinedStr | ast.Compare):
        return
    for scalar in around.scalars:
        for op in (ast.Div(), ast.Mult()):
            yield ast.BinOp(value, op, scalar)
    if isinstance(value, ast.Name | ast.Attribute | ast.Subscript):
        yield ast.Call(ast.Attribute(value, "clone", ast.Load()), [], [])


def _of_statement(node: ast.stmt, around: Around) -> Iterator[tuple[New, str, str]]:
    value = getattr(node, "value", None)
    if isinstance(node, ast.Return | ast.Assign | ast.AugAssign) and isinstance(value, ast.expr):
        for new in _values(node, value, around):
            yield new, "mended", "with `{}` in the place of `{}`".format(*map(_shown, (new, node)))
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Subscript | ast.Attribute):
        added = ast.AugAssign(node.targets[0], ast.Add(), node.value)
        yield added, "added", "with `{}` in the place of `{}`".format(*map(_shown, (added, node)))
    if isinstance(node, ast.Expr) and isinstance(value, ast.Call) and value.args:
        target = copy.deepcopy(value.args[0])
        if isinstance(target, ast.Name | ast.Attribute | ast.Subscript):
            target.ctx = ast.Store()
            for scalar in around.scalars:
                more = ast.AugAssign(target, ast.Div(), scalar)
                yield [node, more], "more", f"with `{_shown(more)}` after `{_shown(node)}`"
    if isinstance(node, ast.If):
        turned = copy.copy(node)
        turned.test = ast.UnaryOp(ast.Not(), node.test)
        yield turned, "not", f"with `{_shown(turned)}` in the place of `{_shown(node)}`"
    if id(node) in around.loops:
        for fresh in around.fresh:
            if id(fresh) not in around.loops:
                yield [node, fresh], "again", f"with `{_shown(fresh)}` once more after `{_shown(node)}`"
    yield from _moved(node)


def _values(node: ast.Return | ast.Assign | ast.AugAssign, value: ast.expr, around: Around) -> Iterator[ast.stmt]:
    """Yield a statement with its value, or one of the values in its tuple, scaled or copied."""
    plain: list[ast.expr] = [] if isinstance(value, ast.Name) else [ast.Name(one) for one in around.before(node.lineno)]
    for other in [*_scaled(value, around), *plain]:
        new = copy.copy(node)
        new.value = other
        yield new
    parts = value.elts if isinstance(value, ast.Tuple) else value.values if isinstance(value, ast.Dict) else []
    for at, part in enumerate(parts):
        for scaled in _scaled(part, around) if part is not None else ():
            whole = copy.copy(value)
            changed = [*parts[:at], scaled, *parts[at + 1 :]]
            setattr(whole, "elts" if isinstance(value, ast.Tuple) else "values", changed)
            new = copy.copy(node)
            new.value = whole
            yield new


def _moved(node: ast.stmt) -> Iterator[tuple[New, str, str]]:
    """Yield a compound statement whose first or last line stands outside, or takes its neighbour in."""
    body = getattr(node, "body", None)
    if not isinstance(body, list) or isinstance(node, ast.ClassDef):
        return
    if isinstance(node, ast.For | ast.While | ast.If | ast.With) and len(body) > 1:
        for line, rest, words in ((body[-1], body[:-1], "after"), (body[0], body[1:], "before")):
            if isinstance(line, SIMPLE):
                shorter = copy.copy(node)
                shorter.body = rest
                both: list[ast.stmt] = [shorter, line] if words == "after" else [line, shorter]
                yield both, "moved", f"with `{_shown(line)}` {words} `{_shown(node)}`, not in it"
    for at, (first, second) in enumerate(pairwise(body)):
        if isinstance(first, ast.For | ast.While | ast.If | ast.With) and isinstance(second, SIMPLE):
            longer, new = copy.copy(first), copy.copy(node)
            longer.body = [*first.body, second]
            new.body = [*body[:at], longer, *body[at + 2 :]]  # type: ignore[attr-defined]
            yield new, "moved", f"with `{_shown(second)}` at the end of `{_shown(first)}`, not after it"


def _shown(node: ast.stmt) -> str:
    return short(ast.unparse(ast.fix_missing_locations(node)).splitlines()[0])
