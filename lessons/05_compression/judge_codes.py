"""Name what is wrong in the codes of lesson 5's checks: packing, rounding and signs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from distlab_lesson_05 import cases
from distlab_lesson_05.judges import explain, unchanged
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.traffic import in_megabytes, num_calls, over_budget, sent_bytes, sent_line
from distlab.grading.values import compare, first_difference_between_ranks


def unpack(packed: Tensor, bits: int, length: int, *, highest_first: bool = False) -> Tensor:
    """Take codes out of bytes: slow and plain, code by code."""
    places = range(0, 8, bits)
    shifts = [8 - bits - place if highest_first else place for place in places]
    codes = [(int(byte) >> shift) % 2**bits for byte in packed for shift in shifts]
    return torch.tensor(codes[:length], dtype=torch.uint8)


def judge_pack(evidence: Evidence) -> Iterator[Fault]:
    """As many bytes as needed, and every code in its place."""
    for (length, bits), (got, kept) in zip(cases.PACK_CASES, evidence.results[0], strict=True):
        fault = _judge_packed(got, length, bits)
        if fault is not None:
            yield fault
            return
        yield from unchanged([kept], "list of codes")


def _judge_packed(got: Any, length: int, bits: int) -> Fault | None:
    codes, size = cases.codes_of(length, bits), -(-length * bits // 8)
    asked = f"pack_codes of {length} codes of {bits} bits"
    if not isinstance(got, Tensor) or got.ndim != 1 or got.dtype != torch.uint8:
        return compare(got, torch.zeros(size, dtype=torch.uint8), asked)
    if bits < 8 and torch.equal(got, codes) and len(got) > size:
        return Fault("not packed", f"{asked} returned a byte a code: {len(got)} bytes where {size} are enough")
    if len(got) == length * bits // 8 < size:
        return Fault(
            "tail lost", f"{asked} returned {len(got)} bytes: the last codes fill no whole byte; it counts too"
        )
    if len(got) != size:
        return Fault("shape", f"{asked} returned {len(got)} bytes, expected ceil({length} x {bits} / 8) = {size}")
    if torch.equal(unpack(got, bits, length), codes):
        return None
    if torch.equal(unpack(got, bits, length, highest_first=True), codes):
        text = f"{asked}: the first code is in the byte's highest bits"
        return Fault("order in the byte", f"{text}; the decoder looks for it in the lowest: shift code i by i x bits")
    padded = torch.cat([torch.zeros(-length % (8 // bits), dtype=torch.uint8), codes])
    if torch.equal(unpack(got, bits, len(padded)), padded):
        return Fault("padded in front", f"{asked}: the missing codes are filled in at the front; fill up at the end")
    columns = torch.cat([codes, torch.zeros(-length % (8 // bits), dtype=torch.uint8)]).view(8 // bits, -1).T.flatten()
    if torch.equal(unpack(got, bits, len(columns)), columns):
        text = f"{asked}: neighbours lie in different bytes"
        return Fault("columns", f"{text}; put codes that follow each other into one byte: view(-1, {8 // bits})")
    found = unpack(got, bits, length)
    place = int((found != codes).nonzero()[0])
    text = f"{asked}: code {place} is {int(codes[place])} and comes out as {int(found[place])}"
    return Fault("codes overlap", f"{text}: code i of a byte begins at bit i x {bits}; do two of them share bits?")


def budget_pack(evidence: Evidence) -> list[str]:
    """Say how much smaller the codes have become."""
    return [f"{bits}-bit codes: {8 // bits} a byte" for bits in (1, 2, 4)]


def quantize_bytes(world_size: int) -> int:
    """Return what a rank sends in all cases: two numbers and the packed codes, to each of the others."""
    return (world_size - 1) * sum(8 + -(-cases.QUANTIZE_LENGTH * bits // 8) for _, bits in cases.QUANTIZE_CASES)


class _Coded:
    """A rank's gradient in codes, and the size of one step."""

    def __init__(self, own: Tensor, bits: int) -> None:
        self.own, self.low, self.levels = own, own.min(), 2**bits
        self.step = (own.max() - self.low) / (2**bits - 1)
        exact = (own - self.low) / self.step if self.step > 0 else torch.zeros_like(own)
        self.codes, self.floor, self.ceil = exact.round(), exact.floor(), exact.ceil()

    def decode(self, codes: Tensor, low: Tensor | None = None, step: Tensor | None = None) -> Tensor:
        """Turn codes into values, with this rank's two numbers or others."""
        return (self.low if low is None else low) + (self.step if step is None else step) * codes

    def shortened(self, *, wrap: bool = False) -> Tensor:
        """Round with steps of range / 2**bits: the largest value has no code, and gets the last one or the first."""
        step = self.step * (self.levels - 1) / self.levels
        codes = ((self.own - self.low) / step).round() if step > 0 else torch.zeros_like(self.own)
        return self.low + step * (codes % self.levels if wrap else codes.clamp(max=self.levels - 1))


def judge_quantize(evidence: Evidence) -> Iterator[Fault]:
    """Every rank must have the mean to within half a step, for two numbers and packed codes."""
    n = evidence.world_size
    for index, (kind, bits) in enumerate(cases.QUANTIZE_CASES):
        coded = [_Coded(cases.quantize_input(rank, kind), bits) for rank in range(n)]
        for rank, result in enumerate(evidence.results):
            fault = _judge_rounded(result["means"][index], coded, kind, bits, rank)
            if fault is None and rank == 0 and num_calls(evidence, "all_reduce"):
                fault = Fault("codes summed", "all_reduce is called: codes of different ranks mean different values")
            if fault is not None:
                yield _summed(fault) if num_calls(evidence, "all_reduce") else fault
                return
    fault = first_difference_between_ranks([result["means"] for result in evidence.results], "mean")
    if fault is not None:
        yield fault
        return
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted = quantize_bytes(n)
    whole = (n - 1) * len(cases.QUANTIZE_CASES) * (8 + cases.QUANTIZE_LENGTH)
    if n > 1 and max(sent_bytes(evidence, rank) for rank in evidence.records.ranks) >= 0.99 * whole:
        text = f"right values, but {in_megabytes(whole)} or more sent a rank: a byte or more for each code, however"
        yield Fault("not packed", f"{text} few bits it has; pack_bits makes them {in_megabytes(wanted)}")
        return
    over = over_budget(evidence, wanted, "two numbers and packed codes")
    if over is not None:
        yield over


def _summed(fault: Fault) -> Fault:
    text = "each rank's codes count in its own steps from its own smallest value, so a sum of codes (all_reduce) means"
    return Fault("codes summed", f"{text} nothing: all_gather them, decode each, then add. {fault.message}")


def _judge_rounded(got: Any, coded: Sequence[_Coded], kind: str, bits: int, rank: int) -> Fault | None:
    n = len(coded)
    what = f"rank {rank}: the mean with {bits} bits"
    want = torch.stack([one.decode(one.codes) for one in coded]).mean(0)
    fault = compare(got, want, what, n)
    if fault is None or fault.code in ("returned", "shape", "dtype", "device", "layout"):
        return fault
    if fault.code == "nan" or bool(got.isinf().any()):
        cause = f"{what} is not a number where all elements are equal" if kind == "equal" else f"{what} is not a number"
        return Fault("step of zero", f"{cause}: the step from min to max is 0, and 0 / 0 is NaN; then every code is 0")
    mean = torch.stack([one.own for one in coded]).mean(0)
    half = float(torch.stack([one.step for one in coded]).mean()) / 2
    if float((got - mean).abs().max()) <= half * 1.001 + 1e-5:
        return None
    named = explain(got, want, _rounding_mistakes(coded, rank), what=what, world_size=n)
    assert named is not None
    limit = f"; it is off from the true mean by up to {float((got - mean).abs().max()):.3g}, where rounding to the"
    limit += f" nearest level allows half a step, {half:.3g}"
    return named if named.code not in ("values", "order") else Fault(named.code, named.message + limit)


def _rounding_mistakes(coded: Sequence[_Coded], rank: int) -> dict[str, tuple[Tensor, str]]:
    def mean(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean(0)

    signed = [torch.where(one.codes > 127, one.codes - 256, one.codes) for one in coded]
    mine = coded[rank]
    down = "is too small by half a step on average: codes are cut off, not rounded; .round() before .to(torch.uint8)"
    over = "comes out 256 steps too low where a code is above 127: int8 holds -128 to 127; codes need uint8"
    sign = "is off by twice the smallest value: encoding subtracts it, so decoding adds it"
    none = "starts at 0 instead of the smallest value: decoding must add it again"
    alien = (
        "decodes every rank's codes with this rank's own smallest value and step; use those that came with the codes"
    )
    others = "is this rank's own gradient, rounded: nothing of the others reached it"
    many = "has steps of range / 2**bits: 2**bits levels have one step less between them, so divide by 2**bits - 1"
    return {
        "a step too many": (mean([one.shortened() for one in coded]), many),
        "a step too many, wrapped": (mean([one.shortened(wrap=True) for one in coded]), many),
        "rounded up": (mean([one.decode(one.ceil) for one in coded]), "is too large: codes are rounded up; .round()"),
        "rounded down": (mean([one.decode(one.floor) for one in coded]), down),
        "int8 overflow": (mean([one.decode(codes) for one, codes in zip(coded, signed, strict=True)]), over),
        "sign of the offset": (mean([one.decode(one.codes, low=-one.low) for one in coded]), sign),
        "offset forgotten": (mean([one.step * one.codes for one in coded]), none),
        "own step for all": (mean([mine.decode(one.codes) for one in coded]), alien),
        "not communicated": (mine.decode(mine.codes), others),
    }


def budget_quantize(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    line = sent_line(evidence, quantize_bytes(evidence.world_size), "two numbers and packed codes")
    return [f"{line}, in {len(cases.QUANTIZE_CASES)} calls of {cases.QUANTIZE_LENGTH} elements"]


def sign_bytes(world_size: int) -> int:
    """Return what a rank sends: a number and a bit an element, to each of the others."""
    return (world_size - 1) * (4 + -(-cases.SIGN_LENGTH // 8))


def judge_signs(evidence: Evidence) -> Iterator[Fault]:
    """Every rank must have the mean of all ranks' signs times magnitudes, for a bit an element."""
    n = evidence.world_size
    own = [result["own"] for result in evidence.results]
    signs = [torch.where(vector >= 0, 1.0, -1.0) for vector in own]
    sizes = [vector.abs().mean() for vector in own]

    def mean(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean(0)

    want = mean([size * sign for size, sign in zip(sizes, signs, strict=True)])
    wrapped = [torch.where(sign > 0, 1.0, 255.0) for sign in signs]
    bits = [torch.where(sign > 0, 1.0, 0.0) for sign in signs]
    vote = torch.where(torch.stack(signs).sum(0) >= 0, 1.0, -1.0)
    for rank, result in enumerate(evidence.results):
        known = {
            "unsigned arithmetic": (
                mean([size * sign for size, sign in zip(sizes, wrapped, strict=True)]),
                "comes out 255 times the magnitude where a rank's element is negative: 2 * 0 - 1 in uint8 is 255, not"
                " -1; turn the bits into floating point before you calculate with them",
            ),
            "zero for negative": (
                mean([size * bit for size, bit in zip(sizes, bits, strict=True)]),
                "counts a rank's negative element as 0: a bit of 0 means -1",
            ),
            "own magnitude for all": (
                mean([sizes[rank] * sign for sign in signs]),
                "uses this rank's own magnitude for everybody's signs; use the one that came with them",
            ),
            "largest magnitude": (
                mean([vector.abs().max() * sign for vector, sign in zip(own, signs, strict=True)]),
                "uses each rank's largest magnitude: asked is the mean magnitude, gradient.abs().mean()",
            ),
            "one magnitude for all": (
                mean(sizes) * mean(signs),
                "uses the mean of all ranks' magnitudes: each rank's signs count with the one that came with them",
            ),
            "majority": (mean(sizes) * vote, "is a majority vote: asked is the mean, in which large ranks count more"),
            "majority, bare": (vote, "is a majority vote without any magnitude"),
            "magnitude lost": (mean(signs), "is the mean of bare signs: multiply each rank's by its magnitude"),
            "not communicated": (sizes[rank] * signs[rank], "is made of this rank's signs alone"),
        }
        fault = explain(result["mean"], want, known, what="the mean", world_size=n)
        if fault is not None:
            yield Fault(fault.code, f"rank {rank}: {fault.message}")
            return
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted = sign_bytes(n)
    most = max((sent_bytes(evidence, rank) for rank in evidence.records.ranks), default=0)
    if n > 1 and most >= 0.99 * min(n - 1, 2) * cases.SIGN_LENGTH:
        text = f"right values, but {in_megabytes(most)} sent a rank: a byte or more for each sign"
        yield Fault("not packed", f"{text}; pack_bits puts 8 into a byte: {in_megabytes(wanted)}")
        return
    over = over_budget(evidence, wanted, "a number and a bit an element")
    if over is not None:
        yield over


def budget_signs(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    return [sent_line(evidence, sign_bytes(evidence.world_size), "a number and a bit an element")]
