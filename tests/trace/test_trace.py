"""Traces: columns and spans are one thing; on disk exact, aligned when merged; what a viewer needs; damage is named."""

import gzip
import json
import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from distlab import trace as tr
from distlab.trace.chrome import chrome_json


def trace_of(rank, *starts):
    return tr.Trace.from_spans(tr.Span(rank, "compute", "forward", "F", start, start + 5) for start in starts)


def test_merge_aligns_clocks_and_sorts():
    merged = tr.merge([trace_of(0, 10, 30), trace_of(1, 1020)], clock_offsets_ns=[0, -1000])
    assert [(span.rank, span.start_ns) for span in merged] == [(0, 10), (1, 20), (0, 30)]
    assert [span.start_ns for span in tr.merge([trace_of(0, 5), trace_of(1, 3)])] == [3, 5]
    assert len(tr.merge([])) == 0
    with pytest.raises(ValueError, match="got 1 clock offsets for 2 traces"):
        tr.merge([trace_of(0), trace_of(1)], [0])


@pytest.fixture
def folder(tmp_path):
    tr.save_trace(trace_of(0, 10), tr.rank_file(tmp_path, 0))
    tr.save_trace(trace_of(1, 500), tr.rank_file(tmp_path, 1))
    tr.save_clocks([0, -495], tmp_path)
    (tmp_path / "notes.txt").write_text("not a trace")
    return tmp_path


def test_load_folder(folder):
    assert list(tr.load_folder(folder)) == [*trace_of(1, 5), *trace_of(0, 10)]
    for rank in range(11):  # ten comes after nine
        tr.save_trace(trace_of(rank, 100), tr.rank_file(folder, rank))
    assert json.loads(tr.save_clocks(np.arange(11), folder).read_text()) == list(range(11))
    assert [(span.rank, span.start_ns) for span in tr.load_folder(folder)] == [(r, 100 + r) for r in range(11)]


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no \S*nowhere"):
        tr.load_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"there is no trace at .*rank7"):
        tr.read_chrome(tr.rank_file(folder, 7))
    tr.save_clocks([0, 0, 0, 0], folder)
    with pytest.raises(FileNotFoundError, match="has no trace of rank 2, 3, of 4 ranks"):
        tr.load_folder(folder)
    tr.save_clocks([5], folder)  # a former run had more ranks
    assert tr.load_folder(folder) == trace_of(0, 15)
    (folder / "clocks.json").unlink()
    with pytest.raises(FileNotFoundError, match="clocks.json; save the ranks' clock offsets with save_clocks"):
        tr.load_folder(folder)


def test_what_is_not_a_ranks_is_refused(folder):
    for text in ("", "{}", "[1.5, 2]", "[true, 1]"):
        (folder / "clocks.json").write_text(text)
        with pytest.raises(ValueError, match=r"clocks.json holds no list of whole nanoseconds"):
            tr.load_folder(folder)
    tr.save_clocks([0, 0], folder)
    tr.save_trace(trace_of(0, 10), tr.rank_file(folder, 1))
    with pytest.raises(ValueError, match=r"rank1\S* holds trace of ranks \(0,\); expected one trace, of rank 1 only"):
        tr.load_folder(folder)
    tr.write_chrome(tr.rank_file(folder, 0), measured=trace_of(0, 1), predicted=trace_of(0, 1))
    words = r"rank0\S* holds measured of ranks .0,., predicted of ranks .0,.; expected one trace"
    with pytest.raises(ValueError, match=words):
        tr.load_folder(folder)


def test_every_truncation_is_noticed(folder):
    path = tr.rank_file(folder, 0)
    content = path.read_bytes()
    for size in range(0, len(content), 37):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="rank0.trace.json.gz is not JSON, or is cut off"):
            tr.read_chrome(path)


WORD = st.sampled_from(["compute", "</script>", "ü\n", "日", "", '"', "a\x00", "\x00", "\ud800"])


@st.composite
def spans(draw, word, begin, length):
    start, small = draw(begin), st.integers(-1, 2**31 - 1)
    words, end = (draw(word) for _ in range(3)), start + draw(length)
    return tr.Span(draw(st.integers(0, 4)), *words, start, end, draw(st.integers(0, 2**62)), draw(small), draw(small))


SPANS = st.lists(spans(WORD, st.integers(-(2**60), 2**60) | st.integers(0, 20), st.integers(0, 12)), max_size=12)
STEP = tr.Trace.from_spans(
    [
        tr.Span(0, "compute", "forward", "F", 1_000_000_123, 1_000_002_124, 0, 0, 0),
        tr.Span(1, "compute", "backward", "B", 1_000_001_000, 1_000_005_001, 0, 1, 0),
        tr.Span(0, "communication", "all_reduce #0", "all_reduce", 1_000_002_000, 1_000_009_000, 4096),
    ]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(SPANS, SPANS)
def test_reading_is_the_exact_inverse_of_writing(tmp_path, measured, predicted):
    traces = {"measured": tr.Trace.from_spans(measured), "predicted": tr.Trace.from_spans(predicted)}
    back = tr.read_chrome(tr.write_chrome(tmp_path / "step.json", **traces))
    assert list(back) == list(traces)
    assert back == traces
    assert tr.read_chrome(tr.save_trace(traces["measured"], tmp_path / "t.json.gz")) == {"trace": traces["measured"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.json", "t.json.gz"]


@given(SPANS)
def test_a_viewer_can_stack_every_thread(rows):
    threads = {}
    for event in json.loads(chrome_json({"measured": tr.Trace.from_spans(rows)}))["traceEvents"]:
        if event["ph"] == "X":
            times = (event["args"]["start_ns"], event["args"]["end_ns"])
            threads.setdefault((event["pid"], event["tid"]), []).append(times)
    for times in threads.values():
        for (a, b), (c, d) in combinations(times, 2):
            assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


def test_what_perfetto_reads(tmp_path):
    document = json.loads(tr.write_chrome(tmp_path / "step.json", measured=STEP, predicted=STEP.shifted(7)).read_text())
    events = document["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes.values()) == ["measured rank 0", "measured rank 1", "predicted rank 0", "predicted rank 1"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    complete = [e for e in events if e["ph"] == "X"]
    assert (len(complete), {e["ph"] for e in events}) == (6, {"M", "X"})
    for event in complete:
        assert event["pid"] in processes
        assert (event["pid"], event["tid"]) in threads
    first, second, third = complete[:3]
    assert (first["name"], first["cat"], first["ts"], first["dur"]) == ("forward", "F", 0.0, 2.001)
    assert (second["ts"], second["dur"]) == (0.877, 4.001)
    assert threads[third["pid"], third["tid"]] == "communication"
    assert [e["ts"] for e in complete[3:]] == [e["ts"] for e in complete[:3]]  # each trace from its own start
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    by_order = [processes[pid] for pid in sorted(order, key=order.__getitem__)]
    assert by_order == ["measured rank 0", "predicted rank 0", "measured rank 1", "predicted rank 1"]


def test_spans_that_overlap_get_a_second_thread():
    spans = [tr.Span(0, "communication", f"bucket {i}", "all_reduce", 10 * i, 10 * i + 15) for i in range(3)]
    events = json.loads(chrome_json({"measured": tr.Trace.from_spans(spans)}))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["communication", "communication (2)"]


def test_gzip_and_what_is_not_there(tmp_path):
    path = tr.write_chrome(tmp_path / "step.json", measured=STEP)
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert tr.read_chrome(path) == {"measured": STEP}
    with pytest.raises(ValueError, match="write_chrome got no trace"):
        tr.write_chrome(path)
    with pytest.raises(FileNotFoundError, match="there is no trace at .*nowhere.json; write one with write_chrome"):
        tr.read_chrome(tmp_path / "nowhere.json")


def test_what_cannot_be_read(tmp_path):
    path = tmp_path / "bad.json"
    for content, message in (
        (b"", "is not JSON"),
        (b"\x1f\x8bgarbage", "is not JSON"),
        (b"3", "is no Chrome trace: expected a list of events"),
        (b'{"events": []}', "is no Chrome trace"),
        (b'{"traceEvents": [], "otherData": {}}', "a different program wrote it"),
        (b'{"traceEvents": [], "otherData": {"distlab": {"version": 99}}}', "reads version 1"),
        (b'{"traceEvents": [], "otherData": {"distlab": {"version": 1}}}', "it is damaged .*; write the trace again"),
        (b'{"traceEvents": [1], "otherData": {"distlab": {"version": 1, "traces": []}}}', "it is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"bad.json.*{message}"):
            tr.read_chrome(path)
    step = tr.write_chrome(tmp_path / "step.json", measured=STEP).read_text()
    for key, value in (("start_ns", 1.5), ("end_ns", None), ("end_ns", 2**80), ("stage", 2**40), ("end_ns", 0)):
        damaged = json.loads(step)
        next(e for e in damaged["traceEvents"] if e["ph"] == "X")["args"][key] = value
        path.write_text(json.dumps(damaged))
        with pytest.raises(ValueError, match="bad.json: it is damaged"):
            tr.read_chrome(path)


ANY_WORD = st.text(max_size=6)
TIME = st.integers(-(2**61), 2**61)


ANY_SPANS = st.lists(spans(ANY_WORD, TIME, st.integers(0, 2**60)), max_size=8)
TWO = tr.Trace.from_spans([tr.Span(0, "compute", "forward", "F", 5, 9), tr.Span(1, "send", "send", "send", 2, 4, 64)])


@given(ANY_SPANS)
def test_spans_in_spans_out(rows):
    trace = tr.Trace.from_spans(rows)
    assert (list(trace), [trace[index] for index in range(len(trace))]) == (rows, rows)


@given(ANY_SPANS, ANY_SPANS)
def test_concatenate(left, right):
    joined = tr.Trace.concatenate([tr.Trace.from_spans(left), tr.Trace.from_spans(right)])
    assert joined == tr.Trace.from_spans(left + right)


def test_equality_looks_at_spans_not_at_codes():
    second = np.array([False, True, False, True])
    assert tr.Trace.concatenate([TWO, TWO]).select(second) == tr.Trace.from_spans([TWO[1]] * 2)
    assert tr.Trace.from_spans([TWO[1], TWO[0]]) != TWO
    assert tr.Trace.concatenate([]) == tr.Trace.from_spans([])


def test_from_columns_takes_scalars():
    words = {"lane": "compute", "name": "step", "kind": "F"}
    trace = tr.Trace.from_columns(rank=[0, 1], **words, start_ns=[0, 1], end_ns=np.int64(7))
    assert list(trace) == [tr.Span(0, *words.values(), 0, 7), tr.Span(1, *words.values(), 1, 7)]
    assert len(tr.Trace.from_columns(rank=[], lane="x", name="x", kind="x", start_ns=[], end_ns=[])) == 0


def test_from_columns_checks():
    good = {"rank": [0, 0], "lane": "c", "name": "n", "kind": "F", "start_ns": [0, 1], "end_ns": [1, 2]}
    for columns, message in (
        ({"start_ns": [1, 2, 3]}, "'start_ns' has 3 rows|has 2 rows"),
        ({"end_ns": [0, 0]}, "row 1 ends before it starts"),
        ({"colour": [0, 0]}, "trace columns are .*colour"),
    ):
        with pytest.raises(ValueError, match=message):
            tr.Trace.from_columns(**(good | columns))


def test_pick_and_move():
    assert TWO.ranks == (0, 1)
    assert TWO.duration_s == pytest.approx(7e-9)
    assert list(TWO.select(TWO.is_word("kind", "F"))) == [TWO[0]]
    assert list(TWO.select(lambda span: span.num_bytes > 0)) == [TWO[1]]
    assert list(TWO.take(np.array([1, 0]))) == [TWO[1], TWO[0]]
    assert (TWO.from_zero()[1].start_ns, TWO.shifted(10)[0].end_ns) == (0, 19)
    assert TWO[0].duration_s == pytest.approx(4e-9)
    assert tr.Trace.from_spans([]).from_zero().duration_s == 0


def test_a_span_lasts_as_long_as_its_block():
    writer = tr.SpanWriter(3)
    before = time.monotonic_ns()
    with writer.span("forward", kind="F", microbatch=2, stage=1, num_bytes=7, lane="gpu"):
        time.sleep(0.01)
    after = time.monotonic_ns()
    (span,) = writer.trace()
    assert span._replace(start_ns=0, end_ns=0) == tr.Span(3, "gpu", "forward", "F", 0, 0, 7, 1, 2)
    assert before <= span.start_ns < span.end_ns <= after
    assert span.duration_s >= 0.01


def test_spans_nest_and_are_noted_when_their_block_raises():
    writer = tr.SpanWriter(1)
    with pytest.raises(KeyError), writer.span("step"), writer.span("forward", "F"):
        raise KeyError
    inner, outer = writer.trace()
    assert (inner.name, outer.name, len(writer.trace())) == ("forward", "step", 2)
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    writer.clear()
    assert writer.trace() == tr.Trace.from_spans([])
    writer.add("all_reduce bucket 0", "all_reduce", 5, 9, lane="communication", num_bytes=64)
    assert list(writer.trace()) == [tr.Span(1, "communication", "all_reduce bucket 0", "all_reduce", 5, 9, 64)]


def test_errors_name_the_rank():
    with pytest.raises(ValueError, match="rank is -1"):
        tr.SpanWriter(-1)
    with pytest.raises(ValueError, match="rank 2: span 'x' ends at 3 ns, before its start at 4 ns"):
        tr.SpanWriter(2).add("x", "F", 4, 3)
