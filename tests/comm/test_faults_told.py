"""Each fault of `_faults` is told within 5 seconds, with the lines of the ranks that have a part in it."""

import pytest
from _faults import LIMIT_S, PROGRAMS, has_line, tell


@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.run.__name__)
def test_a_fault_is_told_in_time_with_ranks_and_lines(program, backend):
    told = tell(program, backend)
    assert told.text, "silence"
    assert told.seconds <= LIMIT_S, told
    assert [rank for rank in program.lines_of if not has_line(told, rank)] == [], told.text
