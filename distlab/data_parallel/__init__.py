"""Data parallelism: every rank has the whole model and a part of the batch, and gradients are averaged.

Read `steps` first: the ladder, from one all-reduce per parameter to buckets that travel during backward. Then read
`bucketed` (`DataParallel`, the same with everything that real models need) and `bucket` (one bucket of it).
`horovod` is the other classic design, `sampler` says which samples a rank sees, and `buffers` keeps equal what
averaged gradients do not.
"""

from distlab.data_parallel.bucketed import DataParallel
from distlab.data_parallel.buffers import SyncBatchNorm, broadcast_buffers, convert_sync_batchnorm
from distlab.data_parallel.horovod import HorovodOptimizer
from distlab.data_parallel.sampler import DistributedBatchSampler, DistributedSampler
from distlab.data_parallel.steps import (
    Bucketed,
    Overlapped,
    average_flat,
    average_per_parameter,
    broadcast_parameters,
    loss_weight,
    micro_weights,
    train_step,
)

__all__ = [
    "Bucketed",
    "DataParallel",
    "DistributedBatchSampler",
    "DistributedSampler",
    "HorovodOptimizer",
    "Overlapped",
    "SyncBatchNorm",
    "average_flat",
    "average_per_parameter",
    "broadcast_buffers",
    "broadcast_parameters",
    "convert_sync_batchnorm",
    "loss_weight",
    "micro_weights",
    "train_step",
]
