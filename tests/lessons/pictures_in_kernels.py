"""Look at every picture that a lesson shows while `make test` runs its cells: one that cannot be read fails its cell.

`pytest -p tests.lessons.pictures_in_kernels` gives each kernel a startup file that calls `watch()`. Texts that lie on
each other, are cut, small or pale then raise in the cell that shows the picture, panel or timeline.
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
    """Make pictures, panels and timelines look at themselves before they are shown."""
    sys.path.append(str(ROOT / "tests" / "simulator" / "viz"))
    from simulator.viz import Panel, Picture, Timeline

    def looking(kind, figure_of, render):
        shown = kind._repr_mimebundle_

        def show(self, **options):
            require_readable(figure_of(self), render)
            return shown(self, **options)

        kind._repr_mimebundle_ = show

    looking(Picture, lambda picture: picture.figure, lambda figure: Picture(figure, "looked at").png())
    looking(Panel, lambda panel: panel.figure, None)
    looking(Timeline, lambda timeline: timeline.figure, None)


def require_readable(figure, render):
    """Raise if something cannot be read in a picture."""
    from picture_facts import faults

    found = faults(figure, render) if render else faults(figure)
    assert not found, f"this picture cannot be read: {'; '.join(found)}"
