"""Small models, machines and plans with round numbers, for tests of sharded steps."""

from distlab.plan import Cluster, Contention, Device, Layer, Link, Plan, Protocol, Sharding, Work, Workload

HOST = {"host_link_bytes_per_s": 1e8, "host_memory_bytes_per_s": 1e9, "host_memory_bytes": 1e12}
DEVICE = Device("d", 1e12, 1e11, 1e12, 0.0, **HOST)
FAST, SLOW = Link("fast", (Protocol(0.0, 4e8),)), Link("slow", (Protocol(0.0, 1e8),))


def cluster_of(num_devices, *, per_node=64, contention=None, intra=SLOW, inter=SLOW):
    return Cluster("c", DEVICE, num_devices, per_node, intra, inter, contention or Contention())


def workload_of(milliseconds, sizes=None, *, ends=0):
    """Blocks with a forward of so many ms and twice that backward; `ends` parameters before and after them."""
    sizes = sizes or [80_000] * len(milliseconds)

    def layer(name, ms, size):
        each = Work(ms * 1e9)
        return Layer(name, (size,) if size else (), each, each, each, 1000, 100, input_bytes=100)

    blocks = [layer(f"block {i}", ms, size) for i, (ms, size) in enumerate(zip(milliseconds, sizes, strict=True))]
    edge = [layer("embedding", 1.0, ends), layer("head", 1.0, ends)] if ends else []
    return Workload("w", (*edge[:1], *blocks, *edge[1:]), 4, Work(memory_bytes=8e7, num_kernels=4))


def plan_of(stage, *, data=4, microbatches=1, recompute="none", **options):
    own = {"bucket_bytes": 200_000, "first_bucket_bytes": 100_000, "recompute": recompute}
    return Plan(data, num_microbatches=microbatches, **own, sharding=Sharding(stage, **options))


def spans_of(step, lane, rank=0):
    found = [span for span in step.layer_trace if span.rank == rank and span.lane == lane]
    return sorted(found, key=lambda span: span.start_ns)
