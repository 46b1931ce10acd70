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

from distlab.comm import recorded
from distlab.loading import (
    Loader,
    PackedDocuments,
    TokenFiles,
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

    def forward(self, row):
        x = self.tokens(row.inputs) + self.places(row.positions)
        q, k, v = self.mixed(x).unflatten(-1, (3, HEADS, -1)).transpose(-4, -2).unbind(-3)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=document_mask(row.documents)).transpose(
            -3, -2
        ).flatten(-2)
        return self.output(x)

    def loss(self, row, **how):
        return F.cross_entropy(self(row).flatten(0, -2), row.targets.flatten(), **how)


def drawn(num_documents, seed=0, longest=CONTEXT):
    draws = np.random.default_rng(seed)
    return [draws.integers(0, VOCAB, draws.integers(2, longest + 2)) for _ in range(num_documents)]


@pytest.fixture
def documents(tmp_path):
    write_tokens(tmp_path, drawn(30), vocab_size=VOCAB, shard_tokens=100)
    return TokenFiles(tmp_path)


@pytest.mark.parametrize("in_order", [False, True])
def test_packed_a_document_gets_what_it_gets_alone(documents, in_order):
    packed, model = PackedDocuments(documents, CONTEXT, in_order=in_order), Attention()
    batch = next(iter(Loader(packed, len(packed))))
    assert batch.inputs.shape == (len(packed), CONTEXT)
    alone = [join([documents[i]]) for i in range(len(documents))]
    losses = {}
    for row, numbers in enumerate(batch.documents.tolist()):
        for place in range(max(numbers) + 1):
            inside = batch.documents[row] == place
            known = [i for i, one in enumerate(alone) if one.inputs.equal(batch.inputs[row][inside])]
            assert known
            losses[known[0]] = model(batch)[row][inside]
            assert torch.allclose(losses[known[0]], model(alone[known[0]]), atol=1e-12)
            assert batch.targets[row][inside].equal(alone[known[0]].targets)
    assert len(losses) == len(documents)
    total = sum(model.loss(one, reduction="sum") for one in alone) / sum(len(one.inputs) for one in alone)
    torch.testing.assert_close(model.loss(batch), total, atol=1e-12, rtol=0)
    padding = (batch.targets == -100).sum().item()
    assert packed.waste == pytest.approx(padding / batch.inputs.numel())
    assert (batch.documents == -1).sum() == padding
    assert packed.lengths.sum() == batch.inputs.numel() - padding
    assert packed.work(HIDDEN).sum() == pytest.approx(attention_work(documents.lengths - 1, HIDDEN).sum())


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 40))
def test_packing_loses_nothing_and_wastes_little(lengths, context):
    for in_order in (False, True):
        rows = pack(lengths, context, in_order=in_order)
        assert sorted(sum(rows, [])) == list(range(len(lengths)))
        loads = [sum(lengths[i] for i in row) for row in rows]
        assert max(loads) <= context
        if in_order:
            assert sum(rows, []) == list(range(len(lengths)))
            firsts = [lengths[row[0]] for row in rows[1:]]
            assert all(load + first > context for load, first in zip(loads, firsts, strict=False))
        else:
            assert all(a + b > context for n, a in enumerate(loads) for b in loads[:n])  # no two fit in one


def test_a_document_longer_than_the_context_is_refused(documents):
    text = "inputs, and a row holds 1 to 5; cut it into documents of at most 6 tokens, or use a larger context"
    assert text in message(PackedDocuments, documents, 5)


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


def test_work_counts_tokens_and_their_squares():
    assert attention_work([6, 12], 2).tolist() == [6 * 1.5, 12 * 2.0]
    draws = np.random.default_rng(0).lognormal(6, 0.6, (50, 64)).clip(1, 2048).astype(int)
    worst = {"slices": [], "by length": [], "by work": []}
    for lengths in draws:
        work = attention_work(lengths, 512)
        shares = [np.arange(64).reshape(8, 8), balance(lengths, 8), balance(work, 8)]
        for name, share in zip(worst, shares, strict=True):
            worst[name].append(max(work[own].sum() for own in share) * 8 / work.sum())
    slices, by_length, by_work = map(np.mean, worst.values())
    assert slices > 1.3 > 1.05 > by_work
    assert by_length > by_work


@pytest.mark.on_ranks(3)
def test_balanced_batches_have_the_gradient_of_one_process(tmp_path):
    if dist.get_rank() == 0:
        write_tokens(tmp_path, drawn(40, seed=3), vocab_size=VOCAB, shard_tokens=100)
    dist.barrier()
    documents = open_tokens(tmp_path)
    lengths = documents.lengths - 1
    loader = Loader(documents, 10, lengths=lengths, work=attention_work(lengths, HIDDEN), collate_fn=join)
    with recorded() as seen:
        batches = iter(loader)
    assert not seen.records.calls(dist.get_rank())
    alone, weights = Attention(), []
    for batch in batches:
        share, whole = Attention(), loader.shares_at(loader.position - 10)
        (share.loss(batch) * loader.weight).backward()
        weights.append(loader.weight)
        alone.zero_grad()
        alone.loss(join([documents[i] for own in whole for i in own.tolist()])).backward()
        for own, expected in zip(share.parameters(), alone.parameters(), strict=True):
            dist.all_reduce(own.grad)
            torch.testing.assert_close(own.grad / 3, expected.grad, atol=1e-12, rtol=0)
    assert loader.position == 40
    assert max(weights) - min(weights) > 1e-3 or dist.get_rank()
