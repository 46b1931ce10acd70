"""What may be where checkpoints should be: one line on every rank, the older one is taken, nothing is lost."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from killing import refused
from test_files import model_of

from distlab.checkpoint import CheckpointError, load, save
from distlab.pipeline import StageState


def put(name, make):
    """Put something else where a file of the newest checkpoint was, or where the checkpoint was ("")."""

    def damage(newer, _):
        shutil.rmtree(newer) if name == "" else (newer / name).unlink()
        make(newer / name)

    return damage


def forged(**changes):
    """Change an intact manifest; None takes a field out."""

    def forge(newer, _):
        facts = json.loads((newer / "manifest.json").read_text()) | changes
        facts = {key: value for key, value in facts.items() if key != "sha256" and value is not None}
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        (newer / "manifest.json").write_text(json.dumps({**facts, "sha256": digest}, indent=1) + "\n")

    return forge


def half_copied(newer, _):
    """As a copy that was cut off: the files that come first by name, and half of the next."""
    (newer / "rank-1.pt").write_bytes((newer / "rank-1.pt").read_bytes()[:-300])
    (newer / "shared.pt").unlink()


def link_to(name):
    return lambda path: path.symlink_to(name)


def whole_folder(make):
    def damage(_, folder):
        shutil.rmtree(folder)
        make(folder)

    return damage


SKIPPED = {  # the older one is taken
    "half copied": half_copied,
    "no manifest": put("manifest.json", lambda path: None),
    "no files in the manifest": forged(files=None),
    "files that are none": forged(files=[{"name": "shared.pt"}]),
    "an empty folder": put("", Path.mkdir),
    "a file": put("", Path.touch),
    "a link to nothing": put("", link_to("elsewhere")),
    "files of a different step": lambda newer, _: [
        shutil.copy(one, newer) for one in (newer.parent / "step-0000000001").iterdir()
    ],
    "a folder in place of a manifest": put("manifest.json", Path.mkdir),
    "a folder in place of a file": put("rank-1.pt", Path.mkdir),
    "a link to nothing in place of a file": put("shared.pt", link_to("elsewhere")),
    "a link to a different file": put("rank-1.pt", link_to("rank-0.pt")),
}
REFUSED = {  # to go on without a word would lose work
    "a different version": (forged(version=7), "step-0000000002 has version 7; this distlab reads version 1"),
    "a file in place of all": (whole_folder(Path.touch), "Not a directory"),
    "a link to nothing in place of all": (whole_folder(link_to("elsewhere")), "No such file or directory"),
}


def find(folder, damage):
    """Save twice on every rank, damage the second on one, and load."""
    rank = dist.get_rank()
    for step in (1, 2):
        save(folder, step, parts={"model": model_of(step)})
    if rank == 0:
        damage(folder / "step-0000000002", folder)
    dist.barrier()
    module = model_of(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            found = load(folder, parts={"model": module})
        except (CheckpointError, ValueError) as error:
            return str(error), [], module.weight[0, 0].item()
    words = [str(one.message) for one in seen if "skipped a damaged checkpoint" in str(one.message)]
    return found.step, words, module.weight[0, 0].item()


def test_the_older_one_is_taken_on_every_rank(ranks, tmp_path):
    def run():
        return {name: find(tmp_path / name, damage) for name, damage in SKIPPED.items()}

    for rank, results in enumerate(ranks(2).run(run)):
        for name, (step, words, weight) in results.items():
            assert (step, weight) == (1, 1.0), (name, step)
            assert len(words) == (rank == 0), name
            assert all("step-0000000002" in text and "\n" not in text for text in words), name


def test_what_would_lose_work_is_refused_in_one_line_on_every_rank(ranks, tmp_path):
    def run():
        return {name: find(tmp_path / name, damage) for name, (damage, _) in REFUSED.items()}

    one, other = ranks(2).run(run)
    for name, (_, words) in REFUSED.items():
        assert one[name] == other[name]
        text, _, weight = one[name]
        assert text.startswith(f"cannot resume from {str(tmp_path / name)!r}: rank 0: "), name
        assert words in text
        assert "\n" not in text
        assert weight == 0.0, "nothing was loaded"


def test_a_world_size_that_no_rule_covers_is_refused_on_every_rank(ranks, tmp_path):
    def parts():
        module = torch.nn.Linear(2, 2)
        return {"training": StageState({dist.get_rank(): module}, torch.optim.SGD(module.parameters(), 0.1))}

    ranks(2).run(lambda: save(tmp_path, 1, parts=parts()) and None)

    for reshard, words in ((False, "resume with 2, or pass reshard=True"), (True, "resume with 2 ranks and the same")):
        texts = ranks(3).run(lambda reshard=reshard: refused(lambda: load(tmp_path, parts=parts(), reshard=reshard)))
        assert len({text.replace(f"rank {rank}: ", "") for rank, text in enumerate(texts)}) == 1
        assert "was saved by 2 ranks" in texts[0]
        assert words in texts[0]


ON_A_DISK_OF_ITS_OWN = Path(__file__).with_name("script_of_a_full_disk.txt").read_text()


def test_a_disk_that_is_full_or_read_only_is_told_and_nothing_is_lost(tmp_path, record_property):
    """A real disk of 2 MB, which only this script sees."""
    apart = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("this system lets no program mount a disk that others do not see")
    (tmp_path / "disk").mkdir()
    (tmp_path / "script.py").write_text(ON_A_DISK_OF_ITS_OWN)
    command = [*apart, sys.executable, str(tmp_path / "script.py"), str(tmp_path / "disk")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    (one, times), (other, _) = said["ranks"]
    assert one == other, "the same on every rank"
    for seconds in times:
        record_property("seconds", seconds)
    for kind, words in (("full", "No space left on device"), ("read-only", "Read-only file system")):
        for text in one[kind]:
            assert words in text
            assert text.startswith("cannot save step 2 in ")
            assert "\n" not in text
    assert (one["loaded"], said["left"]) == (1, ["step-0000000001"])
