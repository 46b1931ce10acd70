"""What cannot be split is refused, with the same kind of error on every rank, before anything hangs."""

import torch
import torch.distributed as dist
from torch import nn

from distlab.blocks.clip import NotFiniteError
from distlab.blocks.models import GPT, Attention, GPTConfig
from distlab.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    clip_tensor_parallel_,
    load_full_state_dict,
    parallelize,
    reduce_scatter_sequence,
    vocabulary_parallel_cross_entropy,
)

CONFIG = GPTConfig(vocab_size=13, context=8, num_layers=1, num_heads=2, hidden_size=4)


def message(function, kind=ValueError):
    try:
        function()
    except kind as error:
        return str(error)
    return None


def cases():
    """Return what each case says on this rank."""
    rank = dist.get_rank()
    model = parallelize(GPT(CONFIG))
    sequences = parallelize(GPT(CONFIG), sequence_parallel=True)
    dropping = parallelize(
        GPT(GPTConfig(vocab_size=13, context=8, num_layers=1, num_heads=2, hidden_size=4, dropout=0.1))
    )
    zeros = torch.zeros(2, 4, dtype=torch.int64)
    state = {name: value.clone() for name, value in GPT(CONFIG).state_dict().items()}
    broken = parallelize(GPT(CONFIG))
    broken.loss(broken(zeros), zeros).backward()
    broken.blocks[0].feed_forward.widen.weight.grad[0, 0] = float("nan") if rank == 0 else 0.0
    torch.manual_seed(rank)
    refused = {
        "features": lambda: ColumnParallelLinear.from_full(nn.Linear(4, 7)),
        "inputs": lambda: RowParallelLinear.from_full(nn.Linear(7, 4)),
        "layer differs": lambda: ColumnParallelLinear.from_full(nn.Linear(4, 4 + 2 * rank)),
        "heads": lambda: ParallelAttention(Attention(GPTConfig(num_heads=3, hidden_size=6))),
        "heads differ": lambda: ParallelAttention(Attention(GPTConfig(num_heads=2 + 2 * rank, hidden_size=8))),
        "wrong input": lambda: ColumnParallelLinear.from_full(nn.Linear(4, 6))(torch.ones(2, 6)),
        "sequence": lambda: reduce_scatter_sequence(torch.ones(2, 5, 4)),
        "no sequence": lambda: reduce_scatter_sequence(torch.ones(4)),
        "model's sequence": lambda: sequences(torch.zeros(2, 5, dtype=torch.int64)),
        "too long": lambda: model(torch.zeros(2, 10, dtype=torch.int64)),
        "token": lambda: model.token_embedding(torch.tensor([[1, 13]])),
        "target": lambda: model.loss(torch.zeros(2, 4, 7), zeros - 1),
        "logits": lambda: vocabulary_parallel_cross_entropy(torch.zeros(2, 4, 6), zeros, vocab_size=13),
        "option": lambda: VocabularyParallelEmbedding(nn.Embedding(4, 4, padding_idx=0)),
        "tokens differ": lambda: model(zeros + rank),
        "counts differ": lambda: model(torch.zeros(2, 4 + rank, dtype=torch.int64)),
        "seeds differ": lambda: dropping(zeros),
        "model differs": lambda: parallelize(GPT(GPTConfig(num_layers=1 + rank, num_heads=2, hidden_size=4))),
        "options differ": lambda: parallelize(GPT(CONFIG), sequence_parallel=rank == 1),
        "twice": lambda: parallelize(model),
        "no GPT": lambda: parallelize(nn.Linear(4, 4)),
        "model's heads": lambda: parallelize(GPT(GPTConfig(num_layers=1, num_heads=3, hidden_size=6))),
        "parts": lambda: parallelize(GPT(CONFIG), num_parts=0),
        "max_norm": lambda: clip_tensor_parallel_(model, 0.0),
        "state": lambda: load_full_state_dict(model, dict(list(state.items())[1:])),
        "vocabulary": lambda: load_full_state_dict(model, state | {"output.weight": torch.zeros(12, 4)}),
    }
    found = {name: message(function) for name, function in refused.items()}
    found["not finite"] = message(lambda: clip_tensor_parallel_(broken, 1.0), NotFiniteError)
    again = model.loss(model(zeros), zeros).item()  # everything still works, in step
    return found, again


def test_bad_input_is_refused_on_every_rank(ranks):
    words = {
        "features": "7 features cannot be split over 2 ranks",
        "layer differs": "ranks disagree",
        "heads": "3 heads cannot be split over 2 ranks",
        "heads differ": "ranks disagree on the heads of a ParallelAttention",
        "model's sequence": "5 positions, which 2 ranks do not divide",
        "token": "token 13 is outside",
        "tokens differ": "ranks disagree on the tokens",
        "counts differ": "ranks disagree on the shape",
        "seeds differ": "torch's generator",
        "model differs": "num_layers",
        "state": "token_embedding.weight is nothing in the state",
        "no GPT": "got a Linear",
        "vocabulary": "output.weight is [12, 4] in the state and [13, 4] in the model",
        "not finite": "norm of the gradients is nan",
    }
    results = ranks(2).run(cases)
    for found, _ in results:
        assert not [name for name, text in found.items() if text is None]
        for name, part in words.items():
            assert part in found[name], (name, found[name])
    assert results[0][1] == results[1][1]
