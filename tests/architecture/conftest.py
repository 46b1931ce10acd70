"""Each file of Python is parsed once for all gates."""

import ast
import functools
import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def _trees_stay():
    """Looking through parsed files for garbage takes longer than all gates, and finds none."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="session")
def statements():
    """Make `statements(path)` return every statement of a file, also those in functions, classes and blocks."""
    return functools.cache(lambda path: list(statements_in(ast.parse(path.read_text()))))


def statements_in(tree):
    """Yield each statement below a node; ast.walk would visit ten times as many nodes of expressions."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, block, ()):
            yield node
            yield from statements_in(node)
