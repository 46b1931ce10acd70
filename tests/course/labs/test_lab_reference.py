"""The tool that measures all labs anew takes every lab, and says whether the machine was busy."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_every_lab_is_measured_and_a_busy_machine_said(tmp_path):
    spec = importlib.util.spec_from_file_location("lab_reference", ROOT / "tools" / "lab_reference.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.labs() == [f"{number:02}" for number in range(1, 16)]
    assert "times say little" not in tool.how_busy(0.3)
    assert "load average 7.2" in tool.how_busy(7.2)
    path = tmp_path / "lab_reference.md"
    tool.write(path, "15", {"cpu, 2 ranks": "Settings: none"}, 7.2)
    told = tool.known_sections(path)
    assert told["cpu, 2 ranks"] == "Settings: none"
    assert told["cpu, 1 rank"].startswith("Not measured yet.")
    assert "no such GPUs" in told["cuda, 8 ranks"]
    assert re.search(r"^Measured .*times say little\.$", path.read_text(), re.MULTILINE)
