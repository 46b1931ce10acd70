"""The wheel works outside a checkout: it brings the lessons, and copies to work in are made where you are."""

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
NOT_NEEDED = ("tests/", "benchmarks/", "assets/", "tools/", "docs/")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the unpacked wheel, as pip would put it into site-packages."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    source = tmp_path_factory.mktemp("source")
    for name in names:
        if name and not name.startswith(NOT_NEEDED) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("out")
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, capture_output=True, timeout=250, check=True)
    (wheel,) = out.glob("*.whl")
    unpacked = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    return unpacked


@pytest.fixture
def distlab(site, tmp_path):
    """Start `distlab` of the wheel in an empty folder."""

    def start(*words):
        command = [sys.executable, "-u", "-m", "distlab", *words]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)}, **options)

    return start


def test_the_wheel_has_the_lessons_and_no_solutions_of_notebooks(site):
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    lessons = "distlab/_course/lessons"
    here = {str(path.relative_to(ROOT / "lessons")) for path in ROOT.glob("lessons/*/lesson.ipynb")}
    assert {
        f"{lessons}/{name}"
        for name in here | {"START.ipynb", "GUIDES.ipynb", "guides/trial.py", "COURSE.toml", "COMMON_FAULTS.md"}
    } <= names
    brought = [name for name in names if name.startswith(lessons)]
    assert not [name for name in brought if name.endswith(("solution.ipynb", "/lesson.py", "/GUIDES.py", ".pyc"))]
    assert {"distlab/py.typed", "simulator/hardware/presets.toml"} <= names


def test_answers_are_checked_and_the_lessons_start_where_you_are(distlab, tmp_path):
    with distlab("check", "01.fit", "--impl", "reference") as process:
        said, _ = process.communicate(timeout=250)
    assert "1 of 1 exercises right." in said
    assert process.returncode == 0
    with distlab("bench", "widgets") as process:  # what needs a checkout says so in one line
        said, _ = process.communicate(timeout=250)
    assert (process.returncode, said.count("\n")) == (2, 1)
    assert "clone the repository" in said
    with distlab("lesson", "start", "--no-browser") as process:
        while (line := process.stdout.readline()) and "The lessons are at" not in line:
            pass
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=250)
    assert "The lessons are at  http://127.0.0.1:" in line
    assert process.returncode == 0, rest
    assert (tmp_path / "work" / "01_ranks_and_messages" / "01_ranks_and_messages.ipynb").is_file()


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_tour_runs(distlab, tmp_path):
    with distlab("tour", "--ranks", "2") as process:
        said, _ = process.communicate(timeout=380)
    assert "Saved tour/timeline.png" in said
    assert (tmp_path / "tour" / "timeline.png").is_file()
