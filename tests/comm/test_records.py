"""Records of calls: rows in files, read again in words."""

import pytest

from distlab.comm import read_records
from distlab.comm.record.file import DONE, ROW, ROWS_AT, Known, RecordWriter
from distlab.comm.record.read import RecordReader


def known(writer, op="all_reduce", num_bytes=8, ring_bytes=6, channel=1):
    texts = (writer.text("train.py:3"), 0, writer.text("float32[2]"), writer.text("0 [0, 1]"))
    return Known.of(op, channel, 5, (num_bytes, ring_bytes), texts, peer=-1, parties=2)


def test_rows_come_back_in_words(tmp_path):
    writer = RecordWriter(tmp_path, 3, 16)
    writer.end(writer.begin(known(writer), False), DONE)
    (call,) = read_records(tmp_path)
    assert call.end_ns >= call.start_ns > 0
    assert (call.rank, call.op, call.number, call.num_bytes, call.group) == (3, "all_reduce", 1, 8, (0, 1))
    assert str(call) == "all_reduce #1 (float32[2], group [0, 1]) at train.py:3"


def test_totals_count_what_the_ring_has_overwritten(tmp_path):
    writer = RecordWriter(tmp_path, 0, 8)
    for _ in range(30):
        writer.begin(known(writer), False)
    for _ in range(10):
        writer.begin(known(writer, "send", num_bytes=5, ring_bytes=0), False)
    records = read_records(tmp_path)
    assert (records.num_calls(), records.num_calls("all_reduce")) == (40, 30)
    assert records.payload_bytes(0) == records.payload_bytes(0, "all_reduce") == 240
    assert (records.ring_equivalent_bytes(0), records.sent_bytes(0)) == (180, 50)
    assert records.ops(0) == ("send",) * 8
    assert records.dropped(0) == 32


def test_calls_under_way_are_forgotten_with_their_row_or_their_job(tmp_path):
    writer = RecordWriter(tmp_path, 0, 4)
    first = writer.begin(known(writer), False)
    for _ in range(4):
        writer.begin(known(writer), False)
    writer.end(first, DONE)
    assert [call.state for call in read_records(tmp_path)] == ["issued"] * 4
    old = writer.begin(known(writer), False)
    writer.reset()
    writer.end(old, DONE)
    assert len(read_records(tmp_path)) == read_records(tmp_path).num_calls() == 0
    writer.begin(known(writer), False)
    (call,) = read_records(tmp_path)
    assert call.number == 1


def test_half_written_rows_are_left_out(tmp_path):
    writer = RecordWriter(tmp_path, 0, 8)
    for _ in range(2):
        writer.begin(known(writer), False)
    reader = RecordReader(tmp_path / "rank0.rec")
    with open(tmp_path / "rank0.rec", "r+b") as file:  # the second row without its state
        file.seek(ROWS_AT + 3 * ROW.itemsize - 8)
        file.write(bytes(8))
    assert [row["n"] for row in reader.rows(reader.header())] == [1]


def test_texts_of_several_lines_and_other_alphabets_keep_their_numbers(tmp_path):
    writer = RecordWriter(tmp_path, 0, 8)
    assert [writer.text(text) for text in ("a\nb", "größe.py:1", "c", "a\nb")] == [1, 2, 3, 1]
    reader = RecordReader(tmp_path / "rank0.rec")
    assert reader.read_names() == ["", "a b", "größe.py:1", "c"]
    assert reader.read_names() == ["", "a b", "größe.py:1", "c"]


def test_trace_has_the_calls_and_the_time_blocked_in_wait(tmp_path):
    writer = RecordWriter(tmp_path, 1, 8)
    waited, never = writer.begin(known(writer), False), writer.begin(known(writer, "send", channel=2), False)
    writer.wait(waited, 2)
    writer.end(waited, DONE)
    assert never == 2
    spans = {(span.lane, span.kind): span for span in read_records(tmp_path).to_trace()}
    assert set(spans) == {("communication", "all_reduce"), ("communication", "send"), ("wait", "wait")}
    call, wait = spans["communication", "all_reduce"], spans["wait", "wait"]
    assert call.name == wait.name == "all_reduce #1"
    assert call.start_ns <= wait.start_ns <= wait.end_ns == call.end_ns
    assert spans["communication", "send"].duration_s == 0


def test_wrong_questions_say_what_there_is(tmp_path):
    assert (read_records(tmp_path).ranks, len(read_records(tmp_path).to_trace())) == ((), 0)
    RecordWriter(tmp_path, 1, 8)
    records = read_records(tmp_path)
    assert records.ranks == (1,)
    with pytest.raises(ValueError, match=r"no record of rank 0; there are records of ranks \[1\]"):
        records.sent_bytes(0)
    with pytest.raises(ValueError, match="no operation is called 'allreduce'; choose one of all_reduce"):
        records.payload_bytes(1, "allreduce")
