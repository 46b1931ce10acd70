"""The long proof: 200 runs in one kernel, and nothing of it grows."""

import json
from pathlib import Path

import pytest
from launch import Case  # benchmarks/launch.py: a kernel with all that it started

NUM_RUNS, WARM_RUNS = 200, 20

CELL = Path(__file__).with_name("cell_of_many_runs.txt").read_text()


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
