"""What a bucket costs on the wire, by hand, and what is refused."""

import pytest

from distlab.plan.compression import METHODS, Compression, Exchange, exchanges, num_kept, worth_factoring

SHAPES = [(100, 40), (100,), (3, 5, 7)]  # 4,205 elements: 5 blocks
BY_HAND = [
    (Compression("top_k", ratio=0.01), [("all_gather", 42 * (4 + 4))]),
    (Compression("top_k", ratio=1e-6), [("all_gather", 8)]),  # never nothing
    (Compression("random_k", ratio=0.01), [("all_reduce", 42 * 4)]),
    (Compression("quantize", bits=8), [("all_gather", 4205 + 5 * 8)]),
    (Compression("quantize", bits=3), [("all_gather", 1577 + 5 * 8)]),  # 12,615 bits are 1,576.9 bytes
    (Compression("quantize", bits=1), [("all_gather", 526 + 5 * 8)]),
    (Compression("sign"), [("all_gather", 526 + 5 * 4)]),
    (Compression("powersgd", rank=2), [("all_reduce", (205 + 200) * 4), ("all_reduce", 80 * 4)]),
    (Compression("powersgd", rank=20), [("all_reduce", 4205 * 4)]),  # (100 + 40) 20 2 > 4,000: as it is
]
SHORT = [  # one bucket of few elements, and the bytes of each
    (Compression("top_k", ratio=0.5), 10, 2, 5 * (2 + 4)),
    (Compression("quantize", bits=4), 10, 8, 5 + 2 * 8),
    (Compression("quantize", bits=4), 10, 2, 5 + 2 * 4),
    (Compression("sign"), 9, 8, 2 + 8),
]


def test_bytes_are_those_computed_by_hand():
    for compression, expected in BY_HAND:
        assert exchanges(compression, SHAPES) == tuple(Exchange(*call) for call in expected), compression
    for compression, size, each, num_bytes in SHORT:
        assert exchanges(compression, [(size,)], each) == (Exchange("all_gather", num_bytes),)


def test_a_ratio_of_one_keeps_all_and_factors_must_be_smaller_by_the_saving():
    assert [num_kept(size, 1.0) for size in (1, 7, 1000)] == [1, 7, 1000]
    assert num_kept(100, 0.29) == 29  # 0.29 * 100 is 28.999999999999996
    assert worth_factoring((10, 11), 2, 2.0)  # 84 of 110
    assert not worth_factoring((10, 11), 2, 3.0)
    assert not worth_factoring((1000, 1), 1, 2.0)


REFUSED = [
    ({"method": "zip"}, "method is 'zip'; choose one of top_k"),
    ({"ratio": 0.0}, "ratio is 0.0"),
    ({"ratio": float("nan")}, "ratio is nan"),
    ({"ratio": True}, "ratio is True"),
    ({"bits": 9}, "bits is 9; pass the bits of a code, a whole number from 1 to 8"),
    ({"bits": 4.0}, "bits is 4.0"),
    ({"rank": 0}, "rank is 0"),
    ({"min_saving": 0.0}, "min_saving is 0.0"),
]


def test_fields_and_buckets_are_checked():
    for options, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            Compression(**{"method": "top_k"} | options)
    for method in METHODS:
        with pytest.raises(ValueError, match="holds nothing"):
            exchanges(Compression(method), [])
        with pytest.raises(ValueError, match="bytes_per_element is 0"):
            exchanges(Compression(method), [(3,)], 0)
