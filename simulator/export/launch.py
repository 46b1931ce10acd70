"""What starts a plan's ranks: a torchrun command, a Slurm script, or a PyTorchJob or JobSet for `kubectl apply -f`.

Source: torch.distributed.run of torch 2.11 to 2.13; sbatch and srun of Slurm 23 and later; kubeflow.org/v1 PyTorchJob
    (Kubeflow Training Operator 1.9); jobset.x-k8s.io/v1alpha2 JobSet (Trainer 2).
"""

from __future__ import annotations

from importlib import resources
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
    nodes, per_node = places_of(said)
    pod = {"spec": {"containers": [_container("pytorch", per_node, options, "")]}}
    replica = {"restartPolicy": "OnFailure", "template": pod}
    replicas = {"Master": {"replicas": 1, **replica}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, **replica}
    policy = {"backoffLimit": 3, "cleanPodPolicy": "None"}
    spec = {"nprocPerNode": str(per_node), "runPolicy": policy, "pytorchReplicaSpecs": replicas}
    return _manifest("kubeflow.org/v1", "PyTorchJob", spec)


def job_set(said: PlanFile, options: Options) -> Exported:
    """Return a JobSet of one indexed Job, a pod per node; the first pod's name is where ranks meet.

    Raises:
        ValueError: the ranks do not fill the nodes.
    """
    nodes, per_node = places_of(said)
    head = f"{NAME}-node-0-0.{NAME}"
    flags = (
        f'--nnodes={nodes} --nproc-per-node={per_node} --node-rank="$JOB_COMPLETION_INDEX" '
        f"--master-addr={head} --master-port={PORT} "
    )
    pod = {"spec": {"restartPolicy": "Never", "containers": [_container("node", per_node, options, flags)]}}
    job = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed", "backoffLimit": 0, "template": pod}
    network = {"enableDNSHostnames": True, "subdomain": NAME}
    jobs = [{"name": "node", "replicas": 1, "template": {"spec": job}}]
    spec = {"failurePolicy": {"maxRestarts": 3}, "network": network, "replicatedJobs": jobs}
    return _manifest("jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def _container(name: str, per_node: int, options: Options, flags: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": options.image,
        "command": ["bash", "-c", f"exec torchrun {flags}{options.script_words}"],
        "resources": {"limits": {"nvidia.com/gpu": str(per_node)}},
    }


def _manifest(version: str, kind: str, spec: dict[str, Any]) -> Exported:
    manifest = {"apiVersion": version, "kind": kind, "metadata": {"name": NAME}, "spec": spec}
    return as_json(manifest, NOTES)
