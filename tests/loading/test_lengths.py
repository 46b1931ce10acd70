"""Packed documents get what each gets alone; balanced batches have the gradient of one process and the least wait."""

from itertools import islice, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from refused import message

from distlab.data import SampleOrder
from distlab.loading import (
    Loader,
    PackedDocuments,
    attention_work,
    balance,
    document_mask,
    join,
    open_tokens,
    write_tokens,
)
from distlab.rng import generator

VOCAB, HIDDEN, HEADS, CONTEXT = 61, 12, 3, 24


def new_weights():
    """Return a model that mixes positions, with learned positions: packed wrongly, every output differs."""
    shapes, draws = ((VOCAB, HIDDEN), (CONTEXT, HIDDEN), (HIDDEN, 3 * HIDDEN), (HIDDEN, VOCAB)), generator(0, 0, "")
    return [torch.randn(shape, generator=draws, dtype=torch.float64, requires_grad=True) for shape in shapes]


def outputs(weights, row, packed=True):
    tokens, places, mixed, last = weights
    x = tokens[row.inputs] + places[row.positions]
    q, k, v = (x @ mixed).unflatten(-1, (3, HEADS, -1)).transpose(-4, -2).unbind(-3)
    mask = document_mask(row.documents) if packed else None
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not packed)
    return (x + attended.transpose(-3, -2).flatten(-2)) @ last


def loss(weights, row, **how):
    return F.cross_entropy(outputs(weights, row).flatten(0, -2), row.targets.flatten(), **how)


def written(folder, num_documents):
    draws = np.random.default_rng(num_documents)
    documents = [draws.integers(0, VOCAB, draws.integers(2, CONTEXT + 2)) for _ in range(num_documents)]
    write_tokens(folder, documents, vocab_size=VOCAB, shard_tokens=100)


@pytest.mark.parametrize("in_order", [False, True])
def test_packed_a_document_gets_what_it_gets_alone(tmp_path, in_order):
    written(tmp_path / "new", 30)
    documents, weights = open_tokens(tmp_path / "new"), new_weights()
    packed = PackedDocuments(documents, CONTEXT, in_order=in_order)
    for row, numbers in zip((packed[i] for i in range(len(packed))), packed.rows, strict=True):
        for place, number in enumerate(numbers):
            inside, alone = row.documents == place, join([documents[number]])
            assert torch.allclose(outputs(weights, row)[inside], outputs(weights, alone, packed=False), atol=1e-10)
            assert torch.equal(row.targets[inside], alone.targets)
    batch = next(Loader(packed, len(packed)))
    assert batch.inputs.shape == (len(packed), CONTEXT)
    sums = [loss(weights, join([documents[i]]), reduction="sum") for i in range(30)]
    torch.testing.assert_close(loss(weights, batch), sum(sums) / (documents.lengths - 1).sum(), atol=1e-12, rtol=0)
    padding = int((batch.targets == -100).sum())
    assert packed.waste == pytest.approx(padding / batch.inputs.numel())
    assert packed.lengths.sum() == batch.inputs.numel() - padding == (batch.documents >= 0).sum()
    assert attention_work([6, 12], 2).tolist() == [6 * 1.5, 12 * 2.0]
    text = "inputs, and a row holds 5; cut it into documents of at most 6 tokens, or use a larger context"
    assert text in message(PackedDocuments, documents, 5)
    assert "open them without a context" in message(PackedDocuments, open_tokens(tmp_path / "new", 8), CONTEXT)
    assert "10 inputs are more than the context, 9" in message(join, [torch.arange(6)] * 2, 9)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 40), st.booleans())
def test_packing_loses_nothing_and_wastes_little(lengths, context, in_order):
    documents = SimpleNamespace(lengths=np.array(lengths) + 1, identity="", context=None)
    rows = PackedDocuments(documents, context, in_order=in_order).rows
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert sorted(sum(rows, [])) == list(range(len(lengths)))
    assert max(loads) <= context
    if in_order:
        assert sum(rows, []) == list(range(len(lengths)))
        assert all(load + lengths[row[0]] > context for load, row in zip(loads, rows[1:], strict=False))
    else:
        assert all(a + b > context for n, a in enumerate(loads) for b in loads[:n])  # no two fit in one


@settings(max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 4))
def test_the_busiest_rank_has_at_most_four_thirds_of_the_least_possible(work, num_ranks):
    dealt = balance(work, num_ranks)
    assert sorted(sum(dealt, [])) == list(range(len(work)))
    assert min(map(len, dealt)) >= (len(work) >= num_ranks)
    busiest = max(sum(work[i] for i in own) for own in dealt)
    if num_ranks ** len(work) <= 5000:
        sums = (np.bincount(who, work, num_ranks).max() for who in product(range(num_ranks), repeat=len(work)))
        assert busiest <= (4 / 3 - 1 / (3 * num_ranks)) * min(sums) + 1e-9


@pytest.mark.on_ranks(3)
def test_balanced_batches_have_the_gradient_of_one_process(tmp_path):
    if dist.get_rank() == 0:
        written(tmp_path / "new", 40)
    dist.barrier()
    documents, alone, seen = open_tokens(tmp_path / "new"), new_weights(), set()
    lengths = documents.lengths - 1
    loader, order = Loader(documents, 10, lengths=lengths, collate_fn=join), SampleOrder(40)
    for batch in islice(loader, 4):
        share, whole = new_weights(), order.samples(loader.position - 10, loader.position).tolist()
        (loss(share, batch) * loader.weight).backward()
        seen.add(loader.weight)
        expected = torch.autograd.grad(loss(alone, join([documents[i] for i in whole])), alone)
        for own, gradient in zip(share, expected, strict=True):
            dist.all_reduce(own.grad)
            torch.testing.assert_close(own.grad / 3, gradient, atol=1e-11, rtol=1e-11)
    assert len(seen) > 1
    assert loader.position == 40
