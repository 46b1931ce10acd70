"""Cost and Error lines are claims: the registry names their tests, and these tests exist."""

import ast
import functools
from collections import Counter
from pathlib import Path

import claims_table

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def functions_of(path):
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_registered_claim_stands_in_a_docstring():
    gone = set(claims_table.tests_of_claims()) - set(claims_table.claims_in_code())
    assert not gone, f"tests/claims.toml names claims that no docstring makes: {sorted(gone)}"


def test_each_named_test_exists():
    for claim, tests in claims_table.tests_of_claims().items():
        assert tests, f"{claim} has an empty list of tests"
        for test in tests:
            file, name = test.split("::")
            path = ROOT / "tests" / file
            assert path.is_file(), f"{claim}: there is no tests/{file}"
            assert name in functions_of(path), f"{claim}: tests/{file} has no {name}"


def test_complete_packages_have_a_test_for_every_claim():
    missing = [claim for claim in claims_table.untied() if claim.package in claims_table.registry()["complete"]]
    assert not missing, f"claims without a test; add them to tests/claims.toml: {missing}"


def test_the_number_of_claims_without_a_test_only_falls():
    missing, allowed = Counter(claim.package for claim in claims_table.untied()), claims_table.registry()["untied"]
    more = {package: number for package, number in missing.items() if number > allowed.get(package, 0)}
    assert not more, f"new claims without a test; name their tests in tests/claims.toml: {more}"


def test_the_table_is_what_the_registry_says():
    assert claims_table.TABLE.read_text() == claims_table.text(), "run tools/claims_table.py"
