"""A ScheduleBuilder: the schedule builder in a notebook, which also runs what stands in it on real ranks."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anywidget
import traitlets
from matplotlib.figure import Figure
from matplotlib.image import imread

from distlab.plan import Schedule, parse_schedule, validate
from simulator.viz.builder.levels import levels_json, times_of
from simulator.viz.drawing.pen import SHOWN_DPI, Bundle, Picture, with_picture
from simulator.viz.schedules import draw_schedules, run_schedule

HERE = Path(__file__)  # one script of four: each uses what those before it define
SCRIPTS = tuple(HERE.with_name(f"{name}.js") for name in ("engine", "known", "grid", "builder"))
MAX_RANKS, MAX_MICROBATCHES = 16, 64


def page_script() -> str:
    """Return a script for a page, which needs no import: it makes `distlabBuilder.render({element, data})`."""
    parts = ScheduleBuilder._esm.replace("export default {", "return {")
    return f"window.distlabBuilder ??= (() => {{\n{parts}}})();\n"


def lab_of_lesson_9(schedule: Schedule) -> Picture:
    """Train a small GPT by a schedule on real ranks, one for each of its own: measured over predicted.

    Raises:
        RuntimeError: the lab failed; the text is the first line of what it says.
    """
    with TemporaryDirectory() as folder:
        order, traces = Path(folder, "my_order.txt"), Path(folder, "traces")
        order.write_text(str(schedule), encoding="utf-8")
        flags = ["--ranks", str(schedule.num_ranks), "--layers", str(max(8, schedule.num_stages)), "--schedule"]
        command = [sys.executable, "-m", "distlab", "lab", "09", *flags, str(order), "--trace", str(traces)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not (picture := traces / "timeline.png").is_file():
            raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[0])
        pixels = imread(picture)
    figure = Figure(figsize=(pixels.shape[1] / SHOWN_DPI, pixels.shape[0] / SHOWN_DPI), dpi=SHOWN_DPI)
    figure.figimage(pixels)
    rows = re.findall(r"^your schedule: (.*?) {2,}(.*?) {2,}(\d.*)", done.stdout, re.MULTILINE)
    told = "; ".join(f"{what} measured {here}, predicted {wanted.strip()}" for what, here, wanted in rows)
    verdict = " ".join(re.findall("^(?:All|WRONG).*", done.stdout, re.MULTILINE))
    return Picture(figure, f"Ran on {schedule.num_ranks} real ranks: {told}. {verdict}")


class ScheduleBuilder(anywidget.AnyWidget):
    """A grid of ranks and time on which a schedule is built, by clicks, by keys or in code.

    Args:
        text: a schedule to begin with, whole or not; its size is the grid's.
        level: 1 to 12; None is an empty grid of any size.
        ranks: 1 to 16.
        microbatches: 1 to 64.
        on_ranks: runs a schedule on real ranks and draws what it measured; the default is the lab of lesson 9.

    Attributes:
        text: what stands in it, as `parse_schedule` reads it; set it to show a different schedule.
        times: lengths of F, I, W and of a message in ms, as the sliders stand.

    Raises:
        ValueError: no such level or size, or a text that is no schedule.
    """

    _esm = "\n".join(path.read_text("utf-8") for path in SCRIPTS)
    _css = HERE.with_name("builder.css")
    data = traitlets.Dict().tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)
    times = traitlets.Dict({"F": 1, "I": 1, "W": 1, "message": 0}).tag(sync=True)

    def __init__(
        self,
        text: str = "",
        *,
        level: int | None = None,
        ranks: int = 4,
        microbatches: int = 8,
        on_ranks: Callable[[Schedule], Picture] = lab_of_lesson_9,
    ) -> None:
        levels = json.loads(levels_json())
        limits = {"level": (level or 1, len(levels)), "ranks": (ranks, MAX_RANKS)}
        for name, (value, most) in (limits | {"microbatches": (microbatches, MAX_MICROBATCHES)}).items():
            if not 1 <= value <= most:
                raise ValueError(f"{name} is {value}; pass 1 to {most}")
        begin = {"ranks": ranks, "microbatches": microbatches} if level is None else level
        super().__init__(text=text, data={"levels": levels, "level": begin, "text": text})
        self._on_ranks = on_ranks
        self.on_msg(self._asked)

    @traitlets.validate("text")
    def _is_a_schedule(self, proposal: Any) -> str:
        """Refuse a text that cannot be read."""
        if proposal["value"]:
            parse_schedule(proposal["value"])
        return str(proposal["value"])

    @property
    def schedule(self) -> Schedule:
        """What stands in it; a ValueError says what it lacks."""
        schedule = parse_schedule(self.text)
        validate(schedule)
        return schedule

    @property
    def picture(self) -> Picture:
        """The finished schedule as a figure, with its words; a ValueError says what it lacks."""
        return draw_schedules([run_schedule("your schedule", self.schedule, times_of({"times": self.times}))])

    def run(self) -> Picture:
        """Run the finished schedule on real ranks; show and return what was measured over what was predicted.

        Raises:
            ValueError: the schedule is not finished, or cannot run.
            RuntimeError: the ranks failed; the text says why.
        """
        picture = self._on_ranks(self.schedule)
        png = base64.b64encode(picture.png()).decode()
        self.send({"said": picture.words, "title": picture.title, "picture": png})
        return picture

    def _asked(self, _widget: object, content: dict[str, str], _buffers: Sequence[bytes]) -> None:
        """Run what the page asks for; what goes wrong is told there in one line."""
        self.send({"began": "It runs on real ranks now: this takes some seconds."})
        try:
            self.text = content["run"]
            self.run()
        except (ValueError, RuntimeError) as error:
            self.send({"said": " ".join(str(error).split())})

    def _repr_mimebundle_(self, **_options: object) -> Bundle:
        """Return the widget, and the finished schedule's figure and words for readers without a kernel."""
        shown = super()._repr_mimebundle_()
        try:
            picture = self.picture
        except ValueError:
            level = self.data["level"] if isinstance(self.data["level"], int) else 0
            told = self.data["levels"][level - 1] if level else {"title": "your own", "says": self.text}
            which = f"level {level}: " if level else ""
            words = f"Schedule builder, {which}{told['title']}. {told['says']}"
            return with_picture(shown, b"", title="", words=words)
        return with_picture(shown, picture.png(), title=picture.title, words=picture.words)


schedule_builder = ScheduleBuilder
