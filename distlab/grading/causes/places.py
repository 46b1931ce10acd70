"""One place of a function changed, in each way that people mistake: what a search for a repair tries.

`versions` walks once through a function's syntax tree; at each node `changes` gives what may stand in its place.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

FEW = 8  # names that are tried in another's place
SHORT = 60  # characters of a piece of text that is shown
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_PAIRS = ((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn))
OPERATORS: dict[type, tuple[type, ...]] = {
    **{one: (other,) for pair in (*_PAIRS, (ast.Is, ast.IsNot)) for one, other in (pair, pair[::-1])},
    **{one: tuple(other for other in ORDERED if other is not one) for one in ORDERED},
    ast.FloorDiv: (ast.Div, ast.Mult),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
}
_ALIKE = (  # names that are mistaken for one another
    *("min max mean sum amax amin median", "any all", "isend irecv", "ceil floor round int", "copy_ add_ sub_"),
    *("div_ mul_", "SUM MAX MIN", "argmin argmax", "append extend", "median_low median_high median fmean"),
    *("logaddexp maximum minimum", "index_add_ index_copy_", "abs square", "exp exp2", "log log2"),
)
NAMES = {name: [one for one in group.split() if one != name] for group in _ALIKE for name in group.split()}
WITH_DIM = ("chunk", "tensor_split", "split", "cat", "stack", "unbind")
_MESSAGES = re.compile(r"\b(i?send|i?recv|exchange\w*|Send|Receive|all_to_all\w*|barrier)\b")
_CALLS = re.compile(r"\bdist\.(?!get_|ReduceOp)|\b(gather_into|scatter_sum|\w+_(to|from)_ranks|collectives|work)\b")
_TURNS = re.compile(r"\s*(if|elif|else|while|for|with|continue|break)\b")
_WORD = re.compile(r"[A-Za-z_]\w*")


class Version(NamedTuple):
    """A function with one place changed.

    Attributes:
        body: the whole body, as text.
        words: the change, as "with `a` in the place of `b`".
        line: number of the line that is changed.
        risk: 0, or 1 where a changed line calls a collective, or 2 where it may keep ranks from meeting.
    """

    body: str
    words: str
    line: int
    risk: int


class Scope(NamedTuple):
    """What there is in a function to be taken in a piece's place: names with their first lines, and numbers."""

    names: dict[str, int]
    scalars: list[ast.expr]

    @classmethod
    def of(cls, function: ast.FunctionDef) -> Scope:
        """Return what there is in a function."""
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        names = {one.arg: 0 for one in arguments}
        sizes = ("get_world_size", "len(", ".numel()", ".size()")
        scalars = [one.arg for one in arguments if one.annotation and ast.unparse(one.annotation) in ("int", "float")]
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, node.lineno)
            elif isinstance(node, ast.Assign) and any(word in ast.unparse(node.value) for word in sizes):
                scalars[:0] = [one.id for one in node.targets if isinstance(one, ast.Name)]
        numbers: list[ast.expr] = []
        numbers += [ast.Name(name, ast.Load()) for name in dict.fromkeys(scalars)][: FEW // 2]
        if "dist." in ast.unparse(function):
            numbers.append(ast.parse("dist.get_world_size()", mode="eval").body)
        return cls(names, numbers)

    def before(self, line: int, name: str = "") -> list[ast.Name]:
        """Return a few names that have a value before a line."""
        given = [one for one, first in self.names.items() if first < line and one != name]
        return [ast.Name(one, ast.Load()) for one in given[-FEW:]]


def versions(function: ast.FunctionDef) -> Iterator[Version]:
    """Yield a function with one place changed, each text once."""
    scope, original = Scope.of(function), _body(function)
    parents = {id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    seen = {original}
    for parent in list(ast.walk(function)):
        for field, value in ast.iter_fields(parent):
            if field in ("decorator_list", "returns", "args", "annotation") and not isinstance(parent, ast.Call):
                continue
            for at, node in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(node, ast.AST):
                    continue
                line = getattr(node, "lineno", getattr(parent, "lineno", 0))
                around = _around(node if isinstance(node, ast.expr | ast.stmt) else parent, parents)
                before = shown(around)
                for new in changes(node, scope, line):
                    if isinstance(value, list):
                        put = [*value[:at], *(new if isinstance(new, list) else [new]), *value[at + 1 :]]
                        setattr(parent, field, put or [ast.Pass()])
                    else:
                        setattr(parent, field, new)
                    text, words = _body(function), _words(before, new if around is node else around)
                    setattr(parent, field, value)
                    if text not in seen:
                        seen.add(text)
                        yield Version(text, words, line, _risk(original, text))


def _around(node: ast.AST, parents: dict[int, ast.AST]) -> ast.AST:
    """Return the largest expression around a node that is short enough to be shown."""
    around = node
    while isinstance(node, ast.expr) and isinstance(node := parents[id(node)], ast.expr | ast.keyword):
        if isinstance(node, ast.expr) and len(ast.unparse(node)) <= SHORT:
            around = node
    return around


def changes(node: ast.AST, scope: Scope, line: int) -> Iterator[Any]:
    """Yield what may stand in a node's place; in a statement's also a list of them, which may be empty."""
    yield from (other() for other in OPERATORS.get(type(node), ()))
    if isinstance(node, ast.stmt):
        yield from _of_statement(node, scope)
    elif isinstance(node, ast.Constant):
        yield from map(ast.Constant, _other_values(node.value))
    elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield from _of_name(node, scope, line)
    elif isinstance(node, ast.BinOp):
        yield from (node.left, node.right, ast.BinOp(node.right, node.op, node.left))
        yield from (ast.BinOp(node, op, ast.Constant(1)) for op in (ast.Add(), ast.Sub()))
        if isinstance(node.op, ast.Mult | ast.Div | ast.Mod):
            yield from (ast.BinOp(node.left, node.op, scalar) for scalar in scope.scalars)
    elif isinstance(node, ast.BoolOp):
        yield from node.values
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse, ast.IfExp(node.test, node.orelse, node.body))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        for op in (ast.Add(), ast.Sub()):
            yield ast.Compare(node.left, node.ops, [ast.BinOp(node.comparators[0], op, ast.Constant(1))])
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name | ast.BinOp | ast.Constant):
        moved = [ast.BinOp(node.slice, op, ast.Constant(1)) for op in (ast.Add(), ast.Sub())]
        places: list[ast.expr] = [*map(ast.Constant, (0, 1, -1, -2)), *moved, *scope.before(line)]
        yield from (ast.Subscript(node.value, place, node.ctx) for place in places)
    elif isinstance(node, ast.Slice):
        yield from (ast.Slice(None, node.upper, node.step), ast.Slice(node.lower, None, node.step))
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _other_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    return [value + 1, value - 1, 2 * value, value / 2, -value, 0] if isinstance(value, int | float) else []


def _of_name(node: ast.Name | ast.Attribute, scope: Scope, line: int) -> Iterator[ast.expr]:
    if isinstance(node, ast.Attribute):
        yield from (ast.Attribute(node.value, other, ast.Load()) for other in NAMES.get(node.attr, ()))
        if node.attr in ("T", "mT", "shape"):
            yield node.value
        return
    yield from (ast.Name(other, ast.Load()) for other in NAMES.get(node.id, ()))
    if node.id in scope.names:
        yield from scope.before(line, node.id)
        yield ast.Call(ast.Attribute(node, "clone", ast.Load()), [], [])
        if any(isinstance(one, ast.Name) and one.id == node.id for one in scope.scalars):
            yield from (ast.BinOp(node, op, ast.Constant(1)) for op in (ast.Sub(), ast.Add()))


def _of_call(node: ast.Call) -> Iterator[ast.expr]:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if isinstance(node.func, ast.Attribute):
        yield node.func.value  # x.abs() -> x
    yield from node.args[:3]  # max(x, 1) -> x
    if len(node.args) >= 2:
        yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
    for at in range(len(node.keywords)):
        yield ast.Call(node.func, node.args, [*node.keywords[:at], *node.keywords[at + 1 :]])
    more = {"topk": ("largest", False), "sort": ("descending", True), "argsort": ("descending", True)}
    more |= {"sorted": ("reverse", True)} | dict.fromkeys(WITH_DIM, ("dim", 1))  # type: ignore[arg-type]
    if called in more and not any(one.arg == more[called][0] for one in node.keywords):
        key, value = more[called]
        yield ast.Call(node.func, node.args, [*node.keywords, ast.keyword(key, ast.Constant(value))])


def _of_statement(node: ast.stmt, scope: Scope) -> Iterator[ast.stmt | list[ast.stmt]]:
    if not isinstance(node, ast.Return | ast.FunctionDef | ast.Import | ast.ImportFrom):
        yield []
    if isinstance(node, ast.If):
        for test in (ast.Constant(True), ast.Constant(False), ast.UnaryOp(ast.Not(), node.test)):
            yield _with(node, test=test)
    value = getattr(node, "value", None)
    if isinstance(node, ast.Return | ast.Assign | ast.AugAssign) and isinstance(value, ast.expr):
        yield from (_with(node, value=other) for other in _scaled(value, scope))
        if isinstance(value, ast.Tuple):
            for one, other in ((a, b) for a in range(len(value.elts)) for b in range(a)):
                turned = [*value.elts]
                turned[one], turned[other] = turned[other], turned[one]
                yield _with(node, value=ast.Tuple(turned, ast.Load()))
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name | ast.Subscript | ast.Attribute):
        yield ast.AugAssign(node.targets[0], ast.Add(), node.value)
    if isinstance(node, ast.AugAssign):
        yield ast.Assign([node.target], node.value)
    if isinstance(node, ast.Expr) and isinstance(value, ast.Call) and value.args:
        target = copy.copy(value.args[0])
        if isinstance(target, ast.Name | ast.Attribute | ast.Subscript):
            target.ctx = ast.Store()
            yield from ([node, ast.AugAssign(target, ast.Div(), scalar)] for scalar in scope.scalars)
    if isinstance(node, ast.For | ast.While | ast.If | ast.With) and len(node.body) > 1:
        yield [_with(node, body=node.body[:-1]), node.body[-1]]
        yield [node.body[0], _with(node, body=node.body[1:])]


def _scaled(value: ast.expr, scope: Scope) -> Iterator[ast.expr]:
    """Yield a value, or one of a tuple's, divided by or times each of a few numbers."""
    parts = value.elts if isinstance(value, ast.Tuple) else [value]
    for at, part in enumerate(parts):
        for new in [ast.BinOp(part, op, scalar) for scalar in scope.scalars for op in (ast.Div(), ast.Mult())]:
            yield ast.Tuple([*parts[:at], new, *parts[at + 1 :]], ast.Load()) if isinstance(value, ast.Tuple) else new


def _with(node: ast.stmt, **fields: Any) -> ast.stmt:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _body(function: ast.FunctionDef) -> str:
    return "\n".join(ast.unparse(ast.fix_missing_locations(statement)) for statement in function.body) or "pass"


def _words(before: str, after: Any) -> str:
    if isinstance(after, list):
        if not after:
            return f"without `{before}`"
        texts = [shown(each) for each in after]
        return (
            "with `{}` after `{}`".format(*texts[::-1])
            if before == texts[0]
            else "with `{}` before `{}`".format(*texts)
        )
    return f"with `{shown(after)}` in the place of `{before}`"


def shown(node: ast.AST) -> str:
    """Return the first line of a node's text, at most SHORT characters."""
    text = ast.unparse(ast.fix_missing_locations(node)).splitlines()[0]
    return text if len(text) <= SHORT else text[: SHORT - 3] + "..."


def last_call(function: ast.FunctionDef) -> int:
    """Return the last line in which a function calls a collective or sends or receives; 0 for none."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    texts = [(node.end_lineno or 0, ast.unparse(node.func)) for node in nodes]
    return max((line for line, text in texts if _MESSAGES.search(text) or _CALLS.search(text)), default=0)


def _risk(original: str, text: str) -> int:
    """Return whether ranks may no longer meet, by the lines that differ and what messages depend on."""
    old, new = original.splitlines(), text.splitlines()
    odd = [*(Counter(old) - Counter(new)), *(Counter(new) - Counter(old))]
    odd = odd or [line for pair in zip(old, new, strict=True) if pair[0] != pair[1] for line in pair]
    depends = {word for line in old if _MESSAGES.search(line) for word in _WORD.findall(line)}
    for line in reversed(old):
        if depends & _set_by(line):
            depends |= {*_WORD.findall(line)}
    turns = depends and any(_TURNS.match(line) or depends & _set_by(line) for line in odd)
    return 2 if turns or any(map(_MESSAGES.search, odd)) else int(any(map(_CALLS.search, odd)))


def _set_by(line: str) -> set[str]:
    """Return the words left of the first = of a line."""
    return {*_WORD.findall(line.partition("=")[0])} if "=" in line else set()
