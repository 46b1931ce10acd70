"""The widgets that play in the pages: which there are, their files, and the HTML that stands in a page for each.

Some are computed in the page (`computed`), also in the place of a lesson's widget. Others of a lesson are found: a cell
whose picture is committed, and whose lines need no rank (`slices`). Their states are worked out (`states`).
"""

from __future__ import annotations

import base64
import html
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from simulator.viz import Panel, Timeline
from simulator.viz.builder.builder import page_script
from simulator.viz.panels.schedules import ScheduleTimeline
from simulator.viz.timeline.timeline_widget import SCRIPTS

from . import computed
from .computed import VIZ
from .slices import shown_name, widget_source
from .states import played

STYLES = {"timeline": "timeline/timeline_widget.css", "building": "builder/builder.css"}


def found_in(lesson: Path) -> Iterator[tuple[int, str, str, dict[str, Any]]]:
    """Yield the place, the name, the source ("": it needs ranks) and the shown output of each widget of a lesson."""
    cells = json.loads(lesson.read_text())["cells"]
    answers = json.loads(lesson.with_name("solution.ipynb").read_text())["cells"]  # functions with their bodies
    code = ["".join(cell["source"]) for cell in answers if cell["cell_type"] == "code"]
    by_text = {text: place for place, text in enumerate(code)}
    for place, cell in enumerate(cells):
        text = "".join(cell["source"])
        outputs = [output for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
        if outputs and text in by_text and (shown := shown_name(text)):
            source = widget_source(code[: by_text[text] + 1])
            yield place, f"{lesson.parent.name}.{shown}", f"{source}\nwidget = {shown}" if source else "", outputs[-1]


def html_of(name: str, shown: dict[str, Any], up: str) -> str:
    """Return a widget as it stands in a page; `up` leads from the page to the site's root."""
    script = shown.get("script", "timeline" if "timeline" in shown else "")
    shown = shown.get("timeline", shown)
    title, text = html.escape(shown["title"]), html.escape(shown.get("summary", shown.get("text")))
    address, scripts = f"{up}players/{name}/{shown.get('picture', 'first.png')}", ("computed", script, name)
    return (
        (f'<link rel="stylesheet" href="{up}players/{script}.css">' if script in STYLES else "")
        + f'<div class="distlab-player" data-widget="{name}" data-root="{up}" role="group" aria-label="{title}">'
        + f'<img src="{address}" alt="{title}"><p class="said">{text}</p></div>'
        + "".join(f'<script defer src="{up}players/{script}.js"></script>' for script in scripts if script)
    )


def write(folder: Path, name: str, found: dict[str, Any]) -> None:
    """Write what the page's script gets of a widget."""
    script = f"(window.distlabWidgets ??= {{}})[{json.dumps(name)}] = {json.dumps(found, separators=(',', ':'))};"
    (folder / f"{name}.js").write_text(f"{script}\nwindow.distlabPlay?.({json.dumps(name)});\n")


def keep(folder: Path, name: str, found: dict[str, Any], png: bytes, **shown: str) -> dict[str, Any]:
    """Write what a computed widget is given, and a picture, which a page without JavaScript shows with its words."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "first.png").write_bytes(png)
    write(folder, name, found)
    return shown


def make(folder: Path, name: str, source: str) -> dict[str, Any] | None:
    """Work out a widget's states, and return the one that is shown first; None for what has no states."""
    space: dict[str, Any] = {"__name__": name}
    exec(source, space)
    if not isinstance(space["widget"], Panel | ScheduleTimeline | Timeline):
        return None  # a picture without controls
    found = played(space["widget"], folder / name)
    shown: dict[str, Any] = found.pop("shown")
    write(folder, name, found)
    return shown


def _make_all(app: Sphinx) -> None:
    """Work out every widget's states before pages are read."""
    folder, chosen = Path(app.outdir) / "players", set(Path(app.srcdir).glob(app.config.lessons))
    folder.mkdir(parents=True, exist_ok=True)
    canvas = "\n".join(path.read_text() for path in SCRIPTS).replace("export default {", "return {")
    (folder / "timeline.js").write_text(f"window.distlabTimeline ??= (() => {{\n{canvas}}})();\n")
    (folder / "computed.js").write_text(computed.script())
    (folder / "building.js").write_text(page_script())
    for name, style in STYLES.items():
        shutil.copy(VIZ / style, folder / f"{name}.css")
    app.distlab_players, shown = {}, dict[str, dict[str, Any]]()
    app.distlab_widgets = shown
    for name, data, picture in computed.with_pictures():
        look = {"title": picture.title, "text": picture.words, "script": "building" if "levels" in data else ""}
        shown[name] = keep(folder, name, data, picture.png(), **look)
    for lesson in sorted(Path(app.srcdir).glob("lessons/[0-9]*/lesson.ipynb")):
        players = app.distlab_players[f"lessons/{lesson.parent.name}/lesson"] = dict[int, str]()
        for place, name, source, output in found_in(lesson):
            if (known := computed.STANDS_FOR.get(name)) is not None:
                png, text = (output["data"][kind] for kind in ("image/png", "text/plain"))
                look = {"title": output["metadata"]["image/png"]["alt"], "text": "".join(text)}
                shown[known] = keep(folder, known, computed.widget(known), base64.b64decode(png), **look)
                players[place] = html_of(known, shown[known], "../../")
            elif source and lesson in chosen and (state := make(folder, name, source)):
                players[place] = html_of(name, state, "../../")


class Player(SphinxDirective):
    """A widget in a page: ```{player} NAME```."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the widget's HTML."""
        name, widgets = self.arguments[0], self.env.app.distlab_widgets
        if name not in widgets:
            raise self.error(f"there is no widget {name}; there are {', '.join(widgets)}")
        return [nodes.raw("", html_of(name, widgets[name], "../" * self.env.docname.count("/")), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Make the widgets before pages are read, and let pages show them."""
    app.connect("builder-inited", _make_all)
    app.add_config_value("lessons", "", "env", str)
    app.add_directive("player", Player)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
