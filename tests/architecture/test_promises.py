"""Each promise names tests that exist and can reach its bar, and the page is what the kept results say."""

import ast
import os
from pathlib import Path

import promises

ROOT = Path(__file__).resolve().parents[2]


def test_every_promise_is_there():
    assert list(promises.promises()) == [*(f"R{number}" for number in range(1, 15)), "S1", "S2", "S3"]


def test_each_named_test_exists():
    for name, promise in promises.promises().items():
        assert promise["least"] >= 1
        for test in promise["tests"]:
            file, _, function = test.partition("::")
            path = ROOT / "tests" / file
            assert path.is_file(), f"{name}: there is no tests/{file}"
            names = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
            assert not function or function in names, f"{name}: tests/{file} has no {function}"


def test_the_page_is_what_was_kept():
    assert promises.TABLE.read_text() == promises.page(), "run tools/promises.py --table"


def test_a_promise_holds_only_where_all_of_enough_tries_hold_in_time():
    promise = {"least": 3, "limit_s": 2}
    good = {"failed": [], "tried": 3, "held": 3, "slowest_s": 1.9}
    assert promises.holds(promise, good)
    for change in ({"failed": ["a"]}, {"held": 2}, {"tried": 2, "held": 2}, {"slowest_s": 2.1}):
        assert not promises.holds(promise, good | change), change


REPORT = """<testsuites><testsuite>
<testcase classname="a" name="counts" time="9"><properties><property name="tried" value="5" />
<property name="held" value="4" /><property name="seconds" value="1.5" /></properties></testcase>
<testcase classname="a" name="one" time="8" />
<testcase classname="a" name="fails" time="8"><failure message="no" /></testcase>
<testcase classname="a" name="cannot" time="0"><skipped message="no GPU" /></testcase>
</testsuite></testsuites>"""


def test_counts_are_added_up_and_a_failure_or_a_skip_never_counts_as_held():
    found = promises.counted(promises.ElementTree.fromstring(REPORT).iter("testcase"))
    assert (found["tried"], found["held"]) == (7, 5)
    assert found["slowest_s"] == 8, "of a test that times a part of itself that part, of others all"
    assert (found["failed"], found["skipped"]) == (["a::fails"], ["no GPU"])


def test_a_run_that_ends_without_a_report_is_a_failure_and_no_end_of_all(tmp_path):
    file = tmp_path / "test_ends.py"
    file.write_text("import os\n\n\ndef test_it():\n    os._exit(1)\n")
    result = promises.attempt([os.path.relpath(file, ROOT / "tests")])
    assert result["failed"] == ["pytest ended with status 1"]
    promise = {"promise": "none", "tries": "tries", "limit_s": 2}
    assert not promises.holds(promise, result)
    assert "FAILED: pytest ended with status 1" in promises.row("R0", promise, result)
