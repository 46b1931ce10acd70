"""Train a small GPT so that any machine may die: what each agent of lab 14 starts on its ranks.

    torchrun ... train.py FOLDER UPDATES [SECONDS]

Rank 0 notes each update in FOLDER/updates.jsonl, and leaves the final weights in FOLDER/final.pt. SECONDS is a pause
after each update: time to pull a plug.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.comm import entry, process_group
from distlab.data import ByteCorpus, python_documentation
from distlab.data_parallel import DataParallel
from distlab.elastic import BatchRule, ElasticRun, Saves, Work
from distlab.models import GPT, GPTConfig

CONFIG = GPTConfig(context=32, num_layers=2, num_heads=4, hidden_size=32)
BATCH = 16


def train(
    folder: Path, num_updates: int, rank: int, pause_s: float = 0.0, group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Train from where the newest checkpoint ends, and return the final weights.

    A different wire than gloo adds the gradients of 3 ranks in a different order: the last bits of the weights differ
    then.
    """
    inputs, targets = ByteCorpus(python_documentation(), CONFIG.context).batch(0, BATCH * num_updates)
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    replicas, optimizer = DataParallel(model, group), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    work = Work(BatchRule(BATCH), num_samples=len(inputs))
    parts = {"model": model, "optimizer": optimizer}
    with ElasticRun(folder / "saved", parts, work=work, saves=Saves(every=2), group=group) as run:
        for step in run:
            loss = GPT.loss(model(inputs[step.samples]), targets[step.samples])
            (loss * step.weight).backward()
            replicas.synchronize()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause_s)
            if rank == 0:
                note(folder, update=step.number, loss=float(loss.detach()))
    return model.state_dict()


def note(folder: Path, **facts: float) -> None:
    """Write down that an update is made: when, and by which process."""
    with (folder / "updates.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "process": os.getpid(), **facts}) + "\n")


@entry
def main() -> None:
    """Train on this rank."""
    folder, num_updates = Path(sys.argv[1]), int(sys.argv[2])
    with process_group("gloo", timeout_s=120) as member:
        final = train(folder, num_updates, member.rank, float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
        if member.rank == 0:
            torch.save(final, folder / "final.pt")


if __name__ == "__main__":
    main()
