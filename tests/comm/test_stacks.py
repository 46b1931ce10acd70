"""The launcher reads a rank's stack when it is written to its end, not while the rank still writes."""

from types import SimpleNamespace

import pytest

from distlab.comm.launch.pool import Pool
from distlab.comm.launch.worker import stack_path

STACK = """Thread 0x00007f0 (most recent call first):
  File "/home/me/threads.py", line 3 in wait

Current thread 0x00007f1 (most recent call first):
  File "/home/me/train.py", line 9 in step
  File "<string>", line 1 in <module>
"""


@pytest.mark.parametrize("lines", range(len(STACK.splitlines()) + 1))
def test_a_stack_is_complete_when_its_last_line_is_there(tmp_path, lines):
    written = "".join(STACK.splitlines(keepends=True)[:lines])
    stack_path(tmp_path, 0).parent.mkdir(parents=True, exist_ok=True)
    stack_path(tmp_path, 0).write_text(written)
    pool = SimpleNamespace(folder=tmp_path, _is_stopped=lambda rank: False)
    assert Pool._has_answered(pool, 0) == (written == STACK)
