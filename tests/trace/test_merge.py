"""Traces on disk: exact, aligned when merged, and damage is named."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from distlab.trace import (
    Span,
    Trace,
    load_folder,
    merge,
    rank_file,
    read_chrome,
    save_clocks,
    save_trace,
    write_chrome,
)

NAMES = ["forward", "", "a\x00", "\x00", "ü 日", "\ud800", '"<b>&']


def trace_of(rank, *starts):
    return Trace.from_spans(Span(rank, "compute", "forward", "F", start, start + 5) for start in starts)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2**60)), max_size=5))
def test_a_saved_trace_loads_exactly(tmp_path, rows):
    trace = Trace.from_spans(Span(0, name, name, name, start, start, 1, 2, 3) for name, start in rows)
    assert read_chrome(save_trace(trace, tmp_path / "t.json.gz")) == {"trace": trace}
    assert [path.name for path in tmp_path.iterdir()] == ["t.json.gz"]


def test_merge_aligns_clocks_and_sorts():
    merged = merge([trace_of(0, 10, 30), trace_of(1, 1020)], clock_offsets_ns=[0, -1000])
    assert [(span.rank, span.start_ns) for span in merged] == [(0, 10), (1, 20), (0, 30)]
    assert [span.start_ns for span in merge([trace_of(0, 5), trace_of(1, 3)])] == [3, 5]
    assert len(merge([])) == 0
    with pytest.raises(ValueError, match="got 1 clock offsets for 2 traces"):
        merge([trace_of(0), trace_of(1)], [0])


@pytest.fixture
def folder(tmp_path):
    save_trace(trace_of(0, 10), rank_file(tmp_path, 0))
    save_trace(trace_of(1, 500), rank_file(tmp_path, 1))
    save_clocks([0, -495], tmp_path)
    (tmp_path / "notes.txt").write_text("not a trace")
    return tmp_path


def test_load_folder(folder):
    assert list(load_folder(folder)) == [*trace_of(1, 5), *trace_of(0, 10)]
    for rank in range(11):  # ten comes after nine
        save_trace(trace_of(rank, 100), rank_file(folder, rank))
    assert json.loads(save_clocks(np.arange(11), folder).read_text()) == list(range(11))
    assert [(span.rank, span.start_ns) for span in load_folder(folder)] == [(r, 100 + r) for r in range(11)]


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no \S*nowhere"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"there is no trace at .*rank7"):
        read_chrome(rank_file(folder, 7))
    save_clocks([0, 0, 0, 0], folder)
    with pytest.raises(FileNotFoundError, match="has no trace of rank 2, 3, of 4 ranks"):
        load_folder(folder)
    save_clocks([5], folder)  # a former run had more ranks
    assert load_folder(folder) == trace_of(0, 15)
    (folder / "clocks.json").unlink()
    with pytest.raises(FileNotFoundError, match="clocks.json; save the ranks' clock offsets with save_clocks"):
        load_folder(folder)


def test_what_is_not_a_ranks_is_refused(folder):
    for text in ("", "{}", "[1.5, 2]", "[true, 1]"):
        (folder / "clocks.json").write_text(text)
        with pytest.raises(ValueError, match=r"clocks.json holds no list of whole nanoseconds"):
            load_folder(folder)
    save_clocks([0, 0], folder)
    save_trace(trace_of(0, 10), rank_file(folder, 1))
    with pytest.raises(ValueError, match=r"rank1\S* holds trace of ranks \(0,\); expected one trace, of rank 1 only"):
        load_folder(folder)
    write_chrome(rank_file(folder, 0), measured=trace_of(0, 1), predicted=trace_of(0, 1))
    with pytest.raises(
        ValueError, match=r"rank0\S* holds measured of ranks .0,., predicted of ranks .0,.; expected one trace"
    ):
        load_folder(folder)


def test_every_truncation_is_noticed(folder):
    path = rank_file(folder, 0)
    content = path.read_bytes()
    for size in range(0, len(content), 37):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="rank0.trace.json.gz is not JSON, or is cut off"):
            read_chrome(path)
