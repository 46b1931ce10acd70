"""Agents of torchrun side by side on loopback: they meet, and end with their block."""

import json
import runpy
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

from distlab.comm import run
from distlab.course.grading import load_lesson
from distlab.elastic import Agents

TOLD = """
import json, os, time
print(json.dumps({name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}), flush=True)
time.sleep(600)
"""

FAULTY = """
import torch, torch.distributed as dist
from distlab.comm import process_group
with process_group("gloo", timeout_s=300) as member:
    rank = member.rank
    x = torch.ones(6 if rank == 0 else 4); dist.all_reduce(x)  # rank 0 is the first agent's only rank
"""


@pytest.mark.timeout(300)
def test_a_fault_between_two_agents_is_told_by_both_within_seconds(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    with Agents() as agents:
        flags = ["--nnodes", "2", "--max-restarts", "0"]
        both = [agents.start(f"m{n}", tmp_path / "faulty.py", ranks=n, flags=flags) for n in (1, 2)]
        assert [agent.wait(250) != 0 for agent in both] == [True, True]
        for agent in both:
            assert "6" in agent.text, agent.text
            assert "faulty.py" in agent.text, agent.text
            assert "line 6" in agent.text or "faulty.py:6" in agent.text, agent.text


def test_agents_with_unequal_ranks_meet_on_loopback_alone_and_end_with_their_block(tmp_path):
    (tmp_path / "told.py").write_text(TOLD)
    with Agents() as agents:
        both = [agents.start(f"m{n}", tmp_path / "told.py", ranks=n, flags=["--nnodes", "2"]) for n in (1, 2)]
        listening = [one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.laddr.port == agents.port]
        assert set(listening) == {"127.0.0.1"}
        told = []
        while len(told) < 3:
            assert all(agent.process.poll() is None for agent in both), [agent.text for agent in both]
            told = [json.loads(line) for agent in both for line in agent.text.splitlines() if line.startswith("{")]
        family = [one for agent in both for one in psutil.Process(agent.process.pid).children(recursive=True)]
    assert sorted(one["RANK"] for one in told) == [0, 1, 2]
    assert [one["LOCAL_WORLD_SIZE"] for one in told] == [1, 2, 2]
    assert {one["WORLD_SIZE"] for one in told} == {3}
    assert len(family) >= 3
    assert not psutil.wait_procs(family, timeout=60)[1]
    assert both[0].process.returncode is not None


def weights_of_lab_14(folder, own_group):
    """Train as the lab's own ranks do (in a group of gloo's), or as its agents' ranks do (in the default group)."""
    train = runpy.run_path(str(load_lesson("14").folder / "train.py"))["train"]
    return train(folder, 3, dist.get_rank(), group=dist.new_group(backend="gloo") if own_group else None)


def test_the_labs_own_ranks_add_up_in_the_order_of_the_agents_ranks(tmp_path):
    over_gloo = run(weights_of_lab_14, 4, args=(tmp_path / "agents", False), backend="gloo")[0]
    in_memory = run(weights_of_lab_14, 4, args=(tmp_path / "lab", True), backend="shared")[0]
    assert all(torch.equal(in_memory[name], tensor) for name, tensor in over_gloo.items())


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("nodes", [[], ["--nodes", "2", "--between", "40MB/s,200us"]], ids=["one machine", "two nodes"])
def test_one_of_two_machines_is_lost_and_comes_back_and_the_weights_are_those_of_no_loss(nodes):
    command = [sys.executable, "-m", "distlab", "lab", "14", "--ranks", "4", "--json", *nodes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["what"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert found["weights as without the loss, bit for bit"]
    assert found["both agents ended well"] == "0 and 0"
