"""A layer of 8 experts, 2 per token: sorted rows against loops over experts; split over ranks against copies on all.

In one process: forward and backward of `MixtureOfExperts` against a loop that finds each expert's tokens by a mask. The
other peer is the dense loop, in which every expert works on every token and most weights are zero. On 2 and 4 ranks: a
whole step (forward, backward, gradients reduced, SGD) of `ExpertParallel` against two peers that hold all experts on
every rank and average all gradients: the mixture, and the dense loop. All programs live in the same ranks and take
turns block by block; a block's time is that of the slowest rank. Bytes are the recorder's for one step, native
collectives as rings would send them. Which way is better depends on tokens per rank: rows grow with them, gradients do
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from _blocks import by_value, slowest, take_turns
from _rows import Row, compare, compare_counts, noise, without_bar
from _script import run_script
from torch import Tensor, nn

from distlab.blocks.models import FeedForward, GPTConfig
from distlab.comm import Ranks, recorded
from distlab.expert_parallel import ExpertParallel, MixtureOfExperts, Router, reduce_gradients
from distlab.measure import MIN_BLOCKS
from distlab.rng import generator

HIDDEN, EXPERTS, TOP_K, TOKENS = 128, 8, 2, 512
LOCAL = ("sorted", "masks", "masks again", "dense")
SPLIT = ("split", "copies", "copies again", "dense copies")


class Masked(MixtureOfExperts):
    """The same layer as a loop that asks, for each expert, where it was chosen."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, H] -> [T, H]."""
        routing = self.router(x)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, choice = torch.where(routing.experts == number)
            total = total.index_add(0, tokens, expert(x[tokens]) * routing.weights[tokens, choice, None])
        return total


class Dense(MixtureOfExperts):
    """The same layer with every expert at work on every token."""

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: x [T, H] -> [T, H]."""
        routing = self.router(x)
        weights = torch.zeros_like(routing.probabilities).scatter(1, routing.experts, routing.weights)  # [T, E]
        outputs = torch.stack([expert(x) for expert in self.experts], dim=1)  # [T, E, H]
        return (weights.unsqueeze(2) * outputs).sum(dim=1)


def layer_of(kind: type[MixtureOfExperts]) -> MixtureOfExperts:
    """Return a layer; all kinds have the same values."""
    torch.manual_seed(0)
    config = GPTConfig(hidden_size=HIDDEN)
    return kind(Router(HIDDEN, EXPERTS, top_k=TOP_K), [FeedForward(config) for _ in range(EXPERTS)])


def step_of(program: str) -> Callable[[], float]:
    """Build a program and return one step of it, which returns its loss."""
    kinds = {"sorted": MixtureOfExperts, "split": MixtureOfExperts, "copies": MixtureOfExperts, "masks": Masked}
    full = layer_of(kinds.get(program.removesuffix(" again"), Dense))
    layer: nn.Module = ExpertParallel.from_full(full, balance_over="rank") if program == "split" else full
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3) if program not in LOCAL else None
    x = torch.randn(TOKENS, HIDDEN, generator=generator(0, dist.get_rank(), "tokens")).requires_grad_()

    def step() -> float:
        layer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        if optimizer is not None:
            reduce_gradients(layer)  # where experts are copies, all parameters are averaged
            optimizer.step()
        return loss.item()

    return step


def time_programs(
    programs: tuple[str, ...], blocks: int, steps: int
) -> tuple[list[list[float]], list[float], list[tuple[int, int]]]:
    """Run on each rank: seconds per step in interleaved blocks; last losses; bytes and calls of a step."""
    torch.set_num_threads(1)
    functions = [step_of(program) for program in programs]
    times = take_turns(functions, blocks, steps)
    losses, sent = [], []
    for step in functions:
        with recorded() as seen:
            losses.append(step())
        mine = seen.records.rank(dist.get_rank())
        sent.append((mine.ring_equivalent_bytes(dist.get_rank()), mine.num_calls()))
    return times, losses, sent


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield the rows of one process, then those of 2 and 4 ranks."""
    by_value(__name__)
    blocks, steps = (3, 2) if quick else (MIN_BLOCKS, 8)
    what = f"{TOKENS} tokens per rank, hidden {HIDDEN}, {EXPERTS} experts, {TOP_K} per token"
    with Ranks(1, timeout_s=600, record=False) as ranks:
        times, losses, _ = ranks.run(time_programs, LOCAL, blocks, steps)[0]
    assert max(losses) - min(losses) < 1e-5, losses
    by = dict(zip(LOCAL, times, strict=True))
    yield compare(
        "forward and backward of MixtureOfExperts against a loop with masks", by["sorted"], by["masks"], note=what
    )
    yield compare("forward and backward of MixtureOfExperts against the dense loop", by["sorted"], by["dense"], bar=0.8)
    yield noise("the loop with masks", by["masks again"], by["masks"])
    for num_ranks in (2, 4):
        with Ranks(num_ranks, timeout_s=600, backend="gloo", record=False) as ranks:
            results = ranks.run(time_programs, SPLIT, blocks, steps)
        yield from _rows_of(results, f"on {num_ranks} ranks (cpu, gloo)")


def _rows_of(results: list[tuple[list[list[float]], list[float], list[tuple[int, int]]]], where: str) -> Iterator[Row]:
    times = dict(zip(SPLIT, slowest([times for times, _, _ in results]), strict=True))
    for _, losses, _ in results:
        assert max(losses) - min(losses) < 1e-4, losses
    most = np.asarray([sent for _, _, sent in results]).max(axis=0)  # [program, (bytes, calls)]
    sent, calls = (dict(zip(SPLIT, column, strict=True)) for column in most.T.tolist())
    yield compare(
        f"a step of ExpertParallel {where} against all experts on every rank", times["split"], times["copies"]
    )
    yield compare(
        f"a step of ExpertParallel {where} against the dense loop on every rank",
        times["split"],
        times["dense copies"],
        bar=0.8,
    )
    yield noise(f"all experts on every rank, {where}", times["copies again"], times["copies"])
    yield without_bar(
        compare_counts(
            f"bytes that the busiest rank sends in a step of ExpertParallel {where} against all experts on every rank",
            sent["split"],
            sent["copies"],
            note=f"{calls['split']} calls against {calls['copies']}",
        )
    )


if __name__ == "__main__":
    run_script(__doc__, rows)
