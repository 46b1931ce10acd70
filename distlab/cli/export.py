"""Print a plan in the words of another tool: a DeepSpeed configuration or FSDP2 code.

The plan's flags are those of distlab simulate. What the tool cannot be told is said on standard error (DeepSpeed, whose
JSON has no comments) or in comments (FSDP2), and nothing is left out in silence.
"""

from __future__ import annotations

import argparse
import json
import sys

from distlab.cli.plan_arguments import add_model_arguments, add_plan_arguments, description_of, plan_of

TOOLS = ("deepspeed", "fsdp2")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab export`."""
    command.add_argument("tool", choices=TOOLS, help="whose configuration to print")
    add_model_arguments(command)
    add_plan_arguments(command)
    command.add_argument("--max-norm", type=_norm, metavar="NORM", help="clip the gradients' norm (default: do not)")
    what = "name of the model's list of layers, for FSDP2 (default blocks)"
    command.add_argument("--blocks", default="blocks", metavar="NAME", help=what)


def main(arguments: argparse.Namespace) -> int:
    """Print the configuration to standard output, ready for a file."""
    from simulator.export import deepspeed_config, deepspeed_notes, fsdp2_code

    plan, workload = plan_of(arguments), description_of(arguments).workload()
    if arguments.tool == "fsdp2":
        print(fsdp2_code(plan, layers=arguments.blocks, max_norm=arguments.max_norm), end="")
        return 0
    config = deepspeed_config(plan, max_norm=arguments.max_norm, microbatch_size=workload.samples, workload=workload)
    print(json.dumps(config, indent=2))
    for note in deepspeed_notes(plan):
        print(f"# {note}", file=sys.stderr)
    return 0


def _norm(text: str) -> float:
    """Convert, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a norm; pass a positive number, such as 1.0")
    return value
