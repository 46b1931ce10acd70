"""The project's docstrings as reStructuredText: Shapes, Cost, Error, Source and the others become a list of fields."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sphinx.application import Sphinx

FIELDS = "Shapes|Cost|Error|Memory|Source|Args|Attributes|Raises|Returns|Yields|Example"
FIELD = re.compile(rf"({FIELDS}): ?(.*)")
ITEM = re.compile(r"(\*{0,2}[\w., ]+): (.*)")
CODE = re.compile(r"(`[^`]*`)")
MARKS = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")  # what reStructuredText would read as mark-up
LISTED = ("Args", "Attributes", "Raises")


def escaped(line: str) -> str:
    """Return a line whose characters stand for themselves, but for `code`, which becomes ``code``."""
    parts = CODE.split(line.replace("``", "`"))
    for place in range(0, len(parts), 2):  # a letter right after code stands apart from it in the source alone
        apart = "\\ " if place and parts[place][:1].isalnum() else ""
        parts[place] = apart + MARKS.sub(r"\\\1", parts[place])
    return "".join(f"`{part}`" if part.startswith("`") else part for part in parts)


def converted(lines: list[str]) -> Iterator[str]:
    """Yield a docstring's lines as reStructuredText."""
    field, code = "", False
    for line in lines:
        found = FIELD.fullmatch(line)
        if not field and (code or line.startswith("    ")) and (line.startswith(" ") or not line):
            if not code:
                yield from ("::", "")  # indented lines are a program
            code = True
            yield line
            continue
        code = False
        if found:
            if not field:
                yield ""
            field = found[1]
            yield f":{field}: {escaped(found[2])}".rstrip()
        elif field and line.strip() and not line.startswith(" "):
            field = ""
            yield from ("", escaped(line))
        elif field in LISTED and (item := ITEM.fullmatch(line[4:])) and not line[4:].startswith(" "):
            yield from ("", f"    `{item[1]}`: {escaped(item[2])}")
        elif field:
            yield f"    {escaped(line.strip())}" if line.strip() else ""
        else:
            yield escaped(line)


def _convert(_app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    has_own = not lines or not lines[0].startswith("Alias for field number ")  # a NamedTuple's: Attributes say more
    lines[:] = [*converted(lines), ""] if has_own else []


def setup(app: Sphinx) -> dict[str, bool]:
    """Convert every docstring that autodoc reads."""
    app.connect("autodoc-process-docstring", _convert)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
