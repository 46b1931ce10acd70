"""What each function and layer sends, forward and backward, is what its docstring says."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from distlab import tensor_parallel
from distlab.blocks.models import GPT, Attention, GPTConfig
from distlab.comm import recorded
from distlab.rng import generator
from distlab.tensor_parallel import functions

B, S, H, V = 2, 6, 12, 11  # 2 and 3 ranks divide all but the vocabulary


def sent_elements(seen):
    """Elements of float32 that this rank sent: in collectives as a ring would, and in messages."""
    return (seen.records.ring_equivalent_bytes(dist.get_rank()) + seen.records.sent_bytes(dist.get_rank())) / 4


def forward_and_backward(function, x):
    """Return what forward and backward send at the second use: the first one compares what ranks agree on."""
    for _ in range(2):
        with recorded() as forward:
            y = function(x)
        with recorded() as backward:
            y.sum().backward()
    return sent_elements(forward), sent_elements(backward)


def of_functions(t):
    """Function -> what it sent, and what its Cost says in elements times (t-1)/t."""
    whole, part, features = ((B, S, H), (B, S // t, H), (B, S, H // t))
    size = B * S * H
    parameters = [torch.ones(H, requires_grad=True), torch.ones(H, requires_grad=True)]
    table = {
        "copy": (functions.copy_to_ranks, whole, 0, 2 * size),
        "reduce": (functions.reduce_from_ranks, whole, 2 * size, 0),
        "gather": (functions.gather_sequence, part, size, size),
        "reduce_scatter": (functions.reduce_scatter_sequence, whole, size, size),
        "split": (functions.split_sequence, whole, 0, size),
        "join": (functions.join_sequence, part, size, 0),
        "features": (functions.join_features, features, size, 0),
        "once": (functions.add_once, whole, 0, 0),
        "gradients": (lambda x: sum(functions.sum_gradients(parameters)) * x, whole, 0, 2 * 2 * H),
    }
    return measured(table, t)


def of_layers(t):
    """Layer -> what it sent, and what its Cost says in elements times (t-1)/t."""
    whole, part, features = ((B, S, H), (B, S // t, H), (B, S, H // t))
    size = B * S * H
    tokens, positions = torch.randint(V, (B, S)), torch.arange(S)
    embedding = tensor_parallel.VocabularyParallelEmbedding(nn.Embedding(V, H))
    in_parts = tensor_parallel.VocabularyParallelEmbedding(nn.Embedding(V, H), sequence_parallel=True)
    attention, sequence_attention = (
        tensor_parallel.ParallelAttention(Attention(GPTConfig(num_heads=6, hidden_size=H)), sequence_parallel=sequence)
        for sequence in (False, True)
    )
    placed = tensor_parallel.SequenceParallelPositions(nn.Embedding(S, H))
    targets = torch.randint(V, (B, S), generator=generator(0, 0, "targets"))
    column, row = tensor_parallel.ColumnParallelLinear.from_full, tensor_parallel.RowParallelLinear.from_full
    cross_entropy = functools.partial(tensor_parallel.vocabulary_parallel_cross_entropy, vocab_size=V)
    table = {
        "column": (column(nn.Linear(H, H)), whole, 0, 2 * size),
        "column, sequence": (column(nn.Linear(H, H), sequence_parallel=True), part, size, size),
        "column, join": (column(nn.Linear(H, H), join_output=True), whole, size, 2 * size),
        "row": (row(nn.Linear(H, H)), features, 2 * size, 0),
        "row, in parts": (row(nn.Linear(H, H), num_parts=3), features, 2 * size, 0),
        "row, sequence": (row(nn.Linear(H, H), sequence_parallel=True), features, size, size),
        "attention": (attention, whole, 2 * size, 2 * size),
        "attention, sequence": (sequence_attention, part, 2 * size, 2 * size),
        "norm": (tensor_parallel.SequenceParallelNorm(nn.LayerNorm(H)), part, 0, 2 * 2 * H),
        "positions": (lambda x: placed(positions) + 0 * x.sum(), (1,), 0, S * H),
        "embedding": (lambda x: embedding(tokens) + 0 * x.sum(), (1,), 2 * size, 0),
        "embedding, sequence": (lambda x: in_parts(tokens) + 0 * x.sum(), (1,), size, size),
        "loss": (lambda x: cross_entropy(x, targets), (B, S, -(-V // t)), 6 * B * S, 0),
    }
    return measured(table, t)


def measured(table, t):
    found = {}
    for name, (function, shape, *expected) in table.items():
        sent = forward_and_backward(function, torch.ones(shape, requires_grad=True))
        found[name] = sent, tuple(number * (t - 1) / t for number in expected)
    return found


@pytest.mark.soak_where(world_size=(2,))
@pytest.mark.parametrize("world_size", [2, 3])
def test_functions_and_layers_send_what_they_say(ranks, world_size):
    for of_rank in ranks(world_size).run(lambda: (of_functions(world_size), of_layers(world_size))):
        for found in of_rank:
            for name, (sent, expected) in found.items():
                assert sent == pytest.approx(expected, abs=1), name  # each call is rounded to whole bytes


def of_a_model():
    """Return the calls of norms and states, and how many parameters are split."""
    model = tensor_parallel.parallelize(GPT(GPTConfig(V, context=S, num_layers=1, num_heads=6, hidden_size=H)))
    tokens, sent = torch.randint(V, (B, S), generator=generator(0, 0, "tokens")), []
    model.loss(model(tokens), tokens).backward()
    for call in (lambda one: tensor_parallel.clip_tensor_parallel_(one, 1.0), tensor_parallel.full_state_dict):
        with recorded() as seen:
            call(model)
        sent.append([(one.op, one.num_bytes) for one in seen.records.calls(dist.get_rank())])
    split = {getattr(module, own) for module in model.modules() for own in getattr(module, "splits", {})}
    return sent, len(split)


def exact():
    """What is called exact has the same bits; 16-bit scores are summed in float32."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    embedding, norm, x = nn.Embedding(V, H), nn.LayerNorm(H), torch.randn(B, S, H)
    nn.init.normal_(norm.weight)
    tokens = torch.randint(V, (B, S))
    assert torch.equal(tensor_parallel.VocabularyParallelEmbedding(embedding)(tokens), embedding(tokens))
    assert torch.equal(tensor_parallel.SequenceParallelNorm(norm)(x.chunk(2, 1)[rank]), norm(x).chunk(2, 1)[rank])
    logits = (8 * torch.randn(B, S, V + 1, generator=generator(0, 0, "logits"))).bfloat16()
    logits[..., V] = 0
    found = tensor_parallel.vocabulary_parallel_cross_entropy(logits.chunk(2, -1)[rank], tokens, vocab_size=V)
    expected = nn.functional.cross_entropy(logits[..., :V].float().flatten(0, 1), tokens.flatten())
    assert torch.equal(found, expected.bfloat16())


def test_models_norms_and_states_send_what_they_say_and_what_is_called_exact_is(ranks):
    for (clip, state), num_split in ranks(2).run(lambda: exact() or of_a_model()):
        assert clip == [("all_reduce", 8)]
        assert ({op for op, _ in state}, len(state)) == ({"all_gather"}, num_split)
