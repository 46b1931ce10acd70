"""One place of a function changed, in each way that people mistake: what a search for a repair tries.

`walk` goes once through a function's syntax tree and puts something else in each node's place; `changes` says what.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations, product
from os.path import commonprefix
from typing import Any, NamedTuple

FEW = 8  # names that are tried in a name's place
SHORT = 60  # characters of a piece of text that is shown
New = ast.AST | list[ast.stmt]  # what stands in a node's place: of a statement also several, or none
_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_PAIRS = ((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn))
_OPERATORS: dict[type, tuple[type, ...]] = {
    **{one: (other,) for pair in (*_PAIRS, (ast.Is, ast.IsNot)) for one, other in (pair, pair[::-1])},
    **{one: tuple(other for other in _ORDERED if other is not one) for one in _ORDERED},
    ast.FloorDiv: (ast.Div, ast.Mult),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
}
_ALIKE = (  # names that are mistaken for each other
    *("min max mean sum amax amin median", "any all", "isend irecv", "ceil floor round int", "copy_ add_ sub_"),
    *("div_ mul_", "SUM MAX MIN", "argmin argmax", "append extend", "median_low median_high median fmean"),
    *("logaddexp maximum minimum", "index_add_ index_copy_", "abs square", "exp exp2", "log log2"),
)
_NAMES = {name: [one for one in group.split() if one != name] for group in _ALIKE for name in group.split()}
_KEYWORDS = {  # of a call, and what one forgets to say
    "topk": ("largest", False),
    "sort": ("descending", True),
    "argsort": ("descending", True),
    "sorted": ("reverse", True),
    **dict.fromkeys(("chunk", "tensor_split", "split", "cat", "stack", "unbind"), ("dim", 1)),
}
_MESSAGES = re.compile(r"\b(i?send|i?recv|exchange\w*|Send|Receive|all_to_all\w*|barrier)\b")
_CALLS = re.compile(r"\bdist\.(?!get_|ReduceOp)|\b(gather_into|scatter_sum|\w+_(to|from)_ranks|collectives|work)\b")
_TURNS = re.compile(r"\s*(if|elif|else|while|for|with|continue|break)\b")
_WORD = re.compile(r"[A-Za-z_]\w*")


class ChangedStep(NamedTuple):
    """One change of a function.

    Attributes:
        node: what was there.
        new: what stands in its place.
        line: where.
        before: text of the largest expression around the node that is short enough to be shown.
        after: the same with the change; "" where statements take a statement's place.
        body: the whole body with the change, as text.
    """

    node: ast.AST
    new: New
    line: int
    before: str
    after: str
    body: str


def walk(function: ast.FunctionDef, changes: Callable[[ast.AST, int], Iterable[New]]) -> Iterator[ChangedStep]:
    """Yield a function with one place changed, each text once.

    Args:
        function: is as it was after each step.
        changes: takes a node and its line; returns what may stand in its place.
    """
    parents = {id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    seen = {body_of(function)}
    for parent in list(ast.walk(function)):
        for field, value in list(ast.iter_fields(parent)):
            if field in ("decorator_list", "returns", "annotation"):
                continue
            for at, node in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(node, ast.AST):
                    continue
                around = _around(node if isinstance(node, ast.expr | ast.stmt) else parent, parents)
                line = getattr(node, "lineno", getattr(parent, "lineno", 0))
                before = ast.unparse(around)
                for new in changes(node, line):
                    put: Any = new
                    if isinstance(value, list):
                        put = [*value[:at], *(new if isinstance(new, list) else [new]), *value[at + 1 :]]
                    setattr(parent, field, [ast.Pass()] if put == [] and field == "body" else put)
                    shown = new if around is node else around
                    text, after = body_of(function), "" if isinstance(shown, list) else text_of(shown)
                    setattr(parent, field, value)
                    if text not in seen:
                        seen.add(text)
                        yield ChangedStep(node, new, line, before, after, text)


def _around(node: ast.AST, parents: dict[int, ast.AST]) -> ast.AST:
    """Return the largest expression around a node that is short enough to be shown."""
    around = node
    while isinstance(node, ast.expr) and isinstance(node := parents[id(node)], ast.expr | ast.keyword):
        if isinstance(node, ast.expr) and len(ast.unparse(node)) <= SHORT:
            around = node
    return around


def body_of(function: ast.FunctionDef) -> str:
    """Return a function's body as text."""
    return "\n".join(map(text_of, function.body)) or "pass"


def text_of(node: ast.AST) -> str:
    """Return the text of a node that may be new."""
    return ast.unparse(ast.fix_missing_locations(node))


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


def versions(function: ast.FunctionDef) -> Iterator[Version]:
    """Yield a function with one place changed, in each way that people mistake."""
    scope, original = Scope.of(function), body_of(function)
    for step in walk(function, lambda node, line: changes(node, scope, line)):
        shown = step.before, step.after
        start = max(0, len(commonprefix(shown)) - SHORT // 4) if max(map(len, shown)) > SHORT else 0
        before, after = ("..." * (start > 0) + first_line(text[start:]) for text in shown)
        words = f"with `{after}` in the place of `{before}`"
        if isinstance(step.new, list):
            before, *texts = [first_line(one) for one in (step.before, *map(text_of, step.new))]
            words = f"without `{before}`"
            if texts:
                words = "with `{}` before `{}`".format(*texts)
                words = "with `{1}` after `{0}`".format(*texts) if before == texts[0] else words
        yield Version(step.body, words, step.line, _risk(original, step.body))
    for node, field in product(ast.walk(function), ("body", "orelse")):
        block = found if isinstance(found := getattr(node, field, None), list) else []
        for at, to in permutations(range(len(block)), 2):
            one, other = (first_line(" ".join(text_of(block[place]).split())) for place in (at, to))
            rest = [*block[:at], *block[at + 1 :]]
            setattr(node, field, [*rest[:to], block[at], *rest[to:]])
            words, text = f"with `{one}` moved {'before' if to < at else 'behind'} `{other}`", body_of(function)
            setattr(node, field, block)
            yield Version(text, words, block[at].lineno, _risk(original, text))


def first_line(text: str, most: int = SHORT) -> str:
    """Return the first line of a text, at most so many characters."""
    text = text.partition("\n")[0]
    return text if len(text) <= most else text[: most - 3] + "..."


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
        kinds = {one.arg: ast.unparse(one.annotation) for one in arguments if one.annotation}
        scalars = [name for name, kind in kinds.items() if kind in ("int", "float")]
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.setdefault(node.id, node.lineno)
            elif isinstance(node, ast.Assign) and any(word in ast.unparse(node.value) for word in sizes):
                scalars[:0] = [one.id for one in node.targets if isinstance(one, ast.Name)]
        numbers: list[ast.expr] = [_name(name) for name in dict.fromkeys(scalars)][: FEW // 2]
        numbers += [ast.BinOp(ast.Constant(1), ast.Sub(), _name(name)) for name in kinds if kinds[name] == "float"]
        if "dist." in ast.unparse(function):
            numbers.append(ast.parse("dist.get_world_size()", mode="eval").body)
        return cls(names, numbers)

    def before(self, line: int, name: str = "") -> list[ast.expr]:
        """Return a few names that have a value before a line."""
        return [_name(one) for one, first in self.names.items() if first < line and one != name][-FEW:]


def changes(node: ast.AST, scope: Scope, line: int) -> Iterator[New]:
    """Yield what may stand in a node's place."""
    yield from (other() for other in _OPERATORS.get(type(node), ()))
    match node:
        case ast.stmt():
            yield from _of_statement(node, scope)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            half = value / 2 if value % 1 or value % 2 == 0 else 0  # 0.5 in the place of 1 is no mistake of anybody
            yield from map(ast.Constant, (value + 1, value - 1, 2 * value, half, -value, 0))
            yield from [ast.parse("float('-inf')", mode="eval").body] * (value == 0)
        case ast.Attribute(value, name, ast.Load()):
            yield from (ast.Attribute(value, other, ast.Load()) for other in _NAMES.get(name, ()))
            if name in ("T", "mT", "shape"):
                yield value
        case ast.Name(name, ast.Load()):
            yield from map(_name, _NAMES.get(name, ()))
            if name in scope.names:
                yield from scope.before(line, name)
                yield ast.Call(ast.Attribute(node, "clone", ast.Load()), [], [])
                if any(isinstance(one, ast.Name) and one.id == name for one in scope.scalars):
                    yield from _one_more_or_less(node)
        case ast.BinOp(left, op, right):
            if isinstance(op, ast.FloorDiv):  # rounded up
                yield ast.parse(f"-(-({ast.unparse(left)}) // ({ast.unparse(right)}))", mode="eval").body
            yield from (left, right, ast.BinOp(right, op, left), *_one_more_or_less(node))
            if isinstance(op, ast.Mult | ast.Div | ast.Mod):
                yield from (ast.BinOp(left, op, scalar) for scalar in scope.scalars)
        case ast.BoolOp():
            yield from node.values
        case ast.UnaryOp():
            yield node.operand
        case ast.IfExp(test, body, orelse):
            yield from (body, orelse, ast.IfExp(test, orelse, body))
        case ast.Compare(left, [op], [right]):
            yield from (ast.Compare(left, [op], [other]) for other in _one_more_or_less(right))
        case ast.Subscript(value, ast.Name() | ast.BinOp() | ast.Constant() as at, ctx):
            places: list[ast.expr] = [*map(ast.Constant, (0, 1, -1, -2)), *_one_more_or_less(at), *scope.before(line)]
            if isinstance(at, ast.Name):
                places.append(ast.Call(ast.Attribute(at, "argsort", ast.Load()), [], []))  # back to where they were
            yield from (ast.Subscript(value, place, ctx) for place in places)
            if isinstance(at, ast.Constant) and isinstance(ctx, ast.Load):
                yield from scope.before(line)
        case ast.Slice(lower, upper, step):
            yield from (ast.Slice(None, upper, step), ast.Slice(lower, None, step))
            yield from (ast.Slice(new, upper, step) for new in (_one_more_or_less(lower) if lower else ()))
            yield from (ast.Slice(lower, new, step) for new in (_one_more_or_less(upper) if upper else ()))
        case ast.Call():
            yield from _of_call(node)


def _name(name: str) -> ast.expr:
    return ast.Name(name, ast.Load())


def _one_more_or_less(node: ast.expr) -> list[ast.expr]:
    return [ast.BinOp(node, op, ast.Constant(1)) for op in (ast.Add(), ast.Sub())]


def _of_call(node: ast.Call) -> Iterator[ast.expr]:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if isinstance(node.func, ast.Attribute):
        yield node.func.value  # x.abs() -> x
    yield from node.args[:3]  # max(x, 1) -> x
    if len(node.args) >= 2:
        yield ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
    for at in range(len(node.keywords)):
        yield ast.Call(node.func, node.args, [*node.keywords[:at], *node.keywords[at + 1 :]])
    if called in _KEYWORDS and not any(one.arg == _KEYWORDS[called][0] for one in node.keywords):
        key, value = _KEYWORDS[called]
        yield ast.Call(node.func, node.args, [*node.keywords, ast.keyword(key, ast.Constant(value))])


def _of_statement(node: ast.stmt, scope: Scope) -> Iterator[New]:
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
        summed = ast.parse(f"dist.all_reduce({ast.unparse(node.targets[0])})").body
        for ranks in [number for number in scope.scalars if isinstance(number, ast.Call)]:
            yield from ([one, *summed] for one in (node, _with(node, value=ast.BinOp(node.value, ast.Div(), ranks))))
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
    """Return the words left of the first = of a line; none of a slice, whose values let no rank wait."""
    left, sign, _ = line.partition("=")
    return {*_WORD.findall(left)} if sign and not re.search(r":.*\]\W*$", left) else set()
