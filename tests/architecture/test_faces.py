"""One way to import each public name: outside a package, from the package's face."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import distlab

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [f"distlab.{path.parent.name}" for path in sorted((ROOT / "distlab").glob("*/__init__.py"))]
PACKAGES += [
    f"distlab.{wing}.{path.parent.name}"
    for wing in ("blocks", "course")
    for path in sorted((ROOT / "distlab" / wing).glob("*/__init__.py"))
]
PACKAGES += ["distlab.comm.nodes"]
FACES = [*PACKAGES, "simulator", "simulator.viz", "simulator.export"]
MAX_FILES = 12
ROOMS = [path.parent for folder in ("simulator", "distlab") for path in sorted((ROOT / folder).rglob("__init__.py"))]


def homes_of(face: str) -> dict[tuple[str, str], str]:
    """Return the face of each (module, name) that the face exports."""
    path = ROOT / face.replace(".", "/") / "__init__.py"
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{face}."):
            found |= {(node.module, alias.name): face for alias in node.names}
    return found


EXPORTED = {home: face for one in FACES for home, face in homes_of(one).items()}


@pytest.mark.parametrize("top", ["distlab", "simulator", "lessons", "tests", "benchmarks", "tools"])
def test_public_names_come_from_their_face(statements, top):
    wrong, command = [], ["git", "ls-files", f"{top}/*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for path in [ROOT / name for name in listed if (ROOT / name).is_file()]:
        for node in [one for one in statements(path) if isinstance(one, ast.ImportFrom)]:
            for alias in node.names:
                face = EXPORTED.get((node.module, alias.name))
                if face and not path.is_relative_to(ROOT / face.replace(".", "/")):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: from {face} import {alias.name}")
    assert not wrong, "import these from the face of their package:\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_has_few_files_and_says_in_which_order_to_read_them(room):
    files = sorted(room.glob("*.py"))
    assert len(files) <= MAX_FILES, f"{room} has {len(files)} files; a room has at most {MAX_FILES}"
    text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    unnamed = [path.stem for path in files if path.stem not in text and path.stem not in ("__init__", "__main__")]
    assert not unnamed, f"{room / '__init__.py'} does not name {unnamed}"


def test_a_folder_of_the_same_name_beside_a_script_hides_nothing_but_distlabs_own_face(tmp_path):
    """Such as a clone: Python takes the folder for a part of the package, and for its face."""
    (tmp_path / "distlab").mkdir()
    names = {
        "cli": "main",
        "comm": "run",
        "measure": "Machine",
        "course.classroom": "grade_all",
        "course.grading": "check",
    }
    lines = [f"from distlab.{face} import {name}" for face, name in names.items()]
    (tmp_path / "train.py").write_text("\n".join([*lines, "print(run)", "main(['--version'])"]))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("<function run"), done.stderr
    assert done.stdout.endswith(f"distlab {distlab.__version__}\n")
