"""The long proof: 200 runs in one kernel, and nothing of it grows."""

import json

import pytest
from launch import Case  # benchmarks/launch.py: a kernel with all that it started

NUM_RUNS, WARM_RUNS = 200, 20

CELL = """
import json, os, psutil
import torch, torch.distributed as dist
from distlab.comm import RankError, Ranks, run

def sum_up(number):
    x = torch.ones(250_000)
    dist.all_reduce(x)
    if number % 10 == 9 and dist.get_rank() == 1:
        raise ValueError("on purpose")  # one in ten fails
    return x

def memory(process):
    try:
        return process.memory_full_info().uss
    except psutil.Error:
        return 0

def look():
    me = psutil.Process()
    every = [me, *me.children(recursive=True)]
    return {
        "descriptors": sum(one.num_fds() for one in every),
        "processes": len(every),
        "threads": sum(one.num_threads() for one in every),
        "files": sum(name.startswith("distlab-") for name in os.listdir(os.environ["TMPDIR"])),
        "bytes": sum(map(memory, every)),
    }

looks = []
for number in range(NUM_RUNS):
    try:
        if number % 2:
            run(sum_up, 2, args=(number,), echo=False)
        else:
            with Ranks(2, echo=False) as ranks:
                ranks.run(sum_up, number)
    except RankError:
        pass
    if number + 1 in (WARM_RUNS, NUM_RUNS):
        looks.append(look())
print(json.dumps(looks))
"""


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_200_runs_in_one_kernel_leave_nothing_and_nothing_grows(record_property):

    case, said = Case("kernel"), []
    try:
        cell = f"NUM_RUNS, WARM_RUNS = {NUM_RUNS}, {WARM_RUNS}\n{CELL}"
        reply = case.client.execute_interactive(cell, timeout=1000, output_hook=said.append)
    finally:
        case.close()
    text = "".join(message["content"].get("text", "") for message in said)
    assert reply["content"]["status"] == "ok", said
    warm, last = json.loads(text)
    record_property("tried", NUM_RUNS)
    grown = (last["bytes"] - warm["bytes"]) / 2**20
    record_property("figure", f"{last['descriptors']} descriptors, {last['processes']} processes, {grown:+.1f} MiB")
    for name in ("descriptors", "processes", "threads", "files"):
        assert last[name] <= warm[name], (warm, last)
    assert last["bytes"] <= 1.05 * warm["bytes"], (warm, last)
