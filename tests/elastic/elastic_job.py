"""What tests of elastic runs share: a small training, as a script for torchrun and as a function for ranks.

    torchrun ... elastic_job.py FOLDER '{"optimizer": "adam", ...}'

Every rank notes each finished step in FOLDER/steps-*.jsonl; rank 0 leaves the final weights in FOLDER/final.pt. Beside
signals there are faults of these kinds:

- "exception": the rank raises. "slow": it sleeps.
- "flip", "flip gradient", "flip moment": one bit changes, of its weights, of a gradient just before the optimizer reads
  it (so after replicas have averaged it), or of the optimizer's state just after an update.
- "disk": its next save finds no room on the disk.
"""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from distlab.checkpoint import files
from distlab.checkpoint.parts import moments_of
from distlab.comm import entry, process_group
from distlab.data_parallel import DataParallel
from distlab.elastic import BatchRule, ElasticRun, Fault, Faults, Saves, Work, plain_train
from distlab.large_batch import LearningRateSchedule
from distlab.rng import generator, seed_rank

USUAL = {
    "optimizer": "adam",
    "dtype": "float32",
    "dropout": 0.2,
    "num_samples": 101,
    "num_epochs": 4,
    "rule": [12, None, "same"],
    "save_every": 3,
    "beside": False,
    "pause_s": 0.0,
    "faults": [],
}
SCHEDULE = LearningRateSchedule(0.05, 40, 5, "cosine")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


MORE = ("exception", "slow", "flip", "flip gradient", "flip moment", "disk")


class FullDisk:
    """Stands for `os` where checkpoints are written, until a first write has failed."""

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, *_):
        vars(files)["os"] = os
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class MoreFaults(Faults):
    """A plan with faults of these kinds too; bits flip in a model and its optimizer."""

    def __init__(self, plan, directory, model=None, optimizer=None):
        super().__init__([fault for fault in plan if fault[0] not in MORE], directory / "signals")
        self.more, self.model, self.optimizer = [Fault(*fault) for fault in plan if fault[0] in MORE], model, optimizer
        self.marks = directory / "more"

    def before_step(self, number, rank, world_size):
        super().before_step(number, rank, world_size)
        for index, fault in enumerate(self.more):
            self.marks.mkdir(parents=True, exist_ok=True)
            mark = self.marks / f"fault-{index}"
            if fault.step <= number and fault.rank % world_size == rank and not mark.exists():
                mark.touch()
                self.happen(fault)

    def happen(self, fault):
        if fault.kind == "exception":
            raise RuntimeError(f"{fault} happens here")
        if fault.kind == "slow":
            time.sleep(fault.seconds)
        elif fault.kind == "disk":
            vars(files)["os"] = FullDisk()
        elif fault.kind == "flip":
            flip_bit(dict(self.model.named_parameters()), str(fault))
        else:
            self.flip_in_update(fault)

    def flip_in_update(self, fault):
        waiting = [True]  # no hook can remove itself while torch goes through them

        def hook(optimizer, *_):
            found = moments_of({"optimizer": optimizer})
            if fault.kind == "flip gradient":
                named = self.model.named_parameters()
                found = {f"the gradient of {name}": one.grad for name, one in named if one.grad is not None}
            if waiting and found:
                waiting.clear()
                flip_bit(found, str(fault))

        is_before = fault.kind == "flip gradient"
        register = self.optimizer.register_step_pre_hook if is_before else self.optimizer.register_step_post_hook
        register(hook)


@torch.no_grad()
def flip_bit(found, seed):
    """Flip one bit of one of these tensors."""
    chance = random.Random(seed)
    name = chance.choice([name for name, tensor in found.items() if tensor.numel()])
    tensor = found[name]
    place = tuple(chance.randrange(size) for size in tensor.shape)
    element, byte, bit = tensor[place].reshape(1).clone(), chance.randrange(tensor.element_size()), chance.randrange(8)
    element.view(torch.uint8)[byte] ^= 1 << bit
    tensor[place] = element[0]


def work_of(options):
    lr = SCHEDULE if options["rule"][1] else None
    return Work(BatchRule(*options["rule"]), options["num_samples"], options["num_epochs"], seed=5, lr=lr)


def build(options):
    rank = dist.get_rank()
    dtype = getattr(torch, options["dtype"])
    seed_rank(7, rank)
    drawn = generator(7, 0, "data")
    inputs = torch.randn(options["num_samples"], 6, generator=drawn).to(dtype)
    targets = torch.randint(3, (options["num_samples"],), generator=drawn)
    layers = [torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(options["dropout"]), torch.nn.Linear(16, 3)]
    model = torch.nn.Sequential(*layers).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=drawn)
    replicas = DataParallel(model, bucket_bytes=400, first_bucket_bytes=100)
    return inputs, targets, model, replicas, OPTIMIZERS[options["optimizer"]](model.parameters())


def train(folder, **changes):
    """Train on each rank; return the weights, the optimizer's state, and (position, batch, rate) of each step."""
    options, folder = USUAL | changes, Path(folder)
    inputs, targets, model, replicas, optimizer = build(options)
    parts = {"model": model, "optimizer": optimizer}
    token = token_of_start()
    rates, faults = [], MoreFaults([Fault(*fault) for fault in options["faults"]], folder / "marks", model, optimizer)
    saves = Saves(options["save_every"], beside=options["beside"])
    with ElasticRun(folder / "saved", parts, work=work_of(options), saves=saves, faults=faults) as run:
        for step in run:
            loss = torch.nn.functional.cross_entropy(model(inputs[step.samples]), targets[step.samples])
            (loss * step.weight).backward()
            replicas.synchronize()
            optimizer.step()
            optimizer.zero_grad()
            rates.append((step.position, step.batch, optimizer.param_groups[0]["lr"]))
            time.sleep(options["pause_s"])
            note(folder, token, step.number, step.samples.tolist())
    return model.state_dict(), optimizer.state_dict()["state"], rates


def token_of_start():
    """Return a number that the ranks of one start have in common."""
    box = [os.getpid()]
    dist.broadcast_object_list(box)
    return box[0]


def note(folder, token, number, samples):
    with open(folder / f"steps-{dist.get_rank()}.jsonl", "a") as file:
        file.write(f"{json.dumps([time.time(), token, number, samples, os.getpid()])}\n")


def notes(folder):
    """Return (time, token of the start, number, samples, pid) of every step that a rank finished, by time."""
    found = []
    for path in Path(folder).glob("steps-*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # a rank was killed while it wrote
                continue
    return sorted(found)


def used(folder):
    """Count how often each sample was used; what a later start made again counts once."""
    counted, current = {}, None
    for _, token, number, samples, _ in notes(folder):
        if token != current:
            counted = {step: lists for step, lists in counted.items() if step < number}
        current = token
        counted.setdefault(number, []).append(samples)
    return Counter(sample for lists in counted.values() for samples in lists for sample in samples)


@contextmanager
def torchrun(folder, num_ranks=4, *, standby=False, **changes):
    """Start this script under torchrun, as a user would; end all of it afterwards."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    command += ["--max-restarts", "1000", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--local-addr", "127.0.0.1", *(["-m", "distlab.comm.standby"] if standby else [])]
    command += [__file__, str(folder), json.dumps(changes)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    with open(folder / "output.txt", "a") as output:
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            yield job
        finally:
            if job.poll() is None:
                for process in [*psutil.Process(job.pid).children(recursive=True), job]:
                    process.kill()
            job.wait()


def random_kills(folder, job, count, seed=0):
    """Kill random ranks, also those that stand by, at random moments; return the seconds of each recovery.

    It lasts from the kill until new ranks have made a step that was not made before.
    """
    from waiting import wait_for  # here: the script that torchrun starts does not find it

    chance, times = random.Random(seed), []
    for _ in range(count):
        wait_for(lambda: notes(folder))
        time.sleep(chance.uniform(0, 0.5))
        seen = notes(folder)
        last, tokens = max(number for _, _, number, *_ in seen), {token for _, token, *_ in seen}
        alive = {one.pid for one in psutil.Process(job.pid).children() if one.status() != psutil.STATUS_ZOMBIE}
        alive |= {pid for _, token, _, _, pid in seen if token == seen[-1][1] and psutil.pid_exists(pid)}
        killed_s = time.time()
        os.kill(chance.choice(sorted(alive)), signal.SIGKILL)
        new = lambda: [at for at, token, n, *_ in notes(folder) if n > last and token not in tokens]  # noqa: B023, E731
        times.append(min(wait_for(new)) - killed_s)
    return times


@entry
def main():
    folder, changes = Path(sys.argv[1]), json.loads(sys.argv[2])
    with process_group(timeout_s=200) as member:
        final = train(folder, **changes)[:2]
        if member.rank == 0:
            torch.save(final, folder / "final.pt")


def plainly(folder, **changes):
    """Train by the plainest loop; the order of samples is the step's number alone."""
    options = USUAL | changes
    inputs, targets, model, replicas, optimizer = build(options)
    token = token_of_start()
    folder.mkdir(parents=True, exist_ok=True)

    def step(number):
        first = 4 * (4 * number + dist.get_rank()) % 96
        loss = torch.nn.functional.cross_entropy(model(inputs[first : first + 4]), targets[first : first + 4])
        loss.backward()
        replicas.synchronize()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(options["pause_s"])
        note(folder, token, number, [])

    plain_train(step, 40, directory=folder / "saved", parts={"model": model, "optimizer": optimizer}, save_every=3)
    return model.state_dict(), optimizer.state_dict()["state"]


if __name__ == "__main__":
    main()
