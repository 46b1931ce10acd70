"""One broadcast of the first rank's tensors: which calls, of how many bytes, and the same bits everywhere."""

import torch
import torch.distributed as dist

from distlab.blocks.replicate import agree_on_build, broadcast_each, broadcast_flat
from distlab.comm import recorded


def tensors_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(3, 2, generator=generator, dtype=torch.float64).T,  # not contiguous
        torch.randn(0, generator=generator, dtype=torch.float64),
        torch.randn((), generator=generator, dtype=torch.float64),
        torch.arange(5) + rank,
        torch.tensor([rank == 0, True]),
        torch.randn(4, generator=generator).bfloat16(),
        torch.randn(2, generator=generator, dtype=torch.complex64),
    ]


def calls_of(function):
    with recorded() as seen:
        function()
    return [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]


def copies():
    """Return tensors and calls of both ways, in all ranks and in some; what one rank sends, and an agreement."""
    found, rank = {}, dist.get_rank()
    for members in ([0, 1, 2], [1, 2], [0]):
        group = dist.new_group(members)
        for broadcast in (broadcast_each, broadcast_flat) if rank in members else ():
            tensors = tensors_of(rank)
            calls = calls_of(lambda tensors=tensors, group=group, call=broadcast: call(tensors, group))
            found[broadcast.__name__, members[0], len(members)] = tensors, calls
    layer = torch.nn.Linear(2, 3)
    return found, calls_of(lambda: agree_on_build(layer.named_parameters(), None))


def test_each_tensor_has_the_bits_of_the_first_rank_and_agreement_is_40_bytes(ranks):
    for found, agreed in ranks(3).run(copies):
        assert agreed == [("all_gather", 40)]
        for (name, first, num_ranks), (tensors, calls) in found.items():
            expected = tensors_of(first)
            assert all(torch.equal(got, want) for got, want in zip(tensors, expected, strict=True))
            sizes = [tensor.nbytes for tensor in expected if tensor.numel()]
            if num_ranks == 1:
                assert calls == []
            elif name == "broadcast_each":
                assert calls == [("broadcast", size) for size in sizes]
            else:
                assert sum(size for _, size in calls) == sum(sizes)
                assert len(calls) == len({tensor.dtype for tensor in expected})
