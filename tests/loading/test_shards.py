"""Shards of tokens: what was written is read, wherever it was cut; what was changed is refused on every rank."""

import hashlib
import pickle
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from refused import message

from distlab.loading import Loader, TokenFiles, open_tokens, write_tokens

REFUSALS = tomllib.loads(Path(__file__).with_name("refusals.toml").read_text())
documents_of_tokens = st.lists(st.lists(st.integers(0, 69_999), min_size=2, max_size=20), min_size=1, max_size=12)


@settings(max_examples=60)
@given(documents_of_tokens, st.integers(1, 40), st.integers(1, 9), st.sampled_from([(60_000, 2), (70_000, 4)]))
def test_what_was_written_is_read_wherever_it_was_cut(tmp_path_factory, documents, shard_tokens, context, kind):
    folder, (vocab_size, num_bytes) = tmp_path_factory.mktemp("tokens") / "new", kind
    documents = [[token % vocab_size for token in document] for document in documents]
    write_tokens(folder, iter(documents), vocab_size=vocab_size, shard_tokens=shard_tokens)
    row = torch.tensor(sum(documents, []))
    sizes = [path.stat().st_size // num_bytes for path in sorted(folder.glob("tokens-*.bin"))]
    assert sizes == [len(part) for part in row.split(shard_tokens)]
    files = pickle.loads(pickle.dumps(open_tokens(folder)))
    assert [files[i].tolist() for i in range(len(files))] == documents
    assert files.lengths.tolist() == [len(document) for document in documents]
    assert len(pickle.dumps(files)) < 1000 + 200 * len(sizes)  # paths, not what is mapped
    assert "IndexError" in message(files.__getitem__, len(files))
    if len(row) <= context:
        assert "pass less" in message(TokenFiles, folder, context)
        return
    assert "pass less, from 1 on" in message(TokenFiles, folder, 0)
    files = TokenFiles(folder, context)
    windows = row[: len(files) * context + 1].unfold(0, context + 1, context)
    assert torch.equal(torch.stack([files[i] for i in range(len(files))]), windows)


def damage(folder, kind):
    path = folder / ("index.json" if "index" in kind else "tokens-00001.bin")
    data, short = path.read_bytes(), {"empty": b"", "other_index": b"[1]"}
    short |= {"cut_short": data[:-3], "longer": data + b"\0", "half_an_index": data[: len(data) // 2]}
    if kind in ("missing", "no_index"):
        path.unlink()
    else:
        short["shorter_in_index"] = data.replace(b"[100]", b"[99]")
        path.write_bytes(short.get(kind, bytes([data[0] ^ 1]) + data[1:]))


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("kind", REFUSALS["damage"])
def test_a_file_that_was_damaged_is_refused_on_every_rank(kind, tmp_path):
    """One rank's copy of the files alone, as on nodes with disks of their own."""
    own = tmp_path / f"of {dist.get_rank()}"
    write_tokens(own, [range(100)], vocab_size=100, shard_tokens=32)
    if dist.get_rank() == 1:
        damage(own, kind)
    error = message(open_tokens, own, 8)
    assert re.match(r"(Value|Runtime)Error: cannot open tokens: rank 1: ", error), error
    assert REFUSALS["damage"][kind] in error
    assert "\n" not in error


@pytest.mark.on_ranks(3)
def test_each_file_is_read_once_and_other_files_than_the_checkpoints_or_than_other_ranks_are_refused(tmp_path):
    rank, read, everyone, digest = dist.get_rank(), [], [None] * 3, hashlib.file_digest
    for name, last in (("before", 100), ("after", 101)):
        if rank == 0:
            write_tokens(tmp_path / name, [[*range(99), last]], vocab_size=102, shard_tokens=32)
        dist.barrier()
    hashlib.file_digest = lambda file, name: (read.append(file.name), digest(file, name))[1]
    before = Loader(open_tokens(tmp_path / "before", 8), 6)
    hashlib.file_digest = digest
    dist.all_gather_object(everyone, read)
    assert len(set(chain(*everyone))) == sum(map(len, everyone)) == 4
    after = Loader(open_tokens(tmp_path / "after", 8), 6)
    next(before)
    error = message(after.load_state_dict, before.state_dict())
    assert error.endswith("samples would be lost and repeated; restore the data, or begin a new run")
    mixed = Loader(open_tokens(tmp_path / ("after" if rank == 2 else "before"), 8), 6)
    assert "ranks disagree on the loader's state, batch and lengths" in message(next, mixed)


@pytest.mark.parametrize(("documents", "text"), REFUSALS["documents"].values(), ids=REFUSALS["documents"])
def test_what_cannot_be_written_is_refused_and_leaves_no_index(documents, text, tmp_path):
    assert text in message(write_tokens, tmp_path / "new", documents, vocab_size=10)
    assert "FileNotFoundError" in message(TokenFiles, tmp_path / "new", 1)
    for options in ({"vocab_size": 3, "shard_tokens": 0}, {"vocab_size": 2**32 + 1}):  # files without end, wrong tokens
        assert "pass 1 or more, at most 2**32" in message(write_tokens, tmp_path / "no", [[1, 2]], **options)
    assert "FileExistsError" in message(write_tokens, tmp_path / "new", [[1, 2]], vocab_size=10)
