"""Which gradients travel together: sizes and capacities to fill buckets with, and what can be wrong with the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found

BUCKET_CASES: tuple[tuple[list[int], int], ...] = (
    ([40, 30, 20, 10], 30),  # 3 and 2 fill the first exactly
    ([10, 20, 30, 40, 50], 60),
    ([8, 100, 8, 8], 16),  # a parameter larger than a bucket
    ([5], 100),
    ([], 100),
    ([7] * 10, 21),
    ([1, 2, 3], 1),
    ([3, 4, 5, 10], 10),  # the second bucket is one byte short before its last
)


def drive_buckets(fn: Callable[[list[int], int], Any]) -> list[tuple[Any, list[int]]]:
    """Call fn on each case; return what it returned and what it left of its argument."""
    results = []
    for sizes, capacity in BUCKET_CASES:
        given = list(sizes)
        results.append((fn(given, capacity), given))
    return results


def judge_buckets(evidence: Evidence) -> Iterator[Fault]:
    """Every parameter once, the last first, and each bucket closed when it holds enough."""
    for (sizes, capacity), (buckets, left) in zip(BUCKET_CASES, evidence.results[0], strict=True):
        asked = f"fill_buckets({sizes}, {capacity})"
        if left != sizes:
            text = f"{asked} left {left} in the caller's list"
            yield Fault("changed argument", f"{text}: do not change what you are given")
        fault = _wrong_shape(buckets, asked) or _wrong_members(buckets, sizes, asked)
        yield from found(fault or _wrong_closing(buckets, sizes, capacity, asked))


def _wrong_shape(buckets: Any, asked: str) -> Fault | None:
    good = isinstance(buckets, list) and all(isinstance(bucket, list | tuple) for bucket in buckets)
    if not good or not all(isinstance(index, int) for bucket in buckets for index in bucket):
        return Fault("returned", f"{asked} returned {buckets!r}; expected a list of lists of indices")
    if [] in buckets:
        return Fault(
            "empty bucket", f"{asked} returned {buckets}, with an empty bucket: it would cost a call for nothing"
        )
    return None


def _wrong_members(buckets: list[list[int]], sizes: list[int], asked: str) -> Fault | None:
    walked = [index for bucket in buckets for index in bucket]
    text = f"{asked} returned {buckets}"
    lost = [index for index in range(len(sizes)) if index not in walked]
    if lost and sorted(walked) == sorted(sizes):
        return Fault(
            "sizes", f"{text}: these are the sizes of parameters; a bucket is a list of their numbers, from 0 on"
        )
    if lost:
        return Fault("parameter lost", f"{text}: parameter {lost[0]} is in no bucket, no rank would average it")
    if len(walked) != len(sizes):
        return Fault(
            "parameter twice", f"{text}: expected each of {len(sizes)} parameters once, got {len(walked)} entries"
        )
    if walked == list(range(len(sizes))) and len(walked) > 1:
        return Fault("forward order", f"{text}: backward makes the last parameter's gradient first; start at the end")
    if walked != list(reversed(range(len(sizes)))):
        return Fault("order", f"{text}: expected the parameters from last to first, got {walked}")
    return None


def _wrong_closing(buckets: list[list[int]], sizes: list[int], capacity: int, asked: str) -> Fault | None:
    for number, bucket in enumerate(buckets):
        num_bytes = sum(sizes[index] for index in bucket)
        before_last = num_bytes - sizes[bucket[-1]]
        text = f"{asked} returned {buckets}: bucket {number}"
        if before_last >= capacity:
            reached = "exactly" if before_last == capacity else "more than"
            return Fault("closed too late", f"{text} held {reached} {capacity} bytes and was not closed then")
        if num_bytes < capacity and number < len(buckets) - 1:
            return Fault(
                "closed too early", f"{text} was closed at {num_bytes} bytes, below its capacity of {capacity}"
            )
    return None


WRONG_BUCKETS = (
    Mutant("from the front", "forward order", "start at the end", 1, 16).edit("reversed(range(", "list(range("),
    Mutant("last bucket lost", "parameter lost", "is in no bucket", 1, 15).without(
        " + [members] if members else buckets"
    ),
    Mutant("one too many", "closed too late", "held exactly 30 bytes", 1, 16).edit(">= bucket_bytes", "> bucket_bytes"),
    Mutant("never above", "closed too early", "below its capacity of 60", 1, 50).edit(
        """
        members.append(index)
        num_bytes += sizes_bytes[index]
        if num_bytes >= bucket_bytes:
            buckets.append(members)
            members, num_bytes = [], 0
        """,
        """
        if members and num_bytes + sizes_bytes[index] > bucket_bytes:
            buckets.append(members)
            members, num_bytes = [], 0
        members.append(index)
        num_bytes += sizes_bytes[index]
        """,
    ),
    Mutant("without the first", "parameter lost", "parameter 0 is in no bucket", 1, 15).edit(
        "range(len(sizes_bytes))", "range(1, len(sizes_bytes))"
    ),
    Mutant("bytes carried over", "closed too early", "closed at 30 bytes", 1).edit(
        "        members, num_bytes = [], 0", "        members = []"
    ),
    Mutant("counts parameters", "closed too late", "more than 30 bytes", 1).edit(
        "num_bytes += sizes_bytes[index]", "num_bytes += 1"
    ),
    Mutant("always a last bucket", "empty bucket", "a call for nothing", 1).without(" if members else buckets"),
    Mutant("takes from the list", "changed argument", "do not change what you are given", 1, 40).edit(
        "members.append(index)\nnum_bytes += sizes_bytes[index]",
        "members.append(index)\nnum_bytes += sizes_bytes.pop()",
    ),
)
