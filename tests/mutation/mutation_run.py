"""Check generated wrong answers, keep what each check said, and count: `python -m mutation_run`, or `make soak`.

    PYTHONPATH=tests/mutation python -m mutation_run            # all exercises; goes on where it was cut off
    PYTHONPATH=tests/mutation python -m mutation_run 02.times   # these, again
    PYTHONPATH=tests/mutation python -m mutation_run --sample 8  # at most so many of each exercise

`equivalent.toml` says why a change passes: most leave an answer right; `summary.json` what the last run
found, which the website shows. The words of each check are kept in work/mutation.json, which git ignores.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from generate import Slip, slips

from distlab.course.grading import Exercise, Mutant, lessons, load_lesson, reference_of
from distlab.course.grading.check import examine
from distlab.course.grading.mutant import build

FOLDER = Path(__file__).resolve().parent
LESSONS = FOLDER.parents[1] / "lessons"
RESULTS = FOLDER.parents[1] / "work" / "mutation.json"
SUMMARY = FOLDER / "summary.json"
EQUIVALENT = FOLDER / "equivalent.toml"
TIMEOUT_S = 6.0  # a wrong answer that hangs need not be waited for as long as a learner's


def exercises() -> list[Exercise]:
    """Return every exercise of every lesson."""
    return [exercise for number in lessons(LESSONS) for exercise in load_lesson(number, LESSONS).exercises]


def said(exercise: Exercise, mutation: Slip) -> str:
    """Check one wrong answer; return "survived", or the fault's code and the first line of the check's words."""
    mutant = Mutant(mutation.name, "", "", 1).body("\n" + mutation.body)
    fn = build(mutant, exercise.name, reference_of(exercise), exercise.imports).fn
    report = examine(replace(exercise, timeout_s=min(exercise.timeout_s, TIMEOUT_S)), fn)
    if report.verdict == "passed":
        return "survived"
    if report.verdict != "wrong":
        return f"checker: {report.verdict}: {report.message}"
    return f"{report.fault}: {report.message.splitlines()[0][:200]}"


def sample_of(exercise: Exercise, sample: int | None) -> list[Slip]:
    """Return an exercise's mutations, or at most `sample` of them, always the same ones."""
    made = list(slips(reference_of(exercise)))
    chosen = random.Random(exercise.name).sample(range(len(made)), min(sample or len(made), len(made)))
    return [made[number] for number in sorted(chosen)]


def load_results() -> dict[str, dict[str, str]]:
    """Return what the checks said: exercise, then mutation, then words."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}  # type: ignore[no-any-return]


def save_results(results: dict[str, dict[str, str]]) -> None:
    """Keep what the checks said."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def equivalents() -> dict[str, set[str]]:
    """Return the changes that leave an answer right, by exercise."""
    known = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8"))
    return {name: {one for one in those if not those[one].startswith("passes:")} for name, those in known.items()}


def run(chosen: list[Exercise], sample: int | None) -> Iterator[tuple[str, str, str]]:
    """Check what has no result yet, keep each result at once, and yield it: exercise, mutation, words."""
    results = load_results()
    for exercise in chosen:
        known = results.setdefault(exercise.name, {})
        for mutation in sample_of(exercise, sample):
            if mutation.name not in known:
                known[mutation.name] = said(exercise, mutation)
                save_results(results)
                yield exercise.name, mutation.name, known[mutation.name]


def summary(results: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Count by exercise the changes, those checked and those that leave the answer right; name others that passed."""
    same, found = equivalents(), {}
    for exercise in exercises():
        if words := results.get(exercise.name):
            right = same.get(exercise.name, set()) & set(words)
            passed = [one for one in words if words[one] == "survived" and one not in right]
            row = {"generated": len(sample_of(exercise, None)), "checked": len(words), "equivalent": len(right)}
            found[exercise.name] = row | {"survived": passed}
    return dict(sorted(found.items()))


def main() -> int:
    """Run, print, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="exercises to check again, such as 02.times")
    parser.add_argument("--sample", type=int, help="at most so many changes of each exercise")
    args = parser.parse_args()
    chosen = [exercise for exercise in exercises() if not args.names or exercise.name in args.names]
    if args.names:
        kept = {name: found for name, found in load_results().items() if name not in args.names}
        save_results(kept)
    for name, mutation, words in run(chosen, args.sample):
        print(f"{name:24} {mutation:60} {words}", flush=True)
    found = summary(load_results())
    SUMMARY.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    wrong = sum(one["checked"] - one["equivalent"] for one in found.values())
    passed = [f"{name}  {one}" for name, row in found.items() for one in row["survived"]]
    print(f"{wrong - len(passed)} of {wrong} generated wrong answers rejected", *passed, sep="\nsurvived: ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
