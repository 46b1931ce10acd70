"""How long a reader waits for a Panel, a Timeline, schedules, degrees: from key press to painted frame, in a browser.

The harness and the exact meaning of the times are those of the browser tests (tests/browser/speed.py). The browser is
headless and paints without a GPU, so a frame costs more here than on a reader's screen.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _rows import Row, absolute
from _script import run_script

HARNESS = Path(__file__).resolve().parents[1] / "tests" / "browser"
REPEATS, QUICK_REPEATS = 20, 4


def rows(quick: bool = False) -> Iterator[Row]:
    """Measure the widgets one after the other; without a browser say so and give no row."""
    sys.path.insert(0, str(HARNESS))
    try:
        import browser_lab
        import speed
    finally:
        sys.path.remove(str(HARNESS))
    if lacks := browser_lab.missing():
        print(f"widgets are not measured: {lacks}", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(prefix="distlab-widgets-") as folder:
        root = Path(folder) / "root"
        root.mkdir()
        browser_lab.write_notebook(root / "speed.ipynb", [*speed.CELLS, *speed.SCHEDULES, *speed.DEGREES])
        with browser_lab.open_lab(root, "speed.ipynb") as notebook:
            notebook.run_all()
            repeats = QUICK_REPEATS if quick else REPEATS
            measures = (speed.measure, speed.measure_schedules, speed.measure_degrees)
            found = itertools.chain.from_iterable(measure(notebook, repeats) for measure in measures)
            for claim, waits_s, bar_s in found:
                slow = speed.slowdown(notebook)
                late_s = float(np.percentile(waits_s, 95))
                note = f"p95 {late_s:.3f} s; headless Chromium, no GPU; other work slowed the kernel {slow:.1f} times"
                yield absolute(claim, waits_s, bar=bar_s, unit="s", note=note)


if __name__ == "__main__":
    run_script(__doc__, rows)
