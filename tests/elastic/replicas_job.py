"""What tests of replicas share: a small training that is killed at chosen moments, and the run that was told of it.

A plan is a list of (moment, number, step): what happens once, to the replica with that number, in that step or later.

- "step": it is killed when the step begins. "reduced", "voted": killed with the sum, and with the vote's result.
- "forming", "formed": killed before and after it makes its part of a new group. "giving": when it gives its state.
- "sum lost", "vote lost": it fails as if a connection broke when it has the result, and lives.
- "stop": it is stopped for 1.8 s. "raise": it raises. "nan": its gradient is NaN. "grow": its model gets a buffer.
- "kill store": it kills the process that serves the store.
- A number in place of a name: it is killed so many seconds after the step's begin.
"""

import hashlib
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from distlab.blocks.data import SampleOrder
from distlab.comm import recorded
from distlab.elastic import BatchRule, Replicas, Work, replicas as room
from distlab.plan import split_evenly

OPTIMIZERS = {"sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9), "adamw": partial(torch.optim.AdamW, lr=0.01)}
WORK = Work(BatchRule(13), 200, seed=3)
GROWING = Work(BatchRule(12, world_size=3, lr="linear"), 200, seed=3, lr=0.05)


def new_run(optimizer, width=16, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
    return model, OPTIMIZERS[optimizer](model.parameters())


def loss_of(model, samples):
    draws = torch.Generator().manual_seed(1)
    inputs, targets = (torch.randn(WORK.num_samples, size, generator=draws) for size in (8, 3))
    return ((model(inputs[samples]) - targets[samples]) ** 2).mean() / model[0].out_features


def bits_of(model, optimizer):
    moments = [value for kept in optimizer.state.values() for value in kept.values() if torch.is_tensor(value)]
    data = [one.detach().numpy().tobytes() for one in [*model.parameters(), *moments]]
    return hashlib.sha256(b"".join(data)).hexdigest()[:16]


class Trouble:
    """Lets the plan happen to one replica."""

    def __init__(self, plan, number, folder, store):
        self.store = store
        self.plan, self.number, self.folder, self.step = plan, number, Path(folder), 0
        self.calls = {name: getattr(room, name) for name in ("init_group", "all_gather_bytes")}
        room.init_group = partial(self.around, "forming", "formed", None, self.calls["init_group"])
        room.all_gather_bytes = partial(self.around, None, "voted", "vote lost", self.calls["all_gather_bytes"])
        dist.all_reduce = partial(self.around, None, "reduced", "sum lost", dist.all_reduce)
        room.shared_state = partial(self.around, "giving", None, None, room.shared_state)

    def is_due(self, moment):
        for index, (name, number, step) in enumerate(self.plan):
            if number == self.number and step <= self.step and (name == moment if moment else isinstance(name, float)):
                with suppress(FileExistsError):
                    os.close(os.open(self.folder / f"mark-{index}", os.O_CREAT | os.O_EXCL))
                    return name
        return None

    def kill(self):
        (self.folder / f"killed-{time.monotonic()}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def around(self, before, after, lost, call, *args, **options):
        if before and self.is_due(before):
            self.kill()
        result = call(*args, **options)
        if after and self.is_due(after):
            self.kill()
        if lost and self.is_due(lost):
            raise RuntimeError("connection reset by peer")
        return result

    def begin(self, step):
        self.step = step
        if (seconds := self.is_due(None)) is not None:
            threading.Timer(seconds, self.kill).start()
        if self.is_due("step"):
            self.kill()
        if self.is_due("kill store"):
            os.kill(self.store, signal.SIGKILL)
        if self.is_due("stop"):
            subprocess.Popen(["sh", "-c", f"sleep 1.8; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.is_due("raise"):
            raise OSError("no such sample")


def train(
    seat, folder, plan, optimizer="adamw", backend="shared", work=WORK, pause_s=0.01, width=16, store=None, seed=0
):
    """Train; return the final bits, the history, and when each update was made."""
    trouble, times = Trouble(plan, seat.number, folder, store), []
    model, update = new_run(optimizer, width, seed)
    parts = {"model": model, "optimizer": update}
    with Replicas(seat, parts, work=work, backend=backend) as replicas:
        for step in replicas:
            trouble.begin(step.number)
            is_whole = not replicas.history or len(replicas.history[-1][2]) == seat.num_replicas
            time.sleep(pause_s if is_whole else 15 * pause_s)  # a new process takes some time
            update.zero_grad()
            loss_of(model, step.samples).backward()
            if trouble.is_due("nan"):
                model[0].weight.grad[0, 0] = float("nan")
            if trouble.is_due("grow"):
                model.register_buffer("seen", torch.zeros(1))
            replicas.commit(update.step)
            times.append(time.monotonic())
    changes = [*replicas.history, (replicas.step, (), ())]
    steps = [who for (first, *who), (last, *_) in pairwise(changes) for _ in range(last - first)]
    return bits_of(model, update), [tuple(who) for who in steps], times


def in_words(seat, folder, plan, as_number=None, store=None, different=None, **options):
    """Train and return the history; of an error, its kind and text.

    Args:
        as_number: number of the replica that comes with the number 0.
        store: process that the first one kills in step 4.
        different: what replica 1 builds its model with.
    """
    if store is not None and seat.number == 0:
        plan = [*plan, ("kill store", 0, 4)]
    try:
        own = seat._replace(number=0) if seat.number == as_number else seat
        time.sleep(own is not seat)  # the one that has the number comes first
        if different and seat.number == 1:
            options |= different
        return train(own, folder, plan, store=store, **options)[1]
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def calls_of(seat, num_samples):
    """Train and return what this replica called, as (operation, bytes)."""
    model, update = new_run("sgd")
    work = Work(BatchRule(4), num_samples)
    with recorded(seat.number) as calls, Replicas(seat, {"model": model, "optimizer": update}, work=work) as replicas:
        for step in replicas:
            loss_of(model, step.samples).backward()
            replicas.commit(update.step)
    return [(call.op, call.num_bytes) for call in calls.records.calls(seat.number)]


def told(history, optimizer, work=WORK, width=16):
    """Train among those that a history names, on ranks that nothing happens to; return the final bits."""
    model, update = new_run(optimizer, width)
    rank, position, order = dist.get_rank(), 0, SampleOrder(work.num_samples, work.seed)
    groups = {members: dist.new_group(list(members)) for members in dict.fromkeys(done for _, done in history)}
    for deal, done in history:
        batch = work.batch_at(position, len(deal))
        parts = dict(zip(deal, split_evenly(batch, len(deal)), strict=True))
        total = sum(stop - start for number, (start, stop) in parts.items() if number in done)
        update.zero_grad()
        flat = torch.zeros(sum(one.numel() for one in model.parameters()))
        if rank in done:
            start, stop = parts[rank]
            loss_of(model, torch.from_numpy(order.samples(position + start, position + stop))).backward()
            flat = torch.cat([one.grad.flatten() for one in model.parameters()]) * ((stop - start) / total)
            dist.all_reduce(flat, group=groups[done])
        dist.broadcast(flat, done[0])  # those that were not there get the same, and update alike
        for one, mean in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
            one.grad = mean.view_as(one).clone()
        work.set_lr([update], position, len(done))
        update.step()
        position += batch
    return bits_of(model, update)
