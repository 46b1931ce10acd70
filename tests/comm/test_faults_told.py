"""Each fault of `_faults` is told with the lines of the ranks that have a part in it, and on a calm machine soon."""

import pytest
from _faults import GROUP_S, LIMIT_S, PROGRAMS, has_line, tell


@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.run.__name__)
def test_a_fault_is_told_with_ranks_and_lines(program, backend):
    told = tell(program, backend)
    assert told.text, "silence"
    assert told.seconds < GROUP_S, "by a wait that has timed out"
    assert [rank for rank in program.lines_of if not has_line(told, rank)] == [], told.text


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_faults_are_told_in_time(backend):
    told = {program.run.__name__: tell(program, backend).seconds for program in PROGRAMS}
    assert max(told.values()) <= LIMIT_S, told
