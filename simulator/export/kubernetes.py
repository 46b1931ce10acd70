"""What starts a plan's ranks on Kubernetes, as JSON for `kubectl apply -f`: a PyTorchJob, or a JobSet.

Source: kubeflow.org/v1 PyTorchJob (Kubeflow Training Operator 1.9); jobset.x-k8s.io/v1alpha2 JobSet (Trainer 2).
"""

from __future__ import annotations

import json
from typing import Any

from simulator.export.launch import PORT, places_of
from simulator.export.parts import NAME, PLAIN, Exported, Wish
from simulator.plan_file import PlanFile

NOTES = ("namespace, volumes, shared memory and the network's devices are your cluster's: add them",)


def pytorch_job(said: PlanFile, wish: Wish = PLAIN) -> Exported:
    """Return a PyTorchJob: one pod per node, with a master among them; the operator tells torchrun where it is.

    Raises:
        ValueError: the ranks do not fill the nodes.
    """
    nodes, per_node = places_of(said)
    pod = {"spec": {"containers": [_container("pytorch", per_node, wish, "")]}}
    replica = {"restartPolicy": "OnFailure", "template": pod}
    replicas = {"Master": {"replicas": 1, **replica}}
    if nodes > 1:
        replicas["Worker"] = {"replicas": nodes - 1, **replica}
    return _manifest(
        "kubeflow.org/v1",
        "PyTorchJob",
        {
            "nprocPerNode": str(per_node),
            "runPolicy": {"backoffLimit": 3, "cleanPodPolicy": "None"},
            "pytorchReplicaSpecs": replicas,
        },
    )


def job_set(said: PlanFile, wish: Wish = PLAIN) -> Exported:
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
    pod = {"spec": {"restartPolicy": "Never", "containers": [_container("node", per_node, wish, flags)]}}
    job = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": pod,
    }
    return _manifest(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        {
            "failurePolicy": {"maxRestarts": 3},
            "network": {"enableDNSHostnames": True, "subdomain": NAME},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    )


def _container(name: str, per_node: int, wish: Wish, flags: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": wish.image,
        "command": ["bash", "-c", f"exec torchrun {flags}{wish.script_words}"],
        "resources": {"limits": {"nvidia.com/gpu": str(per_node)}},
    }


def _manifest(version: str, kind: str, spec: dict[str, Any]) -> Exported:
    manifest = {"apiVersion": version, "kind": kind, "metadata": {"name": NAME}, "spec": spec}
    return Exported(json.dumps(manifest, indent=2) + "\n", NOTES)
