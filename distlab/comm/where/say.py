"""Say where each rank of a job stands, who waits for whom, and in one sentence what is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from distlab.comm.agree import ranks_in_words
from distlab.comm.record.file import OPS
from distlab.comm.record.matching import explain, ledger_of
from distlab.comm.record.read import RankRecord, RecordReader, Records, read_record, short
from distlab.comm.watch.watchdog import Wait, describe, waits_of
from distlab.comm.where.frames import Frame, is_machinery, owner_of, traceback_lines
from distlab.comm.where.stacks import RankStack, RunningJob, stacks_of

_PAIRS = ("send", "isend", "recv", "irecv")
_WITH_ALL = ("new_group", "init_process_group", "monitored_barrier", "split_group")
_IDLE, _BACKWARD = "serve_rank", "_engine_run_backward"
_OUTSIDE = "it runs no code of the program: it starts, or it ends"


class WhereItStands(NamedTuple):
    """Where a rank stands, from its stack: its own line, and the call of torch.distributed that it is in.

    Attributes:
        site: file:line of the program's own code, or "".
        function: the function there.
        call: such as "all_reduce", "recv" or "backward"; "" where it is in none.
        why: why it is not known what the rank does; "" where it is.
    """

    site: str
    function: str
    call: str
    why: str = ""

    def __str__(self) -> str:
        if not self.site:
            return self.why or "it has finished its function"
        where = f"it is at {short(self.site)} in {self.function}" + (f", in {self.call}" if self.call else "")
        return f"{where}; {self.why}" if self.why else where


def report(job: RunningJob, *, with_stacks: bool = True) -> Iterator[str]:
    """Yield lines about a job: each rank, the stacks, one sentence. Nothing is disturbed; it takes a second or two."""
    stacks = stacks_of(job.ranks)
    places = {rank: place_of(stack) for rank, stack in stacks.items()}
    records = records_of(job)
    source = "from distlab's recorder" if len(records) else "are not recorded"
    yield f"{job.launcher}: {len(job.ranks)} of {job.world_size} ranks are here; calls {source}"
    words = describe(records, job.world_size) if len(records) else []
    for process in job.ranks:
        rank, place = process.rank, places[process.rank]
        known = words[rank].partition(f"rank {rank} ")[2] if rank in records.by_rank and words else ""
        yield f"rank {rank} (process {process.pid}): {'; '.join(filter(None, [known, str(place)]))}"
    yield f"=> {sentence(job, records, places)}"
    if with_stacks:
        yield from _stack_lines(stacks)


def records_of(job: RunningJob) -> Records:
    """Return the calls of a job's ranks, as far as our recorder has written them."""
    found: dict[int, RankRecord] = {}
    for process in job.ranks:
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # just being made, or just ended
            if process.record is not None and RecordReader.is_ready(process.record[0]):
                found[process.rank] = read_record(RecordReader(*process.record, process.rank))
    return Records(found)


def place_of(stack: RankStack) -> WhereItStands:
    """Find in a stack the program's own line and the call that it is in."""
    call, frames = "", stack.frames
    for file, line, name in frames:
        owner = owner_of(file)
        if owner in ("user", "package"):
            return WhereItStands(f"{file}:{line}", name, call)
        is_call = name in (*_PAIRS, *_WITH_ALL) or name.startswith(OPS[1:-2])
        if "/torch/distributed/" in file and is_call:
            call = name
        elif file.endswith("distlab/comm/record/intercept.py") and name == "wait":
            call = call or "wait"
        elif owner == "torch" and name == _BACKWARD:
            call = call or "backward"
    if frames and not any(frame.function == _IDLE for frame in frames):
        ours = (one for one in frames if owner_of(one.file) == "distlab" and not is_machinery(one.file))
        others = (one for one in frames if owner_of(one.file) != "torch")
        program = next(ours, None)  # as of `distlab tour`
        last = program or next(others, frames[0])
        return WhereItStands(f"{last.file}:{last.line}", last.function, call, "" if program else _OUTSIDE)
    return WhereItStands("", "", "", stack.why)


def by_stacks(places: Mapping[int, WhereItStands]) -> dict[int, Wait]:
    """Return which ranks wait, by their stacks: for all that are known to be elsewhere; of a message no stack tells."""
    found, known = {}, {rank: place for rank, place in places.items() if place.site or not place.why}
    for rank, place in known.items():
        if place.call not in ("", "wait", "backward"):
            absent = [other for other, one in known.items() if place.call not in _PAIRS and one.call != place.call]
            found[rank] = Wait(f"{place.call} at {short(place.site)}", absent, 0.0, "it", True, place.call)
    return found


def sentence(job: RunningJob, records: Records, places: Mapping[int, WhereItStands]) -> str:
    """Say in one sentence what is wrong, and of which ranks that is not known."""
    ledger = ledger_of(records)
    met = ledger.disagreement()
    if found := ledger.exchange() if met is None else explain(ledger, met):
        return found
    recorded = {rank: wait for rank, wait in waits_of(records.by_rank, ledger).items() if wait.is_blocked}
    waits, told = by_stacks(places) | recorded, list[str]()
    here, stopped = [process.rank for process in job.ranks], [one.rank for one in job.ranks if one.is_stopped]
    lost, size = [rank for rank in range(job.world_size) if rank not in here], str(job.world_size)
    is_elsewhere = bool(lost) and job.ranks[0].environment.get("LOCAL_WORLD_SIZE", size) != size
    if lost and not is_elsewhere:
        have = "has" if len(lost) == 1 else "have"
        told.append(f"{ranks_in_words(lost)} of {job.world_size} {have} no process: ended, or not begun")
    if stopped:
        told.append(f"stopped by a signal, until SIGCONT comes: {ranks_in_words(stopped)}")
    chain, unknown = _chain(waits, places), dict[str, list[int]]()
    for rank in here:
        if places[rank].why and rank not in [*waits, *stopped] and not (chain and places[rank].site):
            unknown.setdefault(places[rank].why, []).append(rank)
    if chain:
        told.append(chain)
    elif stuck := [rank for rank in waits if rank not in recorded]:
        calls = " and ".join(dict.fromkeys(waits[rank].op for rank in stuck))
        told.append(f"{_wait(stuck)} in {calls}, and no record tells whether that can end")
    elif not unknown:
        told.append(f"{'nothing is wrong: ' * (not told)}no rank waits for one that does not come")
    for why, ranks in unknown.items():
        told.append(f"what {ranks_in_words(ranks)} do{'es' * (len(ranks) == 1)} is not known: {why}")
    if is_elsewhere:
        told.append(f"{ranks_in_words(lost)} run on other machines and are not seen from here")
    return "; ".join(told)


def _wait(ranks: Sequence[int]) -> str:
    return f"{ranks_in_words(ranks)} wait{'s' if len(ranks) == 1 else ''}"


def _chain(waits: Mapping[int, Wait], places: Mapping[int, WhereItStands]) -> str:
    """Follow who waits for whom to its end: a rank that does not wait, or a circle."""
    for start in sorted(waits):
        line = [start]
        while (here := waits.get(line[-1])) is not None and here.absent:
            following = here.absent[0]
            if following in line:
                circle = line[line.index(following) :]
                steps = [f"rank {rank} waits for rank {waits[rank].absent[0]} in {waits[rank].call}" for rank in circle]
                return f"deadlock: {', and '.join(steps)}"
            line.append(following)
        if len(line) > 1 and line[-1] not in waits:
            last, first = line[-1], waits[line[-2]].call
            who = f"{_wait([rank for rank, wait in waits.items() if wait.absent])} for rank {last} in {first}"
            return f"{who}; rank {last} has not called it" + (f": {places[last]}" if last in places else "")
    return ""


def _stack_lines(stacks: Mapping[int, RankStack]) -> Iterator[str]:
    """Yield each different stack once, innermost call last, with its ranks."""
    same: dict[tuple[Frame, ...], list[int]] = {}
    for rank, stack in stacks.items():
        shown = tuple(f for f in stack.frames if owner_of(f.file) in ("user", "package", "torch")) or stack.frames
        if shown:
            same.setdefault(shown, []).append(rank)
    for frames, ranks in same.items():
        yield f"\n--- {ranks_in_words(ranks)} stand{'s' if len(ranks) == 1 else ''} here (innermost call last) ---"
        yield from traceback_lines(frames)
