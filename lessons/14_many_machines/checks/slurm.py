"""What Slurm says: lists of hosts, and the variables of a task, for jobs with equal and with unequal nodes."""

from __future__ import annotations

from typing import Any

from distlab.course.grading.cases import Cases
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Evidence, Mutant

LISTS = ("node[01-03,07],login", "gpu[8-11]", "rack[2,1]b,a1", "alone")

drive_hosts = Cases({repr(text): (text,) for text in LISTS})


def _draw_list(draw: Draw) -> tuple[Any, ...]:
    names = []
    for head in ("n", "gpu", "a-")[: draw.one_of(1, 2, 3)]:
        first, width = draw.one_of(0, 8, draw.integer(1, 120)), draw.one_of(1, 3, 4)
        last = first + draw.one_of(0, 1, draw.integer(2, 4), draw.integer(9, 40))
        parts = [f"{first:0{width}}-{last:0{width}}", f"{last + 2:0{width}}"][: draw.one_of(1, 2)]
        names.append(f"{head}[{','.join(parts)}]{draw.one_of('', 'x')}" if draw.one_of(1, 1, 0) else f"{head}{first}")
    return (",".join(names),)


vary_hosts = Vary(_draw_list, num_calls=24)


def budget_hosts(evidence: Evidence) -> list[str]:
    """Say how many lists were asked."""
    return [f"{len(LISTS)} lists, {sum(len(made['result']) for made in evidence.results[0].values())} hosts"]


_RANGE = "range(int(first), int(last or first) + 1)"
WRONG_HOSTS = (
    Mutant("ranges alone", "ranges alone", "in brackets a number without a dash is a host too", 1).edit(
        'for part in inside.split(","):',
        'for part in inside.split(","):\n    if inside and "-" not in part:\n        continue',
    ),
    Mutant("whole names", "not expanded", "a pair of brackets stands for several hosts: expand it", 1).body(
        "return [node_list]"
    ),
    Mutant("every comma", "split at commas", "a comma inside brackets does not end a name", 1).body(
        'return node_list.split(",")'
    ),
    Mutant("numbers", "zeros lost", "keep the zeros: as many digits as the first number of the range has", 1).edit(
        "str(number).zfill(len(first))", "number"
    ),
    Mutant("two digits", "zeros added", "this range has no zeros: its first number has one digit", 1).edit(
        "str(number).zfill(len(first))", "str(number).zfill(len(last or first))"
    ),
    Mutant("Python's range", "end left out", "a range includes its last number", 1).edit(
        _RANGE, "range(int(first), max(int(last or first), int(first) + 1))"
    ),
    Mutant(
        "Python's range, of one too", "end left out", "a range includes its last number; one number is a range too", 1
    ).edit(_RANGE, "range(int(first), int(last or first))"),
    Mutant("two ends", "ends only", "a range has the numbers between its ends too", 1).edit(
        _RANGE, "dict.fromkeys((first, last or first))"
    ),
    Mutant("one range", "first part only", "brackets hold several parts, with commas between them", 1).edit(
        'inside.split(",")', 'inside.split(",")[:1]'
    ),
    Mutant("brackets wanted", "brackets only", "a name without brackets is a host as well", 1).edit(
        'if first else [""]', "if first else []"
    ),
    Mutant("no tail", "tail", "letters behind the brackets belong to every name", 1).edit("{tail}", ""),
    Mutant(
        "sorted", "sorted names", "keep the order: Slurm numbers tasks by it, and the first host is the master", 1
    ).edit("return hosts", "return sorted(hosts)"),
    Mutant("text", "returned", "expected ['node01'", 1).edit("return hosts", 'return ",".join(hosts)'),
)

Job = tuple[tuple[str, ...], tuple[int, ...], int]  # hosts, tasks on each, number of the job
JOBS: tuple[Job, ...] = ((("n1", "n2", "n7"), (4, 4, 1), 81_234), (("a", "b"), (2, 2), 29_500), (("x", "y"), (1, 3), 7))


def task(hosts: tuple[str, ...], sizes: tuple[int, ...], job: int, rank: int) -> dict[str, str]:
    """Return what Slurm tells a task."""
    node = next(node for node in range(len(sizes)) if rank < sum(sizes[: node + 1]))
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1][1] += 1
        else:
            runs.append([size, 1])
    said = {"PROCID": rank, "LOCALID": rank - sum(sizes[:node]), "NTASKS": sum(sizes), "NODEID": node}
    said |= {"NNODES": len(sizes), "JOB_ID": job}
    texts = {f"SLURM_{name}": str(value) for name, value in said.items()}
    counts = ",".join(f"{size}(x{times})" if times > 1 else str(size) for size, times in runs)
    return texts | {"SLURM_TASKS_PER_NODE": counts, "SLURMD_NODENAME": hosts[node]}


def _tasks() -> dict[str, tuple[Any, ...]]:
    return {
        f"job {job}, task {rank} of {sum(sizes)}": (task(hosts, sizes, job, rank), list(hosts))
        for hosts, sizes, job in JOBS
        for rank in range(sum(sizes))
    }


drive_slurm = Cases(_tasks())


def budget_slurm(evidence: Evidence) -> list[str]:
    """Say how many tasks were asked."""
    return [f"{sum(sum(job[1]) for job in JOBS)} tasks of {len(JOBS)} jobs, one with unequal nodes"]


def _draw_task(draw: Draw) -> tuple[Any, ...]:
    sizes = tuple(draw.one_of(1, 2, draw.integer(1, 8)) for _ in range(draw.one_of(2, 1, draw.integer(3, 5))))
    hosts = tuple(f"h{draw.integer(10 * node, 10 * node + 9)}" for node in range(len(sizes)))
    return task(hosts, sizes, draw.integer(1, 10**6), draw.integer(0, sum(sizes) - 1)), list(hosts)


vary_slurm = Vary(_draw_task, num_calls=24)
_SIZE, _PORT = 'sizes[int(slurm["SLURM_NODEID"])]', 'str(20000 + int(slurm["SLURM_JOB_ID"]) % 10000)'
_SAME = "each task must name the same master, the first of the hosts"
WRONG_SLURM = (
    Mutant("local as rank", "RANK", "RANK is SLURM_PROCID, yours is SLURM_LOCALID", 1).edit(
        "SLURM_PROCID", "SLURM_LOCALID"
    ),
    Mutant("rank as local", "LOCAL_RANK", "LOCAL_RANK is SLURM_LOCALID, yours is SLURM_PROCID", 1).edit(
        "SLURM_LOCALID", "SLURM_PROCID"
    ),
    Mutant("nodes as world", "WORLD_SIZE", "WORLD_SIZE is SLURM_NTASKS, yours is SLURM_NNODES", 1).edit(
        "SLURM_NTASKS", "SLURM_NNODES"
    ),
    Mutant(
        "equal nodes", "LOCAL_WORLD_SIZE", "nodes need not be equal: SLURM_TASKS_PER_NODE lists them by SLURM_NODEID", 1
    ).edit(_SIZE, 'str(int(slurm["SLURM_NTASKS"]) // len(hosts))'),
    Mutant(
        "first node's",
        "LOCAL_WORLD_SIZE",
        "it takes the first node's tasks: yours is number SLURM_NODEID in the list",
        1,
    ).edit(_SIZE, "sizes[0]"),
    Mutant(
        "node by division", "GROUP_RANK", "GROUP_RANK is SLURM_NODEID: nodes may have different numbers of tasks", 1
    ).edit('"GROUP_RANK": slurm["SLURM_NODEID"]', '"GROUP_RANK": str(int(slurm["SLURM_PROCID"]) // len(hosts))'),
    Mutant("own host", "MASTER_ADDR", f"MASTER_ADDR is the task's own host: {_SAME}", 1).edit(
        "hosts[0]", 'slurm["SLURMD_NODENAME"]'
    ),
    Mutant("last host", "MASTER_ADDR", f"MASTER_ADDR is the last host: {_SAME}", 1).edit("hosts[0]", "hosts[-1]"),
    Mutant(
        "one port for all", "MASTER_PORT", "two jobs should not share a port: 20000 + the job's number % 10000", 1
    ).edit(_PORT, '"29500"'),
    Mutant(
        "a port per task", "MASTER_PORT", "all tasks of a job share the port: 20000 + the job's number % 10000", 1
    ).edit(_PORT, 'str(20000 + int(slurm["SLURM_PROCID"]))'),
    Mutant("a number", "not text", "variables of the environment are text, and this port is a number", 1).edit(
        _PORT, _PORT[4:-1]
    ),
    Mutant("largest node", "LOCAL_WORLD_SIZE", "it is the largest node's number of tasks; take this node's", 1).edit(
        _SIZE, "max(sizes, key=int)"
    ),
    Mutant("no local size", "names", "LOCAL_WORLD_SIZE is missing", 1).without(f'"LOCAL_WORLD_SIZE": {_SIZE},\n'),
    Mutant("repeats", "repeats", "SLURM_TASKS_PER_NODE counts repeats: 2(x3) are three nodes of 2", 1)
    .edit("* int(repeats or 1)", "")
    .edit(_SIZE, 'sizes[min(int(slurm["SLURM_NODEID"]), len(sizes) - 1)]'),
    Mutant("text", "MASTER_PORT", "a job of fewer than four digits has a port too: add numbers, not texts", 1).edit(
        _PORT, '"2" + slurm["SLURM_JOB_ID"][-4:]'
    ),
)
