"""Data parallelism: every rank has the whole model and a part of the batch, and gradients are averaged.

Read `steps` first (the ladder, from one all-reduce a parameter to buckets that travel during backward), then `bucketed`
(`DataParallel`, the same with everything that real models need).
"""

from distlab.data_parallel.bucketed import DataParallel
from distlab.data_parallel.steps import (
    Bucketed,
    Overlapped,
    average_flat,
    average_per_parameter,
    broadcast_parameters,
    loss_weight,
    train_step,
)

__all__ = [
    "Bucketed",
    "DataParallel",
    "Overlapped",
    "average_flat",
    "average_per_parameter",
    "broadcast_parameters",
    "loss_weight",
    "train_step",
]
