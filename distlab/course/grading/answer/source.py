"""Where an answer's functions come from: a module, a file or a notebook; read as text, executed by whoever asks.

Of a notebook only the functions that are asked for are executed, and the statements of any cell that they need:
imports, helpers and values. All other statements, such as those that train, draw or check, are left out.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import linecache
import os
import re
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from distlab.comm.command import runnable
from distlab.course.grading.answer.needed import UNREADABLE, needed_statements
from distlab.course.grading.progress import copy_in

_MAGIC = re.compile(r"^\s*[%!?]|\?\s*$|= [!%]")
NAMESPACE = "distlab_submission"  # no module of this name exists, so functions made under it travel by value


@dataclass(frozen=True)
class Source:
    """Text to execute, in order.

    Attributes:
        kind: "module", "file" or "notebook".
        name: what the learner calls it: the dotted name or the path.
        pieces: name and text of each piece: of a notebook a cell each, of a file one, of a module none.
        directory: where a file's or a notebook's own imports are looked for.
    """

    kind: str
    name: str
    pieces: tuple[tuple[str, str], ...] = ()
    directory: str = ""


def read_source(impl: str) -> Source:
    """Read what `impl` names, without executing any of it.

    Args:
        impl: a dotted module's name, or the path of a .py or .ipynb file.

    Raises:
        ValueError: there is no such thing, or it cannot be read; one line that says what to do.
    """
    path = Path(impl).expanduser()
    if path.suffix not in (".py", ".ipynb") and not path.exists() and os.sep not in impl:
        return _module(impl)
    if not path.exists():
        raise ValueError(f"there is no file {impl}; pass the path of a .py file or a notebook, or a module's name")
    if path.is_dir():
        such = copy_in(path.parent, path.name)
        raise ValueError(f"{impl} is a folder; pass a .py file or a notebook in it, such as {such}")
    if path.suffix not in (".py", ".ipynb"):
        raise ValueError(f"{impl} is neither a .py file nor a notebook (.ipynb)")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{impl} cannot be read: {error}") from None
    if not text.strip():
        raise ValueError(f"{impl} is empty")
    if path.suffix == ".py":
        try:
            ast.parse(text)
        except UNREADABLE as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            raise ValueError(f"{impl}{line}: {getattr(error, 'msg', error)}") from None
        return Source("file", impl, ((str(path.resolve()), text),), str(path.resolve().parent))
    pieces = _notebook(impl, path, text)
    for name, cell in pieces:
        _remember(name, cell)
    return Source("notebook", impl, pieces, str(path.resolve().parent))


def _remember(name: str, text: str) -> None:
    """Let tracebacks and messages show the lines of what is not a file."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def _module(name: str) -> Source:
    """Find a module without importing it or its parents."""
    where: list[str] | None = None
    parts = name.split(".")
    for depth, part in enumerate(parts, start=1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), where) if part.isidentifier() else None
        if spec is None:
            text = "pass one that Python finds, or the path of a .py file or a notebook"
            raise ValueError(f"there is no module {name}; {text}")
        where = list(spec.submodule_search_locations or ())
    return Source("module", name)


def _notebook(impl: str, path: Path, text: str) -> tuple[tuple[str, str], ...]:
    reset = f"; `{runnable('distlab lesson reset NN')}` brings a fresh copy of a lesson and keeps yours aside"
    try:
        cells = json.loads(text)["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        texts = [source if isinstance(source := cell["source"], str) else "".join(source) for cell in code]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{impl} is not a notebook, or it is damaged ({reason}){reset}") from None
    return tuple((f"{path.name}, code cell {n}", _without_magics(cell)) for n, cell in enumerate(texts, start=1))


def _without_magics(cell: str) -> str:
    """Take out what only a notebook understands, and keep the numbers of the lines."""
    first, _, body = cell.partition("\n")
    if first.startswith(("%%time", "%%capture")) and not first.startswith("%%timeit"):
        return _without_magics("\n" + body)  # their body is Python, and what it defines stays
    if cell.lstrip().startswith("%%"):
        return ""
    try:
        ast.parse(cell)
    except UNREADABLE:
        lines = [(line, len(line) - len(line.lstrip())) for line in cell.splitlines()]
        return "\n".join(line[:indent] + "pass" if _MAGIC.search(line) else line for line, indent in lines)
    return cell


def execute(source: Source, wanted: Iterable[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Execute a source in a bare namespace; return the namespace and a line on each needed statement that failed.

    In a notebook's namespace are the names that its extension puts there. Whatever a module or file raises passes.

    Args:
        source: what to execute; a module or file is executed whole.
        wanted: names of the functions that a notebook is asked for.
    """
    if source.directory and source.directory not in sys.path:
        sys.path.insert(0, source.directory)
    if source.kind == "module":
        return vars(importlib.import_module(source.name)), ()
    namespace: dict[str, Any] = {"__name__": NAMESPACE}
    for name, text in source.pieces:
        _remember(name, text)
        if source.kind == "file":
            exec(compile(text, name, "exec"), namespace)
    if source.kind == "file":
        return namespace, ()
    namespace |= names_for_functions()
    statements, notes = needed_statements(source.pieces, wanted, known=set(namespace) | set(dir(builtins)))
    for name, statement in statements:
        try:
            exec(compile(ast.Module([statement], []), name, "exec"), namespace)
        except Exception as error:
            inside = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == name]
            line = inside[0] if inside else statement.lineno
            words = linecache.getline(name, line or 0).strip()
            notes.append(f"{name}, line {line}: {words}: {type(error).__name__}: {error}")
    return namespace, tuple(notes)


def names_for_functions() -> dict[str, Any]:
    """Return the names that `%load_ext distlab.course.notebook` gives a notebook and that functions may use."""
    import torch
    import torch.distributed as dist

    from distlab.comm import Ranks, recorded, run
    from distlab.course.grading.exercise import NotYet

    return {"NotYet": NotYet, "Ranks": Ranks, "dist": dist, "recorded": recorded, "run": run, "torch": torch}
