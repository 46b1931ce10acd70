"""What importing a package loads: nothing that its floor does not need."""

import subprocess
import sys

import pytest

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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
