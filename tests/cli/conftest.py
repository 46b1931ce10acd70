"""What all commands owe a user: one line for a mistake, and answers that are read here as text or as JSON."""

import json

import pytest

from distlab.cli import main


@pytest.fixture
def refused(capsys):
    """Make `refused("cost", "plan.toml")` run a command that is wrong; return the one line that it says."""

    def run(*arguments):
        try:
            status = main([*map(str, arguments)])
        except SystemExit as stop:
            status = stop.code
        said = capsys.readouterr()
        assert (status, said.out, said.err.count("\n")) == (2, "", 1), said.err
        assert said.err.startswith("distlab")
        return said.err

    return run


@pytest.fixture
def said(capsys):
    """Make `said("cost", "plan.toml")` run a command that is right; return what it prints."""

    def run(*arguments):
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def facts(said):
    """Make `facts("cost", "plan.toml")` run a command that is right; return its JSON."""
    return lambda *arguments: json.loads(said(*arguments, "--json"))
