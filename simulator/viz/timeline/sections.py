"""Draw where the time of a step goes: one bar per rank, cut into its sections; a prediction right under it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulator.units import counted, format_s, percent
from simulator.viz.drawing import theme
from simulator.viz.drawing.pen import Pen, sheet
from simulator.viz.drawing.picture import Picture
from simulator.viz.drawing.plot import spread_evenly

Seconds = Mapping[int, Mapping[str, float]]
SECTION_STYLES = theme.styles("sections")
MAX_BARS = 16
LEFT_IN, RIGHT_IN, TOP_IN, LOW_IN, ROW_IN = 1.15, 1.15, 1.05, 0.85, 0.46


def draw_sections(measured: Seconds, predicted: Seconds | None = None, *, title: str | None = None) -> Picture:
    """Draw the sections of each rank's step as one bar, from the mean over steps.

    Args:
        measured: seconds by rank and section: "data", "forward", "backward", "sync", "optimizer", "other", "idle".
        predicted: the same of a prediction: the rank's own, or the only one.
        title: replaces the takeaway, and begins the words.

    Raises:
        ValueError: no rank has any time.
    """
    both = [*measured.values(), *(() if predicted is None else predicted.values())]
    longest = max((sum(row.values()) for row in both), default=0.0)
    if not measured or longest <= 0:
        raise ValueError("no rank has any time in a section; profile at least one step")
    ranks = [list(measured)[index] for index in spread_evenly(len(measured), MAX_BARS)]
    row = ROW_IN * (1 if predicted is None else 1.75)
    height = TOP_IN + row * len(ranks) + LOW_IN
    _, pen = sheet(height)
    scale = (theme.WIDTH_IN - LEFT_IN - RIGHT_IN) / longest
    for place, rank in enumerate(ranks):
        top = height - TOP_IN - row * place
        pen.words((LEFT_IN - 0.12, top - 0.5 * ROW_IN), f"rank {rank}", size=theme.TEXT_PT, bold=True, side="right")
        _draw_bar(pen, measured[rank], (LEFT_IN, top - 0.92 * ROW_IN), 0.84 * ROW_IN, scale, is_pale=False)
        if predicted is not None:
            pen.words((LEFT_IN - 0.12, top - 1.25 * ROW_IN), "predicted", colour=theme.FAINT, side="right")
            _draw_bar(pen, _of_rank(predicted, rank), (LEFT_IN, top - 1.55 * ROW_IN), 0.6 * ROW_IN, scale, is_pale=True)
    styles = [SECTION_STYLES[name] for name in _used(both)]
    pen.legend([theme.LegendBox(style.colour, "white", style.letter, style.words) for style in styles])
    shown = f"{len(ranks)} of {len(measured)} ranks; " if len(ranks) < len(measured) else ""
    takeaway = _takeaway(measured)
    picture = pen.finish(title or takeaway, f"{shown}mean over steps; a bar is one step of a rank")
    lines = [(f"{title}. " if title else "") + f"{takeaway}."]
    for rank, own in measured.items():
        lines.append(f"Rank {rank}: {_listed(own)}.")
        if predicted is not None:
            lines.append(f"Predicted for rank {rank}: {_listed(_of_rank(predicted, rank))}.")
    return picture._replace(words="\n".join(lines))


def _draw_bar(
    pen: Pen, row: Mapping[str, float], corner: tuple[float, float], tall: float, scale: float, *, is_pale: bool
) -> None:
    whole, pieces = sum(row.values()), []
    for name in _used([row]):
        style, share = SECTION_STYLES[name], percent(row[name] / whole)
        fill = theme.pale(style.colour) if is_pale else style.colour
        pieces.append((row[name] * scale, fill, (f"{name} {share}", share, style.letter)))
    x, y = pen.bar(corner, tall, pieces), corner[1]
    pen.words((x + 0.08, y + tall / 2), format_s(whole), side="left", colour=theme.FAINT)


def _takeaway(measured: Seconds) -> str:
    """Return the title: how long a step is, and how much of it is work."""
    whole_s = max(sum(row.values()) for row in measured.values())
    total = sum(sum(row.values()) for row in measured.values())
    share = {name: sum(row.get(name, 0.0) for row in measured.values()) / total for name in SECTION_STYLES}
    worked = share["forward"] + share["backward"] + share["optimizer"]
    lost = {name: share[name] for name in ("data", "sync", "other", "idle")}
    most = max(lost, key=lost.__getitem__)
    text = f"{counted(len(measured), 'rank')} work {percent(worked)} of a step of {format_s(whole_s)}"
    return text if lost[most] < 0.005 else f"{text}; most of the rest, {percent(lost[most])}, is {most}"


def _of_rank(predicted: Seconds, rank: int) -> Mapping[str, float]:
    return predicted[rank] if rank in predicted else next(iter(predicted.values()))


def _used(rows: Sequence[Mapping[str, float]]) -> list[str]:
    return [name for name in SECTION_STYLES if any(row.get(name, 0.0) > 0 for row in rows)]


def _listed(row: Mapping[str, float]) -> str:
    parts = [f"{name} {format_s(row[name])}" for name in _used([row])]
    return f"{format_s(sum(row.values()))}: {', '.join(parts)}"
