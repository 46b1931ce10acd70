"""The lines of a lesson that make one of its widgets, where these need no rank, no clock and no file.

A widget of the simulator can then be made again while the site is built, and its states worked out. What a lesson
measured cannot: such pictures stay pictures.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Sequence

RUNS_RANKS = ("distlab.comm", "distlab.course.lab", "distlab.course.notebook", "distlab.grading", "distlab.measure")
RUNS_RANKS += ("lessons",)
KNOWN = frozenset(dir(builtins))


def statements(cell: str) -> list[ast.stmt]:
    """Return a cell's statements, without its magics; none of a cell that runs on ranks."""
    if cell.startswith("%%"):
        return []
    return ast.parse("\n".join(line for line in cell.splitlines() if line[:1] not in ("%", "!"))).body


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return {node.id for node in stored}


def _used(statement: ast.stmt) -> set[str]:
    """Return the names that a statement needs from outside."""
    nodes = list(ast.walk(statement))
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {node.arg for node in nodes if isinstance(node, ast.arg)}
    inner = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return loaded - own - (inner if isinstance(statement, ast.FunctionDef) else set())


def _runs_ranks(statement: ast.stmt) -> bool:
    modules = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else []
    modules += [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
    return any(module == part or module.startswith(f"{part}.") for module in modules for part in RUNS_RANKS)


def shown_name(cell: str) -> str:
    """Return the variable that a cell shows by its last line, or ""."""
    last = (statements(cell) or [None])[-1]
    return last.value.id if isinstance(last, ast.Expr) and isinstance(last.value, ast.Name) else ""


def widget_source(cells: Sequence[str]) -> str | None:
    """Return the lines that make what the last cell shows, or None where they would need ranks or a measurement."""
    lines = [statement for cell in cells for statement in statements(cell)]
    needed, kept = {shown_name(cells[-1])}, []
    for statement in reversed(lines):
        if not isinstance(statement, ast.Expr) and needed & _defined(statement):
            if _runs_ranks(statement):
                return None
            needed = (needed - _defined(statement)) | _used(statement)
            kept.append(statement)
    if needed - KNOWN or not kept:
        return None
    return "\n".join(ast.unparse(statement) for statement in reversed(kept))
