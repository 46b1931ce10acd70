"""All-gather and reduce-scatter of one tensor, under whichever name this torch has.

torch 2.13 renamed both and warns at the old names, which 2.11 has alone.
"""

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
