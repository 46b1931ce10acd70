"""Agents of torchrun side by side on loopback: they meet, and end with their block."""

import json
import subprocess
import sys

import psutil
import pytest

from distlab.elastic import Agents

TOLD = """
import json, os, time
print(json.dumps({name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}), flush=True)
time.sleep(600)
"""


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


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_one_of_two_machines_is_lost_and_comes_back_and_the_weights_are_those_of_no_loss():
    command = [sys.executable, "-m", "distlab", "lab", "14", "--ranks", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=350, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["what"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert found["weights as without the loss, bit for bit"]
    assert found["both agents ended well"] == "0 and 0"
