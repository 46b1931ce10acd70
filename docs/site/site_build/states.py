"""Every state of a widget that a page can show: its controls set to each combination of some values, and what it shows.

A page has no kernel. So each control gets a few of its values, and a picture or a packed timeline is kept for each
combination.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from simulator.viz import Panel, Timeline, to_png
from simulator.viz.panels.schedules import ScheduleTimeline, moments_of, tell_moment

MOST_STATES, MOST_VALUES, COLOURS = 24, 8, 128
SENT = ("title", "note", "summary", "height", "rows", "total_height", "kinds", "ends", "limit_s", "packed", "headings")
SENT += ("until_s", "view")


class Choice(NamedTuple):
    """What a page offers of one control: the name, the words beside it, and its values with their labels."""

    name: str
    words: str
    slider: bool
    labels: list[str]
    values: list[Any]


def spread(values: Sequence[Any], count: int, keep: Any) -> list[Any]:
    """Return up to `count` of the values, evenly spread, `keep` among them."""
    if len(values) <= count:
        return list(values)
    places = {round(place * (len(values) - 1) / (count - 1)) for place in range(count)}
    kept = list(values).index(keep)
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


def choices_of(controls: Mapping[str, Any], wanted: Mapping[str, Sequence[Any]]) -> list[Choice]:
    """Return which controls a page offers: those `wanted`, else the first ones, up to MOST_STATES combinations."""
    found: list[Choice] = []
    room = MOST_STATES
    for name, control in controls.items():
        pairs, slider = values_of(control)
        if wanted:
            pairs = [pair for pair in pairs if pair[1] in wanted.get(name, ())]
            if len(pairs) < len(wanted.get(name, ())):
                raise ValueError(f"control {name} has no such values as {wanted[name]}; it has {values_of(control)[0]}")
        else:
            here = [pair for pair in pairs if pair[1] == control.value]
            pairs = spread(pairs, min(MOST_VALUES, room), here[0]) if here and room > 1 else []
        if len(pairs) > 1:
            room //= 1 if wanted else len(pairs)
            found.append(Choice(name, control.description, slider, *map(list, zip(*pairs, strict=True))))
    return found


def picture(png: bytes, path: Path) -> None:
    """Write a picture with COLOURS colours: a third of its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.open(io.BytesIO(png)).convert("RGB")
    image.quantize(COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, "PNG")


def timeline_state(timeline: Timeline) -> dict[str, Any]:
    """Return what the canvas of a timeline needs."""
    return {name: getattr(timeline, name) for name in SENT} | {"packet": base64.b64encode(timeline.packet).decode()}


def state_of(widget: Any, folder: Path, place: int) -> dict[str, Any]:
    """Return what the widget shows now; a picture goes to `folder`."""
    if isinstance(widget, Panel):
        picture(widget.png, folder / f"{place}.png")
        return {"picture": f"{place}.png", "title": widget._picture.title, "text": widget.text}
    if isinstance(widget, ScheduleTimeline):
        times = moments_of(max((run.trace for run in widget.runs), key=lambda trace: int(trace.end_ns.max())))
        told = [[at / 1e9, tell_moment(widget.runs, at / 1e9)] for at in times.tolist()[:-1]]
        return {"timeline": timeline_state(widget.timeline), "moments": told}
    return {"timeline": timeline_state(widget)}


def settings(choices: Sequence[Choice]) -> Iterator[tuple[Any, ...]]:
    """Yield every combination of values, the last control's changing fastest."""
    return itertools.product(*(choice.values for choice in choices))


def played(widget: Any, folder: Path, wanted: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return all that a page needs to play a widget: its controls and its states."""
    controls = getattr(widget, "controls", {})
    choices = choices_of({name: one for name, one in controls.items() if name != "moment"}, wanted)
    before = [choice.values.index(controls[choice.name].value) for choice in choices]
    if not isinstance(widget, Panel):
        picture(to_png(widget.figure) if isinstance(widget, Timeline) else widget.png, folder / "first.png")
    states = []
    for place, values in enumerate(settings(choices)):
        for choice, value in zip(choices, values, strict=True):
            controls[choice.name].value = value
        states.append(state_of(widget, folder, place))
    offered = [{"words": one.words, "slider": one.slider, "labels": one.labels} for one in choices]
    return {"controls": offered, "first": before, "states": states}
