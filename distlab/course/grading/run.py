"""Run a learner's function on one number of ranks, under limits, and say what came back: evidence or a fault.

While one set of fresh ranks runs, the next one is started and the last one is taken down: a check on 1, 2, 3 and 4
ranks would wait for that four times. The time limit of a run begins when its ranks are ready: a slow machine is not
the fault of an answer.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from distlab.course.grading.cases import Cases
from distlab.course.grading.diagnosis.blame import fault_of, file_of, place_in
from distlab.course.grading.exercise import Evidence, Exercise, Fault

if TYPE_CHECKING:
    from distlab.comm import Ranks

ON_EVERY_RANK = (
    "distlab.course.grading.guard",
    "distlab.course.grading.diagnosis.values",
    "distlab.course.grading.diagnosis.traffic",
    "distlab.course.grading.variation.verdict",
)
START_TIMEOUT_S = 120.0  # the first ranks of a program wait for torch to be loaded
_NOT_YOURS = "write to no file descriptor that you did not open, and to no file of the check"
MAX_OUTPUT_BYTES = 10_000_000
LOOK_S = 0.1


class Unavailable(RuntimeError):
    """Ranks cannot be started on this machine, whatever the answer."""


def start_ranks(world_size: int, timeout_s: float) -> Ranks:
    """Start ranks and wait until all have joined their group; then their time limit is timeout_s.

    Raises:
        Unavailable: they do not start.
    """
    from distlab.comm import Ranks

    # Over gloo a wrong answer leaves ranks waiting, as on GPUs: some faults show only there.
    ranks = Ranks(world_size, timeout_s=START_TIMEOUT_S, backend="gloo", record=True, echo=False, plain=True)
    try:
        ranks.run(bool)  # each has joined its group when this returns
    except BaseException as error:
        ranks.close()
        if not isinstance(error, RuntimeError | OSError | ValueError):
            raise
        raise Unavailable(f"{world_size} rank{'s' * (world_size > 1)} cannot be started here: {error}") from error
    ranks.timeout_s = timeout_s
    return ranks


@contextlib.contextmanager
def fresh_ranks(worlds: Sequence[int], timeout_s: float) -> Iterator[Iterator[Ranks]]:
    """Yield an iterator over sets of fresh ranks, one per world size; nothing of them is left after the block.

    Raises:
        Unavailable: from the iterator, when ranks do not start.
    """
    from distlab.comm.launch.fork_client import preload

    try:
        preload(*ON_EVERY_RANK)
    except (RuntimeError, OSError) as error:
        raise Unavailable(str(error)) from error
    with ThreadPoolExecutor(2, thread_name_prefix="ranks") as background:
        started: list[Future[Ranks]] = []
        closed: list[Future[None]] = []

        def sets() -> Iterator[Ranks]:
            started.append(background.submit(start_ranks, worlds[0], timeout_s))
            for index in range(len(worlds)):
                ranks = started[index].result()
                if index + 1 < len(worlds):
                    started.append(background.submit(start_ranks, worlds[index + 1], timeout_s))
                yield ranks
                closed.append(background.submit(_kill, ranks))

        try:
            yield sets()
        finally:
            for future in started[len(closed) :]:
                with contextlib.suppress(Unavailable):
                    _kill(future.result())


def _kill(ranks: Ranks) -> None:
    with contextlib.suppress(RuntimeError):
        ranks.close()


def run_world(exercise: Exercise, drive: Callable[..., Any], fn: Callable[..., Any], ranks: Ranks) -> Evidence | Fault:
    """Let a drive call fn on these ranks; return the evidence, or the fault that ended the run.

    Raises:
        Unavailable: the ranks went for a reason that is not the function's.
    """
    from distlab.comm import RankError
    from distlab.comm.launch.messages import pack_call
    from distlab.course.grading.guard import drive_on_rank

    with _watch_output(ranks) as flooded:
        try:
            results = ranks.run(drive_on_rank, drive, fn, exercise.memory_limit_bytes)
        except RankError as error:
            if flooded:
                rank = flooded[0]
                amount = f"rank {rank} printed more than {MAX_OUTPUT_BYTES / 1e6:.0f} MB and was stopped"
                place = place_in(str(error), fn)
                where = f"\n  at {place}" if place else ""
                return Fault("output", f"{amount}: print less, and only from one rank{where}")
            return fault_of(error, exercise, fn, ranks.world_size)
        except ValueError as error:
            try:
                pack_call(fn, ())
            except ValueError as why:  # something of the learner's own function cannot be sent to the ranks
                return Fault("not sent", str(why))
            return Fault("killed", f"what its ranks wrote cannot be read ({error}): {_NOT_YOURS}")
        except (RuntimeError, OSError) as error:
            raise Unavailable(str(error)) from error
    try:
        return Evidence(ranks.world_size, results, ranks.records())
    except (RuntimeError, OSError, ValueError) as error:
        return Fault("killed", f"the record of what was sent is gone or damaged ({error}): leave its files alone")


def judge(
    exercise: Exercise, evidence: Evidence, fn: Callable[..., Any], ranks: Ranks
) -> tuple[Fault | None, tuple[str, ...]]:
    """Return the first fault of the exercise's own cases, or None; and the lines of the budget where it is right."""
    from distlab.course.grading.agreement import fault_of as fault_by_agreement
    from distlab.course.grading.lesson import reference_of

    try:
        if isinstance(exercise.drive, Cases):
            fault = fault_by_agreement(exercise, evidence, reference_of(exercise), ranks)
        else:
            assert exercise.judge is not None, f"{exercise.name} has neither cases nor a judge"
            fault = next(iter(exercise.judge(evidence)), None)
        fault = _with_unwaited(fault, evidence, fn)
        if fault is not None or exercise.budget is None:
            return fault, ()
        return None, tuple(exercise.budget(evidence))
    except Exception:  # the judge met a value that no answer returns on purpose
        from distlab.course.grading.diagnosis.values import describe

        shown = "; ".join(f"rank {rank}: {describe(result)}" for rank, result in enumerate(evidence.results))
        return Fault("returned", f"what it returned cannot be judged: {shown}"), ()


def _with_unwaited(fault: Fault | None, evidence: Evidence, fn: Callable[..., Any]) -> Fault | None:
    """Add to a fault that the answer started a call and never waited for it; a message not waited for is a fault."""
    from distlab.course.grading.diagnosis.traffic import MESSAGES, never_waited
    from distlab.course.grading.lesson import source_text

    call = never_waited(evidence, file_of(fn))
    if call is None or (fault is not None and "not waited" in fault.code):
        return fault
    to = {"send": f" to rank {call.peer}", "recv": f" from rank {call.peer}"}.get(call.op, "")
    seen = f"rank {call.rank} starts {call.op}{to} at {call.site} and never waits for it"
    if call.op == "recv":  # whether its result is right is chance
        text = f"{seen}: the tensor may still be empty; keep what irecv returns, and call its wait() before you read"
        return Fault("not waited", text)
    if fault is not None:
        return fault._replace(message=f"{fault.message}\n  {seen}: keep what the call returns, and call its wait()")
    text = source_text(fn) or "".join(linecache.getlines(file_of(fn)))
    if re.search(r"\.(get_future|is_completed)\(", text):  # other ways to wait
        return None
    name, so = (f"i{call.op}", "") if call.op in MESSAGES else (f"dist.{call.op}", ", and may read it half summed")
    return Fault("not waited", f"right result, but by luck: {seen}{so}; keep what {name} returns, and call its wait()")


@contextlib.contextmanager
def _watch_output(ranks: Ranks) -> Iterator[list[int]]:
    """Stop the run when a rank prints without end; yields what was found."""
    found: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            for rank, num_bytes in enumerate(ranks.output_bytes):
                if num_bytes > MAX_OUTPUT_BYTES and not found:
                    found.append(rank)
                    ranks.interrupt()
                    return

    thread = threading.Thread(target=look, name="output", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
