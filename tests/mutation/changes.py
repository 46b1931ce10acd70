"""Changes of one place in a library's functions: draw them by a seed, find them again, make them.

The operators are the usual ones: a comparison turned or off by one, + for -, a constant, `not` added or taken away,
`and` for `or`, min for max, two arguments swapped, a keyword left out, a statement deleted, None returned.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SEED = 20261129
BOTH_WAYS = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
BOTH_WAYS += ((ast.And, ast.Or), (ast.Add, ast.Sub))
SWAPS: dict[type, type] = dict(BOTH_WAYS) | {new: old for old, new in BOTH_WAYS}
SWAPS |= {ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
NAMES = {"min": "max", "max": "min", "all": "any", "any": "all"}
# Calls of which swapped arguments would say nothing.
ORDERED = ("isinstance", "issubclass", "cast", "getattr", "setattr", "hasattr", *NAMES)


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


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Walk as ast.walk does, but not into text that is put together from values."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield from _parts(child)


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what may stand in the place of one node, each with the name of its kind."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield "compare", ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield "arithmetic", ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield "and, or", ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "sign", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", ast.Constant(node.value + 1 if isinstance(node.value, int) else node.value * 2 or 1.0)
    elif isinstance(node, ast.IfExp):
        yield "condition", ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    elif isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in NAMES:
            yield "function", ast.Call(ast.Name(NAMES[name]), node.args, node.keywords)
        if len(node.args) > 1 and name not in ORDERED and not any(isinstance(a, ast.Starred) for a in node.args[:2]):
            yield "arguments", ast.Call(node.func, [node.args[1], node.args[0], *node.args[2:]], node.keywords)
        if node.keywords and name != "dict":
            yield "keyword", ast.Call(node.func, node.args, node.keywords[:-1])


def changes(piece: ast.stmt | ast.expr) -> dict[str, list[str]]:
    """Return the texts that may replace a piece, by kind."""
    made: list[tuple[str, str]] = []
    whole = ast.Module([piece], []) if isinstance(piece, ast.stmt) else ast.Expression(piece)
    for position, node in enumerate(_parts(whole)):
        for kind, new in _changed(node):
            other = copy.deepcopy(whole)
            old = list(_parts(other))[position]
            for parent in ast.walk(other):
                for field, value in ast.iter_fields(parent):
                    if value is old:
                        setattr(parent, field, new)
                    elif isinstance(value, list) and any(one is old for one in value):
                        setattr(parent, field, [new if one is old else one for one in value])
            made.append((kind, ast.unparse(other)))
    stored = isinstance(piece, ast.Assign) and isinstance(piece.targets[0], ast.Attribute | ast.Subscript)
    said = isinstance(piece, ast.Expr) and not isinstance(piece.value, ast.Yield | ast.YieldFrom)
    if stored or said or isinstance(piece, ast.AugAssign | ast.Break | ast.Continue):
        made.append(("deleted", "pass"))
    if isinstance(piece, ast.Return) and piece.value and not isinstance(piece.value, ast.Constant | ast.JoinedStr):
        made.append(("return", "return None"))
    if hasattr(piece, "is_condition") and not isinstance(piece, ast.UnaryOp):
        made.append(("not", f"not ({ast.unparse(piece)})"))
    return {kind: [new for k, new in made if k == kind and new != ast.unparse(piece)] for kind, _ in made}


def draw(root: Path, folders: tuple[str, ...], name: str, how_many: int) -> list[Mutation]:
    """Draw mutations by the seed: a statement first, then one kind of change, then one change."""
    found: list[tuple[Mutation, dict[str, list[str]]]] = []
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        for function, node in functions(ast.parse(path.read_text(encoding="utf-8"))):
            seen: list[str] = []
            for piece in pieces(node.body):
                text = ast.unparse(piece)
                if kinds := {kind: made for kind, made in changes(piece).items() if made}:
                    at = Mutation(path.relative_to(root).as_posix(), function, text, seen.count(text), "")
                    found.append((at, kinds))
                seen.append(text)
    chance = random.Random(f"{SEED} {name}")
    for mutation, kinds in (chosen := chance.sample(found, min(how_many, len(found)))):
        mutation.new = chance.choice(kinds[chance.choice(sorted(kinds))])
    return [mutation for mutation, _ in chosen]


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
