"""The capstone's task: a small GPT on two nodes of four ranks with a slow wire between them, one kill, and a budget.

Each rank goes on from the newest checkpoint, trains by the plan, saves, and is perhaps killed (`train`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.checkpoint import load, save
from distlab.comm import Nodes, recorded
from distlab.comm.nodes.wire import NodePlacement
from distlab.comm.record.read import Call
from distlab.elastic import Fault, Faults
from distlab.hybrid import Hybrid
from distlab.plan import Plan
from simulator import PlanFile, plan_of_text, read_plan_file

MODEL = GPTConfig(context=64, num_layers=4, num_heads=8, hidden_size=128, tied=False)
BATCH, UPDATES = 32, 24  # samples of an update, and updates of the run
NUM_RANKS, NODES = 8, Nodes(2, between="2MB/s,500us")
LEARNING_RATE = 0.05
LOG = "updates.txt"

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


class Update(NamedTuple):
    """One update as rank 0 wrote it down: its number, when it began and ended (time.monotonic), and its loss."""

    number: int
    start_s: float
    end_s: float
    loss: float


def train(entry: BoardEntry, folder: Path, updates: int, faults: Sequence[Fault] = ()) -> int:
    """Run on each rank: train until the last update; return the bytes that this rank sent to the other node in one."""
    torch.set_num_threads(1)
    corpus, rank = ByteCorpus(python_documentation(), MODEL.context), dist.get_rank()
    hybrid = Hybrid(new_model(), entry.plan, new_optimizer, order=entry.file.order)
    plan = Faults(faults, folder)
    try:
        resumed = load(folder, parts={"training": hybrid})
        start = 0 if resumed is None else resumed.step
        for number in range(start, updates):
            plan.before_step(number, rank, NUM_RANKS)
            start_s, batch = time.monotonic(), corpus.batch(number, BATCH)
            with recorded() if number == start else nullcontext() as seen:  # all updates make the same calls
                loss = float(hybrid.train_step(*batch))
            if seen is not None:
                recording = seen
            if rank == 0:
                with (folder / LOG).open("a") as log:
                    log.write(f"{number} {start_s} {time.monotonic()} {loss}\n")
            if number + 1 < updates and (number + 1) % entry.save_every == 0:
                save(folder, number + 1, parts={"training": hybrid})
    finally:
        hybrid.close()
    assert recording.records is not None, "the block has ended"
    return sum(bytes_to_other_nodes(call) for call in recording.records.calls(rank))


def read_log(folder: Path) -> list[Update]:
    """Return the updates that were made, in the order in which they were; those made twice are there twice."""
    rows = [line.split() for line in (folder / LOG).read_text().splitlines()]
    return [Update(int(number), float(start), float(end), float(loss)) for number, start, end, loss in rows]


def train_alone(updates: int) -> list[float]:
    """Return the losses of one process that trains on the whole batches."""
    model, corpus, losses = new_model(), ByteCorpus(python_documentation(), MODEL.context), []
    optimizer = new_optimizer(list(model.parameters()))
    for number in range(updates):
        inputs, targets = corpus.batch(number, BATCH)
        optimizer.zero_grad()
        loss = GPT.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def new_model() -> GPT:
    """Return the model that everything starts from."""
    return GPT(MODEL, torch.Generator().manual_seed(0))


def new_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer: momentum, in which a wrong scale of a gradient shows (Adam hides it)."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def bytes_to_other_nodes(call: Call) -> int:
    """Return the bytes that a rank sent to other nodes for one call."""
    each = NUM_RANKS // NODES.count
    if call.op in ("send", "recv"):
        return call.num_bytes if call.op == "send" and call.rank // each != call.peer // each else 0
    place = NodePlacement.of(call.group, call.group.index(call.rank), each)
    return place.bytes_out(call.op, call.num_bytes)
