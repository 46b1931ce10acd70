"""Trace: columns and spans are two views of one thing; SpanWriter notes what happened, cheaply."""

import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distlab.trace import Span, SpanWriter, Trace

WORD = st.text(max_size=6)
TIME = st.integers(-(2**61), 2**61)


@st.composite
def spans(draw):
    start, small = draw(TIME), st.integers(-1, 2**31 - 1)
    words, end = (draw(WORD) for _ in range(3)), start + draw(st.integers(0, 2**60))
    return Span(draw(st.integers(0, 4)), *words, start, end, draw(st.integers(0, 2**62)), draw(small), draw(small))


SPANS = st.lists(spans(), max_size=8)
TWO = Trace.from_spans([Span(0, "compute", "forward", "F", 5, 9), Span(1, "communication", "send", "send", 2, 4, 64)])


@given(SPANS)
def test_spans_in_spans_out(rows):
    trace = Trace.from_spans(rows)
    assert list(trace) == rows
    assert [trace[index] for index in range(len(trace))] == rows


@given(SPANS, SPANS)
def test_concatenate(left, right):
    joined = Trace.concatenate([Trace.from_spans(left), Trace.from_spans(right)])
    assert joined == Trace.from_spans(left + right)


def test_equality_looks_at_spans_not_at_codes():
    assert Trace.concatenate([TWO, TWO]).select(np.array([False, True, False, True])) == Trace.from_spans([TWO[1]] * 2)
    assert Trace.from_spans([TWO[1], TWO[0]]) != TWO
    assert Trace.concatenate([]) == Trace.from_spans([])


def test_from_columns_takes_scalars():
    trace = Trace.from_columns(rank=[0, 1], lane="compute", name="step", kind="F", start_ns=[0, 1], end_ns=np.int64(7))
    assert list(trace) == [Span(0, "compute", "step", "F", 0, 7), Span(1, "compute", "step", "F", 1, 7)]
    assert len(Trace.from_columns(rank=[], lane="x", name="x", kind="x", start_ns=[], end_ns=[])) == 0


def test_from_columns_checks():
    good = {"rank": [0, 0], "lane": "c", "name": "n", "kind": "F", "start_ns": [0, 1], "end_ns": [1, 2]}
    for columns, message in (
        ({"start_ns": [1, 2, 3]}, "'start_ns' has 3 rows|has 2 rows"),
        ({"end_ns": [0, 0]}, "row 1 ends before it starts"),
        ({"colour": [0, 0]}, "trace columns are .*colour"),
    ):
        with pytest.raises(ValueError, match=message):
            Trace.from_columns(**(good | columns))


def test_pick_and_move():
    assert TWO.ranks == (0, 1)
    assert TWO.duration_s == pytest.approx(7e-9)
    assert list(TWO.select(TWO.is_word("kind", "F"))) == [TWO[0]]
    assert list(TWO.select(lambda span: span.num_bytes > 0)) == [TWO[1]]
    assert list(TWO.take(np.array([1, 0]))) == [TWO[1], TWO[0]]
    assert TWO.from_zero()[1].start_ns == 0
    assert TWO.shifted(10)[0].end_ns == 19
    assert TWO[0].duration_s == pytest.approx(4e-9)
    assert Trace.from_spans([]).from_zero().duration_s == 0


def test_a_span_lasts_as_long_as_its_block():
    writer = SpanWriter(3)
    before = time.monotonic_ns()
    with writer.span("forward", kind="F", microbatch=2, stage=1, num_bytes=7, lane="gpu"):
        time.sleep(0.01)
    after = time.monotonic_ns()
    (span,) = writer.trace()
    assert span._replace(start_ns=0, end_ns=0) == Span(3, "gpu", "forward", "F", 0, 0, 7, 1, 2)
    assert before <= span.start_ns < span.end_ns <= after
    assert span.duration_s >= 0.01


def test_spans_nest_and_are_noted_when_their_block_raises():
    writer = SpanWriter(1)
    with pytest.raises(KeyError), writer.span("step"), writer.span("forward", "F"):
        raise KeyError
    inner, outer = writer.trace()
    assert (inner.name, outer.name, len(writer)) == ("forward", "step", 2)
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
    writer.clear()
    assert writer.trace() == Trace.from_spans([])
    writer.add("all_reduce bucket 0", "all_reduce", 5, 9, lane="communication", num_bytes=64)
    assert list(writer.trace()) == [Span(1, "communication", "all_reduce bucket 0", "all_reduce", 5, 9, 64)]


def test_errors_name_the_rank():
    with pytest.raises(ValueError, match="rank is -1"):
        SpanWriter(-1)
    with pytest.raises(ValueError, match="rank 2: span 'x' ends at 3 ns, before its start at 4 ns"):
        SpanWriter(2).add("x", "F", 4, 3)
