"""Other people's checkpoints: damaged, forged, from a different model. No code runs, and what is wrong is named."""

import io
import math
import os
import pickle
import random
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings, strategies as some
from killing import Evil, full, same_bits

from distlab.blocks.modules.named_parts import PARAMETER, SavedPart, Slab
from distlab.checkpoint import CheckpointError, read_dcp, write_dcp


class Net(torch.nn.Module):
    """Every kind of tensor that a module may have: tied, empty, 0-dim, of other types, buffers, a strided one."""

    def __init__(self, width=4):
        super().__init__()
        self.first = torch.nn.Linear(3, width)
        self.second = torch.nn.Linear(3, width)
        self.second.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.rand(()))
        self.nothing = torch.nn.Parameter(torch.empty(0, 2))
        self.strided = torch.nn.Parameter(torch.rand(5, 3).t())
        self.rounded = torch.nn.Parameter(torch.rand(3).bfloat16())
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x):
        y = self.norm(self.first(x) + self.second(x)) * self.scale
        return y.sum() ** 2 + self.strided.sum() + self.rounded.sum() + self.nothing.sum()


def run_of(steps=2, width=4):
    torch.manual_seed(steps)
    model = Net(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.rand(6, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def test_plain_modules_of_any_tensors_go_both_ways(tmp_path):
    parts = {"model": run_of()["model"]}
    write_dcp(tmp_path / "ours", parts)
    theirs = {"model": run_of(3)["model"].state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there are no ranks
        dcp.load(theirs, checkpoint_id=tmp_path / "ours", no_dist=True)
        dcp.save(theirs, checkpoint_id=tmp_path / "torchs", no_dist=True)
    assert same_bits(theirs["model"], dict(parts["model"].state_dict()))
    for name in ("torchs", "ours"):
        again = run_of(4)["model"]
        again.load_state_dict(read_dcp(tmp_path / name)["model"])
        assert same_bits(again.state_dict(), parts["model"].state_dict()), name


def test_what_is_not_ours_and_what_is_there_already_are_refused(tmp_path):
    parts = run_of()
    write_dcp(tmp_path / "run", {"model": parts["model"]})
    with pytest.raises(ValueError, match="optimizer is a AdamW; pass models, .* torch's own dcp.save"):
        write_dcp(tmp_path / "other", parts)
    with pytest.raises(CheckpointError, match="exists; nothing is overwritten"):
        write_dcp(tmp_path / "run", {"model": parts["model"]})
    assert os.listdir(tmp_path) == ["run"]


def test_every_flipped_bit_truncation_and_missing_file_of_ours_is_named(tmp_path):
    path = write_dcp(tmp_path / "run", {"model": run_of()["model"]})
    chance = random.Random(0)
    for name in [".metadata", "__0_0.distcp"]:
        data = (path / name).read_bytes()
        for bit in chance.sample(range(8 * len(data)), 100):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(changed)
            with pytest.raises(ValueError, match=f"run/{name} was changed after"):
                read_dcp(path)
        for length in range(0, len(data), len(data) // 60):
            (path / name).write_bytes(data[:length])
            with pytest.raises(ValueError, match=f"run/{name} was changed after"):
                read_dcp(path)
        (path / name).unlink()
        for make in (lambda one: None, lambda one: one.mkdir()):
            make(path / name)
            with pytest.raises(ValueError, match=f"run/{name} cannot be read"):
                read_dcp(path)
        (path / name).rmdir()
        (path / name).write_bytes(data)
    (path / "SHA256SUMS").unlink()  # as torch's own have none
    read_dcp(path)


@pytest.fixture
def forged(tmp_path, monkeypatch):
    """Return a check that a checkpoint whose records were changed is refused."""
    monkeypatch.chdir(tmp_path)
    path = write_dcp(tmp_path / "run", {"model": run_of()["model"]})
    (path / "SHA256SUMS").unlink()
    data = (path / ".metadata").read_bytes()

    def check(change, words):
        records = pickle.loads(data)  # the test's own file
        (path / ".metadata").write_bytes(pickle.dumps(change(records) or records))
        with pytest.raises(ValueError, match=words):
            read_dcp(path)

    return check


BOMBS = {
    "alone": lambda metadata: Evil(),
    "in planner_data": lambda metadata: setattr(metadata, "planner_data", {"model.scale": Evil()}),
    "as a name": lambda metadata: metadata.state_dict_metadata.update({Evil(): 1}),
    "in a size": lambda metadata: setattr(metadata.state_dict_metadata["model.scale"].chunks[0], "sizes", Evil()),
}


def test_a_pickle_bomb_is_inert(forged):
    for change in BOMBS.values():
        forged(change, r"run/.metadata was not loaded: it asks for posix.mkdir")
        assert not os.path.exists("evil-was-here")


def test_a_value_that_needs_code_is_left_out_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.rand(2)}, "other": Evil()}, checkpoint_id=tmp_path / "run", no_dist=True)
    os.path.exists("evil-was-here") and os.rmdir("evil-was-here")
    with pytest.warns(UserWarning, match="left out other: it would need code to load"):
        assert list(read_dcp(tmp_path / "run")) == ["model"]
    assert not os.path.exists("evil-was-here")


def first_place(metadata):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == "model.first.weight")


def weight(metadata):
    return metadata.state_dict_metadata["model.first.weight"]


def half_twice(metadata):
    place, chunks, stream = first_place(metadata), weight(metadata).chunks, io.BytesIO()
    torch.save(torch.rand(2, 3), stream)
    Path("run/__1_0.distcp").write_bytes(stream.getvalue())
    place.relative_path, place.offset, place.length = "__1_0.distcp", 0, len(stream.getvalue())
    chunks[0].sizes = torch.Size([2, 3])
    chunks.append(chunks[0])


FORGED = {
    "a half that is there twice": (half_twice, "6 elements of model.first.weight are in no file"),
    "a file outside": (lambda m: setattr(first_place(m), "relative_path", "../run/__0_0.distcp"), "is not a file of"),
    "a huge tensor": (
        lambda m: setattr(weight(m), "size", torch.Size([1 << 40, 3])),
        "elements of model.first.weight are in no file",
    ),
    "more bytes than the file has": (lambda m: setattr(first_place(m), "length", 1 << 50), "__0_0.distcp is too short"),
    "a negative length": (lambda m: setattr(first_place(m), "length", -1), "__0_0.distcp is too short"),
    "a box outside": (
        lambda m: setattr(weight(m).chunks[0], "offsets", torch.Size([3, 0])),
        "run/.metadata is damaged, .* .KeyError",
    ),
    "a value without a place": (
        lambda m: m.planner_data.update({"model.first.weight": ()}),
        "run/.metadata is damaged, .* .IndexError",
    ),
    "bytes that are no tensor": (
        lambda m: setattr(first_place(m), "offset", first_place(m).offset + 1),
        "run/.metadata is damaged, or a file that it names",
    ),
}


def test_forged_records_are_refused(forged):
    for change, words in FORGED.values():
        forged(change, words)


def test_a_box_of_a_different_kind_of_numbers_is_refused_not_changed(tmp_path):
    for kind in (torch.int32, torch.float32):  # of one length, so that both files fit both records
        dcp.save({"x": torch.ones(3, dtype=kind)}, checkpoint_id=str(tmp_path / str(kind)), no_dist=True)
    (mixed,) = (tmp_path / "torch.float32").glob("*.distcp")
    mixed.write_bytes((tmp_path / "torch.int32" / mixed.name).read_bytes())
    with pytest.raises((ValueError, CheckpointError), match=r"x is \[3\] of torch.int32, not \[3\] of torch.float32"):
        read_dcp(tmp_path / "torch.float32")


def test_an_error_while_writing_reaches_every_rank_and_leaves_nothing(ranks, tmp_path):
    def fail():
        import torch.distributed as dist

        from distlab.checkpoint import dcp as ours

        writer = ours.filesystem.FileSystemWriter
        real = writer.write_data
        if dist.get_rank() == 1:
            writer.write_data = full
        try:
            with pytest.raises(CheckpointError) as caught:
                write_dcp(tmp_path / "run", {"model": torch.nn.Linear(4, 4)})
        finally:
            writer.write_data = real
        return str(caught.value)

    one, other = ranks(2).run(fail)
    assert one == other
    assert one == f"cannot write {str(tmp_path / 'run')!r}: rank 1: [Errno 28] No space left on device"
    assert os.listdir(tmp_path) == []


@settings(max_examples=100, deadline=None)
@given(some.lists(some.integers(0, 4), max_size=4), some.data())
def test_boxes_cover_each_element_of_a_part_once(shape, data):
    numel = math.prod(shape)
    start = data.draw(some.integers(0, numel))
    stop = data.draw(some.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    part = SavedPart(tuple(shape), start, stop, {PARAMETER: whole.flatten()[start:stop]}, {})
    seen = torch.zeros(shape, dtype=torch.bool)
    boxes = [*part.boxes()]
    for corner, values in boxes:
        where = tuple(slice(at, at + size) for at, size in zip(corner, values[PARAMETER].shape, strict=True))
        assert torch.equal(whole[where], values[PARAMETER])
        assert not seen[where].any()
        seen[where] = True
    assert torch.equal(seen.flatten().nonzero().flatten(), torch.arange(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=100, deadline=None)
@given(some.integers(1, 3), some.integers(1, 5), some.integers(1, 4), some.integers(1, 3), some.data())
def test_boxes_of_a_slab_leave_its_padding_out(rows, section, num_sections, num_ranks, data):
    """As tensor-parallel ranks cut it: each section in equal parts, the last one filled up."""
    length = section * num_sections
    whole = torch.arange(rows * length).view(rows, length)
    width = -(-section // num_ranks)
    seen = torch.zeros_like(whole)
    for rank in range(num_ranks):
        ends = [(min(rank * width, section), min((rank + 1) * width, section)) for _ in range(num_sections)]
        slab = Slab(1, tuple((i * section + low, i * section + high, width) for i, (low, high) in enumerate(ends)))
        own = torch.full(slab.shape(whole.shape), -1)
        for here, there in slab.pairs(own, whole):
            here.copy_(there)
        cuts = sorted(data.draw(some.lists(some.integers(0, own.numel()), max_size=2)))
        for start, stop in zip([0, *cuts], [*cuts, own.numel()], strict=True):
            part = SavedPart((rows, length), start, stop, {PARAMETER: own.flatten()[start:stop]}, {}, slab)
            for corner, values in SavedPart.from_dict(part.to_dict()).boxes():
                where = tuple(slice(at, at + size) for at, size in zip(corner, values[PARAMETER].shape, strict=True))
                assert torch.equal(whole[where], values[PARAMETER])
                seen[where] += 1
    assert bool((seen == 1).all())
