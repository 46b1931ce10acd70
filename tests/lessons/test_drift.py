"""The committed notebooks are what their sources make, and every cell keeps to its limits."""

from pathlib import Path

import pytest

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
NAMES = sorted(path.parent.name[:2] for path in LESSONS.glob("[0-9][0-9]_*/lesson.py")) + ["START"]


@pytest.mark.parametrize("name", NAMES)
def test_as_its_source(build, name, capsys):
    status = build.main(["--check", name])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(LESSONS.rglob("*.ipynb")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_executed_without_the_state_of_widgets(build, path):
    notebook = build.nbformat.read(path, as_version=4)
    assert "widgets" not in notebook.metadata
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    text = path.read_text(encoding="utf-8")
    assert "application/vnd.jupyter.widget-view+json" not in text
    assert str(LESSONS.parent) not in text
