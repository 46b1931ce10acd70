"""A finding: what makes steps slow, in words, with its cost; and a profile in words, with what was found.

First come ranks that hold the others up: a straggler, uneven work, a slow loader. A rank is compared with the lower
median of all ranks: that stays a healthy rank while at most half of them are slow. Then comes what ranks wait for that
they need not: communication that nothing hides, calls that are too small, the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from distlab.comm.agree import ranks_in_words
from distlab.profile.profile import Floats, Profile
from distlab.profile.sections import HOST, SECTIONS, WAIT_FOR_HOST, Ints

SHOWN_RANKS = 16
FLOOR = 0.05  # of a step: what costs less is not said
SMALL_BYTES = 64_000  # a call of fewer bytes takes its latency and hardly more
GOOD_BYTES = 1_000_000  # a bucket that is worth a call
MOST_HIDDEN = 0.75  # of the bytes' time: the last bucket is full when backward ends
FEW_CALLS = 8
HOST_SHARE = 0.10
SLOWER = 1.08  # times the lower median, from which on a rank is slow
OFTEN = 0.75  # of the steps, in which the same rank has to be slow
SURELY = 3.0  # standard errors, by which a slow rank's mean lies above that of the others: chance alone reaches 2
TOGETHER = 0.7  # least correlation of forward and backward when it is the work that is uneven, not the machine


@dataclass(frozen=True)
class Finding:
    """One thing that makes steps slow.

    Attributes:
        kind: "straggler", "imbalance", "slow loader", "missing overlap", "small buckets" or "host-bound".
        text: what is slow, and on which ranks.
        ranks: the ranks whose fault it is; () where it is all of them.
        cost_s: seconds that each step would save without it.
        share: the same, of the median step.
        advice: what to do about it.
    """

    kind: str
    text: str
    ranks: tuple[int, ...]
    cost_s: float
    share: float
    advice: str

    def __str__(self) -> str:
        cost = f"{self.share * 100:.0f} % of every step ({self.cost_s * 1e3:.3g} ms)"
        return f"{self.kind}: {self.text}: {cost}. {self.advice}"


def find_uneven_ranks(profile: Profile) -> Iterator[Finding]:
    """Find ranks that compute longer than the others.

    A straggler is slow in all that it does. Where the update, whose work no batch changes, is as fast as elsewhere, the
    work is uneven. It is uneven too where ranks hold different stages, or where each step has its own last rank and
    forward and backward are long together.
    """
    seconds = profile.seconds
    if len(seconds) < 2:
        return
    passes, update = _of(seconds, "forward", "backward"), _of(seconds, "optimizer")
    work = passes + update + _of(seconds, "other")
    step_s = float(np.median(profile.step_s))
    if _holds_stages(profile):
        yield from _uneven_stages(profile, work, step_s)
        return
    slower = work / np.maximum(lower_median(work), 1e-12)
    slow = (np.median(slower, axis=1) >= SLOWER) & ((slower >= 1 + (SLOWER - 1) / 2).mean(axis=1) >= OFTEN)
    slow &= _deviations_from_others(work) >= SURELY
    if slow.any():
        shorter = np.where(slow, 100 - 100 / np.maximum(np.median(slower, axis=1), 1.0), 0.0)
        cost_s = _gain_s(profile, dict(zip(profile.ranks, shorter.tolist(), strict=True)))
        factors = [np.median(each[slow] / np.maximum(lower_median(each), 1e-12)) for each in (passes, update)]
        ranks = tuple(rank for rank, is_slow in zip(profile.ranks, slow, strict=True) if is_slow)
        factor = float(np.median(slower[slow]))
        told = np.median(update) >= 0.004 * step_s and factors[1] - 1 < 0.4 * (factors[0] - 1)
        who, is_one = ranks_in_words(ranks), len(ranks) == 1
        if told:
            kind, text = "imbalance", f"{who} compute{'s' * is_one} {factors[0]:.2g}x as long in forward and backward, "
            text += "but not in the update: more work, not a slower machine"
            advice = "Give every rank the same work."
        else:
            kind, text = "straggler", f"{who} {'is' if is_one else 'are'} {factor:.2g}x slower"
            advice = "Look at its clock, its temperature and other programs there."
        yield Finding(kind, text, ranks, cost_s, cost_s / step_s, advice)
        return
    cost_s = float(np.median(passes.max(axis=0) - passes.mean(axis=0)))
    if passes.shape[1] >= 4 and _long_together(seconds) >= TOGETHER:
        text = "a different rank is last in each step: forward and backward of the same rank are long together"
        advice = "Batches hold uneven work: sort or pack samples by length."
        yield Finding("imbalance", text, (), cost_s, cost_s / step_s, advice)


def find_slow_loaders(profile: Profile) -> Iterator[Finding]:
    """Find ranks that wait for their data; every rank waits for the slowest of them in the end."""
    data = _of(profile.seconds, "data")
    step_s = float(np.mean(profile.step_s))
    cost_s = float(data.max(axis=0).mean())
    each = data.mean(axis=1)
    slow = each >= 0.5 * each.max()
    ranks = tuple(rank for rank, is_slow in zip(profile.ranks, slow, strict=True) if is_slow)
    everyone, is_one = len(ranks) == len(profile.ranks), len(ranks) == 1
    who = "every rank" if everyone and not is_one else ranks_in_words(ranks)
    text = f"{who} wait{'s' * (everyone or is_one)} for the next batch"
    if np.median(data.max(axis=0)) < 0.25 * cost_s:
        text += ", in some of the steps"
    advice = "Load batches ahead of the step: more workers, or less work for each sample."
    yield Finding("slow loader", text, () if everyone else ranks, cost_s, cost_s / step_s, advice)


def lower_median(values: Floats) -> Floats:
    """Return the lower median over ranks [R, S] -> [S]."""
    return np.asarray(np.sort(values, axis=0)[(len(values) - 1) // 2])


def _deviations_from_others(work: Floats) -> Floats:
    """Return how far each rank is above the mean of the others, in standard errors over steps [R, S] -> [R]."""
    others = (work.sum(axis=0) - work) / (len(work) - 1)
    ratios = np.log(np.maximum(work, 1e-12) / np.maximum(others, 1e-12))
    errors = ratios.std(axis=1) / np.sqrt(max(1, work.shape[1] - 1))
    return np.asarray(ratios.mean(axis=1) / np.maximum(errors, 1e-12))


def _gain_s(profile: Profile, percent: Mapping[int, float]) -> float:
    """Return how much shorter the middle step would be, were what ranks compute shorter by some percent."""
    return profile.critical_path.gain_s(
        lambda span: percent[span.rank] * (span.lane == "compute" and span.kind not in ("data", "wait"))
    )


def _of(seconds: Floats, *sections: str) -> Floats:
    return np.asarray(seconds[:, :, [SECTIONS.index(section) for section in sections]].sum(axis=2))


def _holds_stages(profile: Profile) -> bool:
    trace = profile.trace
    staged = trace.select(trace.is_word("lane", "compute") & (trace.stage >= 0))
    sets = {rank: frozenset(staged.stage[staged.rank == rank].tolist()) for rank in profile.ranks}
    return len(set(sets.values())) > 1


def _uneven_stages(profile: Profile, work: Floats, step_s: float) -> Iterator[Finding]:
    """Compare ranks of a pipeline: it runs at the pace of the rank that has the most to do."""
    middle = np.median(work, axis=1)
    slowest = int(middle.argmax())
    cost_s = float(middle[slowest] - middle.mean())
    if cost_s >= 2 * FLOOR * step_s:
        text = f"the stages of rank {profile.ranks[slowest]} take {middle[slowest] / middle.mean():.2g}x the mean"
        advice = "Cut the model so that stages take equally long."
        yield Finding("imbalance", text, (profile.ranks[slowest],), cost_s, cost_s / step_s, advice)


def _long_together(seconds: Floats) -> float:
    """Return how far a rank's forward and backward are long in the same steps: their correlation."""
    deviations = []
    for section in ("forward", "backward"):
        each = _of(seconds, section)
        deviations.append((each / np.maximum(each.mean(axis=0), 1e-12) - 1).ravel())
    if min(deviation.std() for deviation in deviations) == 0:
        return 0.0
    return float(np.corrcoef(*deviations)[0, 1])


def find_missing_overlap(profile: Profile) -> Iterator[Finding]:
    """Find gradients, or gathered parameters, that travel while nothing is computed although something could be.

    The rank that hides most counts. On the others bytes travel late because that one comes late.
    """
    step_s, costs, told = float(np.median(profile.step_s)), [], []
    for row, rank in enumerate(profile.ranks):
        pieces = profile.moments[rank]
        moving = pieces.length_ns[pieces.shares].sum() / 1e9 / profile.num_steps
        hidden = pieces.length_ns[pieces.shares & pieces.hides].sum() / 1e9 / profile.num_steps
        passes = [SECTIONS.index("backward")] + [SECTIONS.index("forward")] * _gathers(profile)
        room = profile.seconds[row][:, passes].sum(axis=1).mean()
        possible = min(MOST_HIDDEN * moving, room)
        costs.append(possible - hidden if hidden < 0.4 * possible else 0.0)
        told.append((hidden, moving))
    best = int(np.argmin(costs))
    cost_s = costs[best]
    if cost_s >= FLOOR * step_s:
        hidden, moving = told[best]
        what = "gathered parameters and gradients" if _gathers(profile) else "gradients"
        text = f"computation hides {hidden / moving * 100:.0f} % of the {moving * 1e3:.3g} ms in which {what} travel"
        advice = "Send buckets during backward" + (", gather ahead of the layer." if _gathers(profile) else ".")
        yield Finding("missing overlap", text, (), cost_s, cost_s / step_s, advice)


def find_small_buckets(profile: Profile) -> Iterator[Finding]:
    """Find many small calls whose fixed cost is a part of the step, where fewer calls could carry the same bytes."""
    calls = profile.calls.take(profile.shares)
    if not len(calls.spans):
        return
    each = len(profile.ranks) * profile.num_steps
    num_calls, num_bytes = len(calls.spans) / each, float(calls.spans.num_bytes.sum()) / each
    fewer = max(1.0, np.ceil(num_bytes / GOOD_BYTES))
    if num_bytes == 0 or num_calls < max(FEW_CALLS, 2 * fewer):
        return
    latency_s = _latency_s(calls.spans.num_bytes, calls.alone_ns / 1e9)
    exposed = [pieces.length_ns[pieces.shares & ~pieces.computes].sum() for pieces in profile.moments.values()]
    exposed_s = float(np.median(exposed)) / 1e9 / profile.num_steps
    step_s = float(np.median(profile.step_s))
    cost_s = min((num_calls - fewer) * latency_s, exposed_s)
    text = f"{num_calls:.0f} calls carry {num_bytes / num_calls / 1e3:.3g} kB each, and each takes "
    text += f"{latency_s * 1e6:.3g} us before its first byte"
    yield Finding("small buckets", text, (), cost_s, cost_s / step_s, "Use buckets of 1 MB or more.")


def find_host_bound(profile: Profile) -> Iterator[Finding]:
    """Find GPUs that wait for their host to launch the next kernel."""
    trace, step_s = profile.trace, float(np.median(profile.step_s))
    gaps = trace.select(trace.is_word("lane", HOST) & trace.is_word("name", WAIT_FOR_HOST))
    waited = {
        rank: float((gaps.end_ns - gaps.start_ns)[gaps.rank == rank].sum()) / 1e9 / profile.num_steps
        for rank in profile.ranks
    }
    cost_s = max(waited.values())
    if cost_s < HOST_SHARE * step_s:
        return
    ranks = tuple(rank for rank, waits in waited.items() if waits >= 0.5 * cost_s)
    kernels = trace.select(np.isin(trace.rank, ranks) & trace.is_word("lane", "compute"))
    number = len(kernels) / len(ranks) / profile.num_steps
    lasts_us = float(np.median(kernels.end_ns - kernels.start_ns)) / 1e3
    verb = "waits" if len(ranks) == 1 else "wait"
    text = f"the GPU of {ranks_in_words(ranks)} {verb} for the host, which launches {number:,.0f} kernels per step, "
    text += f"half of them of {lasts_us:.3g} us or less"
    advice = "Fuse kernels (torch.compile), use CUDA graphs, or give each step more work."
    yield Finding("host-bound", text, ranks, cost_s, cost_s / step_s, advice)


def _gathers(profile: Profile) -> bool:
    return bool((profile.calls.spans.is_word("kind", "all_gather") & profile.shares).any())


def _latency_s(num_bytes: Ints, seconds: Floats) -> float:
    """Estimate what a call takes before its first byte: as the smallest do, or as the larger ones promise."""
    small = num_bytes <= SMALL_BYTES
    if small.mean() >= 0.1:
        return float(np.mean(seconds[small]))  # not the median: ends may be seen several at a time
    order = np.argsort(num_bytes)
    third = max(1, len(order) // 3)
    low, high = order[:third], order[-third:]
    (few, many), (short, long) = ([float(np.median(of[rows])) for rows in (low, high)] for of in (num_bytes, seconds))
    if many < 2 * few:
        return 0.0
    return max(0.0, short - (long - short) / (many - few) * few)


LOOKS: Sequence[Callable[[Profile], Iterator[Finding]]] = (
    find_uneven_ranks,
    find_slow_loaders,
    find_missing_overlap,
    find_small_buckets,
    find_host_bound,
)


def find(profile: Profile) -> list[Finding]:
    """Find what costs `FLOOR` of a step or more, the most first; nothing where it is not known when ranks compute."""
    if profile.unmarked or not np.median(profile.step_s) > 0:
        return []
    found = [finding for look in LOOKS for finding in look(profile) if finding.share >= FLOOR]
    return sorted(found, key=lambda finding: -finding.cost_s)


def report(profile: Profile, predicted: Profile | None = None) -> str:
    """Say how long a step takes, what each rank does meanwhile, what makes it slow, and what is not known.

    Args:
        profile: what was measured.
        predicted: the same step as a simulator sees it: a row under the table.
    """
    lines = [headline(profile), "", *_table(profile, predicted), "", _critical_path(profile)]
    found = find(profile)
    lines += [str(finding) for finding in found]
    if not found and not profile.unmarked:
        whole = "a step" if profile.has_steps else "the whole trace"
        lines.append(f"Nothing was found that costs {FLOOR * 100:.0f} % of {whole} or more.")
    lines += [f"Note: {note}" for note in profile.notes]
    return "\n".join(lines)


def _critical_path(profile: Profile) -> str:
    """Say what decides how long the middle step is, or which marks are missing for it."""
    if profile.unmarked:
        return f"Critical path: not known, since {ranks_in_words(profile.unmarked)} marked no section."
    if len(profile.ranks) > 1 and not (profile.calls.number >= 0).any():
        return "Critical path: not known, since no call that ranks made together is in the trace."
    return str(profile.critical_path)


def headline(profile: Profile) -> str:
    """Return one sentence: how long a step is, of how many steps and ranks."""
    middle_s = float(np.median(profile.step_s))
    steps = "1 step" if profile.num_steps == 1 else f"the median of {profile.num_steps} steps"
    if not profile.has_steps:
        steps = "the whole trace, in which no step is marked"
    ranks = "1 rank" if len(profile.ranks) == 1 else f"{len(profile.ranks)} ranks"
    return f"A step takes {_ms(middle_s)} ms ({steps}, {ranks}). Milliseconds of a step, by section:"


def _table(profile: Profile, predicted: Profile | None) -> list[str]:
    means = profile.mean_s()
    names = list(next(iter(means.values())))
    rows = [["rank", *names, "sent", "hidden"]]
    shown = list(means.items())[:SHOWN_RANKS]
    rows += [[str(rank), *(_ms(row[name]) for name in names), *_overlap(profile, rank)] for rank, row in shown]
    if predicted is not None:
        mean = {name: np.mean([row.get(name, 0.0) for row in predicted.mean_s().values()]) for name in names}
        rows.append(["predicted", *(_ms(float(mean[name])) for name in names), *_overlap(predicted)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]
    if len(means) > SHOWN_RANKS:
        lines.insert(1 + len(shown), f"and {len(means) - SHOWN_RANKS} ranks more")
    return lines


def _overlap(profile: Profile, *ranks: int) -> tuple[str, str]:
    moving_s, hidden_s = np.mean([profile.overlap(rank) for rank in ranks or profile.ranks], axis=0).tolist()
    return _ms(moving_s), f"{hidden_s / moving_s * 100:.0f} %" if moving_s else "-"


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.3g}" if ms >= 0.01 else "0"


class Limit(NamedTuple):
    """What limits a step, and the parts of it that show it, of the rank that waits least for other ranks."""

    what: str  # "loader", "step" or "wire"
    loader: float  # it waits for its next batch
    step: float  # it computes
    wire: float  # bytes travel, computed meanwhile or not


def limit_of(profile: Profile) -> Limit:
    """Say what limits: made faster, it alone makes steps shorter.

    A loader works ahead. Where a rank waits for it all the same (`FLOOR` of a step or more), it is always busy. Else
    bytes travel under the computation: who of the two is busier decides.
    """
    mean = profile.seconds.mean(axis=1)  # [R, 7]
    row = int(mean[:, SECTIONS.index("idle")].argmin())
    own = dict(zip(SECTIONS, (mean[row] / mean[row].sum()).tolist(), strict=True))
    step = sum(own[name] for name in ("forward", "backward", "optimizer", "other"))
    wire = profile.overlap(profile.ranks[row])[0] / float(mean[row].sum())
    return Limit("loader" if own["data"] >= FLOOR else "wire" if wire > step else "step", own["data"], step, wire)
