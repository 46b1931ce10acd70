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


def copies(broadcast, members):
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    tensors = tensors_of(dist.get_rank())
    with recorded() as seen:
        broadcast(tensors, group)
    calls = [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]
    return tensors, calls


def test_each_tensor_has_the_bits_of_the_first_rank(ranks):
    for broadcast in (broadcast_each, broadcast_flat):
        for members in ([0, 1, 2], [1, 2]):
            for found in ranks(3).run(copies, broadcast, members)[members[0] :]:
                expected = tensors_of(members[0])
                assert all(torch.equal(got, want) for got, want in zip(found[0], expected, strict=True))
                sizes = [tensor.nbytes for tensor in expected if tensor.numel()]
                if broadcast is broadcast_each:
                    assert found[1] == [("broadcast", size) for size in sizes]
                else:
                    assert sum(size for _, size in found[1]) == sum(sizes)
                    assert len(found[1]) == len({tensor.dtype for tensor in expected})


def test_one_rank_sends_nothing_and_agreement_is_40_bytes(ranks):
    def measure(members):
        group = dist.new_group(members)
        if dist.get_rank() not in members:
            return None
        layer = torch.nn.Linear(2, 3)
        with recorded() as seen:
            if len(members) == 1:
                broadcast_each(layer.parameters(), group)
                broadcast_flat(layer.parameters(), group)
            else:
                agree_on_build(layer.named_parameters(), group)
        return [(call.op, call.num_bytes) for call in seen.records.calls(dist.get_rank())]

    assert ranks(2).run(measure, [0])[0] == []
    assert ranks(2).run(measure, [0, 1]) == [[("all_gather", 40)]] * 2
