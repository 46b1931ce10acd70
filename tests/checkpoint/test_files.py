"""Every moment at which a save can be cut off, and every way in which a saved file can be damaged."""

import contextlib
import errno
import io
import os
import random
import re
import shutil
import warnings

import pytest
import torch
from killing import DiskThat, Evil

from distlab.checkpoint import CheckpointError, UnknownVersionError, files, find, load, manifest, newest, save


class Killed(BaseException):
    """Ends a save on the spot, as a kill does: no handler in the code catches it."""


class Disk:
    """Stands for `os` in the code under test: stops at one operation, and may then lose what was not flushed."""

    def __init__(self, stop_at):
        self.stop_at = stop_at
        self.num_operations = 0
        self.paths = {}
        self.unflushed_files, self.unflushed_names, self.unflushed_renames = set(), set(), []

    def __getattr__(self, name):
        return getattr(os, name)

    def _operation(self):
        self.num_operations += 1
        if self.num_operations == self.stop_at:
            raise Killed

    def open(self, path, flags, *mode):
        if flags & os.O_CREAT:
            self._operation()
            self.unflushed_files.add(str(path))
            self.unflushed_names.add(str(path))
        descriptor = os.open(path, flags, *mode)
        self.paths[descriptor] = str(path)
        return descriptor

    def write(self, descriptor, data):
        half = len(data) // 2
        os.write(descriptor, data[:half])
        self._operation()
        os.write(descriptor, data[half:])
        return len(data)

    def fsync(self, descriptor):
        self._operation()
        path = self.paths[descriptor]
        self.unflushed_files.discard(path)
        self.unflushed_names = {name for name in self.unflushed_names if os.path.dirname(name) != path}
        self.unflushed_renames = [pair for pair in self.unflushed_renames if os.path.dirname(pair[1]) != path]

    def mkdir(self, path):
        self._operation()
        os.mkdir(path)

    def rename(self, source, target):
        self._operation()
        os.rename(source, target)
        self.unflushed_renames.append((str(source), str(target)))

    def rmtree(self, path):
        for name in sorted(os.listdir(path)):
            self._operation()
            os.unlink(f"{path}/{name}")
        self._operation()
        os.rmdir(path)

    def lose_power(self):
        for path in self.unflushed_files:
            if os.path.exists(path):
                os.truncate(path, 0)
        for path in self.unflushed_names:
            if os.path.exists(path):
                os.unlink(path)
        for source, target in reversed(self.unflushed_renames):
            if os.path.exists(target):
                os.rename(target, source)


def model_of(value):
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def cut_off_everywhere(tmp_path, monkeypatch, steps, act, *, power_fails):
    """After saves of some steps, cut `act` off at one operation more each time, until it is through.

    Yields:
        The directory, its newest checkpoint, and whether `act` was through.
    """
    stop_at, finished = 0, False
    while not finished:
        stop_at += 1
        directory = tmp_path / str(stop_at)
        for step in steps:
            save(directory, step, parts={"model": model_of(step)}, keep=9)
        disk = Disk(stop_at)
        with monkeypatch.context() as patch:
            patch.setattr(files, "os", disk)
            patch.setattr(files.shutil, "rmtree", disk.rmtree)
            with contextlib.suppress(Killed):
                finished = act(directory)
            if not finished and power_fails:
                disk.lose_power()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing half-written may even be looked at
            found = newest(directory)
        module = model_of(0)
        assert load(directory, parts={"model": module}).step == found.step
        assert all(bool((parameter == found.step).all()) for parameter in module.parameters())
        yield directory, found.step, finished


@pytest.mark.parametrize("power_fails", [False, True])
def test_cut_off_at_any_operation_the_newest_checkpoint_is_whole(tmp_path, monkeypatch, power_fails, record_property):
    def act(directory):
        return save(directory, 3, parts={"model": model_of(3)}, keep=2).is_dir()

    outcomes = []
    for directory, found, finished in cut_off_everywhere(tmp_path, monkeypatch, (1, 2), act, power_fails=power_fails):
        assert found in ((3,) if finished else (2, 3))
        outcomes.append(found)
        save(directory, 4, parts={"model": model_of(4)}, keep=2)  # and the run goes on
        assert newest(directory).step == 4
        assert sorted(os.listdir(directory))[:-1] == [f"step-{found:010d}"]
    record_property("tried", len(outcomes))
    assert len(outcomes) > 15
    assert {*outcomes} == {2, 3}


def test_cut_off_while_deleting_the_newest_complete_one_is_there(tmp_path, monkeypatch, record_property):
    """Keep one of many: at each operation of the deletions, and with power lost there."""

    def act(directory):
        return save(directory, 4, parts={"model": model_of(4)}, keep=1).is_dir()

    tried = while_deleting = 0
    for directory, found, finished in cut_off_everywhere(tmp_path, monkeypatch, (1, 2, 3), act, power_fails=True):
        tried, while_deleting = tried + 1, while_deleting + (found == 4 and not finished)
        assert found in ((4,) if finished else (3, 4))
        save(directory, 5, parts={"model": model_of(5)}, keep=1)
        assert os.listdir(directory) == ["step-0000000005"]
    record_property("tried", tried)
    assert while_deleting > 9


def test_leftovers_that_cannot_be_removed_stop_no_save(tmp_path, monkeypatch):
    """They cost room; what is saved is whole."""

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    (tmp_path / ".saving-0000000009").mkdir()
    monkeypatch.setattr(files.shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="could not be removed: .*Permission denied"):
        save(tmp_path, 1, parts={"model": model_of(1)})
    assert newest(tmp_path).step == 1


def test_a_deletion_that_was_cut_off_is_finished_by_the_next_save(tmp_path):
    for step in range(5):
        save(tmp_path, step, parts={"model": model_of(step)}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-0000000003", "step-0000000004"]
    (tmp_path / "step-0000000003").rename(tmp_path / ".removing-step-0000000003")
    save(tmp_path, 5, parts={"model": model_of(5)}, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-0000000004", "step-0000000005"]


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


def test_the_newest_is_chosen_by_step_and_never_by_file_time(tmp_path):
    for step in (9, 100, 30):
        two_rank_checkpoint(tmp_path, step)
    os.utime(tmp_path / "step-0000000009", (2e9, 2e9))
    assert newest(tmp_path).step == 100


def test_a_renamed_checkpoint_is_refused(damaged):
    path, check = damaged
    path.rename(path.parent / "step-0000000099")
    check("step-0000000099", "step 20", "renamed")


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


def test_an_unknown_version_is_refused_not_skipped(tmp_path, monkeypatch):
    two_rank_checkpoint(tmp_path, 1)
    monkeypatch.setattr(manifest, "VERSION", 2)
    two_rank_checkpoint(tmp_path, 2)
    monkeypatch.setattr(manifest, "VERSION", 1)
    with pytest.raises(UnknownVersionError, match="step-0000000002 has version 2; this distlab reads version 1"):
        newest(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "null", '{"format": "other", "version": 1}', "[" * 100_000, "\xff"])
def test_foreign_manifests_are_refused(tmp_path, text):
    (tmp_path / "step-0000000001").mkdir()
    (tmp_path / "step-0000000001" / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="step-0000000001/manifest.json is not"):
        find.verified(tmp_path / "step-0000000001")


def test_a_manifest_cannot_point_outside_its_directory(tmp_path):
    path = two_rank_checkpoint(tmp_path, 1)
    facts = find.read_manifest(path)
    outside = manifest.FileRecord("../secret", 1, "0" * 64)
    forged = manifest.Manifest(1, 2, (*facts.files[:2], outside))
    (path / "manifest.json").write_bytes(forged.to_bytes())
    with pytest.raises(ValueError, match="lists other files"):
        find.verified(path)


def test_a_forged_checkpoint_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "run", 1, parts={"model": model_of(1)})
    path = tmp_path / "run" / "step-0000000001"
    (path / "shared.pt").unlink()
    shared = files.write_tensors(path, "shared.pt", {"step": 1, "parts": Evil()})
    own = find.read_manifest(path).files[1]
    (path / "manifest.json").write_bytes(manifest.Manifest(1, 1, (shared, own)).to_bytes())
    with pytest.raises(ValueError, match="shared.pt holds more than plain values"):
        load(tmp_path / "run", parts={"model": model_of(0)})
    assert not os.path.exists("evil-was-here")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["full", "broken"])
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "close", "mkdir", "rename"])
def test_a_disk_that_refuses_is_reported_and_loses_nothing(tmp_path, operation, number):
    save(tmp_path, 1, parts={"model": model_of(1)})

    def refuse(*arguments):
        if operation == "close":  # where network file systems tell it
            os.close(*arguments)
        raise OSError(number, os.strerror(number), "somewhere")

    words = rf"cannot save step 2 in .*: rank 0: .*{os.strerror(number)}"
    with DiskThat(files, **{operation: refuse}), pytest.raises(CheckpointError, match=words):
        save(tmp_path, 2, parts={"model": torch.nn.Linear(800, 800)})  # torch.save itself meets the error
    assert os.listdir(tmp_path) == ["step-0000000001"]
    assert newest(tmp_path).step == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF])
def test_a_file_system_that_cannot_flush_directories_is_used_all_the_same(tmp_path, number):
    """As some of networks and of virtual machines are; files are flushed there, too."""
    flushed = []

    def flush(descriptor):
        if not os.path.isfile(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        os.fsync(descriptor)

    with DiskThat(files, fsync=flush):
        save(tmp_path / "run", 1, parts={"model": model_of(1)})
    assert len(flushed) == 3, "what ranks share, what is the rank's own, and the manifest"
    assert newest(tmp_path / "run").step == 1


def test_a_disk_that_fails_while_it_is_read_costs_the_newest_checkpoint_alone(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, parts={"model": model_of(step)})
    opened = find.open_file

    class Broken(io.BufferedReader):
        def readinto(self, _):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open_file(path):
        if path.parent.name == "step-0000000002" and path.name == "shared.pt":
            return Broken(io.FileIO(path))
        return opened(path)

    monkeypatch.setattr(find, "open_file", open_file)
    model = model_of(0)
    with pytest.warns(UserWarning, match="step-0000000002/shared.pt cannot be read .Input/output error."):
        assert load(tmp_path, parts={"model": model}).step == 1
    assert model.weight[0, 0].item() == 1.0


def test_a_place_that_is_no_directory_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot save step 1"):
        save(tmp_path / "file", 1, parts={"model": model_of(1)})
    with pytest.raises(CheckpointError, match="cannot save step 1"):
        save("/proc/distlab", 1, parts={"model": model_of(1)})


def test_names_of_other_directories_are_left_alone(tmp_path):
    for name in ["step-1", "step-00000000001", "step-0000000001-0", "notes"]:
        (tmp_path / name).mkdir()
    save(tmp_path, 1, parts={"model": model_of(1)}, keep=1)
    assert len(os.listdir(tmp_path)) == 5
    assert all(re.fullmatch(r"step-0000000001", path.name) for _, _, path in files.saved(tmp_path))
    shutil.rmtree(tmp_path / "step-0000000001")
    assert newest(tmp_path) is None
