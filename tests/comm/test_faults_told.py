"""Each fault of `_faults` is told with the lines of the ranks that have a part in it; `make promises` says how soon."""

import pytest
from _faults import GROUP_S, PROGRAMS, has_line, tell

# Told by rules that the others show too (test_watchdog has each); some stand still for two seconds first.
ALIKE = ("shape", "dtype", "root", "swapped", "rotated", "skipped_between", "send_alone", "receive_alone")
ALIKE += ("both_receive",)


@pytest.mark.soak_where(backend=("shared",))  # which names calls that differ itself: shared_memory/test_endings.py
@pytest.mark.soak_where(program=[program for program in PROGRAMS if program.run.__name__ in ALIKE])
@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.run.__name__)
def test_a_fault_is_told_with_ranks_and_lines(program, backend, record_property):
    told = tell(program, backend)
    record_property("seconds", told.seconds)  # benchmarks/PROMISES.md has the slowest beside the limit
    assert told.text, "silence"
    assert told.seconds < GROUP_S, "by a wait that has timed out"
    assert [rank for rank in program.lines_of if not has_line(told, rank)] == [], told.text
