"""What every cell of a lesson must keep to; each complaint names the cell and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from nbformat import NotebookNode

MAX_LINES = 15
MAX_EXERCISE_LINES = 60
WIDGET = re.compile(r"(Panel|Timeline|\w+_panel)$")
FORBIDDEN = {
    r"^\s*[!]": "runs a shell command",
    r"^\s*%(pip|conda|mamba|uv)\b": "installs",
    r"\b(pip3?|conda|mamba|apt|apt-get|brew)\s+install\b": "installs",
    r"\b(wget|curl|urlretrieve|urlopen|requests|httpx|load_dataset|snapshot_download|hf_hub_download)\b": "downloads",
}


def complaints(notebook: NotebookNode) -> Iterator[str]:
    """Yield what is wrong with the cells, in their order."""
    for number, cell in enumerate(notebook.cells, 1):
        wrong = _code(cell) if cell.cell_type == "code" else _markdown(cell)
        yield from (f"cell {number} ({first_line(cell)}): {text}" for text in wrong)
    yield from _widgets_move(notebook)
    yield from _imports_first(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if not code or code[0].source.strip() != "%load_ext distlab.course.notebook":
        yield "the first code cell must be  %load_ext distlab.course.notebook"


def first_line(cell: NotebookNode) -> str:
    """Return the beginning of a cell, to find it by."""
    lines = [line for line in cell.source.splitlines() if line.strip()]
    return repr(lines[0][:60]) if lines else "empty"


def _code(cell: NotebookNode) -> Iterator[str]:
    exercise = "exercise" in cell.metadata.get("distlab", {})
    limit = MAX_EXERCISE_LINES if exercise else MAX_LINES
    lines = [line for line in cell.source.splitlines() if line.strip()]
    if len(lines) > limit:
        yield f"{len(lines)} lines; at most {limit}: one idea a cell"
    if not lines:
        yield "is empty"
    for pattern, what in FORBIDDEN.items():
        if found := re.search(pattern, cell.source, re.MULTILINE):
            yield f"{what} ({found.group().strip()}); lessons install nothing and download nothing"
    try:
        ast.parse(without_magics(cell.source))
    except SyntaxError as error:
        if "raises-exception" not in cell.metadata.get("tags", ()):
            yield f"does not parse: {error.msg}, line {error.lineno}"
    for output in cell.get("outputs", ()):
        yield from _output(cell, output)


def _output(cell: NotebookNode, output: NotebookNode) -> Iterator[str]:
    if output.output_type == "error" and "raises-exception" not in cell.metadata.get("tags", ()):
        yield f"ended with {output.ename}: {output.evalue.splitlines()[0] if output.evalue else ''}"
    if output.output_type == "stream" and output.name == "stderr":
        yield f"wrote to standard error: {output.text.strip()[:200]!r}"
    data = output.get("data", {})
    alternative = data.get("text/plain", "")
    if "image/png" in data and (not alternative.strip() or alternative.lstrip().startswith("<")):
        yield "a picture without words: show it with show(figure, text) or a Panel"
    if alternative.startswith("<") and " at 0x" in alternative and len(data) == 1:
        yield f"shows an object nobody can read: {alternative[:60]!r}"


def _markdown(cell: NotebookNode) -> Iterator[str]:
    if re.search(r"!\[\s*\]\(", cell.source):
        yield "an image without alt text: ![what it shows](...)"
    for image in re.findall(r"<img\b[^>]*>", cell.source, re.IGNORECASE):
        if not re.search(r"\balt\s*=\s*[\"'][^\"']", image, re.IGNORECASE):
            yield 'an image without alt text: <img alt="what it shows" ...>'


def _widgets_move(notebook: NotebookNode) -> Iterator[str]:
    """A widget is followed by a cell that moves it in code, for readers without a mouse and for tests."""
    waiting: tuple[int, NotebookNode] | None = None
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        if waiting is not None and not _moves(cell.source):
            yield f"cell {waiting[0]} ({first_line(waiting[1])}): the code cell after it must set its .value or .view"
        waiting = (number, cell) if _makes_widget(cell.source) else None
    if waiting is not None:
        yield f"cell {waiting[0]} ({first_line(waiting[1])}): a code cell after it must set its .value or .view"


def _imports_first(notebook: NotebookNode) -> Iterator[str]:
    """A cell needs no import of a later one. What an exercise's cell imports is the learner's, who may take it out."""
    bound: set[str] = set()
    early: list[tuple[int, NotebookNode, set[str]]] = []
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code" or "exercise" in cell.metadata.get("distlab", {}):
            continue
        nodes = list(ast.walk(_tree(cell.source)))
        imported = {
            (name.asname or name.name).partition(".")[0]
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        }
        for before, user, used in early:
            yield from (
                f"cell {before} ({first_line(user)}): uses {name}, which cell {number} imports: import it first"
                for name in sorted(used & imported)
            )
        names = [node for node in nodes if isinstance(node, ast.Name)]
        own = imported | {node.id for node in names if isinstance(node.ctx, ast.Store)}
        own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        early.append((number, cell, {node.id for node in names} - own - bound))
        bound |= own


def _tree(source: str) -> ast.Module:
    try:
        return ast.parse(without_magics(source))
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _makes_widget(source: str) -> bool:
    for statement in _tree(source).body:
        if isinstance(statement, ast.Assign | ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if WIDGET.search(name):
                return True
    return False


def _moves(source: str) -> bool:
    return any(
        isinstance(target, ast.Attribute) and target.attr in ("value", "view")
        for statement in _tree(source).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
    )


def without_magics(source: str) -> str:
    """Blank out lines of IPython's own, so that the rest parses as Python."""
    lines = source.splitlines()
    if lines and lines[0].startswith("%%") and not lines[0].startswith("%%ranks"):
        return ""
    return "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in lines)
