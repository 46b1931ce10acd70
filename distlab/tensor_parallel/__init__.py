"""Tensor parallelism: every layer cut over a group of ranks, which work on the same samples.

Begin with `functions`: f and g, the conjugate pairs that everything else is made of (they send with `async_calls`).
Then `linear` (column- and row-parallel layers) and `vocabulary` (embedding, and cross-entropy that never gathers the
scores). `attention` has its heads split, also where there are fewer heads of keys and values than ranks.

Then what makes it good. `overlap` makes the exchange during a matrix product. `sequence` splits what lies between the
regions by positions. `dropout` has masks that must be equal, and those that must not. `norm` is the gradients' norm,
with what every rank holds counted once.

Last, `parallelize` does all of it to the package's GPT, and `by_plan` to any model, by names of its layers (as torch's
`parallelize_module`); `split` says how a tensor lies on the ranks, and with it
`full_state_dict` puts the model together again.
"""

from distlab.modules.split import Split, splits_of
from distlab.tensor_parallel.attention.grouped import SharedKeyValueLinear
from distlab.tensor_parallel.attention.heads import ParallelAttention
from distlab.tensor_parallel.by_plan.parallelize_module import parallelize_module
from distlab.tensor_parallel.by_plan.plan import PLANS, SEQUENCE
from distlab.tensor_parallel.dropout import SplitDropout, own_random
from distlab.tensor_parallel.functions import (
    add_once,
    copy_to_ranks,
    gather_sequence,
    join_features,
    join_sequence,
    reduce_from_ranks,
    reduce_scatter_sequence,
    split_sequence,
    sum_gradients,
)
from distlab.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from distlab.tensor_parallel.norm import clip_tensor_parallel_, tensor_parallel_norm
from distlab.tensor_parallel.parallelize import ParallelGPT, full_state_dict, load_full_state_dict, parallelize
from distlab.tensor_parallel.sequence import SequenceParallelNorm, SequenceParallelPositions
from distlab.tensor_parallel.vocabulary import VocabularyParallelEmbedding, vocabulary_parallel_cross_entropy

__all__ = [
    "PLANS",
    "SEQUENCE",
    "ColumnParallelLinear",
    "ParallelAttention",
    "ParallelGPT",
    "RowParallelLinear",
    "SequenceParallelNorm",
    "SequenceParallelPositions",
    "SharedKeyValueLinear",
    "Split",
    "SplitDropout",
    "VocabularyParallelEmbedding",
    "add_once",
    "clip_tensor_parallel_",
    "copy_to_ranks",
    "full_state_dict",
    "gather_sequence",
    "join_features",
    "join_sequence",
    "load_full_state_dict",
    "own_random",
    "parallelize",
    "parallelize_module",
    "reduce_from_ranks",
    "reduce_scatter_sequence",
    "split_sequence",
    "splits_of",
    "sum_gradients",
    "tensor_parallel_norm",
    "vocabulary_parallel_cross_entropy",
]
