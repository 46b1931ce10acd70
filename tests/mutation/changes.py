"""Changes of one place in a library's functions: draw them by a seed, find them again, make them.

The changes are those of generated wrong answers, and two more: a condition turned, None returned.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from generate import of_node

from distlab.course.grading.causes.places import New, walk

SEED = 20261129


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
            yield from (new for new, *_ in of_node(node))

    made = [step.body for step in walk(function, of)]
    if isinstance(piece, ast.Return) and piece.value and not isinstance(piece.value, ast.Constant | ast.JoinedStr):
        made.append("return None")
    if hasattr(piece, "is_condition") and not isinstance(piece, ast.UnaryOp):
        made.append(f"not ({ast.unparse(piece)})")
    return made


def draw(root: Path, folders: tuple[str, ...], name: str, how_many: int) -> list[Mutation]:
    """Draw mutations by the seed: a statement first, then one change."""
    found: list[tuple[Mutation, list[str]]] = []
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        for function, node in functions(ast.parse(path.read_text(encoding="utf-8"))):
            seen: list[str] = []
            for piece in pieces(node.body):
                text = ast.unparse(piece)
                if made := changes(piece):
                    found.append(
                        (Mutation(path.relative_to(root).as_posix(), function, text, seen.count(text), ""), made)
                    )
                seen.append(text)
    chance = random.Random(f"{SEED} {name}")
    for mutation, made in (chosen := chance.sample(found, min(how_many, len(found)))):
        mutation.new = chance.choice(made)
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
