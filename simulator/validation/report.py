"""Everything that `distlab validate` says: scores by family, calibrated, left out and from data sheets; and its page.

A score has errors, biases, rank correlations and the cost of a choice, of predicted against measured times.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.hardware.presets import Stack, stack
from simulator.units import GIB
from simulator.validation.case import Case
from simulator.validation.confidence import Like, errors_from, like_of, text_of
from simulator.validation.exact import EXACT, Derived
from simulator.validation.plan_rows import SEEN, plan_cases
from simulator.validation.refit import CONSTANTS, FITS, Constant, fit_stack, leave_out
from simulator.validation.steps import FAMILIES

Floats = NDArray[np.float64]

# MODES: the colour of each in the picture, and what it is.
FITTED, BARS, MODES = FITS["fitted"], FITS["bars"], FITS["modes"]
FITTED_ON = ("dgx-a100", "jean-zay", "a100-4-cards")  # clusters of the generation of most constants
RATES, COMPUTED = ("zero-bubble Table 5",), "vTrain, 1 node"  # whose source computed it, from profiled layers
SEARCHED = ("ZB-1p", "ZB-2p")
MIN_ALTERNATIVES = 2


class Score(NamedTuple):
    """How near predictions come to measurements. Errors are parts: 0.05 is 5 %.

    Attributes:
        rows: measurements.
        error: mean of |predicted / measured - 1|.
        bias: mean of predicted / measured - 1: below 0, predictions are too short.
        tau: Kendall's rank correlation over all rows; None: fewer than two.
        choices: sets of alternatives for one model and batch.
        choice_cost: how much slower than the fastest measured one the alternative with the shortest prediction is,
            on average over the sets; None: there are none.
        choice_tau: rank correlation inside the sets, on average; None: there are none.
    """

    rows: int
    error: float
    bias: float
    tau: float | None
    choices: int
    choice_cost: float | None
    choice_tau: float | None

    @property
    def order_tau(self) -> float | None:
        """The rank correlation that tells how well a choice is made: inside the sets, where there are any."""
        return self.tau if self.choice_tau is None else self.choice_tau


def score(predicted: Sequence[float], measured: Sequence[float], choices: Sequence[str]) -> Score:
    """Compare predictions with measurements.

    Args:
        predicted: times.
        measured: times.
        choices: the set of alternatives that each row belongs to, or "".

    Raises:
        ValueError: there is no row.
    """
    if not len(predicted):
        raise ValueError("there is no row to compare; pass at least one")
    relative = np.asarray(predicted) / np.asarray(measured) - 1
    sets: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(choices):
        if name:
            sets[name].append(index)
    costs, taus = [], []
    for members in sets.values():
        if len(members) >= MIN_ALTERNATIVES:
            times = [measured[index] for index in members]
            best = min(members, key=lambda index: predicted[index])
            costs.append(measured[best] / min(times) - 1)
            taus.append(kendall_tau([predicted[index] for index in members], times))
    known = [tau for tau in taus if tau is not None]
    return Score(
        rows=len(relative),
        error=float(np.abs(relative).mean()),
        bias=float(relative.mean()),
        tau=kendall_tau(predicted, measured),
        choices=len(costs),
        choice_cost=float(np.mean(costs)) if costs else None,
        choice_tau=float(np.mean(known)) if known else None,
    )


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Kendall's tau-b: 1 where both have the same order, -1 the opposite; None where one of them has no order.

    Source: Kendall 1945, Biometrika 33: ties count for neither order.
    """
    first, second = (np.sign(np.subtract.outer(values, values)) for values in (one, other))
    pairs = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / pairs if pairs else None


class RowFamily(NamedTuple):
    """The cases of one table with their predictions.

    Attributes:
        name: of the table.
        cases: its rows.
        predicted: seconds of each row in those of MODES that it has: a table that no constant was fitted to has one, a
            table whose stack no other one has lacks "family left out".
    """

    name: str
    cases: tuple[Case, ...]
    predicted: dict[str, tuple[float, ...]]

    @property
    def blind(self) -> str:
        """The mode of MODES that saw least of these rows and has a value for each."""
        return next(mode for mode in ("left out", "family left out", "calibrated") if mode in self.predicted)

    def score(self, mode: str) -> Score | None:
        """Return the score of the predictions of one of MODES; None: there are none."""
        if mode not in self.predicted:
            return None
        return score(
            self.predicted[mode], [case.measured_s for case in self.cases], [case.choice for case in self.cases]
        )


def all_cases() -> list[Case]:
    """Return every published step."""
    return [case for make in (*FAMILIES, plan_cases) for case in make()]


def constants_of(name: str) -> list[Constant]:
    """Return the constants of a stack that are fitted."""
    return [CONSTANTS[field] for field in FITTED[name]]


def validate(progress: Callable[[str], None] = lambda _: None) -> list[RowFamily]:
    """Predict every published step: by the package's constants, without its like or its table, by data sheets alone.

    Args:
        progress: called with each stack's name before its cases are predicted.

    Cost: about nine simulations per case, one where no constant was fitted to it.
    """
    cases, found = all_cases(), dict[Case, dict[str, float]]()
    for name in FITTED:
        progress(name)
        own = [case for case in cases if case.stack == name and case.structure]
        left = leave_out(own, stack(name), constants_of(name))
        for case, structure, family in zip(own, *left, strict=True):
            times = (case.predict_s(), structure, family, case.predict_s(measured=False))
            found[case] = {mode: time for mode, time in zip(MODES, times, strict=True) if not math.isnan(time)}
    progress("steps that no constant was fitted to")
    for case in cases:
        if not case.structure and case.measured_s:
            found[case] = {"calibrated" if case.family.endswith(SEEN) else "family left out": case.predict_s()}
    families = dict.fromkeys(case.family for case in found)
    members = {name: tuple(case for case in cases if case in found and case.family == name) for name in families}
    return [
        RowFamily(name, own, {mode: tuple(found[case][mode] for case in own) for mode in found[own[0]]})
        for name, own in members.items()
    ]


def text_of_errors(families: Sequence[RowFamily]) -> str:
    """Return the text of `errors.csv`: what answers say of their error, for all sets of steps that are alike."""

    def row(case: Case, predicted: float, measured: float) -> tuple[Like, float, str]:
        return like_of(case.workload, case.machine()), predicted / measured - 1, case.family

    times = [
        row(case, predicted, case.measured_s)
        for family in families
        if family.blind != "calibrated" and family.name != COMPUTED
        for case, predicted in zip(family.cases, family.predicted[family.blind], strict=True)
    ]
    memory = [row(case, case.step().memory.max_bytes / GIB, case.memory_gib) for case in all_cases() if case.memory_gib]
    return text_of([*errors_from("time", times), *errors_from("memory", memory)])


def refit(progress: Callable[[str], None] = lambda _: None) -> Iterator[Stack]:
    """Fit every stack to its cases again."""
    cases = all_cases()
    for name in FITTED:
        progress(name)
        yield fit_stack(
            [case for case in cases if case.stack == name and case.structure], stack(name), constants_of(name)
        )


def _memory() -> Iterator[Derived]:
    """Derive the bytes that the fullest ranks of steps were published to hold, in GiB."""
    for case in all_cases():
        if case.memory_gib:
            held = case.step().memory.max_bytes / GIB
            yield Derived(f"{case.family}, GiB", case.label, held, case.memory_gib)


def derived() -> dict[str, list[Derived]]:
    """Return the tables of memory, bubbles and collectives, by name."""
    tables: dict[str, list[Derived]] = {}
    for make in (*EXACT, _memory):
        for row in make():
            tables.setdefault(row.table, []).append(row)
    return tables


def scores_of(families: Sequence[RowFamily]) -> list[list[str]]:
    """Return the scores as rows of texts, the heading first."""
    rows = [["steps", "rows", *(f"{mode}: error, bias" for mode in MODES), "choice", "tau"]]
    for family in families:
        scores = {mode: family.score(mode) for mode in MODES}
        left = scores[family.blind]
        choice = "" if left is None or left.choice_cost is None else f"{left.choice_cost:.1%}"
        tau = "" if left is None or left.order_tau is None else f"{left.order_tau:.2f}"
        cells = ("" if each is None else f"{each.error:.1%}, {each.bias:+.1%}" for each in scores.values())
        rows.append([family.name, str(len(family.cases)), *cells, choice, tau])
    return rows


def errors_of_tables(tables: dict[str, list[Derived]]) -> list[list[str]]:
    """Return the errors of each table as rows of texts, the heading first."""
    rows = [["table", "rows", "mean error", "largest error"]]
    for name, found in tables.items():
        errors = errors_of(name, found)
        rows.append([name, str(len(found)), f"{errors.mean():.2%}", f"{errors.max():.2%}"])
    return rows


def text(families: Sequence[RowFamily], tables: dict[str, list[Derived]]) -> str:
    """Lay the scores out for a terminal."""
    lines = [*_aligned(scores_of(families)), "", *_aligned(errors_of_tables(tables))]
    lines += ["", *map(verdict, families), *short_tables(tables)]
    lines += ["What sources do not say was chosen with these rows in view; --page FILE names each choice."]
    return "\n".join(lines)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(wide[0]), *map(str.rjust, row[1:], wide[1:])]).rstrip() for row in rows]


def errors_of(table: str, rows: Sequence[Derived]) -> Floats:
    """Return each row's error: of a table of rates, which are parts already, by how much ours is above the printed one.

    A searched schedule with a smaller bubble than the published search found is not an error.
    """
    ours, printed = np.array([row.predicted for row in rows]), np.array([row.published for row in rows])
    if table in RATES:
        searched = np.array([row.label.split()[1] in SEARCHED for row in rows])
        return np.asarray(np.where(searched, np.maximum(ours - printed, 0), np.abs(ours - printed)), np.float64)
    return np.asarray(np.abs(ours / printed - 1), np.float64)


def verdict(family: RowFamily) -> str:
    """Say which bars a family misses with its structure left out, or that it meets them."""
    found = family.score(family.blind)
    assert found is not None, "each family has a mode"
    bar = BARS["same" if family.cases[0].cluster in FITTED_ON else "other"]
    short = []
    if found.error > bar:
        short.append(f"error {found.error:.1%} > {bar:.0%}")
    if abs(found.bias) > BARS["bias"]:
        short.append(f"bias {found.bias:+.1%} beyond 2 %")
    if found.choice_cost is not None and found.choice_cost > BARS["choice"]:
        short.append(f"choice {found.choice_cost:.1%} > 3 %")
    if found.choice_tau is not None and found.choice_tau < BARS["tau"]:
        short.append(f"tau {found.choice_tau:.2f} < 0.8")
    return f"{family.name}: " + (f"falls short: {'; '.join(short)}" if short else "meets its bars")


def short_tables(tables: dict[str, list[Derived]]) -> list[str]:
    """Say which tables of memory and collectives miss their bar; the others meet it or have none."""
    said = []
    for name, rows in tables.items():
        kind = "memory" if name.endswith(("GB", "GiB")) else "collectives" if name.startswith("all-reduce") else ""
        bar = BARS["large messages" if name.endswith("from 64 MiB") else kind] if kind else np.inf
        if (error := float(errors_of(name, rows).mean())) > bar:
            said.append(f"{name}: falls short: error {error:.1%} > {bar:.0%}")
    return said


def facts(families: Sequence[RowFamily], tables: dict[str, list[Derived]]) -> dict[str, Any]:
    """Return all of it as JSON-ready values."""
    all_found: dict[str, Any] = {}
    for family in families:
        rows = [
            {"label": case.label, "structure": case.structure, "measured_s": case.measured_s}
            | {f"{mode.replace(' ', '_')}_s": times[place] for mode, times in family.predicted.items()}
            for place, case in enumerate(family.cases)
        ]
        scores = {mode: found._asdict() for mode in MODES if (found := family.score(mode))}
        all_found[family.name] = {"scores": scores, "rows": rows}
    derived_rows = {name: [row._asdict() for row in rows] for name, rows in tables.items()}
    return {"bars": BARS, "families": all_found, "tables": derived_rows}


def words_of(section: str) -> list[tuple[str, str]]:
    """Return what `words.csv` says in a section, each with the family or table that it is about.

    "why": why a family or a table is as far off as it is. "chosen": what sources do not say and was chosen here after
    the errors were seen: "left out" does not leave these choices out. "unused": published tables not predicted here.
    """
    text = resources.files("simulator.validation").joinpath("words.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return [(row["about"], row["words"]) for row in rows if row["section"] == section]


def write_page(path: Path, families: Sequence[RowFamily], tables: dict[str, list[Derived]]) -> None:
    """Write the page as Markdown, and its scatter plot as a PNG next to it."""
    picture = path.with_name(f"{path.stem}.png")
    draw(picture, families)
    path.write_text(page(families, tables, picture.name), encoding="utf-8")


def page(families: Sequence[RowFamily], tables: dict[str, list[Derived]], picture: str) -> str:
    """Return the page."""
    rows = sum(len(family.cases) for family in families)
    head = FITS["page"].format(rows=rows, tables=len(tables), picture=picture)
    lines = [
        head,
        *_markdown(scores_of(families)),
        "",
        *_markdown(errors_of_tables(tables)),
        "",
        "## Bars, and which family falls short",
        "",
    ]
    why = words_of("why")
    for line in [*map(verdict, families), *short_tables(tables)]:
        reason = next((f" {words}" for about, words in why if line.startswith(f"{about}: ")), "")
        lines.append(f"- {line}.{reason}")
    for title, section in (("Chosen after the errors were seen", "chosen"), ("Published and not used", "unused")):
        lines += ["", f"## {title}", "", *(f"- {': '.join(filter(None, row))}" for row in words_of(section))]
    lines += ["", "## Constants", ""]
    for name, fields in FITTED.items():
        own = stack(name)
        values = ", ".join(f"{field} {getattr(own, field):.3g}" for field in fields)
        lines.append(f"- `{name}`: {values}. {own.source}.")
    return "\n".join(lines) + "\n"


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return [head, f"{'|---' * len(rows[0])}|", *rest]


def draw(path: Path, families: Sequence[RowFamily]) -> None:
    """Draw predicted over measured time: a row for each family, and in it a line of strokes for each way to predict."""
    from matplotlib.figure import Figure

    others = [family for family in families if family.blind == "family left out"]
    once = {"family left out": tuple(time for family in others for time in family.predicted["family left out"])}
    families = [family for family in families if family.blind != "family left out"]
    families += [RowFamily("never fitted to", sum((family.cases for family in others), ()), once)] if others else []
    figure = Figure(figsize=(8, 7), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(0.95, 1.05, color="0.9")
    for place, (mode, (colour, words)) in enumerate(MODES.items()):
        label: str | None = f"{mode}: {words}"
        for row, family in enumerate(families):
            if mode in family.predicted:
                shares = np.array(family.predicted[mode]) / [case.measured_s for case in family.cases]
                height = np.full(len(shares), row + 0.2 * (place - 1.5))
                axes.plot(shares, height, "|", color=colour, ms=6, alpha=0.7, label=label)
                label = None
    axes.set(xlim=(0, 1.9), ylim=(len(families) - 0.4, -0.6), xlabel="predicted over measured; grey: within 5 %")
    axes.set_yticks(range(len(families)), [f"{family.name} ({len(family.cases)})" for family in families])
    axes.hlines(np.arange(len(families) - 1) + 0.5, 0, 1.9, color="0.85", lw=0.6)
    figure.legend(loc="outside upper left", frameon=False)
    figure.savefig(path, dpi=120)
