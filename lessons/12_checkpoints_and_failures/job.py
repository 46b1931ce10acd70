"""The training that lab 12 starts under a torchrun of its own, and kills: `lab.py` says with which arguments.

At each start every rank takes up the newest checkpoint, and makes the steps that are left. A rank that is due to die
kills itself, some time after a step has begun; torchrun then starts all ranks anew.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import entry, process_group
from distlab.comm.groups import Member
from distlab.course.lab.member import load_functions
from distlab.data import ByteCorpus, python_documentation, rank_slice
from distlab.data_parallel import DataParallel, loss_weight
from distlab.elastic import BatchRule, Fault, Faults
from distlab.grading import NotYet, load_lesson, reference_of
from distlab.models import GPT, GPTConfig
from distlab.rng import generator, seed_rank

CONFIG = GPTConfig(context=32, num_layers=2, num_heads=2, hidden_size=48, dropout=0.1)
RULE, RATE, NOISE = BatchRule(24), 3e-3, 1e-3
Functions = Mapping[str, Callable[..., Any]]


def functions_of(impl: str) -> dict[str, Callable[..., Any]]:
    """Return the learner's functions, or the reference's where there is none."""
    lesson, mine = load_lesson("12"), load_functions(impl, "12")
    return {one.name: mine.get(one.name, reference_of(one)) for one in lesson.exercises}


def train(
    folder: Path, member: Member, functions: Functions, num_steps: int, save_every: int, faults: Faults
) -> Tensor:
    """Make the steps that are left, and return all weights as one row."""
    rank, world_size = member.rank, member.world_size
    seed_rank(12, rank)
    corpus = ByteCorpus(python_documentation(), CONFIG.context)
    model = GPT(CONFIG, torch.Generator().manual_seed(0)).to(member.device)
    replicas = DataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
    noise = generator(12, rank, "noise")
    capture, restore = functions["12.resume"](model, optimizer, schedule, noise)
    first, position = take_up(folder, member, restore)
    for number in range(first, num_steps):
        faults.before_step(number, rank, world_size)
        start, stop = rank_slice(RULE.batch, rank, world_size)
        samples, weight = range(position + start, position + stop), loss_weight(stop - start, RULE.batch, world_size)
        with open(folder / f"taken-{rank}.jsonl", "a") as file:
            file.write(f"{json.dumps([number, [*samples]])}\n")
        inputs, targets = (torch.cat([corpus.batch(at, 1)[which] for at in samples]) for which in (0, 1))
        loss = GPT.loss(model(inputs.to(member.device)), targets.to(member.device)) * weight
        (loss + NOISE * float(torch.randn((), generator=noise)) * next(model.parameters()).sum()).backward()
        replicas.synchronize()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        position += RULE.batch
        if (number + 1) % save_every == 0 or number + 1 == num_steps:
            functions["12.shards"](folder / "saved", number + 1, {"state": capture(position), "ranks": world_size})
    return torch.cat([one.detach().flatten().cpu() for one in model.parameters()])


def take_up(folder: Path, member: Member, restore: Callable[[dict[str, Any]], int]) -> tuple[int, int]:
    """Restore the newest checkpoint, and return step and position; a different number of ranks takes rank 0's state."""
    steps = [int(path.name[5:]) for path in (folder / "saved").glob("step-*")]
    if not steps:
        return 0, 0
    newest = folder / "saved" / f"step-{max(steps)}"
    saved = torch.load(newest / "rank-0.pt", weights_only=True)
    if saved["ranks"] == member.world_size:
        saved = torch.load(newest / f"rank-{member.rank}.pt", weights_only=True)
    return max(steps), restore(saved["state"])


@entry
def main() -> None:
    """Train under torchrun, and leave the hash of the weights."""
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    with process_group(device=options["device"], timeout_s=60) as member:
        with open(folder / f"starts-{member.rank}.txt", "a") as file:
            file.write("1\n")
        try:
            functions = functions_of(options["impl"])
            faults = Faults([Fault(*fault) for fault in options["faults"]], folder / "marks")
            weights = train(folder, member, functions, options["steps"], options["save_every"], faults)
        except NotYet as missing:
            raise ValueError(f"{missing}; write it, or run the lab with --impl reference") from None
        if member.rank == 0:
            torch.save(
                {"hash": hashlib.sha256(weights.numpy().tobytes()).hexdigest(), "weights": weights}, folder / "end.pt"
            )
        dist.barrier()


if __name__ == "__main__":
    main()
