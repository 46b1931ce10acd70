"""What starts a plan's ranks: a torchrun command, a Slurm script, or a PyTorchJob or JobSet for `kubectl apply -f`.

Source: torch.distributed.run of torch 2.11 to 2.13; sbatch and srun of Slurm 23 and later; kubeflow.org/v1 PyTorchJob
    (Kubeflow Training Operator 1.9); jobset.x-k8s.io/v1alpha2 JobSet (Trainer 2).
"""

from __future__ import annotations

import json
from importlib import resources
from string import Template
from typing import Any

from simulator.export.parts import NAME, Exported, Options, as_json, devices_per_node
from simulator.plan_file import PlanFile

PORT = 29500
NOTES = ("namespace, volumes, shared memory and the network's devices are your cluster's: add them",)


def places_of(said: PlanFile) -> tuple[int, int]:
    """Return how many nodes a plan needs, and how many ranks are on each.

    Raises:
        ValueError: its ranks do not fill the nodes.
    """
    ranks, most = said.plan.world_size, devices_per_node(said)
    if ranks > most and ranks % most:
        raise ValueError(f"launch files cannot express {ranks} ranks on nodes of {most}; use a multiple of {most}")
    return -(-ranks // most), min(ranks, most)


def torchrun_command(said: PlanFile, options: Options) -> Exported:
    """Return the command to run on every node; HEAD is the first node's name.

    Raises:
        ValueError: the ranks do not fill the nodes.
    """
    nodes, per_node = places_of(said)
    if nodes == 1:
        return Exported(f"torchrun --standalone --nproc-per-node={per_node} {options.script_words}\n")
    rendezvous = f'--rdzv-backend=c10d --rdzv-endpoint="$HEAD:{PORT}" --rdzv-id={NAME}'
    command = f"torchrun --nnodes={nodes} --nproc-per-node={per_node} {rendezvous} {options.script_words}\n"
    return Exported(command, (f"run it on each of the {nodes} nodes, with HEAD set to the name of one of them",))


def slurm_script(said: PlanFile, options: Options) -> Exported:
    """Return the script for sbatch: one torchrun per node, and `--rdzv-endpoint` on the first.

    Raises:
        ValueError: the ranks do not fill the nodes.
    """
    nodes, per_node = places_of(said)
    script = resources.files(__package__).joinpath("slurm.txt").read_text(encoding="utf-8")
    text = script.format(name=NAME, nodes=nodes, per_node=per_node, port=PORT, script=options.script_words)
    return Exported(text, ("partition, account and time limit are your cluster's: add #SBATCH lines",))


def pytorch_job(said: PlanFile, options: Options) -> Exported:
    """Return a PyTorchJob: one pod per node, with a master among them; the operator tells torchrun where it is.

    Raises:
        ValueError: the ranks do not fill the nodes.
    """
    manifest = _manifest("pytorchjob", said, options)
    if not manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]:
        del manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    return as_json(manifest, NOTES)


def job_set(said: PlanFile, options: Options) -> Exported:
    """Return a JobSet of one indexed Job, a pod per node; the first pod's name is where ranks meet.

    Raises:
        ValueError: the ranks do not fill the nodes.
    """
    return as_json(_manifest("jobset", said, options), NOTES)


def _manifest(kind: str, said: PlanFile, options: Options) -> dict[str, Any]:
    """Return a manifest of Kubernetes, whose words with a dollar follow from the plan."""
    nodes, per_node = places_of(said)
    own = {"nodes": nodes, "others": nodes - 1, "per_node": per_node, "name": NAME, "port": PORT}
    words = {"image": options.image, "script": options.script_words}
    text = Template(resources.files(__package__).joinpath(f"{kind}.txt").read_text(encoding="utf-8"))
    quoted = {name: json.dumps(value)[1:-1] for name, value in words.items()}
    return dict(json.loads(text.substitute(own, **quoted)))
