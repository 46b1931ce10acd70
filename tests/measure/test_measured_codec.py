"""Codecs timed on real ranks: the same result everywhere, from exactly the calls that are predicted."""

from collections import Counter
from dataclasses import replace

import pytest

from distlab.blocks.models import GPTConfig
from distlab.measure import TrainingRun
from distlab.measure.machine.fit import fit_line, median_of
from distlab.measure.runs.codec import COLUMNS, IN_A_ROW, REPEATS, ROWS
from distlab.plan import Cluster, Device, Link, Plan, Protocol
from distlab.plan.compression import Compression, exchanges
from simulator import MeasuredCodec

LINK = Link("l", (Protocol(1e-4, 1e9),))
MACHINE = Cluster("c", Device("d", 1e10, 1e10, 1e9), 2, 2, LINK, LINK)
EACH = (Compression("quantize", bits=8), Compression("powersgd", rank=2))


def measured(ranks, compression):
    def on_ranks():
        import torch

        from distlab.measure import measure_codec

        return measure_codec(compression, MACHINE, device=torch.device("cpu"))

    return ranks.run(on_ranks)


@pytest.mark.parametrize("compression", EACH, ids=[each.method for each in EACH])
def test_every_rank_gets_one_result_from_the_calls_that_are_predicted(ranks, compression):
    two = ranks(2)
    first, second = measured(two, compression)
    assert first == second
    assert (first.compression, first.num_ranks) == (compression, 2)
    assert first.encode_s + first.encode_s_per_byte > 0
    sizes = [call.num_bytes for call in two.records().calls(0) if call.op in ("all_gather", "all_reduce")]
    buckets = [exchanges(compression, ((rows - 1, COLUMNS), (COLUMNS,))) for rows in ROWS]
    expected = Counter(call.num_bytes for calls in buckets for call in calls * (REPEATS + 1) * IN_A_ROW)  # one warms up
    assert {size: sizes.count(size) for size in expected} == expected


def test_lines_are_fitted_with_no_negative_part():
    sizes = [1_000.0, 10_000.0, 100_000.0]
    for relative in (False, True):
        exact = fit_line(sizes, [1e-3 + 1e-8 * size for size in sizes], relative=relative)
        assert exact == pytest.approx((1e-3, 1e-8))
    assert fit_line(sizes, [1e-8 * size - 5e-6 for size in sizes], relative=True)[0] == 0
    fixed, rate = fit_line(sizes, [3e-3, 2e-3, 1e-3], relative=True)
    assert rate == 0
    assert 1e-3 < fixed < 3e-3


def test_codecs_combine_by_median():
    middle = MeasuredCodec(EACH[0], 2, 1e-4, 1e-9, 2e-4, 2e-9)
    slow, fast = (replace(middle, encode_s=1e-4 * by, decode_s_per_byte=2e-9 * by) for by in (3, 0.5))
    both = median_of([slow, middle, fast])
    assert [both.encode_s, both.encode_s_per_byte, both.decode_s, both.decode_s_per_byte] == pytest.approx(
        [1e-4, 1e-9, 2e-4, 2e-9]
    )


def test_training_accumulates_to_the_same_weights_and_predicts_every_window(ranks):
    model = GPTConfig(context=16, num_layers=1, num_heads=2, hidden_size=16)
    plain = TrainingRun(model, Plan(data=2), 8, num_updates=3, num_windows=0)
    split = replace(plain, plan=Plan(data=2, num_microbatches=2))
    limits = {"num_windows": 1, "steps_per_window": 1, "budget_s": 0.0}
    compressed = replace(plain, plan=Plan(data=2, compression=EACH[0]), **limits)

    def on_ranks():
        from distlab.measure import time_training

        return time_training(plain), time_training(split), time_training(compressed)

    for whole, parts, last in ranks(2).run(on_ranks):
        assert parts.losses == pytest.approx(whole.losses, abs=1e-5)
        for name, weight in whole.weights.items():
            assert float((parts.weights[name] - weight).abs().max()) <= 1e-5
        assert len(last.rounds) == 2
        assert all(each.codec is not None and each.overhead.codec_slowdown > 0 for each in last.rounds)
        kinds = [span.kind for span in parts.trace]
        assert kinds.count("F") == kinds.count("B") == 2 * kinds.count("optimizer") == 6
