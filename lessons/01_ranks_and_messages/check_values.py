"""How the other exercises are driven, and how their faults are told apart: fit, gather and should_stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from distlab_lesson_01.check_messages import TO_ITSELF, deadlock, from_scratch, never_waited, on_ranks, waiting
from torch import Tensor

from distlab.grading import Evidence, Fault
from distlab.grading.values import compare, seeded

if TYPE_CHECKING:
    from distlab.comm import RankError

SIZES = tuple(float(4**k) for k in range(5, 13))  # 1 KiB to 16 MiB
LINKS = ((20e-6, 2e9), (5e-6, 25e9))  # alpha in seconds, beta in bytes a second
NOISE = (1.06, 0.95, 1.03, 0.94, 1.05, 0.97, 1.02, 0.96)  # a measured time over the true one
NUM_STEPS = 5
Floats = Sequence[float]


# 01.fit


def fit_cases() -> list[tuple[list[float], list[float]]]:
    """Return two exact links, and the first one again as if measured."""
    exact = [(list(SIZES), [alpha + size / beta for size in SIZES]) for alpha, beta in LINKS]
    sizes, times = exact[0]
    return [*exact, (sizes, [seconds * noise for seconds, noise in zip(times, NOISE, strict=True)])]


def drive_fit(fn: Callable[[Floats, Floats], Any]) -> list[Any]:
    """Fit every case."""
    return [fn(sizes, times) for sizes, times in fit_cases()]


def judge_fit(evidence: Evidence) -> Iterator[Fault]:
    """Look at the exact links first: their numbers tell what was confused with what."""
    pairs = []
    for result in evidence.results[0]:
        try:
            alpha_s, beta = (float(number) for number in result)
        except (TypeError, ValueError):
            yield Fault(
                "not a pair", f"fit returns {result!r}; return two numbers: alpha in seconds, beta in bytes a second"
            )
            return
        pairs.append((alpha_s, beta))
    for (alpha_s, beta), link in zip(pairs, LINKS, strict=False):
        yield from _judge_link(alpha_s, beta, *link)
    yield from _judge_noisy(*pairs[2])


def _is_near(got: float, want: float) -> bool:
    return abs(got - want) <= 1e-6 * abs(want)


def _judge_link(alpha_s: float, beta: float, true_alpha_s: float, true_beta: float) -> Iterator[Fault]:
    """Name what stands where alpha or beta should, for times without noise."""
    if _is_near(alpha_s, true_alpha_s) and _is_near(beta, true_beta):
        return
    true = f"alpha = {true_alpha_s:g} s, beta = {true_beta:g} B/s"
    got = f"on exact times of {true} fit returns ({alpha_s:.6g}, {beta:.6g})"
    if _is_near(beta, true_alpha_s) or (_is_near(alpha_s, true_beta) or _is_near(alpha_s, 1 / true_beta)):
        yield Fault("swapped", f"{got}: alpha and beta have changed places; return (alpha, beta)")
    elif _is_near(beta, 1 / true_beta):
        yield Fault(
            "slope", f"{got}: the second number is the slope, seconds a byte; beta is 1 / slope, bytes a second"
        )
    elif _is_near(beta, 8 * true_beta):
        yield Fault("bits", f"{got}: that is bits a second, 8 times the bytes; divide by 8")
    elif _is_near(beta, true_beta / 8):
        yield Fault("bits", f"{got}: the bytes were divided by 8 as if they were bits; leave them as they are")
    elif alpha_s == 0:
        yield Fault("no latency", f"{got}: the line was forced through zero; a message of no bytes still takes alpha")
    elif _is_near(alpha_s, 1e3 * true_alpha_s) or _is_near(alpha_s, 1e6 * true_alpha_s):
        yield Fault("not seconds", f"{got}: alpha is {alpha_s / true_alpha_s:.0f}x too large; return it in seconds")
    else:
        yield Fault("not the line", f"{got}; the line through these points fits them exactly")


def _judge_noisy(alpha_s: float, beta: float) -> Iterator[Fault]:
    """Name a fit of something else than relative errors, for times with noise of some per cent."""
    sizes, times = (np.array(column) for column in fit_cases()[2])
    slope, start = np.polyfit(sizes, times, 1, w=1 / times)
    if abs(alpha_s / start - 1) < 1e-4 and abs(beta * slope - 1) < 1e-4:
        return
    want = f"({start:.4g}, {1 / slope:.4g})"
    got = f"exact times fit, but times with 6 % noise give ({alpha_s:.4g}, {beta:.4g}), expected {want}"
    plain_slope, plain_start = np.polyfit(sizes, times, 1)
    ends_slope = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    if abs(beta * ends_slope - 1) < 1e-4:
        yield Fault("two points", f"{got}: only the smallest and the largest message were used; use all {len(sizes)}")
    elif abs(alpha_s - plain_start) < 1e-4 * abs(plain_start) and abs(beta * plain_slope - 1) < 1e-4:
        words = "absolute errors were squared, so the largest message decides alone and alpha is left to chance"
        yield Fault("absolute errors", f"{got}: {words}; divide each row by its time")
    else:
        yield Fault("not least squares", f"{got}; make the sum of ((alpha + size / beta) / time - 1)^2 smallest")


def fit_budget(evidence: Evidence) -> list[str]:
    """Say how well the noisy times were fitted."""
    alpha_s, beta = evidence.results[0][2]
    return [f"from times with 6 % noise: alpha {alpha_s * 1e6:.1f} us (true 20), beta {beta / 1e9:.2f} GB/s (true 2)"]


# 01.gather


def drive_gather(fn: Callable[[Tensor, int], Any]) -> list[Any]:
    """Gather at the first rank and at the last; later ranks begin earlier, so that they also arrive earlier."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    results = []
    for root in (0, world_size - 1):
        dist.barrier()
        time.sleep(0.03 * (world_size - 1 - rank))
        results.append(fn(gathered(rank), root))
    return results


def gathered(rank: int) -> Tensor:
    """Return what a rank gives."""
    return seeded(rank, 6, 4, purpose="gather")


def judge_gather(evidence: Evidence) -> Iterator[Fault]:
    """Look at who returns what, then at the order, then at the messages."""
    n = evidence.world_size
    yield from never_waited(evidence)
    for number, root in enumerate((0, n - 1)):
        returned = [evidence.results[rank][number] for rank in range(n)]
        yield from _judge_who(returned, root)
        yield from _judge_list(returned[root], root, n)
    yield from from_scratch(evidence)
    for rank in range(n):
        want = (0 if rank == 0 else 1) + (0 if rank == n - 1 else 1)
        sends = sum(call.op == "send" for call in evidence.records.calls(rank))
        if sends != want:
            text = f"right lists, but rank {rank} sends {sends} messages in two gathers (to root 0 and root {n - 1})"
            yield Fault("too many messages", f"{text}; expected {want}: its tensor once to each root that it is not")


def _judge_who(returned: Sequence[Any], root: int) -> Iterator[Fault]:
    having = [rank for rank, value in enumerate(returned) if value is not None]
    if having == [root]:
        return
    if root not in having and len(having) == 1:
        text = f"with root={root} the list is on rank {having[0]}: the argument root is not used everywhere"
        yield Fault("root ignored", f"{text}; replace the fixed number by root")
    elif root not in having:
        yield Fault(
            "nothing at the root", f"with root={root} rank {root} returns None; it returns the list of all tensors"
        )
    else:
        others = [rank for rank in having if rank != root]
        yield Fault("not only the root", f"with root={root} ranks {others} return something too; they return None")


def _judge_list(got: Any, root: int, n: int) -> Iterator[Fault]:
    if got is None:
        return
    if not isinstance(got, list | tuple) or not all(isinstance(tensor, Tensor) for tensor in got):
        yield Fault("not a list", f"rank {root} returns a {type(got).__name__}; return a list of {n} tensors")
        return
    want = [gathered(rank) for rank in range(n)]
    if len(got) != n:
        own = not any(torch.equal(tensor, want[root]) for tensor in got)
        why = f"; the root's own tensor is missing: put it at place {root}" if own and len(got) == n - 1 else ""
        yield Fault("wrong length", f"rank {root} returns {len(got)} tensors where {n} were expected{why}")
        return
    whose = [next((rank for rank in range(n) if torch.equal(tensor, want[rank])), None) for tensor in got]
    if whose == list(range(n)):
        return
    senders = [rank for place, rank in enumerate(whose) if place != root]
    if len(senders) > 1 and None not in senders and len(set(senders)) == 1:
        text = f"rank {root} received {len(senders)} tensors and all are rank {senders[0]}'s, the last that came"
        yield Fault("one buffer", f"{text}: each message needs a tensor of its own; call torch.empty_like for each")
    elif sorted(rank for rank in whose if rank is not None) == list(range(n)):
        text = f"rank {root} has the tensors in the order of ranks {whose}; expected {list(range(n))}"
        yield Fault("wrong order", f"{text}. Messages come in any order: say from whom each receive is")
    else:
        for rank, (one, other) in enumerate(zip(got, want, strict=True)):
            fault = compare(one, other, what=f"place {rank} of the list on rank {root}", world_size=n)
            if fault is not None:
                yield fault


def gather_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a hang, and a root that sends to itself."""
    if TO_ITSELF.search(str(error)):
        text = f"{on_ranks(world_size)} the root sends to or receives from itself, which torch cannot do"
        return Fault("itself", f"{text}; put a copy of its own tensor in the list")
    return deadlock(error, world_size, "Every rank but root sends once, and root receives once from each of them")


def gather_budget(evidence: Evidence) -> list[str]:
    """Say what was sent."""
    num_bytes = gathered(0).nbytes
    return [f"{evidence.world_size - 1} messages of {num_bytes} bytes a gather; the root sends none"]


# 01.repair


def losses(rank: int) -> list[float]:
    """Return a rank's loss after each step: falling, and higher on higher ranks."""
    return [4 / (1 + step) + rank for step in range(NUM_STEPS)]


def threshold_of(world_size: int) -> float:
    """Return a threshold that the mean loss passes in the third step."""
    return 1.9 + (world_size - 1) / 2


def drive_should_stop(fn: Callable[[Tensor, float], Any]) -> list[tuple[Any, bool]]:
    """Ask after each step, whatever the answers; return them, and whether the loss stayed as it was."""
    seen, rank, threshold = [], dist.get_rank(), threshold_of(dist.get_world_size())
    for value in losses(rank):
        loss = torch.tensor(value, dtype=torch.float64)
        answer = fn(loss, threshold)
        seen.append((bool(answer) if isinstance(answer, bool | Tensor | np.bool_) else answer, float(loss) == value))
    return seen


def judge_should_stop(evidence: Evidence) -> Iterator[Fault]:
    """Look at what all ranks decided after each step."""
    n, limit = evidence.world_size, threshold_of(evidence.world_size)
    answers = [[answer for answer, _ in result] for result in evidence.results]
    sums = [sum(losses(rank)[step] for rank in range(n)) for step in range(NUM_STEPS)]
    for rank, own in enumerate(answers):
        if any(not isinstance(answer, bool) for answer in own):
            yield Fault("not a decision", f"rank {rank} returns {own[0]!r}; return True or False")
            return
    if n > 1 and not len(evidence.records):
        yield Fault("not communicated", f"on {n} ranks nothing is sent: each rank decides from its own loss alone")
    for step in range(NUM_STEPS):
        decided = [own[step] for own in answers]
        if len(set(decided)) > 1:
            words = ", ".join(f"rank {rank} {'stops' if stop else 'goes on'}" for rank, stop in enumerate(decided))
            text = f"after step {step + 1} the ranks decide differently: {words}. Those that go on wait for ever"
            yield Fault("ranks disagree", f"{text} for those that left: every rank needs the same mean")
            return
    wrong = [step for step in range(NUM_STEPS) if answers[0][step] != (sums[step] / n < limit)]
    if wrong and all(answers[0][step] == (sums[step] < limit) for step in range(NUM_STEPS)):
        text = f"after step {wrong[0] + 1} the mean loss is {sums[wrong[0]] / n:.2f}, the threshold {limit:.2f}"
        yield Fault("sum not mean", f"{text}, but the sum over {n} ranks is compared; divide by world_size")
    elif wrong:
        mean, answer = sums[wrong[0]] / n, answers[0][wrong[0]]
        text = (
            f"after step {wrong[0] + 1} the mean loss is {mean:.2f}, the threshold {limit:.2f}, and the answer {answer}"
        )
        yield Fault("wrong decision", f"{text}; return mean < threshold")
    for rank, result in enumerate(evidence.results):
        if not all(unchanged for _, unchanged in result):
            text = f"right answers, but rank {rank}'s loss was overwritten by the collective"
            yield Fault("argument changed", f"{text}: the caller still needs it; communicate a copy (loss.clone())")


def should_stop_failure(error: RankError, world_size: int) -> Fault | None:
    """Name a collective that only some ranks call."""
    text = str(error)
    if "has returned without it" in text or "do not make the same call" in text:
        who = waiting(error) or "one rank waits in a collective"
        words = (
            f"{on_ranks(world_size)} {who}; the others never call it. A collective is called by every rank of the group"
        )
        return Fault("not on every rank", f"{words}: take it out of the `if`")
    return None


def should_stop_budget(evidence: Evidence) -> list[str]:
    """Say how many collectives it took."""
    return [f"{evidence.records.num_calls() / evidence.world_size / NUM_STEPS:g} call a step and rank, of one number"]
