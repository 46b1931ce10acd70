"""What importing a package loads: nothing that its floor does not need."""

import subprocess
import sys

BLOCK = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked)", name=name)
sys.meta_path.insert(0, Missing())
"""


def import_with(modules: str, *, blocked: tuple[str, ...]) -> subprocess.CompletedProcess:
    code = BLOCK.format(blocked=blocked) + f"import {modules}\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)


def test_plain_packages_need_neither_torch_nor_matplotlib():
    packages = "distlab, simulator, distlab.plan, distlab.trace, distlab.cli, distlab.course.grading, simulator.export"
    blocked = ("torch", "matplotlib", "cloudpickle", "ipywidgets", "IPython", "jupyterlab", "tqdm")
    done = import_with(packages, blocked=blocked)
    assert done.returncode == 0, done.stderr


def test_a_bare_gpu_node_can_import_what_it_runs():
    techniques = "collectives data_parallel sharding pipeline tensor_parallel context_parallel expert_parallel"
    techniques += " compression large_batch checkpoint precision recompute models"
    packages = ", ".join(
        f"distlab.{name}" for name in ["comm", *techniques.split(), "measure", "course.grading", "course.lab"]
    )
    done = import_with(packages, blocked=("matplotlib", "ipywidgets", "anywidget", "IPython", "jupyterlab"))
    assert done.returncode == 0, done.stderr


def test_figures_need_no_widgets():
    done = import_with("simulator.viz", blocked=("torch", "ipywidgets", "anywidget", "IPython", "jupyterlab"))
    assert done.returncode == 0, done.stderr


def test_environment_is_read_in_comm_only():
    import re
    from pathlib import Path

    root = Path(__file__).resolve().parents[2]
    for part in ("distlab", "simulator"):
        for path in (root / part).rglob("*.py"):
            if (root / "distlab" / "comm") in path.parents:
                continue
            found = re.search(r"os\.environ|os\.getenv", path.read_text())
            assert not found, f"{path} reads the environment; only distlab/comm may"
