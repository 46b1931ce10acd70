"""The widgets that play in the pages: which there are, their files, and the HTML that stands in a page for each.

A lesson's widget is found by itself: a cell whose picture is committed, and whose lines need no rank (`slices`). Which
values its controls get is chosen in players.toml, or by `states`. Widgets of no lesson have their code there.
"""

from __future__ import annotations

import html
import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from simulator.viz import Panel, Timeline
from simulator.viz.panels.schedules import ScheduleTimeline
from simulator.viz.timeline.timeline_widget import SCRIPTS

from .slices import shown_name, widget_source
from .states import played

TABLE = Path(__file__).parent.parent / "players.toml"


def found_in(lesson: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the place, the name and the source of each widget of a lesson that can play in a page."""
    cells = json.loads(lesson.read_text())["cells"]
    answers = json.loads(lesson.with_name("solution.ipynb").read_text())["cells"]  # functions with their bodies
    code = [("".join(cell["source"]), cell) for cell in answers if cell["cell_type"] == "code"]
    by_text = {text: place for place, (text, _) in enumerate(code)}
    for place, cell in enumerate(cells):
        text = "".join(cell["source"])
        pictures = any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
        if not pictures or text not in by_text:
            continue
        source, shown = widget_source([text for text, _ in code[: by_text[text] + 1]]), shown_name(text)
        if source:
            yield place, f"{lesson.parent.name}.{shown}", f"{source}\nwidget = {shown}"


def html_of(name: str, data: dict[str, Any], up: str) -> str:
    """Return a widget as it stands in a page; `up` leads from the page to the site's root."""
    state = data["states"][sum(at * step for at, step in zip(data["first"], steps_of(data), strict=True))]
    shown = state.get("timeline", state)
    title, text = shown["title"], shown.get("summary", state.get("text"))
    canvas = "timeline" in state
    scripts = [*(["timeline"] if canvas else []), name]
    style = f'<link rel="stylesheet" href="{up}players/timeline.css">' if canvas else ""
    picture = f"{up}players/{name}/{state.get('picture', 'first.png')}"
    return (
        f'{style}<div class="distlab-player" data-widget="{name}" data-root="{up}" role="group" '
        f'aria-label="{html.escape(title)}"><img src="{picture}" alt="{html.escape(title)}">'
        f'<p class="said">{html.escape(text)}</p></div>'
        + "".join(f'<script defer src="{up}players/{script}.js"></script>' for script in scripts)
    )


def steps_of(data: dict[str, Any]) -> list[int]:
    """Return by how many states each control moves."""
    counts = [len(control["labels"]) for control in data["controls"]]
    steps = [1]
    for count in reversed(counts[1:]):
        steps.insert(0, steps[0] * count)
    return steps[: len(counts)]


def make(folder: Path, name: str, source: str, wanted: dict[str, list[Any]]) -> dict[str, Any] | None:
    """Work out a widget's states, or read them where nothing has changed; None for what has no states."""
    kept, asked = folder / f"{name}.json", json.dumps([source, wanted, newest_source()])
    if kept.is_file() and (data := json.loads(kept.read_text()))["asked"] == asked:
        return data
    space: dict[str, Any] = {"__name__": name}
    exec(source, space)
    if not isinstance(space["widget"], Panel | ScheduleTimeline | Timeline):
        return None  # a picture without controls
    data = {"asked": asked} | played(space["widget"], folder / name, wanted)
    shown = {key: data[key] for key in ("controls", "first", "states")}
    script = f"(window.distlabWidgets ??= {{}})[{json.dumps(name)}] = {json.dumps(shown, separators=(',', ':'))};"
    (folder / f"{name}.js").write_text(f"{script}\nwindow.distlabPlay?.({json.dumps(name)});\n")
    kept.write_text(json.dumps(data))
    return data


def newest_source() -> float:
    """Return when the simulator, the plans or the code of this folder last changed."""
    root = Path(__file__).parents[3]
    parts = (root / "simulator", root / "distlab" / "plan", root / "distlab" / "trace", root / "docs" / "site")
    return max(path.stat().st_mtime for part in parts for path in part.rglob("*.py"))


def _make_all(app: Sphinx) -> None:
    """Work out every widget's states before pages are read."""
    table = tomllib.loads(TABLE.read_text())
    wanted, folder = table["values"], Path(app.outdir) / "players"
    folder.mkdir(parents=True, exist_ok=True)
    app.distlab_players = {}
    app.distlab_widgets = {
        name: make(folder, name, source, wanted.pop(name, {})) for name, source in table["widgets"].items()
    }
    for lesson in sorted(Path(app.srcdir).glob(app.config.lessons)):
        players = app.distlab_players[f"lessons/{lesson.parent.name}/lesson"] = {}
        for place, name, source in found_in(lesson):
            if data := make(folder, name, source, wanted.pop(name, {})):
                app.distlab_widgets[name] = data
                players[place] = html_of(name, data, "../../")
    if wanted:
        raise ValueError(f"players.toml has values of widgets that no lesson shows: {', '.join(wanted)}")
    canvas = "\n".join(path.read_text() for path in SCRIPTS)
    canvas = canvas.replace("export default {", "return {")
    shutil.copy(Path(app.srcdir) / "simulator/viz/timeline/timeline_widget.css", folder / "timeline.css")
    (folder / "timeline.js").write_text(f"window.distlabTimeline ??= (() => {{\n{canvas}}})();\n")


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
