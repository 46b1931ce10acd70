"""Pipeline schedules: run on the simulator and drawn, alone or two on one time axis, or read from a trace.

A row is a rank, a numbered box a micro-batch. Where a textbook has a closed form of the bubble, the picture says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distlab.plan import SCHEDULES, ActionTimes, Schedule, make_schedule
from distlab.plan.require import chosen
from distlab.trace import Trace
from simulator.pipeline.schedule_arrays import LETTERS
from simulator.pipeline.simulate_schedule import PipelineRun, simulate_schedule
from simulator.units import capitalised, counted, format_s, percent
from simulator.viz.drawing import lanes
from simulator.viz.drawing.pen import Bundle, Picture
from simulator.viz.drawing.plot import spread_evenly
from simulator.viz.timeline import timeline
from simulator.viz.timeline.facts import facts_of

UNIT_S = 1e-3  # a time of 1 is a millisecond on screen


class ScheduleRun(NamedTuple):
    """One schedule and the times of its run.

    Attributes:
        name: what a reader calls it.
        schedule: the computations of each rank.
        trace: one span per action. Its name is one letter, so that a trace of 200,000 actions is quick to make.
        duration_s: from the first action to the last.
        rank_span_s: the longest that any rank takes from its own first action to its own last.
        bubble_fraction: idle time over total time.
        peak: the most that any rank holds, in micro-batches through all of its stages.
        speedup: the time of one rank that does everything alone, over the duration.
    """

    name: str
    schedule: Schedule
    trace: Trace
    duration_s: float
    rank_span_s: float
    bubble_fraction: float
    peak: float
    speedup: float

    @property
    def ends_apart(self) -> bool:
        """Whether ranks begin and end one after the other, each in less time than the whole."""
        return self.rank_span_s < 0.995 * self.duration_s

    @property
    def idle_of_span(self) -> float:
        """The idle share where steps follow each other as closely as the longest rank's span allows.

        Source: Qi et al. 2023 (arXiv:2401.10241), section 4.3: bubble rate (cost - m (F + B + W)) / cost.
        """
        work_s = self.speedup * self.duration_s / self.schedule.num_ranks
        return max(0.0, 1 - work_s / self.rank_span_s) if self.rank_span_s else 0.0


def run_schedule(name: str, schedule: Schedule, times: ActionTimes) -> ScheduleRun:
    """Run a schedule with times in milliseconds.

    Raises:
        ValueError: the schedule cannot run; the text says which rank waits for what.
    """
    run = simulate_schedule(schedule, times, unit_s=UNIT_S)
    trace = _lean(run)
    present = lanes.stages_of_ranks(trace.rank, trace.stage)
    copies = int(present.sum(axis=0).max(initial=1))  # of the model: a micro-batch goes through one of them
    num_stages = np.maximum(present.sum(axis=1) // copies, 1)
    peak = float((np.asarray(run.peak_in_flight)[: len(num_stages)] / num_stages).max())
    return ScheduleRun(name, schedule, trace, run.duration_s, run.steady_s, run.bubble_fraction, peak, run.speedup)


def _lean(run: PipelineRun) -> Trace:
    """Return the computations alone: no text per action, which would take longer than all the rest."""
    order, count = run.order, len(run.start_ns)
    kind = order.kind.astype(np.int32) + 1
    return Trace(
        rank=order.rank.astype(np.int32),
        lane=np.zeros(count, np.int32),
        name=kind,
        kind=kind,
        start_ns=run.start_ns,
        end_ns=run.end_ns,
        num_bytes=np.zeros(count, np.int64),
        stage=order.stage.astype(np.int32),
        microbatch=order.microbatch.astype(np.int32),
        words=("compute", *LETTERS),
    )


EQUAL = ActionTimes(1.0, 1.0, 1.0)
NAMES = tuple(SCHEDULES)


def play(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    stages_per_rank: int = 2,
    times: ActionTimes = EQUAL,
    memory_limit: float | None = None,
) -> ScheduleRun:
    """Plan and run a schedule; the times are of a rank's whole share of the model, cut evenly among its stages.

    Raises:
        ValueError: the name is not known, or there is no such schedule of this size.
    """
    chosen("schedule", name, NAMES)
    family = SCHEDULES[name]
    stages = family.stages_per_rank(stages_per_rank if family.placement == "loop" else None)
    forward, inputs, weights = (np.array(times[:3], float) / stages).tolist()
    times = ActionTimes(forward, inputs, weights, times.communication)
    plan = make_schedule(
        name, num_ranks, num_microbatches, stages_per_rank=stages, times=times, memory_limit=memory_limit
    )
    return run_schedule(family.title, plan, times)


HEADING = 1.0  # the room for a heading, in heights of a row


def draw_schedules(runs: Sequence[ScheduleRun]) -> Picture:
    """Draw schedules one under the other on one time axis; the title says what sets them apart.

    Raises:
        ValueError: there is no run.
    """
    return Picture(timeline.draw_scene(stack(runs), words_of(runs)), say_schedules(runs))


def show_schedules() -> None:
    """Let a Schedule show its picture when a notebook's cell ends with it: 1 ms a pass, and free communication.

    Its class stands in a package that needs numpy alone, so its method is set when `simulator.viz` is imported.
    """

    def show(schedule: Schedule, **_options: object) -> Bundle:
        runs = [run_schedule("this schedule (1 ms per F, I and W)", schedule, EQUAL)]
        return draw_schedules(runs)._repr_mimebundle_()

    Schedule._repr_mimebundle_ = show  # type: ignore[attr-defined]


def say_schedules(runs: Sequence[ScheduleRun]) -> str:
    """Say in plain sentences how schedules did: one sentence per schedule, then how the two compare."""
    text = " ".join(map(_sentence, runs))
    if len(runs) == 2:
        first, second = runs
        times = (first.duration_s, second.duration_s, "time"), (first.peak, second.peak, "memory for activations")
        more = []
        for one, other, what in times:
            change = other / one - 1 if one else 0.0
            far = f"{percent(abs(change), 1)} {'less' if change < 0 else 'more'} {what}"
            more.append(f"the same {what}" if abs(change) < 5e-4 else far)
        text += f" {capitalised(second.name)} takes {' and '.join(more)} than {first.name}."
    return text


def _sentence(run: ScheduleRun) -> str:
    """Say in one sentence how a schedule did."""
    plan = run.schedule
    size = f"{counted(plan.num_ranks, 'rank')} and {counted(plan.num_microbatches, 'micro-batch')}"
    if plan.num_stages > plan.num_ranks:
        size += f", {plan.num_stages // plan.num_ranks} stages per rank,"
    text = f"{capitalised(run.name)} on {size} takes {format_s(run.duration_s)}: ranks are idle for "
    text += f"{percent(run.bubble_fraction, 1)} of it, a rank holds {_held(run.peak)} at its peak, and it is "
    text += f"{run.speedup:.2f} times as fast as one rank alone."
    if run.ends_apart:
        text += f" But no rank takes longer than {format_s(run.rank_span_s)} from its own first action to its last: "
        text += "where a rank may start its next step before the others end theirs, "
        text += f"{percent(run.idle_of_span, 1)} is idle."
    return text


def _held(peak: float) -> str:
    """Write a peak in micro-batches through all of a rank's stages."""
    return f"{peak:.4g} micro-batch{'' if peak == 1 else 'es'} of activations"


def words_of(runs: Sequence[ScheduleRun]) -> timeline.Caption:
    """Return the takeaway, the note under it and the words at the ends."""
    first = runs[0]
    if len(runs) == 1:
        title = f"{capitalised(first.name)} leaves {percent(first.bubble_fraction, 1)} of "
        title += f"{counted(first.schedule.num_ranks, 'rank')}' time idle"
        ends = f"ends at {format_s(first.duration_s)}"
        if first.ends_apart:
            title += f", and {percent(first.idle_of_span, 1)} where steps need not end together"
            ends += f", no rank works longer than {format_s(first.rank_span_s)}"
        return timeline.Caption(title, "", ends)
    second = runs[1]
    change = second.duration_s / first.duration_s - 1
    title = f"{second.name} ends {percent(abs(change), 1)} {'earlier' if change < 0 else 'later'} than {first.name}"
    if abs(change) < 5e-4:
        title = f"{first.name} and {second.name} end together"
    held = [f"{run.peak:.4g}" for run in runs]
    title += f"; both hold {held[0]}" if held[0] == held[1] else f"; {second.name} holds {held[1]} instead of {held[0]}"
    title += " micro-batches" if held != ["1", "1"] else " micro-batch"
    ends = f"{first.name} {format_s(first.duration_s)}, {second.name} {format_s(second.duration_s)}"
    return timeline.Caption(capitalised(title), "", ends)


def stack(runs: Sequence[ScheduleRun]) -> lanes.Scene:
    """Place the ranks of one schedule under those of the other.

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("there is no schedule to draw; pass at least one run")
    rows: list[lanes.LaneRow] = []
    headings, row_of, top = [], [], 0.0
    for run in runs:
        num_ranks = run.schedule.num_ranks
        drawn = spread_evenly(num_ranks, lanes.MAX_RANKS[0])
        if len(runs) > 1:
            said = f"{run.name}: {percent(run.bubble_fraction, 1)} idle, {_held(run.peak)}"
            headings.append(lanes.Heading(top + HEADING / 2, said))
            top += HEADING
        place = np.full(num_ranks, -1, np.int64)
        place[drawn] = len(rows) + np.arange(len(drawn))
        gap = lanes.CLOSE_GAP if len(drawn) >= lanes.CLOSE_RANKS else lanes.RANK_GAP * 0.6
        for rank in drawn:
            rows.append(lanes.LaneRow(rank, "compute", False, top, 1.0, 1))
            top += 1.0 + gap
        row_of.append(place[run.trace.rank])
    levels = tuple(np.zeros_like(row) for row in row_of)
    sides = tuple(lanes.Side(lanes.shaded(run.trace), False) for run in runs)
    rest = (lanes.styles_of(sides), lanes.limit_of(sides), tuple(headings))
    return lanes.Scene(sides, tuple(rows), top, tuple(row_of), levels, *rest)


def draw_schedule(
    trace: Trace, predicted: Trace | None = None, *, time_range_s: tuple[float, float] | None = None
) -> Picture:
    """Draw the forward and backward boxes of a pipeline, with its bubble in the title.

    The bubble fraction is idle time over total time, from the first box to the last.

    Raises:
        ValueError: a trace has no compute span of kind F, B, I or W.
    """
    work = _pipeline(trace)
    facts, known = facts_of(work), ""
    if textbook := textbook_of(work):
        name, formula, share = textbook
        known = f"{capitalised(name)} with equal stages and free communication would leave {formula} = "
        known += percent(share, 1)
    ends, other = f"ends at {format_s(facts.duration_s)}", None if predicted is None else _pipeline(predicted)
    microbatches = len(np.unique(work.microbatch[work.microbatch >= 0]))
    bubble = percent(facts.bubble_fraction, 1)
    said = [
        f"Pipeline schedule of {counted(facts.num_ranks, 'rank')} and {counted(microbatches, 'micro-batch')} over "
        f"{format_s(facts.duration_s)}. The bubble is {bubble} of the ranks' time.",
        *([f"{known}."] if known else []),
    ]
    if other is not None:
        expected = facts_of(other)
        ends = timeline.ends_text(facts, expected)
        said.append(f"Predicted: {format_s(expected.duration_s)}, bubble {percent(expected.bubble_fraction, 1)}.")
    words = timeline.Caption(f"The bubble leaves {bubble} of {facts.num_ranks} ranks' time idle", known, ends)
    return Picture(timeline.draw_scene(lanes.scene_of(work, other), words, time_range_s), " ".join(said))


def _pipeline(trace: Trace) -> Trace:
    """Keep the forward and backward spans, with their clock at zero."""
    work = trace.select(trace.is_word("lane", "compute") & trace.is_word("kind", *LETTERS))
    if not len(work):
        raise ValueError(
            f"the trace has {len(trace)} spans but no compute span of kind F, B, I or W; simulate a pipeline"
        )
    return work.from_zero()


MAX_SPANS = 20_000


def textbook_of(trace: Trace) -> tuple[str, str, float] | None:
    """Return the name, the bubble's closed form and its value, of the textbook schedule whose order the trace follows.

    The bubble is over the total time, with p equal stages (v on each rank), m micro-batches and free communication.

    Source: bubbles of GPipe and 1F1B from Huang et al. 2019 (arXiv:1811.06965, section 2.3), of interleaved 1F1B from
        Narayanan et al. 2021 (arXiv:2104.04473, section 2.2.2), as shares of the total time, not of the ideal one.
    """
    order = order_in(trace)
    if order is None or order.num_ranks < 2:
        return None
    p, m, v = order.num_ranks, order.num_microbatches, order.num_stages // order.num_ranks
    looped = (p - 1) / (v * m + p - 1)
    forms = {"interleaved": ("(p-1)/(vm+p-1)", looped), "looped_bfs": ("(p-1)/(vm+p-1)", looped)} if m % p == 0 else {}
    if v == 1:
        flush = ("(p-1)/(m+p-1)", looped)
        forms = {"naive": ("(p-1)/p", (p - 1) / p), "gpipe": flush, "one_f_one_b": flush}
    for name, form in forms.items():
        if make_schedule(name, p, m, stages_per_rank=v) == order:
            return (SCHEDULES[name].title, *form)
    return None


def order_in(trace: Trace) -> Schedule | None:
    """Return the order in which a trace's ranks ran their passes, of replicas the first; None where there is none."""
    if not 0 < len(trace) <= MAX_SPANS or trace.stage.min() < 0 or trace.microbatch.min() < 0:
        return None
    stages = lanes.stages_of_ranks(trace.rank, trace.stage)
    if not (stages.sum(axis=1) == stages.sum(axis=1).max()).all() or stages.shape[1] % max(1, stages.sum(axis=1)[0]):
        return None
    first = [rank for rank in trace.ranks if not any((stages[rank] & stages[other]).any() for other in range(rank))]
    first.sort(key=lambda rank: int(np.argmax(stages[rank])))
    place = np.full(stages.shape[0], len(first))
    place[first] = np.arange(len(first))
    where = place[trace.rank]
    rows = np.lexsort((trace.start_ns, where))[: int((where < len(first)).sum())]
    codes = np.array([max(LETTERS.find(word), 0) for word in trace.words])
    return Schedule.from_columns(
        stage=trace.stage[rows],
        kind=codes[trace.kind[rows]],
        microbatch=trace.microbatch[rows],
        lengths=np.bincount(where[rows], minlength=len(first)),
    )
