"""What each rank of the capstone does: go on from the newest checkpoint, train by the plan, save, perhaps be killed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT
from distlab.checkpoint import load, save
from distlab.comm import recorded
from distlab.comm.nodes.wire import NodePlacement
from distlab.comm.record.read import Call
from distlab.course.capstone.task import BATCH, MODEL, NODES, NUM_RANKS, BoardEntry
from distlab.elastic import Fault, Faults
from distlab.hybrid import Hybrid

LEARNING_RATE = 0.05
LOG = "updates.txt"


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
