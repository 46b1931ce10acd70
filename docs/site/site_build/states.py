"""Every state of a widget that a page can show: its controls set to each combination of some values, and what it shows.

A page has no kernel. So each control gets a few of its values, and a picture or a packed timeline is kept for each
combination.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from simulator.viz import Panel, Timeline, to_png
from simulator.viz.panels.schedules import ScheduleTimeline, moments_of, tell_moment

MOST_STATES, MOST_VALUES, COLOURS = 24, 8, 128
SENT = ("title", "note", "summary", "height", "rows", "total_height", "kinds", "ends", "limit_s", "packed", "headings")
SENT += ("until_s", "view")


def spread(values: Sequence[Any], count: int, kept: int) -> list[Any]:
    """Return up to `count` of the values, evenly spread, that at the place `kept` among them."""
    if len(values) <= count:
        return list(values)
    places = {round(place * (len(values) - 1) / (count - 1)) for place in range(count)}
    nearest = min(places, key=lambda place: abs(place - kept))
    return [values[place] for place in sorted(places - {nearest} | {kept})]


def values_of(control: Any) -> tuple[list[tuple[str, Any]], bool]:
    """Return a control's labels with their values, and whether it is a slider; nothing for one without a range."""
    if hasattr(control, "options"):
        pairs = [one if isinstance(one, tuple) else (str(one), one) for one in control.options]
        return pairs, "Slider" in type(control).__name__
    if isinstance(control.value, bool):
        return [("no", False), ("yes", True)], False
    if not hasattr(control, "max"):
        return [], False
    steps = round((control.max - control.min) / control.step)
    values = {control.min + place * control.step for place in range(steps + 1)} | {control.value}
    form = "d" if isinstance(control.value, int) else control.readout_format
    return [(format(value, form), value) for value in sorted(values)], True


def choices_of(controls: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a page offers of the first controls, up to MOST_STATES combinations: words, labels and values."""
    found, room = dict[str, dict[str, Any]](), MOST_STATES
    for name, control in controls.items():
        pairs, slider = values_of(control)
        here = [place for place, (_, value) in enumerate(pairs) if value == control.value]
        pairs = spread(pairs, min(MOST_VALUES, room), here[0]) if here and room > 1 else []
        if len(pairs) > 1:
            room //= len(pairs)
            labels, values = map(list, zip(*pairs, strict=True))
            found[name] = {"words": control.description, "slider": slider, "labels": labels, "values": values}
    return found


def picture(png: bytes, path: Path) -> None:
    """Write a picture with COLOURS colours: a third of its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, "PNG")


def state_of(widget: Any, folder: Path, place: int) -> dict[str, Any]:
    """Return what the widget shows now; a picture goes to `folder`."""
    if isinstance(widget, Panel):
        picture(widget.png, folder / f"{place}.png")
        return {"picture": f"{place}.png", "title": widget._picture.title, "text": widget.text}
    timeline, told = widget, list[Any]()
    if isinstance(widget, ScheduleTimeline):
        times = moments_of(max((run.trace for run in widget.runs), key=lambda trace: int(trace.end_ns.max())))
        timeline, told = widget.timeline, [[at / 1e9, tell_moment(widget.runs, at / 1e9)] for at in times.tolist()[:-1]]
    packed = {"packet": base64.b64encode(timeline.packet).decode()}
    return {"timeline": {name: getattr(timeline, name) for name in SENT} | packed, "moments": told}


def played(widget: Any, folder: Path) -> dict[str, Any]:
    """Return all that a page needs to play a widget: its controls, its states, and which of them is the first."""
    controls = getattr(widget, "controls", {})
    choices = choices_of({name: one for name, one in controls.items() if name != "moment"})
    before = [choice["values"].index(controls[name].value) for name, choice in choices.items()]
    if not isinstance(widget, Panel):
        picture(to_png(widget.figure) if isinstance(widget, Timeline) else widget.png, folder / "first.png")
    states, first = list[dict[str, Any]](), 0
    for places in itertools.product(*(range(len(choice["values"])) for choice in choices.values())):
        for (name, choice), place in zip(choices.items(), places, strict=True):
            controls[name].value = choice["values"][place]
        first = len(states) if list(places) == before else first
        states.append(state_of(widget, folder, len(states)))
    for choice in choices.values():
        del choice["values"]
    return {"controls": [*choices.values()], "first": before, "states": states, "shown": states[first]}
