"""The capstone: a plan of your own trains on two nodes, survives a kill, and keeps a budget of seconds and bytes.

The task comes first: a small GPT on two nodes of four ranks with a slow wire between them, and the plan to begin with.
Each rank goes on from the newest checkpoint, trains by the plan, saves, and is perhaps killed (`train`). `attempt` runs
an entry with one kill on the way, and the first plan before and after it. The class's table is one CSV file, a line per
attempt, which many may write to at once.
"""

from __future__ import annotations

import csv
import random
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
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
from distlab.elastic import Fault, Faults, run_elastic
from distlab.hybrid import Hybrid
from simulator import PlanFile, plan_of_text, read_plan_file

MODEL = GPTConfig(context=64, num_layers=4, num_heads=8, hidden_size=128, tied=False)
BATCH, UPDATES = 32, 24  # samples of an update, and updates of the run
NUM_RANKS, NODES = 8, Nodes(2, between="2MB/s,500us")
LEARNING_RATE = 0.05
LOG = "updates.txt"
PLAIN_UPDATES = 4  # of the first plan, before and after the entry's run

MOST_TIME = 1.0  # of the run by the first plan without a kill
MOST_BYTES = 300e3  # from a rank to the other node, in an update
MOST_LOSS = 1e-3  # relative difference to one process's loss in the last update
MOST_REPEATED = 3  # updates made twice because of the kill

FIRST_PLAN = Path(__file__).with_name("first_plan.txt").read_text(encoding="utf-8")  # what a learner changes


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
    def text(self) -> str:
        """The plan in a few words: its degrees above 1, micro-batches, sharding, and the order where it matters."""
        plan = self.file.plan
        axes = [f"{axis} {size}" for axis in self.file.order if (size := getattr(plan, axis)) > 1]
        more = [f"{plan.num_microbatches} micro-batches", f"save every {self.save_every}"]
        stage = [f"ZeRO-{plan.sharding.stage}"] if plan.sharding.stage else []
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
    plan, workload, fixed = entry.file.plan, entry.file.workload, first_entry().file.workload
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
    hybrid = Hybrid(new_model(), entry.file.plan, new_optimizer, order=entry.file.order)
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


class CapstoneVerdict(NamedTuple):
    """What became of an entry.

    Attributes:
        plan: in a few words.
        seed: of the kill.
        time: from the first update's start to the last one's end, the kill and what followed it included, over the time
            of the first plan's updates without a kill.
        predicted: the same ratio for one update, by the simulator.
        sent_bytes: from one rank to the other node in an update; of the rank that sent most.
        repeated: updates that were made twice.
        loss: of the last update, and its relative difference to one process's.
        loss_error: that difference.
    """

    plan: str
    seed: int
    time: float
    predicted: float
    sent_bytes: int
    repeated: int
    loss: float
    loss_error: float

    def lines(self) -> list[tuple[str, bool]]:
        """Return a sentence per bar, and whether it is kept."""
        sent, most = self.sent_bytes / 1e3, MOST_BYTES / 1e3
        bars = (
            (self.time, MOST_TIME, f"time {self.time:.2f} of the first plan's"),
            (sent, most, f"{sent:.0f} kB per rank and update to the other node"),
            (self.repeated, MOST_REPEATED, f"{self.repeated} updates made twice because of the kill"),
            (self.loss_error, MOST_LOSS, f"last loss {self.loss:.4f}, {self.loss_error:.0e} from one process's"),
        )
        return [(f"{text}, at most {most:g}", value <= most) for value, most, text in bars]

    @property
    def is_kept(self) -> bool:
        """Whether all bars are kept."""
        return all(kept for _, kept in self.lines())


def attempt(entry: BoardEntry, seed: int) -> CapstoneVerdict:
    """Train by the entry's plan through one kill, drawn from the seed; and by the first plan before and after it.

    It takes about a minute on two cores.

    Raises:
        RankError: the entry's run failed, and not because of the kill; the text begins with the root cause.
    """
    chance = random.Random(seed)
    kill = Fault("kill", chance.randrange(UPDATES // 3, UPDATES - 2), chance.randrange(NUM_RANKS), chance.random() / 10)
    first = first_entry()
    with tempfile.TemporaryDirectory(prefix="capstone-") as name:
        before, _ = _run(first, Path(name, "before"), PLAIN_UPDATES)
        made, sent = _run(entry, Path(name, "own"), UPDATES, [kill])
        after, _ = _run(first, Path(name, "after"), PLAIN_UPDATES)
    usual_s = median(one.end_s - one.start_s for one in (*before, *after) if one.number)  # the first one warms up
    predicted_s, first_s = (one.file.simulate().duration_s for one in (entry, first))
    return CapstoneVerdict(
        plan=entry.text,
        seed=seed,
        time=(made[-1].end_s - made[0].start_s) / (UPDATES * usual_s),
        predicted=predicted_s / first_s,
        sent_bytes=max(sent),
        repeated=len(made) - UPDATES,
        loss=made[-1].loss,
        loss_error=abs(made[-1].loss / train_alone(UPDATES)[-1] - 1),
    )


def _run(entry: BoardEntry, folder: Path, updates: int, faults: Sequence[Fault] = ()) -> tuple[list[Update], list[int]]:
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ranks are started anew is the task
        given = (entry, folder, updates, faults)
        sent = run_elastic(train, NUM_RANKS, args=given, max_restarts=len(faults), nodes=NODES)
    return read_log(folder), sent


class BoardRow(NamedTuple):
    """An attempt on the board."""

    name: str
    day: str
    kept: bool
    time: float
    sent_bytes: int
    repeated: int
    seed: int
    plan: str


def add_row(path: Path, name: str, verdict: CapstoneVerdict) -> None:
    """Add an attempt in one write at the end, or raise OSError: lines that others add at the same time stay whole."""
    safe = f"'{name}" if name[:1] in ("=", "+", "-", "@") else name  # no formula in a spreadsheet
    own = (verdict.is_kept, round(verdict.time, 3), verdict.sent_bytes, verdict.repeated, verdict.seed, verdict.plan)
    with path.open("a", newline="", encoding="utf-8") as file:
        head = () if file.tell() else (BoardRow._fields,)
        written = csv.writer(file, lineterminator="\n")
        written.writerows((*head, (" ".join(safe.split()), date.today().isoformat(), *own)))


def read_board(path: Path) -> list[BoardRow]:
    """Return the attempts, the best one of each name: budgets kept before others, then the shortest time.

    Raises:
        ValueError: it is not a board.
        OSError: it cannot be read.
    """
    best: dict[str, BoardRow] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.reader(file), start=1):
            if tuple(line) == BoardRow._fields:
                continue
            try:
                name, day, kept, time, sent, repeated, seed, plan = line
                row = BoardRow(name, day, kept == "True", float(time), int(sent), int(repeated), int(seed), plan)
            except ValueError:
                wrong = f"{path}, line {number}: {','.join(line)[:60]!r} is not an attempt"
                raise ValueError(f"{wrong}; pass a file that --board made") from None
            if name not in best or _order(row) < _order(best[name]):
                best[name] = row
    return sorted(best.values(), key=_order)


def _order(row: BoardRow) -> tuple[bool, float]:
    return not row.kept, row.time


def table(rows: Sequence[BoardRow]) -> str:
    """Return the board as text."""
    lines = [f"{'':3} {'name':20} {'time':>5} {'kB out':>7} {'twice':>5}  plan"]
    for place, row in enumerate(rows, start=1):
        sign = f"{place}." if row.kept else "-"
        sent = row.sent_bytes / 1e3
        lines.append(f"{sign:3} {row.name:20.20} {row.time:5.2f} {sent:7.0f} {row.repeated:5}  {row.plan}")
    return "\n".join(lines)
