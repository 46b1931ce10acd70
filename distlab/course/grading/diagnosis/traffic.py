"""What a run sent, from its records: bytes, calls and their order, and where a budget was passed.

A right result is not enough: a "ring" that sends whole tensors and a "bucket" that holds one parameter give the same
numbers. These functions read what the ranks really did.
"""

from __future__ import annotations

import linecache

from distlab.comm.record.read import Call
from distlab.course.grading.exercise import Evidence, Fault

MESSAGES = ("send", "recv")


def sent_bytes(evidence: Evidence, rank: int) -> int:
    """Return the bytes that a rank sent: its own sends, and what its native collectives would send as rings."""
    if rank not in evidence.records.by_rank:
        return 0
    return evidence.records.sent_bytes(rank) + evidence.records.ring_equivalent_bytes(rank)


def calls(evidence: Evidence, rank: int, *ops: str) -> list[Call]:
    """Return a rank's calls in order, all of them or those of some operations, such as "all_reduce"."""
    if rank not in evidence.records.by_rank:
        return []
    return [call for call in evidence.records.calls(rank) if not ops or call.op in ops]


def most_sent(evidence: Evidence) -> int:
    """Return the bytes that the rank sent that sent most."""
    return max((sent_bytes(evidence, rank) for rank in evidence.records.ranks), default=0)


def native_collectives(evidence: Evidence) -> tuple[str, ...]:
    """Return the names of torch's own collectives that any rank called, without repeats; barriers do not count."""
    seen = [call.op for rank in evidence.records.ranks for call in calls(evidence, rank)]
    return tuple(dict.fromkeys(op for op in seen if op not in (*MESSAGES, "barrier")))


def never_waited(evidence: Evidence, file: str) -> Call | None:
    """Return a call of the learner's file that its rank never waited for, a receive before others; or None."""

    def is_made_there(call: Call) -> bool:  # what backward() calls by itself, as DDP does, C++ waits for
        of_call, _, line = call.site.rpartition(":")
        text = linecache.getline(file, int(line)) if line.isdecimal() else ""
        return of_call == file and (".backward(" not in text or call.op in text)

    made = (call for rank in evidence.records.ranks for call in calls(evidence, rank))
    unwaited = [call for call in made if not call.wait_ns and is_made_there(call)]
    return min(unwaited, key=lambda call: call.op != "recv", default=None)


def in_megabytes(num_bytes: float) -> str:
    """Return bytes in words: "48 bytes", "3.0 kB", "3.0 MB"."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes < 1e6 else f"{num_bytes / 1e6:.1f} MB"


def over_budget(evidence: Evidence, wanted_bytes: float, what: str, *, slack: float = 0.01) -> Fault | None:
    """Say which rank sent more than it needed, or return None.

    Args:
        evidence: the run.
        wanted_bytes: how many bytes each rank needs to send.
        what: what needs so many, such as "a ring".
        slack: how much more passes, relative.
    """
    ranks = evidence.records.ranks
    most = max(ranks, key=lambda rank: sent_bytes(evidence, rank), default=0)
    sent = sent_bytes(evidence, most)
    if sent <= wanted_bytes * (1 + slack):
        return None
    text = f"right result, but {in_megabytes(sent)} sent per rank where {what} needs {in_megabytes(wanted_bytes)}"
    many = {sent_bytes(evidence, rank) for rank in ranks}
    return Fault("too many bytes", text + (f" (rank {most})" if len(many) > 1 else ""))


def sent_line(evidence: Evidence, wanted_bytes: float, what: str) -> str:
    """Return a budget's line, such as "sent 3.0 MB a rank (a ring needs 3.0 MB)"."""
    return f"sent {in_megabytes(most_sent(evidence))} a rank ({what} needs {in_megabytes(wanted_bytes)})"
