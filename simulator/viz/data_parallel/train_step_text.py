"""Say in words what `draw_train_step` shows of a data-parallel step at one moment."""

from __future__ import annotations

from distlab.trace import Trace
from simulator.units import counted, format_s, name_ranks, percent
from simulator.viz.data_parallel.step_read import read_step
from simulator.viz.data_parallel.step_state import (
    ABSENT,
    FILLING,
    MEAN,
    OWN,
    SENT,
    Held,
    RankStep,
    TrainStep,
    best_moment,
    held_at,
    passes,
)

MAX_RANKS = 8


def describe_train_step(trace: Trace, at_s: float | None = None) -> str:
    """Say in words what `draw_train_step` shows; arguments and errors as there."""
    step, own, moment = read_moment(trace, at_s)
    lines = [f"{takeaway(own, held_at(own, moment), moment)}. Step {format_s(step.duration_s)}, {shares(own)}."]
    lines += [f"{text}."] if (text := microbatches(own)) else []
    for each in step.ranks[:MAX_RANKS]:
        held = held_at(each, moment)
        counts = {state: sum(s == state for s, _ in held.gradients) for state in (MEAN, SENT, OWN, FILLING, ABSENT)}
        words = {MEAN: "averaged", SENT: "being averaged", OWN: "its own, ready", FILLING: "being made"}
        words[ABSENT] = "not there yet"
        parts = [f"{count} {words[state]}" for state, count in counts.items() if count]
        weights = "new weights" if held.updated else "old weights"
        count = len(held.gradients)
        of = f"gradients of {counted(count, 'all-reduce')}"
        gradients = f"{of}: {', '.join(parts)}" if parts else "no all-reduce"
        lines.append(f"rank {each.rank}: {held.doing}; {weights}, {percent(held.activations)} activations, {gradients}")
    if len(step.ranks) > MAX_RANKS:
        lines.append(f"and {len(step.ranks) - MAX_RANKS} more ranks")
    return "\n".join(lines)


def read_moment(trace: Trace, at_s: float | None) -> tuple[TrainStep, RankStep, float]:
    """Read a step, its first rank, and choose a moment in it; arguments as `draw_train_step`."""
    step = read_step(trace)
    moment = best_moment(step) if at_s is None else min(max(float(at_s), 0.0), step.duration_s)
    return step, step.ranks[0], moment


def microbatches(own: RankStep) -> str:
    """Say that gradients are accumulated, where they are."""
    count = len(passes(own.spans, "B"))
    return f"{count} micro-batches, only the last one's backward sends" if count > 1 else ""


def shares(own: RankStep) -> str:
    """Say how much of a rank's communication is hidden and how much exposed."""
    if not own.hidden_s + own.exposed_s:
        return "no communication"
    text = f"{format_s(own.hidden_s)} hidden, {format_s(own.exposed_s)} exposed"
    return f"{text} ({percent(own.exposed_share)})"


def takeaway(own: RankStep, held: Held, moment: float) -> str:
    """Return the title: what is being averaged now and what the rank does meanwhile."""
    sent = [r for r, (state, _) in zip(own.reductions, held.gradients, strict=True) if state == SENT]
    flying = [reduction for reduction in sent if moment < reduction.arrived_s]
    when = f"At {format_s(moment)}"
    if not sent:
        done = sum(state == MEAN for state, _ in held.gradients)
        now = {"step done": "the step is done"}.get(held.doing, f"rank {own.rank}: {held.doing}")
        return f"{when}: {now}, {done} of {len(held.gradients)} all-reduces done"
    if not flying:
        return f"{when}: {sent[0].name} has come; rank {own.rank}: {held.doing}"
    sent = flying
    what = sent[0].name if len(sent) == 1 else f"{sent[0].name} and {len(sent) - 1} more"
    late = sent[0].missing(moment)
    waits = held.doing.startswith(("waits", "step"))
    if late:
        others = f"{name_ranks(late)} {'has' if len(late) == 1 else 'have'} come"
        hidden = "exposed" if waits else f"hidden behind {held.doing.split()[0]}"
        return f"{when}: {what} cannot be averaged before {others}; {hidden}"
    if waits:
        return f"{when}: averaging {what} while rank {own.rank} waits, exposed"
    return f"{when}: averaging {what}, hidden behind rank {own.rank}'s {held.doing.split()[0]}"
