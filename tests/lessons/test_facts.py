"""What lessons say in numbers is what their cells show: marked numbers, and titles over predicted and measured boxes.

A number that speaks of an output has a mark behind it that nobody sees, `94.4 GB<!--out-->`. An output of the same
section (from one `##` to the next) must hold a number that rounds to it. What changes from run to run has no number.
"""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "lessons").glob("*/lesson.ipynb"))
MARK = "<!--out-->"
SIZES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
UNITS = {f"{size}{unit}": (unit, SIZES[size]) for size in SIZES for unit in ("B", "B/s", "FLOP/s")}
UNITS |= {"s": ("s", 1), "ms": ("s", 1e-3), "us": ("s", 1e-6), "µs": ("s", 1e-6), "%": ("%", 1), "bytes": ("B", 1)}
NAMES = "|".join(map(re.escape, sorted(UNITS, key=len, reverse=True)))
NUMBER = rf"(?<![\w.])([-+]?)(\d+(?:,\d{{3}})*)(\.\d+)?(e[-+]?\d+)?(?: ?({NAMES})(?![\w/]))?"
MARKED = re.compile(rf"{NUMBER}x?(?: [a-z]+)?(?:\*\*)?{MARK}")
UNSEEN = re.compile(r"```.*?```|`[^`]*`|\$[^$]*\$", re.DOTALL)  # in code and formulas a mark would be seen
TIME = r"[\d.]+ \w+"
TITLED = (  # a picture's words: what was measured (m) and predicted (q), and by how much percent they differ (p)
    rf"band: (?P<p>[-+]\d+) %.* over (?P<drawn>{TIME}),.*Measured (?P<m>{TIME}) \(.*predicted (?P<q>{TIME})",
    rf"Predicted peak (?P<q>{TIME}), measured (?P<m>(?P<drawn>{TIME})): (?P<p>[-+][\d.]+) %",
    rf" over (?P<m>(?P<drawn>{TIME})),.*The prediction is (?P<q>{TIME}), an error of (?P<p>[-+][\d.]+) %",
)


def read(found):
    """A number without its unit, half of its last digit, and its unit with what that is in base units."""
    sign, whole, after, power, unit = found.groups()[:5]
    value, last_digit = f"{sign}{whole.replace(',', '')}{after or ''}", 10.0 ** -max(0, len(after or ".") - 1)
    return float(f"{value}{power or ''}"), last_digit / 2 * float(f"1{power or ''}"), *UNITS.get(unit, ("", 1.0))


def sections(cells):
    """For each section what its text says and what its cells show: (number of the cell, text)."""
    parts = [([], [])]
    for number, cell in enumerate(cells, 1):
        source = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
        for place, piece in enumerate(re.split(r"^(?=##? )", source, flags=re.MULTILINE)):
            parts += [([], [])] if place or piece.startswith("#") else []
            parts[-1][0].append((number, piece))
        for output in cell.get("outputs", ()):
            parts[-1][1].append((number, "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))))
    return parts


def complaints(cells, name="lesson"):
    """Yield each marked number that its section does not show, with the nearest that it shows; and marks in code."""
    for texts, outputs in sections(cells):
        shown = [(*read(one), one[0], at) for at, text in outputs for one in re.finditer(NUMBER, text)]
        for at, text in texts:
            marked = list(MARKED.finditer(" ".join(UNSEEN.sub("", text).split())))
            if text.count(MARK) != len(marked):
                yield f"{name}, cell {at}: a mark stands in code or a formula, or not right after a number"
            for one in marked:
                (value, half, unit, scale), own = read(one), float if one[1] else abs
                near = [(abs(own(v * (s / scale if u else 1)) - value), f"{said} (cell {number})")
                        for v, _, u, s, said, number in shown if u in ("", unit)]  # fmt: skip
                if min(near, default=(half * 2,))[0] > half * (1 + 1e-6):
                    best = [said for _, said in sorted(near)[:3]] or "no number"
                    yield f"{name}, cell {at}: {one[0]} is not shown in its section; nearest: {best}"


def disagrees(words):
    """Whether a picture's title and its boxes differ by more than what rounding hides.

    The drawn step is the median one, of an even number the shorter of two; and its clock runs on after its last box.
    """
    for found in filter(None, (re.search(pattern, words, re.DOTALL) for pattern in TITLED)):
        (m, r, _, a), (q, t, _, b) = (read(re.search(NUMBER, found[side])) for side in "mq")
        (drawn, *_, c), (percent, half, *_) = (read(re.search(NUMBER, found[name])) for name in ("drawn", "p"))
        off = abs(100 * (q * b / (m * a) - 1) - percent) > half + 100 * q * b / (m * a) * (r / m + t / q)
        return off or not 0.94 < drawn * c / (m * a) < 1.01
    return False


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.parent.name)
def test_marked_numbers_and_titles_of_a_lesson_are_what_its_cells_show(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    assert list(complaints(cells, path.parent.name)) == []
    assert not [cell["id"] for cell in cells if cell["cell_type"] == "code" and MARK in "".join(cell["source"])]
    assert not [said for _, shown in sections(cells) for _, said in shown if "not calm" not in said and disagrees(said)]


def test_a_number_that_is_not_shown_and_a_title_that_is_not_drawn_are_found():
    cells = [{"cell_type": "code", "source": "# 1", "outputs": [{"text": "94.38 GB, 15.9 % of 1,437 samples, 202 ms"}]}]
    for text in ("94.4 GB", "**16 %**", "0.202 s", "1,437 samples", "94380 MB"):
        assert list(complaints([*cells, {"cell_type": "markdown", "source": f"{text}{MARK}"}])) == [], text
    for text in ("94.5 GB", "94.4 MB", "15 %", "1,438", "+1 s", "## Next\n94.4 GB", f"`94.4 GB{MARK}`"):
        (said,) = complaints([*cells, {"cell_type": "markdown", "source": text if MARK in text else f"{text}{MARK}"}])
        assert said.startswith("lesson, cell 2: "), text
    title = "the predicted band: {} %. Timeline of 4 ranks over {} ms, 9 spans. Measured 60.7 ms (52.5 ms to 74.1"
    cases = {("-9", "60.5"): 0, ("+9", "60.5"): 1, ("-9", "57.5"): 0, ("-9", "56.5"): 1, ("-9", "62"): 1}
    for (error, drawn), wrong in cases.items():
        assert disagrees(f"{title.format(error, drawn)} ms), predicted 55.4 ms (50 ms to 60 ms)") == wrong
