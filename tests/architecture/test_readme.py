"""CONTRIBUTING's tree is that on disk; README's rows are the last benchmark's; decisions and prose stay short."""

import json
import re
import subprocess
from pathlib import Path

import bench_table as table

ROOT = Path(__file__).resolve().parents[2]
MAX_README_LINES = 200
MAX_PROSE_BYTES = 350_000  # of all Markdown files together
MAX_DECISION_LINES = 10


def documented_tree() -> set[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"<!-- tree -->\n```\n(.*?)```", text, re.S)
    assert block, "CONTRIBUTING.md has no tree between '<!-- tree -->' and the end of its code block"
    stack, entries = [], set()
    for line in block.group(1).splitlines():
        entry = line.split("  ")[0] if not line.startswith(" ") else re.split(r"(?<=\S)  ", line)[0]
        name = entry.strip()
        if not name:
            continue
        depth = (len(entry) - len(entry.lstrip())) // 2
        stack[depth:] = [name.rstrip("/")]
        entries.add("/".join(stack))
    return entries


def folders_on_disk() -> set[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [Path(name) for name in listed.splitlines() if (ROOT / name).exists()]
    folders = {str(parent) for file in files for parent in file.parents if str(parent) != "."}
    # Hidden ones, those of tests, lessons (START lists them), and rooms in rooms (each names its files) are not in it.
    return {folder for folder in folders if not re.search(r"^\.|/\.|^tests/|^lessons/|/.*/", folder)}


def test_the_tree_names_every_folder_and_no_other():
    documented = {entry for entry in documented_tree() if (ROOT / entry).is_dir() or "." not in Path(entry).name}
    missing = folders_on_disk() - documented
    assert not missing, f"add to the tree in CONTRIBUTING.md: {sorted(missing)}"
    gone = {entry for entry in documented_tree() if not (ROOT / entry).exists()}
    assert not gone, f"the tree in CONTRIBUTING.md names what is not there: {sorted(gone)}"


def test_tables_of_bars_say_what_the_last_benchmark_measured():
    for path, wanted in table.files().items():
        assert path.read_text() == wanted, f"{path.name} is not what results.json says; run tools/bench_table.py"


def test_the_page_has_each_row_that_misses_its_bar():
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    missed = [one for one in table.all_rows(results) if one.judged and not one.row["holds"]]
    assert missed
    assert [one.row["claim"] for one in missed if f"| {one.row['claim']} | {one.row['bar']} |" not in page] == []
    assert all(f"\n| {name} | " in page for name in results)


def test_readme_stays_a_front_page():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= MAX_README_LINES, f"README.md has {len(lines)} lines, more than {MAX_README_LINES}"
    rows = [line for line in lines if line.endswith(("| yes |", "| **no** |"))]
    assert 0 < len(rows) <= 12, f"README.md has {len(rows)} rows of bars, not 1 to 12: others stand in results.json"


def test_the_places_that_readme_names_are_there():
    text = (ROOT / "README.md").read_text().split("| where is ... |")[1]
    rows = [line.split("|")[2:4] for line in text.splitlines()[2:] if line.startswith("|")]
    assert len(rows) >= 10
    for files, functions in rows:
        sources = "\n".join((ROOT / name).read_text() for name in re.findall(r"`([^`]+\.\w+)`", files))
        for name in re.findall(r"`([^`]+)`", functions):
            found = re.search(rf"^ *(async )?(def|class|function) {name}\b", sources, re.M)
            assert found, f"README says that {name} is in {files.strip()}; it is not"


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
