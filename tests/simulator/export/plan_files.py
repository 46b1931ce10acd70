"""Plan files that tests of exports share: one that each tool can express, and how to change it."""

from dataclasses import replace

from distlab.plan import Plan, Precision, Sharding
from simulator import ClusterDescription, ModelDescription, PlanFile

LLAMA = ModelDescription("llama-3-8b", microbatch_size=2)
H100 = ClusterDescription("dgx-h100")
BF16 = Precision("bfloat16")


def said(plan=None, *, model=LLAMA, cluster=H100, order=None, **changes):
    """Return a plan file; `changes` are of the plan."""
    own = replace(plan or Plan(4, num_microbatches=8), **changes)
    return PlanFile(model, cluster, own) if order is None else PlanFile(model, cluster, own, order)


SHARDED = Plan(16, num_microbatches=4, sharding=Sharding(3), precision=BF16)
WIDE = Plan(
    8, 4, 32, tensor=8, sequence_parallel=True, sharding=Sharding(1), recompute="selective", context=1, precision=BF16
)
