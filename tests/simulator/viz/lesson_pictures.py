"""The panels and timelines of the lessons' own cells, with recorded inputs in place of what a cell measures on ranks.

Pictures of `show` are looked at where the lessons run: tests/lessons/pictures_in_kernels.py.

A cell that makes a picture is executed as it stands. What it reads is looked for in the lesson: the last import,
function, class or assignment before the cell, or an exercise's solution. Only names that a run on ranks gives are
handed in. A picture whose inputs are not there raises: a new one in a lesson cannot be forgotten.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib.util
import io
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from matplotlib.figure import Figure

LESSONS = Path(__file__).resolve().parents[3] / "lessons"
MAKERS = re.compile(r"Panel|Timeline|schedule_editor|\w+_panel")
FOLDERS = sorted(
    p.parent for p in LESSONS.glob("*/lesson.py") if re.search(rf"= ({MAKERS.pattern})\(", p.read_text("utf-8"))
)
DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign


class Shown(NamedTuple):
    """A picture of a lesson, how it is shown, and its number among the lesson's pictures."""

    lesson: str
    number: int
    how: str
    figure: Figure

    @property
    def name(self) -> str:
        """What a test calls it."""
        return f"{self.lesson}-{self.number} ({self.how})"


class Lesson:
    """One lesson's cells, executed as far as its pictures need."""

    def __init__(self, folder: Path, given: Mapping[str, Any]) -> None:
        self.number = folder.name[:2]
        self.shown: list[Shown] = []
        guess = SimpleNamespace(default=lambda *_: None, compare=lambda *_, **__: "")
        self.names: dict[str, Any] = {"show": self._show, "predict": lambda *_, **__: guess}
        self._folder, self._given, self._at, self._busy = folder, given, 0, set[str]()
        parts = re.split(r"(?m)^# %%(.*)$", (folder / "lesson.py").read_text("utf-8"))[1:]
        texts = zip(parts[::2], parts[1::2], strict=True)
        self.cells = [ast.parse(text) for kind, text in texts if "[markdown]" not in kind and "\n# %%" not in text]

    def run(self) -> list[Shown]:
        """Execute the cells that make pictures."""
        drawers = {f.name for cell in self.cells for f in cell.body if isinstance(f, ast.FunctionDef) and _makes(f)}
        for at, cell in enumerate(self.cells):
            self._at = at
            calls = [statement for statement in cell.body if not isinstance(statement, ast.FunctionDef)]
            if any(_makes(statement) or drawers & _called(statement) for statement in calls):
                self._execute(cell.body)
        return self.shown

    def _execute(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            made = _bound(statement)
            if made and made <= self._given.keys():
                self.names.update({name: self._given[name] for name in made})
                continue
            for name in sorted(_read(statement)):
                self._define(name)
            with contextlib.redirect_stdout(io.StringIO()):
                code = ast.Module([statement], [])
                exec(compile(code, f"<lesson {self.number}>", "exec", flags=0x100000), self.names)
            for name in made:
                self._note(self.names.get(name))

    def _define(self, name: str) -> None:
        """Find what the lesson says a name is, execute it, and before it what it reads."""
        if name in self.names or hasattr(builtins, name):
            return
        if name in self._given:
            self.names[name] = self._given[name]
            return
        found = [s for cell in self.cells[: self._at + 1] for s in cell.body if name in _bound(s)]
        found = [statement for statement in found if isinstance(statement, DEFINITIONS)]
        if found and name not in self._busy:
            self._busy.add(name)
            self._execute([found[-1]])
            self._busy.discard(name)
        elif not found:
            self.names[name] = getattr(self._solutions(), name)

    def _solutions(self) -> Any:
        name = f"solutions_of_lesson_{self.number}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, self._folder / "solutions.py")
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    def _show(self, figure: Figure, text: str) -> None:
        assert text.strip()
        self._add("show", figure)

    def _note(self, made: Any) -> None:
        """Keep the picture of a panel or a timeline that a cell has made."""
        from simulator.viz import Panel, Timeline

        if isinstance(made, Panel):
            self._add("panel", made.figure)
            for name, control in made.controls.items():
                first = control.value
                _move(control)
                assert made.error is None, made.error
                self._add(f"panel, {name} {control.value}", made.figure)
                control.value = first
        elif isinstance(made, Timeline):
            self._add("timeline", made._picture(None))
        elif isinstance(getattr(made, "timeline", None), Timeline):
            self._add("schedules", made.timeline._picture(None))

    def _add(self, how: str, figure: Figure) -> None:
        self.shown.append(Shown(self.number, len(self.shown) + 1, how, figure))


def _move(control: Any) -> None:
    """Move a control to its other end."""
    if control.has_trait("max"):
        control.value = control.max
    elif control.has_trait("index"):
        control.index = len(control.options) - 1
    else:
        control.value = not control.value


def _makes(statement: ast.AST) -> bool:
    return any(MAKERS.fullmatch(name) for name in _called(statement))


def _called(statement: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement gives a value at the cell's own level."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _read(statement: ast.stmt) -> Iterator[str]:
    """Return the names that a statement, and the functions in it, read and do not make themselves."""
    nodes = list(ast.walk(statement))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return read - made
