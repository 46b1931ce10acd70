"""Draw where tokens go: which experts each asks, on which rank those are, and whom an expert's capacity turns away.

Tokens stand above, rank by rank, with the experts that they ask; a struck number is a choice that an expert had no room
for. Lines lead to the experts' places below: a thick one goes to a different rank. A token that no expert took is red;
its residual connection alone carries it on.

Every rank routes its own tokens. An expert takes from each rank at most that rank's capacity: all first choices come
before all second ones, and among equals the earlier token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.units import counted
from simulator.viz.drawing.pen import Pen, Picture, Point, sheet
from simulator.viz.drawing.theme import FAINT, IDLE, INK, RANK_COLOURS, SMALL_PT, TEXT_PT, WIDTH_IN, pale, text_colour

Ints = NDArray[np.int64]


class Routes(NamedTuple):
    """Choices of tokens, rank by rank.

    `experts` are what each token of a rank asks, the first choice first: one [T, K] per rank; `kept` says whether there
    was room, likewise. There are `num_experts` on all ranks, as many on each, in order; each has `capacity` places for
    each rank.
    """

    experts: tuple[Ints, ...]
    kept: tuple[NDArray[np.bool_], ...]
    num_experts: int
    capacity: int

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return len(self.experts)

    @property
    def asked(self) -> Ints:
        """How often each expert is asked [E]."""
        return np.bincount(np.concatenate([one.ravel() for one in self.experts]), minlength=self.num_experts)

    @property
    def rows(self) -> Ints:
        """Rows that each rank sends to each expert [n, E]."""
        both = zip(self.experts, self.kept, strict=True)
        return np.stack([np.bincount(one[kept], minlength=self.num_experts) for one, kept in both])

    @property
    def between(self) -> Ints:
        """Rows that each rank sends to each rank, itself included [n, n]."""
        return np.asarray(self.rows.reshape(self.num_ranks, self.num_ranks, -1).sum(axis=2), np.int64)

    def taken(self, expert: int, rank: int) -> list[int]:
        """Return the tokens of a rank that an expert takes, first choices first."""
        mine = ((self.experts[rank] == expert) & self.kept[rank]).T
        return [int(token) for token in np.nonzero(mine)[1]]


MAX_RANKS, MAX_EXPERTS, MAX_TOKENS = 8, 16, 48
TOP_IN, GAP_IN, HEAD_IN, FOOT_IN, LEFT_IN, TABLE_IN, CHOICE_IN = 1.05, 1.25, 0.35, 0.55, 0.75, 2.6, 0.21
DROPPED = "#B40000"


def routes_of(experts: Sequence[ArrayLike], kept: Sequence[ArrayLike], num_experts: int, capacity: int) -> Routes:
    """Return the choices as arrays; arguments as `draw_routing`.

    Raises:
        ValueError: the arrays are not [T, K] on each rank, with choices of experts that there are; ranks do not divide
            the experts; or more than 8 ranks, 16 experts or 48 tokens, which cannot be told apart.
    """
    asked = tuple(np.asarray(one, dtype=np.int64) for one in experts)
    masks = tuple(np.asarray(one, dtype=bool) for one in kept)
    shapes = [one.shape for one in asked]
    if [mask.shape for mask in masks] != shapes or any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(
            f"experts have shapes {shapes}; pass [tokens, choices] of each rank, and `kept` of these shapes"
        )
    if any(one.size and not 0 <= one.min() <= one.max() < num_experts for one in asked) or capacity < 0:
        raise ValueError(f"experts are {asked}, capacity {capacity}; expected 0 to {num_experts - 1}, and 0 or more")
    tokens, ranks = sum(map(len, asked)), len(asked)
    if not 1 <= ranks <= MAX_RANKS or num_experts % ranks or num_experts > MAX_EXPERTS or not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(
            f"{tokens} tokens, {num_experts} experts and {ranks} ranks cannot be drawn; pass 1 to {MAX_TOKENS} tokens "
            f"of a run, and at most {MAX_EXPERTS} experts, which at most {MAX_RANKS} ranks divide"
        )
    return Routes(asked, masks, num_experts, capacity)


def draw_routing(
    experts: Sequence[ArrayLike], *, num_experts: int, capacity: int, kept: Sequence[ArrayLike]
) -> Picture:
    """Draw tokens, the experts that they ask, and the rows that travel between ranks.

    Args:
        experts: numbers of the experts that each token of a rank asks, the first choice first: one [T, K] per rank.
        num_experts: E, of all ranks together; each holds as many, in order.
        capacity: places that an expert has for the tokens of each rank.
        kept: which choices the run kept, one [T, K] per rank.

    Raises:
        ValueError: as `routes_of`.
    """
    routes = routes_of(experts, kept, num_experts, capacity)
    slots = max(int(routes.rows.sum(axis=0).max(initial=1)), capacity * routes.num_ranks)
    slot = min(0.26, max(0.13, 2.6 / max(slots, 1)))
    low = TOP_IN + 0.56 + CHOICE_IN * routes.experts[0].shape[1] + GAP_IN
    height = low + HEAD_IN + max(slots * slot, 1.2) + FOOT_IN
    _, pen = sheet(height)
    spots = _draw_tokens(pen, routes, height - TOP_IN)
    _draw_experts(pen, routes, spots, height - low, slot)
    _draw_table(pen, routes, height - low)
    return pen.finish(*_say(routes))


def _say(routes: Routes) -> list[str]:
    """Say who is asked most, sizes and traffic, each rank's load, and the tokens that no expert took."""
    asked, rows, between = routes.asked, routes.rows.sum(axis=0), routes.between
    work, choices = between.sum(axis=0), routes.experts[0].shape[1]
    title = f"Expert {int(asked.argmax())} is asked {int(asked.max())} times where {asked.mean():.3g} is even"
    if int(asked.min()) == int(asked.max()):
        title = f"Every expert is asked {int(asked[0])} times"
    if dropped := sum(int((~kept).sum()) for kept in routes.kept):
        title += f"; {dropped} of {int(asked.sum())} choices are dropped"
    if work.max() > work.mean():
        title += f"; rank {int(work.argmax())} works {work.max() / work.mean():.2f}x the mean"
    note = f"{sum(map(len, routes.experts))} tokens, {counted(choices, 'choice')} each; an expert has "
    note += f"{counted(routes.capacity, 'place')} for each rank; {int(between.sum() - np.trace(between))} rows go to a "
    lines, lost = [title, f"{note}different rank, and back."], []
    per = routes.num_experts // routes.num_ranks
    for rank, kept in enumerate(routes.kept):
        held = range(rank * per, (rank + 1) * per)
        each = ", ".join(f"expert {expert} asked {asked[expert]} times, {rows[expert]} kept" for expert in held)
        other = work[rank] - between[rank, rank]
        lines.append(f"Rank {rank}: {each}; works on {work[rank]} rows, {other} of them from other ranks.")
        tokens = np.flatnonzero(~kept.any(axis=1)).tolist()
        names = f"token{'s' if len(tokens) > 1 else ''} {', '.join(map(str, tokens))}"
        lost += [f"Rank {rank}: no choice of {names} was kept."] if tokens else []
    return lines + lost


def _draw_tokens(pen: Pen, routes: Routes, top: float) -> list[list[Point]]:
    """Draw every rank's tokens, the experts that they ask under them; return where each token's lines begin."""
    tokens = sum(len(one) for one in routes.experts)
    wide = min(0.62, (WIDTH_IN - LEFT_IN - 0.2 - 0.16 * routes.num_ranks) / tokens)
    x, size, half = LEFT_IN + 0.1, min(SMALL_PT, 40 * wide), min(0.1, 0.45 * wide)
    pen.words((LEFT_IN - 0.02, top - 0.37), "token", colour=FAINT, side="right")
    pen.words((LEFT_IN - 0.02, top - 0.66), "asks", colour=FAINT, side="right")
    below = top - 0.56 - CHOICE_IN * routes.experts[0].shape[1]
    spots: list[list[Point]] = []
    for rank, (experts, kept) in enumerate(zip(routes.experts, routes.kept, strict=True)):
        name = f"rank {rank}" if wide * len(experts) > 0.6 else f"r{rank}"
        pen.words((x + wide * len(experts) / 2, top - 0.08), name, size=TEXT_PT, bold=True)
        for token, (asks, found) in enumerate(zip(experts.tolist(), kept.tolist(), strict=True)):
            left, lost = x + token * wide, not any(found)
            pen.box((left, top - 0.5), wide, 0.26, "white" if lost else RANK_COLOURS[rank])
            if lost:
                pen.outline((left + 0.02, top - 0.49), wide - 0.04, 0.24, DROPPED, line=1.6)
            ink = DROPPED if lost else text_colour(RANK_COLOURS[rank])
            pen.words((left + wide / 2, top - 0.37), str(token), size=size, colour=ink)
            for place, (expert, good) in enumerate(zip(asks, found, strict=True)):
                spot = (left + wide / 2, top - 0.66 - CHOICE_IN * place)
                pen.words(spot, str(expert), size=size, colour=INK if good else DROPPED)
                if not good:
                    pen.line((spot[0] - half, spot[1]), (spot[0] + half, spot[1]), DROPPED, line=0.9)
        spots.append([(x + (token + 0.5) * wide, below) for token in range(len(experts))])
        x += wide * len(experts) + 0.16
    return spots


def _draw_experts(pen: Pen, routes: Routes, spots: Sequence[Sequence[Point]], top: float, slot: float) -> None:
    """Draw every expert's places from the top down, filled rank by rank, with a line from each token."""
    per = routes.num_experts // routes.num_ranks
    room = WIDTH_IN - LEFT_IN - TABLE_IN - 0.2 - 0.2 * routes.num_ranks
    column = min(1.5, room / routes.num_experts)
    wide = 0.7 * column
    pen.words((LEFT_IN - 0.02, top - 0.13), "expert", colour=FAINT, side="right")
    for expert in range(routes.num_experts):
        home = expert // per
        x = LEFT_IN + 0.1 + expert * column + home * 0.2
        pen.block((x, top - 0.25), wide, 0.24, RANK_COLOURS[home], str(expert), size=TEXT_PT, bold=True)
        at = 0
        for rank in range(routes.num_ranks):
            rows, fill = routes.taken(expert, rank), RANK_COLOURS[rank]
            for place in range(max(routes.capacity, len(rows))):
                low = top - HEAD_IN - (at + 1) * slot
                if place < len(rows):
                    pen.block((x, low), wide, slot, fill, str(rows[place]), size=min(SMALL_PT, 45 * slot))
                    end, line = (x + wide / 2, top + 0.02), 2.0 if rank != home else 1.0
                    pen.line(spots[rank][rows[place]], end, pale(fill, 0.75), line=line)
                else:
                    pen.box((x, low), wide, slot, IDLE)
                at += 1
    for rank in range(routes.num_ranks):
        left = LEFT_IN + 0.1 + rank * (per * column + 0.2)
        name = f"held by rank {rank}" if per * column > 1.2 else f"rank {rank}"
        pen.words((left + (per * column - 0.3 * column) / 2, 0.3), name, bold=True)


def _draw_table(pen: Pen, routes: Routes, top: float) -> None:
    """Draw the all-to-all: rows that every rank sends to every rank."""
    count, between = routes.num_ranks, routes.between
    left = WIDTH_IN - TABLE_IN + 0.55
    cell = min(0.42, (TABLE_IN - 0.75) / count)
    pen.heading((left - 0.5, top - 0.02), "rows sent (all-to-all)")
    most = max(1, int(between.max()))
    for to in range(count):
        pen.words((left + (to + 0.5) * cell, top - 0.27), f"to {to}" if cell > 0.38 else str(to), colour=FAINT)
        below = top - 0.4 - count * cell - 0.15
        pen.words((left + (to + 0.5) * cell, below), str(int(between[:, to].sum())), bold=True)
    for rank in range(count):
        y = top - 0.4 - (rank + 1) * cell
        pen.words((left - 0.08, y + cell / 2), f"from {rank}", colour=FAINT, side="right")
        for to in range(count):
            fill = pale(RANK_COLOURS[rank], 0.15 + 0.85 * int(between[rank, to]) / most)
            rows, size = str(int(between[rank, to])), min(SMALL_PT, 34 * cell)
            pen.block((left + to * cell, y), cell, cell, fill, rows, size=size)
    pen.words((left - 0.08, top - 0.4 - count * cell - 0.15), "work", colour=FAINT, side="right")
