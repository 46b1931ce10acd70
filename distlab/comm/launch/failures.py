"""What went wrong on which rank, told with the cause first."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distlab.comm.agree import ranks_in_words
from distlab.comm.where.frames import is_machinery, owner_of, threads_in, traceback_lines

# What a rank sees when a different one has gone. It is a consequence, never the cause.
PEER_NOISE = re.compile(
    r"connection (closed|reset|refused|aborted)|socket closed|broken pipe|remote process exited|timed out waiting"
    r"|application timeout caused pair closure|connect(ion)? timeout|SO_ERROR",
    re.IGNORECASE,
)

_WHY_KILLED = dict(csv.reader(Path(__file__).with_name("signals.csv").read_text("utf-8").splitlines()))
_FRAME = 'File "'
MAX_SUMMARY, MAX_TEXT = 5_000, 20_000  # characters of what an error says of a rank, and of its traceback
LONGEST_LINE = 500  # of what an error repeats of a line


class Failure(NamedTuple):
    """How one rank failed.

    Attributes:
        rank: which rank.
        summary: one line, such as "raised ValueError: 3 is odd" or "was killed by SIGKILL".
        traceback: the rank's own traceback or stack, or "".
        is_noise: whether it only says that a different rank had gone.
        time_ns: when, on this machine's monotonic clock.
    """

    rank: int
    summary: str
    traceback: str
    is_noise: bool
    time_ns: int


class RankError(RuntimeError):
    """A rank failed; the text begins with the root cause.

    Attributes:
        rank: the rank to blame, or None where the text names several.
        failures: every rank's failure, the root cause first.
    """

    def __init__(self, message: str, rank: int | None = None, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.rank = rank
        self.failures = tuple(failures)


class RankTimeout(RankError):
    """Some ranks had not finished in time; the text says where each one stands."""


def shortened(text: str, limit: int = MAX_TEXT) -> str:
    """Return text without the middle of it where it is long, and without the ends of its long lines."""
    num_left = len(text) - limit
    if num_left > 0:
        text = f"{text[: limit // 2]}\n[... {num_left:,} characters ...]\n{text[-limit // 2 :]}"
    return "\n".join(line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}..." for line in text.split("\n"))


def well_formed(text: str) -> str:
    """Return text that can be printed: half of a surrogate pair becomes its number."""
    return text.encode("utf-8", "backslashreplace").decode()


def describe_exit(exit_code: int) -> str:
    """Say in words how a process ended; a negative code is minus the signal's number, as in subprocess."""
    if exit_code >= 0:
        return f"exited with status {exit_code} before it returned (os._exit, or an exit in C code)"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    reason = f" ({_WHY_KILLED[name]})" if name in _WHY_KILLED else ""
    return f"was killed by {name}{reason}"


def error_of(
    failures: Sequence[Failure],
    stacks: Mapping[int, str],
    finished: Sequence[int],
    world_size: int,
    explanation: str = "",
) -> RankError:
    """Make the error of a job in which some ranks failed.

    Args:
        failures: what each failed rank reported, at least one.
        stacks: where each rank that was still running stood.
        finished: ranks that had returned.
        world_size: number of ranks.
        explanation: what the recorded calls show, if anything.
    """
    ordered = sorted(failures, key=lambda failure: (failure.is_noise, failure.time_ns))  # a cause of its own first
    root, returned = ordered[0], ranks_in_words(finished)
    lines = [f"rank {root.rank} of {world_size} {root.summary}"]
    if root.is_noise and finished:
        lines.append(f"A different rank had gone: {returned} had already returned while rank {root.rank} waited.")
    if explanation:
        lines += ["", explanation]
    if root.traceback:
        lines += ["", f"--- rank {root.rank} ---", root.traceback.rstrip()]
    if len(ordered) > 1 or stacks or finished:
        lines += ["", "--- the other ranks ---"]
    for failure in ordered[1:]:
        why = " (a consequence)" if failure.is_noise else ""
        place = _place(failure.traceback) if _FRAME in failure.traceback else ""
        lines.append(f"rank {failure.rank} {_first_line(failure.summary)}{why}{place}")
    for rank, stack in sorted(stacks.items()):
        lines.append(f"rank {rank} was still running{_place(stack)}")
    if finished:
        lines.append(f"{returned} had returned")
    return RankError("\n".join(lines), root.rank, ordered)


def timeout_of(stacks: Mapping[int, str], timeout_s: float, world_size: int, words: Sequence[str]) -> RankTimeout:
    """Make the error of a job that did not end in time.

    Args:
        stacks: where each unfinished rank stands.
        timeout_s: the limit.
        world_size: number of ranks.
        words: what the recorded calls show: who waits for whom.
    """
    lines = [f"{ranks_in_words(list(stacks))} of {world_size} did not finish in {timeout_s:g} s"]
    lines += standing(stacks, words)
    failures = [Failure(rank, f"did not finish in {timeout_s:g} s", stack, False, 0) for rank, stack in stacks.items()]
    return RankTimeout("\n".join(lines), next(iter(stacks)) if len(stacks) == 1 else None, failures)


def standing(stacks: Mapping[int, str], words: Sequence[str]) -> list[str]:
    """Lines that say who waits for whom and where each rank stands."""
    lines = ["", *words] if words else []
    for rank, stack in sorted(stacks.items()):
        lines += ["", f"--- rank {rank} stands here (innermost call last) ---", stack.rstrip()]
    return lines


def _first_line(text: str, limit: int = 160) -> str:
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= limit else line[: limit - 3] + "..."


def _place(stack: str) -> str:
    """The innermost line of a stack that is not torch's, as " in NAME (FILE:LINE)"; or the stack's own words."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', stack)
    if frames:
        own = [one for one in frames if owner_of(one[0]) != "torch" and not is_machinery(one[0])]
        file, line, name = (own or frames)[-1]
        return f" in {name} ({file}:{line})"
    return f": {_first_line(stack)}" if stack else ""


def format_stack(text: str) -> str:
    """Turn faulthandler's dump into a traceback: innermost call last, with source lines, without the launcher's frames.

    Of threads other than the main one, only those that are in code of the user's or of a package are shown.
    """
    shown, threads = [], threads_in(text)
    for number, (block, frames) in enumerate(threads, 1):
        if number < len(threads) and all(owner_of(frame.file) not in ("user", "package") for frame in frames):
            continue
        lines = [line for line in block.splitlines()[:1] if line.startswith("Fatal")]
        lines += traceback_lines([frame for frame in frames if not is_machinery(frame.file)])
        if lines:
            shown.append("\n".join(lines))
    return "\n\n".join(shown)


def launcher_folder() -> Path | None:
    """Return a folder for this rank that torchrun or `run_script` made; None without them."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parent if path else None


def record_failure(error: BaseException, stack: str = "") -> bool:
    """Write an exception where torchrun and `run_script` look for it; return whether there is such a launcher."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    text = shortened(f"{type(error).__name__}: {error}", MAX_SUMMARY)
    stack = shortened(stack)
    whole = stack if text in stack else f"{text}\n{stack}"
    more = {"py_callstack": whole, "timestamp": str(int(time.time())), "stack": stack}
    fresh = Path(f"{path}.new")  # torchrun itself ends where it meets half a file of a rank that was killed
    fresh.write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
    fresh.replace(path)
    return True


def recorded_failure(path: Path, rank: int, time_ns: int) -> Failure | None:
    """Read what `record_failure` wrote; None where there is nothing."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        message: Any = json.loads(path.read_bytes())["message"]
        text, stack = message["message"], message["extraInfo"]["stack"]
        is_noise = PEER_NOISE.search(text.partition("\n")[0]) is not None
        return Failure(rank, f"raised {text}", stack, is_noise, time_ns)
    return None
