"""Elastic training at its plainest: a run that can be killed at any moment is a loop that holds nothing of its own.

A rank may die between any two instructions, and takes its memory along. The others cannot go on without it: each waits
for its gradients. So no rank tries to. All ranks end, whoever started them starts them anew, and each goes on from the
newest checkpoint. The steps since then are made again.

    torchrun --nproc-per-node 4 --max-restarts 100 train.py

They are the same steps where each depends on three things alone: on what the checkpoint holds, on the step's number and
on the rank. So the run ends with the very weights of a run without a kill. Two ways to spoil that:

- Something is not in the checkpoint: the optimizer's moments, a generator, the place in the data.
- A checkpoint can be there in part. `save` lets it come to exist with one rename, after every rank has written.

A death costs a start of all ranks (`-m distlab.comm.standby` before `train.py` saves most of it) and the steps since
the last save, half of `save_every` in the mean. A save costs time too.

`ElasticRun` is the same loop with what a cluster asks for: more or fewer ranks, SIGTERM, a full disk, wrong bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.distributed import ProcessGroup

from distlab.checkpoint import load, save
from distlab.checkpoint.parts import Parts


def plain_train(
    train_step: Callable[[int], object],
    num_steps: int,
    *,
    directory: str | Path,
    parts: Parts,
    save_every: int = 100,
    group: ProcessGroup | None = None,
) -> int:
    """Make the steps that are left of a run; every rank calls it, after each start.

    Args:
        train_step: makes the update of this number (0, 1, ...), on all ranks together.
        num_steps: updates of the whole run.
        directory: of this run's checkpoints.
        parts: all that a step reads and changes, as of `save`.
        save_every: steps between two checkpoints.
        group: the ranks.

    Returns:
        The number of the first step made here.

    Error: none: the final bits are those of the run that was not killed.

    Raises:
        ValueError: the newest checkpoint is of a different model or a different number of ranks.
        CheckpointError: a checkpoint can be neither read nor written.
    """
    resumed = load(directory, parts=parts, group=group)
    first = resumed.step if resumed else 0
    for step in range(first, num_steps):
        train_step(step)
        if (step + 1) % save_every == 0 or step + 1 == num_steps:
            save(directory, step + 1, parts=parts, group=group)
    return first
