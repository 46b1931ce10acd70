"""`pytest -p tests.lessons.short_kernels`: checks and measurements in kernels take seconds, for `make test`.

A check runs on 3 ranks, or on the last of its exercise's numbers; one that finds a stub wrong fails its cell
(test_bodies.py checks the solutions). A measurement takes one short window. What no cell compares is smaller: timings,
drawn trainings and maps. `make soak` runs the cells as they are.
"""

import importlib
import tomllib
from pathlib import Path

from tests.lessons.pictures_in_kernels import at_start_of_kernels

SMALLER = tomllib.loads(Path(__file__).with_name("short_kernels.toml").read_text("utf-8"))


def smaller(lines: list[str], lesson: str) -> list[str]:
    """Return the lines of a cell of a lesson as `make test` runs them."""
    text = "".join(lines)
    for whole, small in SMALLER.get(lesson, {}).items():
        text = text.replace(whole, small)
    return text.splitlines(keepends=True)


def pytest_configure(config):
    at_start_of_kernels("short_kernels", "shorten")


def shorten():
    """Make it so in this kernel, and where its ranks are forked."""
    from IPython import get_ipython

    from distlab.comm.launch import fork_client

    get_ipython().input_transformers_cleanup.append(lambda lines: smaller(lines, Path.cwd().name[:2]))
    fork_client.PRELOAD += ("tests.lessons.one_window",)
    check = importlib.import_module("distlab.course.grading.check")
    on_all = check.examine

    def examine(exercise, fn, *, worlds=None, seed=None):
        chosen = (3,) if 3 in exercise.worlds else exercise.worlds[-1:]
        report = on_all(exercise, fn, worlds=worlds or chosen, seed=seed)
        assert report.verdict != "wrong" or exercise.broken, str(report)
        return report

    check.examine = examine
