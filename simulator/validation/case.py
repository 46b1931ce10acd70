"""One published step: what ran, on what, how long it took, and what the simulator says."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from distlab.plan import Cluster, Plan, Precision, Workload
from simulator.hardware.presets import Stack, cluster, stack as stack_named
from simulator.models.gpt import gpt_workload
from simulator.step.result import Step
from simulator.step.simulate import simulate

Row = Mapping[str, Any]
MEGATRON = Precision("bfloat16", gradients="float32")
SIXTEEN_BITS = Precision("bfloat16", gradients="bfloat16", reduce="bfloat16")


@dataclass(frozen=True, eq=False)
class Case:
    """A published step.

    Attributes:
        family: the table that it is from.
        label: what tells it from the others of its family.
        structure: what it shares with those that are left out together with it: a size, a cluster, a schedule; "": no
            constant was fitted to it.
        workload: the model.
        plan: how it ran.
        cluster: the preset that it ran on, or, with figures in place of the preset's, all of it.
        stack: the preset of its software.
        measured_s: the published time of a step, or what follows from the published rate.
        choice: cases with one name here are alternatives for one model and batch; "": none.
        memory_gib: what the fullest rank was published to hold; 0: not said.
    """

    family: str
    label: str
    structure: str
    workload: Workload
    plan: Plan
    cluster: str | Cluster
    stack: str
    measured_s: float
    choice: str = ""
    memory_gib: float = 0.0

    def predict_s(self, stack: Stack | None = None, *, measured: bool = True) -> float:
        """Return the predicted time of each step in a run (`Step.steady_s`).

        Args:
            stack: in place of the case's own.
            measured: False: by the data sheet alone.
        """
        return self.step(self.machine(stack, measured=measured)).steady_s

    def step(self, machine: Cluster | None = None) -> Step:
        """Simulate the step, on its own cluster or on a different one."""
        return simulate(self.workload, machine or self.machine(), self.plan)

    def machine(self, stack: Stack | None = None, *, measured: bool = True) -> Cluster:
        """Return the cluster in whole nodes, driven by the case's stack or a different one; see `predict_s`."""
        if isinstance(self.cluster, Cluster):
            return self.cluster
        per_node = cluster(self.cluster).devices_per_node
        num_devices = -(-self.plan.world_size // per_node) * per_node
        return cluster(self.cluster, num_devices, measured=measured, stack=stack or stack_named(self.stack))


@cache
def read_table(name: str) -> tuple[Row, ...]:
    """Return the rows of a published table, by its file's name without ".csv"; what is a number is one."""
    text = resources.files("simulator.validation").joinpath(f"tables/{name}.csv").read_text(encoding="utf-8")
    return tuple({key: _number(value) for key, value in row.items()} for row in csv.DictReader(text.splitlines()))


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


@cache
def gpt(hidden: int, layers: int, heads: int, sequence: int, batch: int, vocabulary: int = 51200) -> Workload:
    """Return a GPT with plain attention; by default of the vocabulary that most sources have."""
    return gpt_workload(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        sequence_length=sequence,
        vocab_size=vocabulary,
        microbatch_size=batch,
    )


def plan_of(batch: int, samples: int, *, data: int = 1, stages: int = 1, **own: Any) -> Plan:
    """Return the plan of a batch in micro-batches of so many samples, its layers cut by blocks unless told.

    Several stages on each rank are interleaved.
    """
    kind = "interleaved" if stages > 1 else "one_f_one_b"
    layout: dict[str, Any] = {"schedule": kind, "stages_per_rank": stages, "cut": "blocks"} | own
    return Plan(data=data, num_microbatches=batch // data // samples, **layout)
