"""Run a lab on this rank: settings, the learner's functions, the process group, a watch over it, and the report."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from distlab.comm import agree, process_group, read_records
from distlab.comm.device import synchronize
from distlab.comm.groups import Member
from distlab.comm.launch.failures import launcher_folder, record_failure
from distlab.comm.launch.ranks import SAID, ScriptRefused
from distlab.comm.record.recorder import Recording
from distlab.comm.rendezvous import read_environment
from distlab.comm.watch.watch import watching
from distlab.comm.where.frames import is_machinery
from distlab.course.grading import NotYet
from distlab.course.lab.report import LabReport, read_reference
from distlab.course.lab.settings import CommonSettings, parse, what_is_run
from distlab.measure import this_machine
from distlab.measure.machine.ranks import OtherProcesses, largest_over_ranks, mean_over_ranks
from distlab.trace import Trace, load_folder, rank_file, write_chrome
from simulator.units import counted

SettingsT = TypeVar("SettingsT", bound=CommonSettings)
Function = Callable[..., Any]
WAIT_S = 30.0  # for the ranks' traces


class StepWindow(NamedTuple):
    """The time that the picture shows.

    Attributes:
        ranks_ns: start and end of each rank's step, on its own clock.
        predicted: what a simulator said that this step would be, or None.
        title: the takeaway; "" lets the picture find its own.
    """

    ranks_ns: Sequence[tuple[int, int]]
    predicted: Trace | None
    title: str


@dataclass
class Lab(Generic[SettingsT]):
    """A lab on one rank, as its `run` function gets it.

    Attributes:
        number: two digits.
        settings: its flags.
        member: this rank's place, device and group.
        functions: the learner's functions by exercise; empty with `--impl reference`.
        report: what rank 0 prints at the end; all ranks may add to theirs.
    """

    number: str
    settings: SettingsT
    member: Member
    functions: Mapping[str, Function]
    report: LabReport
    window: StepWindow | None = None

    def function(self, exercise: str) -> Function:
        """Return the learner's function for an exercise, or the reference where there is none, and note which."""
        from distlab.course.grading import load_lesson, reference_of

        reference = reference_of(load_lesson(self.number).exercise(exercise))
        mine = self.functions.get(exercise)
        if mine is None:
            if self.settings.impl != "reference":
                self.report.note(f"{exercise}: {self.settings.impl} has none; the reference ran.")
            return reference

        @functools.wraps(mine)
        def learners(*args: Any, **named: Any) -> Any:
            try:
                result = mine(*args, **named)
            except NotYet:  # on every rank alike, before anything was sent
                self.report.note(f"{exercise}: not yet written; the reference ran instead.")
                return reference(*args, **named)
            self.report.note(f"{exercise}: {getattr(mine, '__name__', 'a function')} of {self.settings.impl} ran.")
            return result

        return learners

    def is_mine(self, exercise: str) -> bool:
        """Whether the learner has a function for the exercise."""
        return exercise in self.functions

    @contextlib.contextmanager
    def watched(self) -> Iterator[Recording]:
        """Record every call in the block, and end the lab with words when its ranks wait for each other.

        All ranks enter it together. Recording costs some 30 us per call: nothing is timed in here. Rank 0 gets the
        records of all ranks of this machine, the others their own.
        """
        address, seen = read_environment(), Recording()
        with tempfile.TemporaryDirectory(prefix="calls-", dir=launcher_folder()) as own:
            names = [own]
            if address.is_on_one_machine:
                dist.broadcast_object_list(names, src=0)
            folder, rank = Path(names[0]), self.member.rank
            with watching(address, watch=address.is_on_one_machine, folder=folder, what=f"lab {self.number}"):
                yield seen
            dist.barrier()
            seen.records = read_records(folder, None if rank == 0 else rank)  # not n * n files on n ranks
            dist.barrier()  # the folder is read

    def now(self) -> float:
        """Return the time in seconds once this rank's device has done all that it was asked."""
        synchronize(self.member.device)
        return time.perf_counter()

    def now_ns(self) -> int:
        """Return the time on the clock of traces, once this rank's device has done all that it was asked."""
        self.now()
        return time.monotonic_ns()

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' times."""
        return largest_over_ranks([seconds], self.member.device)[0]

    def mean(self, value: float) -> float:
        """Return the mean of all ranks' values."""
        return mean_over_ranks([value], self.member.device)[0]

    def everywhere(self, ok: bool) -> bool:
        """Return whether it holds on every rank."""
        return self.mean(float(ok)) == 1.0

    def mark_step(self, start_ns: int, end_ns: int, *, predicted: Trace | None = None, title: str = "") -> None:
        """Choose the time that the picture shows: this rank's start and end on its own clock. All ranks call it."""
        mine = torch.tensor([start_ns, end_ns], device=self.member.device)
        all_ns = [torch.zeros_like(mine) for _ in range(self.member.world_size)]
        dist.all_gather(all_ns, mine)
        self.window = StepWindow([(int(start), int(end)) for start, end in all_ns], predicted, title)


def main(number: str, settings: type[SettingsT], run: Callable[[Lab[SettingsT]], None]) -> None:
    """Run a lab as a script: `python lab.py`, torchrun, or `distlab lab`.

    The exit status is 0 when all facts are right, 3 when one is wrong, 2 for a user's mistake, 1 for a failure.
    """
    with contextlib.ExitStack() as quiet:
        with contextlib.suppress(ValueError):  # told by process_group
            if read_environment().rank:
                quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        chosen = parse(settings, None, f"lab {number}")
    try:
        status = _work(number, chosen, run)
    except Exception as error:
        if not record_failure(error, _own_traceback(error)):  # no launcher will show it
            raise
        status = 1
    if status:
        sys.exit(status)


def _own_traceback(error: BaseException) -> str:
    """Write an exception's traceback without the frames that lead every lab to its own code."""
    trace = error.__traceback__
    while trace is not None and is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))


def _work(number: str, settings: SettingsT, run: Callable[[Lab[SettingsT]], None]) -> int:
    with contextlib.ExitStack() as group:
        try:
            functions = load_functions(settings.impl, number)
            address = read_environment()
            backend, device = (None if one == "auto" else one for one in (settings.backend, settings.device))
            how: dict[str, Any] = {"timeout_s": settings.limit_s + 60, "trace_dir": settings.trace, "watch": False}
            ranks = process_group(backend, device, nodes=settings.nodes_of(address.world_size), **how)
            member = group.enter_context(ranks)
            agree([number, what_is_run(settings), sorted(functions)], what=f"settings of lab {number}")
            settings.check_ranks(member.world_size)
        except ValueError as error:  # one line: to the launcher, or, without one, to the user
            if not record_failure(ScriptRefused(str(error))):
                print(f"lab {number}: {error}", file=sys.stderr)
            return 2
        beside = Path(run.__code__.co_filename).resolve().parent
        lab = Lab(number, settings, member, functions, _report(number, settings, member, beside))
        try:
            others = OtherProcesses() if address.is_on_one_machine else None
            run(lab)
            if others is not None:
                lab.report.others_took(others.taken())
            wrong = _tell(lab)
        except SystemExit as error:  # the others would wait for this rank
            left = RuntimeError(f"rank {member.rank} left by exit({error.code}); a function returns instead")
            raise left.with_traceback(error.__traceback__) from None
    if settings.trace is not None and member.rank == 0:
        for line in write_pictures(settings.trace, member.world_size, lab.window):
            print(line, file=sys.stderr if settings.json else sys.stdout, flush=True)
    return SAID if wrong else 0


def load_functions(impl: str, number: str) -> Mapping[str, Function]:
    """Return the learner's functions by exercise, none for 'reference'; a ValueError says what cannot be loaded."""
    if impl == "reference":
        return {}
    from distlab.course.grading import load_lesson, load_submission
    from distlab.course.grading.progress import MINE, working_copy

    lesson = load_lesson(number)
    return load_submission(str(working_copy(lesson.folder.name)) if impl == MINE else impl, lesson)


def _report(number: str, settings: CommonSettings, member: Member, beside: Path) -> LabReport:
    kind, what, ranks = member.device.type, what_is_run(settings), counted(member.world_size, "rank")
    nodes = [f"{settings.nodes} nodes {settings.between}".rstrip()] if settings.nodes > 1 else []
    known, note = read_reference(beside / "lab_reference.md", ", ".join([kind, ranks, *nodes]), what)
    title = f"Lab {number} on {ranks}, {kind}, {dist.get_backend()}; functions: {settings.impl}"
    return LabReport(title, what, known, note)


def _tell(lab: Lab[Any]) -> bool:
    """Print the report on rank 0; return on every rank whether a fact in it is wrong."""
    if lab.settings.trace is not None:
        longer = "times are longer than without --trace"
        lab.report.note(f"Every call was recorded for the trace, some 30 us each: {longer}.")
    if lab.member.rank == 0:
        facts = {"lab": lab.number, "ranks": lab.member.world_size, "device": lab.member.device.type}
        facts |= {"backend": dist.get_backend(), "machine": this_machine().as_dict(), "impl": lab.settings.impl}
        print(json.dumps(lab.report.as_dict() | facts) if lab.settings.json else lab.report.table(), flush=True)
    wrong = torch.tensor(len(lab.report.wrong), device=lab.member.device)
    dist.broadcast(wrong, 0)
    return bool(wrong)


def write_pictures(folder: Path, num_ranks: int, window: StepWindow | None) -> Iterator[str]:
    """Merge the ranks' traces once they are saved, draw them, and yield a line for each file.

    Rank 0 calls it after the group has ended. Ranks of other machines save on those machines: then their files have to
    be brought together first.
    """
    deadline = time.monotonic() + WAIT_S
    while missing := [rank for rank in range(num_ranks) if not rank_file(folder, rank).is_file()]:
        if time.monotonic() < deadline:
            time.sleep(0.1)
            continue
        yield f"{folder} holds no trace of ranks {missing}: copy theirs here, then use distlab.trace.load_folder"
        return
    merged = load_folder(folder)
    predicted = None if window is None else window.predicted
    traces = {"measured": merged} | ({} if predicted is None else {"predicted": predicted})
    yield f"Saved {write_chrome(folder / 'timeline.json', **traces)}: open it at ui.perfetto.dev or chrome://tracing"
    shown = merged if window is None else cut(merged, window.ranks_ns)
    if not len(shown):
        yield "No call was recorded in the chosen step, so there is no picture."
        return
    from simulator.viz import draw_timeline

    picture = folder / "timeline.png"
    drawn = draw_timeline(shown, predicted, title=None if window is None else window.title or None)
    drawn.figure.savefig(picture, dpi=150)
    yield f"Saved {picture}"


def cut(trace: Trace, ranks_ns: Sequence[tuple[int, int]]) -> Trace:
    """Keep each rank's spans between its start and its end, except the lane "wait": calls show it already."""
    parts = []
    for rank, (start_ns, end_ns) in enumerate(ranks_ns):
        inside = (trace.rank == rank) & (trace.start_ns >= start_ns) & (trace.end_ns <= end_ns)
        parts.append(trace.select(inside & ~trace.is_word("lane", "wait")))
    return Trace.concatenate(parts)
