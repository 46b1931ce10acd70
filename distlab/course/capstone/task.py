"""The capstone's task: a small GPT on two nodes of four ranks with a slow wire between them, one kill, and a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from distlab.blocks.models import GPTConfig
from distlab.comm import Nodes
from distlab.plan import Plan
from simulator import PlanFile, plan_of_text, read_plan_file

MODEL = GPTConfig(context=64, num_layers=4, num_heads=8, hidden_size=128, tied=False)
BATCH, UPDATES = 32, 24  # samples of an update, and updates of the run
NUM_RANKS, NODES = 8, Nodes(2, between="2MB/s,500us")

MOST_TIME = 1.0  # of the run by the first plan without a kill
MOST_BYTES = 300e3  # from a rank to the other node, in an update
MOST_LOSS = 1e-3  # relative difference to one process's loss in the last update
MOST_REPEATED = 3  # updates made twice because of the kill

FIRST_PLAN = """\
# Change [plan]: `distlab simulate` says what it predicts, `distlab capstone` runs it.

[workload]                  # fixed except for microbatch_size:
hidden_size = 128           # data x num_microbatches x microbatch_size is 32, the batch
num_layers = 4
num_heads = 8
vocab_size = 256
sequence_length = 64
microbatch_size = 4

[cluster]                   # for the prediction: an eighth of two cores per rank, and the two wires
name = "dgx-a100"
stack = "best-case"
num_devices = 8
devices_per_node = 4
device = { matmul_flops_per_s = 8e9, peak_flops_per_s = 16e9, memory_bytes_per_s = 2e9, kernel_s = 2e-5, launch_s = 0 }
intra_node = { latency_s = 1e-4, bytes_per_s = 1e9 }
inter_node = { latency_s = 5e-4, bytes_per_s = 2e6 }

[plan]
precision = { compute = "float32" }
data = 8
num_microbatches = 1
# order = ["data", "expert", "context", "tensor", "pipeline"]   # of the axes, the slowest wire first
"""


@dataclass(frozen=True)
class BoardEntry:
    """What a learner hands in.

    Attributes:
        file: the plan, with the model and the cluster that it was predicted for.
        save_every: updates between two checkpoints.
    """

    file: PlanFile
    save_every: int

    @property
    def plan(self) -> Plan:
        """How the ranks share the work."""
        return self.file.plan

    @property
    def text(self) -> str:
        """The plan in a few words: its degrees above 1, micro-batches, sharding, and the order where it matters."""
        axes = [f"{axis} {size}" for axis in self.file.order if (size := getattr(self.plan, axis)) > 1]
        more = [f"{self.plan.num_microbatches} micro-batches", f"save every {self.save_every}"]
        stage = [f"ZeRO-{self.plan.sharding.stage}"] if self.plan.sharding.stage else []
        return ", ".join([" x ".join(axes), *stage, *more])


def first_entry() -> BoardEntry:
    """Return the plan to begin with, which every entry is compared with."""
    return BoardEntry(plan_of_text(FIRST_PLAN), UPDATES)


def read_entry(path: Path | str, save_every: int) -> BoardEntry:
    """Read a learner's plan file.

    Raises:
        ValueError: it is not a plan file, or not for this task: what differs, and what to write.
        OSError: it cannot be read.
    """
    entry = BoardEntry(read_plan_file(path), save_every)
    if not 1 <= save_every <= UPDATES:
        raise ValueError(f"--save-every is {save_every}; pass a number of updates from 1 to {UPDATES}")
    plan, workload, fixed = entry.plan, entry.file.workload, first_entry().file.workload
    parts, samples = plan.num_replicas * plan.num_microbatches, workload.microbatch_size
    wrong = ""
    if plan.world_size != NUM_RANKS:
        wrong = f"the plan has {plan.world_size} ranks; the task has {NUM_RANKS}: let the degrees make {NUM_RANKS}"
    elif replace(workload, microbatch_size=fixed.microbatch_size) != fixed:
        wrong = "[workload] is of a different model; change microbatch_size alone"
    elif parts * samples != BATCH:
        fix = f"microbatch_size = {BATCH // parts}" if BATCH % parts == 0 else "fewer replicas or micro-batches"
        wrong = f"{plan.num_replicas} replicas x {plan.num_microbatches} micro-batches x {samples} samples make "
        wrong += f"{parts * samples}; the batch has {BATCH}: write {fix}"
    try:
        if wrong:
            raise ValueError(wrong)
        entry.file.simulate()
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return entry
