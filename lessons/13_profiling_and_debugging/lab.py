"""Lab 13: train with a fault that is drawn from a seed, look at what your instruments say, and name the fault."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from distlab.course.lab import CommonSettings, Lab, flag, main
from distlab.data import ByteCorpus, python_documentation
from distlab.elastic.votes import bit_sum
from distlab.models import GPT, GPTConfig
from distlab.profile import Profile, Profiler, report
from distlab.trace import Trace

DRAWN = ("nothing", "slow rank", "slow loader", "no overlap", "flipped bit")
BY_RANK = ("slow rank", "slow loader", "flipped bit")
PARTS = 4  # in which gradients travel
SKIPPED = 2  # steps that warm up
CONFIG = GPTConfig(context=32, num_layers=2, num_heads=4, hidden_size=64, tied=False)


@dataclass(frozen=True)
class Settings(CommonSettings):
    """Train a small GPT with a fault that is drawn from a seed; name it with --answer.

    Attributes:
        seed: draws the fault, its rank and its step.
        fault: drawn, or this one: nothing, slow rank, slow loader, no overlap, flipped bit, or skipped call (it hangs).
        answer: what you think it is, such as "slow rank 2" or "no overlap"; the lab says whether that is right.
        steps: that are looked at.
        work_ms: how long a rank pretends to compute in each step; a third of it in forward.
    """

    seed: int = flag(0, least=0)
    fault: Literal["drawn", "nothing", "slow rank", "slow loader", "no overlap", "flipped bit", "skipped call"] = (
        "drawn"
    )
    answer: str = ""
    steps: int = flag(8, least=3)
    work_ms: int = flag(60, least=1)

    def __post_init__(self) -> None:
        kind = self.answer.rstrip("0123456789 ")
        if self.answer and kind not in DRAWN:
            raise ValueError(
                f"answer is {self.answer!r}; pass one of {', '.join(DRAWN)}, with a rank where one is to blame"
            )


class Hidden(NamedTuple):
    """The fault of a run.

    Attributes:
        kind: one of DRAWN, or "skipped call".
        rank: whose fault it is, or -1.
        step: of the flip.
    """

    kind: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind} {self.rank}" if self.kind in BY_RANK else self.kind


class Seen(NamedTuple):
    """What a run leaves on this rank: where time went, checksums [steps, tensors], the mean loss of the last step."""

    profile: Profile
    sums: Tensor
    loss: float


def drawn(settings: Settings, num_ranks: int) -> Hidden:
    """Return the fault that the seed draws; flips need three ranks, since two cannot outvote each other."""
    source = random.Random(f"{settings.seed} {num_ranks}")
    kinds = DRAWN if num_ranks > 2 else DRAWN[:-1]
    kind = source.choice(kinds) if settings.fault == "drawn" else settings.fault
    rank = source.randrange(num_ranks)
    return Hidden(kind, rank if kind in (*BY_RANK, "skipped call") else -1, source.randrange(settings.steps))


def run(lab: Lab[Settings]) -> None:
    """Train, show what the instruments say, and judge the answer."""
    hidden = drawn(lab.settings, lab.member.world_size)
    if hidden.kind == "skipped call":
        hang(lab, hidden)
    seen = train(lab, hidden)
    steps, middle = lab.member.spans.trace(), int(seen.profile.step_s.argsort()[lab.settings.steps // 2])
    steps = steps.select(steps.is_word("kind", "step"))
    lab.mark_step(int(steps.start_ns[middle]), int(steps.end_ns[middle]))
    lab.report.say("\n\n".join(report(seen.profile).split("\n\n")[:2]))  # what was found in it would tell the fault
    look(lab, seen, hidden)
    lab.report.measured("step, median", statistics.median(seen.profile.step_s.tolist()), "s")
    lab.report.measured("loss, last step", seen.loss)
    if lab.settings.answer:
        lab.report.fact(f"your answer, {lab.settings.answer}: right", lab.settings.answer == str(hidden), True)
        lab.report.note(f"It was: {hidden}.\n{report(seen.profile)}")
    else:
        lab.report.note(f'What is wrong in this run? Say it: --seed {lab.settings.seed} --answer "slow rank 0".')


def train(lab: Lab[Settings], hidden: Hidden) -> Seen:
    """Train a small GPT on all ranks, with the fault."""
    rank, n, device = lab.member.rank, lab.member.world_size, lab.member.device
    model = GPT(CONFIG, torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    profiler, sums, loss = Profiler(device, skip=SKIPPED, spans=lab.member.spans), [], torch.zeros(())
    for number, (inputs, targets) in enumerate(profiler.steps(batches(lab, hidden))):
        pretended_s = lab.settings.work_ms / 1e3 * (1.6 if (hidden.kind, hidden.rank) == ("slow rank", rank) else 1.0)
        with profiler.section("forward"):
            time.sleep(pretended_s / 3)
            loss = GPT.loss(model(inputs.to(device)), targets.to(device))
        with profiler.section("backward"):
            loss.backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            works = send(gradients, pretended_s * 2 / 3, overlap=hidden.kind != "no overlap")
        with profiler.section("sync"):
            for flat, work in works:
                work.wait()
                flat /= n
            copy_back(gradients, [flat for flat, _ in works])
        with profiler.section("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        if number >= SKIPPED:
            if hidden == ("flipped bit", rank, number - SKIPPED):
                flip(model)
            sums.append(torch.stack([bit_sum(parameter) for parameter in model.parameters()]))
    return Seen(profiler.profile(), torch.stack(sums), lab.mean(float(loss.detach())))


def batches(lab: Lab[Settings], hidden: Hidden) -> Iterator[tuple[Tensor, Tensor]]:
    """Load this rank's batches, in 40 ms more where that is the fault."""
    corpus = ByteCorpus(python_documentation(), CONFIG.context)
    member = lab.member
    for number in range(lab.settings.steps + SKIPPED):
        if (hidden.kind, hidden.rank) == ("slow loader", member.rank):
            time.sleep(0.04)
        yield corpus.batch(number, 4 * member.world_size, rank=member.rank, world_size=member.world_size)


def send(gradients: list[Tensor], pretended_s: float, *, overlap: bool) -> list[tuple[Tensor, dist.Work]]:
    """Start to sum the gradients in a few parts; between them the rank pretends to compute."""
    row = torch.cat([gradient.flatten() for gradient in gradients])
    parts, works = [part.clone() for part in row.chunk(PARTS)], []
    for part in parts if overlap else ():
        time.sleep(pretended_s / PARTS)
        works.append((part, dist.all_reduce(part, async_op=True)))
    if not overlap:
        time.sleep(pretended_s)
        works = [(part, dist.all_reduce(part, async_op=True)) for part in parts]
    return works


def copy_back(gradients: list[Tensor], parts: list[Tensor]) -> None:
    """Put the means where the optimizer finds them."""
    for gradient, mean in zip(gradients, torch.cat(parts).split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def flip(model: torch.nn.Module) -> None:
    """Flip one bit of one weight."""
    weight = next(model.parameters()).detach()
    weight.view(torch.int32)[0, 0] ^= 1 << 21


def look(lab: Lab[Settings], seen: Seen, hidden: Hidden) -> None:
    """Run the learner's functions on what was measured."""
    trace, ranks = seen.profile.trace, seen.profile.ranks
    exposed, late = lab.function("13.exposed"), lab.function("13.late")
    step = seen.profile.middle_step()
    for rank in ranks:
        own = step.select(step.rank == rank)
        spans = (
            own.select(own.is_word("kind", "data", "F", "B", "optimizer")),
            own.select(own.is_word("kind", "all_reduce")),
        )
        lab.report.measured(f"rank {rank}: exposed communication", exposed(*map(pairs, spans)) / 1e9, "s")
    last = [
        pairs(trace.select(trace.is_word("kind", "all_reduce") & (trace.rank == rank)))[PARTS - 1 :: PARTS]
        for rank in ranks
    ]
    if len(ranks) > 1 and len({len(own) for own in last}) == 1:
        costs = late([[start / 1e9 for start, _ in own] for own in last])
        for rank, cost in zip(ranks, costs, strict=True):
            lab.report.measured(f"rank {rank}: cost of its lateness per step", cost / len(last[0]), "s")
    what, share = lab.function("13.limit")([spans_of(step.select(step.rank == rank)) for rank in ranks])
    lab.report.measured("the step waits for", f"{what}, {share:.0%} of it")
    if len(ranks) > 2:
        found = lab.function("13.flip")(seen.sums)
        lab.report.measured(
            "first difference of replicas (step, tensor, rank)", "none" if found is None else str(found)
        )
        wanted = (hidden.step, 0, hidden.rank) if hidden.kind == "flipped bit" else None
        lab.report.fact("replicas that differ are found", lab.everywhere(found == wanted), True)


def spans_of(own: Trace) -> dict[str, list[tuple[int, int]]]:
    """Return when a rank loads, computes and waits in sync, in nanoseconds."""
    names = {"load": ("data",), "compute": ("forward", "backward", "optimizer"), "sync": ("sync",)}
    return {name: pairs(own.select(own.is_word("name", *sections))) for name, sections in names.items()}


def pairs(spans: Trace) -> list[tuple[int, int]]:
    """Return start and end of each span, in order of their starts."""
    return sorted(zip(spans.start_ns.tolist(), spans.end_ns.tolist(), strict=True))


def hang(lab: Lab[Settings], hidden: Hidden) -> None:
    """Leave a call out on one rank: the watch ends the lab and says who waits for whom."""
    with lab.watched():
        for number in range(PARTS):
            if (lab.member.rank, number) != (hidden.rank, 1):
                dist.all_reduce(torch.zeros(1000, device=lab.member.device))


if __name__ == "__main__":
    main("13", Settings, run)
