"""Numbers of fewer bits: half-precision compute that trains as float32 does, on one rank or on many.

Half the bits halve memory and bytes sent, and matrix units run faster. Three things are lost, and each has its cure, in
this reading order:

1. `half`: the plainest mixed precision, `autocast`. Parameters stay float32, matrix products run in half.
2. `master_weights`: small updates to half-precision parameters vanish. `MasterWeights` updates float32 copies.
3. `distlab.blocks.gradients.flat_gradients`: sums over ranks lose bits. `all_reduce_in_float32` rounds once, for the
   same bytes; `Float32Reduce` puts it between data parallelism and the wire.
4. `loss_scaler`: float16 cannot hold small gradients (below 6e-8 they are 0) nor large ones (above 65,504 they are
   infinite). `LossScaler` multiplies the loss so that gradients fall between, finds the factor by trying, and skips the
   step that overflowed: on all ranks or on none. bfloat16 has float32's range and needs none.
5. `distlab.blocks.eight_bits`: a scale for each tensor or each 32 numbers, on which ranks agree; then `eight_bits`:
   layers that multiply 8-bit numbers.

A step with everything: scale the loss, backward, average, accumulate in the masters, unscale, clip, step, update.
"""

from distlab.blocks.gradients.flat_gradients import (
    Float32Reduce as Float32Reduce,
    all_reduce_in_float32 as all_reduce_in_float32,
)
from distlab.precision.eight_bits import (
    DelayedScale as DelayedScale,
    EightBitLinear as EightBitLinear,
    agree_on_scales as agree_on_scales,
    to_eight_bits as to_eight_bits,
)
from distlab.precision.half import HALF as HALF, as_dtype as as_dtype, autocast as autocast
from distlab.precision.loss_scaler import LossScaler as LossScaler
from distlab.precision.master_weights import MasterWeights as MasterWeights
