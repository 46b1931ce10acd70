"""Read a ring collective from what was recorded, and draw it step by step: who sends which chunk to whom.

The record knows senders, receivers, bytes and order. In each step a ring forwards what it received in the step before,
so a chunk can be followed from rank to rank; it is named after the rank that sends it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.units import format_bytes, format_s
from simulator.viz.collectives.messages import RecordedCall, meet
from simulator.viz.drawing import theme
from simulator.viz.drawing.pen import Pen, Picture, sheet

Message = tuple[RecordedCall, RecordedCall]  # a send, and the receive that took it


class RingSteps(NamedTuple):
    """A ring's record, step by step.

    `ranks` are in ring order: each sends to the next, the last to the first. `chunk` [steps, ranks] is what each rank
    sends, an index into ranks (who sends it first), and `num_bytes` [steps, ranks] how much. `span_s` [steps] is from
    the first send to the last receive of a step. `fault` says what is not as a ring does it, or is "".
    """

    ranks: tuple[int, ...]
    chunk: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    span_s: NDArray[np.float64]
    fault: str

    @property
    def parts(self) -> Masks:
        """Whose parts are in each chunk: [steps + 1, ranks, chunks, parts], before each step and after the last."""
        size = len(self.ranks)
        state = np.zeros((size, size, size), dtype=bool)
        state[np.arange(size), :, np.arange(size)] = True
        states = [state]
        for row in self.chunk:
            state = state.copy()
            for place, sent in enumerate(row.tolist()):
                state[(place + 1) % size, sent] |= states[-1][place, sent]
            states.append(state)
        return np.array(states)

    def copies(self, number: int) -> bool:
        """Tell whether receivers copy full sums in this step; while sums are partial they add."""
        places = np.arange(len(self.ranks))
        return bool(self.parts[number][places, self.chunk[number]].all())


def _messages_of(calls: Iterable[RecordedCall]) -> list[Message]:
    """Pair sends with their receives, in order of their starts; a send that nobody takes stands for both."""
    ends = sorted((call for call in calls if call.op in ("send", "recv")), key=lambda end: end.start_ns)
    taken = dict(meet(ends)[0])
    messages = [(end, ends[taken.get(place, place)]) for place, end in enumerate(ends) if end.op == "send"]
    for send, receive in messages:
        if receive.num_bytes != send.num_bytes:
            words = f"rank {send.rank} sends {send.num_bytes} bytes to rank {send.peer}, which receives"
            raise ValueError(f"{words} {receive.num_bytes}; pass the sends and receives of one call only")
    if not messages:
        raise ValueError("the record has no send; record an algorithm built on send and recv, with at least 2 ranks")
    return messages


def ring_steps(calls: Iterable[RecordedCall]) -> RingSteps:
    """Follow the chunks of one ring all-reduce through its 2(n-1) steps: each rank sends one message a step.

    Raises:
        ValueError: the messages are not of a ring: a rank sends to several, counts differ, or the steps do not fit.
    """
    ranks, sent = _ring_order(_messages_of(calls))
    size, num_steps = len(ranks), len(sent[0])
    if num_steps != 2 * (size - 1):
        raise ValueError(
            f"each rank sends {num_steps} messages; a ring of {size} ranks has {2 * (size - 1)} steps, of a message "
            "each: pass the calls of one all-reduce only"
        )
    num_bytes = np.array([[send.num_bytes for send, _ in own] for own in sent], dtype=np.int64).T
    starts = np.array([[send.start_ns for send, _ in own] for own in sent]).min(axis=0)
    ends = np.array([[max(taken.end_ns, send.start_ns) for send, taken in own] for own in sent]).max(axis=0)
    chunk = (np.arange(size)[None, :] - np.arange(num_steps)[:, None]) % size
    return RingSteps(ranks, chunk, num_bytes, (ends - starts) / 1e9, _fault(ranks, num_bytes))


def _ring_order(messages: Sequence[Message]) -> tuple[tuple[int, ...], list[list[Message]]]:
    """Return the ranks in ring order, from the lowest on, and each one's messages."""
    by_rank: dict[int, list[Message]] = {}
    for message in messages:
        by_rank.setdefault(message[0].rank, []).append(message)
    after = {}
    for rank, own in by_rank.items():
        receivers = sorted({send.peer for send, _ in own})
        if len(receivers) != 1:
            raise ValueError(f"rank {rank} sends to ranks {receivers}; in a ring each rank sends to one neighbour")
        after[rank] = receivers[0]
    ranks = [min(by_rank)]
    while after.get(ranks[-1], ranks[0]) not in ranks:
        ranks.append(after[ranks[-1]])
    counts = {rank: len(own) for rank, own in by_rank.items()}
    if len(ranks) != len(by_rank) or after.get(ranks[-1]) != ranks[0] or len(set(counts.values())) != 1:
        raise ValueError(
            f"the messages go {after} (sender: receiver), {counts} of them (sender: number); that is not one ring "
            "through all ranks: pass the calls of one collective only"
        )
    return tuple(ranks), [by_rank[rank] for rank in ranks]


def _fault(ranks: Sequence[int], num_bytes: NDArray[np.int64]) -> str:
    """Say where a rank does not send what its left neighbour sent one step earlier; "" where all do."""
    expected = np.roll(num_bytes, 1, axis=1)[:-1]
    wrong = np.argwhere(num_bytes[1:] != expected)
    if not len(wrong):
        return ""
    step, place = (int(at) for at in wrong[0])
    got, sent = format_bytes(float(expected[step, place])), format_bytes(float(num_bytes[step + 1, place]))
    return f"rank {ranks[place]} receives {got} in step {step + 1} and sends {sent} in step {step + 2}"


def chunk_name(index: int) -> str:
    """Return a chunk's letters: A to Z, then AA, AB, ..."""
    return chr(65 + index) if index < 26 else chunk_name(index // 26 - 1) + chunk_name(index % 26)


MAX_RANKS = 8
HEIGHT_IN, TOP_IN, BOTTOM_IN = 6.9, 0.95, 0.5
MIDDLE_IN = BOTTOM_IN + (HEIGHT_IN - TOP_IN - BOTTOM_IN) / 2 - 0.05
ARROW = "#0072B2"
Masks = NDArray[np.bool_]
Point = NDArray[np.float64]


class _Card(NamedTuple):
    """The size of a rank's card in inches: one column per chunk, in it a slot for each rank's part."""

    column: float
    slot: float
    size: int

    @property
    def extent(self) -> Point:
        return np.array([self.column * self.size, self.slot * self.size])


def draw_ring_frame(steps: RingSteps, step: int) -> Picture:
    """Draw step `step` of a recorded ring: arrows carry its messages, cards show the chunks once they have arrived.

    A card is a rank's tensor: one column per chunk, with a coloured slot for each rank whose part has been added. A
    chunk that has just arrived is framed; a chunk with every rank's part is the sum.

    Args:
        steps: what `ring_steps` read.
        step: 1 for the first; 0 is what every rank holds before it.

    Raises:
        ValueError: there is no such step, or more than 8 ranks.
    """
    if not 0 <= step <= len(steps.chunk) or len(steps.ranks) > MAX_RANKS:
        raise ValueError(
            f"step {step} of {len(steps.ranks)} ranks; this ring has steps 1 to {len(steps.chunk)}, and 0 for the "
            f"start; a frame shows at most {MAX_RANKS} ranks"
        )
    size = len(steps.ranks)
    _, pen = sheet(HEIGHT_IN)
    card = _Card(min(0.8, 2.1 / size), min(0.36, 1.5 / size), size)
    places = _places(size, card)
    for place, spot in enumerate(places):
        arrived = int(steps.chunk[step - 1][place - 1]) if step else -1
        _draw_card(pen, steps, steps.parts[step][place], spot, card, name=f"rank {steps.ranks[place]}", arrived=arrived)
    sends = _draw_arrows(pen, steps, step, places, card) if step else []
    _draw_middle(pen, steps, step)
    shown = steps.ranks if size <= 4 else (steps.ranks[0], steps.ranks[-1])
    boxes = [theme.LegendBox(_colour(rank), "white", str(rank), f"rank {rank}'s part") for rank in shown]
    boxes.append(theme.LegendBox(theme.IDLE, "white", "", "not in it yet"))
    pen.legend([*boxes, theme.LegendBox(theme.SHARED, "white", "", "the whole sum")])
    picture = pen.finish(*_say(steps, step))
    return picture._replace(words=f"{picture.words} {'; '.join(sends)}.") if sends else picture


def _say(steps: RingSteps, step: int) -> tuple[str, str]:
    """Say which step it is, what each rank sends in it and what the receiver does; and how far the ring is."""
    size, total = len(steps.ranks), len(steps.chunk)
    if steps.fault:
        title = f"Not a ring's chunks: {steps.fault}"
    elif not step:
        title = f"Before the first step: each of {size} ranks holds its own tensor, cut into {size} chunks"
    else:
        title = f"Step {step} of {total}: every rank sends {format_bytes(float(steps.num_bytes[step - 1].max()))}"
        adds, copies = ", and its neighbour adds its own part", " of finished sums, and its neighbour copies them"
        title += copies if steps.copies(step - 1) else adds
    whole = int(steps.parts[step].all(axis=2).sum(axis=1).min())
    sent, all_of = (format_bytes(float(part.sum(axis=0).max())) for part in (steps.num_bytes[:step], steps.num_bytes))
    took = f" This step took {format_s(float(steps.span_s[step - 1]))}." if step else ""
    return title, f"Sent so far: {sent} of {all_of} per rank. Chunks summed on every rank: {whole} of {size}.{took}"


def _colour(rank: int) -> str:
    return theme.RANK_COLOURS[rank % len(theme.RANK_COLOURS)]


def _places(size: int, card: _Card) -> Point:
    """Put the ranks clockwise in two rows, the first from the left above, the rest from the right below."""
    if size == 2:
        return np.array([[3.1, MIDDLE_IN], [theme.WIDTH_IN - 3.1, MIDDLE_IN]])
    above = -(-size // 2)
    reach = min(theme.WIDTH_IN / 2 - card.extent[0] / 2 - 0.45, 1.9 * above)
    up = (HEIGHT_IN - TOP_IN - BOTTOM_IN) / 2 - card.extent[1] / 2 - 0.34
    across = np.linspace(-reach, reach, above)
    below = across if size % 2 == 0 else (across[1:] + across[:-1]) / 2
    first = np.stack([theme.WIDTH_IN / 2 + across, np.full(above, MIDDLE_IN + up)], axis=1)
    second = np.stack([theme.WIDTH_IN / 2 + below, np.full(size - above, MIDDLE_IN - up)], axis=1)
    return np.concatenate([first, second[::-1]])


def _draw_arrows(pen: Pen, steps: RingSteps, step: int, places: Point, card: _Card) -> list[str]:
    """Draw an arrow to each neighbour, with the chunk's letter and the ranks whose parts it carries; say each."""
    size, sends = len(steps.ranks), []
    masks = steps.parts[step - 1]
    for place, chunk in enumerate(steps.chunk[step - 1].tolist()):
        start, end = places[place], places[(place + 1) % size]
        along = (end - start) / np.linalg.norm(end - start)
        first, last = _edge(start, along, card), _edge(end, -along, card)
        bend = 0.3 if size == 2 else 0.0
        lift = np.array([0.0, (0.25 if place == 0 else -0.25) if size == 2 else 0.0])
        pen.arrow(first + lift, last + lift, ARROW, bend=bend)
        aside = np.array([-along[1], along[0]]) * bend / 2 * np.linalg.norm(last - first)
        parts = [steps.ranks[part] for part in np.flatnonzero(masks[place, chunk])]
        _draw_parcel(pen, (first + last) / 2 + lift + aside, chunk, parts, size)
        whose = (
            f"part{'s' if len(parts) > 1 else ''} {'+'.join(map(str, parts))}" if len(parts) < size else "the whole sum"
        )
        receiver = steps.ranks[(place + 1) % size]
        sends.append(f"rank {steps.ranks[place]} sends {chunk_name(chunk)} ({whose}) to {receiver}")
    return sends


def _draw_parcel(pen: Pen, spot: Point, chunk: int, parts: list[int], size: int) -> None:
    """Draw what an arrow carries: the chunk's letter, and a slot in the colour of each rank whose part is in it."""
    whole = len(parts) == size
    slot = 0.2 if size <= 4 else 0.13 if size <= 6 else 0.07
    wide = 0.36 + (0.46 if whole else 0.04 + slot * len(parts)) + 0.08
    low = spot - np.array([wide / 2, 0.19])
    pen.box(low, wide, 0.38, "white", edge=ARROW, line=1.6)
    pen.words((low[0] + 0.21, spot[1]), chunk_name(chunk), size=theme.TEXT_PT + 1, bold=True)
    if whole:
        pen.words((low[0] + 0.6, spot[1]), "sum", colour=theme.SHARED, bold=True)
        return
    for index, part in enumerate(parts):
        x = low[0] + 0.4 + index * slot
        pen.block((x, low[1] + 0.06), slot, 0.26, _colour(part), str(part) if slot >= 0.13 else "", size=theme.LEAST_PT)


def _edge(centre: Point, direction: Point, card: _Card) -> Point:
    """Return where a ray from a card's middle leaves it, and a little further; its names stand around it."""
    half = card.extent / 2 + np.array([0.1, 0.36])
    reach = float((half / np.maximum(np.abs(direction), 1e-9)).min())
    return np.asarray(centre + direction * reach)


def _draw_card(pen: Pen, steps: RingSteps, masks: Masks, spot: Point, card: _Card, *, name: str, arrived: int) -> None:
    """Draw one rank's chunks: a column each, its slots filled with the parts that are in it."""
    size, low = card.size, spot - card.extent / 2
    for chunk in range(size):
        left = low[0] + chunk * card.column
        x = left + card.column / 2
        if masks[chunk].all():
            pen.box((left, low[1]), card.column, card.extent[1], theme.SHARED)
            words = "sum" if card.column >= 0.25 else ""
            pen.words((x, spot[1]), words, size=theme.SMALL_PT if card.column >= 0.4 else 8.5, colour="white")
        for part in range(0 if masks[chunk].all() else size):
            bottom = low[1] + (size - 1 - part) * card.slot
            rank, filled = steps.ranks[part], bool(masks[chunk, part])
            pen.box((left, bottom), card.column, card.slot, _colour(rank) if filled else theme.IDLE)
            if filled:
                points = theme.LEAST_PT if card.slot > 0.24 else 8.5
                pen.words((x, bottom + card.slot / 2), str(rank), size=points, colour=theme.text_colour(_colour(rank)))
        new = chunk == arrived
        pen.words((x, low[1] - 0.15), chunk_name(chunk), colour=theme.INK if new else theme.FAINT, bold=new)
        if new:
            pen.outline((left, low[1]), card.column, card.extent[1], ARROW)
    pen.words((spot[0], low[1] + card.extent[1] + 0.17), name, size=theme.TEXT_PT, bold=True)


def _draw_middle(pen: Pen, steps: RingSteps, step: int) -> None:
    """Write in the ring's middle which half it is, and draw one box per step with this one marked."""
    total = len(steps.chunk)
    half = "all-gather: hand round" if step and steps.copies(step - 1) else "reduce-scatter: add up"
    text = half if step else "the start"
    pen.words((theme.WIDTH_IN / 2, MIDDLE_IN + 0.24), text, size=theme.TEXT_PT, bold=True)
    wide = min(0.34, 3.4 / total)
    left = theme.WIDTH_IN / 2 - wide * total / 2
    for number in range(total):
        fill = ARROW if number + 1 == step else "#B9CBDD" if number + 1 < step else theme.IDLE
        pen.box((left + number * wide, MIDDLE_IN - 0.2), wide * 0.9, 0.26, fill, line=0)
        spot = (left + (number + 0.45) * wide, MIDDLE_IN - 0.07)
        pen.words(spot, str(number + 1), size=theme.LEAST_PT, colour=theme.text_colour(fill))
