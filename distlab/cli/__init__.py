"""The command line: `distlab doctor`, `tour`, `calibrate`, `simulate`, `plan`, `cost`, `export`, `bench`, ...

A user's mistake is one line on standard error and exit status 2; a job that failed is its own report and exit status 1.
Files: `machine`, `tour`, `claims` (this machine and what runs on it), `simulate`, `plan` (no rank is started; `flags`
says what a plan file says), `course` (lessons, labs, answers, grades). `command` is what all share.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence

import distlab
from distlab.cli import claims, course, machine, plan, simulate, tour
from distlab.course.flags import Parser
from distlab.faces import version

_EVERY = (
    *(machine.doctor, tour.tour, machine.calibrate, simulate.simulate, plan.plan, plan.cost, claims.validate),
    *(simulate.export, claims.bench, claims.gpu, simulate.profile, course.lab, course.lesson, course.check),
    *(course.capstone, course.release, course.grade, machine.where),
)
COMMANDS = {command.run.__name__: command for command in _EVERY}


def parser(wanted: str | None = None) -> Parser:
    """Return the parser of the command line; `wanted`: the one command whose flags are needed, None: all."""
    top = Parser(prog="distlab", description=distlab.__doc__.splitlines()[0] if distlab.__doc__ else None)
    top.add_argument("--version", action="version", version=f"distlab {version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        words = inspect.getdoc(command.run) or ""
        own = commands.add_parser(name, help=words.splitlines()[0].rstrip("."), description=words)
        for declare in command.declare if wanted in (name, None) else ():  # some are made from the simulator's records
            declare(own)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser(given[0] if given else "").parse_args(given)
    prog = f"distlab {arguments.command}"
    try:
        return COMMANDS[arguments.command].run(arguments)
    except (ValueError, OSError) as error:
        said = " ".join(str(error).split())
        if isinstance(error, OSError) and error.strerror:
            said = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print(f"{prog}: {said}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("distlab", "simulator"):
            raise
        print(f"{prog}: needs {error.name}, which is not installed; see Install in README.md", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted; every rank was stopped", file=sys.stderr)
        return 130
    except RuntimeError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
