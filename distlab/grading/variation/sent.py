"""Compare what an answer sent in its drawn calls with what the reference sent: no result comes from nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distlab.grading.exercise import Evidence, Fault


def other_messages(got: Evidence, wanted: Evidence) -> Fault | None:
    """Compare the number of messages of each rank with the reference's."""
    from distlab.grading.diagnosis.traffic import calls

    for rank in range(got.world_size):
        for op in ("send", "recv"):
            made, needed = len(calls(got, rank, op)), len(calls(wanted, rank, op))
            if made != needed:
                text = f"rank {rank} made {made} {op}s in {len(wanted.results[rank]['calls'])} calls"
                return Fault("wrong number of messages", f"{text}; expected {needed}: use every argument")
    return None


def taking_part(evidence: Evidence) -> list[int]:
    """Return the ranks that sent or received numbers: a barrier carries none."""
    from distlab.grading.diagnosis.traffic import calls

    return [rank for rank in range(evidence.world_size) if any(call.num_bytes for call in calls(evidence, rank))]


def not_taking_part(got: Sequence[int], wanted: Sequence[int]) -> Fault | None:
    """Find a rank that neither sent nor received a number, though the others cannot know its numbers."""
    rank = next((rank for rank in wanted if rank not in got), None)
    if rank is None:
        return None
    text = f"right results, but rank {rank} sent and received 0 bytes through torch.distributed"
    return Fault("unseen", f"{text}, and no rank can know the others' numbers: send them with dist's own functions")


def all_sent(evidence: Evidence) -> int:
    """Return the bytes that all ranks sent together."""
    from distlab.grading.diagnosis.traffic import sent_bytes

    return sum(sent_bytes(evidence, rank) for rank in range(evidence.world_size))


def too_few(got: int, num_calls: int, least: float, n: int) -> Fault | None:
    """Find results that the recorded bytes cannot have brought about; a call's bytes may be rounded down by one."""
    from distlab.grading.diagnosis.traffic import in_megabytes

    if got + num_calls >= least:
        return None
    text = f"right results, but the {n} ranks together sent {in_megabytes(got)} through torch.distributed"
    text = f"{text}, where any right answer sends {in_megabytes(least)} or more"
    return Fault("unseen", f"{text}: what is needed must travel, whole, by dist's own functions")


def unseen(got: Sequence[Any], num_calls: int, num_calls_wanted: int) -> Fault | None:
    """Find communication that the record of calls does not show."""
    counted = sum(result.get("num_collectives", 0) for result in got if isinstance(result, dict))
    if counted > max(2, len(got)) * num_calls:  # torch counts some calls twice, and a reduce_scatter once per rank
        text = (
            f"right results, but torch counted {counted} collectives on {len(got)} ranks, and {num_calls} were called"
        )
        return Fault("unseen", f"{text} through torch.distributed: call dist's own functions, not what is below them")
    if num_calls_wanted and not num_calls and len(got) > 1:
        text = "right results, but no rank called torch.distributed, and no rank can know the others' numbers"
        return Fault("unseen", f"{text}: send them with dist's own functions")
    return None
