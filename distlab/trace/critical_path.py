"""The critical path: the chain of spans, and of waits between them, that decides when the last rank ends.

A span begins some time after the moments that it needs: ends of other spans, or moments in them. These are inferred
from what a trace records (docs/traces.md says how). From the last end, what was needed last is followed back.
What shorter spans would win is found by timing all of them anew: a path that was a little shorter may then decide.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from distlab.trace.span import RECEIVES, TOGETHER, Key, Span, key_of, noted_twice, number_calls

WAIT, FREE = "wait", "send"  # a kind; the lane of hand-overs that do not wait for one another
NEVER = -(2**63)
OWN = ("compute", WAIT)  # lanes of what a rank itself does, or waits for; all else runs beside it
WORDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients", "": "other", WAIT: "waiting"}
SHOWN, MOST = 3, 0.9  # kinds, or links of a chain, that are told; the part of a kind that makes it one rank's
Rows = dict[int, list[int]]  # of each rank


class Need(NamedTuple):
    """A moment in a row (-1: in none), and how long after it a span begins, in nanoseconds."""

    row: int
    at_ns: int
    later_ns: int


@dataclass(frozen=True)
class CriticalPath:
    """What decides how long a trace is.

    Attributes:
        spans: the path, first to last, without holes; a wait that no span records is called "idle", of kind "wait".
        rows: of each of them, its row in the trace; -1: none.
        work: of each row of the trace, its work alone: a call's begins when its last rank has come.
        needs: of each row, what its work needs.
        order: the rows, each after those that it needs.
    """

    spans: tuple[Span, ...]
    rows: tuple[int, ...]
    work: Sequence[Span]
    needs: Sequence[Sequence[Need]]
    order: Sequence[int]

    @classmethod
    def of(cls, trace: Sequence[Span]) -> CriticalPath:
        """Find the path; see `Trace.critical_path`."""
        return cls.through(*_inferred(trace))

    @classmethod
    def through(cls, work: Sequence[Span], needs: Sequence[Sequence[Need]], order: Sequence[int]) -> CriticalPath:
        """Find the path through work whose needs are known; see the attributes."""
        path: list[tuple[Span, int]] = []  # last to first
        row = max(order, key=lambda each: work[each].end_ns, default=-1)
        at, origin = work[row].end_ns if order else 0, min((work[each].start_ns for each in order), default=0)
        while row >= 0:
            path.append((work[row]._replace(end_ns=at), row))
            begin, rank, last = work[row].start_ns, work[row].rank, max(needs[row], key=_reached)
            path.append((Span(rank, "compute", "idle", WAIT, last.at_ns if last.row >= 0 else origin, begin), -1))
            row, at = last.row, last.at_ns
        path = [pair for pair in path[::-1] if pair[0].end_ns > pair[0].start_ns]
        return cls(tuple(span for span, _ in path), tuple(row for _, row in path), work, needs, order)

    @property
    def shares(self) -> dict[str, float]:
        """The share of each kind in the path, the largest first; they sum to 1."""
        total: dict[str, float] = defaultdict(float)
        for span in self.spans:
            total[span.kind] += span.duration_s
        return {kind: total[kind] / sum(total.values()) for kind in sorted(total, key=lambda kind: -total[kind])}

    @cached_property
    def gains_s(self) -> dict[str, float]:
        """The seconds that all would be shorter if spans of one kind took 10 % less; kinds off the path win nothing."""
        kinds = [kind for kind in self.shares if kind != WAIT]
        return {kind: self.gain_s(lambda span, kind=kind: 10 * (span.kind == kind)) for kind in kinds}  # type: ignore[misc]

    def gain_s(self, percent: Callable[[Span], float]) -> float:
        """Return the seconds that all would be shorter if spans took some percent less: each is timed anew."""
        rate = [100 - percent(span) for span in self.work]
        begin: list[float] = [0] * len(self.work)  # in hundredths of a nanosecond: exact, of whole percents

        def moment(row: int, at_ns: int) -> float:
            return begin[row] + rate[row] * (at_ns - self.work[row].start_ns) if row >= 0 else 100 * at_ns

        for row in self.order:
            begin[row] = max(moment(need.row, need.at_ns) + 100 * need.later_ns for need in self.needs[row])
        before = max((100 * self.work[row].end_ns for row in self.order), default=0)
        return (before - max((moment(row, self.work[row].end_ns) for row in self.order), default=0)) / 1e11

    def waits_for(self, rank: int, at_ns: int) -> str:
        """Say what an idle rank waits for, back to what goes on, or had ended, by then; "" where nothing tells."""
        mine = [row for row, one in enumerate(self.work) if one.rank == rank and one.lane in OWN and one.end_ns > at_ns]
        row, until, chain = min(mine, key=lambda each: self.work[each].end_ns, default=-1), at_ns + 1, list[Span]()
        while row >= 0:
            chain.append(self.work[row])
            if until <= at_ns or self.work[row].start_ns <= at_ns:
                break
            row, until, _ = max(self.needs[row], key=_reached)
        told = [f"{span.name} of rank {span.rank}" for span in chain[1:]]
        if row < 0 or not told or (len(told) == 1 and chain[-1].rank == rank and chain[-1].lane in OWN):
            return ""
        return f"{chain[0].name} waits for {told[0]}" + (f", and so for {told[-1]}" if len(told) > 1 else "")

    def __str__(self) -> str:
        parts, gains, whole_ns = [], [], sum(span.end_ns - span.start_ns for span in self.spans)
        for kind, share in list(self.shares.items())[:SHOWN]:
            own, name = Counter[int](), WORDS.get(kind, kind)
            for span in self.spans:
                own[span.rank] += (span.end_ns - span.start_ns) * (span.kind == kind and kind not in TOGETHER)
            ((rank, most_ns),) = own.most_common(1)
            parts.append(f"{name} {share * 100:.0f} %" + f" on rank {rank}" * (most_ns > MOST * share * whole_ns))
            gains += [f"{name} {self.gains_s.get(kind, 0.0) * 1e11 / whole_ns:.1f} %"] * (kind in self.gains_s)
        told = f"Critical path: {', '.join(parts) or 'no span takes any time'}."
        return told + f" With 10 % less of one kind all would be shorter: {', '.join(gains)}." * bool(gains)


def _reached(need: Need) -> int:
    return need.at_ns + need.later_ns


def _later(moments: Sequence[tuple[int, int]], begin_ns: int) -> list[Need]:
    """Return the needs of what begins after these moments; without any it begins when it does."""
    moments = moments or [(-1, begin_ns)]
    return [Need(row, at, begin_ns - max(at for _, at in moments)) for row, at in moments]


def _inferred(trace: Sequence[Span]) -> tuple[list[Span], list[list[Need]], list[int]]:
    found = _Inference(trace)
    order = sorted(found.needs, key=lambda row: (found.work[row].start_ns, found.work[row].end_ns))
    place = {row: number for number, row in enumerate(order)} | {-1: -1}
    for row, needs in found.needs.items():
        needs = [need for need in needs if place[need.row] < place[row]]
        found.needs[row] = needs or _later([], found.work[row].start_ns)
    return found.work, [found.needs.get(row, []) for row in range(len(trace))], order


class _Inference:
    def __init__(self, trace: Sequence[Span]) -> None:
        self.work, self.needs = list(trace), dict[int, list[Need]]()
        by_start = sorted(range(len(trace)), key=lambda row: (trace[row].start_ns, trace[row].end_ns))
        self.own, self.ended = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)  # of each rank
        self.by_key: dict[Key, Rows] = defaultdict(lambda: defaultdict(list))
        calls, twice = [], noted_twice(trace)
        for row in by_start:
            if key := key_of(trace[row]):
                self.by_key[key][trace[row].rank].append(row)
            if trace[row].lane in OWN:
                line = self.own[trace[row].rank]
                if not line or trace[line[-1]].kind != WAIT or trace[line[-1]].end_ns < trace[row].end_ns:
                    line.append(row)  # else a wait is noted twice: one lies in the other
            elif trace[row].lane != "step" and not twice[row]:
                calls.append(row)
        partners = self._partners(calls)
        before = self._find_work(calls, partners)
        for row in sorted(calls, key=lambda row: self.work[row].end_ns):
            self.ended[trace[row].rank].append(row)
        for line in self.own.values():
            for previous, row in zip([[], *([row] for row in line)], line, strict=False):
                self._link_own(row, previous)
        made = {row: self._made(row, trace[row].start_ns, before[row]) for row in calls}
        for row in calls:
            self.needs[row] = [need for each in partners[row] for need in made[each]]
            self.needs[row] += [Need(each, self.work[each].end_ns, 0) for each in before[row]]

    def _partners(self, calls: Sequence[int]) -> Rows:
        """Return for which calls each waits: itself; of a collective those of all ranks; of a receive its send."""
        spans, groups, found = self.work, defaultdict[int, list[int]](list), dict[int, list[int]]()
        numbers = number_calls([spans[row] for row in calls], [0] * len(calls))
        for row, number in zip(calls, numbers, strict=True):
            groups[number if number >= 0 else -1 - row].append(row)
        for row, group in ((row, each) for each in groups.values() for row in each):
            found[row] = group if spans[row].kind in TOGETHER else [row]
            if spans[row].kind in RECEIVES:
                sends = [each for each in group if each != row] or self._maker(row, spans[row].end_ns)
                in_time = bool(sends) and spans[row].start_ns <= spans[sends[0]].start_ns
                found[row] = sends + [row] * (not in_time)
        return found

    def _find_work(self, calls: Sequence[int], partners: Rows) -> Rows:
        """Let calls begin when the last rank came, and end as the first saw it; return what their lane ran before."""
        trace, before, last = [*self.work], dict[int, list[int]](), dict[tuple[int, str], int]()
        for row in calls:
            span, met, lane = trace[row], partners[row], (trace[row].rank, trace[row].lane)
            came, end = max([span.start_ns, *(trace[each].start_ns for each in met)]), span.end_ns
            if span.kind in TOGETHER:
                end = min(end, max(came, min(trace[each].end_ns for each in met)))
            free = lane not in last or span.lane == FREE or self.work[last[lane]].end_ns > end
            before[row] = [] if free else [last[lane]]
            begin = max([came, *(self.work[each].end_ns for each in before[row])])
            self.work[row] = span._replace(start_ns=min(begin, end), end_ns=end)
            last[lane] = row
        return before

    def _link_own(self, row: int, previous: Sequence[int]) -> None:
        span = self.work[row]
        known = (*previous, *self._maker(row, span.start_ns))
        moments = [(each, min(self.work[each].end_ns, span.start_ns)) for each in known]
        if span.kind == WAIT:
            ended = self._ended(span.rank, span.start_ns, span.end_ns)
            begin = max([span.start_ns, *(at for _, at in ended)])
            self.work[row] = span = span._replace(start_ns=begin)
        else:
            ended = self._ended(span.rank, max((at for _, at in moments), default=NEVER), span.start_ns)
        self.needs[row] = _later(moments + ended, span.start_ns)

    def _made(self, row: int, made_ns: int, before: Sequence[int]) -> list[Need]:
        """Return what a call's making needs: what ended just then; else what its rank did, and what ended meanwhile."""
        rank = self.work[row].rank
        sent = [] if self.work[row].kind in RECEIVES else self._maker(row, made_ns)
        moments = [(each, self.work[each].end_ns) for each in (*before, *sent) if self.work[each].end_ns <= made_ns]
        reached = max((at for _, at in moments), default=NEVER)
        line = self.own[rank]
        doing = bisect_left(line, made_ns, key=lambda each: self.work[each].start_ns) - 1
        if doing >= 0 and reached < (at := min(made_ns, self.work[line[doing]].end_ns)):
            moments.append((line[doing], at))
            reached = at
        return _later(moments + self._ended(rank, reached, made_ns), made_ns)

    def _ended(self, rank: int, after: int, until: int) -> list[tuple[int, int]]:
        """Return the calls of a rank whose work ended after one time, and not after the other, with their ends."""
        low, high = (bisect_right(self.ended[rank], at, key=lambda row: self.work[row].end_ns) for at in (after, until))
        return [(row, self.work[row].end_ns) for row in self.ended[rank][low:high]]

    def _maker(self, row: int, by_ns: int) -> list[int]:
        """Return what brings or makes the input of a pass or a message, in its replica: the last that had ended."""
        rank = self.work[row].rank
        if (key := key_of(self.work[row])) is None:
            return []
        for wanted in _inputs(key):
            if ranks := sorted(self.by_key.get(wanted, ())):
                place = min(sorted(self.by_key[key]).index(rank), len(ranks) - 1)
                rows = self.by_key[wanted][rank if rank in ranks else ranks[place]]
                if number := bisect_right(rows, by_ns, key=lambda each: self.work[each].end_ns):
                    return [rows[number - 1]]
        return []


def _inputs(key: Key) -> list[Key]:
    """Name what may bring or make the input of a pass or a message, the nearest first."""
    what, stage, letter, microbatch = key
    near = stage - 1 if letter == "F" else stage + 1
    if what == "SEND" or letter == "W":
        return [("", stage, letter.replace("W", "B"), microbatch)]
    makers = [("SEND", near, letter, microbatch), ("", near, letter, microbatch), ("", stage, "F", microbatch)]
    return makers[:1] if what == "RECV" else [("RECV", stage, letter, microbatch), *makers]
