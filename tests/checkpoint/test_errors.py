"""An error of any kind on one rank becomes the same CheckpointError on all ranks."""

import hashlib
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from distlab.checkpoint import CheckpointError, files, load, manifest, save


class Part:
    """A part whose state_dict or load_state_dict raises on rank 1."""

    def __init__(self, error, *, when_loaded=False):
        self.error, self.when_loaded = error, when_loaded

    def state_dict(self):
        if not self.when_loaded and dist.get_rank() == 1:
            raise self.error
        return {"a": 1}

    def load_state_dict(self, state):
        if self.when_loaded and dist.get_rank() == 1:
            raise self.error


ERRORS = {
    "TypeError: not callable": TypeError("not callable"),
    "KeyError: 'layer 7'": KeyError("layer 7"),
    "EOFError: ran out of input": EOFError("ran out of input"),
    "AttributeError: none": AttributeError("none"),
    "out of range": RuntimeError("out of range"),
}


def errors_of(directory):
    """Save and load with parts that fail on rank 1; return what this rank was told."""
    told = []
    torch.manual_seed(0)
    save(directory, 1, parts={"part": Part(None, when_loaded=True)} | {"model": torch.nn.Linear(2, 2)})
    for error in ERRORS.values():
        for action in (partial(save, directory, 2), partial(load, directory)):
            parts = {"part": Part(error, when_loaded=action.func is load), "model": torch.nn.Linear(2, 2)}
            with pytest.raises(CheckpointError) as caught:
                action(parts=parts)
            told.append(str(caught.value))
    with pytest.raises(ValueError, match="rank 1: keep is None"):
        save(directory, 2, parts={}, keep=None if dist.get_rank() else 3)
    return told


def test_an_error_of_any_kind_on_one_rank_reaches_all(ranks, tmp_path):
    told = ranks(2).run(errors_of, tmp_path)
    assert told[0] == told[1]
    for (says, _), saving, loading in zip(ERRORS.items(), told[0][::2], told[0][1::2], strict=True):
        assert saving == f"cannot save step 2 in {str(tmp_path)!r}: rank 1: {says}"
        assert loading == f"cannot resume from {str(tmp_path)!r}: rank 1: {says}"
    assert os.listdir(tmp_path) == ["step-0000000001"]


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"no file of torch.save"])
def test_a_file_of_a_different_program_is_named(tmp_path, data):
    prepared = files.begin(tmp_path, 1)
    records = []
    for name in (manifest.SHARED, manifest.rank_file(0)):
        files.write_bytes(prepared, name, data)
        records.append(manifest.FileRecord(name, len(data), hashlib.sha256(data).hexdigest()))
    files.publish(prepared, manifest.Manifest(1, 1, tuple(records)))
    with pytest.raises((CheckpointError, ValueError), match=f"step-0000000001/{manifest.SHARED}"):
        load(tmp_path, parts={})
