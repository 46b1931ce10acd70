"""Draw who sent what to whom: a line per rank, an arrow per message, a bar where a rank waits.

Read from recorded calls is which message met which receive, in what order, and who waits for whom forever. Time is put
in steps of cause and effect: what a rank does next stands one step further right, and a message arrives at least one
step after it was sent. The picture then does not depend on how fast the ranks are.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from simulator.units import counted, format_bytes, format_s, name_ranks
from simulator.viz.drawing import theme
from simulator.viz.drawing.pen import Picture, put_legend
from simulator.viz.drawing.plot import axes_pixels, draw_scale, frame, new_figure, put_title

PAIRS = ("send", "recv")


class RecordedCall(Protocol):
    """One recorded call, as pictures read it; a `distlab.comm` Call has all of it.

    Attributes:
        rank: who made it.
        op: the operation, such as "send" or "all_reduce".
        peer: the rank at the other end, or the root, or -1.
        num_bytes: payload.
        number: its number among the calls of its channel.
        group: ranks of the group.
        channel: what calls share that can meet: their group, or their pair of ranks and tag.
        start_ns: when it was made.
        wait_ns: when the rank began to wait for it, or 0.
        end_ns: when it was known to be over, or 0.
        state: one of "issued", "waiting", "done" and "failed".
    """

    rank: int
    op: str
    peer: int
    num_bytes: int
    number: int
    group: tuple[int, ...]
    channel: int
    start_ns: int
    wait_ns: int
    end_ns: int
    state: str


class CallEvent(NamedTuple):
    """One call in the diagram: when it was made, when the rank began to wait for it, and its end or None; in steps."""

    call: RecordedCall
    start_x: float
    wait_x: float
    end_x: float | None


MAX_CALLS = 240


class Diagram(NamedTuple):
    """Calls on lines of ranks, and which of them meet.

    `ranks` are all that made a call, or were to take part in one; `events` stand in the order in which they were made.
    By their numbers there, `pairs` are a send and the receive that it met, and `meetings` the calls of one collective.
    `waits_for` has the ranks that each rank waits for which never went on. `duration_s` is from the first call to the
    last that is known, at `last_x`; `num_left_out` calls are not shown.
    """

    ranks: tuple[int, ...]
    events: tuple[CallEvent, ...]
    pairs: tuple[tuple[int, int], ...]
    meetings: tuple[tuple[int, ...], ...]
    waits_for: dict[int, tuple[int, ...]]
    duration_s: float
    last_x: float
    num_left_out: int

    def taken_x(self, place: int) -> float | None:
        """Return where the receive of a send was over; None: no rank took it."""
        return next((self.events[receive].end_x for send, receive in self.pairs if send == place), None)


def read_diagram(records: Iterable[RecordedCall]) -> Diagram:
    """Read the diagram of recorded calls.

    Where there are more than MAX_CALLS calls, it keeps the last ones if a rank hangs, else the first ones.

    Raises:
        ValueError: there are no calls.
    """
    calls = sorted(records, key=lambda call: call.start_ns)
    if not calls:
        raise ValueError("the records hold no call; run something that sends or receives, with record=True")
    stuck = any(_is_stuck(call) for call in calls)
    left_out = max(0, len(calls) - MAX_CALLS)
    calls = calls[left_out:] if stuck else calls[:MAX_CALLS]
    pairs, meetings = meet(calls)
    events = tuple(map(CallEvent._make, _steps(calls, pairs, meetings)))
    members = {rank for call in calls for rank in (call.rank, *call.group)}
    first = calls[0].start_ns
    last = max(max(call.start_ns, call.wait_ns, call.end_ns) for call in calls)
    last_x = max(x for event in events for x in event[1:] if x is not None)
    waits = _waits(events, meetings)
    return Diagram(tuple(sorted(members)), events, pairs, meetings, waits, (last - first) / 1e9, last_x, left_out)


def cycle_of(waits_for: dict[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return ranks of which each waits for the next, and the last for the first; nothing where there is no cycle."""
    for first in waits_for:
        path: list[int] = []
        rank = first
        while rank in waits_for and rank not in path:
            path.append(rank)
            rank = waits_for[rank][0]
        if rank in path:
            cycle = path[path.index(rank) :]
            low = cycle.index(min(cycle))
            return tuple(cycle[low:] + cycle[:low])
    return ()


def _is_stuck(call: RecordedCall) -> bool:
    return not call.end_ns and call.state in ("waiting", "failed") and call.wait_ns > 0


def meet(calls: Sequence[RecordedCall]) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]]:
    """Pair sends with receives in order, tag by tag, and collect the calls of each collective."""
    arrivals: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)
    meetings: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.op == "recv":
            channel = call.channel if call.peer >= 0 else 0  # from anyone: the record cannot say from which channel
            arrivals[call.peer, call.rank, channel].append(index)
        elif call.op != "send":
            meetings[call.channel, call.number].append(index)
    pairs = []
    for index, call in enumerate(calls):
        if call.op == "send":
            waiting = arrivals.get((call.rank, call.peer, call.channel)) or arrivals.get((-1, call.peer, 0))
            if waiting:
                pairs.append((index, waiting.popleft()))
    return tuple(pairs), tuple(tuple(met) for met in meetings.values())


Spot = tuple[float, float]


def _steps(
    calls: list[RecordedCall], pairs: tuple[tuple[int, int], ...], meetings: tuple[tuple[int, ...], ...]
) -> list[tuple[RecordedCall, float, float, float | None]]:
    """Number what happens: after what the rank did before, and after what made it possible."""
    causes: dict[int, list[int]] = {receive: [send] for send, receive in pairs}
    for met in meetings:
        for index in met:
            causes[index] = [other for other in met if other != index]
    moments = []
    for index, call in enumerate(calls):
        moments.append((call.start_ns, 0, index))
        if call.wait_ns and not 0 < call.end_ns < call.wait_ns:  # no rank stands still for what is over
            moments.append((max(call.wait_ns, call.start_ns), 1, index))
        if call.end_ns:
            moments.append((max(call.end_ns, call.start_ns), 2, index))
    start, wait, end = dict[int, int](), dict[int, int](), dict[int, int]()
    here, last = dict[int, int](), dict[int, tuple[int, int]]()
    for _, kind, index in sorted(moments):
        rank = calls[index].rank
        now = here.get(rank, -1)
        if kind == 1 and last.get(rank) == (0, index):  # waits at once: the call blocks
            wait[index] = start[index]
        elif kind == 2:
            reached = max([start[cause] for cause in causes.get(index, ()) if cause in start], default=-1)
            here[rank] = end[index] = max(now, reached) + 1
        else:
            here[rank] = (start if kind == 0 else wait)[index] = now + 1
        last[rank] = (kind, index)
    found = [(at, wait.get(index, end.get(index, at)), end.get(index)) for index, at in sorted(start.items())]
    return [(call, *times) for call, times in zip(calls, found, strict=True)]


def _waits(events: tuple[CallEvent, ...], meetings: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, ...]]:
    """Return whom each stuck rank waits for: the other end, or the members that have not come."""
    came = {index: {events[other].call.rank for other in met} for met in meetings for index in met}
    waits: dict[int, tuple[int, ...]] = {}
    for place, event in enumerate(events):
        call = event.call
        if _is_stuck(event.call) and call.op in PAIRS and call.peer >= 0:
            waits[call.rank] = (call.peer,)
        elif _is_stuck(event.call):
            missing = tuple(rank for rank in call.group if rank not in came.get(place, ()))
            waits[call.rank] = tuple(rank for rank in missing or call.group if rank != call.rank)
    return dict(sorted(waits.items()))


STUCK = "#D55E00"
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 1.2, 0.4, 1.0, 1.05
HALF = 0.15  # half of a bar's height, in rows
LABELLED = 24  # messages that still get their sizes written


def draw_message_diagram(records: Iterable[RecordedCall], *, title: str | None = None) -> Picture:
    """Draw recorded calls, one line per rank: an arrow from each send to its receive, and bars where ranks wait.

    Time runs to the right, in steps of cause and effect, so that the picture does not depend on how fast the ranks are.
    A rank that waits forever has an open bar that names whom it waits for; a message that no rank receives ends in a
    cross. Of more than 240 calls the last are drawn where a rank hangs, else the first.

    Args:
        records: `ranks.records()`, also after a run that hung; or any calls with the fields of a `RecordedCall`.
        title: replaces the takeaway, and begins the words.

    Raises:
        ValueError: there are no calls.
    """
    diagram = read_diagram(records)
    rows = {rank: row for row, rank in enumerate(diagram.ranks)}
    height = 0.85 * len(rows) + 0.35
    figure = new_figure(TOP_IN + height + BOTTOM_IN)
    axes = frame(figure, left=LEFT_IN, right=RIGHT_IN, top=TOP_IN, bottom=BOTTOM_IN, bare=True)
    span = max(diagram.last_x, 2.0)
    open_ended = bool(diagram.waits_for)
    edge = span * (1.42 if open_ended else 1.03)
    axes.set_xlim(-0.03 * span, edge)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    draw_scale(axes, "y", {row: f"rank {rank}" for rank, row in rows.items()}, line=False)
    for row in rows.values():
        axes.plot([0, edge], [row, row], color="#9A9A9A", linewidth=1.4, zorder=1)
    _draw_collectives(axes, diagram, rows)
    for event in diagram.events:
        _draw_wait(axes, diagram, event, rows[event.call.rank], edge)
    _draw_arrows(axes, diagram, rows, edge)
    to_the_right = "time runs to the right, in steps of cause and effect (not to scale)"
    draw_scale(axes, "x", {}, to_the_right, line=False, label_pt=theme.SMALL_PT)
    left_out = f"; {diagram.num_left_out} calls left out" if diagram.num_left_out else ""
    note = f"{format_s(diagram.duration_s)} from the first call to the last that is known{left_out}."
    takeaway = _deadlock_or_traffic(diagram)
    put_title(figure, title or takeaway, note)
    styles, words = theme.kind_styles([event.call.op for event in diagram.events]), {"send": "send: waits until taken"}
    words |= {"recv": "receive: waits until here"}
    boxes = [theme.LegendBox(s.colour, "white", s.letter, words.get(kind, s.words)) for kind, s in styles.items()]
    stuck = theme.LegendBox(theme.pale(STUCK, 0.25), STUCK, "", "waits forever")
    put_legend(figure, [*boxes, stuck] if diagram.waits_for else boxes)
    return Picture(figure, "\n".join([*([title] if title else []), f"{takeaway}.", *_say(diagram)]))


def _say(diagram: Diagram) -> list[str]:
    """Say each message or collective in a line, then who waits for whom; no times, which depend on the machine."""
    lines: list[str] = []
    met = {index: others for others in diagram.meetings for index in others}
    told: set[int] = set()
    for place, event in sorted(enumerate(diagram.events), key=lambda pair: (pair[1].start_x, pair[1].call.rank)):
        size = format_bytes(float(event.call.num_bytes))
        if event.call.op == "send":
            ending = " (not received)" if diagram.taken_x(place) is None else ""
            lines.append(f"rank {event.call.rank} -> rank {event.call.peer}: {size}{ending}")
        elif event.call.op not in PAIRS and place not in told:
            told.update(met[place])
            came = sorted(diagram.events[index].call.rank for index in met[place])
            lines.append(f"{event.call.op} of {name_ranks(came)}: {size}")
    for rank, others in diagram.waits_for.items():
        lines.append(f"rank {rank} waits for {name_ranks(others)}")
    if diagram.num_left_out:
        lines.append(f"{diagram.num_left_out} calls are left out")
    return lines


def _deadlock_or_traffic(diagram: Diagram) -> str:
    """Return the title: who waits for whom forever, or how many messages went between how many ranks."""
    cycle = cycle_of(diagram.waits_for)
    if len(cycle) > 1:
        links = [f"{rank} waits for {cycle[(place + 1) % len(cycle)]}" for place, rank in enumerate(cycle)]
        return f"Deadlock: rank {', '.join(links)}"
    if diagram.waits_for:
        rank, others = next(iter(diagram.waits_for.items()))
        more = f" (and {len(diagram.waits_for) - 1} more wait)" if len(diagram.waits_for) > 1 else ""
        return f"Rank {rank} waits for {name_ranks(others)}, forever{more}"
    sends = [event for event in diagram.events if event.call.op == "send"]
    total = format_bytes(float(sum(event.call.num_bytes for event in sends)))
    parts = [f"{counted(len(sends), 'message')} of {total} together"] if sends else []
    parts += [counted(len(diagram.meetings), "collective")] if diagram.meetings else []
    return f"{' and '.join(parts)} between {len(diagram.ranks)} ranks"


def _draw_wait(axes: Axes, diagram: Diagram, event: CallEvent, row: int, edge: float) -> None:
    """Draw the bar in which the rank waits for a call: to the call's end, or open to the right."""
    style = theme.kind_styles([event.call.op])[event.call.op]
    call = event.call
    end_x = edge if _is_stuck(call) else event.end_x
    wide = 0.0 if end_x is None else end_x - event.wait_x
    if wide <= 0:
        return
    look: dict[str, Any] = {"facecolor": style.colour, "edgecolor": "white"}
    if _is_stuck(call):
        look = {"facecolor": theme.pale(STUCK, 0.25), "edgecolor": STUCK, "hatch": "///", "linewidth": 0.0}
    axes.add_patch(Rectangle((event.wait_x, row - HALF), wide, 2 * HALF, zorder=2, **look))
    look = {"fontsize": theme.SMALL_PT}
    if _is_stuck(call):
        look |= {"bbox": {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": STUCK}, "color": theme.INK}
        words = f" {call.op.replace('_', '-')}: waits for {name_ranks(diagram.waits_for[call.rank])} "
        axes.text(edge, row, words, ha="right", va="center", zorder=6, **look)
    elif wide / (axes.get_xlim()[1] - axes.get_xlim()[0]) * (theme.WIDTH_IN - LEFT_IN - RIGHT_IN) > 0.2:
        look |= {"ha": "center", "va": "center_baseline", "color": theme.text_colour(style.colour)}
        axes.text(event.wait_x + wide / 2, row, style.letter, zorder=5, **look)


def _draw_arrows(axes: Axes, diagram: Diagram, rows: dict[int, int], edge: float) -> None:
    """Draw each message from its sender's line to its receiver's, or to a cross if no rank receives it."""
    sends = [
        (place, event)
        for place, event in enumerate(diagram.events)
        if event.call.op == "send" and event.call.peer in rows
    ]
    colour = theme.kind_styles(["send"])["send"].colour
    taken_spots: list[Spot] = []
    for place, event in sends:
        low, high = rows[event.call.rank], rows[event.call.peer]
        down, taken_x = 1 if high > low else -1, diagram.taken_x(place)
        start = (event.start_x, float(low))
        axes.scatter([event.start_x], [low], s=34, c=colour, zorder=4)
        if taken_x is not None:
            end = (taken_x, high - HALF * down)
            look: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 15, "linewidth": 1.8, "color": colour}
            axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, zorder=3, **look))
            if len(sends) <= LABELLED:
                _label_arrow(axes, start, end, format_bytes(float(event.call.num_bytes)), taken_spots)
        else:
            x = event.start_x + 0.03 * edge
            axes.plot([start[0], x], [low, low + 0.42 * down], color=STUCK, linewidth=1.8, linestyle="--", zorder=3)
            axes.scatter([x], [low + 0.42 * down], s=70, c=STUCK, marker="x", linewidths=2.2, zorder=4)


def _label_arrow(axes: Axes, start: Spot, end: Spot, words: str, taken: list[Spot]) -> None:
    """Write the size on the arrow, where no other size stands: first at a third of it, where fewer arrows cross."""
    wide, tall = (pixels / theme.DPI for pixels in axes_pixels(axes))
    x_in = wide / abs(axes.get_xlim()[1] - axes.get_xlim()[0])
    y_in = tall / abs(axes.get_ylim()[1] - axes.get_ylim()[0])

    def place(share: float) -> Spot:
        return start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])

    def crowd(share: float) -> int:
        x, y = place(share)
        return sum(abs(x - a) * x_in < 0.5 and abs(y - b) * y_in < 0.19 for a, b in taken)

    x, y = place(min((0.32, 0.6, 0.45, 0.75, 0.2), key=crowd))
    taken.append((x, y))
    clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.text(x, y, words, fontsize=theme.LEAST_PT, color=theme.INK, ha="center", va="center", zorder=4.5, bbox=clear)


def _draw_collectives(axes: Axes, diagram: Diagram, rows: dict[int, int]) -> None:
    """Tie the calls of one collective together with a line through their ends."""
    for met in diagram.meetings:
        events = [diagram.events[index] for index in met]
        if len(events) > 1 and all(event.end_x is not None for event in events):
            x, lines = max(event.start_x for event in events), [rows[event.call.rank] for event in events]
            look: dict[str, Any] = {"linewidth": 2.2, "zorder": 2, "linestyle": (0, (2, 1.5))}
            look["color"] = theme.kind_styles([events[0].call.op])[events[0].call.op].colour
            axes.plot([x, x], [min(lines), max(lines)], **look)
