"""Every moment at which a save can be cut off, and every way in which a saved file can be damaged."""

import errno
import os
import random
import shutil
import warnings

import pytest
import torch
from killing import DiskThat, Evil

from distlab.checkpoint import CheckpointError, files, load, manifest, newest, save
from distlab.checkpoint.crashes import crash_points


def model_of(value):
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def without_power(crash):
    """What a power cut leaves at worst: no unflushed bytes or names, and deletions whose new names are lost."""
    left = {}
    for name, data in crash.files.items():
        if os.path.dirname(name) not in crash.unflushed - {"."}:
            left[name] = b"" if data is not None and name in crash.unflushed else data
    return crash._replace(files={name.removeprefix(".removing-"): data for name, data in left.items()})


def cut_off_everywhere(tmp_path, steps, act, *, power_fails):
    """After saves of some steps, leave what a kill at each moment of `act` leaves; the last is the state at its end.

    Yields:
        A directory, and its newest checkpoint.
    """
    for step in steps:
        save(tmp_path / "run", step, parts={"model": model_of(step)}, keep=9)
    for number, crash in enumerate(crash_points(lambda: act(tmp_path / "run"), tmp_path / "run")):
        (tmp_path / str(number)).mkdir()
        (without_power(crash) if power_fails else crash).restore(tmp_path / str(number))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing half-written may even be looked at
            found = newest(tmp_path / str(number))
        module = model_of(0)
        assert load(tmp_path / str(number), parts={"model": module}).step == found.step
        assert all(bool((parameter == found.step).all()) for parameter in module.parameters())
        yield tmp_path / str(number), found.step


@pytest.mark.parametrize("power_fails", [False, True])
def test_cut_off_at_any_operation_the_newest_checkpoint_is_whole(tmp_path, power_fails, record_property):
    """Also while older ones are deleted: one of three is kept."""

    def act(directory):
        save(directory, 3, parts={"model": model_of(3)}, keep=1)

    outcomes = []
    for directory, found in cut_off_everywhere(tmp_path, (1, 2), act, power_fails=power_fails):
        outcomes.append(found)
        save(directory, 4, parts={"model": model_of(4)}, keep=2)  # and the run goes on
        assert newest(directory).step == 4
        assert sorted(os.listdir(directory)) == [f"step-{found:010d}", "step-0000000004"]
    record_property("tried", len(outcomes))
    assert outcomes == sorted(outcomes)
    assert {*outcomes} == {2, 3}
    assert min(map(outcomes.count, (2, 3))) > 9, outcomes


def test_leftovers_cost_room_and_stop_no_save(tmp_path, monkeypatch):
    """A deletion that was cut off is finished by the next save, where it can be."""
    for step in range(5):
        save(tmp_path, step, parts={"model": model_of(step)}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-0000000003", "step-0000000004"]
    (tmp_path / "step-0000000003").rename(tmp_path / ".removing-step-0000000003")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.warns(UserWarning, match="could not be removed: .*Permission denied"):
            save(tmp_path, 5, parts={"model": model_of(5)}, keep=2)
    assert newest(tmp_path).step == 5
    save(tmp_path, 6, parts={"model": model_of(6)}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-0000000005", "step-0000000006"]


def two_rank_checkpoint(directory, step):
    """Write what two ranks would."""
    prepared = files.begin(directory, step)
    names = [manifest.SHARED, manifest.rank_file(0), manifest.rank_file(1)]
    records = [files.write_tensors(prepared, name, {"name": name, "noise": torch.rand(20)}) for name in names]
    return files.publish(prepared, manifest.Manifest(step, 2, tuple(records)))


@pytest.fixture
def damaged(tmp_path):
    """Two checkpoints; returns the newer one's path and a check that its damage is seen, named and survived."""
    older = two_rank_checkpoint(tmp_path, 10)
    newer = two_rank_checkpoint(tmp_path, 20)

    def check(*words):
        with pytest.warns(UserWarning, match="skipped a damaged checkpoint") as caught:
            found = newest(tmp_path)
        assert found.path == older
        assert all(word in str(caught[0].message) for word in words), caught[0].message

    return newer, check


def test_every_flipped_bit_is_found_and_named(damaged, record_property):
    path, check = damaged
    record_property("tried", 1000)
    record_property("figure", "1,000 flipped bits")
    generator = random.Random(0)
    for name in ["shared.pt", "rank-0.pt", "rank-1.pt", "manifest.json"]:
        data = (path / name).read_bytes()
        for bit in generator.sample(range(8 * len(data)), 250):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(changed)
            check("step-0000000020", name)
        (path / name).write_bytes(data)
    assert newest(path.parent).path == path


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.soak)])
def test_every_truncation_is_found_and_named(damaged, stride, record_property):
    path, check = damaged
    tried = 0
    for name in ["shared.pt", "rank-0.pt", "rank-1.pt", "manifest.json"]:
        data = (path / name).read_bytes()
        for length in range(0, len(data), stride):
            (path / name).write_bytes(data[:length])
            check("step-0000000020", name)
            tried += 1
        (path / name).write_bytes(data + b"\n")
        check("step-0000000020", name)
        (path / name).write_bytes(data)
    record_property("tried", tried + 4)
    record_property("figure", f"{tried:,} truncations" + " (all)" * (stride == 1))


def test_missing_and_swapped_files_are_found_and_named(damaged, record_property):
    path, check = damaged
    record_property("tried", 5)
    for name in ["shared.pt", "rank-0.pt", "rank-1.pt", "manifest.json"]:
        (path / name).rename(path / "elsewhere")
        check(name, "cannot be read")
        (path / "elsewhere").rename(path / name)
    (path / "rank-0.pt").rename(path / "elsewhere")
    (path / "rank-1.pt").rename(path / "rank-0.pt")
    (path / "elsewhere").rename(path / "rank-1.pt")
    check("rank-0.pt", "SHA-256")


def test_the_newest_is_chosen_by_step_and_never_by_file_time_and_a_renamed_one_is_refused(tmp_path):
    for step in (9, 100, 30):
        two_rank_checkpoint(tmp_path, step)
    for name in ["step-1", "step-00000000001", "step-0000000001-0", "notes"]:
        (tmp_path / name).mkdir()  # not ours
    os.utime(tmp_path / "step-0000000009", (2e9, 2e9))
    assert newest(tmp_path).step == 100
    (tmp_path / "step-0000000100").rename(tmp_path / "step-0000000999")
    with pytest.warns(UserWarning, match="step-0000000999 holds the checkpoint of step 100: the directory was renamed"):
        assert newest(tmp_path).step == 30


def test_a_step_saved_again_after_damage_gets_its_own_directory(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, parts={"model": model_of(step)})
    (tmp_path / "step-0000000002" / "shared.pt").write_bytes(b"")
    save(tmp_path, 2, parts={"model": model_of(7)})
    assert newest(tmp_path).path.name == "step-0000000002-1"
    module = model_of(0)
    load(tmp_path, parts={"model": module})
    assert bool((module.weight == 7).all())


@pytest.mark.filterwarnings("ignore:skipped a damaged")
def test_damaged_later_steps_never_push_out_good_earlier_ones(tmp_path):
    for step in (10, 70, 80, 90):
        save(tmp_path, step, parts={"model": model_of(step)}, keep=4)
    for step in (70, 80, 90):
        (tmp_path / f"step-00000000{step}" / "manifest.json").unlink()
    save(tmp_path, 11, parts={"model": model_of(11)}, keep=1)
    assert newest(tmp_path).step == 11


def test_nothing_saved_is_none_and_everything_damaged_is_an_error(tmp_path):
    assert newest(tmp_path) is None
    assert newest(tmp_path / "not there") is None
    two_rank_checkpoint(tmp_path, 3)
    (tmp_path / "step-0000000003" / "rank-1.pt").unlink()
    with (
        pytest.warns(UserWarning, match="rank-1.pt"),
        pytest.raises(CheckpointError, match="no checkpoint in .*step-0000000003/rank-1.pt"),
    ):
        newest(tmp_path)


FOREIGN = ["{}", "[]", "null", '{"format": "other", "version": 1}', "[" * 100_000, "\xff"]


def test_foreign_manifests_are_refused_and_none_points_outside_its_directory(tmp_path):
    path = two_rank_checkpoint(tmp_path, 1)
    facts = files.read_manifest(path)
    outside = manifest.FileRecord("../secret", 1, "0" * 64)
    forged = manifest.Manifest(1, 2, (*facts.files[:2], outside)).to_bytes()
    damaged = [*((text.encode("latin-1"), "is not a manifest") for text in FOREIGN), (forged, "lists other files")]
    for data, words in damaged:
        (path / "manifest.json").write_bytes(data)
        with pytest.raises(ValueError, match=f"step-0000000001/manifest.json {words}"):
            files.verified(path)


def test_a_forged_checkpoint_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run", 1, parts={"model": model_of(1)})
    path = tmp_path / "run" / "step-0000000001"
    (path / "shared.pt").unlink()
    shared = files.write_tensors(path, "shared.pt", {"step": 1, "parts": Evil()})
    own = files.read_manifest(path).files[1]
    (path / "manifest.json").write_bytes(manifest.Manifest(1, 1, (shared, own)).to_bytes())
    with pytest.raises(ValueError, match="shared.pt holds more than plain values"):
        load(tmp_path / "run", parts={"model": model_of(0)})
    assert not os.path.exists("evil-was-here")


@pytest.mark.parametrize("operation", ["open", "write", "fsync", "close", "mkdir", "rename"])
def test_a_disk_that_refuses_is_reported_and_loses_nothing(tmp_path, operation):
    save(tmp_path, 1, parts={"model": model_of(1)})

    def refuse(*arguments):
        if operation == "close":  # where network file systems tell it
            os.close(*arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    words = r"cannot save step 2 in .*: rank 0: .*No space left on device"
    with DiskThat(files, **{operation: refuse}), pytest.raises(CheckpointError, match=words):
        save(tmp_path, 2, parts={"model": torch.nn.Linear(800, 800)})  # torch.save itself meets the error
    assert (os.listdir(tmp_path), newest(tmp_path).step) == (["step-0000000001"], 1)


def test_a_file_system_that_cannot_flush_directories_is_used_all_the_same(tmp_path):
    """As some of networks and of virtual machines are; files are flushed there, too."""
    flushed = []

    def flush(descriptor):
        if not os.path.isfile(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        os.fsync(descriptor)

    with DiskThat(files, fsync=flush):
        save(tmp_path / "run", 1, parts={"model": model_of(1)})
    assert len(flushed) == 3, "what ranks share, what is the rank's own, and the manifest"
    assert newest(tmp_path / "run").step == 1


def test_a_place_that_is_no_directory_is_reported(tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", "/proc/distlab"):
        with pytest.raises(CheckpointError, match="cannot save step 1"):
            save(place, 1, parts={"model": model_of(1)})
