"""Make a lesson's two notebooks from its `lesson.py`: one to work in, one with the solutions.

An exercise is one empty code cell, `# %% exercise="03.flat"`. In its place both notebooks get three cells: the function
(a stub in the lesson, the whole text in the solution), its hints, and its check. The function's text is read from the
file where it lives, so that nothing is kept twice. Below a cell of GUIDES.py with `trials="top_k"` stand a trial's
text, snippet and verdict. Ids of cells are hashes of what is in them: building twice gives the same file. Links to the
map of the course and to the lessons before and after stand under the title and at the end.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jupytext
import nbformat
from nbformat import NotebookNode

from distlab.course.grading import Exercise, load_lesson, reference_of
from distlab.course.grading.lesson import mutant_named
from distlab.course.grading.mutant import signature_and_body, wrong_text

KINDS = ("lesson", "solution")
FIELDS = ("title", "minutes", "needs", "aims")


class Text(NamedTuple):
    """The text of a function: up to the end of its docstring, and the rest."""

    head: str
    body: str


class Source(NamedTuple):
    """A lesson before it is a notebook: its cells, its header, its exercises."""

    number: str
    folder: Path
    cells: list[NotebookNode]
    facts: dict[str, Any]
    exercises: dict[str, Exercise]


def read_source(path: Path) -> Source:
    """Read `lesson.py` (or START.py, which has no exercises) and the `exercises.py` beside it.

    Raises:
        ValueError: an exercise of the text is not in exercises.py, is named twice, or is missing in the text.
    """
    notebook = jupytext.reads(path.read_text(encoding="utf-8"), fmt="py:percent")
    facts = dict(notebook.metadata.get("distlab", {}))
    number = path.parent.name.partition("_")[0] if path.name == "lesson.py" else path.stem
    exercises: dict[str, Exercise] = {}
    if path.name == "lesson.py":
        lesson = load_lesson(path.parent.name, path.parent.parent)
        exercises = {exercise.name: exercise for exercise in lesson.exercises}
        facts |= {field: getattr(lesson, field) for field in FIELDS}
    named = [cell.metadata["exercise"] for cell in notebook.cells if "exercise" in cell.metadata]
    for name in named:
        if name not in exercises:
            raise ValueError(
                f"{path}: exercise {name!r} is not in exercises.py, which has {', '.join(exercises) or 'none'}"
            )
        if named.count(name) > 1:
            raise ValueError(f"{path}: exercise {name!r} is there {named.count(name)} times; once is enough")
    if missing := [name for name in exercises if name not in named]:
        raise ValueError(f'{path}: no cell for {missing[0]}; add the line  # %% exercise="{missing[0]}"')
    return Source(number, path.parent, list(notebook.cells), facts, exercises)


def make_notebook(source: Source, kind: str) -> NotebookNode:
    """Return the notebook of one kind, "lesson" or "solution", without outputs."""
    cells = [made for cell in source.cells for made in _cells_of(cell, source, kind)]
    if links := _links(source.folder, kind) if source.exercises else "":
        cells.insert(1, _node("markdown", links, {"distlab": {"links": "top"}}))
        cells.append(_node("markdown", links, {"distlab": {"links": "end"}}))
    seen: dict[str, int] = {}
    for cell in cells:
        cell["id"] = _identity(cell, source.number, kind, seen)
    facts = {field: list(value) if isinstance(value, tuple) else value for field, value in source.facts.items()}
    if source.exercises:
        facts["exercises"] = [cell.metadata["exercise"] for cell in source.cells if "exercise" in cell.metadata]
    metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "distlab": {**facts, "lesson": source.number, "kind": kind},
    }
    return nbformat.from_dict({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})


def student_cell(exercise: Exercise, folder: Path) -> str:
    """Return what the learner begins with: a stub, or the wrong version to be repaired."""
    text = function_text(exercise.source, folder)
    if exercise.broken is None:
        return _cell(exercise, f'{text.head}\n    raise NotYet("{exercise.name}")')
    # The wrong version's own docstring may name its fault: show what the function is meant to do.
    docstring = text.head.partition('\n    """')[2]
    mutant = mutant_named(exercise, exercise.broken)
    signature, body = signature_and_body(wrong_text(mutant, reference_of(exercise)))
    return _cell(exercise, f'{signature}\n    """{docstring}\n{body}')


def solution_cell(exercise: Exercise, folder: Path) -> str:
    """Return the whole function, after the imports that it may rely on."""
    text = function_text(exercise.source, folder)
    return _cell(exercise, f"{text.head}\n{text.body}")


def function_text(where: str, folder: Path) -> Text:
    """Return the text of "solutions:name" of the lesson in `folder`, or of "package.module:name".

    Raises:
        ValueError: there is no such module-level function, or it has no docstring on lines of its own.
    """
    module, _, name = where.rpartition(":")
    path = _file_of(module, folder)
    text = path.read_text(encoding="utf-8")
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not nodes:
        raise ValueError(f"{path} has no module-level function {name!r}, which an exercise names as {where!r}")
    node, lines = nodes[-1], text.splitlines()
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
    first = node.body[0]
    if ast.get_docstring(node) is None or len(node.body) < 2 or first.end_lineno is None or node.end_lineno is None:
        raise ValueError(
            f"{path}: {name} needs a docstring and a body: the stub shows the one and leaves out the other"
        )
    return Text("\n".join(lines[start : first.end_lineno]), "\n".join(lines[first.end_lineno : node.end_lineno]))


def _file_of(module: str, folder: Path) -> Path:
    beside = folder / f"{module}.py"
    if "." not in module and beside.is_file():
        return beside
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ValueError(f"there is no module {module!r} beside {folder / 'lesson.py'} and none to import")
    return Path(found.origin)


def _cell(exercise: Exercise, text: str) -> str:
    effort = f"# Exercise {exercise.name}: {exercise.effort}"
    return "\n".join([effort, *exercise.imports, *(["", ""] if exercise.imports else []), text])


def _cells_of(cell: NotebookNode, source: Source, kind: str) -> Iterator[NotebookNode]:
    """Turn one cell of the source into those of the notebook."""
    metadata = dict(cell.metadata)
    if trials := metadata.pop("trials", None):
        yield _node(cell.cell_type, cell.source, metadata)
        sys.path.append(str(source.folder))
        made = importlib.import_module("guides").cells(trials)
        yield from (_node(kind, text, {"distlab": {"trial": trial}}) for kind, text, trial in made)
        return
    name = metadata.pop("exercise", None)
    if name is None:
        yield _node(cell.cell_type, cell.source, metadata)
        return
    exercise = source.exercises[name]
    make = student_cell if kind == "lesson" else solution_cell
    yield _node("code", make(exercise, source.folder), metadata | {"distlab": {"exercise": name}})
    if exercise.hints:
        yield _node("markdown", _hints(exercise), {"distlab": {"hints": name}})
    check = f'{exercise.function} = check("{name}", {exercise.function}).function'
    yield _node("code", check, {"distlab": {"check": name}})


def _hints(exercise: Exercise) -> str:
    """Return the hints, each closed until it is clicked."""
    folded = (
        f"<details><summary>Hint {number}</summary>\n\n{hint}\n\n</details>"
        for number, hint in enumerate(exercise.hints, 1)
    )
    return "\n\n".join(folded)


def _links(folder: Path, kind: str) -> str:
    """Return links to the map of the course, to the lesson before and to the one after, as far as they are there."""
    folders = [path.parent.name for path in sorted(folder.parent.glob("[0-9][0-9]_*/lesson.py"))]
    place = folders.index(folder.name)
    links = ["[Map of the course](../START.ipynb)"] if (folder.parent / "START.py").is_file() else []
    for word, at in (("Previous", place - 1), ("Next", place + 1)):
        if 0 <= at < len(folders):
            links.append(f"{word}: [{folders[at].replace('_', ' ')}](../{folders[at]}/{kind}.ipynb)")
    return " | ".join(links)


def _node(kind: str, text: str, metadata: dict[str, Any]) -> NotebookNode:
    cell: dict[str, Any] = {"cell_type": kind, "metadata": metadata, "source": text}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return nbformat.from_dict(cell)


def _identity(cell: NotebookNode, number: str, kind: str, seen: dict[str, int]) -> str:
    """Hash what makes the cell itself; equal cells are counted, so that ids are unique."""
    mark = cell.metadata.get("distlab")
    key = f"{number}\n{kind}\n{cell.cell_type}\n{mark or cell.source}"
    seen[key] = seen.get(key, 0) + 1
    return hashlib.sha256(f"{key}\n{seen[key]}".encode()).hexdigest()[:16]
