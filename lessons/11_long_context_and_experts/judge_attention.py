"""Name what is wrong with two attentions that are merged, and with the positions that ranks hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from distlab_lesson_11 import cases
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.values import compare, describe, equal

FIRST = "two parts"


def same(got: Any, want: Tensor) -> bool:
    """Whether it is such a tensor."""
    return isinstance(got, Tensor) and got.shape == want.shape and got.dtype == want.dtype and equal(got, want)


def judge_merge(evidence: Evidence) -> Iterator[Fault]:
    """The mean and the log_sum over both, with large scores and with none visible."""
    for name, (*parts, want) in cases.merge_cases().items():
        got, kept = evidence.results[0][name]
        if not isinstance(got, tuple | list) or len(got) != 2:
            yield Fault("returned", f"{name}: expected (mean, log_sum), got {describe(got)}")
            return
        if not kept:
            yield Fault("changed argument", f"{name}: an argument was changed in place; make new tensors")
            return
        fault = _merged_fault(list(got), parts, want, name)
        if fault is not None:
            yield fault
            return


def _merged_fault(got: list[Any], parts: list[Tensor], want: tuple[Tensor, Tensor], name: str) -> Fault | None:
    finite = all(isinstance(one, Tensor) and bool(one.isfinite().all()) for one in got)
    if not finite and name == "large scores" and all(isinstance(one, Tensor) for one in got):
        top = float(want[1].max())
        text = f"{name}: exp({top:.0f}) is no number, and inf / inf is NaN; only differences may go through exp:"
        return Fault("overflow", f"{text} subtract the larger log_sum first (torch.logaddexp does)")
    if not finite and name.startswith("a part") and all(isinstance(one, Tensor) for one in got):
        text = f"{name}: NaN where one log_sum is -inf: that part has a share of exp(-inf) = 0,"
        return Fault("nothing visible", f"{text} and the other one counts alone")
    mean, log_sum, new, new_log_sum = parts
    fault = compare(got[0], want[0], f"{name}: the mean")
    if fault is not None:
        return _slip_of_mean(got[0], parts, name) or fault
    fault = compare(got[1], want[1], f"{name}: the log_sum")
    if fault is None:
        return None
    words = {
        "log_sum added": (log_sum + new_log_sum, "adds two logarithms, which multiplies the sums: log(a b), not log"),
        "larger log_sum": (
            torch.maximum(log_sum, new_log_sum),
            "is the larger of the two; the smaller counts too: log",
        ),
        "old log_sum": (log_sum, "is that of the first part alone: log"),
        "new log_sum": (new_log_sum, "is that of the second part alone: log"),
        "maximum not added back": (
            torch.log1p((log_sum - new_log_sum).abs().neg().exp()),
            "had the larger one subtracted, for exp, and never added back: log",
        ),
        "no logarithm": (
            log_sum.exp() + new_log_sum.exp(),
            "is the sum itself, which overflows; keep its logarithm, log",
        ),
    }
    for code, (wrong, text) in words.items():
        if same(got[1], wrong):
            return Fault(code, f"{name}: the log_sum {text}(exp(log_sum) + exp(new_log_sum))")
    return fault


def _slip_of_mean(got: Any, parts: list[Tensor], name: str) -> Fault | None:
    mean, log_sum, new, new_log_sum = parts
    share = torch.sigmoid(log_sum - new_log_sum)[..., None]
    largest, total = torch.maximum(log_sum, new_log_sum), torch.logaddexp(log_sum, new_log_sum)
    by_largest = (log_sum - largest).exp()[..., None] * mean + (new_log_sum - largest).exp()[..., None] * new
    by_logs = (log_sum[..., None] * mean + new_log_sum[..., None] * new) / (log_sum + new_log_sum)[..., None]
    words = {
        "plain mean": ((mean + new) / 2, "counts both parts alike, however much weight their keys have: each counts"),
        "plain sum": (mean + new, "is the sum of both means; weights must add up to 1 over all keys: each counts"),
        "shares not divided": (
            by_largest,
            "weighs with exp(its log_sum - the larger one), which do not add up to 1: each counts",
        ),
        "first mean not rescaled": (
            mean + (new_log_sum - total).exp()[..., None] * new,
            "leaves the first mean the weight it had alone, though keys were added: each counts",
        ),
        "second mean not rescaled": (
            (log_sum - total).exp()[..., None] * mean + new,
            "gives the second mean the weight it had alone, though it joins other keys: each counts",
        ),
        "shares swapped": ((1 - share) * mean + share * new, "gives each part the other's share: each counts"),
        "logarithms as shares": (by_logs, "takes logarithms for shares; exp of them are the sums: each counts"),
    }
    for code, (wrong, text) in words.items():
        if same(got, wrong):
            return Fault(code, f"{name}: the mean {text} with exp(its log_sum - the total)")
    return None


def budget_merge(evidence: Evidence) -> list[str]:
    """Say what was tried."""
    return [f"exact on {len(evidence.results[0])} cases: scores of hundreds, and queries that see no key of a part"]


def work_of(positions: Tensor) -> int:
    """Return how many keys the queries at these positions see, all together."""
    return int((positions + 1).sum())


def judge_zigzag(evidence: Evidence) -> Iterator[Fault]:
    """Every position on one rank, the same work for all, ascending."""
    for (length, n), found in zip(cases.ZIGZAG_CASES, evidence.results[0], strict=True):
        what = f"{length} positions on {n} rank{'s' * (n > 1)}"
        for rank, got in enumerate(found):
            if not isinstance(got, Tensor) or got.dtype != torch.int64 or got.shape != (length // n,):
                text = f"{what}: expected {length // n} whole numbers in a tensor for rank {rank}, got {describe(got)}"
                yield Fault("returned", text)
                return
        fault = _placed_fault(found, length, n, what)
        if fault is not None:
            yield fault
            return


def _placed_fault(found: list[Tensor], length: int, n: int, what: str) -> Fault | None:
    chunks = torch.arange(length).view(2 * n, -1)
    want = [torch.cat([chunks[rank], chunks[2 * n - 1 - rank]]) for rank in range(n)]
    if all(map(torch.equal, found, want)):
        return None
    work = ", ".join(str(work_of(one)) for one in found)
    every = torch.cat(found).sort().values
    if not torch.equal(every, torch.arange(length)):
        missing = sorted(set(range(length)) - set(every.tolist()))
        if missing:
            text = f"{what}: position {missing[0]} is on no rank"
            return Fault("positions lost", f"{text}; each of the 2n chunks belongs to one rank: r and 2n - 1 - r")
        return Fault("past the end", f"{what}: there are positions 0 to {length - 1} alone, got {int(every[-1])}")
    if all(torch.equal(one.sort().values, other) for one, other in zip(found, want, strict=True)):
        rank = next(rank for rank, pair in enumerate(zip(found, want, strict=True)) if not torch.equal(*pair))
        text = f"{what}: rank {rank} holds the right positions, in the order {found[rank].tolist()}"
        return Fault("not ascending", f"{text}; ascending, its own part is an ordinary causal attention")
    if torch.equal(torch.cat(found), torch.arange(length)):
        text = f"{what}: straight pieces: queries see {work} keys. The last rank has the most, and all wait for it"
        return Fault("uneven work", f"{text}; give a rank an early chunk and a late one")
    striped = torch.arange(length).view(-1, n).T
    if all(map(torch.equal, found, striped)):
        text = f"{what}: in stripes queries see {work} keys: nearly even, but the mask cuts through every block"
        return Fault("stripes", f"{text}; two whole chunks a rank leave blocks that are seen in full, or not at all")
    if len({work_of(one) for one in found}) > 1:
        text = f"{what}: queries see {work} keys. Who has the earliest chunk must have the latest: chunks r and"
        return Fault("uneven work", f"{text} 2n - 1 - r, not r and n + r")
    return Fault("other order", f"{what}: even work, but chunks r and 2n - 1 - r were asked for rank r")


def budget_zigzag(evidence: Evidence) -> list[str]:
    """Say how even it is."""
    length, n = cases.ZIGZAG_CASES[0]
    work = {work_of(one) for one in evidence.results[0][0]}
    straight = [work_of(one) for one in torch.arange(length).view(n, -1)]
    return [f"{length} positions on {n} ranks: queries of each see {work.pop()} keys (straight: {straight})"]
