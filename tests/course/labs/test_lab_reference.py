"""The tool that measures all labs anew takes every lab, and each reference says whether the machine was busy."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
BUSY = 5.0  # four ranks and what starts them: a load above it, after the lab, came from other programs


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


def test_a_reference_from_a_busy_machine_says_so():
    for path in ROOT.glob("lessons/*/lab_reference.md"):
        measured = re.search(r"^Measured .*$", path.read_text(), re.MULTILINE)[0]
        load = re.search(r"load average (?:about )?([\d.]+\d|\d)", measured)
        if load and float(load[1]) > BUSY:
            assert re.search(r"times (say little|are several times too long)", measured), (path, measured)
