"""What cannot be split is refused, with the same kind of error on every rank, before anything hangs."""

import torch
import torch.distributed as dist
from refused import message
from torch import nn

from distlab import tensor_parallel as tp
from distlab.blocks.models import GPT, Attention, GPTConfig

SIZES = {"vocab_size": 13, "context": 8, "num_layers": 1, "num_heads": 2, "hidden_size": 4}
CONFIG = GPTConfig(**SIZES)


def cases():
    """Yield what each case is to say, and its call."""
    rank = dist.get_rank()
    model, broken = tp.parallelize(GPT(CONFIG)), tp.parallelize(GPT(CONFIG))
    sequences = tp.parallelize(GPT(CONFIG), sequence_parallel=True)
    dropping = tp.parallelize(GPT(GPTConfig(**SIZES, dropout=0.1)))
    zeros = torch.zeros(2, 4, dtype=torch.int64)
    broken.loss(broken(zeros), zeros).backward()
    broken.blocks[0].feed_forward.widen.weight.grad[0, 0] = float("nan") if rank == 0 else 0.0
    torch.manual_seed(rank)
    split, cross_entropy = tp.ColumnParallelLinear.from_full, tp.vocabulary_parallel_cross_entropy

    def attention(heads, hidden):
        return tp.ParallelAttention(Attention(GPTConfig(num_heads=heads, hidden_size=hidden)))

    def of(**sizes):
        return tp.parallelize(GPT(GPTConfig(**{**SIZES, **sizes})))

    yield "7 features cannot be split over 2 ranks", lambda: split(nn.Linear(4, 7))
    yield "7 features cannot be split over 2 ranks", lambda: tp.RowParallelLinear.from_full(nn.Linear(7, 4))
    yield "ranks disagree", lambda: split(nn.Linear(4, 4 + 2 * rank))
    yield "3 heads cannot be split over 2 ranks", lambda: attention(3, 6)
    yield "ranks disagree on the heads of a ParallelAttention", lambda: attention(2 + 2 * rank, 8)
    yield "expected 4 features in the last dim", lambda: split(nn.Linear(4, 6))(torch.ones(2, 6))
    yield "5 positions, which 2 ranks do not divide", lambda: tp.reduce_scatter_sequence(torch.ones(2, 5, 4))
    yield "expected [..., S, H]", lambda: tp.reduce_scatter_sequence(torch.ones(4))
    yield "5 positions, which 2 ranks do not divide", lambda: sequences(torch.zeros(2, 5, dtype=torch.int64))
    yield "10 tokens do not fit", lambda: model(torch.zeros(2, 10, dtype=torch.int64))
    yield "token 13 is outside", lambda: model.token_embedding(torch.tensor([[1, 13]]))
    yield "token -1 is outside", lambda: model.loss(torch.zeros(2, 4, 7), zeros - 1)
    yield "need logits [2, 4, 7]", lambda: cross_entropy(torch.zeros(2, 4, 6), zeros, vocab_size=13)
    yield "padding_idx", lambda: tp.VocabularyParallelEmbedding(nn.Embedding(4, 4, padding_idx=0))
    yield "ranks disagree on the tokens", lambda: model(zeros + rank)
    yield "ranks disagree on the shape", lambda: model(torch.zeros(2, 4 + rank, dtype=torch.int64))
    yield "torch's generator", lambda: dropping(zeros)
    yield "num_layers", lambda: of(num_layers=1 + rank)
    yield "ranks disagree", lambda: tp.parallelize(GPT(CONFIG), sequence_parallel=rank == 1)
    yield "expected a GPT that is not split yet", lambda: tp.parallelize(model)
    yield "got a Linear", lambda: tp.parallelize(nn.Linear(4, 4))
    yield "3 heads cannot be split over 2 ranks", lambda: of(num_heads=3, hidden_size=6)
    yield "num_parts is 0", lambda: tp.parallelize(GPT(CONFIG), num_parts=0)
    yield "max_norm is 0.0", lambda: tp.clip_tensor_parallel_(model, 0.0)
    yield "norm of the gradients is nan", lambda: tp.clip_tensor_parallel_(broken, 1.0)
    yield "no error", lambda: model.loss(model(zeros), zeros).item()  # everything still works, in step


def test_bad_input_is_refused_on_every_rank(ranks):
    for found in ranks(2).run(lambda: [(words, message(call)) for words, call in cases()]):
        for words, text in found:
            assert words in text, (words, text)
