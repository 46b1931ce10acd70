"""The long proofs about labs: 20 repeats compute the same bits, and 64 ranks fit into one small machine."""

import contextlib
import hashlib
import threading
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from lab_on_ranks import QUICK, facts

from distlab.comm import run

RANKS, REPEATS = 3, 20


def noted(folder):
    """Return what ranks have noted of updates, by rank."""
    return [path.read_text() for path in sorted(folder.glob("updates-*"))]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", QUICK)
def test_twenty_repeats_of_a_lab_give_the_same_hashes(lab, number, tmp_path, record_property):
    """A hash of all facts, and of the parameters after each optimizer's first updates on each rank."""
    seen = Counter()
    for repeat in range(REPEATS):
        folder = tmp_path / f"repeat {repeat}"
        folder.mkdir()
        found = sorted(facts(lab(number, RANKS, "--json", updates=folder)).items())
        seen[hashlib.sha256(repr((found, noted(folder))).encode()).hexdigest()] += 1
    record_property("tried", REPEATS)
    record_property("held", max(seen.values()))
    updates = sum(len(text.splitlines()) for text in noted(folder))
    record_property("figure", f"lab {number}: {len(found)} facts, {updates} updates")
    assert len(seen) == 1, seen


def rank_memory_bytes(root: psutil.Process) -> int:
    """Return the memory of all processes below one, pages that they share divided among them."""
    total = 0
    for process in root.children(recursive=True):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


@contextlib.contextmanager
def peak_of_ranks():
    """Yield a list to which the memory of all ranks is added twice a second."""
    seen, over = [0], threading.Event()

    def look():
        while not over.wait(0.5):
            seen.append(rank_memory_bytes(psutil.Process()))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def all_reduce_once():
    import torch

    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def within(record_property, what, value, bar, unit):
    """Note a figure beside its bar."""
    record_property("tried", 1)
    record_property("held", int(value <= bar))
    record_property("figure", f"{what} {value:.1f} {unit} (bar {bar} {unit})")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_64_ranks_start_soon(record_property):
    run(all_reduce_once, 64)
    for _ in range(5):
        begin = time.perf_counter()
        assert run(all_reduce_once, 64) == [64.0] * 64
        within(record_property, "64 ranks start in", time.perf_counter() - begin, 3, "s")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", ["01", "03"])
def test_a_lab_on_64_ranks(lab, number, record_property):
    """Time and memory each in a run of its own: a look at the pages of 64 ranks takes a third of a core."""
    begin = time.perf_counter()
    facts(lab(number, 64, "--json"))
    within(record_property, f"lab {number} on 64 ranks in", time.perf_counter() - begin, 20, "s")
    with peak_of_ranks() as seen:
        facts(lab(number, 64, "--json"))
    within(record_property, f"lab {number} on 64 ranks holds", max(seen) / 2**30, 4, "GiB")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_1024_simulated_ranks(record_property):
    from distlab.plan import Plan
    from simulator import cluster, gpt_workload, simulate

    begin = time.perf_counter()
    workload = gpt_workload(hidden_size=4096, num_layers=32, num_heads=32, sequence_length=2048, vocab_size=50257)
    step = simulate(workload, cluster("dgx-h100", 1024), Plan(data=128, pipeline=8, num_microbatches=64))
    spans = len(step.trace)
    within(record_property, f"1,024 simulated ranks, {spans:,} spans, in", time.perf_counter() - begin, 5, "s")
    assert step.trace.ranks == tuple(range(1024))
