"""Who imports what: no circle, public names from their face, no more than a package's floor, one place for CUDA."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import distlab

ROOT = Path(__file__).resolve().parents[2]


def circles(graph: grimp.ImportGraph) -> set[frozenset[str]]:
    """Return the groups of modules in which each one reaches every other one by imports."""
    reached = {module: graph.find_upstream_modules(module) for module in graph.modules}
    groups = {frozenset({one, *(other for other in reached[one] if one in reached[other])}) for one in reached}
    return {group for group in groups if len(group) > 1}


def test_modules_do_not_import_in_circles():
    found = circles(grimp.build_graph("distlab", "simulator", cache_dir=None))
    named = sorted(" <-> ".join(sorted(group)) for group in found)
    assert not named, f"circles of imports, end them (move what both need into a third file): {named}"


def test_a_circle_through_a_third_module_is_found():
    graph = grimp.ImportGraph()
    for importer, module in (("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")):
        graph.add_import(importer=importer, imported=module)
    assert circles(graph) == {frozenset("abc")}


FOLDERS = ("distlab/*", "distlab/blocks/*", "distlab/course/*", "distlab/comm/nodes", "simulator")
FOLDERS += ("simulator/viz", "simulator/export")
FOUND = [path.parent for one in FOLDERS for path in sorted(ROOT.glob(f"{one}/__init__.py"))]
FACES = [".".join(folder.relative_to(ROOT).parts) for folder in FOUND]
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
    names = {"cli": "main", "comm": "run", "measure": "Machine", "course.classroom": "grade_all"}
    lines = [f"from distlab.{face} import {name}" for face, name in (names | {"course.grading": "check"}).items()]
    (tmp_path / "train.py").write_text("\n".join([*lines, "print(run)", "main(['--version'])"]))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    where = {"cwd": tmp_path, "env": environment}
    done = subprocess.run([sys.executable, "train.py"], **where, capture_output=True, text=True, timeout=250)
    assert done.stdout.startswith("<function run"), done.stderr
    assert done.stdout.endswith(f"distlab {distlab.__version__}\n")


BLOCK = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Missing())
import {modules}
"""
WIDGETS = ["ipywidgets", "IPython", "jupyterlab"]
ON_A_BARE_GPU_NODE = "comm collectives data_parallel sharding pipeline tensor_parallel context_parallel expert_parallel"
ON_A_BARE_GPU_NODE += " compression large_batch checkpoint precision recompute models measure course.grading course.lab"
NEEDS_NO = [  # packages, and what they can be imported without
    (
        "distlab, simulator, distlab.plan, distlab.trace, distlab.cli, distlab.course.grading, simulator.export",
        ["torch", "matplotlib", "cloudpickle", "tqdm", *WIDGETS],
    ),
    (", ".join(f"distlab.{name}" for name in ON_A_BARE_GPU_NODE.split()), ["matplotlib", "anywidget", *WIDGETS]),
    ("simulator.viz", ["torch", "anywidget", *WIDGETS]),
]


@pytest.mark.parametrize(("modules", "blocked"), NEEDS_NO, ids=["plain", "GPU node", "figures"])
def test_a_package_needs_no_more_than_its_floor(modules, blocked):
    code = BLOCK.format(blocked=blocked, modules=modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


CUDA = re.compile(r"torch\.cuda\b|\.cuda\(|from torch import .*\bcuda\b")
SEAMS = {  # where it is done, what it looks like, and the parts that do it nowhere else
    "distlab/comm/device.py": (CUDA, ("distlab", "simulator", "lessons", "benchmarks")),
    "distlab/comm/": (re.compile(r"os\.environ|os\.getenv"), ("distlab", "simulator")),
}


@pytest.mark.parametrize("seam", SEAMS)
def test_it_is_done_in_one_place(seam):
    says, parts = SEAMS[seam]
    paths = [str(path.relative_to(ROOT)) for part in parts for path in sorted((ROOT / part).rglob("*.py"))]
    found = {path: says.search((ROOT / path).read_text()) for path in paths}
    wrong = [f"{path}: {at[0]}" for path, at in found.items() if at and not path.startswith(seam)]
    assert not wrong, f"leave this to {seam}: {wrong}"
    assert any(at for path, at in found.items() if path.startswith(seam)), "the seam itself uses it"


def test_each_way_to_talk_to_cuda_is_seen():
    for line in ("torch.cuda.synchronize()", "model.cuda()", "from torch import cuda, nn", "place.type == 'cuda'"):
        assert bool(CUDA.search(line)) == ("place" not in line)
