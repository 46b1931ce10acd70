"""Processes that share a queue run each file of tests once, and nothing that fails in one of them is lost."""

import subprocess
import sys
from pathlib import Path

import pytest
from one_queue import LIST, TAKEN, files_of

TOOL = Path(__file__).resolve().parents[1] / "tools" / "side_by_side.py"
DIES = "import os\n\ndef test_wrong():\n    assert 1 == 2\n\ndef test_dies():\n    os._exit(3)\n"
RIGHT = "import pytest\n\ndef test_right(number):\n    pass\n\n@pytest.mark.soak\ndef test_long():\n    assert False\n"
SHARED = "import pytest\n\n@pytest.fixture(scope='session')\ndef number():\n    return 1\n"


def run(folder: Path, processes: int) -> subprocess.CompletedProcess:
    command = [sys.executable, TOOL, folder, "--processes", str(processes), "--", "-m", "not soak"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_each_file_is_taken_once_and_in_order(tmp_path):
    files = [f"test_{number}.py" for number in range(5)]
    (tmp_path / LIST).write_text("\n".join(files))
    (tmp_path / TAKEN).mkdir()
    one, other = files_of(tmp_path), files_of(tmp_path)
    taken = [next(one), next(other), next(other), *one, *other]
    assert taken == files


@pytest.mark.timeout(200)
def test_what_fails_is_told_also_where_the_process_dies(tmp_path):
    (tmp_path / "conftest.py").write_text(SHARED)
    for number in range(3):
        (tmp_path / f"test_right_{number}.py").write_text(RIGHT)
    done = run(tmp_path, 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 files: 3 passed" in done.stdout
    (tmp_path / "test_bad.py").write_text("import nowhere_at_all\n")
    (tmp_path / "test_dies.py").write_text(DIES)
    done = run(tmp_path, 2)
    assert done.returncode == 1
    for words in ("No module named 'nowhere_at_all'", "assert 1 == 2", "(status 3) in ", "::test_dies"):
        assert words in done.stdout, words
