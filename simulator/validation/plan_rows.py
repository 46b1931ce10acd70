"""Published steps in the words of a plan file, from `plan_rows.json`: what rows share, what each row has, its source.

Families whose rows name a structure had constants fitted to them; no constant was fitted to the others, but for rows
that are "seen": a constant was chosen with them in view, and they are a family apart. What a source does not say is at
its default, or named in a family's "what".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from simulator.models.parts import tokens_of
from simulator.plan_file import TABLES, PlanFile, plan_of_tables
from simulator.validation.case import Case

_READ = json.loads(resources.files("simulator.validation").joinpath("plan_rows.json").read_text(encoding="utf-8"))
SEEN = ", seen"
PLAN_FAMILIES: Mapping[str, Any] = {family["name"]: family for family in _READ["families"]}


def plan_cases(name: str = "") -> Iterator[Case]:
    """Yield the steps of a family; "": of all."""
    with TemporaryDirectory() as folder:
        for family in [PLAN_FAMILIES[name]] if name else PLAN_FAMILIES.values():
            for row in family["rows"]:
                yield _case(family["name"], family["common"] | dict(zip(family["columns"], row, strict=True)), folder)


def _case(family: str, values: dict[str, Any], folder: str) -> Case:
    said = _plan_file(values, Path(folder))
    workload, machine = said.made()
    machine = replace(machine, software=replace(machine.software, **values.get("software", {})))
    plan, measured = said.plan, values.get("seconds") or values.get("milliseconds", 0) / 1e3
    steps = plan.num_microbatches * plan.num_replicas / plan.world_size
    if rate := values.get("rate"):  # tokens per second of a device
        measured = tokens_of(workload) * workload.samples * steps / rate
    elif rate := values.get("tflops"):
        measured = workload.counted_flops * steps / (rate * 1e12)
    label = values.get("label") or f"{workload.name} on {plan.world_size}"
    where = (machine if "structure" not in values else values["name"], machine.software.name, measured)
    more = (values.get("choice") or "", values.get("memory_gib") or 0.0)
    family += SEEN if values.get("seen") else ""
    return Case(family, label, values.get("structure", ""), workload, plan, *where, *more)


def _plan_file(values: dict[str, Any], folder: Path) -> PlanFile:
    """Return a row as a plan file; a model may be one of the file's own, by sizes or as a configuration."""
    if (model := values.get("model")) in _READ["models"]:
        values = values | {"model": None} | _READ["models"][model]
    if config := values.get("config"):
        values["config"] = str(folder / "config.json")
        (folder / "config.json").write_text(json.dumps(config))
    said = {
        table: {each.name: values[each.name] for each in fields(kind) if values.get(each.name) is not None}
        for table, kind in TABLES.items()
        if table != "run"
    }
    return plan_of_tables(said)
