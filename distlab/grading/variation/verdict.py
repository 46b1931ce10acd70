"""Compare the varied calls of an answer with those of the reference, and name the fault by what was seen."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from distlab.grading.causes.as_if import cause_of
from distlab.grading.causes.condition import condition
from distlab.grading.causes.mend import mend_of
from distlab.grading.causes.search import Drawn
from distlab.grading.exercise import SEEN, Evidence, Exercise, Fault
from distlab.grading.variation.calls import call_varied
from distlab.grading.variation.draw import IN_CALL
from distlab.grading.variation.near import is_telling, near
from distlab.grading.variation.sent import all_sent, not_taking_part, other_messages, taking_part, too_few, unseen

if TYPE_CHECKING:
    from distlab.comm import Ranks


def too_few_bytes(exercise: Exercise, evidence: Evidence, reference: Callable[..., Any], ranks: Ranks) -> Fault | None:
    """Let the reference do what the answer did in the exercise's own cases, and compare the bytes that were sent."""
    assert exercise.vary is not None
    results = ranks.run(exercise.drive, reference)
    wanted = Evidence(ranks.world_size, results, ranks.records())
    sent, least = all_sent(evidence), all_sent(wanted) * exercise.vary.least_bytes
    return too_few(sent, evidence.records.num_calls(), least, ranks.world_size)


def varied_fault(
    exercise: Exercise, fn: Callable[..., Any], reference: Callable[..., Any], ranks: Ranks, seed: int
) -> Fault | None:
    """Call fn and then the reference with the arguments of a seed; return the first difference as a fault, or None.

    Raises:
        Unavailable: the ranks went for a reason that is not the function's.
    """
    from distlab.grading.fresh import Unavailable
    from distlab.grading.run import not_judged

    try:
        fault = _fault(exercise, fn, reference, ranks, seed)
    except Unavailable:
        raise
    except Exception as error:  # of a comparison: a whole number that no float holds, say
        fault = not_judged(error)
    if fault is None or fault.code == "not attempted":
        return fault
    return fault._replace(message=f"{fault.message}{_again(exercise, seed)}")


def _again(exercise: Exercise, seed: int) -> str:
    again = f'check("{exercise.name}", {exercise.function}, seed={seed})'
    return f"\n  these arguments are drawn; the same ones again: {again}"


def _fault(
    exercise: Exercise,
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    ranks: Ranks,
    seed: int,
    *,
    is_wrong: bool = False,
) -> Fault | None:
    """Make the drawn calls and compare them; `is_wrong`: the exercise's own cases have shown a fault without a name."""
    from distlab.comm import RankError
    from distlab.grading.fresh import Unavailable
    from distlab.grading.run import run_world

    assert exercise.vary is not None
    drive = functools.partial(call_varied, vary=exercise.vary, seed=seed, names_of=reference)
    answered = run_world(replace(exercise, drive=drive), fn, ranks)
    if isinstance(answered, Fault):
        if earlier := _wrong_before(exercise, fn, reference, ranks, seed, answered):
            return earlier
        is_seen = is_wrong or answered.code in SEEN
        return answered._replace(cause=_mend_alone(exercise, fn, reference, ranks, seed)) if is_seen else answered
    num_calls, num_bytes = answered.records.num_calls(), all_sent(answered)
    try:
        wanted = ranks.run(drive, reference)
    except (RankError, RuntimeError, OSError) as error:
        raise Unavailable(f"the reference itself failed with seed {seed}: {error}") from error
    got = answered.results
    reference_run = Evidence(ranks.world_size, wanted, ranks.records())
    num_calls_wanted = reference_run.records.num_calls()
    fault = next(_judge(exercise, got, wanted), None) if _is_whole(got, exercise.vary.num_calls) else None
    in_place = all(call["result"] is None for each in wanted for call in each["calls"])
    if fault is not None and (fault.code in SEEN or (in_place and fault.code == "argument changed")):
        cause = cause_of(fn, Drawn(exercise, reference, ranks, seed, got, wanted))
        if not cause and (where := condition(got, wanted, exercise.vary.scale)):
            cause = f"in all {exercise.vary.num_calls} drawn calls it is wrong where {where}, and right elsewhere."
        if is_wrong and not cause:
            fault = next(_judge(exercise, got, wanted, is_smallest_first=True))
        fault = fault._replace(cause=cause) if fault is not None else None
    fault = fault or unseen(got, num_calls, num_calls_wanted)
    if fault is None:
        fault = not_taking_part(taking_part(answered), taking_part(reference_run))
    if fault is None:
        least = all_sent(reference_run) * exercise.vary.least_bytes
        fault = too_few(num_bytes, num_calls, least, ranks.world_size)
    if fault is None and exercise.vary.same_messages:
        fault = other_messages(answered, reference_run)
    return fault


def _mend_alone(
    exercise: Exercise, fn: Callable[..., Any], reference: Callable[..., Any], ranks: Ranks, seed: int
) -> str:
    """Say where an answer is wrong that did not come to the end of its drawn calls, or "": fresh ranks look for it."""
    from distlab.comm import RankError

    try:
        wanted = ranks.run(call_varied, reference, exercise.vary, seed, reference)
    except RankError:
        return ""
    return mend_of(fn, Drawn(exercise, reference, ranks, seed, (), wanted))


def with_cause(
    fault: Fault, exercise: Exercise, fn: Callable[..., Any], reference: Callable[..., Any], ranks: Ranks, seed: int
) -> Fault:
    """Add to a fault of the exercise's own cases, where it names no mistake, what drawn calls show to be the cause.

    Where they show none, the smallest of them that is wrong is told: it can be worked out by hand.
    """
    if fault.cause or fault.code not in SEEN or exercise.vary is None:
        return fault
    from distlab.grading.fresh import Unavailable

    try:
        drawn = _fault(exercise, fn, reference, ranks, seed, is_wrong=True)
    except Unavailable:
        raise
    except Exception:  # of a comparison: the fault that was seen says enough
        return fault
    if drawn is not None and drawn.cause:
        return fault._replace(cause=drawn.cause)
    if drawn is None or drawn.code not in SEEN:
        return fault
    smallest = f"the smallest drawn arguments for which it is wrong: {drawn.message}"
    return Fault(fault.code, f"{fault.message}\n  {smallest}{_again(exercise, seed)}")


def _wrong_before(
    exercise: Exercise, fn: Callable[..., Any], reference: Callable[..., Any], ranks: Ranks, seed: int, ended: Fault
) -> Fault | None:
    """Return what is wrong in the drawn calls before the one that ended the run, where its number is told."""
    from distlab.grading.run import run_world

    found = re.search(rf"{IN_CALL} (\d+)", ended.message)
    if found is None or (count := int(found[1]) - 1) == 0:
        return None
    assert exercise.vary is not None
    drive = functools.partial(
        call_varied, vary=exercise.vary, seed=seed, names_of=reference, goes_on=lambda number, _: number + 1 < count
    )
    answered = run_world(replace(exercise, drive=drive), fn, ranks)
    if isinstance(answered, Fault):
        return None
    wanted = ranks.run(drive, reference)
    wrong = _wrong_results(exercise, answered.results, wanted, count)
    return next((_in_call(exercise, wanted, call, *wrong[call], []) for call in wrong), None)


def _is_whole(results: Sequence[Any], num_calls: int) -> bool:
    return all(isinstance(result, dict) and len(result.get("calls", ())) == num_calls for result in results)


def _judge(
    exercise: Exercise, got: Sequence[Any], wanted: Sequence[Any], *, is_smallest_first: bool = False
) -> Iterator[Fault]:
    """Yield what differs, call by call: results first, then arguments, then the state of the process."""
    name, n = exercise.function, len(got)
    scale = exercise.vary.scale if exercise.vary is not None else 1.0
    num_calls = len(wanted[0]["calls"])
    wrong = _wrong_results(exercise, got, wanted, num_calls)
    order = sorted(wrong, key=lambda call: _size(wanted[0]["calls"][call])) if is_smallest_first else [*wrong]
    right = [call for call in range(num_calls) if call not in wrong]
    for call in order:
        yield _in_call(exercise, wanted, call, *wrong[call], right)
    for call in range(num_calls):
        for rank in range(n):
            mine, theirs = got[rank]["calls"][call], wanted[rank]["calls"][call]
            where = f"call {call + 1}, {name}({theirs['words']}): "
            yield from _arguments(mine, theirs, where, f"rank {rank}'s " if n > 1 else "", scale)
            yield from _left_behind(mine, theirs, where, rank, n)
            for moved in [place for place in mine["moved"] if place not in theirs["moved"]][:1]:
                text = f"{where}right at first, but a later call changed {moved}{_on(rank, n)}: both calls share memory"
                yield Fault("kept", f"{text} that is kept between them; make new tensors in each call")


def _wrong_results(
    exercise: Exercise, got: Sequence[Any], wanted: Sequence[Any], num_calls: int
) -> dict[int, tuple[int, Fault]]:
    """Return each call with a wrong result, with the first rank that has one and how it differs."""
    wrong: dict[int, tuple[int, Fault]] = {}
    scale = exercise.vary.scale if exercise.vary is not None else 1.0
    for call in range(num_calls):
        for rank in range(len(got)):
            fault = _result(got[rank]["calls"], wanted[rank]["calls"], call, _what(rank, len(got)), len(got), scale)
            if fault is not None:
                wrong.setdefault(call, (rank, fault))
    return wrong


def _in_call(
    exercise: Exercise, wanted: Sequence[Any], call: int, rank: int, fault: Fault, right: Sequence[int]
) -> Fault:
    """Return a fault of a call with its arguments, and those of a call whose result is right."""
    name, words = exercise.function, [one["words"] for one in wanted[rank]["calls"]]
    seen = f"; right for {name}({words[right[0]]})" if right and fault.code != "kept" else ""
    return Fault(fault.code, f"call {call + 1}, {name}({words[call]}): {fault.message}{seen}")


def _size(call: dict[str, Any]) -> float:
    """Return how much a call was given: elements of tensors, and whole numbers as they are."""
    given = [value for _, value in call["before"]]
    return sum(
        value.numel() if isinstance(value, Tensor) else abs(value) if type(value) is int else 1 for value in given
    )


def _left_behind(mine: dict[str, Any], theirs: dict[str, Any], where: str, rank: int, n: int) -> Iterator[Fault]:
    """Say what a call left on its arguments, and in the process, that the reference does not."""
    known = {name for name, _ in theirs["state"]}
    kinds = {kind for kind, *_ in theirs["left"]}  # what the reference leaves on purpose may look otherwise
    for kind, _, words in mine["left"]:
        if kind not in kinds:
            yield Fault("state left behind", f"{where}right result, but{_on(rank, n)} {words}")
    for name, values in mine["state"]:
        if name not in known:
            text = f"{where}right result, but afterwards {name} is not what it was before{values}"
            yield Fault("state left behind", f"{text}{_on(rank, n)}: put back what you change")


def _what(rank: int, n: int) -> str:
    return f"rank {rank}'s result" if n > 1 else "the result"


def _on(rank: int, n: int) -> str:
    return f" on rank {rank}" if n > 1 else ""


def _result(got: Sequence[Any], wanted: Sequence[Any], call: int, what: str, n: int, scale: float) -> Fault | None:
    """Compare one call's result with the reference's, and say where else it comes from."""
    from distlab.grading.diagnosis.values import compare

    mine, want = got[call]["result"], wanted[call]["result"]
    fault = None if near(mine, want, scale) else compare(mine, want, what, n)
    if fault is None:
        if near(got[call]["later"], wanted[call]["later"], scale):
            return None
        text = f"{what} was right at first, but a later call changed it: both calls return the same memory"
        return Fault("kept", f"{text}; make a new tensor in each call")
    for earlier in range(call):
        before = wanted[earlier]["result"]
        if not is_telling(before) or compare(mine, before, what, n) is not None:
            continue
        if compare(want, before, what, n) is not None:
            text = f"{what} is that of call {earlier + 1}, which had other arguments"
            return Fault("kept", f"{text}: something is kept between calls; work it out anew in each")
    if fault.code == "dtype":
        return Fault("dtype", f"{fault.message}: take the dtype from the argument, do not write one down")
    return fault


def _arguments(mine: dict[str, Any], theirs: dict[str, Any], where: str, whose: str, scale: float) -> Iterator[Fault]:
    """Compare what the arguments are afterwards."""
    from distlab.grading.diagnosis.values import compare

    got, want, before = dict(mine["after"]), dict(theirs["after"]), dict(theirs["before"])
    for name in dict.fromkeys([*want, *got]):
        if name not in got or name not in want:
            owner, _, what = name.rpartition(".")
            text = f"{where}afterwards {whose}{name} is {'there' if name in got else 'gone'}, which it must not be"
            if what == "requires_grad" and name in got:
                text = f"{where}it makes {whose}{owner}, which belongs to the caller, require a gradient"
                text = f"{text}; leave that as it is, or work on {owner}.detach()"
            yield Fault("argument changed", text)
            return
        if near(got[name], want[name], scale):
            continue
        fault = compare(got[name], want[name], f"{whose}{name} afterwards")
        if fault is None:
            continue
        fault = Fault(fault.code, fault.message.replace(" (is a return missing?)", ""))
        if name in before and compare(want[name], before[name], name) is None:
            text = f"{where}it changed {whose}{name}, which belongs to the caller"
            yield Fault("argument changed", f"{text} ({fault.message}); leave it as it is, or work on a copy")
        else:
            yield Fault(fault.code, f"{where}{fault.message}")
