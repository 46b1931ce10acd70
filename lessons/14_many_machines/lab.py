"""Lab 14: your functions on this job's ranks; then two agents on loopback, one of which is killed and comes back."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train import train

from distlab.comm.rendezvous import read_environment
from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.elastic import Agent, Agents

SCRIPT = Path(__file__).resolve().parent / "train.py"
PAUSE_S = 0.05  # after each update of the agents' ranks, so that there is a middle to be killed in
JOB = {"PROCID": "5", "LOCALID": "1", "NTASKS": "7", "NODEID": "1", "TASKS_PER_NODE": "4,3", "JOB_ID": "123456"}
RIGHT = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "7", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
RIGHT |= {"MASTER_ADDR": "node08", "MASTER_PORT": "23456"}


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Look at the machines of this job; then train under two agents, and lose one of them.

    Attributes:
        updates: of the small GPT, with and without a machine that is lost.
        away_s: seconds for which the lost machine stays away.
    """

    updates: int = flag(20, least=6)
    away_s: float = flag(1.0, least=0.0, most=60.0)


def run(lab: Lab[Settings]) -> None:
    """Run the learner's functions; then, on one machine, the two agents."""
    check_variables(lab)
    check_places(lab)
    check_meeting(lab)
    check_machines(lab)
    if lab.member.world_size < 2 or not read_environment().is_on_one_machine:
        lab.report.note("The two agents need at least two ranks, all on this machine: they were not started.")
        return
    lose_an_agent(lab)


def host() -> str:
    """Name this rank's node; nodes that one machine plays have a number each."""
    return f"{socket.gethostname()}-{os.environ.get('GROUP_RANK', '0')}"


def gathered(value: Any) -> list[Any]:
    """Return every rank's value."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def check_variables(lab: Lab[Settings]) -> None:
    """Ask for the variables of a task that a Slurm job has."""
    hosts = lab.function("14.hosts")("node[08-09]")
    lab.report.fact("your hosts", hosts == ["node08", "node09"], True)
    said = {f"SLURM_{name}": value for name, value in JOB.items()}
    lab.report.fact("your variables", lab.function("14.slurm")(said, ["node08", "node09"]) == RIGHT, True)


def check_places(lab: Lab[Settings]) -> None:
    """Group the ranks of this job by their nodes, and do a piece of work once on each."""
    hosts, rank = gathered(host()), lab.member.rank
    inside, between = lab.function("14.places")(hosts)
    own = next(group for group in inside if rank in group)
    right = [other for other, name in enumerate(hosts) if name == hosts[rank]]
    lab.report.fact("your groups inside nodes", lab.everywhere(list(own) == right), True)
    leaders = ", ".join(str(hosts.index(name)) for name in dict.fromkeys(hosts))
    lab.report.fact("your leaders", ", ".join(map(str, between[0])), leaders)
    done: list[int] = []
    lab.function("14.repair")(lambda: done.append(1), right.index(rank))
    lab.report.fact("your work: once per node", sum(map(len, gathered(done))), len(inside))


def check_meeting(lab: Lab[Settings]) -> None:
    """Let the ranks meet as agents, each with one rank more than the one before."""
    rank, n = lab.member.rank, lab.member.world_size
    store = dist.PrefixStore("lab14", dist.distributed_c10d._get_default_store())
    told = gathered(tuple(lab.function("14.rendezvous")(store, 0, n, rank + 1, f"agent{rank}")))
    total = n * (n + 1) // 2
    right = sorted(one[0] for one in told) == list(range(n)) and {one[2] for one in told} == {total}
    lab.report.fact("your rendezvous: world size", total if right else 0, total)


def check_machines(lab: Lab[Settings]) -> None:
    """Compare clocks of the first and the last rank, and the facts of all."""
    sent_back = []
    last, rank = lab.member.world_size - 1, lab.member.rank
    number = torch.zeros(1, dtype=torch.float64, device=lab.member.device)
    for _ in range(20 if last else 0):
        start = time.monotonic()
        if rank == 0:
            dist.send(number, last)
            dist.recv(number, last)
            sent_back.append((start, float(number), time.monotonic()))
        elif rank == last:
            dist.recv(number, 0)
            dist.send(torch.full_like(number, time.monotonic()), 0)
    if sent_back:
        offset, error = lab.function("14.clocks")(sent_back)
        lab.report.measured("clock of the last rank: at most off by", error, "s")
        if read_environment().is_on_one_machine:
            lab.report.fact("clock of the last rank: no offset beyond that", abs(offset) <= error, True)
    facts = {"host": host(), "torch": torch.__version__, "python": platform.python_version()}
    shm = Path("/dev/shm")
    facts["shm"] = "64 MB or more" if shm.is_dir() and shutil.disk_usage(shm).free >= 1 << 26 else "less than 64 MB"
    differences = lab.function("14.preflight")(facts)
    for name, values in differences.items():
        lab.report.say(
            f"preflight: {name}: " + "; ".join(f"{value} on {', '.join(at)}" for value, at in values.items())
        )
    lab.report.fact("your preflight: the same on every rank", len({json.dumps(d) for d in gathered(differences)}), 1)


def lose_an_agent(lab: Lab[Settings]) -> None:
    """Train on this job's ranks; then on as many under two agents, one of which is killed and comes back."""
    settings, n = lab.settings, lab.member.world_size
    names = [tempfile.mkdtemp(prefix="lab14-") if lab.member.rank == 0 else ""]
    dist.broadcast_object_list(names)
    folder = Path(names[0])
    try:
        (folder / "whole").mkdir(exist_ok=True)
        group = dist.new_group(backend="gloo")  # the agents' ranks have one: it adds up in the same order
        whole = train(folder / "whole", settings.updates, lab.member.rank, group=group)
        found = [watched(folder, settings, n) if lab.member.rank == 0 else None]
        dist.broadcast_object_list(found)
        assert found[0] is not None, "rank 0 has watched the agents"
        times, statuses = found[0]
        lab.report.fact("both agents ended well", statuses, "0 and 0")
        final = read_final(folder)
        same = final.keys() == whole.keys() and all(torch.equal(whole[name], final[name]) for name in whole)
        lab.report.fact("weights as without the loss, bit for bit", lab.everywhere(same), True)
        for what, seconds in times.items():
            lab.report.measured(what, seconds, "s")
    finally:
        dist.barrier()
        if lab.member.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def read_final(folder: Path) -> dict[str, torch.Tensor]:
    """Return what the agents' ranks have left; nothing where they did not come to the end."""
    path = folder / "killed" / "final.pt"
    return torch.load(path, weights_only=True) if path.is_file() else {}


def watched(folder: Path, settings: Settings, num_ranks: int) -> tuple[dict[str, float], str]:
    """Start two agents, kill the second in the middle, bring it back; return times, and how both ended."""
    own = folder / "killed"
    own.mkdir()
    with Agents() as agents:

        def start(name: str) -> Agent:
            ranks = (num_ranks + (name == "a")) // 2
            flags = ["--nnodes", "2", "--max-restarts", "3", "-m", "distlab.comm.standby"]
            words = [str(own), str(settings.updates), str(PAUSE_S)]
            return agents.start(name, SCRIPT, words, ranks=ranks, flags=flags)

        begin = time.time()
        both = [start("a"), start("b")]
        wait_for(lambda: len(updates(own)) >= settings.updates // 3, both)
        killed = time.time()
        both[1].kill()
        first, old = updates(own)[0], {one["process"] for one in updates(own)}
        time.sleep(settings.away_s)
        back = time.time()
        both[1] = start("b")
        wait_for(lambda: any(one["process"] not in old for one in updates(own)), both)
        new = next(one for one in updates(own) if one["process"] not in old)
        statuses = " and ".join(str(agent.wait(settings.limit_s)) for agent in both)
    return {
        "start of both agents to the first update": first["time"] - begin,
        "start to the loss": killed - begin,
        "the machine's return to the next update": new["time"] - back,
    }, statuses


def updates(folder: Path) -> list[dict[str, float]]:
    """Return the updates that rank 0 has noted so far."""
    path = folder / "updates.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(is_so: Callable[[], bool], agents: list[Agent]) -> None:
    """Wait until something is so.

    Raises:
        RuntimeError: an agent ended before that.
    """
    while not is_so():
        for agent in agents:
            if agent.process.poll() is not None:
                raise RuntimeError(f"agent {agent.name} ended with {agent.process.returncode}:\n{agent.text[-2000:]}")
        time.sleep(0.02)


if __name__ == "__main__":
    main("14", Settings, run)
