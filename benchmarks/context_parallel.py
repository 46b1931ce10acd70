"""Causal attention over a sequence spread over ranks, forward and backward, against torch's own ring.

The bar: ring attention, and all-to-all attention, on 2 and on 4 ranks take at most as long as torch's ring. torch's
public `context_parallel` does not run on the CPU (2.13: its dispatcher has no rule for the CPU kernel). So the peer is
the ring inside it, `_templated_ring_attention` and its backward pass, given the CPU's fused kernel. It computes the
same blocks by the same kernel in the same zig-zag order. It passes keys and values on in torch's default way (one
all-gather), and in the other (an all-to-all per step).

All programs live in the same ranks and take turns block by block; a block is some steps after a barrier, and its time
is that of the slowest rank. Recording is off. CPU, gloo, float32, one thread per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as torch_ring
from _blocks import by_value, slowest, timed
from _rows import Row, compare, compare_counts, noise, without_bar
from _script import run_script
from torch import Tensor

from distlab.comm import Ranks, Records, recorded
from distlab.context_parallel import all_to_all_attention, ring_attention, scatter_sequence
from distlab.measure import MIN_BLOCKS, interleave

SIZES = {"2,048 positions": (1, 8, 2048, 64), "512 positions": (2, 8, 512, 32)}
PEERS = {"torch's ring": "ALL_GATHER", "torch's ring again": "ALL_GATHER", "torch's ring, all-to-all": "ALL_TO_ALL"}
OURS = {"ring attention": ring_attention, "all-to-all attention": all_to_all_attention}


class TorchRing(torch.autograd.Function):
    """torch's ring, forward and backward, over the CPU's fused kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, method: str) -> Tensor:
        """Attend causally, with one of torch's two ways to pass keys and values on."""
        torch_ring._cp_options.rotate_method = torch_ring._RotateMethod[method]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse, *_ = torch_ring._templated_ring_attention(
            dist.group.WORLD, 2, kernel, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.method = method
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        torch_ring._cp_options.rotate_method = torch_ring._RotateMethod[ctx.method]
        query, key, value, output, lse = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = torch_ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, kernel, gradient, "grad_out", query, key, value, output, lse, True, dropout_p=0.0
        )
        return *found[:3], None


def step_of(program: str, size: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    """Return one forward and backward pass of a program; it returns the gradients."""
    num_samples, num_heads, length, head_size = size
    draw = torch.Generator().manual_seed(0)
    # As a projection's slices lie in memory: heads inside positions.
    tensors = [torch.randn(num_samples, length, num_heads, head_size, generator=draw).transpose(1, 2) for _ in range(4)]
    tensors = [scatter_sequence(tensor.transpose(1, 2)).transpose(1, 2) for tensor in tensors]
    function: Callable[..., Tensor] = OURS.get(program, lambda *inputs: TorchRing.apply(*inputs, PEERS[program]))
    inputs, weight = [tensor.requires_grad_() for tensor in tensors[:3]], tensors[3]
    return lambda: list(torch.autograd.grad(function(*inputs), inputs, weight))


def time_programs(size: tuple[int, ...], blocks: int, steps: int) -> tuple[list[list[float]], list[int]]:
    """On each rank: time programs in interleaved blocks; return seconds per step and what each sent."""
    torch.set_num_threads(1)
    programs = [*PEERS, *OURS]
    functions = [step_of(program, size) for program in programs]
    first = functions[0]()
    sent = []
    for program, function in zip(programs, functions, strict=True):
        with recorded() as seen:
            found = function()
        sent.append(bytes_of(seen.records, program))
        apart = max((one - other).abs().max().item() for one, other in zip(found, first, strict=True))
        assert apart < 1e-3, f"{program} is {apart} from torch's"
    return interleave([timed(function, steps) for function in functions], blocks), sent


def bytes_of(records: Records, program: str) -> int:
    """Return the bytes that this rank sent; torch's all-to-alls carry everything to one rank, ours a part to each."""
    rank = dist.get_rank()
    kept = records.payload_bytes(rank, "all_to_all") // dist.get_world_size() if program in PEERS else 0
    return records.sent_bytes(rank) + records.ring_equivalent_bytes(rank) + kept


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield, for each number of ranks and size: the two bars, the noise, and variants."""
    by_value(__name__)
    blocks, steps = (3, 1) if quick else (MIN_BLOCKS, 3)
    for num_ranks in (2, 4):
        with Ranks(num_ranks, timeout_s=600, backend="gloo", record=False) as ranks:
            for name, size in SIZES.items():
                results = ranks.run(time_programs, size, blocks, steps)
                yield from _rows_of(results, f"{name} on {num_ranks} ranks")


def _rows_of(results: list[tuple[list[list[float]], list[int]]], where: str) -> Iterator[Row]:
    programs = [*PEERS, *OURS]
    times = dict(zip(programs, slowest([times for times, _ in results]), strict=True))
    most = dict(zip(programs, np.asarray([sent for _, sent in results]).max(axis=0).tolist(), strict=True))
    peer = "torch's ring"
    for program in OURS:
        yield compare(f"{program} over {where} against {peer}", times[program], times[peer])
        yield compare_counts(
            f"bytes sent by {program} over {where} against {peer}", most[program], most[peer], note="of one rank"
        )
    yield noise(f"{peer} over {where}", times["torch's ring again"], times[peer])
    other = "torch's ring, all-to-all"
    yield without_bar(compare(f"ring attention over {where} against {other}", times["ring attention"], times[other]))


if __name__ == "__main__":
    run_script(__doc__, rows)
