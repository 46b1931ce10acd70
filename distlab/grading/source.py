"""Where an answer's functions come from: a module, a file or a notebook; read as text, executed by whoever asks.

Of a notebook only the functions that are asked for are executed, and what they need: helpers, imports and values of any
cell, whoever wrote it. Cells that train, draw or check are left out.
"""

from __future__ import annotations

import ast
import importlib
import json
import linecache
import os
import symtable
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

NAMESPACE = "distlab_submission"  # no module of this name exists, so functions made under it travel by value


@dataclass(frozen=True)
class Source:
    """Text to execute, in order.

    Attributes:
        kind: "module", "file" or "notebook".
        name: what the learner calls it: the dotted name or the path.
        pieces: name and text of each piece: of a notebook a cell each, of a file one, of a module none.
        directory: where a file's or a notebook's own imports are looked for.
        notes: what was left out, in a line each.
    """

    kind: str
    name: str
    pieces: tuple[tuple[str, str], ...] = ()
    directory: str = ""
    notes: tuple[str, ...] = ()


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
        raise ValueError(f"{impl} is a folder; pass a .py file or a notebook in it, such as {path / 'lesson.ipynb'}")
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
        except (SyntaxError, ValueError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise ValueError(f"{impl}{line}: {getattr(error, 'msg', error)}") from None
        return Source("file", impl, ((str(path.resolve()), text),), str(path.resolve().parent))
    pieces, notes = _notebook(impl, path, text)
    return Source("notebook", impl, pieces, str(path.resolve().parent), notes)


def _module(name: str) -> Source:
    """Find a module without importing it or its parents.

    Raises:
        ValueError: there is none.
    """
    where: list[str] | None = None
    parts = name.split(".")
    spec: ModuleSpec | None = None
    for depth in range(1, len(parts) + 1):
        if not parts[depth - 1].isidentifier():
            raise ValueError(
                f"{name!r} does not name a module; pass a module's name, or the path of a .py file or a notebook"
            )
        spec = PathFinder.find_spec(".".join(parts[:depth]), where)
        if spec is None:
            break
        where = list(spec.submodule_search_locations or ())
    if spec is None:
        raise ValueError(
            f"there is no module {name}; pass one that Python finds, or the path of a .py file or a notebook"
        )
    return Source("module", name)


def _notebook(impl: str, path: Path, text: str) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the code cells of a notebook that can be parsed, and a note on each that cannot."""
    reset = "; `distlab lesson reset NN` brings a fresh copy of a lesson and keeps yours aside"
    try:
        cells = json.loads(text)["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        texts = [source if isinstance(source := cell["source"], str) else "".join(source) for cell in code]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{impl} is not a notebook, or it is damaged ({reason}){reset}") from None
    pieces, notes = [], []
    for number, cell in enumerate(texts, start=1):
        plain = _without_magics(cell)
        try:
            ast.parse(plain)
        except SyntaxError as error:
            notes.append(f"code cell {number} of {impl} has a syntax error in its line {error.lineno}: {error.msg}")
            continue
        pieces.append((f"{path.name}, code cell {number}", plain))
    return tuple(pieces), tuple(notes)


def _without_magics(cell: str) -> str:
    """Take out what only a notebook understands, and keep the numbers of the lines."""
    if cell.lstrip().startswith("%%"):
        return ""
    try:
        ast.parse(cell)
    except SyntaxError:
        kept = ["" if _is_magic(line) else line for line in cell.splitlines()]
        return "\n".join(kept)
    return cell


def _is_magic(line: str) -> bool:
    bare = line.strip()
    return bare.startswith(("%", "!", "?")) or bare.endswith("?") or "= !" in bare or "= %" in bare


def execute(source: Source, wanted: Iterable[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Execute a source in a bare namespace; return the namespace and notes on what did not work.

    In a notebook's namespace are the names that its extension puts there. Whatever a module or file raises passes.

    Args:
        source: what to execute; a module or file is executed whole.
        wanted: names of the functions that a notebook is asked for.
    """
    if source.directory and source.directory not in sys.path:
        sys.path.insert(0, source.directory)
    if source.kind == "module":
        return vars(importlib.import_module(source.name)), source.notes
    namespace: dict[str, Any] = {"__name__": NAMESPACE}
    notes = list(source.notes)
    for name, text in source.pieces:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    trees = [(name, ast.parse(text, name)) for name, text in source.pieces]
    if source.kind == "file":
        for name, tree in trees:
            exec(compile(tree, name, "exec"), namespace)
        return namespace, tuple(notes)
    namespace |= names_for_functions()
    for name, statement in _needed([(name, statement) for name, tree in trees for statement in tree.body], wanted):
        try:
            exec(compile(ast.Module([statement], []), name, "exec"), namespace)
        except Exception as error:
            lines = ast.unparse(statement).splitlines()
            first = next((line for line in lines if line.startswith(("def ", "class "))), lines[0])
            notes.append(f"{name}: {first}: {type(error).__name__}: {error}")
    return namespace, tuple(notes)


def _needed(statements: Sequence[tuple[str, ast.stmt]], wanted: Iterable[str]) -> list[tuple[str, ast.stmt]]:
    """Return the statements, in order, that bind the wanted names or, again and again, the names that these use.

    `flat = check("03.flat", flat).function` is left out: it goes on with the reference where an answer is wrong.
    """
    names = [_names(statement) for _, statement in statements]
    goes_on = not any("check" in binds for binds, _ in names)
    needed, found = set(wanted), -1
    while len(needed) > found:
        found = len(needed)
        chosen = [binds is ANY or bool(binds & needed) for binds, _ in names]
        chosen = [one and not (goes_on and "check" in uses) for one, (_, uses) in zip(chosen, names, strict=True)]
        needed |= {name for one, (_, uses) in zip(chosen, names, strict=True) if one for name in uses}
    return [each for each, one in zip(statements, chosen, strict=True) if one]


ANY = frozenset("*")  # what a star import binds


def _names(statement: ast.stmt) -> tuple[frozenset[str], set[str]]:
    """Return the global names that a statement binds or changes, and those that it uses, also inside functions."""
    if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
        return ANY, set()
    table = symtable.symtable(ast.unparse(statement), "cell", "exec")
    binds = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported()}
    for node in ast.walk(statement) if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign) else ():
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            binds |= {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
    uses = {one.get_name() for one in table.get_symbols() if one.is_referenced()}
    scopes = table.get_children()
    while scopes:
        scope = scopes.pop()
        uses |= {one.get_name() for one in scope.get_symbols() if one.is_global()}
        scopes += scope.get_children()
    return frozenset(binds), uses


def names_for_functions() -> dict[str, Any]:
    """Return the names that `%load_ext distlab.notebook` gives a notebook and that functions may use."""
    import torch
    import torch.distributed as dist

    from distlab.comm import Ranks, recorded, run
    from distlab.grading.exercise import NotYet

    return {"NotYet": NotYet, "Ranks": Ranks, "dist": dist, "recorded": recorded, "run": run, "torch": torch}
