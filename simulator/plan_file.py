"""A plan as a file: a model, a cluster and how the step is laid out, in TOML that is read, checked and written.

    [workload]                      # fields of `ModelDescription`
    model = "llama-3-70b"
    microbatch_size = 1
    lora_rank = 16                  # may be left out, as optimizer, loss_chunks and others: `distlab simulate --help`

    [cluster]                       # fields of `ClusterDescription`
    name = "dgx-h100"
    num_devices = 64

    [plan]                          # fields of `distlab.plan.Plan`, and the order of its axes
    data = 2
    tensor = 8
    pipeline = 4
    num_microbatches = 32
    sharding = { stage = 1 }

    [run]                           # may be left out; fields of `Run`
    num_tokens = 15e12
    price = 2.5                     # dollars for a device and an hour
    failures = { rate = "llama-3", restart_s = 600, storage_bytes_per_s = "bloom-2022", asynchronous = true }

    step = read_plan_file("plan.toml").simulate()

What is wrong is told in one line: the table, the key, its value, and what to write instead. Units are in names.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from distlab.plan import AXES, Cluster, Plan, Workload
from distlab.plan.mesh import check_order, sizes_of
from simulator.hardware.presets import OWN, ClusterDescription, given
from simulator.models.description import ModelDescription
from simulator.models.parts import shown
from simulator.runs.money import Run
from simulator.step.simulate import Step, simulate

# What others call our keys, or how they look without their unit.
OTHER_NAMES = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text("utf-8"))


@dataclass(frozen=True)
class PlanFile:
    """What a plan file says.

    Attributes:
        workload: the model.
        cluster: what it runs on.
        plan: how.
        order: axes from the slowest to the fastest.
        run: how long to train, at which price, with which failures; None: nothing is said of it.
    """

    workload: ModelDescription
    cluster: ClusterDescription
    plan: Plan
    order: tuple[str, ...] = AXES
    run: Run | None = None

    def __post_init__(self) -> None:
        wanted, ranks = self.cluster.num_devices, self.plan.world_size
        if wanted is not None and wanted != ranks:
            degrees = " x ".join(f"{size} ({axis})" for axis, size in zip(AXES, sizes_of(self.plan), strict=True))
            more = shown(wanted // (rest := ranks // self.plan.data))
            fix = f"for example data = {more}" if wanted % rest == 0 < wanted else f"or use a multiple of {rest}"
            differs = f"[plan] has {degrees} = {ranks} ranks and [cluster] num_devices = {shown(wanted)}"
            raise ValueError(f"{differs}: make them equal, {fix}")
        check_order(self.order)

    def simulate(self) -> Step:
        """Simulate the step.

        Raises:
            ValueError: the model or the cluster makes no sense, or the plan does not divide the model: which table.
        """
        workload, machine = self.made()
        with told_of("[plan]"):
            return simulate(workload, machine, self.plan, order=self.order)

    def made(self) -> tuple[Workload, Cluster]:
        """Return the model and the cluster.

        Raises:
            ValueError: one of them makes no sense: which table.
        """
        with told_of("[cluster]"):
            machine = self.cluster.cluster(self.plan.world_size)
        with told_of("[workload]"):
            try:
                return self.workload.workload(), machine
            except OSError as error:
                raise ValueError(f"config {error.filename}: {error.strerror}") from None

    def changed(self, plan: Plan, samples: int) -> PlanFile:
        """Return this with a different plan and so many samples in a micro-batch."""
        cluster = replace(self.cluster, num_devices=self.cluster.num_devices and plan.world_size)
        return replace(self, workload=self.workload.with_microbatch(samples), cluster=cluster, plan=plan)

    def difference(self, other: PlanFile) -> str:
        """Say what to write in this file to make it the other."""
        found = []
        for table in ("workload", "cluster", "plan"):
            old, new = getattr(self, table), getattr(other, table)
            keys = [each.name for each in fields(new) if getattr(old, each.name) != getattr(new, each.name)]
            found += [f"{key} = {_toml(getattr(new, key))} in [{table}]" for key in keys]
        return " and ".join(found)

    def text(self) -> str:
        """Return the file: what differs from defaults, and reads back as this."""
        order = {} if self.order == AXES else {"order": list(self.order)}
        machine = {"name": self.cluster.name} if self.cluster.device else {}
        tables = {"workload": given(self.workload), "cluster": machine | given(self.cluster)}
        tables["plan"] = given(self.plan) | order
        tables |= {} if self.run is None else {"run": given(self.run)}
        return "\n".join(
            f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items())
            for name, table in tables.items()
        )


def cluster_table(path: Path | str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table [cluster] of a file, which needs no other one, with what flags say in place of its own.

    Raises:
        ValueError: there is none, or something in it makes no sense, told as of a plan file.
        OSError: the file cannot be read.
    """
    with told_of(path):
        table = _tables(path).get("cluster")
        if not isinstance(table, dict):
            raise ValueError("there is no table [cluster]; write one, with keys as in a plan file's")
        if (count := table.get("num_devices")) is not None:
            raise ValueError(f"[cluster] num_devices is {count!r}; leave it out here: flags say how many")
        plan_of_tables({"cluster": {**table, **flags}}).cluster.cluster(1)
    return {**table, **flags}


def read_plan_file(path: Path | str) -> PlanFile:
    """Read a plan file.

    Raises:
        ValueError: it is no TOML, or something in it makes no sense: the file, the table, the key, and what to write.
        OSError: it cannot be read.
    """
    with told_of(path):
        return plan_of_tables(_tables(path))


def _tables(path: Path | str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # Windows' editors begin with a mark
    except UnicodeDecodeError:
        raise ValueError("this is not text in UTF-8; save it as UTF-8") from None
    except RecursionError:
        raise ValueError("tables or lists are nested too deeply; a plan file has two levels") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"this is not TOML: {error}; write key = value, each key once, below its [table]") from None


def plan_of_text(text: str) -> PlanFile:
    """Return what the text of a plan file says; see `read_plan_file`."""
    return plan_of_tables(tomllib.loads(text))


def plan_of_tables(tables: Mapping[str, Any]) -> PlanFile:
    """Return what tables of a plan file say; see `read_plan_file`."""
    if not tables:
        raise ValueError("the file is empty; write [workload], [cluster] and [plan], each with its keys below it")
    for name, table in tables.items():
        if name not in TABLES or not isinstance(table, dict):
            raise ValueError(f"{name} is not a table of a plan file; write [workload], [cluster], [plan] and [run]")
    plan = {**tables.get("plan", {})}
    order = plan.pop("order", list(AXES))
    if isinstance(names := plan.get("recompute"), list):
        plan["recompute"] = ",".join(map(str, names)) or "none"
    if not (isinstance(order, list) and all(isinstance(axis, str) for axis in order)):
        raise ValueError(f"[plan] order is {order!r}; write a list of {', '.join(AXES)}")
    said = {"workload": {}, "cluster": {}, **tables, "plan": plan}  # with their defaults, where a file leaves one out
    if "device" in said["cluster"]:  # without a preset's name, none of a preset's figures
        said["cluster"] = {"name": OWN, **said["cluster"]}
    made = {name: _record(TABLES[name], table, name) for name, table in said.items()}
    return PlanFile(**made, order=check_order(order))


@contextmanager
def told_of(where: Path | str | None) -> Iterator[None]:
    """Begin what the block raises with where it stands: a plan file, or a table of one; None: with nothing."""
    try:
        yield
    except ValueError as error:
        if where is None:
            raise
        raise ValueError(f"{where} {error}" if str(where).startswith("[") else f"{where}: {error}") from None


def _toml(value: Any) -> str:
    if is_dataclass(value):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in given(value).items()) + " }"
    return json.dumps(value)


def _record(kind: Any, table: Mapping[str, Any], where: str) -> Any:
    """Make a record from a table, each value checked against the type of its field."""
    known = {name: hint for name, hint in get_type_hints(kind).items() if name in {each.name for each in fields(kind)}}
    for key in table:
        if key not in known:
            raise ValueError(f"[{where}] has no key {key!r}; {_instead(key, list(known))}")
    values = {key: _value(known[key], value, f"[{where}] {key}") for key, value in table.items()}
    bare = [each.name for each in fields(kind) if each.default is each.default_factory is MISSING]
    if missing := [name for name in bare if name not in values]:
        raise ValueError(f"[{where}] lacks {' and '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}")
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"[{where}] {error}") from None


def _instead(key: str, known: list[str]) -> str:
    other = OTHER_NAMES.get(key.lower(), key.lower())
    longer = [name for name in known if name == other or name.startswith(f"{other}_") or name.endswith(f"_{other}")]
    elsewhere = [table for table, kind in TABLES.items() if other in {each.name for each in fields(kind)}]
    if not longer and elsewhere:
        return f"write {other} in [{elsewhere[0]}]"
    near = sorted(longer, key=len) or difflib.get_close_matches(other, known, 1)
    if near and all(name.endswith(UNITS) for name in near) and not key.endswith(UNITS):
        return f"units are in names: write {' or '.join(near)}"
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(known)}"


TABLES: Mapping[str, Any] = MappingProxyType(
    {"workload": ModelDescription, "cluster": ClusterDescription, "plan": Plan, "run": Run}
)
UNITS = ("_s", "_bytes")
_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "a text in quotes"}


def _value(hint: Any, value: Any, where: str) -> Any:
    """Return a value as its field has it.

    Raises:
        ValueError: it has a different type, infinite or not a number.
    """
    kinds = [each for each in get_args(hint) or (hint,) if each is not type(None)]
    for kind in kinds:
        if is_dataclass(kind) and isinstance(value, dict):
            return _record(kind, value, where.strip("[").replace("] ", "."))
        if kind is float and type(value) in (int, float) and math.isfinite(value):
            return float(value)
        if kind is int and type(value) is float and value.is_integer():
            return int(value)  # 25e6
        if type(value) is kind and kind is not float:
            return value
    expected = " or ".join(
        _WORDS.get(kind) or f"a table with {', '.join(each.name for each in fields(kind))}" for kind in kinds
    )
    raise ValueError(f"{where} is {json.dumps(value, default=str)}; write {expected}")
