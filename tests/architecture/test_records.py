"""What is written beside the code stays short, and what DECISIONS.md names is there."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_PROSE_BYTES = 350_000  # of all Markdown files together
MAX_DECISION_LINES = 10


def decisions() -> list[str]:
    text = (ROOT / "DECISIONS.md").read_text(encoding="utf-8")
    found = re.split(r"\n(?=\d+\. )", text)[1:]
    return [re.split(r"\n\n## ", one)[0].rstrip() for one in found]


def test_each_decision_is_short_and_says_when_and_how_to_undo_it():
    for number, one in enumerate(decisions(), 1):
        assert one.startswith(f"{number}. **"), f"decision {number}: numbers follow each other, its words are bold"
        assert len(one.splitlines()) <= MAX_DECISION_LINES, f"decision {number} is no short paragraph: {one}"
        assert re.search(r"\(20\d\d-\d\d-\d\d\b", one), f"decision {number} has no date"
        assert re.search(r"\*Undo:\*\s+\S", one), f"decision {number} does not say how to undo it"


def test_the_files_that_decisions_name_are_there():
    named = re.findall(r"`((?:distlab|simulator|tools|tests|benchmarks)/[^`]+)`", "\n".join(decisions()))
    assert len(named) >= 10
    assert [name for name in named if not (ROOT / name).exists()] == [], "DECISIONS.md names what is not there"


def test_prose_stays_short():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    sizes = {name: (ROOT / name).stat().st_size for name in listed if name and (ROOT / name).exists()}
    longest = sorted(sizes.items(), key=lambda pair: -pair[1])[:3]
    assert sum(sizes.values()) <= MAX_PROSE_BYTES, f"all .md files have {sum(sizes.values())} bytes; longest: {longest}"
