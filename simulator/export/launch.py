"""What starts a plan's ranks: a torchrun command, or a Slurm script that runs it on every node.

Source: torch.distributed.run of torch 2.11 to 2.13; sbatch and srun of Slurm 23 and later.
"""

from __future__ import annotations

from typing import NamedTuple

from simulator.export.parts import NAME, PLAIN, Exported, Wish
from simulator.plan_file import PlanFile

PORT = 29500


class Places(NamedTuple):
    """Nodes, and ranks on each."""

    nodes: int
    per_node: int


def places_of(said: PlanFile) -> Places:
    """Return how many nodes a plan needs, with as many ranks on each.

    Raises:
        ValueError: its ranks do not fill the nodes.
    """
    ranks, most = said.plan.world_size, said.cluster.cluster(said.plan.world_size).devices_per_node
    if ranks > most and ranks % most:
        raise ValueError(f"launch files cannot express {ranks} ranks on nodes of {most}; use a multiple of {most}")
    return Places(-(-ranks // most), min(ranks, most))


def torchrun_command(said: PlanFile, wish: Wish = PLAIN) -> Exported:
    """Return the command to run on every node; HEAD is the first node's name.

    Raises:
        ValueError: the ranks do not fill the nodes.
    """
    nodes, per_node = places_of(said)
    if nodes == 1:
        return Exported(f"torchrun --standalone --nproc-per-node={per_node} {wish.script_words}\n")
    rendezvous = f'--rdzv-backend=c10d --rdzv-endpoint="$HEAD:{PORT}" --rdzv-id={NAME}'
    command = f"torchrun --nnodes={nodes} --nproc-per-node={per_node} {rendezvous} {wish.script_words}\n"
    return Exported(command, (f"run it on each of the {nodes} nodes, with HEAD set to the name of one of them",))


def slurm_script(said: PlanFile, wish: Wish = PLAIN) -> Exported:
    """Return the script for sbatch: one torchrun per node, and `--rdzv-endpoint` on the first.

    Raises:
        ValueError: the ranks do not fill the nodes.
    """
    nodes, per_node = places_of(said)
    text = f"""#!/bin/bash
#SBATCH --job-name={NAME}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --output=%x-%j.out
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
srun --kill-on-bad-exit=1 torchrun \\
    --nnodes="$SLURM_NNODES" --nproc-per-node={per_node} \\
    --rdzv-backend=c10d --rdzv-endpoint="$head:{PORT}" --rdzv-id="$SLURM_JOB_ID" \\
    {wish.script_words}
"""
    return Exported(text, ("partition, account and time limit are your cluster's: add #SBATCH lines",))
