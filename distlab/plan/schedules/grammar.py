"""The grammar of pipeline schedules: Action, Schedule, and their text.

An action is a stage, a kind and a micro-batch. It prints in the letters of torch.distributed.pipelining:

    2F0       stage 2 runs the forward pass of micro-batch 0
    2B0       ... its full backward pass
    1I3       ... the input-gradient part of the backward pass (the zero-bubble papers call this one B)
    0W5       ... the weight-gradient part; B is I and W in one
    1SEND_F1  stage 1 sends the output of its forward pass to stage 2;  2RECV_F1 receives it
    1SEND_B1  stage 1 sends the gradient of its input to stage 0;       0RECV_B1 receives it

A schedule is the list of actions that each rank runs, in order: one line per rank, with commas or blanks between the
actions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B")
F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B = range(len(KINDS))  # noqa: E741 - the field's own letter
GRAMMAR = "STAGE KIND MICROBATCH without blanks, such as 2F0; KIND is one of " + " ".join(KINDS)

_CODES = {kind: code for code, kind in enumerate(KINDS)}
_LIMIT = 2**31
_NUMBER = "0|[1-9][0-9]*"
_ACTION = re.compile(rf"({_NUMBER})({'|'.join(sorted(KINDS, key=len, reverse=True))})({_NUMBER})")
_CELL = re.compile(r"[^,\s]+")
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")  # torch's name for a forward and a backward that run interleaved
_PARAMETERS = re.compile(rf"(?:{_NUMBER})(?:UNSHARD|RESHARD|REDUCE_GRAD)(?:{_NUMBER})?")


class Action(NamedTuple):
    """One thing that a rank does in a pipeline step; `str` gives the grammar's text."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def parse_action(text: str) -> Action:
    """Parse one action; the exact inverse of `str`.

    Raises:
        ValueError: the text is not an action; the message says the grammar.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        meant = f"; did you mean {text.upper()}?" if _ACTION.fullmatch(text.upper()) else ""
        raise ValueError(f"{text!r} is not an action; write {GRAMMAR}{meant}")
    stage, kind, microbatch = match.groups()
    if max(len(stage), len(microbatch)) > 10 or max(int(stage), int(microbatch)) >= _LIMIT:
        raise ValueError(f"{text!r}: stages and micro-batches are numbered below 2**31; use a smaller number")
    return Action(int(stage), kind, int(microbatch))


class ActionTimes(NamedTuple):
    """Times of a pipeline's actions, in any one unit: each is one number, or one number per stage.

    The zero-bubble papers call `input_gradient` B. A full backward pass takes `input_gradient + weight_gradient`.

    Attributes:
        forward: of F.
        input_gradient: of I.
        weight_gradient: of W.
        communication: from the end of an action to the start of the one on a different rank that needs it.
    """

    forward: float | Sequence[float]
    input_gradient: float | Sequence[float]
    weight_gradient: float | Sequence[float]
    communication: float | Sequence[float] = 0.0


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """What every rank runs, in order, as columns: one row per action, the ranks one after the other.

    Build one with `from_actions`, `from_columns` or `parse_schedule`. Two schedules are equal when every rank runs the
    same actions in the same order.

    Attributes:
        stage: pipeline stage of each action.
        kind: code of each action's kind: KINDS[code] is its letters.
        microbatch: micro-batch of each action.
        offsets: rank r's rows are offsets[r] to offsets[r + 1].
    """

    stage: NDArray[np.int32]
    kind: NDArray[np.int8]
    microbatch: NDArray[np.int32]
    offsets: NDArray[np.int64]

    @classmethod
    def from_columns(
        cls, *, stage: object, kind: object, microbatch: object, lengths: Sequence[int] | NDArray[np.int64]
    ) -> Schedule:
        """Build a schedule from columns and the number of actions of each rank.

        Raises:
            ValueError: no rank, or columns of different lengths.
        """
        stage_column = np.ascontiguousarray(stage, np.int32).ravel()
        kind_column = np.ascontiguousarray(kind, np.int8).ravel()
        microbatch_column = np.ascontiguousarray(microbatch, np.int32).ravel()
        counts = np.asarray(lengths, np.int64)
        if counts.size == 0:
            raise ValueError("a schedule needs at least one rank; give each rank a list of actions")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        sizes = (stage_column.size, kind_column.size, microbatch_column.size, int(offsets[-1]))
        if len(set(sizes)) > 1 or (counts < 0).any():
            text = f"schedule columns stage, kind, microbatch have {sizes[:3]} rows; lengths add up to {sizes[3]}"
            raise ValueError(text)
        return cls(stage_column, kind_column, microbatch_column, offsets)

    @classmethod
    def from_actions(cls, ranks: Iterable[Iterable[Action]]) -> Schedule:
        """Build a schedule from a list of actions for each rank.

        Raises:
            ValueError: no rank, an unknown kind, or a number that is negative.
        """
        rows = [list(actions) for actions in ranks]
        for rank, actions in enumerate(rows):
            for step, (stage, kind, microbatch) in enumerate(actions):
                if kind not in _CODES or not (0 <= stage < _LIMIT and 0 <= microbatch < _LIMIT):
                    text = f"rank {rank}, step {step}: {(stage, kind, microbatch)} is not an action; use {GRAMMAR}"
                    raise ValueError(text)
        flat = [action for actions in rows for action in actions]
        return cls.from_columns(
            stage=[action[0] for action in flat],
            kind=[_CODES[action[1]] for action in flat],
            microbatch=[action[2] for action in flat],
            lengths=[len(actions) for actions in rows],
        )

    @property
    def num_ranks(self) -> int:
        """Ranks, those with nothing to do included."""
        return len(self.offsets) - 1

    @property
    def num_stages(self) -> int:
        """One more than the highest stage."""
        return int(self.stage.max()) + 1 if len(self) else 0

    @property
    def num_microbatches(self) -> int:
        """One more than the highest micro-batch."""
        return int(self.microbatch.max()) + 1 if len(self) else 0

    @property
    def home(self) -> NDArray[np.int64]:
        """Rank of each stage of a schedule that `validate` accepts; -1 for a stage that no rank runs."""
        home = np.full(self.num_stages, -1, np.int64)
        home[self.stage] = self.rank
        return home

    @property
    def rank(self) -> NDArray[np.int64]:
        """Rank of each row."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.offsets))

    @property
    def step(self) -> NDArray[np.int64]:
        """Place of each row in its rank's order, from 0."""
        return np.arange(len(self)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))

    @property
    def has_communication(self) -> bool:
        """Whether the schedule spells out its sends and receives."""
        return bool((self.kind >= SEND_F).any())

    def action(self, row: int) -> Action:
        """Read one row as an Action."""
        return Action(int(self.stage[row]), KINDS[self.kind[row]], int(self.microbatch[row]))

    def actions(self, rank: int) -> list[Action]:
        """List what a rank runs, in order.

        Raises:
            ValueError: no rank has this number.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is outside the schedule; it has ranks 0..{self.num_ranks - 1}")
        rows = slice(int(self.offsets[rank]), int(self.offsets[rank + 1]))
        kinds = [KINDS[code] for code in self.kind[rows].tolist()]
        return list(map(Action, self.stage[rows].tolist(), kinds, self.microbatch[rows].tolist()))

    def __len__(self) -> int:
        return len(self.stage)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("offsets", "stage", "kind", "microbatch"))
        return all(np.array_equal(mine, theirs) for mine, theirs in pairs)

    def __hash__(self) -> int:
        return hash((self.offsets.tobytes(), self.stage.tobytes(), self.kind.tobytes(), self.microbatch.tobytes()))

    def __str__(self) -> str:
        lines = (",".join(map(str, self.actions(rank))) for rank in range(self.num_ranks))
        return "\n".join(line or "," for line in lines)  # a lone comma: a rank with nothing to do

    def __repr__(self) -> str:
        return (
            f"Schedule({self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} micro-batches, "
            f"{len(self)} actions)"
        )


def parse_schedule(text: str) -> Schedule:
    """Parse a schedule, one line per rank; `parse_schedule(str(schedule)) == schedule`.

    Reads what torch.distributed.pipelining dumps as CSV too. Its empty cells are idle steps and are passed over, like
    lines that are blank; its UNSHARD, RESHARD and REDUCE_GRAD act on parameters, not on a micro-batch, and are left
    out; a pair `(0F1;3B0)OVERLAP_F_B` becomes its two actions. A line of commas alone is a rank with nothing to do.

    Raises:
        ValueError: some text is not an action; the message names line and column and says the grammar.
    """
    ranks = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        actions: list[Action] = []
        for cell in _CELL.finditer(line):
            if _PARAMETERS.fullmatch(cell.group()):
                continue
            overlap = _OVERLAP.fullmatch(cell.group())
            try:
                parts = overlap.group(1).split(";") if overlap else [cell.group()]
                actions.extend(map(parse_action, parts))
            except ValueError as error:
                raise ValueError(f"line {number}, column {cell.start() + 1}: {error}") from None
        ranks.append(actions)
    if not ranks:
        raise ValueError(f"the text holds no schedule; write one line per rank, each action {GRAMMAR}")
    return Schedule.from_actions(ranks)
