"""Derive published steps, memory, bubbles and collectives again, and print how near the simulator comes.

Each family of steps is predicted three times: with the constants of the package, with constants fitted without the
row's own structure (its size, cluster or schedule), and from data sheets alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from distlab.cli.arguments import check_output


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab validate`."""
    command.add_argument("--json", action="store_true", help="print scores and rows as JSON")
    command.add_argument("--page", type=Path, metavar="FILE", help="write them as a page (.md), its pictures beside it")
    command.add_argument("--refit", action="store_true", help="print each stack's constants, fitted again, and stop")


def main(arguments: argparse.Namespace) -> int:
    """Predict everything, print it, and write the page where one was asked for."""
    from simulator.validation import report

    if arguments.page:
        check_output("--page", arguments.page)
    if arguments.refit:
        for stack in report.refit(_tell):
            print(
                f"{stack.name}: "
                + ", ".join(f"{name} = {getattr(stack, name):.4g}" for name in report.FITTED[stack.name])
            )
        return 0
    families = report.validate(_tell)
    _tell("tables")
    tables = report.derived()
    if arguments.page:
        from simulator.validation.page import write_page

        write_page(arguments.page, families, tables)
    if arguments.json:
        print(json.dumps(report.facts(families, tables), indent=2))
    else:
        print(report.text(families, tables))
    return 0


def _tell(name: str) -> None:
    """Say on standard error what is predicted next."""
    print(f"predicting {name} ...", file=sys.stderr, flush=True)
