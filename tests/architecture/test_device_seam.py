"""One file talks to torch.cuda, so that a test can put a double in its place and nothing waits for a GPU unseen."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEAM = ROOT / "distlab" / "comm" / "device.py"
SAYS_CUDA = re.compile(r"torch\.cuda\b|\.cuda\(|from torch import .*\bcuda\b")


def places(path: Path) -> list[str]:
    """Return the lines of a file that talk to torch.cuda; prose between backquotes does not."""
    lines = path.read_text().splitlines()
    return [f"{path}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if SAYS_CUDA.search(line)]


@pytest.mark.parametrize("part", ["distlab", "simulator", "lessons", "benchmarks"])
def test_only_the_seam_talks_to_torch_cuda(part):
    found = [place for path in sorted((ROOT / part).rglob("*.py")) if path != SEAM for place in places(path)]
    assert not found, "call distlab.comm.device in place of torch.cuda:\n" + "\n".join(found)


def test_the_gate_sees_each_way_to_say_it(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("torch.cuda.synchronize()\nmodel.cuda()\nfrom torch import cuda, nn\nplace.type == 'cuda'\n")
    assert [int(place.split(":")[1]) for place in places(path)] == [1, 2, 3]
    assert places(SEAM), "the seam itself uses it"
