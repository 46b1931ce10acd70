"""Print a plan in the words of a different tool: its configuration, its flags, or what starts the ranks.

The plan is a file, or the flags of distlab simulate. A part that the tool cannot express is refused in one line;
deepspeed and fsdp2, whose users write code of their own, leave it out and say where it goes. That, and what the tool
does otherwise, is said on standard error, or in comments where the file takes them.
"""

from __future__ import annotations

import argparse
import sys

from distlab.cli.arguments import positive_number
from distlab.cli.predict.flags import add_description, said_by

TOOLS = ("deepspeed", "fsdp2", "torchtitan", "megatron", "accelerate", "torchrun", "slurm", "pytorchjob", "jobset")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab export`."""
    command.add_argument("--to", required=True, choices=TOOLS, help="whose words to print")
    what = "clip the gradients' norm (default: do not)"
    command.add_argument("--max-norm", type=positive_number, metavar="NORM", help=what)
    what = "name of the model's list of layers, for FSDP2 (default blocks)"
    command.add_argument("--blocks", default="blocks", metavar="NAME", help=what)
    what = "what a launcher runs, with its arguments (default train.py)"
    command.add_argument("--script", default="train.py", metavar="WORDS", help=what)
    what = "the container of pytorchjob and jobset (default pytorch/pytorch:latest)"
    command.add_argument("--image", default="pytorch/pytorch:latest", help=what)
    add_description(command)


def main(arguments: argparse.Namespace) -> int:
    """Print the file to standard output, and notes to standard error."""
    from simulator.export import Options, export
    from simulator.plan_file import told_of

    said = said_by(arguments)
    options = Options(arguments.max_norm, arguments.blocks, arguments.script, arguments.image)
    with told_of(arguments.file):
        found = export(said, arguments.to, options)
    print(found.text, end="")
    for note in found.notes:
        print(f"# {note}", file=sys.stderr)
    return 0
