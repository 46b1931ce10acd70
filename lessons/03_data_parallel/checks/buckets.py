"""Which gradients travel together: sizes and capacities to fill buckets with."""

from __future__ import annotations

from typing import Any

from distlab.course.grading.cases import Cases
from distlab.course.grading.variation.draw import Draw, Vary
from distlab.grading import Mutant

SIZES: tuple[tuple[list[int], int], ...] = (
    ([40, 30, 20, 10], 30),  # 3 and 2 fill the first exactly
    ([10, 20, 30, 40, 50], 60),
    ([8, 100, 8, 8], 16),  # a parameter larger than a bucket
    ([5], 100),
    ([], 100),
    ([7] * 10, 21),
    ([1, 2, 3], 1),
    ([3, 4, 5, 10], 10),  # the second bucket is one byte short before its last
)


def _draw(draw: Draw) -> tuple[Any, ...]:
    sizes = [draw.integer(0, 60) for _ in range(draw.one_of(0, 1, draw.integer(4, 9), draw.integer(7, 20)))]
    some = sum(sizes[-draw.integer(1, 3) :])  # exactly what some parameters hold, or one byte more
    return sizes, draw.one_of(max(some, 1), some + 1)


drive_buckets = Cases({f"fill_buckets({sizes}, {capacity})": (sizes, capacity) for sizes, capacity in SIZES})
vary_buckets = Vary(_draw, num_calls=24)  # a call costs nothing

_ADD = "members.append(index)\nnum_bytes += sizes_bytes[index]"
_CLOSE = "buckets.append(members)\n    members, num_bytes = [], 0"
WRONG_BUCKETS = (
    Mutant(
        "from the front",
        "forward order",
        "it begins with the first parameter; backward makes the last one's gradient first, so begin there",
        1,
        16,
    ).edit("reversed(range(", "list(range("),
    Mutant(
        "last bucket lost", "last", "the last bucket is lost where it is not full; return what it holds too", 1, 15
    ).without(" + [members] if members else buckets"),
    Mutant(
        "one too many", "late", "a bucket with exactly bucket_bytes stays open; close it when it holds as much", 1, 16
    ).edit(">= bucket_bytes", "> bucket_bytes"),
    Mutant(
        "never above", "early", "a bucket is closed before it has bucket_bytes; it may hold more, never less", 1, 50
    ).edit(
        f"{_ADD}\nif num_bytes >= bucket_bytes:\n    {_CLOSE}",
        f"if members and num_bytes + sizes_bytes[index] > bucket_bytes:\n    {_CLOSE}\n{_ADD}",
    ),
    Mutant(
        "without the first", "parameter lost", "parameter 0 is in no bucket; the last index to visit is 0", 1, 15
    ).edit("range(len(sizes_bytes))", "range(1, len(sizes_bytes))"),
    Mutant(
        "bytes carried over", "not set back", "a new bucket begins with the old one's bytes; set the count back to 0", 1
    ).edit("        members, num_bytes = [], 0", "        members = []"),
    Mutant(
        "counts parameters", "counts parameters", "it counts parameters; a bucket's capacity is a number of bytes", 1
    ).edit("num_bytes += sizes_bytes[index]", "num_bytes += 1"),
    Mutant(
        "always a last bucket", "empty", "an empty bucket is returned at the end; it would cost a call for nothing", 1
    ).without(" if members else buckets"),
    Mutant("sizes", "sizes", "the buckets hold the parameters' sizes; return their numbers, from 0 on", 1).edit(
        "members.append(index)", "members.append(sizes_bytes[index])"
    ),
    Mutant(
        "rest carried over", "not set back", "bytes above bucket_bytes are carried over; set the count back to 0", 1
    ).edit("        members, num_bytes = [], 0", "        members, num_bytes = [], num_bytes - bucket_bytes"),
    Mutant("ascending", "ascending", "in a bucket, too, the last parameter comes first", 1).edit(
        "members.append(index)", "members.insert(0, index)"
    ),
    Mutant(
        "turned round", "turned round", "buckets are filled from the first on, and turned round; begin with the last", 1
    )
    .edit("reversed(range(len(sizes_bytes)))", "range(len(sizes_bytes))")
    .edit(
        "return buckets + [members] if members else buckets",
        "return [one[::-1] for one in [*buckets, members][::-1] if one]",
    ),
    Mutant(
        "from the end", "numbered from the end", "it counts parameters from the last one; the first one is 0", 1
    ).edit("append(index)", "append(len(sizes_bytes) - 1 - index)"),
    Mutant("takes from the list", "changed argument", "it belongs to the caller", 1, 40).edit(
        "+= sizes_bytes[index]", "+= sizes_bytes.pop()"
    ),
)
