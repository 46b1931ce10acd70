"""Flags that say what a plan file says: one for a field of its records, with the words of their docstrings as help.

What the flags say is read as a plan file is, so that both are checked by the same code and refused in the same words.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from dataclasses import fields
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args, get_type_hints

from distlab.faces import attributes_of
from distlab.plan import AXES, SCHEDULES, Cluster, Plan, Precision, Sharding

if TYPE_CHECKING:
    from simulator import ClusterDescription, PlanFile

# Names of flags that are not called as the field is, each behind its place in a plan file.
NAMES = dict(map(str.split, Path(__file__).with_name("flags.txt").read_text(encoding="utf-8").splitlines()))
ONLY_IN_FILES = {"first_bucket_bytes", "compression", "reshard_after_forward", "prefetch", "reduce"}
ONLY_IN_FILES |= {"num_devices", "devices_per_node", "device", "intra_node", "inter_node"}
BEGIN = {"plan.data": 8}  # where neither a file nor a flag says how many
FOLLOWING = ("plan.stages_per_rank", "plan.precision.compute")  # the schedule and the model say what they are
NUMBERS = {int: r"[+-]?\d+", float: r"[+-]?(\d+\.?\d*|\.\d+)"}
MB = 1_000_000


class Flag(NamedTuple):
    """A flag for one field of a plan file: its name, the types that its value may have, its default and its help."""

    name: str
    kinds: tuple[Any, ...]
    default: Any
    text: str


@cache
def _flags() -> dict[str, Flag]:
    """Return the flag of each field that a flag can say, by its place in a plan file, such as plan.sharding.stage."""
    from simulator import ClusterDescription, ModelDescription

    records: dict[str, Any] = {"workload": ModelDescription, "cluster": ClusterDescription, "plan": Plan}
    records |= {"plan.sharding": Sharding, "plan.precision": Precision}
    found: dict[str, Flag] = {}
    for table, kind in records.items():
        home, hints, words = vars(sys.modules[kind.__module__]), get_type_hints(kind), attributes_of(kind)
        for each in fields(kind):
            path = f"{table}.{each.name}"
            if path in records or each.name in ONLY_IN_FILES:
                continue
            text = words[each.name]
            if listed := re.search(r"one of ([A-Z_]+)\b", text):
                text = text.replace(listed[1], ", ".join(home[listed[1]]))
            kinds = get_args(hints[each.name]) or (hints[each.name],)
            name = f"--{NAMES.get(path) or each.name.replace('_', '-')}"
            found[path] = Flag(name, kinds, None if path in FOLLOWING else BEGIN.get(path, each.default), text)
    what = "axes from the slowest to the fastest, the last on neighbours"
    return found | {"plan.order": Flag("--order", (str,), ",".join(AXES), what)}


def _named(text: str) -> str:
    """Write the names of flags in place of the keys of a plan file."""
    keys = {path.rpartition(".")[2]: flag.name for path, flag in _flags().items()}
    text = re.sub(r"^\[([\w.]+)\] (\w*)", lambda one: _flags().get(f"{one[1]}.{one[2]}", (one[2],))[0], text)
    return re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda one: keys.get(one[0], one[0]), text)


def add_flags(command: argparse.ArgumentParser, *said: str) -> None:
    """Declare the flags of some tables of a plan file, or of single keys; those not given are no arguments."""
    tables = dict.fromkeys(each.partition(".")[0] for each in said)
    groups = {table: command.add_argument_group(f"the {table}, as in a plan file's [{table}]") for table in tables}
    for path, flag in _flags().items():
        if (table := path.partition(".")[0]) not in said and path not in said:
            continue
        options: dict[str, Any] = {}
        text = re.sub(r"; None: (.*)$", r" (default: \1)", _named(flag.text))
        if bool in flag.kinds:
            options = {"action": argparse.BooleanOptionalAction}
        else:
            name = "NAME|FILE" if path == "cluster.name" else "NAME"
            options["metavar"] = "N" if {*flag.kinds} & {*NUMBERS} else name
            default = flag.default // MB if path == "plan.bucket_bytes" else flag.default
            text += "" if default is None else f" (default {default})"
        text = text.replace("%", "%%")
        groups[table].add_argument(flag.name, dest=path, default=argparse.SUPPRESS, help=text, **options)


def add_description(command: argparse.ArgumentParser) -> None:
    """Declare a plan file, and the flags that say the same in its place."""
    what = "a plan file, in place of the flags of its tables"
    command.add_argument("file", nargs="?", metavar="PLAN.toml", help=what)
    add_flags(command, "workload", "cluster", "plan")


def said_by(arguments: argparse.Namespace) -> PlanFile:
    """Return what the plan file says, or the flags.

    Raises:
        ValueError: it makes no sense, or there are flags beside a file.
        OSError: the file cannot be read.
    """
    from simulator import read_plan_file

    if arguments.file is None:
        return tables_said(arguments)
    if beside := [flag.name for path, flag in _flags().items() if path in vars(arguments)]:
        raise ValueError(f"{arguments.file} says all of the plan: leave out {', '.join(beside)}")
    return read_plan_file(arguments.file)


def tables_said(arguments: argparse.Namespace) -> PlanFile:
    """Return what the flags say; a ValueError has the words of a plan file, with the names of flags in it."""
    from simulator.plan_file import plan_of_tables

    tables = _tables(arguments)
    try:
        return plan_of_tables(tables)
    except ValueError as error:
        raise ValueError(_named(str(error))) from None


def _tables(arguments: argparse.Namespace) -> dict[str, Any]:
    from simulator.plan_file import cluster_table

    tables: dict[str, Any] = {}
    given = BEGIN | {path: value for path, value in vars(arguments).items() if path in _flags()}
    for path, value in given.items():
        *above, key = path.split(".")
        table = tables
        for name in above:
            table = table.setdefault(name, {})
        kinds, text = _flags()[path].kinds, str(value).strip()
        table[key] = next((n(text) for n, form in NUMBERS.items() if n in kinds and re.fullmatch(form, text)), value)
    plan, name = tables["plan"], tables.get("cluster", {}).get("name", "")
    if name.endswith(".toml"):
        tables["cluster"] = cluster_table(name, {key: own for key, own in tables["cluster"].items() if key != "name"})
    if "precision" in plan:
        plan["precision"] = {"compute": "bfloat16"} | plan["precision"]
    if (family := SCHEDULES.get(plan.get("schedule", Plan.schedule))) is not None:
        plan.setdefault("stages_per_rank", family.stages_per_rank())
    if isinstance(plan.get("bucket_bytes"), int):
        plan["bucket_bytes"] *= MB
    if "order" in plan:
        first = plan["order"].split(",")
        plan["order"] = [*(axis for axis in AXES if axis not in first), *first]
    return tables


def changed_flags(after: PlanFile, before: PlanFile) -> str:
    """Return the flags that make what the flags say a different plan."""

    def value(record: Any, path: str) -> Any:
        return reduce(lambda part, name: getattr(part, name, None), path.split("."), record)

    changed = [(flag, new) for path, flag in _flags().items() if (new := value(after, path)) != value(before, path)]
    return " ".join(flag.name if new is True else f"{flag.name} {shlex.quote(str(new))}" for flag, new in changed)


def cluster_of(said: ClusterDescription, num_ranks: int) -> Cluster:
    """Return a preset with enough devices for a number of ranks, or the cluster of a calibration file.

    Raises:
        ValueError: there is neither a preset nor a file of that name, or no stack of that name; or a stack comes with a
            file, which has what its machine reached.
    """
    from simulator.hardware import presets as hardware
    from simulator.hardware.presets import OWN

    known = hardware.names("clusters")
    if said.name in (*known, OWN):
        return said.cluster(num_ranks)
    if not Path(said.name).exists():
        own = (
            "for other hardware, write a .toml: [cluster], name = the nearest preset, device = { memory_bytes = 48e9 }"
        )
        raise ValueError(f"{said.name!r} is neither a preset nor a file; presets: {', '.join(known)}; {own}")
    if said.stack:
        raise ValueError(f"--stack {said.stack}: {said.name} has what its machine reached; leave --stack out")
    from distlab.measure import load_calibration

    return load_calibration(Path(said.name)).cluster
