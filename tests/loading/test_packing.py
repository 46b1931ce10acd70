"""Packed documents get what each gets alone; balanced batches have the gradient of one process and the least wait."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from refused import message
from torch import nn

from distlab.loading import (
    Loader,
    PackedDocuments,
    attention_work,
    balance,
    document_mask,
    join,
    open_tokens,
    pack,
    write_tokens,
)
from distlab.rng import generator

VOCAB, HIDDEN, HEADS, CONTEXT = 61, 12, 3, 24


class Attention(nn.Module):
    """A model that mixes positions, with learned positions: packed wrongly, every output differs."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(CONTEXT, HIDDEN)
        self.mixed, self.output = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, VOCAB)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator(0, 0, str(parameter.shape)))
        self.double()

    def forward(self, row, packed=True):
        x = self.tokens(row.inputs) + self.places(row.positions)
        q, k, v = self.mixed(x).unflatten(-1, (3, HEADS, -1)).transpose(-4, -2).unbind(-3)
        mask = document_mask(row.documents) if packed else None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not packed)
        return self.output(x + mixed.transpose(-3, -2).flatten(-2))

    def loss(self, row, **how):
        return F.cross_entropy(self(row).flatten(0, -2), row.targets.flatten(), **how)


def written(folder, num_documents):
    draws = np.random.default_rng(num_documents)
    documents = [draws.integers(0, VOCAB, draws.integers(2, CONTEXT + 2)) for _ in range(num_documents)]
    write_tokens(folder, documents, vocab_size=VOCAB, shard_tokens=100)


@pytest.mark.parametrize("in_order", [False, True])
def test_packed_a_document_gets_what_it_gets_alone(tmp_path, in_order):
    written(tmp_path, 30)
    documents, model = open_tokens(tmp_path), Attention()
    packed = PackedDocuments(documents, CONTEXT, in_order=in_order)
    for row, numbers in zip((packed[i] for i in range(len(packed))), packed.rows, strict=True):
        for place, number in enumerate(numbers):
            inside, alone = row.documents == place, join([documents[number]])
            assert torch.allclose(model(row)[inside], model(alone, packed=False), atol=1e-12)
            assert torch.equal(row.targets[inside], alone.targets)
    batch = next(iter(Loader(packed, len(packed))))
    assert batch.inputs.shape == (len(packed), CONTEXT)
    sums = [model.loss(join([documents[i]]), reduction="sum") for i in range(30)]
    torch.testing.assert_close(model.loss(batch), sum(sums) / (documents.lengths - 1).sum(), atol=1e-12, rtol=0)
    padding = int((batch.targets == -100).sum())
    assert packed.waste == pytest.approx(padding / batch.inputs.numel())
    assert packed.lengths.sum() == batch.inputs.numel() - padding == (batch.documents >= 0).sum()
    assert attention_work([6, 12], 2).tolist() == [6 * 1.5, 12 * 2.0]
    assert packed.work(HIDDEN).sum() == pytest.approx(attention_work(documents.lengths - 1, HIDDEN).sum())
    text = "inputs, and a row holds 1 to 5; cut it into documents of at most 6 tokens, or use a larger context"
    assert text in message(PackedDocuments, documents, 5)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 40), st.booleans())
def test_packing_loses_nothing_and_wastes_little(lengths, context, in_order):
    rows = pack(lengths, context, in_order=in_order)
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
    if len(work) < num_ranks:
        assert "pass at least one each" in message(balance, work, num_ranks)
        return
    dealt = balance(work, num_ranks)
    assert sorted(sum(dealt, [])) == list(range(len(work)))
    assert min(map(len, dealt)) >= 1
    busiest = max(sum(work[i] for i in own) for own in dealt)
    if num_ranks ** len(work) <= 5000:
        sums = (np.bincount(who, work, num_ranks).max() for who in product(range(num_ranks), repeat=len(work)))
        assert busiest <= (4 / 3 - 1 / (3 * num_ranks)) * min(sums) + 1e-9


@pytest.mark.on_ranks(3)
def test_balanced_batches_have_the_gradient_of_one_process(tmp_path):
    if dist.get_rank() == 0:
        written(tmp_path, 40)
    dist.barrier()
    documents, alone, weights = open_tokens(tmp_path), Attention(), set()
    lengths = documents.lengths - 1
    loader = Loader(documents, 10, lengths=lengths, work=attention_work(lengths, HIDDEN), collate_fn=join)
    for batch in loader:
        share, whole = Attention(), np.concatenate(loader.shares_at(loader.position - 10)).tolist()
        (share.loss(batch) * loader.weight).backward()
        weights.add(loader.weight)
        alone.zero_grad()
        alone.loss(join([documents[i] for i in whole])).backward()
        for own, expected in zip(share.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(own.grad)
            torch.testing.assert_close(own.grad / 3, expected.grad, atol=1e-12, rtol=0)
    assert len(weights) > 1
    assert loader.position == 40
