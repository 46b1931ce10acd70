"""The README's tree of folders is the tree on disk."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def documented_tree() -> set[str]:
    text = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- tree -->\n```\n(.*?)```", text, re.S)
    assert block, "README.md has no tree between '<!-- tree -->' and the end of its code block"
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
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    files = [Path(name) for name in listed if name and (ROOT / name).exists()]
    folders = {str(parent) for file in files for parent in file.parents if str(parent) != "."}
    hidden = {folder for folder in folders if any(part.startswith(".") for part in Path(folder).parts)}
    deep_tests = {folder for folder in folders if folder.startswith("tests/")}
    rooms_in_rooms = {folder for folder in folders if folder.count("/") > 1}  # each names its files in its __init__
    return folders - hidden - deep_tests - rooms_in_rooms


def test_readme_tree_names_every_folder_and_no_other():
    documented = {entry for entry in documented_tree() if (ROOT / entry).is_dir() or "." not in Path(entry).name}
    missing = folders_on_disk() - documented
    assert not missing, f"add to README's tree: {sorted(missing)}"
    gone = {entry for entry in documented_tree() if not (ROOT / entry).exists()}
    assert not gone, f"README's tree names what is not there: {sorted(gone)}"
