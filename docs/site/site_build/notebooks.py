"""A lesson as a page: its committed outputs, alt texts, and widgets that play in place of pictures. Counts of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from string import Template
from typing import Any

from sphinx.application import Sphinx

from distlab.grading import lessons, load_lesson
from simulator.viz.builder.levels import levels_json

LINK = re.compile(r'href="([^":]*)\.ipynb"')
TITLE = re.compile(r"^# ", re.MULTILINE)


HOW_TO_RUN = """
This page shows the notebook as it ran once; what answers a prediction is closed until you commit to a number. To write
and check, open it on your machine: `make lessons`, then lesson {number}.
"""


def shown(output: dict[str, Any], cell: dict[str, Any], player: str) -> list[dict[str, Any]]:
    """Return what a page shows of one output of a cell; `player` is the widget's HTML, or ""."""
    data = output.get("data", {})
    text = "".join(data.get("text/plain", ""))
    if "image/png" in data:
        if player:
            return [{**output, "data": {"text/html": player}}]
        alt = output.get("metadata", {}).get("image/png", {}).get("alt") or text.split("\n")[0]
        cell["metadata"].setdefault("mystnb", {})["image"] = {"alt": alt}
        return [{**output, "data": {"image/png": data["image/png"]}}]
    if "text/html" in data:
        if player and '<p class="said"' in "".join(data["text/html"]):  # a picture's words, which its player says
            return []
        return [{**output, "data": {"text/html": LINK.sub(r'href="\1.html"', "".join(data["text/html"]))}}]
    return [output]


def prepared(source: str, players: dict[int, str]) -> str:
    """Return a notebook's JSON, ready to become a page; `players` has the HTML of a widget by the cell's place."""
    notebook = json.loads(source)
    for place, cell in enumerate(notebook["cells"]):
        if place and cell["cell_type"] == "markdown":  # a page has one title
            cell["source"] = TITLE.sub("## ", "".join(cell["source"]))
        if cell["metadata"].get("distlab") == {"links": "top"}:
            cell["source"] += "\n" + HOW_TO_RUN.format(number=notebook["metadata"]["distlab"]["lesson"])
        if cell["cell_type"] == "code":
            player = players.get(place, "")
            cell["outputs"] = [part for output in cell["outputs"] for part in shown(output, cell, player)]
    return json.dumps(notebook)


def counts(root: Path) -> dict[str, str]:
    """Return how much there is, for the front page, which names each by its $word."""
    courses = [load_lesson(number, root / "lessons") for number in lessons(root / "lessons")]
    hours = round(sum(lesson.minutes for lesson in courses) / 60)
    exercises = sum(len(lesson.exercises) for lesson in courses)
    found = {"lessons": len(courses), "hours": hours, "exercises": exercises, "levels": len(json.loads(levels_json()))}
    return {name: str(number) for name, number in found.items()}


def _read(app: Sphinx, docname: str, content: list[str]) -> None:
    if docname == app.config.root_doc:
        content[0] = Template(content[0]).substitute(counts(Path(app.srcdir)))
    if app.env.doc2path(docname).suffix == ".ipynb":
        content[0] = prepared(content[0], getattr(app, "distlab_players", {}).get(docname, {}))


def setup(app: Sphinx) -> dict[str, bool]:
    """Prepare notebooks before they are parsed."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
