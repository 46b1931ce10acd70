"""Look at every picture that a lesson shows while `make test` runs its cells: one that cannot be read fails its cell.

`pytest -p tests.lessons.pictures_in_kernels` gives each kernel a startup file that calls `watch()`. Texts that lie on
each other, are cut, small or pale, light or dark, then raise in the cell that calls `show(figure, text)`.
"""

import functools
import os
import sys
import tempfile
from pathlib import Path

STARTUP = "import sys; sys.path.append({root!r}); from tests.lessons.{module} import {function}; {function}()\n"
ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config):
    sys.modules.setdefault("rfc3987_syntax", None)  # as in tests/conftest.py, which is none of the notebooks'
    at_start_of_kernels("pictures_in_kernels", "watch")


def at_start_of_kernels(module, function):
    """Let each kernel that this process starts call a function of this folder."""
    text = STARTUP.format(root=str(ROOT), module=module, function=function)
    (_startup_folder() / f"00-{module}.py").write_text(text)


@functools.cache
def _startup_folder():
    folder = Path(tempfile.mkdtemp(prefix="distlab-ipython-"))
    startup = folder / "profile_default" / "startup"
    startup.mkdir(parents=True)
    os.environ["IPYTHONDIR"] = str(folder)
    return startup


def watch():
    """Make `show` look at each picture before it shows it. What was painted to be looked at is what is shown."""
    sys.path.append(str(ROOT / "tests" / "simulator" / "viz"))
    from distlab.notebook import display

    shown, paint = display.show, display.png_of

    def show(figure, text):
        painted = {}

        def png_of(figure, *, dark=False):
            if dark not in painted:
                painted[dark] = paint(figure, dark=dark)
            return painted[dark]

        display.png_of = png_of
        try:
            if not isinstance(figure, bytes):
                faults = faults_of(figure, png_of)
                assert not faults, f"this picture cannot be read: {'; '.join(faults)}"
            shown(figure, text)
        finally:
            display.png_of = paint

    display.show = show


def faults_of(figure, png_of):
    """Return what cannot be read in a picture that `show` shows."""
    from picture_facts import clashes, look_at, pale_texts, small_texts

    from simulator.viz.drawing.paint import flip
    from simulator.viz.drawing.style import LEAST_PT

    light, dark = look_at(figure, png_of), look_at(figure, lambda figure: png_of(figure, dark=True), flip)
    return [*clashes(light), *pale_texts(light), *small_texts(light, LEAST_PT), *clashes(dark), *pale_texts(dark)]
