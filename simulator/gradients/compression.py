"""What encoding a bucket of gradients and decoding it again asks of a device.

Kernels that compute little are counted in passes: a pass reads or writes every byte of the bucket once. The counts are
those of a plain implementation, one kernel after the other, nothing fused:

    method      encode                                    decode, for the payloads of n ranks
    top_k       2 for |g|, 8 to select, 1 to gather       1 to clear; 3 for each number received (read, add, write)
    random_k    1 to gather                               1 to clear; 3 for each number of k
    quantize    9: extent, shift, scale, round, convert   1 to clear; n x 8: convert, scale, shift, add
    sign        4: mean of |g|, compare                   1 to clear; n x 8
    packing     2 below 8 bits a number                   n x 2
    powersgd    P = M Q: 2 r flops per element            P Q^T: 2 r flops per element, 1 to write the mean
    error       3 to add the last step's error            3 to keep this step's error

PowerSGD works between its two exchanges too. It makes the columns of P orthogonal (4 r^2 flops per row), then
Q = M^T P. While the second exchange travels it computes its error, one more product. Selecting the k largest is priced
as a radix select: four rounds that read and write the bucket. Libraries differ most in this row. So a codec can be
timed where it runs, and given to `simulate` as a MeasuredCodec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from distlab.plan import Device, Plan, Work
from distlab.plan.compression import MAX_BITS, Compression, as_matrix, num_kept, worth_factoring
from simulator.hardware.cost import compute_s
from simulator.units import to_ns

Shapes = Sequence[Sequence[int]]

ERROR_PASSES = 3
ENCODE_PASSES = {"top_k": 11, "random_k": 1, "quantize": 9, "sign": 4}
DECODE_PASSES = 8
PACK_PASSES = 2
KERNELS = 8


class CodecWork(NamedTuple):
    """Work on one bucket on one rank: before it is sent, and after it has come.

    PowerSGD has work between its two exchanges too, and some `after` it sent the second one, while that travels.
    """

    encode: Work
    decode: Work
    between: Work = Work()
    after: Work = Work()


class CodecTimes(NamedTuple):
    """The same in nanoseconds."""

    encode_ns: int
    decode_ns: int
    between_ns: int = 0
    after_ns: int = 0


@dataclass(frozen=True)
class MeasuredCodec:
    """A codec as it was timed on some ranks: a fixed time per bucket, and a time per byte of its gradients.

    Attributes:
        compression: what was timed.
        num_ranks: ranks that exchanged; decoding grows with them.
        encode_s: fixed time before a bucket is sent.
        encode_s_per_byte: and for each byte of its gradients.
        decode_s: fixed time after it has come. PowerSGD spends half of it before it sends a second time.
        decode_s_per_byte: and for each byte of its gradients.
    """

    compression: Compression
    num_ranks: int
    encode_s: float
    encode_s_per_byte: float
    decode_s: float
    decode_s_per_byte: float

    def __post_init__(self) -> None:
        for name in ("encode_s", "encode_s_per_byte", "decode_s", "decode_s_per_byte"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"MeasuredCodec: {name} is {value!r}; pass a finite time >= 0")

    def slower(self, factor: float) -> MeasuredCodec:
        """Return the codec with all of its times multiplied by a factor."""
        names = ("encode_s", "encode_s_per_byte", "decode_s", "decode_s_per_byte")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def times(self, num_bytes: int) -> CodecTimes:
        """Return the times of a bucket with num_bytes of gradients."""
        encode = to_ns(self.encode_s + self.encode_s_per_byte * num_bytes)
        decode = to_ns(self.decode_s + self.decode_s_per_byte * num_bytes)
        between = decode // 2 if self.compression.method == "powersgd" else 0
        return CodecTimes(encode, decode - between, between)

    def check(self, plan: Plan) -> None:
        """Refuse a plan that this was not measured for.

        Raises:
            ValueError: the plan has a different compression or a different number of replicas.
        """
        if (self.compression, self.num_ranks) != (plan.compression, plan.copies):
            raise ValueError(
                f"the codec was measured for {self.compression} among {self.num_ranks} ranks; the plan has "
                f"{plan.compression} among {plan.copies}: measure that one, or leave codec out to use counted work"
            )


def codec_times(
    compression: Compression, shapes: Shapes, *, num_ranks: int, bytes_per_element: int, device: Device
) -> CodecTimes:
    """Return what the counted work on a bucket of tensors of these shapes takes on a device."""
    work = codec_work(compression, shapes, num_ranks=num_ranks, bytes_per_element=bytes_per_element)
    return CodecTimes(*(to_ns(compute_s(part, device)) for part in work))


def codec_work(compression: Compression, shapes: Shapes, *, num_ranks: int, bytes_per_element: int = 4) -> CodecWork:
    """Count the work on a bucket of tensors of these shapes, by the table of this file."""
    size = sum(math.prod(shape) for shape in shapes)
    num_bytes = size * bytes_per_element
    error = Work(memory_bytes=ERROR_PASSES * num_bytes, num_kernels=2) if compression.error_feedback else Work()
    if compression.method == "powersgd":
        return _powersgd(compression, shapes, bytes_per_element, error)
    encode = Work(memory_bytes=ENCODE_PASSES[compression.method] * num_bytes, num_kernels=KERNELS) + error
    clear = Work(memory_bytes=num_bytes, num_kernels=1) + error
    if compression.method in ("top_k", "random_k"):
        senders = num_ranks if compression.method == "top_k" else 1
        received = senders * num_kept(size, compression.ratio) * bytes_per_element
        return CodecWork(encode, clear + Work(memory_bytes=3 * received, num_kernels=3 * senders))
    packed = compression.method == "sign" or compression.bits < MAX_BITS
    pack = PACK_PASSES if packed else 0
    encode += Work(memory_bytes=pack * num_bytes, num_kernels=pack)
    add = Work(memory_bytes=num_ranks * (DECODE_PASSES + pack) * num_bytes, num_kernels=num_ranks * (4 + pack))
    return CodecWork(encode, clear + add)


def _powersgd(compression: Compression, shapes: Shapes, bytes_per_element: int, error: Work) -> CodecWork:
    """Count PowerSGD; what is not worth factors is sent as it is, and matrices of one shape share a kernel."""
    matrices = [as_matrix(shape) for shape in shapes]
    matrices = [matrix for matrix in matrices if worth_factoring(matrix, compression.rank, compression.min_saving)]
    if not matrices:
        return CodecWork(Work(), Work())
    num_bytes = sum(rows * columns for rows, columns in matrices) * bytes_per_element
    batches = len(set(matrices))
    product = 2.0 * sum(rows * columns * min(compression.rank, rows, columns) for rows, columns in matrices)
    orthogonal = 4.0 * sum(rows * min(compression.rank, rows, columns) ** 2 for rows, columns in matrices)
    return CodecWork(
        encode=Work(product, 0, 2 * batches) + error,
        decode=Work(product, num_bytes, 2 * batches),
        between=Work(product + orthogonal, 0, (1 + 4 * compression.rank) * batches),
        after=(Work(product, 0, batches) + error) if compression.error_feedback else Work(),
    )
