"""`lab`: a lesson's lab on ranks of this machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from distlab.cli.command import NUM_RANKS, check_output, flag, load_script
from distlab.comm.command import runnable
from distlab.course.flags import Parser
from distlab.course.grading.lesson import lesson_number, lessons_folder
from distlab.course.grading.progress import MINE, load_progress, working_copy

if TYPE_CHECKING:
    from distlab.course.lab import CommonSettings


@flag("number", metavar="NN", help="which lesson's lab, such as 03")
@flag("flags", nargs=argparse.REMAINDER, metavar="...", help="--ranks N and the lab's own flags (see NN --help)")
def lab(arguments: argparse.Namespace) -> int:
    """Run a lesson's lab on ranks of this machine: measure, compare with the prediction and with the reference output.

    `distlab lab 03 --help` lists that lab's own flags. `--impl mine` runs your functions, those of your working copy,
    instead of the reference's. The plain torchrun command that does the same is printed first.
    """
    number, script = find_lab(arguments.number)
    num_ranks, settings, given = read_flags(number, script, arguments.flags)
    from distlab.comm.launch.fork_client import preload
    from distlab.comm.launch.script import plain_command, run_script

    if not settings.json:
        print(f"{plain_command(os.path.relpath(script), num_ranks, given)}\n", flush=True)

    def echo(rank: int, line: str) -> None:  # rank 0 tells the lab's story: its lines carry no rank
        is_result = rank == 0 and (not settings.json or line.startswith('{"schema"'))
        out = sys.stderr if settings.json and not is_result else sys.stdout
        print(line if is_result else f"[rank {rank}] {line}", file=out, flush=True)

    preload("distlab.course.lab")
    return run_script(script, num_ranks, given, echo=echo, limit_s=settings.limit_s)


def find_lab(name: str) -> tuple[str, Path]:
    """Return a lab's number and its script.

    Raises:
        ValueError: no lesson of that number has a lab; the text lists those that have.
    """
    number = lesson_number(name)
    labs = {path.parent.name[:2]: path for path in sorted(lessons_folder().glob("[0-9][0-9]_*/lab.py"))}
    if number not in labs:
        raise ValueError(f"there is no lab {name}; labs are {', '.join(labs) or 'none yet'}")
    return number, labs[number]


def read_flags(number: str, script: Path, flags: list[str]) -> tuple[int, CommonSettings, list[str]]:
    """Read --ranks and the lab's own flags, and return the latter as given too; a mistake ends with exit status 2."""
    from distlab.comm import device
    from distlab.course.lab.settings import parser_of
    from distlab.measure import num_cores

    kind = load_settings(number, script)
    ranks, parser = Parser(add_help=False, allow_abbrev=False), parser_of(kind, f"distlab lab {number}")
    for each in (ranks, parser):
        each.add_argument("--ranks", type=NUM_RANKS, metavar="N", help="processes (default: one per GPU, else 4)")
    values = vars(parser.parse_args(flags))
    num_ranks = values.pop("ranks") or device.num_gpus() or min(4, 2 * num_cores())
    try:
        if values["impl"] == MINE:
            _tell_unpassed(number, working_copy(script.parent.name).parent)
        settings = kind(**values)
        _check(settings)
        settings.nodes_of(num_ranks)
        settings.check_ranks(num_ranks)
    except ValueError as error:
        parser.error(str(error))
    return num_ranks, settings, ranks.parse_known_args(flags)[1]


def load_settings(number: str, script: Path) -> type[CommonSettings]:
    """Load a lab's script without running it, and return the dataclass of its settings."""
    return load_script(f"distlab_lab_{number}", script).Settings  # type: ignore[no-any-return]


def _tell_unpassed(number: str, folder: Path) -> None:
    """Say which answers have not passed their checks: a lab that runs a wrong one prints wrong figures."""
    from distlab.course.grading import load_lesson

    passed = {name for name, entry in load_progress(folder).items() if entry.passed}
    if unpassed := [one.name for one in load_lesson(number).exercises if one.name not in passed]:
        text = f"not passed yet: {', '.join(unpassed)}. What the lab says with your version of these may be wrong"
        print(f"{text}: {runnable(f'distlab check {number}')} says what is wrong", file=sys.stderr, flush=True)


def _check(settings: CommonSettings) -> None:
    """Refuse, before any rank starts, files that cannot be read, a --trace that cannot be written, a missing GPU."""
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
    check_output("--trace", settings.trace, folder=True)
    if settings.device == "cuda":
        device_of("cuda", 0)
