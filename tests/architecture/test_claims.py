"""Cost and Error lines are claims; so are promises. Tables name the tests of each, and these tests exist.

Whether the tests of a promise reach its bar, and the pages, is what the kept results say.
"""

import ast
import functools
from collections import Counter
from pathlib import Path

import claims_table
import promises

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def functions_of(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_registered_claim_stands_in_a_docstring():
    gone = set(claims_table.tests_of_claims()) - set(claims_table.claims_in_code())
    assert not gone, f"tests/claims.toml names claims that no docstring makes: {sorted(gone)}"


def test_each_named_test_exists_and_every_promise_is_there():
    made = promises.promises()
    assert list(made) == [*(f"R{number}" for number in range(1, 16)), "S1", "S2", "S3"]
    assert all(promise["least"] >= 1 for promise in made.values())
    for claim, tests in (claims_table.tests_of_claims() | {name: made[name]["tests"] for name in made}).items():
        assert tests, f"{claim} has an empty list of tests"
        for test in tests:
            file, _, name = test.partition("::")
            path = ROOT / "tests" / file
            assert path.is_file(), f"{claim}: there is no tests/{file}"
            assert name in functions_of(path) or not name, f"{claim}: tests/{file} has no {name}"


def test_complete_packages_have_a_test_for_every_claim():
    missing = [claim for claim in claims_table.untied() if claim.package in claims_table.registry()["complete"]]
    assert not missing, f"claims without a test; add them to tests/claims.toml: {missing}"


def test_the_number_of_claims_without_a_test_only_falls():
    missing, allowed = Counter(claim.package for claim in claims_table.untied()), claims_table.registry()["untied"]
    more = {package: number for package, number in missing.items() if number > allowed.get(package, 0)}
    assert not more, f"new claims without a test; name their tests in tests/claims.toml: {more}"


def test_the_pages_are_what_the_registry_and_the_kept_results_say():
    assert claims_table.TABLE.read_text() == claims_table.text(), "run tools/claims_table.py"
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
