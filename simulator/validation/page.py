"""The page of `distlab validate`: scores in tables, scatter plots, and why families fall short."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from simulator.hardware.presets import stack
from simulator.validation.exact import Derived
from simulator.validation.report import FITTED, MODES, RowFamily, errors_of, short_tables, verdict


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
    lines = [
        "# How near the simulator comes to published measurements",
        "",
        f"`distlab validate --page FILE` writes this page: {rows} published steps and {len(tables)} tables, predicted.",
        "",
        "*Calibrated*: with the constants of the package, which were fitted to these rows. *Left out*: each row with",
        "constants fitted without its structure (a size, a cluster, a schedule). What sources do not say was chosen",
        "with all rows in view, so that errors on rows never seen may be larger: see below.",
        "*Data sheet*: no constant at all. Times are those of a step in a run (`Step.steady_s`). Error is the mean of",
        "|predicted / measured - 1|, bias the mean of predicted / measured - 1. A choice costs what the plan with the",
        "shortest prediction takes in addition to the fastest measured plan, for one model and batch.",
        "",
        f"![Predicted against measured times of all steps, calibrated, left out and from data sheets]({picture})",
        "",
        "| steps | rows | calibrated: error, bias | left out: error, bias | data sheet: error, bias | choice | tau |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in families:
        scores = [family.score(mode) for mode in MODES]
        cells = [f"{each.error:.1%}, {each.bias:+.1%}" for each in scores]
        left = scores[1]
        choice = "" if left.choice_cost is None else f"{left.choice_cost:.1%}"
        tau = "" if left.order_tau is None else f"{left.order_tau:.2f}"
        row = [family.name, str(len(family.cases)), *cells, choice, tau]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "| table | rows | mean error | largest error |", "|---|---|---|---|"]
    for name, found in tables.items():
        errors = errors_of(name, found)
        lines.append(f"| {name} | {len(found)} | {errors.mean():.2%} | {errors.max():.2%} |")
    lines += ["", "## Bars, and which family falls short", ""]
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


def draw(path: Path, families: Sequence[RowFamily]) -> None:
    """Draw predicted over measured against measured time, one panel for each way to predict."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    for panel, mode in zip(figure.subplots(1, len(MODES), sharey=True), MODES, strict=True):
        panel.axhspan(0.95, 1.05, color="0.9")
        for family in families:
            measured = np.array([case.measured_s for case in family.cases])
            panel.semilogx(measured, np.array(family.predicted[mode]) / measured, ".", label=family.name, ms=4)
        panel.set(title=f"{mode}: predicted over measured", xlabel="measured step (s)", ylim=(0, 1.6))
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    figure.savefig(path, dpi=120)
