"""What the browser tests share: the harness on the path, and one line that says what is missing."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser_lab import missing, on_screen, serve, write_notebook  # noqa: E402

SHOTS = Path(__file__).resolve().parents[2] / "work" / "browser"


@pytest.fixture(scope="session")
def shots():
    """A git-ignored folder for screenshots, to be looked at."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    return SHOTS


@pytest.fixture(scope="session")
def open_cells(tmp_path_factory):
    """Make `with open_cells(name, cells) as notebook` show a notebook; all of them are on one server."""
    home = tmp_path_factory.mktemp("lab")
    root = home / "root"
    root.mkdir()
    with serve(root, home) as (base, token):

        @contextmanager
        def opened(name, cells):
            write_notebook(root / f"{name}.ipynb", cells)
            with on_screen(base, token, f"{name}.ipynb", home) as notebook:
                yield notebook

        yield opened


def pytest_collection_modifyitems(items):
    """Skip every browser test where there is no browser."""
    lacks = missing()
    for item in items:
        if lacks and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=lacks))


def pytest_terminal_summary(terminalreporter):
    """Say in one line that the browser tests were skipped, and why."""
    if lacks := missing():
        terminalreporter.write_line(f"browser tests are skipped: {lacks}")
