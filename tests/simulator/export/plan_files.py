"""Plan files that tests of exports share: what each tool can express, and how to change it."""

from dataclasses import replace
from itertools import product

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
WIDE = Plan(8, 4, 32, tensor=8, sequence_parallel=True, sharding=Sharding(1), recompute="selective", precision=BF16)

MODELS = {name: ModelDescription(name) for name in ("llama-3-70b", "gpt-3-175b", "qwen-3-30b-a3b", "qwen-2.5-7b")}
OWN = ModelDescription(hidden_size=512, num_layers=4, num_heads=8, num_key_value_heads=2, feed_forward_size=1536)
DATA_FIRST = ("data", "pipeline", "expert", "context", "tensor")
SUMS = (("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float16", "float16"))
TYPES = (None, BF16, Precision("float16", gradients="float16"))
PLANS = {  # of each tool; test_read_by_tools gives the first of them to its own parser
    "torchtitan": [
        said(SHARDED),
        said(Plan(8, 2, 8, tensor=2, sharding=Sharding(3, replicas=2), recompute="full", precision=BF16)),
        said(Plan(4, context=2, sharding=Sharding(2), recompute="selective"), model=ModelDescription("qwen-3-32b")),
        said(Plan(2, 4, 8, schedule="interleaved", stages_per_rank=4), model=MODELS["llama-3-70b"]),
        said(Plan(2, 4, 8, schedule="zb_v", stages_per_rank=2), model=MODELS["llama-3-70b"]),
        said(Plan(2, expert=4, sharding=Sharding(3)), model=MODELS["qwen-3-30b-a3b"]),
        said(Plan(4, 2, 8, tensor=8, sequence_parallel=True), model=MODELS["llama-3-70b"]),
        said(Plan(4, expert=8, sharding=Sharding(3)), model=ModelDescription("deepseek-v3")),
        said(Plan(8, 4, 16, tensor=2, context=2, sharding=Sharding(3, replicas=2), recompute="full", precision=BF16)),
        said(Plan(1, 4, 8, schedule="interleaved", stages_per_rank=2), model=MODELS["llama-3-70b"]),
        said(SHARDED, recompute="operators", float8="products"),
    ],
    "accelerate": [
        said(),
        said(sharding=Sharding(1, offload="optimizer")),
        said(SHARDED),
        said(SHARDED, data=8, tensor=2, context=2, recompute="full"),
        said(SHARDED, sharding=Sharding(3, replicas=2, offload="all")),
        said(SHARDED, sharding=Sharding(2)),
        said(SHARDED, recompute="full", recompute_method="block", recompute_layers=4),
    ],
    "megatron": [
        said(WIDE, model=MODELS["llama-3-70b"]),
        said(WIDE, model=MODELS["gpt-3-175b"], recompute="full"),
        said(Plan(2, 2, 8, schedule="interleaved", stages_per_rank=4)),
        said(Plan(2, expert=4), model=MODELS["qwen-3-30b-a3b"]),
        said(SHARDED, context=2),
        said(Plan(2, tensor=2), model=MODELS["qwen-2.5-7b"]),
        said(SHARDED, float8="gathers", recompute="full", recompute_method="block", recompute_layers=8),
        said(WIDE, model=MODELS["gpt-3-175b"], order=DATA_FIRST),
        said(Plan(4, expert=4, fold_experts=True), model=ModelDescription("qwen-3-30b-a3b", capacity_factor=1.5)),
        said(Plan(2), model=OWN),
        *(said(precision=Precision(compute, reduce=sums, gradients=sums)) for compute, sums in SUMS),
        said(precision=Precision("float32")),
    ],
    "deepspeed": [
        *(
            said(Plan(4, num_microbatches=micro, sharding=Sharding(stage, offload=offload), precision=precision))
            for stage, offload, precision, micro in product(range(4), ("none", "optimizer", "all"), TYPES, (1, 3))
            if (offload == "none" or stage > 0) and (offload != "all" or stage == 3)
        ),
        said(Plan(4, sharding=Sharding(3, replicas=2, prefetch=2, unit_layers=2))),
        said(Plan(4, sharding=Sharding(3, reshard_after_forward=False, prefetch=0), bucket_bytes=10_000_000)),
        said(Plan(2, pipeline=2, tensor=2, context=2, recompute="full", sharding=Sharding(1))),
        said(Plan(2, context=4, context_kind="all_to_all")),
        said(Plan(context=2, tensor=2)),
    ],
    **dict.fromkeys(
        ("torchrun", "slurm", "pytorchjob", "jobset"), [said(), said(Plan(8)), said(Plan(4, 4, 8, tensor=2))]
    ),
}
