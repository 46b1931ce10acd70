import os

import pytest
import torch
from refused import message

from distlab.blocks.data import ByteCorpus, digits, python_documentation, rank_slice, read_text

TEXT = bytes(range(1, 101))


def test_targets_are_the_inputs_one_byte_on_and_a_batch_depends_on_step_and_seed_only():
    first, second = ByteCorpus(TEXT, 9), ByteCorpus(TEXT, 9)
    inputs, targets = first.batch(0, 4)
    assert inputs.shape == targets.shape == (4, 9)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, inputs + 1)  # the text counts upwards
    first.batch(40, 3, seed=1)  # a different epoch before
    assert torch.equal(first.batch(2, 3, seed=1)[0], second.batch(2, 3, seed=1)[0])
    assert not torch.equal(first.batch(2, 3, seed=1)[0], first.batch(2, 3, seed=2)[0])


def test_the_ranks_slices_are_the_batch_of_one_process():
    corpus = ByteCorpus(TEXT, 9)
    for world_size, batch_size, step in ((1, 4, 0), (3, 7, 1), (4, 13, 5)):
        whole = corpus.batch(step, batch_size, seed=3)
        parts = [corpus.batch(step, batch_size, seed=3, rank=r, world_size=world_size) for r in range(world_size)]
        assert torch.equal(torch.cat([p[0] for p in parts]), whole[0])
        assert torch.equal(torch.cat([p[1] for p in parts]), whole[1])
    assert [rank_slice(10, rank, 4) for rank in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]


def test_an_epoch_visits_every_sample_once_and_the_next_in_a_different_order():
    corpus = ByteCorpus(TEXT, 9)
    firsts = torch.cat([corpus.batch(step, 1)[0][:, 0] for step in range(2 * corpus.num_samples)]).tolist()
    one, two = firsts[: corpus.num_samples], firsts[corpus.num_samples :]
    assert sorted(one) == sorted(two) == sorted(set(one))
    assert one != two
    assert one != sorted(one)


def bad_files(tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"abc\0def")
    (tmp_path / "latin").write_bytes("café".encode("latin-1"))
    (tmp_path / "short").write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    return {
        "missing": "cannot be read: No such file",
        ".": "is not a regular file",
        "empty": "has 0 bytes",
        "binary": "binary .a NUL byte at 3",
        "latin": "is not UTF-8 .byte 3",
        "short": "has 5 bytes, and a context of 16 needs at least 17",
        "pipe": "not a regular file",
        "short/below": "cannot be read",
        "nul\0": "cannot be read",
    }


def test_files_that_are_no_training_text_are_refused_in_one_line(tmp_path):
    for name, words in bad_files(tmp_path).items():
        with pytest.raises(ValueError, match=words) as error:
            read_text(f"{tmp_path}/{name}", context=16)
        assert "\n" not in str(error.value)


def test_a_text_file_is_read_whole_and_numbers_out_of_range_are_refused(tmp_path):
    (tmp_path / "text").write_text("naïve text, long enough")
    assert read_text(tmp_path / "text", 16).decode() == "naïve text, long enough"
    for words, call in (
        *(("rank", lambda given=given: rank_slice(*given)) for given in ((2, 0, 3), (4, 4, 4), (4, -1, 4))),
        *(("context", lambda context=context: ByteCorpus(TEXT, context)) for context in (0, 100)),
        ("step is -1", lambda: ByteCorpus(TEXT, 9).batch(-1, 4)),
    ):
        assert words in message(call)


def test_digits_are_split_once_and_for_all():
    data = digits()
    assert [tuple(one.shape) for one in data] == [(1437, 64), (1437,), (360, 64), (360,)]
    assert [one.dtype for one in data] == [torch.float32, torch.int64] * 2
    assert (data.train_inputs.min(), data.train_inputs.max()) == (0, 1)
    assert all(torch.equal(one, other) for one, other in zip(data, digits(), strict=True))
    assert not torch.equal(data.test_targets, digits(seed=1).test_targets)
    samples = torch.cat([data.train_inputs, data.test_inputs])
    assert len(samples.unique(dim=0)) == len(samples)  # so no sample can be in both sets
    assert sorted(data.test_targets.unique().tolist()) == list(range(10))
    assert len(python_documentation()) > 200_000
