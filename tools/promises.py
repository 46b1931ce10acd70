"""Try what distlab promises, keep what came of each promise, and write benchmarks/PROMISES.md.

After an interrupt the same command goes on.

    python tools/promises.py                # all
    python tools/promises.py --only R4 S2   # some of them anew
    python tools/promises.py --table        # the page alone
    python tools/promises.py --others       # options for pytest that leave these tests out

The promises, their tests and their bars stand in tests/promises.toml. A test says by `record_property` how often it
"tried" and how often that "held", "seconds" that have a limit, and a "figure" in words; a test that says nothing
counts as one try. Limits of time are judged here and by no test, since a busy machine is no fault of the code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from distlab.measure import this_machine
from distlab.measure.machine.ranks import MAX_TAKEN_CORES, busy_s

ROOT = Path(__file__).resolve().parent.parent
PROMISES = ROOT / "tests" / "promises.toml"
KEPT, TABLE = ROOT / "benchmarks" / "promises.json", ROOT / "benchmarks" / "PROMISES.md"
HEAD = """# Promises, and what came of them

Each promise is tried by the tests that tests/promises.toml names; a quick part of most is in `make test`. Written by
`make promises` (tools/promises.py), the first part of `make soak`. Machines and versions stand below the table.

| | promise | tried | held | figure | bar | holds | date | took |
|---|---|---|---|---|---|---|---|---|
"""
LIMIT_S = 1800  # of one test


def promises() -> dict[str, dict[str, Any]]:
    """Return tests/promises.toml."""
    return tomllib.loads(PROMISES.read_text())


def kept() -> dict[str, Any]:
    """Return what is kept of earlier runs: "results" by promise, and the promises that are "left" of the last run."""
    found: dict[str, Any] = json.loads(KEPT.read_text()) if KEPT.exists() else {"left": [], "results": {}}
    return found


def cores_of_others() -> float:
    """Return how many cores other programs keep busy, from one second of waiting."""
    before, begin = busy_s(), time.monotonic()
    time.sleep(1)
    after = busy_s()
    return 0.0 if before is None or after is None else (after - before) / (time.monotonic() - begin)


def attempt(tests: list[str]) -> dict[str, Any]:
    """Run tests and return what they counted."""
    busy, begin = cores_of_others(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = [
            f"--junitxml={report}",
            "--override-ini=junit_duration_report=call",
            "--override-ini=junit_family=xunit1",
        ]
        options += ["--timeout", str(LIMIT_S), f"--override-ini=faulthandler_timeout={LIMIT_S + 100}", "-rs"]
        command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if done.returncode == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        has_report = report.is_file()  # not after a test over its limit: that ends the whole run
        found = counted(ElementTree.parse(report).getroot().iter("testcase") if has_report else ())
    if (done.returncode not in (0, 1) or not has_report) and not found["failed"]:
        found["failed"].append(f"pytest ended with status {done.returncode}")
    took = time.monotonic() - begin
    machine = this_machine().as_dict()
    return found | {"took_s": round(took, 1), "others": round(max(busy, cores_of_others()), 2), "machine": machine}


def counted(cases: Iterable[ElementTree.Element]) -> dict[str, Any]:
    """Add up what tests say of themselves in pytest's report."""
    found: dict[str, Any] = {"tried": 0, "held": 0, "figures": [], "skipped": [], "failed": []}
    times: list[float] = []
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        said = [(one.get("name"), one.get("value", "")) for one in case.iter("property")]
        skip = case.find("skipped")
        if skip is not None:
            found["skipped"].append(skip.get("message", ""))
            continue
        wrong = case.find("failure") is not None or case.find("error") is not None
        tried = [int(value) for key, value in said if key == "tried"] or [1]
        held = [int(value) for key, value in said if key == "held"] or ([0] if wrong else tried)
        timed = [float(value) for key, value in said if key == "seconds"]
        times += timed or [float(case.get("time", 0))]  # all of a test that times no part of itself
        found["tried"] += sum(tried)
        found["held"] += sum(held)
        found["figures"] += [value for key, value in said if key == "figure"]
        found["failed"] += [name] if wrong else []
    return found | ({"median_s": round(median(times), 2), "slowest_s": round(max(times), 2)} if times else {})


def holds(promise: dict[str, Any], result: dict[str, Any]) -> bool:
    """Return whether all that was tried held, often enough and within the limit of time."""
    in_time = "limit_s" not in promise or result.get("slowest_s", 0) <= promise["limit_s"]
    return not result["failed"] and result["held"] == result["tried"] >= promise.get("least", 1) and in_time


def row(name: str, promise: dict[str, Any], result: dict[str, Any] | None) -> str:
    """Return a promise's row of the table."""
    bar = f"all, each in <= {promise['limit_s']} s" if "limit_s" in promise else "all"
    cells = [name, promise["promise"]]
    if result is None:
        return f"| {' | '.join([*cells, promise['tries'], '', 'not tried yet', bar, '', '', ''])} |"
    words = list(dict.fromkeys(result["figures"]))
    if "limit_s" in promise and "median_s" in result:
        words.insert(0, f"median {result['median_s']:g} s, slowest {result['slowest_s']:g} s")
    words += [f"not tried here: {reason.removeprefix('Skipped: ')}" for reason in dict.fromkeys(result["skipped"])]
    words += [f"FAILED: {failed}" for failed in result["failed"]]
    busy = f", busy ({result['others']:.1f} cores)" if result["others"] > MAX_TAKEN_CORES else ""
    verdict = "yes" if holds(promise, result) else "**no**"
    cells += [f"{result['tried']:,} {promise['tries']}", f"{result['held']:,}", "; ".join(words), bar, verdict]
    cells += [result["machine"]["date"], f"{result['took_s']:.0f} s{busy}"]
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return what benchmarks/PROMISES.md should contain."""
    results = kept()["results"]
    rows = [row(name, promise, results.get(name)) for name, promise in promises().items()]
    held = sum(holds(promise, results[name]) for name, promise in promises().items() if name in results)
    left = len(rows) - len(results)
    waiting = f"; {left} were not tried here yet" if left else ""
    machines = sorted({machine_of(one) for one in results.values()})
    tail = ["", f"{held} of {len(rows)} promises hold{waiting}.", "", *machines]
    return HEAD + "\n".join([*rows, *tail]) + "\n"


def machine_of(result: dict[str, Any]) -> str:
    machine = result["machine"]
    where = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    return f"- {machine['date']}: {where}, {machine['system']}, Python {machine['python']}, torch {machine['torch']}."


def save(left: list[str], results: dict[str, Any]) -> None:
    """Keep the results and what is left to try, and write the page."""
    new = KEPT.with_suffix(".new")
    new.write_text(json.dumps({"left": left, "results": results}, indent=1, sort_keys=True) + "\n")
    new.replace(KEPT)
    TABLE.write_text(page())


def run(names: list[str], left_after: list[str]) -> Iterator[bool]:
    """Try promises one after the other, keep each result at once, and yield whether each holds."""
    for place, name in enumerate(names, 1):
        promise = promises()[name]
        print(f"[{place}/{len(names)}] {name} {promise['promise']}", flush=True)
        results = kept()["results"]
        results[name] = attempt(promise["tests"])
        save([*names[place:], *(one for one in left_after if one not in names)], results)
        print(row(name, promise, results[name]), flush=True)
        yield holds(promise, results[name])


def main() -> int:
    """Do what the command line says; the exit status is 1 where a promise does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(promises()), metavar="NAME", help="these promises, anew")
    parser.add_argument("--table", action="store_true", help="write the page from what is kept")
    parser.add_argument("--others", action="store_true", help="print --deselect for each test of a promise")
    arguments = parser.parse_args()
    if arguments.others:
        print(*(f"--deselect=tests/{test}" for promise in promises().values() for test in promise["tests"]))
        return 0
    if arguments.table:
        TABLE.write_text(page())
        return 0
    left = [name for name in kept()["left"] if name in promises()]
    if left and not arguments.only:
        print(f"going on with the run that was interrupted: {', '.join(left)} are left")
    names = arguments.only or left or list(promises())
    save(left if arguments.only else names, kept()["results"])
    try:
        verdicts = list(run(names, left))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on", file=sys.stderr)
        return 130
    print(page())
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
