"""A profile in words: a table of the sections of each rank, and what makes the steps slow."""

from __future__ import annotations

import numpy as np

from distlab.profile.findings import FLOOR, find
from distlab.profile.profile import Profile

SHOWN_RANKS = 16


def report(profile: Profile, predicted: Profile | None = None) -> str:
    """Say how long a step takes, what each rank does meanwhile, what makes it slow, and what is not known.

    Args:
        profile: what was measured.
        predicted: the same step as a simulator sees it: a row under the table.
    """
    lines = [headline(profile), "", *_table(profile, predicted), ""]
    found = find(profile)
    lines += [str(finding) for finding in found]
    if not found and not profile.unmarked:
        whole = "a step" if profile.has_steps else "the whole trace"
        lines.append(f"Nothing was found that costs {FLOOR * 100:.0f} % of {whole} or more.")
    lines += [f"Note: {note}" for note in profile.notes]
    return "\n".join(lines)


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
