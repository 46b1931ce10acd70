"""Tensor parallelism: every layer cut over a group of ranks, which work on the same samples.

Begin with `functions`: f and g, the conjugate pairs that everything else is made of (they send with `async_calls`).
Then `linear` (column- and row-parallel layers) and `vocabulary` (embedding, and cross-entropy that never gathers the
scores).

Then what makes it good. `overlap` makes the exchange during a matrix product. `sequence` splits what lies between the
regions by positions; it has the masks of dropout that must be equal, and those that must not.

Last, `parallelize` does all of it to the package's GPT, whose heads of attention are split too, with the norm of its
gradients. `parallelize_module` does it to any model, by names of its layers: `plan` has the styles, and what is refused
before anything is cut; `compare` looks for what no plan can show. `split` says how a tensor lies on the ranks, and with
it `full_state_dict` puts the model together again.
"""

from distlab.blocks.modules.split import Split as Split, splits_of as splits_of
from distlab.tensor_parallel.functions import (
    add_once as add_once,
    copy_to_ranks as copy_to_ranks,
    gather_sequence as gather_sequence,
    join_features as join_features,
    join_sequence as join_sequence,
    reduce_from_ranks as reduce_from_ranks,
    reduce_scatter_sequence as reduce_scatter_sequence,
    split_sequence as split_sequence,
    sum_gradients as sum_gradients,
)
from distlab.tensor_parallel.linear import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
)
from distlab.tensor_parallel.parallelize import (
    ParallelAttention as ParallelAttention,
    ParallelGPT as ParallelGPT,
    clip_tensor_parallel_ as clip_tensor_parallel_,
    full_state_dict as full_state_dict,
    parallelize as parallelize,
)
from distlab.tensor_parallel.parallelize_module import parallelize_module as parallelize_module
from distlab.tensor_parallel.plan import PLANS as PLANS
from distlab.tensor_parallel.sequence import (
    SequenceParallelNorm as SequenceParallelNorm,
    SequenceParallelPositions as SequenceParallelPositions,
    SplitDropout as SplitDropout,
    own_random as own_random,
)
from distlab.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding as VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy as vocabulary_parallel_cross_entropy,
)
