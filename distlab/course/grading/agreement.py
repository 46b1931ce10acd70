"""A known wrong version is the diagnosis: it is called on the same cases, and an answer that agrees gets its words.

It runs after a wrong result, and only then, on the ranks that are there: on the case that failed first, and on the
others where it agrees there. One that would hang or raise is not run. So a wrong version is written once, as an edit of
the reference; its `says` is what a learner with that fault is told. Drawn calls are cases like any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from distlab.course.grading.cases import (
    RESULT,
    Cases,
    Place,
    alike,
    compared_with_rank_0,
    difference,
    few_cases,
    leaves,
)
from distlab.course.grading.diagnosis.traffic import calls, most_sent, over_budget, sent_bytes
from distlab.course.grading.diagnosis.values import DIVIDED_TWICE, SUM_NOT_MEAN, is_telling
from distlab.course.grading.exercise import ENDED, SEEN, Evidence, Exercise, Fault
from distlab.course.grading.mutant import Mutant, build

if TYPE_CHECKING:
    from distlab.comm import Ranks
    from distlab.course.grading.variation.calls import DrawnCalls

LIMIT_S = 1.5  # of one wrong version: on some numbers of ranks it may wait without end
BUDGET_S = 4.0  # of all of them: one by one they take less than half a second, then two at once
SLOWER = 20.0  # times the reference's own run is added to both: on a busy machine all runs take longer
AVERAGED = {"sum not mean": SUM_NOT_MEAN, "divided twice": DIVIDED_TWICE}  # what a ratio is told to be, of ranks
NO_CAUSE = AVERAGED.keys() | {"dtype", "changed argument", "argument changed"}
FEWEST = 3  # results without a drawn digit that must be wrong alike: fewer agree by chance
NOT_RUN = ENDED | {"not waited", "kept", "state left behind"}
_Test = Callable[[Mapping[Place, Any]], bool]


def fault_of(exercise: Exercise, evidence: Evidence, reference: Callable[..., Any], ranks: Ranks) -> Fault | None:
    """Compare an answer with the reference on the exercise's cases: values, then calls by its judge, then bytes.

    A wrong value, or too many bytes, is named by the wrong version that agrees.
    """
    cases = exercise.drive
    assert isinstance(cases, Cases)
    evidence = evidence._replace(results=compared_with_rank_0(evidence.results))
    begun = time.perf_counter()
    wanted = _driven(cases, reference, ranks)
    known = _Known(exercise, reference, ranks, cases, wanted, slower_s=SLOWER * (time.perf_counter() - begun))
    pair, takes = (evidence.results, wanted.results), cases.use or reference
    seen = difference(*pair, takes)
    if seen is not None and (wrong := known.by_values(evidence)) is not None:
        return _named(wrong, seen)
    if seen is not None:
        divided = difference(*pair, takes, num_averaged=ranks.world_size) or seen
        is_mean = divided.code == "divided twice" or any(wrong.fault in AVERAGED for wrong in exercise.mutants)
        seen = divided if is_mean else seen
        return seen._replace(message=seen.message + few_cases(*pair))
    fault = None if exercise.judge is None else next(iter(exercise.judge(evidence)), None)
    if fault is None and cases.most_bytes:
        seen = over_budget(evidence, most_sent(wanted), cases.needs, slack=cases.most_bytes - 1)
        fault = seen and _named(known.by_bytes(evidence, cases), seen)
    return fault


def cause_in(calls: DrawnCalls, exercise: Exercise, evidence: Evidence, wanted: Evidence, ranks: Ranks) -> str:
    """Return the words of the wrong version whose results are those of an answer in all drawn calls, or ""."""
    known = _Known(exercise, calls.reference, ranks, calls.bare(), wanted, calls.vary.scale)
    wrong = known.by_values(evidence)
    return "" if wrong is None else f"{words_of(wrong)}: so it is in all {len(wanted.results[0])} drawn calls."


def _named(wrong: Mutant | None, seen: Fault) -> Fault:
    return seen if wrong is None else Fault(wrong.fault, seen.message, f"{words_of(wrong)}.")


def words_of(wrong: Mutant) -> str:
    """Return what is told to who agrees with a wrong version."""
    return f"it {wrong.does}" if wrong.does else wrong.says.rstrip(".")


def told(exercise: Exercise, world_size: int) -> Iterator[Mutant]:
    """Yield the wrong versions whose words say more than what is seen, those last that more ranks reveal for sure."""
    for wrong in sorted(exercise.mutants, key=lambda wrong: wrong.world > world_size):
        has_words = wrong.does or (isinstance(exercise.drive, Cases) and wrong.fault not in NO_CAUSE | SEEN)
        if has_words and not (wrong.ends or wrong.fault in NOT_RUN):
            yield wrong


def two_at_once(known: Iterable[Mutant]) -> Iterator[Mutant]:
    """Yield what makes the mistakes of two wrong versions: the reference with the edits of both."""
    for a, b in combinations([wrong for wrong in known if wrong.new_body is None], 2):
        both = f"two mistakes: {words_of(a)}; and {words_of(b)}"
        yield replace(a, edits=(*a.edits, *b.edits), preamble=f"{a.preamble}\n{b.preamble}", says=both, does="")


def _driven(cases: Cases | DrawnCalls, fn: Callable[..., Any] | None, ranks: Ranks) -> Evidence:
    results = ranks.run(cases, fn)
    results = compared_with_rank_0(results) if isinstance(cases, Cases) else results
    return Evidence(ranks.world_size, results, ranks.records())


class _Known(NamedTuple):
    exercise: Exercise
    reference: Callable[..., Any]
    ranks: Ranks
    cases: Cases | DrawnCalls
    wanted: Evidence
    scale: float = 0.0
    slower_s: float = 0.0

    def by_values(self, evidence: Evidence) -> Mutant | None:
        """Return the wrong version that agrees with an answer on everything; or that explains most of what is wrong.

        Of several that agree, the first is told that makes the same calls. Two known mistakes are told both; else the
        one that explains what is wrong first; not by drawn calls, where few values may be alike by chance.
        """
        got, want, is_drawn = leaves(evidence.results), leaves(self.wanted.results), not isinstance(self.cases, Cases)
        wrong_at = self._differ(got, want)
        if is_drawn and len(wrong_at) < FEWEST and not any(is_telling(got.get(place)) for place in wrong_at):
            return None
        first, made = wrong_at[0], _operations(evidence)
        whole, in_part = list[Mutant](), list[tuple[float, Mutant]]()

        def is_wrong_alike(theirs: Mapping[Place, Any]) -> bool:
            here = [place for place in wrong_at if place[1] == first[1] and alike(got, theirs, place, self.scale)]
            return first in here or any(is_telling(got.get(place)) for place in here)

        for mistakes in (1, 2) if is_telling(got.get(first)) else (1,):
            for wrong, run in self._runs(is_wrong_alike, first[1], mistakes):
                theirs = leaves(run.results)
                odd = self._differ(theirs, want)
                agrees = [place for place in odd if alike(got, theirs, place, self.scale)]
                if len(agrees) == len(odd) and set(odd) == set(wrong_at):
                    if _operations(run) == made:
                        return wrong
                    whole.append(wrong)
                elif mistakes == 1 and not is_drawn:
                    telling = {place for place in (*odd, *wrong_at) if is_telling(got.get(place))}  # of many digits
                    is_sure, sizes = not telling.isdisjoint(agrees), (len(odd), len(wrong_at))
                    enough = min(sizes) if is_sure else max(1.5 * sizes[0], sizes[1])
                    if 2 * len(agrees) >= enough and (is_sure or not telling):
                        in_part.append((len(agrees) / len({*odd, *wrong_at}), wrong))
            if whole:
                return whole[0]
        return max(in_part, key=lambda pair: pair[0])[1] if in_part else None

    def by_bytes(self, evidence: Evidence, cases: Cases) -> Mutant | None:
        """Return the wrong version that sends as much on each rank, by the same calls if there is one.

        Else the dearest that sends no more.
        """
        found: list[tuple[bool, int, Mutant]] = []  # does it send as much on each rank; the most that one sends
        want, first = leaves(self.wanted.results), next(iter(self.wanted.results[0]))
        case = {place: value for place, value in want.items() if place[1] == first}
        for wrong, run in self._runs(lambda theirs: not self._differ(theirs, case), first):
            most = most_sent(run)
            is_right = most > cases.most_bytes * most_sent(self.wanted) and not self._differ(leaves(run.results), want)
            if not is_right or (self.exercise.judge is not None and next(iter(self.exercise.judge(run)), None)):
                continue  # its calls are wrong, and the answer's are right
            sends_alike = _sent(run) == _sent(evidence)
            if sends_alike and _operations(run) == _operations(evidence):
                return wrong
            if sends_alike or most <= most_sent(evidence):
                found.append((sends_alike, most, wrong))
        return max(found, key=lambda one: one[:2])[2] if found else None

    def _runs(self, goes_on: _Test, case: str, mistakes: int = 1) -> Iterator[tuple[Mutant, Evidence]]:
        """Yield each wrong version with its run of all cases, if it goes on after its run of one."""
        from distlab.comm import RankError, RankTimeout

        begun, limit_s, lost = time.perf_counter(), self.ranks.timeout_s, False
        known, size = [*told(self.exercise, self.ranks.world_size)], self.ranks.world_size
        means = [wrong for wrong in self.exercise.mutants if wrong.fault in AVERAGED]
        known += [replace(wrong, says=AVERAGED[wrong.fault].format(size)) for wrong in means]
        self.ranks.timeout_s = min(limit_s, LIMIT_S + self.slower_s)
        try:
            for wrong in known if mistakes == 1 else two_at_once(known):
                if time.perf_counter() - begun > BUDGET_S + max(self.slower_s, min(5 * self.slower_s, 10.0)):
                    return
                try:
                    fn = build(wrong, self.exercise.name, self.reference, self.exercise.imports).fn
                    run = _driven(self.cases.at(case), fn, self.ranks)
                    if not goes_on(leaves(run.results)):
                        continue
                    if len(self.wanted.results[0]) > 1:
                        run = _driven(self.cases, fn, self.ranks)
                except RankTimeout:
                    if lost:
                        return
                    lost = True
                    continue
                except (RankError, RuntimeError, OSError, ValueError):  # it fails on a case, and agrees with none
                    continue
                yield wrong, run
        finally:
            self.ranks.timeout_s = limit_s

    def _differ(self, one: Mapping[Place, Any], other: Mapping[Place, Any]) -> list[Place]:
        """Return the places where two runs differ, case by case as `difference` goes through them."""
        cases = [*self.wanted.results[0]]
        places = sorted(dict.fromkeys([*other, *one]), key=lambda at: (at[0] != RESULT, cases.index(at[1])))
        return [place for place in places if not alike(one, other, place, self.scale)]


def _operations(evidence: Evidence) -> set[str]:
    return {call.op for rank in evidence.records.ranks for call in calls(evidence, rank)}


def _sent(evidence: Evidence) -> list[int]:
    return [sent_bytes(evidence, rank) for rank in range(evidence.world_size)]
