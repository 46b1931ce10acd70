"""Run a lesson's lab on ranks of this machine: measure, compare with the prediction and with the reference output.

`distlab lab 03 --help` lists that lab's own flags. `--impl mine` runs your functions, those of your working copy,
instead of the reference's. The plain torchrun command that does the same is printed first.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.cli.arguments import MAX_RANKS, check_output, load_script, whole_number
from distlab.comm.command import runnable

if TYPE_CHECKING:
    from distlab.course.lab import CommonSettings


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the arguments of `distlab lab`."""
    command.add_argument("number", metavar="NN", help="which lesson's lab, such as 03")
    command.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="...", help="--ranks N and the lab's own flags (see NN --help)"
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the lab; exit 0 when every fact is right, 1 otherwise, 2 for a user's mistake."""
    number, script = find_lab(arguments.number)
    num_ranks, settings = _read_flags(number, script, arguments.flags)
    from distlab.comm.launch.fork_client import preload
    from distlab.comm.launch.script import plain_command, run_script
    from distlab.course.lab.settings import as_arguments

    given = as_arguments(settings)
    shown = os.path.relpath(script)
    if not settings.json:
        print(f"{plain_command(shown, num_ranks, given)}\n", flush=True)

    preload("distlab.course.lab")
    echo = _Echo(as_json=settings.json)
    return run_script(script, num_ranks, given, echo=echo, limit_s=settings.limit_s)


class _Echo:
    """Prints lines of ranks. Rank 0 tells the lab's story: its lines carry no rank."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    def __call__(self, rank: int, line: str) -> None:
        is_result = rank == 0 and (not self.as_json or line.startswith('{"schema"'))
        told = line if is_result else f"[rank {rank}] {line}"
        print(told, file=sys.stderr if self.as_json and not is_result else sys.stdout, flush=True)


def find_lab(name: str) -> tuple[str, Path]:
    """Return a lab's number and its script.

    Raises:
        ValueError: no lesson of that number has a lab; the text lists those that have.
    """
    from distlab.course.grading.lesson import lesson_number, lessons_folder

    number = lesson_number(name)
    labs = {path.parent.name[:2]: path for path in sorted(lessons_folder().glob("[0-9][0-9]_*/lab.py"))}
    if number not in labs:
        raise ValueError(f"there is no lab {name}; labs are {', '.join(labs) or 'none yet'}")
    return number, labs[number]


def _read_flags(number: str, script: Path, flags: list[str]) -> tuple[int, CommonSettings]:
    """Read --ranks and the lab's own flags; a mistake is one line and exit status 2."""
    from distlab.comm import device
    from distlab.course.grading.progress import MINE, working_copy
    from distlab.course.lab.settings import parser_of
    from distlab.measure import num_cores

    kind = load_settings(number, script)
    parser = parser_of(kind, f"distlab lab {number}")
    ranks = whole_number(most=MAX_RANKS)
    parser.add_argument("--ranks", type=ranks, metavar="N", help="processes to start (default: one per GPU, else 4)")
    values = vars(parser.parse_args(flags))
    num_ranks = values.pop("ranks") or device.num_gpus() or min(4, 2 * num_cores())
    try:
        if values["impl"] == MINE:
            copy = working_copy(script.parent.name)
            values["impl"] = os.path.relpath(copy)
            _tell_unpassed(number, copy.parent)
        settings = kind(**values)
        _check(settings)
        settings.nodes_of(num_ranks)
        settings.check_ranks(num_ranks)
    except ValueError as error:
        parser.error(str(error))
    return num_ranks, settings


def _tell_unpassed(number: str, folder: Path) -> None:
    """Say which answers have not passed their checks: a lab that runs a wrong one prints wrong figures."""
    from distlab.course.grading import load_lesson
    from distlab.course.grading.progress import load_progress

    passed = {name for name, entry in load_progress(folder).items() if entry.passed}
    if unpassed := [one.name for one in load_lesson(number).exercises if one.name not in passed]:
        text = f"not passed yet: {', '.join(unpassed)}. What the lab says with your version of these may be wrong"
        print(f"{text}: {runnable(f'distlab check {number}')} says what is wrong", file=sys.stderr, flush=True)


def load_settings(number: str, script: Path) -> type[CommonSettings]:
    """Load a lab's script without running it, and return the dataclass of its settings."""
    return load_script(f"distlab_lab_{number}", script).Settings  # type: ignore[no-any-return]


def _check(settings: CommonSettings) -> None:
    """Refuse, before any rank starts, files that cannot be read, a --trace that cannot be written, a missing GPU.

    Raises:
        ValueError: naming the flag and the path.
    """
    from distlab.course.grading.answer.source import read_source
    from distlab.measure import device_of

    if settings.impl.endswith((".py", ".ipynb")) or os.sep in settings.impl:
        try:
            read_source(settings.impl)
        except ValueError as error:
            raise ValueError(f"--impl {settings.impl}: {error}") from None
    for name, value in vars(settings).items():
        if isinstance(value, Path) and name != "trace" and not value.is_file():
            raise ValueError(f"--{name.replace('_', '-')} {value}: there is no such file; pass the path of a file")
    if settings.trace is not None:
        check_output("--trace", settings.trace, folder=True)
    if settings.device == "cuda":
        device_of("cuda", 0)
