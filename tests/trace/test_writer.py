"""SpanWriter: what is noted is what happened, cheaply."""

import time

import pytest

from distlab.trace import Span, SpanWriter, Trace


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
