"""`distlab bench` comes to its end: every benchmark can be loaded and has rows."""

import inspect

import pytest

from distlab.cli import bench


@pytest.mark.parametrize("name", bench.names())
def test_every_benchmark_has_rows_of_which_few_can_be_asked_for(name):
    rows = bench.load(name).rows
    assert inspect.isgeneratorfunction(rows)
    assert "quick" in inspect.signature(rows).parameters
