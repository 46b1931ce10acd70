"""deploy/: as the exporter writes it, and a dry run that starts the plan's ranks."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from simulator import read_plan_file
from simulator.export import Options, export

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
FILES = {"torchrun": "torchrun.sh", "slurm": "slurm.sbatch", "pytorchjob": "pytorchjob.json", "jobset": "jobset.json"}
OPTIONS = Options(script="lessons/14_many_machines/lab.py --device cuda")
PLAN = read_plan_file(DEPLOY / "plan.toml")


@pytest.mark.parametrize("tool", FILES)
def test_it_is_what_the_exporter_writes(tool):
    again = f"distlab export deploy/plan.toml --to {tool} --script '{OPTIONS.script}' > deploy/{FILES[tool]}"
    assert (DEPLOY / FILES[tool]).read_text() == export(PLAN, tool, OPTIONS).text, f"run: {again}"


@pytest.fixture
def dry_run(tmp_path):
    """Run a command with programs of ours in place of a cluster's; return the words that reached torchrun."""
    programs = {"srun": 'shift; exec "$@"', "torchrun": 'printf "%s\\n" "$@"'}
    programs["scontrol"] = "printf 'node08\\nnode09\\n'"
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)

    def words(command, text=None, **variables):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        return subprocess.check_output(command, input=text, env=env, text=True, timeout=250).splitlines()

    return words


def flags_of(words):
    assert words[-3:] == shlex.split(OPTIONS.script)
    return dict(word.removeprefix("--").split("=", 1) for word in words[:-3])


def test_a_dry_run_of_each_file_starts_sixteen_ranks_at_one_address(dry_run):
    job = {"SLURM_JOB_NODELIST": "node[08-09]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "4711"}
    flags = flags_of(dry_run(["bash"], (DEPLOY / "slurm.sbatch").read_text(), **job))
    assert flags == flags_of(dry_run(["bash", str(DEPLOY / "torchrun.sh")], HEAD="node08")) | {"rdzv-id": "4711"}
    assert (int(flags["nnodes"]) * int(flags["nproc-per-node"]), flags["rdzv-endpoint"]) == (16, "node08:29500")
    (jobs,) = json.loads((DEPLOY / "jobset.json").read_text())["spec"]["replicatedJobs"]
    spec = jobs["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    pods = [flags_of(dry_run(container["command"], JOB_COMPLETION_INDEX=str(n))) for n in range(spec["completions"])]
    assert [flags["node-rank"] for flags in pods] == ["0", "1"]
    assert len({flags["master-addr"] for flags in pods}) == 1
    assert sum(int(flags["nproc-per-node"]) for flags in pods) == 16
    spec = json.loads((DEPLOY / "pytorchjob.json").read_text())["spec"]  # whose operator gives the numbers
    for replica in spec["pytorchReplicaSpecs"].values():
        (container,) = replica["template"]["spec"]["containers"]
        assert flags_of(dry_run(container["command"])) == {}
    assert sum(one["replicas"] for one in spec["pytorchReplicaSpecs"].values()) * int(spec["nprocPerNode"]) == 16
