"""Each function and layer: forward, input gradient and weight gradients equal those of the layer that was split."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from distlab import tensor_parallel
from distlab.blocks.models import Attention, GPTConfig
from distlab.rng import generator

HIDDEN, LENGTH, BATCH, VOCABULARY = 24, 12, 3, 13  # 13 tokens: no number of ranks divides them; 4 ranks fill up 3


def draw(*shape, what="x", rank=0):
    return torch.randn(*shape, dtype=torch.float64, generator=generator(0, rank, what))


def full(make, rank=0):
    """Make a full layer; biases are not zero, and other ranks have other weights."""
    module = make().double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(draw(*parameter.shape, what=name, rank=rank))
    return module


def gradients(module, x, y, upward):
    (y * upward).sum().backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}, x.grad


def part_of(tensor, dim):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def close(one, other, what=""):
    assert one.shape == other.shape, (what, one.shape, other.shape)
    assert (one - other).abs().max().item() <= 1e-10, what


def compare(made, module, *, x_dim=None, y_dim=None):
    """Compare a parallel layer with the full one; x_dim and y_dim say how input and output lie on the ranks."""
    x = draw(BATCH, LENGTH, made.in_features if hasattr(made, "in_features") else HIDDEN).requires_grad_()
    y = module(x)
    upward = draw(*y.shape, what="upward")
    expected, x_gradient = gradients(module, x, y, upward)
    local = (x if x_dim is None else part_of(x, x_dim)).detach().clone().requires_grad_()
    before = local.detach().clone()
    local_y = made(local)
    close(local_y, y if y_dim is None else part_of(y, y_dim), "forward")
    local_upward = (upward if y_dim is None else part_of(upward, y_dim)).clone()
    found, found_x = gradients(made, local, local_y, local_upward)
    assert torch.equal(local, before)
    assert torch.equal(local_upward, upward if y_dim is None else part_of(upward, y_dim)), "changed under our hands"
    close(found_x, x_gradient if x_dim is None else part_of(x_gradient, x_dim), "input gradient")
    assert found.keys() == expected.keys()
    splits = {f"{path}.{own}".lstrip("."): split for path, inner in made.named_modules()
              for own, split in getattr(inner, "splits", {}).items()}  # fmt: skip
    for name, gradient in found.items():
        whole = expected[name]
        if name in splits:
            whole = splits[name].cut(whole, dist.get_world_size(), dist.get_rank())
        close(gradient, whole, name)


def check_linear():
    for overlap in (True, False):
        for sequence in (False, True):
            for bias in (True, False):
                check_pair(overlap, sequence, bias)
    joined = tensor_parallel.ColumnParallelLinear.from_full(
        full(lambda: nn.Linear(7, HIDDEN), dist.get_rank()), join_output=True
    )
    compare(joined, full(lambda: nn.Linear(7, HIDDEN)))


def check_pair(overlap, sequence, bias):
    rank, x_dim = dist.get_rank(), 1 if sequence else None
    widen, narrow = (lambda sizes=sizes: nn.Linear(*sizes, bias=bias) for sizes in ((7, HIDDEN), (HIDDEN, 7)))
    column = tensor_parallel.ColumnParallelLinear.from_full(full(widen, rank), sequence_parallel=sequence)
    column.overlap = overlap
    compare(column, full(widen), x_dim=x_dim, y_dim=2)
    parts = 3 if bias else 1
    row = tensor_parallel.RowParallelLinear.from_full(full(narrow, rank), sequence_parallel=sequence, num_parts=parts)
    row.overlap = overlap
    compare(row, full(narrow), x_dim=2, y_dim=x_dim)


def check_attention():
    config = GPTConfig(num_heads=12, hidden_size=HIDDEN)
    for sequence in (False, True):
        dim = 1 if sequence else None
        made = tensor_parallel.ParallelAttention(
            full(lambda: Attention(config), dist.get_rank()), sequence_parallel=sequence
        )
        compare(made, full(lambda: Attention(config)), x_dim=dim, y_dim=dim)


def check_vocabulary():
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    norm, whole = (full(lambda: nn.LayerNorm(HIDDEN), one) for one in (rank, 0))
    compare(tensor_parallel.SequenceParallelNorm(norm), whole, x_dim=1, y_dim=1)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator(0, 0, "tokens"))
    split = tensor_parallel.Split(0, (VOCABULARY,), padded=True)
    for sequence in (False, True):
        module = full(lambda: nn.Embedding(VOCABULARY, HIDDEN))
        brought = full(lambda: nn.Embedding(VOCABULARY, HIDDEN), rank)
        made = tensor_parallel.VocabularyParallelEmbedding(brought, sequence_parallel=sequence)
        y, local = module(tokens), made(tokens)
        upward = draw(*y.shape, what="upward")
        (y * upward).sum().backward()
        (local * (part_of(upward, 1) if sequence else upward)).sum().backward()
        close(local, part_of(y, 1) if sequence else y)
        close(made.weight.grad, split.cut(module.weight.grad, num_ranks, rank))
    targets = tokens.clone()
    targets[0, 3:5] = -100
    logits = (30 * draw(BATCH, LENGTH, VOCABULARY)).requires_grad_()  # exp would overflow without the largest
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    expected.mul(3).backward()
    cut = tensor_parallel.Split(2, (VOCABULARY,), padded=True).cut
    local = cut(logits.detach(), num_ranks, rank).requires_grad_()
    found = tensor_parallel.vocabulary_parallel_cross_entropy(local, targets, vocab_size=VOCABULARY)
    found.mul(3).backward()
    close(found, expected)
    close(local.grad, cut(logits.grad, num_ranks, rank))


def check_functions():
    """Each pair is conjugate: <f(x), y> summed over ranks is <x, f'(y)> summed over ranks, if x differs."""
    rank = dist.get_rank()
    for name in ("gather_sequence", "reduce_scatter_sequence"):
        x = draw(BATCH, LENGTH, 5, rank=rank).requires_grad_()
        y = getattr(tensor_parallel.functions, name)(x)
        upward = draw(*y.shape, what="upward", rank=rank)
        (y * upward).sum().backward()
        both = torch.stack([(y * upward).sum(), (x * x.grad).sum()]).detach()
        dist.all_reduce(both)
        close(both[0], both[1], name)
    mine = [draw(4, 5, what=what, rank=rank) for what in ("x", "upward")]
    total, upward_total = (
        sum(draw(4, 5, what=w, rank=r) for r in range(dist.get_world_size())) for w in ("x", "upward")
    )
    x, upward = (tensor.clone() for tensor in mine)
    close(tensor_parallel.functions.reduce_from_ranks(x), total)
    x.requires_grad_()
    tensor_parallel.functions.copy_to_ranks(x).backward(upward)
    close(x.grad, upward_total)
    assert torch.equal(x, mine[0]), "others may hold it too"
    assert torch.equal(upward, mine[1]), "others may hold it too"
    x = draw(BATCH, LENGTH, 5).requires_grad_()
    y = tensor_parallel.functions.join_sequence(tensor_parallel.functions.split_sequence(x))
    upward = draw(*y.shape, what="upward")
    y.backward(upward)
    assert torch.equal(y, x)
    assert torch.equal(x.grad, upward)


def check_autocast():
    layer = tensor_parallel.RowParallelLinear.from_full(nn.Linear(HIDDEN, 8))
    x = torch.randn(4, HIDDEN // dist.get_world_size(), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == torch.float32


@pytest.mark.soak_where(world_size=(1, 2))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_layers_equal_those_they_were_cut_from(ranks, world_size):
    def check():
        check_functions()
        check_linear()
        check_attention()
        check_vocabulary()
        check_autocast()
        x = torch.ones(2, HIDDEN)  # wants no gradient: nothing is sent for it
        y = tensor_parallel.ColumnParallelLinear.from_full(nn.Linear(HIDDEN, HIDDEN))(x)
        y.sum().backward()
        assert x.grad is None

    ranks(world_size).run(check)


def test_a_split_cuts_each_section_and_joins_again():
    whole = torch.arange(36).view(12, 3)
    split = tensor_parallel.Split(0, (6, 2, 4))
    parts = [split.cut(whole, 2, rank) for rank in range(2)]
    assert parts[1][:, 0].div(3).tolist() == [3, 4, 5, 7, 10, 11]
    assert torch.equal(split.join(parts), whole)
    odd = tensor_parallel.Split(1, (3,), padded=True)
    parts = [odd.cut(whole, 4, rank) for rank in range(4)]
    assert parts[3].tolist() == [[0]] * 12
    assert torch.equal(odd.join(parts), whole)
