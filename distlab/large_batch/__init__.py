"""Large batches, and updates that look at a whole tensor: what keeps fewer, longer steps from going wrong.

Read `scaling` first: what a larger batch asks of the learning rate, and warmup. Then `trust`: LARS and LAMB on one
tensor, as the papers write them. Then `lars` and `lamb`: the same as torch optimizers, for many tensors at once. `muon`
looks at a whole matrix, not at its length alone.

Accumulating gradients over several backward passes makes a large batch on few ranks: see `distlab.data_parallel`.
"""

from distlab.large_batch.lamb import LAMB as LAMB
from distlab.large_batch.lars import LARS as LARS
from distlab.large_batch.muon import Muon as Muon, newton_schulz as newton_schulz
from distlab.large_batch.scaling import (
    LearningRateSchedule as LearningRateSchedule,
    linear_scaled_lr as linear_scaled_lr,
    sqrt_scaled_lr as sqrt_scaled_lr,
    warmup_factor as warmup_factor,
)
from distlab.large_batch.trust import (
    Moments as Moments,
    Trust as Trust,
    lamb_update as lamb_update,
    lars_update as lars_update,
    trust_ratio as trust_ratio,
)
