"""Print the lines of each wing and room beside their bars; `--write` puts the table in CONTRIBUTING.md.

Counted is every tracked .py, .js, .sh and .toml file, and the bytes of every .md file. Of simulator and tests it is
their Python, as their bars say; presets, widgets and tables in .toml and .js are data beside it.

    python tools/sizes.py [--write]
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import options

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- sizes -->", "<!-- end of sizes -->"
SUFFIXES = (".py", ".js", ".sh", ".toml")
TEXTBOOK = (
    *("collectives", "data_parallel", "large_batch", "compression", "precision"),
    *("pipeline", "context_parallel", "expert_parallel", "hybrid"),
)


class Room(NamedTuple):
    """A row of the table: which files, by their first letters; lines at d4e9029f; the most (or least) they may have."""

    name: str
    folders: tuple[str, ...]
    before: int
    bar: int
    without: tuple[str, ...] = ()
    at_least: bool = False
    suffixes: tuple[str, ...] = SUFFIXES


def of(*rooms: str) -> tuple[str, ...]:
    """Return the folders of rooms of distlab."""
    return tuple(f"distlab/{room}/" for room in rooms)


CHECKS = tuple(f"lessons/{number:02}_*/checks/" for number in range(1, 16))
TRIALS = ("lessons/GUIDES.py", "lessons/guides/")
ROOMS = (
    Room("distlab", ("distlab/",), 64_394, 52_500),
    Room("- comm, nodes, shared_memory", of("comm", "nodes", "shared_memory"), 12_131, 9_700),
    Room("- course and cli", of("grading", "lab", "notebook", "classroom", "capstone", "course", "cli"), 14_029, 9_500),
    Room("- - grading", of("grading", "course/grading"), 7_448, 4_900),
    Room("- measure", of("measure"), 4_370, 3_000),
    Room("- nine textbook packages", of(*TEXTBOOK), 11_738, 11_151, at_least=True),
    Room("simulator (Python)", ("simulator/",), 24_377, 21_000, suffixes=(".py",)),  # 19,500, and 1,500 for plan files
    Room("lessons/*/checks", CHECKS, 18_089, 13_950),
    Room("lessons without checks and trials", ("lessons/",), 23_072, 24_150, without=(*CHECKS, *TRIALS)),
    Room("- the guides' code on trial", TRIALS, 0, 900),
    Room("tests (Python)", ("tests/",), 73_266, 45_500, suffixes=(".py",)),
    Room("tools, benchmarks, docs", ("tools/", "benchmarks/", "docs/"), 11_406, 11_500),
)


def tracked() -> dict[str, bytes]:
    """Return the content of every tracked file that is counted."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = [name for name in listed.split("\0") if name.endswith((*SUFFIXES, ".md")) and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_bytes() for name in wanted}


def is_in(name: str, folders: tuple[str, ...]) -> bool:
    """Say whether a file is below one of the folders, whose names may hold a star."""
    return any(re.match(re.escape(folder).replace(r"\*", "[^/]*"), name) for folder in folders)


def repeated_classes(files: dict[str, bytes]) -> int:
    """Return how many public class names of distlab and simulator stand in two or more files."""
    found: Counter[str] = Counter()
    for name, content in files.items():
        if name.endswith(".py") and name.startswith(("distlab/", "simulator/")):
            found.update({node.name for node in ast.walk(ast.parse(content)) if isinstance(node, ast.ClassDef)})
    return sum(count > 1 and not name.startswith("_") for name, count in found.items())


def table() -> str:
    """Return the table as Markdown."""
    files = tracked()
    lines = {name: content.count(b"\n") for name, content in files.items() if name.endswith(SUFFIXES)}
    rows = []
    for room in ROOMS:
        inside = (name for name in lines if is_in(name, room.folders) and not is_in(name, room.without))
        now = sum(lines[name] for name in inside if name.endswith(room.suffixes))
        rows.append((room.name, room.before, now, room.bar, room.at_least))
    pages = sum(len(content) for name, content in files.items() if name.endswith(".md")) // 1000
    rows.append(("kB of .md files", 819, pages, 350, False))
    rows.append(("options that nothing passes", 185, len(options.counted()), 60, False))
    rows.append(("class names for two things", 45, repeated_classes(files), 12, False))
    text = ["| room | 2026-11-29 at d4e9029f | now | bar |", "|---|---:|---:|---:|"]
    for name, before, now, bar, at_least in rows:
        mark = "" if (now >= bar if at_least else now <= bar) else " *"
        text.append(f"| {name} | {before:,} | {now:,}{mark} | {'>=' if at_least else '<='} {bar:,} |")
    return "\n".join([*text, "", "A star: the bar is not reached yet."])


if __name__ == "__main__":
    said = table()
    print(said)
    if "--write" in sys.argv:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{said}\n{END}{rest.split(END)[1]}")
