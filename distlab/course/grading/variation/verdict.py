"""Compare the drawn calls of an answer with those of the reference, and name the fault by what was seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from distlab.course.grading.agreement import cause_in
from distlab.course.grading.cases import AFTER, RESULT
from distlab.course.grading.causes.mend import mend_of
from distlab.course.grading.diagnosis.provenance import explain_sum, weights_of
from distlab.course.grading.diagnosis.traffic import calls as calls_of, in_megabytes, sent_bytes
from distlab.course.grading.diagnosis.values import compare, is_telling, near
from distlab.course.grading.exercise import SEEN, Evidence, Exercise, Fault
from distlab.course.grading.run import Unavailable, run_world
from distlab.course.grading.variation.calls import DrawnCalls

if TYPE_CHECKING:
    from distlab.comm import Ranks


def drawn_fault(
    exercise: Exercise,
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    ranks: Ranks,
    seed: int,
    *,
    is_wrong: bool = False,
) -> Fault | None:
    """Call fn and then the reference with the arguments of a seed; return the first difference as a fault, or None.

    Args:
        exercise: says how arguments are drawn.
        fn: the answer.
        reference: the right function.
        ranks: that make the calls.
        seed: of the draws.
        is_wrong: whether the exercise's own cases have shown a fault that names no mistake.

    Raises:
        Unavailable: the ranks went for a reason that is not the function's.
    """
    assert exercise.vary is not None
    calls = DrawnCalls(exercise.vary, seed, reference)
    try:
        fault = _Drawn(exercise, fn, calls, ranks).fault(is_wrong=is_wrong)
    except Unavailable:
        raise
    except Exception as error:  # of a comparison: a whole number that no float holds, say
        fault = None if is_wrong else Fault("returned", f"what it returned cannot be judged: {error}")
    if fault is None or fault.code == "not attempted":
        return fault
    again = f'check("{exercise.name}", {exercise.function}, seed={seed})'
    return fault._replace(message=f"{fault.message}\n  these arguments are drawn; the same ones again: {again}")


class _Drawn(NamedTuple):
    exercise: Exercise
    fn: Callable[..., Any]
    calls: DrawnCalls
    ranks: Ranks

    def fault(self, *, is_wrong: bool) -> Fault | None:
        """Make the calls and compare them: results first, then arguments and the process, then what was sent."""
        answered = run_world(self.exercise, self.calls, self.fn, self.ranks)
        wanted = self._right(self.calls)
        if isinstance(answered, Fault):
            if is_wrong or answered.code in SEEN:
                return answered._replace(cause=mend_of(self.fn, self.exercise, self.calls, wanted.results, self.ranks))
            return answered
        differences = _Differences(self.exercise, answered.results, wanted.results)
        fault = next(differences.found(), None)
        if fault is None:
            return _sent_otherwise(self.exercise, answered, wanted)
        in_place = all(call[RESULT] is None for made in wanted.results for call in made.values())
        if fault.code not in SEEN and not (in_place and fault.code == "argument changed"):
            return fault
        cause = cause_in(self.calls, self.exercise, answered, wanted, self.ranks)
        cause = cause or mend_of(self.fn, self.exercise, self.calls, wanted.results, self.ranks)
        return fault._replace(cause=cause or differences.whose_parts())

    def _right(self, calls: DrawnCalls) -> Evidence:
        try:
            results = self.ranks.run(calls, calls.reference)
        except (RuntimeError, OSError) as error:
            raise Unavailable(f"the reference itself failed with seed {calls.seed}: {error}") from error
        return Evidence(self.ranks.world_size, results, self.ranks.records())


class _Differences:
    def __init__(self, exercise: Exercise, got: Sequence[Any], wanted: Sequence[Any]) -> None:
        assert exercise.vary is not None
        self.name, self.scale = exercise.function, exercise.vary.scale
        self.got, self.wanted, self.n = got, wanted, len(got)

    def found(self) -> Iterator[Fault]:
        """Yield what differs: results, then call by call the arguments, and what was left behind."""
        yield from self.in_results()
        for call in self.wanted[0]:
            for rank in range(self.n):
                mine, right = self.got[rank][call], self.wanted[rank][call]
                where = f"{call}, {self.name}({right['words']}): "
                yield from self._in_arguments(mine, right, where, f"rank {rank}'s " if self.n > 1 else "")
                yield from _left_behind(mine, right, where, f" on rank {rank}" if self.n > 1 else "")

    def in_results(self) -> Iterator[Fault]:
        """Yield each call's first wrong result, the smallest call first, which can be worked out by hand."""
        wrong: dict[str, tuple[int, Fault]] = {}
        for call, rank in itertools.product(self.wanted[0], range(self.n)):
            if call not in wrong and (fault := self._in_result(call, rank)) is not None:
                wrong[call] = rank, fault
        for call in sorted(wrong, key=lambda call: _size(self.wanted[0][call])):
            rank, fault = wrong[call]
            yield Fault(fault.code, f"{call}, {self.name}({self.wanted[rank][call]['words']}): {fault.message}")

    def whose_parts(self) -> str:
        """Return which ranks' tensors are in a wrong one, where the right one is a sum of these; or ""."""
        for call, rank in itertools.product(self.wanted[0], range(self.n)):
            mine, right = self.got[rank][call], self.wanted[rank][call]
            pairs = [("result", mine[RESULT], right[RESULT], name) for name in right["before"]]
            pairs += [(f"{name} afterwards", mine[AFTER].get(name), want, name) for name, want in right[AFTER].items()]
            for what, got, want, name in pairs:
                parts = [of_rank[call]["before"].get(name) for of_rank in self.wanted]
                is_wide = isinstance(want, Tensor) and want.dtype.itemsize > 2 and not near(got, want, self.scale)
                if is_wide and all(getattr(part, "shape", None) == want.shape for part in parts):
                    expected = weights_of(want, parts)
                    what = f"{call}, {self.name}({right['words']}): rank {rank}'s {what}"
                    fault = expected and explain_sum(got, parts, expected=expected, what=what, rank=rank)
                    if fault and fault.code not in SEEN:
                        return f"{fault.message}."
        return ""

    def _in_result(self, call: str, rank: int) -> Fault | None:
        """Compare one call's result with the reference's, and say where else it comes from."""
        what = f"rank {rank}'s result" if self.n > 1 else "the result"
        mine, right = self.got[rank][call], self.wanted[rank][call]
        is_right = near(mine[RESULT], right[RESULT], self.scale)
        if is_right or (fault := compare(mine[RESULT], right[RESULT], what, self.n)) is None:
            if near(mine["later"], right["later"], self.scale):
                return None
            text = f"{what} was right at first, but a later call changed it: both calls return the same memory"
            return Fault("kept", f"{text}; make a new tensor in each call")
        for earlier, theirs in self.wanted[rank].items():
            if earlier == call:
                break
            if is_telling(before := theirs[RESULT]) and near(mine[RESULT], before) and not near(right[RESULT], before):
                text = f"{what} is that of {earlier}, which had other arguments"
                return Fault("kept", f"{text}: something is kept between calls; work it out anew in each")
        if fault.code == "dtype":
            return Fault("dtype", f"{fault.message}: take the dtype from the argument, do not write one down")
        return fault

    def _in_arguments(self, mine: dict[str, Any], right: dict[str, Any], where: str, whose: str) -> Iterator[Fault]:
        got, want, before = mine[AFTER], right[AFTER], right["before"]
        for name in dict.fromkeys([*want, *got]):
            if name not in got or name not in want:
                owner, _, what = name.rpartition(".")
                text = f"{where}afterwards {whose}{name} is {'there' if name in got else 'gone'}, which it must not be"
                if what == "requires_grad" and name in got:
                    text = f"{where}it makes {whose}{owner}, which belongs to the caller, require a gradient"
                    text = f"{text}; leave that as it is, or work on {owner}.detach()"
                yield Fault("argument changed", text)
                return
            is_right = near(got[name], want[name], self.scale)
            if is_right or (fault := compare(got[name], want[name], f"{whose}{name} afterwards")) is None:
                continue
            message = fault.message.replace(" (is a return missing?)", "")
            if name in before and near(want[name], before[name]):
                text = f"{where}it changed {whose}{name}, which belongs to the caller"
                yield Fault("argument changed", f"{text} ({message}); leave it as it is, or work on a copy")
            else:
                yield Fault(fault.code, f"{where}{message}")


def _left_behind(mine: dict[str, Any], right: dict[str, Any], where: str, on: str) -> Iterator[Fault]:
    """Say what a call left on its arguments, in the process or in memory, that the reference does not."""
    for what, words in mine["left"].items():
        if what not in right["left"]:  # what the reference leaves on purpose may look otherwise
            yield Fault("state left behind", f"{where}right result, but{on} {words}; put back what you change")
    for name in mine["state"]:
        if name not in right["state"]:
            text = f"{where}right result, but afterwards {name} is not what it was before{on}"
            yield Fault("state left behind", f"{text}: put back what you change")
    for moved in [place for place in mine["moved"] if place not in right["moved"]][:1]:
        text = f"{where}right at first, but a later call changed {moved}{on}: both calls share memory"
        yield Fault("kept", f"{text} that is kept between them; make new tensors in each call")


def _size(call: dict[str, Any]) -> float:
    """Return how much a call was given: elements of tensors, and whole numbers as they are."""
    given = call["before"].values()
    return sum(one.numel() if isinstance(one, Tensor) else abs(one) if type(one) is int else 1 for one in given)


def _sent_otherwise(exercise: Exercise, got: Evidence, wanted: Evidence) -> Fault | None:
    """Say so where right results come from fewer bytes than any answer needs, or from other messages, where they count.

    A call's bytes may be rounded down by one.
    """
    assert exercise.vary is not None
    sent, needed = (sum(sent_bytes(run, rank) for rank in range(run.world_size)) for run in (got, wanted))
    least = needed * exercise.vary.least_bytes
    if sent + got.records.num_calls() < least:
        text = f"right results, but the {got.world_size} ranks together sent {in_megabytes(sent)} through"
        text = f"{text} torch.distributed, where any right answer sends {in_megabytes(least)} or more"
        return Fault("unseen", f"{text}: what is needed must travel, whole, by dist's own functions")
    for rank, op in ((rank, op) for rank in range(got.world_size) for op in ("send", "recv")):
        made, right = (len(calls_of(run, rank, op)) for run in (got, wanted))
        if exercise.vary.same_messages and made != right:
            text = f"rank {rank} made {made} {op}s in {len(wanted.results[rank])} calls"
            return Fault("wrong number of messages", f"{text}; expected {right}: use every argument")
    return None
