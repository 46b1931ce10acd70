"""Data parallelism: every rank has the whole model and a part of the batch, and gradients are averaged.

Read `steps` first: the ladder, from one all-reduce per parameter to buckets that travel during backward. Then read
`bucketed` (`DataParallel`, the same with everything that real models need) and `bucket` (one bucket of it).
`horovod` is the other classic design, `sampler` says which samples a rank sees, and `buffers` keeps equal what
averaged gradients do not.
"""

from distlab.data_parallel.bucketed import DataParallel as DataParallel
from distlab.data_parallel.buffers import (
    SyncBatchNorm as SyncBatchNorm,
    broadcast_buffers as broadcast_buffers,
    convert_sync_batchnorm as convert_sync_batchnorm,
)
from distlab.data_parallel.horovod import HorovodOptimizer as HorovodOptimizer
from distlab.data_parallel.sampler import (
    DistributedBatchSampler as DistributedBatchSampler,
    DistributedSampler as DistributedSampler,
)
from distlab.data_parallel.steps import (
    Bucketed as Bucketed,
    Overlapped as Overlapped,
    average_flat as average_flat,
    average_per_parameter as average_per_parameter,
    broadcast_parameters as broadcast_parameters,
    loss_weight as loss_weight,
    train_step as train_step,
)
