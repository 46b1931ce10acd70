"""Shards of tokens: what was written is read, wherever it was cut; what was changed is refused on every rank."""

import json
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from refused import message

from distlab.loading import Loader, TokenFiles, open_tokens, write_tokens


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 69_999), min_size=2, max_size=20), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans(),
)
def test_what_was_written_is_read_wherever_it_was_cut(tmp_path_factory, documents, shard_tokens, context, narrow):
    folder = tmp_path_factory.mktemp("tokens")
    documents = [[token % 60_000 if narrow else token for token in document] for document in documents]
    write_tokens(folder, iter(documents), vocab_size=60_000 if narrow else 70_000, shard_tokens=shard_tokens)
    row = torch.tensor(sum(documents, []))
    shards = sorted(folder.glob("tokens-*.bin"))
    assert [path.stat().st_size // (2 if narrow else 4) for path in shards[:-1]] == [shard_tokens] * (len(shards) - 1)
    assert len(shards) == -(-len(row) // shard_tokens)
    if len(row) <= context:
        assert "pass less" in message(TokenFiles, folder, context)
        return
    files = pickle.loads(pickle.dumps(open_tokens(folder, context)))
    windows = row[: len(files) * context + 1].unfold(0, context + 1, context)
    assert torch.equal(torch.stack([files[i] for i in range(len(files))]), windows)
    assert [document.tolist() for document in map(TokenFiles(folder).__getitem__, range(len(documents)))] == documents
    assert files.lengths.tolist() == [len(document) for document in documents]
    assert len(pickle.dumps(files)) < 4000 + 200 * len(shards)
    assert message(files.__getitem__, len(files)) == f"IndexError: item {len(files)} of {len(files)}; the first is 0"


def damage(folder, kind):
    shard = folder / "tokens-00001.bin"
    data = shard.read_bytes()
    if kind == "missing":
        shard.unlink()
    elif kind == "no index":
        (folder / "index.json").unlink()
    elif kind == "a different index":
        (folder / "index.json").write_text(json.dumps({"files": [], "dtype": "<u8"}))
    else:
        short = {"cut short": data[:-3], "empty": b"", "longer": data + b"\0"}
        shard.write_bytes(short.get(kind, bytes([data[0] ^ 1]) + data[1:]))


DAMAGE = [
    ("cut short", "tokens-00001.bin' is cut short: 61 bytes, the index says 64; restore the file"),
    ("empty", "tokens-00001.bin' is cut short: 0 bytes"),
    ("longer", "tokens-00001.bin' is longer: 65 bytes"),
    ("changed", "tokens-00001.bin' was changed since it was written: its checksum is not the index's"),
    ("missing", "FileNotFoundError"),
    ("no index", "index.json'; restore the files, or write them with write_tokens"),
    ("a different index", "KeyError: '<u8'"),
]


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize(("kind", "text"), DAMAGE)
def test_a_file_that_was_damaged_is_refused_on_every_rank(kind, text, tmp_path):
    """One rank's copy of the files alone, as on nodes with disks of their own; then the files that all see."""
    rank, own = dist.get_rank(), tmp_path / f"of {dist.get_rank()}"
    write_tokens(own, [range(100)], vocab_size=100, shard_tokens=32)
    if rank == 1:
        damage(own, kind)
    error = message(open_tokens, own, 8)
    assert error.startswith("ValueError: cannot open tokens: rank 1: "), error
    assert text in error
    assert "\n" not in error


@pytest.mark.on_ranks(3)
def test_other_files_than_the_checkpoints_or_than_other_ranks_are_refused(tmp_path):
    rank = dist.get_rank()
    for name, last in (("before", 100), ("after", 101)):
        if rank == 0:
            write_tokens(tmp_path / name, [[*range(99), last]], vocab_size=102, shard_tokens=32)
        dist.barrier()
    before, after = (Loader(open_tokens(tmp_path / name, 8), 6) for name in ("before", "after"))
    next(iter(before))
    error = message(after.load_state_dict, before.state_dict())
    assert "taken with identity" in error
    assert error.endswith("samples would be lost and repeated; restore the data, or begin a new run")
    error = message(open_tokens, tmp_path / ("after" if rank == 2 else "before"), 8)
    assert "ranks disagree on the checksum of the index" in error
    assert "fewer ranks" not in error


@pytest.mark.parametrize(
    ("documents", "text"),
    [
        ([[1, 2], [3]], "document 1 is int64 [1]; pass a row of at least 2 tokens, each 0 to 9, or leave it out"),
        ([[]], "document 0 is float64 [0]"),
        ([[1, 10]], "document 0 is int64 [2]; pass a row of at least 2 tokens, each 0 to 9"),
        ([[1, -1]], "each 0 to 9"),
        ([[0.5, 1.0]], "document 0 is float64 [2]"),
        ([np.ones((2, 2), int)], "document 0 is int64 [2, 2]"),
        ([], "there is no document"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_index(documents, text, tmp_path):
    assert text in message(write_tokens, tmp_path, documents, vocab_size=10)
    assert "cannot open tokens" in message(TokenFiles, tmp_path, 1)
    write_tokens(tmp_path, [[1, 2, 3]], vocab_size=10)
    assert "a directory without an index.json" in message(write_tokens, tmp_path, [[1, 2]], vocab_size=10)
    assert "context is 0" in message(TokenFiles, tmp_path, 0)
