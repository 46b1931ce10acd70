"""Codes of few bits: packing them into bytes, and rounding to levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from distlab_lesson_05.checks.shared import Known, called, explain, gradient_of, unchanged
from torch import Tensor

from distlab.grading import Evidence, Fault, Mutant
from distlab.grading.diagnosis.faults import found
from distlab.grading.diagnosis.traffic import calls, in_megabytes, most_sent, over_budget, sent_line
from distlab.grading.diagnosis.values import compare, first_difference_between_ranks, seeded

QUANTIZE_LENGTH = 1001
QUANTIZE_CASES = (("normal", 8), ("normal", 4), ("normal", 1), ("equal", 4))
PACK_CASES = tuple((length, bits) for bits in (4, 1, 2, 8) for length in (8, 9, 1, 24))


def codes_of(length: int, bits: int) -> Tensor:
    """Make codes of so many bits, among them the largest."""
    codes = (seeded(0, length, purpose=f"codes {bits}").abs() * 1000).long() % 2**bits
    codes[0] = 2**bits - 1
    return codes.to(torch.uint8)


def drive_pack(fn: Callable[[Tensor, int], Any]) -> list[tuple[Any, bool]]:
    """Call fn on codes of several lengths and widths; return what it returned and whether the codes are as before."""
    runs = [called(fn, codes_of(length, bits), bits) for length, bits in PACK_CASES]
    return [(run["mean"], run["kept"]) for run in runs]


def quantize_input(rank: int, kind: str) -> Tensor:
    """Make a gradient whose range differs between ranks, and whose values are not centred; or one of equal values."""
    if kind == "equal":
        return torch.full((QUANTIZE_LENGTH,), 0.5 + rank)
    return (rank + 1) * (gradient_of(rank, QUANTIZE_LENGTH, purpose="quantize") + 0.4)


def drive_quantize(fn: Callable[[Tensor, int], Any]) -> dict[str, Any]:
    """Call fn on gradients of different ranges, with several numbers of bits."""
    runs = [called(fn, quantize_input(dist.get_rank(), kind), bits) for kind, bits in QUANTIZE_CASES]
    return {"means": [run["mean"] for run in runs], "kept": all(run["kept"] for run in runs)}


def unpack(packed: Tensor, bits: int, length: int, *, highest_first: bool = False) -> Tensor:
    """Take codes out of bytes: slow and plain, code by code."""
    places = range(0, 8, bits)
    shifts = [8 - bits - place if highest_first else place for place in places]
    codes = [(int(byte) >> shift) % 2**bits for byte in packed for shift in shifts]
    return torch.tensor(codes[:length], dtype=torch.uint8)


def judge_pack(evidence: Evidence) -> Iterator[Fault]:
    """As many bytes as needed, and every code in its place."""
    for (length, bits), (got, kept) in zip(PACK_CASES, evidence.results[0], strict=True):
        yield from found(_judge_packed(got, length, bits))
        yield from unchanged([kept], "list of codes")


def _judge_packed(got: Any, length: int, bits: int) -> Fault | None:
    codes, size = codes_of(length, bits), -(-length * bits // 8)
    asked = f"pack_codes of {length} codes of {bits} bits"
    if not isinstance(got, Tensor) or got.ndim != 1 or got.dtype != torch.uint8:
        return compare(got, torch.zeros(size, dtype=torch.uint8), asked)
    if bits < 8 and torch.equal(got, codes) and len(got) > size:
        return Fault("not packed", f"{asked} returned one byte per code: {len(got)} bytes where {size} are enough")
    if len(got) == length * bits // 8 < size:
        advice = "the last codes fill no whole byte; it counts too"
        return Fault("tail lost", f"{asked} returned {len(got)} bytes: {advice}")
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
    unpacked = unpack(got, bits, length)
    place = int((unpacked != codes).nonzero()[0])
    text = f"{asked}: code {place} is {int(codes[place])} and comes out as {int(unpacked[place])}"
    return Fault("codes overlap", f"{text}: code i of a byte begins at bit i x {bits}; do two of them share bits?")


def budget_pack(evidence: Evidence) -> list[str]:
    """Say how much smaller the codes have become."""
    return [f"{bits}-bit codes: {8 // bits} per byte" for bits in (1, 2, 4)]


def quantize_bytes(world_size: int) -> int:
    """Return what a rank sends in all cases: two numbers and the packed codes, to each of the others."""
    return (world_size - 1) * sum(8 + -(-QUANTIZE_LENGTH * bits // 8) for _, bits in QUANTIZE_CASES)


class _Coded:
    """A rank's gradient in codes, and the size of one step."""

    def __init__(self, own: Tensor, bits: int) -> None:
        self.own, self.low, self.levels = own, own.min(), 2**bits
        self.step = (own.max() - self.low) / (2**bits - 1)
        exact = (own - self.low) / self.step if self.step > 0 else torch.zeros_like(own)
        self.codes, self.floor, self.ceil = exact.round(), exact.floor(), exact.ceil()

    def decode(self, codes: Tensor) -> Tensor:
        """Turn codes into values with this rank's two numbers."""
        return self.low + self.step * codes

    def shortened(self, *, wrap: bool = False) -> Tensor:
        """Round with steps of range / 2**bits: the largest value has no code, and gets the last one or the first."""
        step = self.step * (self.levels - 1) / self.levels
        codes = ((self.own - self.low) / step).round() if step > 0 else torch.zeros_like(self.own)
        return self.low + step * (codes % self.levels if wrap else codes.clamp(max=self.levels - 1))


def judge_quantize(evidence: Evidence) -> Iterator[Fault]:
    """Every rank must have the mean to within half a step, for two numbers and packed codes."""
    n = evidence.world_size
    for index, (kind, bits) in enumerate(QUANTIZE_CASES):
        coded = [_Coded(quantize_input(rank, kind), bits) for rank in range(n)]
        for rank, result in enumerate(evidence.results):
            fault = _judge_rounded(result["means"][index], coded, kind, bits, rank)
            if fault is not None and any(call.num_bytes > 8 for call in calls(evidence, rank, "all_reduce")):
                yield _summed(fault)
            yield from found(fault)
    yield from found(first_difference_between_ranks([result["means"] for result in evidence.results], "mean"))
    yield from unchanged([result["kept"] for result in evidence.results])
    wanted = quantize_bytes(n)
    whole = (n - 1) * len(QUANTIZE_CASES) * (8 + QUANTIZE_LENGTH)
    if n > 1 and most_sent(evidence) >= 0.99 * whole:
        text = f"right values, but {in_megabytes(whole)} or more sent per rank: a byte or more for each code, however"
        yield Fault("not packed", f"{text} few bits it has; pack_bits makes them {in_megabytes(wanted)}")
    yield from found(over_budget(evidence, wanted, "two numbers and packed codes"))


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
    named = explain(got, want, _rounding_mistakes(coded, rank), what, n)
    assert named is not None
    limit = f"; it is off from the true mean by up to {float((got - mean).abs().max()):.3g}, where rounding to the"
    limit += f" nearest level allows half a step, {half:.3g}"
    return named if named.code not in ("values", "order") else Fault(named.code, named.message + limit)


def _rounding_mistakes(coded: Sequence[_Coded], rank: int) -> Known:
    def mean(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).mean(0)

    signed = [torch.where(one.codes > 127, one.codes - 256, one.codes) for one in coded]
    mine = coded[rank]
    down = "is too small by half a step on average: codes are cut off, not rounded; .round() before .to(torch.uint8)"
    over = "comes out 256 steps too low where a code is above 127: int8 holds -128 to 127; codes need uint8"
    sign = "is off by twice the smallest value: encoding subtracts it, so decoding adds it"
    none = "starts at 0 instead of the smallest value: decoding must add it again"
    alien = "decodes every rank's codes with this rank's own smallest value and step;"
    alien += " use those that came with the codes"
    others = "is this rank's own gradient, rounded: nothing of the others reached it"
    many = "has steps of range / 2**bits: 2**bits levels have one step less between them, so divide by 2**bits - 1"
    return [
        ("a step too many", mean([one.shortened() for one in coded]), many),
        ("a step too many, wrapped", mean([one.shortened(wrap=True) for one in coded]), many),
        ("rounded up", mean([one.decode(one.ceil) for one in coded]), "is too large: codes are rounded up; .round()"),
        ("rounded down", mean([one.decode(one.floor) for one in coded]), down),
        ("int8 overflow", mean([one.decode(codes) for one, codes in zip(coded, signed, strict=True)]), over),
        ("sign of the offset", mean([one.decode(one.codes) - 2 * one.low for one in coded]), sign),
        ("offset forgotten", mean([one.step * one.codes for one in coded]), none),
        ("own step for all", mean([mine.decode(one.codes) for one in coded]), alien),
        ("not communicated", mine.decode(mine.codes), others),
    ]


def budget_quantize(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    line = sent_line(evidence, quantize_bytes(evidence.world_size), "two numbers and packed codes")
    return [f"{line}, in {len(QUANTIZE_CASES)} calls of {QUANTIZE_LENGTH} elements"]


WRONG_PACKS = (
    Mutant("highest bits first", "order in the byte", "looks for it in the lowest", 1).edit(
        "<< (bits * place)", "<< (8 - bits - bits * place)"
    ),
    Mutant("a byte each", "not packed", "returned one byte per code", 1, 51).body("return codes.clone()"),
    Mutant("tail lost", "tail lost", "the last codes fill no whole byte", 1)
    .edit("-(-codes.numel() // per_byte) * per_byte", "codes.numel() // per_byte * per_byte")
    .edit("full[: codes.numel()] = codes", "full[:] = codes[: len(full)]"),
    Mutant("shifted by place", "codes overlap", "share bits", 1).edit("(bits * place)", "place"),
    Mutant("filled in front", "padded in front", "fill up at the end", 1).edit(
        "full[: codes.numel()]", "full[full.numel() - codes.numel() :]"
    ),
    Mutant("changes its argument", "changed argument", "work on a copy", 1, 40).edit(
        "return packed", "codes.zero_()\nreturn packed"
    ),
)
WRONG_QUANTIZES = (
    Mutant("cut off", "rounded down", "cut off, not rounded", 1, 52).without(".round()"),
    Mutant("step of zero", "step of zero", "0 / 0 is NaN", 1, 65)
    .edit(
        "((gradient - low) / step).round() if step > 0 else torch.zeros_like(gradient)",
        "((gradient - low) / step).round()",
    )
    .edit("total / dist", "(total + 0 * codes) / dist"),
    Mutant("signed bytes", "int8 overflow", "codes need uint8", 1, 52).edit(
        "gradient.numel())", "gradient.numel()).to(torch.int8)"
    ),
    Mutant("sign of the offset", "sign of the offset", "decoding adds it", 1, 52).edit(
        "their_low + their_step", "-their_low + their_step"
    ),
    Mutant("codes summed", "codes summed", "decode each, then add", 2, 65).edit(
        "payload = torch.cat([",
        "dist.all_reduce(codes)\nreturn low + step * codes / dist.get_world_size()\npayload = torch.cat([",
    ),
    Mutant("own step for all", "own step for all", "those that came with the codes", 2, 65).edit(
        "theirs[:8].view(torch.float32)", "low, step"
    ),
    Mutant("not packed", "not packed", "a byte or more for each code", 2, 51)
    .edit("to(torch.uint8), bits)", "to(torch.uint8), 8)")
    .edit("theirs[8:], bits,", "theirs[8:], 8,"),
)
