"""What one place does for all, so that a test can put a double there and nothing waits for a GPU unseen."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
