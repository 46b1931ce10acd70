"""What techniques compute is the same with other torch and Python; `make versions` makes the environments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["pinned", "torch-2.11", "torch-newest", "python-3.12", "python-3.13"])
def test_every_technique_equals_one_process(version, record_property):
    python = Path(sys.executable) if version == "pinned" else ROOT / f".venv-{version}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{version}: its environment is missing; `make versions` makes it")
    words = "import platform, torch; print('Python', platform.python_version() + ', torch', torch.__version__)"
    name = subprocess.run([str(python), "-c", words], capture_output=True, text=True, check=True).stdout.strip()
    command = [str(python), str(ROOT / "tests" / "on_device" / "run.py"), "--device", "cpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = [row for row in rows if row["verdict"] != "equal"]
    record_property("tried", len(rows))
    record_property("held", len(rows) - len(wrong))
    record_property("figure", f"{name}: {len(rows) - len(wrong)} of {len(rows)} programs equal")
    assert rows, done.stderr
    assert not wrong, [(row["program"], row["verdict"], row["words"]) for row in wrong]
