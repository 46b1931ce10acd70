"""The header of a rank's record: which job it holds, how many calls, and what the rank says of itself."""

from __future__ import annotations

import struct
from typing import NamedTuple

STOPPED, FINISHED = 2, 4  # bits of the same number as the header's `aside`
HEADER = struct.Struct("<8sQQQQqQQQQQ")  # a magic text, then what Header holds
MAGIC = b"distrec4"


class Header(NamedTuple):
    """Header of a rank's file, as read.

    Attributes:
        slots: rows that the ring holds.
        job: how many times the record was begun; rows of different jobs never meet.
        first: number of the job's first row.
        newest: number of the newest row; first - 1 where there is none.
        start_ns: start of the job.
        aside: 1 where a thread that need not block the rank made a call; STOPPED where the rank records no more;
            FINISHED where it makes no more calls.
        counted: number of the first row that is not in the totals.
        groups_begun, groups_made: how many groups the job has begun to make (dist.new_group), and has made.
        left_text: members and line of the last group that it destroyed; 0: none.
    """

    slots: int
    job: int
    first: int
    newest: int
    start_ns: int
    aside: int
    counted: int
    groups_begun: int
    groups_made: int
    left_text: int = 0

    @property
    def making(self) -> int:
        """Number of the group that the rank is making, from 1; 0: none."""
        return self.groups_begun if self.groups_begun > self.groups_made else 0

    @property
    def is_stopped(self) -> bool:
        """Whether the rank makes calls that it does not record."""
        return bool(self.aside & STOPPED)

    @property
    def is_finished(self) -> bool:
        """Whether the rank makes no more calls, by its own doing."""
        return bool(self.aside & FINISHED)
