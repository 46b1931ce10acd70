"""The command line: `distlab doctor`, `tour`, `calibrate`, `simulate`, `plan`, `cost`, `export`, `bench`, ...

A user's mistake is one line on standard error and exit status 2; a job that failed is its own report and exit status 1.
Rooms: `measure` (this machine and what runs on it), `predict` (no rank is started), `course` (lessons, labs, grades).
All use `arguments` (numbers, paths, scripts).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import distlab
from distlab.cli.course import capstone, check, grade, lab, lesson, release
from distlab.cli.measure import bench, calibrate, doctor, gpu, profile, tour, where
from distlab.cli.predict import cost, export, plan, simulate, validate
from distlab.comm.command import runnable
from distlab.faces import version

COMMANDS = {
    "doctor": doctor,
    "tour": tour,
    "calibrate": calibrate,
    "simulate": simulate,
    "plan": plan,
    "cost": cost,
    "validate": validate,
    "export": export,
    "bench": bench,
    "gpu": gpu,
    "profile": profile,
    "lab": lab,
    "lesson": lesson,
    "check": check,
    "capstone": capstone,
    "release": release,
    "grade": grade,
    "where": where,
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line, and where help is."""
        self.exit(2, f"{self.prog}: {message} (see {runnable(self.prog)} --help)\n")


def parser(wanted: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line; `wanted`: the one command whose flags are needed, None: all."""
    top = _Parser(prog="distlab", description=distlab.__doc__.splitlines()[0] if distlab.__doc__ else None)
    top.add_argument("--version", action="version", version=f"distlab {version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, module in COMMANDS.items():
        lines = (module.__doc__ or "").strip().splitlines()
        command = commands.add_parser(name, help=lines[0].rstrip("."), description=(module.__doc__ or "").strip())
        if wanted in (name, None):  # the flags of some are made from the simulator's records
            module.add_arguments(command)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser(given[0] if given else "").parse_args(given)
    prog = f"distlab {arguments.command}"
    try:
        status: int = COMMANDS[arguments.command].main(arguments)
        return status
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
