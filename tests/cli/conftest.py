"""What all commands owe a user who makes a mistake."""

import pytest

from distlab.cli import main


@pytest.fixture
def refused(capsys):
    """Make `refused("cost", "plan.toml")` run a command that is wrong; return the one line that it says."""

    def run(*arguments):
        try:
            status = main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        said = capsys.readouterr()
        assert (status, said.out, said.err.count("\n")) == (2, "", 1), said.err
        assert said.err.startswith("distlab")
        return said.err

    return run
