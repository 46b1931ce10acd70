"""Turn a run that failed into a fault: the cause first, with the learner's own line, and no more than is needed."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import distlab
from distlab.comm import RankError, RankTimeout
from distlab.comm.launch.failures import Failure, well_formed
from distlab.comm.record.read import short
from distlab.comm.where.frames import owner_of
from distlab.course.grading.exercise import Exercise, Fault
from distlab.course.grading.lesson import reference_of
from distlab.course.grading.variation.draw import IN_CALL, IN_CASE, RETURNED

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)(?:\n    (?! )(.*))?$', re.MULTILINE)
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(distlab.__file__)))
_CHECKS = re.compile(re.escape(os.path.join(_ROOT, "lessons")) + ".*/checks/[^/]+$")
_CELL_FILE = re.compile(
    r"([^\s\"()]*(?:ipykernel|xpython)_\d+[/\\]\d+\.py|[^\s\"()]*ipython-input-[\w-]+\.py|<ipython-input-[^>]*>)(?::(\d+))?"
)
_GUARD = os.path.join("grading", "guard.py")
_MEMORY = re.compile(  # torch's own text ends early where there is no memory for the rest of it
    r"MemoryError|[Cc]an(?:'t|not) allocate memory|std::bad_alloc|failed to map|enforce fail a(?:t alloc|$)",
    re.MULTILINE,
)
_NOTE = re.compile(rf"^(?:{IN_CALL}|{IN_CASE}) \S.*$", re.MULTILINE)
_RETURNED = re.compile(rf"^{RETURNED} (.+)$", re.MULTILINE)
_PAIR = re.compile(r"^ *rank (\d+): (send to|recv from) (\d+) #\d+ \((\w+\[[\d, ]*\])", re.MULTILINE)
_MISFIT = "a send and the receive that takes it do not fit"
# Patterns of an error's text, a line each, and below them, indented, what they mean: the first that is found.
_TABLE = Path(__file__).with_name("plain_errors.txt").read_text(encoding="utf-8")
_ROWS: list[tuple[str, str]] = re.findall(r"((?:^\S.*\n)+) +(.+)\n", _TABLE, re.M)
_MEANINGS = [(patterns.strip().replace("\n", "|"), words) for patterns, words in _ROWS]
MAX_LINE = 300
CELL = "your cell"


class CodePlace(NamedTuple):
    """A line of the learner's: file, line number, function, text."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        text = f": {self.text}" if self.text else ""
        return f"{label(self.file)}, line {self.line}, in {self.function}{text}"


def label(file: str) -> str:
    """Return a file's name as a learner knows it: "your cell" for what a notebook's kernel wrote down."""
    return CELL if _CELL_FILE.fullmatch(file) else short(file)


def place_in(traceback: str, fn: Callable[..., Any]) -> CodePlace | None:
    """Return the innermost line of the learner's in a traceback or a stack, or None where there is none."""
    frames = [CodePlace(file, int(line), name, text or "") for file, line, name, text in _FRAME.findall(traceback)]
    entered = max((i for i, frame in enumerate(frames) if frame.file.endswith(_GUARD)), default=-1)
    below = [frame for frame in frames[entered + 1 :] if owner_of(frame.file) == "user"]
    below = [one for one in below if not _CHECKS.match(one.file)] or below  # a check's model may call, or be called
    if entered >= 0 and frames[entered].function == "call" and below:
        return below[-1]
    return next((frame for frame in reversed(frames) if frame.file == file_of(fn)), None)


def file_of(fn: Callable[..., Any]) -> str:
    """Return the file in which a function, or the class of what is called, was written, or ""."""
    inner = inspect.unwrap(getattr(fn, "func", fn))
    kind: object = inner if inspect.isclass(inner) else type(inner)
    codes = (getattr(one, "__code__", None) for one in (inner, *vars(kind).values()))
    code = next((code for code in codes if code is not None), None)
    return str(getattr(fn, "file", None) or getattr(code, "co_filename", ""))


def fault_of(error: RankError, exercise: Exercise, fn: Callable[..., Any], world_size: int) -> Fault:
    """Name the fault of a run that raised, ended, or did not end."""
    if exercise.on_failure is not None and (named := exercise.on_failure(error, world_size)) is not None:
        return named
    if isinstance(error, RankTimeout):
        return _hang(error, fn)
    misfit = messages_that_do_not_fit(str(error))
    if not error.failures:
        text = str(error).split("\n--- rank")[0].rstrip()  # calls that can never end, or that do not fit each other
        is_deadlock = misfit is None and text.startswith("deadlock")
        return Fault("deadlock" if is_deadlock else "mismatch", misfit or text)
    root = error.failures[0]
    by_itself = root.summary.startswith(("raised Refused", "raised NotYet", "exited", "closed", "returned"))
    if misfit is not None and not by_itself:  # the cause, whether a rank has come to an error of its own or not yet
        return Fault("mismatch", misfit)
    place = place_in(root.traceback, fn)
    who = f"on rank {root.rank} of {world_size}: " if world_size > 1 else ""
    where = f"\n  at {place}" if place else ""
    if (note := _NOTE.search(root.traceback)) is not None:
        where += f"\n  {note[0]}"
    for also in str(error).split("\n\n")[1:2]:  # what the recorded calls add, if anything
        where += "" if also.startswith("---") else f"\n{also}"
    return _of_failure(root, place, who, where, exercise)


def _of_failure(root: Failure, place: CodePlace | None, who: str, where: str, exercise: Exercise) -> Fault:
    summary = _cut(root.summary)
    if summary.startswith("raised NotYet"):
        return Fault("not attempted", summary.removeprefix("raised NotYet: "))
    if summary.startswith("raised Refused: "):
        code, _, text = summary.removeprefix("raised Refused: ").partition(": ")
        return Fault(code, f"{who}{text}{where}")
    if _MEMORY.search(root.summary) or (summary.startswith("was killed") and _MEMORY.search(root.traceback)):
        return Fault("memory", f"{who}it asks for more memory than a check gives ({summary}){where}")
    if summary.startswith(("closed", "exited")):
        in_function = summary.startswith("exited") and (place is None or place.function != "<module>")
        advice = "; return from the function instead" if in_function else ""
        return Fault("exited", f"{who}it {summary}{advice}{where}")
    if summary.startswith(("was killed", "ended with its fork server")):
        summary = summary.replace(", whose message is in the output above", "")
        return Fault("killed", f"{who}the rank {summary}{where}")
    if summary.startswith("returned a"):
        return Fault("returned", f"{who}it {summary}")
    meaning = in_words(root.summary)
    words = f"\n  {meaning}" if meaning else ""
    if place is None and not root.is_noise:
        found, wanted = _RETURNED.search(root.traceback), inspect.signature(reference_of(exercise)).return_annotation
        if found is not None and wanted not in (None, "None"):
            text = f"it returned {found[1]}; expected {inspect.formatannotation(wanted).strip(chr(39))}"
        else:
            text = f"what it returned, or left behind, could not be used: the check {summary}{words}"
        return Fault("returned", f"{who}{text}")
    if root.is_noise:
        return Fault("raised", f"{who}it {summary} (a different rank had gone){where}")
    return Fault("raised", f"{who}it {summary}{words}{where}")


def _hang(error: RankError, fn: Callable[..., Any]) -> Fault:
    first, *rest = str(error).split("\n\n")
    lines = [first, *[part for part in rest if not part.startswith("---")][:1]]
    for failure in error.failures:
        place = place_in(failure.traceback, fn)
        if place is not None:
            lines.append(f"rank {failure.rank} stands at {place}")
        elif failure.traceback.startswith("it "):
            lines.append(f"rank {failure.rank}: {failure.traceback}")
    return Fault("hang", "\n".join(lines))


def messages_that_do_not_fit(text: str) -> str | None:
    """Find in the launcher's text a send and a receive that differ; name both with their lines. None: no such pair."""
    start = text.find(f"{_MISFIT}:\n")
    if start < 0:
        return None
    lines = text[start:].splitlines()[1:3]
    pair = {kind: (rank, size) for rank, kind, _, size in _PAIR.findall("\n".join(lines))}
    if len(pair) != 2:
        return None
    (sender, sent), (receiver, taken) = pair["send to"], pair["recv from"]
    what = f"rank {sender} sends {sent}, rank {receiver} receives it as {taken}"
    rule = "give both the same number of elements and the same dtype"
    return "\n".join([f"{_MISFIT}: {what}: {rule}", *lines])


def in_words(error: str) -> str:
    """Return what an error of Python or torch means in an answer; "" where it is not one of the usual mistakes."""
    for pattern, words in _MEANINGS:
        if found := re.search(pattern, error):
            return words.format(*(group for group in found.groups() if group is not None), "number")
    return ""


def in_plain_names(text: str, fn: Callable[..., Any]) -> str:
    """Name files in a message as the learner knows them: "your cell, line 8" for a file that the kernel made."""
    file = file_of(fn)
    text = _CELL_FILE.sub(lambda found: f"{CELL}, line {found[2]}" if found[2] else CELL, well_formed(text))
    return text.replace(f"{file}:", f"{label(file)}:") if file else text


def _cut(line: str) -> str:
    first, *more = line.splitlines() or [""]
    line = first if len(first) <= MAX_LINE else first[: MAX_LINE - 3] + "..."
    return line + (f" ({len(more)} more lines)" if len(more) > 4 else "".join(f"\n  {text}" for text in more))
