"""Small models and machines with round numbers, for tests of the step."""

import math

from distlab.plan import Cluster, Contention, Device, Layer, Link, Plan, Protocol, Work, Workload
from distlab.plan.compression import METHODS, Compression

DEVICE = Device("d", 1e12, 1e11, 1e9, 1e-6)
LINK = Link("wire", (Protocol(1e-5, 1e8),))
EACH = tuple(Compression(method, ratio=0.05, bits=4, rank=2) for method in METHODS)


def cluster_of(num_devices, *, per_node=64, contention=None, link=LINK, slow=LINK):
    return Cluster("c", DEVICE, num_devices, per_node, link, slow, contention or Contention())


def workload_of(*shapes):
    """One layer for each group of shapes."""

    def layer(index, group):
        return Layer(f"layer {index}", tuple(map(math.prod, group)), *[Work(1e9)] * 3, parameter_shapes=group)

    return Workload("w", tuple(layer(index, group) for index, group in enumerate(shapes)))


WORKLOAD = workload_of(((300, 200), (300,)), ((100, 400), (7,)), ((64, 64, 3, 3),))


def plan_of(compression, *, data=4, **options):
    return Plan(data=data, bucket_bytes=200_000, first_bucket_bytes=100_000, compression=compression, **options)
