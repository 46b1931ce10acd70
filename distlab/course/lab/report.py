"""What a lab found: rows of measured, predicted and exact values, with the reference output of the same lab.

Rank 0 prints it. A fact (bytes, calls, equal or not) must be what was expected, and fails the lab where it is not; a
time is shown next to its prediction and the reference machine's time. A prediction that is far off is named in the last
line, and does not fail the lab.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import NamedTuple

Value = float | int | str | bool
FAR_OFF = 0.25  # relative, from which on a prediction is named: twice what a quiet machine's calibration leaves


class ReportRow(NamedTuple):
    """One result.

    Attributes:
        what: what it is, such as "ring, 1 MB: time".
        value: a number, a text, or yes and no.
        unit: "s", "B", "B/s" or "" (a count, or what the text says).
        predicted: what a model said it would be, or None.
        expected: what it has to be, or None where it is measured.
    """

    what: str
    value: Value
    unit: str = ""
    predicted: float | None = None
    expected: Value | None = None

    @property
    def wrong(self) -> bool:
        """Whether this is a fact that is not what it has to be."""
        return self.expected is not None and self.value != self.expected

    @property
    def error(self) -> float | None:
        """Relative error of the prediction, below zero where it was too low."""
        if self.predicted is None or not isinstance(self.value, int | float) or not self.value:
            return None
        return self.predicted / self.value - 1

    def shown(self) -> str:
        """Write the value with its unit."""
        return _text(self.value, self.unit)

    def shown_expected(self) -> str:
        """Write the prediction, or what a wrong fact has to be."""
        if self.expected is not None:
            return f"must be {_text(self.expected, self.unit)}" if self.wrong else ""
        if self.predicted is None:
            return ""
        return _text(self.predicted, self.unit) + (f" ({self.error:+.0%})" if self.error is not None else "")


@dataclass
class LabReport:
    """Rows and remarks in the order in which a lab found them.

    Attributes:
        title: what was run.
        settings: the settings that the numbers depend on.
        reference: value of each row in the reference output for this device and number of ranks, as text.
        reference_note: where the reference comes from, or why there is none.
    """

    title: str
    settings: str = ""
    reference: Mapping[str, str] = field(default_factory=dict)
    reference_note: str = ""
    rows: list[ReportRow] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measured(self, what: str, value: Value, unit: str = "", *, predicted: float | None = None) -> None:
        """Add what was measured, with what was predicted."""
        self.rows.append(ReportRow(what, value, unit, predicted=predicted))

    def fact(self, what: str, value: Value, expected: Value, unit: str = "") -> None:
        """Add what no machine changes; a value that is not the expected one fails the lab."""
        self.rows.append(ReportRow(what, value, unit, expected=expected))

    def say(self, text: str) -> None:
        """Add lines that stand above the table, such as a matrix."""
        self.remarks.append(text)

    def note(self, text: str) -> None:
        """Add a line that stands below the table; the same line once."""
        if text not in self.notes:
            self.notes.append(text)

    def others_took(self, cores: float) -> None:
        """Add a line that says that the machine was busy, where other processes took that many cores from the ranks."""
        from distlab.measure.machine.ranks import MAX_TAKEN_CORES, busy_sentence

        if cores > MAX_TAKEN_CORES:
            self.note(f"{busy_sentence(cores)} Close other programs and run again: times here say little.")

    @property
    def wrong(self) -> list[ReportRow]:
        """Facts that are not what they have to be."""
        return [row for row in self.rows if row.wrong]

    def table(self) -> str:
        """Lay everything out for a terminal."""
        lines = [(row.what, row.shown(), row.shown_expected(), self.reference.get(row.what, "")) for row in self.rows]
        used = [True, True, any(line[2] for line in lines), any(line[3] for line in lines)]
        head = ("", "here", "predicted (error)", "reference")
        rows = _columns([tuple(compress(line, used)) for line in (head, *lines)], str.ljust)
        parts = [self.title, *self.remarks, rows, "\n".join([*self.notes, self.reference_note]).strip()]
        return "\n\n".join(part for part in [*parts, self.verdict()] if part)

    def verdict(self) -> str:
        """Return the last line: whether all facts are right, and how far predictions are off."""
        facts = sum(row.expected is not None for row in self.rows)
        if wrong := self.wrong:
            first = f"{wrong[0].what}: {wrong[0].shown()}, {wrong[0].shown_expected()}"
            return f"WRONG: {len(wrong)} of {facts} facts, first: {first}"
        told = [f"All {facts} facts are right." if facts > 1 else "The fact is right."] if facts else []
        errors = [(abs(row.error), row) for row in self.rows if row.error is not None]
        if far := [pair for pair in errors if pair[0] > FAR_OFF]:
            row = max(far, key=lambda pair: pair[0])[1]
            told += [
                f"But {len(far)} of {len(errors)} predictions are more than {FAR_OFF:.0%} off, the furthest: "
                f"{row.what} is {row.shown()}, predicted {row.shown_expected()}. Close other programs and run again; "
                "the lesson says what a prediction leaves out."
            ]
        return " ".join(told)

    def as_dict(self) -> dict[str, object]:
        """Return the report as JSON-ready values."""
        rows = [row._asdict() | {"shown": row.shown(), "wrong": row.wrong} for row in self.rows]
        said = {"schema": 1, "title": self.title, "settings": self.settings, "passed": not self.wrong}
        return said | {"rows": rows, "remarks": self.remarks, "notes": self.notes}


def reference_section(report: Mapping[str, object]) -> str:
    """Write a report, as JSON gave it, as the section of a reference file that `read_reference` reads."""
    rows = report["rows"]
    assert isinstance(rows, Sequence)
    wire = [f"Ranks talked over {report['backend']}.", ""] if "backend" in report else []
    head = [f"Settings: {report['settings'] or 'none'}", "", *wire, "| | value |", "|---|---|"]
    return "\n".join([*head, *(f"| {row['what']} | {row['shown']} |" for row in rows)])


def read_reference(path: Path, section: str, settings: str) -> tuple[dict[str, str], str]:
    """Return a section's values by row, and a sentence that says where they come from or why there are none."""
    if not path.is_file():
        return {}, "No output of a different machine is kept for this lab."
    parts = re.split(r"^## ", path.read_text(encoding="utf-8"), flags=re.M)
    body = next((part for part in parts[1:] if part.splitlines()[0].strip() == section), None)
    if body is None or "| |" not in body:
        return {}, f"No output of a different machine is kept for {section}."
    theirs = re.search(r"^Settings: (.*)$", body, re.M)
    if theirs is None or theirs[1] != (settings or "none"):
        return {}, f"The reference output was made with other settings ({theirs[1] if theirs else '?'}): not compared."
    machine = re.search(r"^Measured (.*)$", parts[0], re.M)
    rows, wire = re.findall(r"^\| (.+?) \| (.*?) \|$", body, re.M), re.search(r"^Ranks talked over .*$", body, re.M)
    note = f"Reference: {machine[1] if machine else path.name}"
    return dict(rows), note if wire is None else f"{note} {wire[0]}"


def grid(corner: str, rows: Sequence[Sequence[str]]) -> str:
    """Lay out a rank x rank matrix, with `corner` over the row numbers."""
    head = [corner, *(f"to {peer}" for peer in range(len(rows)))]
    return _columns([head, *([f"from {rank}", *row] for rank, row in enumerate(rows))], str.rjust)


def _columns(rows: Sequence[Sequence[str]], first: Callable[[str, int], str]) -> str:
    """Lay rows out in columns, each as wide as its widest cell; `first` aligns the first one, others end alike."""
    laid = []
    for place, column in enumerate(zip(*rows, strict=True)):
        align = str.rjust if place else first
        laid.append([align(cell, max(map(len, column))) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*laid, strict=True))


def _text(value: Value, unit: str) -> str:
    from simulator.units import format_bytes, format_bytes_per_s, format_s

    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, str):
        return value
    if unit == "s":
        return format_s(value)
    if unit == "B/s":
        return format_bytes_per_s(value)
    if unit == "B":
        return f"{value:,} B" if isinstance(value, int) else format_bytes(value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
    return f"{number} {unit}".rstrip()
