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
"""
STAYS = f"{TOLD}time.sleep(600)\n"
FAULTY = f"""{TOLD}
import torch, torch.distributed as dist
from distlab.comm import process_group
with process_group("gloo", timeout_s=300) as member:
    rank = member.rank
    x = torch.ones(6 if rank == 0 else 4); dist.all_reduce(x)  # rank 0 is the first agent's only rank
"""


def told_by(*agents):
    return [json.loads(line) for agent in agents for line in agent.text.splitlines() if line.startswith("{")]


def test_agents_with_unequal_ranks_meet_on_loopback_tell_a_fault_and_end_with_their_block(tmp_path):
    """Two agents whose ranks call all_reduce with other sizes, and one whose rank never ends."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "stays.py").write_text(STAYS)
    with Agents() as agents:
        flags = ["--nnodes", "2", "--max-restarts", "0"]
        both = [agents.start(f"m{n}", tmp_path / "faulty.py", ranks=n, flags=flags) for n in (1, 2)]
        stays = agents.start("stays", tmp_path / "stays.py", flags=["--nnodes", "1", "--rdzv-id", "stays"])
        listening = [one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.laddr.port == agents.port]
        assert (set(listening), [agent.wait(250) != 0 for agent in both]) == ({"127.0.0.1"}, [True, True])
        while not told_by(stays):
            assert stays.process.poll() is None, stays.text
        told = told_by(*both)
        family = psutil.Process(stays.process.pid).children(recursive=True)
        texts = [agent.text for agent in both]
    assert sorted(one["RANK"] for one in told) == [0, 1, 2]
    assert ([one["LOCAL_WORLD_SIZE"] for one in told], {one["WORLD_SIZE"] for one in told}) == ([1, 2, 2], {3})
    for text in texts:
        assert "6" in text, text
        assert "faulty.py" in text, text
        assert "line 9" in text or "faulty.py:9" in text, text
    assert len(family) >= 1
    assert not psutil.wait_procs(family, timeout=250)[1]
    assert stays.process.returncode is not None


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
