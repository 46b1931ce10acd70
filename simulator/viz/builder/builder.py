"""A ScheduleBuilder: the schedule builder in a notebook, which also runs what stands in it on real ranks."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import anywidget
import traitlets

from distlab.plan import Schedule, ScheduleError, parse_schedule, validate
from simulator.viz.builder.levels import levels_json, times_of
from simulator.viz.drawing.pen import Bundle, Picture, with_picture
from simulator.viz.schedules import draw_schedules, run_schedule

HERE = Path(__file__)  # one script of four: each uses what those before it define
SCRIPTS = tuple(HERE.with_name(f"{name}.js") for name in ("engine", "known", "grid", "builder"))
KINDS = ("FB", "FIW", "FBIW")
MAX_RANKS, MAX_MICROBATCHES, MAX_PER_RANK = 16, 64, 4


class LabPicture(NamedTuple):
    """The picture that a lab saved, with its title and its lines."""

    image: bytes
    title: str
    words: str

    def png(self) -> bytes:
        """Return the picture."""
        return self.image


OnRanks = Callable[[Schedule], Picture | LabPicture]


def lab_of_lesson_9(schedule: Schedule) -> LabPicture:
    """Train a small GPT by a schedule, on as many real ranks as it has, in processes of their own.

    Raises:
        RuntimeError: the lab failed; the text is its last line.
    """
    with TemporaryDirectory() as folder:
        order, traces = Path(folder, "my_order.txt"), Path(folder, "traces")
        order.write_text(str(schedule), encoding="utf-8")
        flags = ["--ranks", str(schedule.num_ranks), "--layers", str(max(8, schedule.num_stages))]
        flags += ["--schedule", str(order), "--trace", str(traces)]
        command = [sys.executable, "-m", "distlab", "lab", "09", *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not (picture := traces / "timeline.png").is_file():
            raise RuntimeError(f"lab 09: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
        lines = [" ".join(line.split()) for line in done.stdout.splitlines() if line.startswith("your schedule:")]
        return LabPicture(picture.read_bytes(), "measured over predicted", "; ".join(lines))


def page_script() -> str:
    """Return a script for a page, which needs no import: it makes `distlabBuilder.render({element, data})`."""
    parts = "\n".join(path.read_text("utf-8") for path in SCRIPTS).replace("export default {", "return {")
    return f"window.distlabBuilder ??= (() => {{\n{parts}}})();\n"


def schedule_builder(
    text: str = "",
    *,
    level: int | None = None,
    ranks: int = 4,
    microbatches: int = 8,
    stages_per_rank: int = 1,
    kinds: str = "FB",
    on_ranks: OnRanks | None = None,
) -> ScheduleBuilder:
    """Return a builder of schedules: of a level, of a text, or an empty grid of any size.

    Args:
        text: a schedule to begin with, whole or not; its size is the grid's.
        level: 1 to 12, in place of sizes.
        ranks: 1 to 16.
        microbatches: 1 to 64.
        stages_per_rank: 1 to 4, in a loop.
        kinds: what is placed: "FB", "FIW" (backward in two parts) or "FBIW".
        on_ranks: runs a schedule on real ranks and draws what it measured; None is the lab of lesson 9.

    Raises:
        ValueError: no such level or size, or a text that is no schedule.
    """
    count = len(json.loads(levels_json()))
    limits = {"ranks": (ranks, MAX_RANKS), "microbatches": (microbatches, MAX_MICROBATCHES)}
    limits["stages_per_rank"] = (stages_per_rank, MAX_PER_RANK)
    for name, (value, most) in limits.items():
        if not 1 <= value <= most:
            raise ValueError(f"{name} is {value}; pass 1 to {most}")
    if kinds not in KINDS or (level is not None and not 1 <= level <= count):
        raise ValueError(f"level is {level}, kinds is {kinds!r}; pass 1 to {count}, and one of {', '.join(KINDS)}")
    size = {"ranks": ranks, "microbatches": microbatches, "per": stages_per_rank, "kinds": kinds}
    return ScheduleBuilder(text, size if level is None else str(level), on_ranks or lab_of_lesson_9)


class ScheduleBuilder(anywidget.AnyWidget):
    """A grid of ranks and time on which a schedule is built, by clicks, by keys or in code.

    Attributes:
        text: what stands in it, as `parse_schedule` reads it; set it to show a different schedule.
        times: lengths of F, I, W and of a message in ms, as the sliders stand.

    Raises:
        ValueError: the text is no schedule.
    """

    _esm = "\n".join(path.read_text("utf-8") for path in SCRIPTS)
    _css = HERE.with_name("builder.css")
    data = traitlets.Dict().tag(sync=True)
    text = traitlets.Unicode().tag(sync=True)
    times = traitlets.Dict({"F": 1, "I": 1, "W": 1, "message": 0}).tag(sync=True)

    def __init__(self, text: str, level: str | dict[str, Any], on_ranks: OnRanks) -> None:
        super().__init__(text=text, data={"levels": json.loads(levels_json()), "level": level, "text": text})
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
        """What stands in it.

        Raises:
            ScheduleError: it is not finished, or cannot run.
        """
        schedule = parse_schedule(self.text or ",")
        validate(schedule)
        return schedule

    @property
    def picture(self) -> Picture:
        """The finished schedule as a figure, with its words.

        Raises:
            ScheduleError: it is not finished, or cannot run.
        """
        return draw_schedules([run_schedule("your schedule", self.schedule, times_of({"times": self.times}))])

    def run(self, on_ranks: OnRanks | None = None) -> Picture | LabPicture:
        """Run the finished schedule on real ranks; show and return what was measured over what was predicted.

        Args:
            on_ranks: as of `schedule_builder`; None is the builder's own.

        Raises:
            ScheduleError: the schedule is not finished, or cannot run.
            RuntimeError: the ranks failed; the text says why.
        """
        picture = (on_ranks or self._on_ranks)(self.schedule)
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
        except ScheduleError:
            return with_picture(shown, b"", title="", words=f"A schedule builder; so far it holds:\n{self.text}")
        return with_picture(shown, picture.png(), title=picture.title, words=picture.words)
