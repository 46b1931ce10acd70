"""The page of sources: what docstrings name as theirs, and where the published tables come from."""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx

from .docstrings import escaped

SOURCE = re.compile(r"^Source: (.*(?:\n    .*)*)", re.MULTILINE)
HEAD = """Sources
=======

What the code follows, where it does so, and the tables that predictions are compared with. A docstring says where the
code differs from its source.

"""


def named(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what has a source in a file, and the source."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "Source: " in text else ():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            for found in SOURCE.findall(text):
                yield getattr(node, "name", ""), " ".join(found.split())


def section(title: str, rows: Iterator[tuple[str, str]]) -> str:
    """Return a list of places with their sources."""
    items = [f"{place}\n   {escaped(text)}\n" for place, text in rows]
    return "\n".join([title, "-" * len(title), "", *items])


def page(root: Path) -> str:
    """Return the page of all sources."""
    files = [path for part in ("distlab", "simulator") for path in sorted((root / part).rglob("*.py"))]
    code = (
        (f"`{name}` in ``{path.relative_to(root)}``" if name else f"``{path.relative_to(root)}``", text)
        for path in files
        for name, text in named(path)
    )
    tables = []
    for path in sorted((root / "simulator/validation/tables").glob("*.csv")):
        rows = csv.DictReader(path.open())
        tables.append(
            (f"``{path.name}``", "; ".join(dict.fromkeys(row["source"] for row in rows if row.get("source"))))
        )
    return HEAD + section("In the code", code) + "\n" + section("Published tables", iter(tables))


def _write(app: Sphinx) -> None:
    path, text = Path(app.srcdir) / "docs/api/sources.rst", page(Path(app.srcdir))
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the page before Sphinx looks for sources, after the pages of packages."""
    app.connect("builder-inited", _write, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
