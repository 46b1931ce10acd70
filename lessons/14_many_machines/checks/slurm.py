"""What Slurm says: lists of hosts, and the variables of a task, for jobs with equal and with unequal nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.values import compare, describe
from distlab.grading.variation.draw import Draw, Vary

LISTS = {
    "node[01-03,07],login": ["node01", "node02", "node03", "node07", "login"],
    "gpu[8-11]": ["gpu8", "gpu9", "gpu10", "gpu11"],
    "rack[2,1]b,a1": ["rack2b", "rack1b", "a1"],
    "alone": ["alone"],
}
_FIRST, _SECOND, _THIRD = list(LISTS)[:3]
KNOWN_LISTS = (  # the list, what a usual mistake makes of it, its name and words
    (_FIRST, [_FIRST], "not expanded", "a pair of brackets stands for several hosts"),
    (_FIRST, _FIRST.split(","), "split at commas", "a comma inside brackets does not end a name"),
    (_FIRST, ["node1", "node2", "node3", "node7", "login"], "zeros", "keep the zeros: as many digits as the range has"),
    (_SECOND, ["gpu08", "gpu09", "gpu10", "gpu11"], "zeros", "this range has no zeros: its first number has one digit"),
    (_FIRST, ["node01", "node02", "node07", "login"], "end left out", "a range includes its last number"),
    (
        _FIRST,
        ["node01", "node02", "login"],
        "end left out",
        "a range includes its last number; one number is a range too",
    ),
    (_FIRST, ["node01", "node03", "node07", "login"], "ends only", "a range has the numbers between its ends too"),
    (_FIRST, ["node01", "node02", "node03", "login"], "first part only", "brackets hold several parts, with commas"),
    (_FIRST, ["node01", "node02", "node03", "node07"], "brackets only", "a name without brackets is a host as well"),
    (_THIRD, ["rack2", "rack1", "a1"], "tail", "letters behind the brackets belong to every name"),
    (_THIRD, ["a1", "rack1b", "rack2b"], "order", "keep the order: Slurm numbers tasks by it, and the first is master"),
)


def drive_lists(fn: Callable[[str], Any]) -> list[Any]:
    """Ask for the hosts of each list."""
    return [fn(text) for text in LISTS]


def judge_lists(evidence: Evidence) -> Iterator[Fault]:
    """Every host, once, in the order of the list."""
    answers = dict(zip(LISTS, evidence.results[0], strict=True))
    for text, wrong, code, words in KNOWN_LISTS:
        if answers[text] == wrong:
            yield Fault(code, f"{text!r} gave {wrong}; expected {LISTS[text]}: {words}")
    for text, want in LISTS.items():
        fault = compare(answers[text], want, f"the hosts of {text!r}")
        if fault is not None:
            yield fault


def _draw_list(draw: Draw) -> tuple[Any, ...]:
    names = []
    for head in ("n", "gpu", "a-")[: draw.one_of(1, 2, 3)]:
        first, width = draw.one_of(0, 8, draw.integer(1, 120)), draw.one_of(1, 3, 4)
        last = first + draw.one_of(0, 1, draw.integer(2, 4), draw.integer(9, 40))
        parts = [f"{first:0{width}}-{last:0{width}}", f"{last + 2:0{width}}"][: draw.one_of(1, 2)]
        names.append(f"{head}[{','.join(parts)}]{draw.one_of('', 'x')}" if draw.one_of(1, 1, 0) else f"{head}{first}")
    return (",".join(names),)


LIST_VARY = Vary(_draw_list)


def budget_lists(evidence: Evidence) -> list[str]:
    """Say how many lists were asked."""
    return [f"{len(LISTS)} lists, {sum(map(len, LISTS.values()))} hosts"]


_RANGE = "range(int(first), int(last or first) + 1)"
WRONG_LISTS = (
    Mutant("whole names", "not expanded", "stands for several hosts", 1).body("return [node_list]"),
    Mutant("every comma", "split at commas", "does not end a name", 1).body('return node_list.split(",")'),
    Mutant("numbers", "zeros", "keep the zeros", 1).edit("str(number).zfill(len(first))", "number"),
    Mutant("two digits", "zeros", "this range has no zeros", 1).edit(
        "str(number).zfill(len(first))", "str(number).zfill(len(last or first))"
    ),
    Mutant("Python's range", "end left out", "includes its last", 1).edit(
        _RANGE, "range(int(first), max(int(last or first), int(first) + 1))"
    ),
    Mutant("Python's range, of one too", "end left out", "one number is a range too", 1).edit(
        _RANGE, "range(int(first), int(last or first))"
    ),
    Mutant("two ends", "ends only", "the numbers between", 1).edit(_RANGE, "dict.fromkeys((first, last or first))"),
    Mutant("one range", "first part only", "several parts", 1).edit('inside.split(",")', 'inside.split(",")[:1]'),
    Mutant("brackets wanted", "brackets only", "without brackets", 1).edit('if first else [""]', "if first else []"),
    Mutant("no tail", "tail", "letters behind", 1).edit("{tail}", ""),
    Mutant("sorted", "order", "keep the order", 1)
    .edit("return hosts", "return sorted(hosts)")
    .known("sorts the names; the order of the list is asked"),
    Mutant("text", "returned", "expected ['node01'", 1).edit("return hosts", 'return ",".join(hosts)'),
)

Job = tuple[tuple[str, ...], tuple[int, ...], int]  # hosts, tasks on each, number of the job
JOBS: tuple[Job, ...] = (
    (("n1", "n2", "n7"), (4, 4, 1), 81_234),
    (("a", "b"), (2, 2), 29_500),
    (("x", "y"), (1, 3), 7),
)


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


def right(job: Job, rank: int) -> dict[str, str]:
    """Return what a task's ranks are to be told."""
    hosts, sizes, number = job
    said = task(hosts, sizes, number, rank)
    found = {"RANK": "PROCID", "LOCAL_RANK": "LOCALID", "WORLD_SIZE": "NTASKS", "GROUP_RANK": "NODEID"}
    found = {name: said[f"SLURM_{source}"] for name, source in found.items()}
    own = str(sizes[int(said["SLURM_NODEID"])])
    return found | {"LOCAL_WORLD_SIZE": own, "MASTER_ADDR": hosts[0], "MASTER_PORT": str(20_000 + number % 10_000)}


def drive_variables(fn: Callable[..., Any]) -> list[list[Any]]:
    """Ask for the variables of every task of each job."""
    return [[fn(task(*job, rank), list(job[0])) for rank in range(sum(job[1]))] for job in JOBS]


def judge_variables(evidence: Evidence) -> Iterator[Fault]:
    """Every variable of every task; a wrong one is told by what it is instead."""
    for job, answers in zip(JOBS, evidence.results[0], strict=True):
        for rank, got in enumerate(answers):
            what, want, said = f"task {rank} of {sum(job[1])}", right(job, rank), task(*job, rank)
            if not isinstance(got, dict) or set(got) != set(want):
                names = ", ".join(sorted(map(str, got))) if isinstance(got, dict) else describe(got)
                yield Fault("names", f"{what}: expected {', '.join(sorted(want))}, got {names}")
            for name, value in want.items():
                if not isinstance(got[name], str):
                    text = f"{what}: {name} is {describe(got[name])}, of type {type(got[name]).__name__}"
                    yield Fault("not text", f"{text}: variables of the environment are text")
                if got[name] != value:
                    text = f"{what}: {name} is {got[name]!r}, expected {value!r}"
                    yield Fault(name, f"{text}{_meaning(name, got[name], said, job) or _same(name, evidence)}")


def _meaning(name: str, got: str, said: dict[str, str], job: Job) -> str:
    """Say what a wrong value is instead."""
    if name == "MASTER_PORT":
        return ". All tasks of a job must agree on it, and other jobs should not: 20000 + the job's number % 10000"
    if name == "LOCAL_WORLD_SIZE":
        counts, node = said["SLURM_TASKS_PER_NODE"], said["SLURM_NODEID"]
        return f". SLURM_TASKS_PER_NODE={counts} lists the nodes; this is node {node}"
    if name == "MASTER_ADDR" and got in job[0]:
        return f", which is host {job[0].index(got)} of the job: each task must name the same one, the first"
    return ""


def _same(name: str, evidence: Evidence) -> str:
    """Say which of Slurm's variables a wrong one is, where it is that one in every task of every job."""
    rows = zip(JOBS, evidence.results[0], strict=True)
    pairs = [
        (task(*job, rank), got) for job, answers in rows for rank, got in enumerate(answers) if isinstance(got, dict)
    ]
    same = [key for key in pairs[0][0] if all(got.get(name) == said[key] for said, got in pairs)]
    return f". That is {' or '.join(same)}" if same else ""


def budget_variables(evidence: Evidence) -> list[str]:
    """Say how many tasks were asked."""
    return [f"{sum(sum(job[1]) for job in JOBS)} tasks of {len(JOBS)} jobs, one with unequal nodes"]


def _draw_task(draw: Draw) -> tuple[Any, ...]:
    sizes = tuple(draw.one_of(1, 2, draw.integer(1, 8)) for _ in range(draw.one_of(2, 1, draw.integer(3, 5))))
    hosts = tuple(f"h{draw.integer(10 * node, 10 * node + 9)}" for node in range(len(sizes)))
    return task(hosts, sizes, draw.integer(1, 10**6), draw.integer(0, sum(sizes) - 1)), list(hosts)


VARIABLES_VARY = Vary(_draw_task)
_SIZE, _PORT = 'sizes[int(slurm["SLURM_NODEID"])]', 'str(20000 + int(slurm["SLURM_JOB_ID"]) % 10000)'
WRONG_VARIABLES = (
    Mutant("local as rank", "RANK", "That is SLURM_LOCALID", 1).edit("SLURM_PROCID", "SLURM_LOCALID"),
    Mutant("rank as local", "LOCAL_RANK", "That is SLURM_PROCID", 1).edit("SLURM_LOCALID", "SLURM_PROCID"),
    Mutant("nodes as world", "WORLD_SIZE", "SLURM_NNODES", 1).edit("SLURM_NTASKS", "SLURM_NNODES"),
    Mutant("equal nodes", "LOCAL_WORLD_SIZE", "lists the nodes", 1).edit(
        _SIZE, 'str(int(slurm["SLURM_NTASKS"]) // len(hosts))'
    ),
    Mutant("first node's", "LOCAL_WORLD_SIZE", "lists the nodes", 1).edit(_SIZE, "sizes[0]"),
    Mutant("node by division", "GROUP_RANK", "expected", 1).edit(
        '"GROUP_RANK": slurm["SLURM_NODEID"]', '"GROUP_RANK": str(int(slurm["SLURM_PROCID"]) // len(hosts))'
    ),
    Mutant("own host", "MASTER_ADDR", "must name the same one", 1).edit("hosts[0]", 'slurm["SLURMD_NODENAME"]'),
    Mutant("last host", "MASTER_ADDR", "which is host 2", 1).edit("hosts[0]", "hosts[-1]"),
    Mutant("one port for all", "MASTER_PORT", "other jobs should not", 1).edit(_PORT, '"29500"'),
    Mutant("a port per task", "MASTER_PORT", "must agree", 1).edit(_PORT, 'str(20000 + int(slurm["SLURM_PROCID"]))'),
    Mutant("a number", "not text", "are text", 1).edit(_PORT, _PORT[4:-1]),
    Mutant("no local size", "names", "expected GROUP_RANK", 1).without(f'"LOCAL_WORLD_SIZE": {_SIZE},\n'),
)
