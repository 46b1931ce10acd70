"""The committed notebooks were run from top to bottom. That they are what their sources make is a gate's to see."""

import json
from pathlib import Path

import pytest

LESSONS = Path(__file__).resolve().parents[2] / "lessons"


@pytest.mark.parametrize("path", sorted(LESSONS.rglob("*.ipynb")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_executed_without_the_state_of_widgets(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert "widgets" not in notebook["metadata"]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    assert "application/vnd.jupyter.widget-view+json" not in text
    assert str(LESSONS.parent) not in text
