"""The DeepSpeed configuration says what the plan says; where DeepSpeed is installed its own parser reads it."""

import itertools

import pytest

from distlab.plan import Plan, Precision, Sharding
from simulator import gpt_workload
from simulator.export import deepspeed_config

GPT = gpt_workload(hidden_size=64, num_layers=4, num_heads=4, sequence_length=16, vocab_size=101)
TYPES = (None, Precision("bfloat16"), Precision("float16", gradients="float16"))
PLANS = [
    Plan(4, num_microbatches=micro, sharding=Sharding(stage, offload=offload), precision=precision)
    for stage, offload, precision, micro in itertools.product(
        range(4), ("none", "optimizer", "all"), TYPES, (1, 3)
    )
    if (offload == "none" or stage > 0) and (offload != "all" or stage == 3)
] + [
    Plan(4, sharding=Sharding(3, replicas=2, prefetch=2, unit_layers=2)),
    Plan(4, sharding=Sharding(3, reshard_after_forward=False, prefetch=0)),
    Plan(2, pipeline=2, tensor=2, context=2, recompute="full", sharding=Sharding(1)),
]  # fmt: skip


def test_what_the_plan_says_is_there():
    plan = Plan(
        8,
        num_microbatches=4,
        bucket_bytes=10_000_000,
        sharding=Sharding(3, unit_layers=2, prefetch=2, offload="all"),
        precision=Precision("bfloat16"),
    )
    config = deepspeed_config(plan, microbatch_size=2, max_norm=0.5, workload=GPT)
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"] == {"enabled": True}
    assert config["communication_data_type"] == "fp32"
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["reduce_bucket_size"] == 5_000_000, "elements of two bytes"
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    sizes = [layer.num_parameters for layer in GPT.layers]
    unit = max(sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2))
    assert zero["stage3_prefetch_bucket_size"] == 2 * unit
    assert zero["stage3_max_live_parameters"] == 3 * unit


def test_a_spread_sequence_needs_both_sizes():
    plan = Plan(2, context=4, context_kind="all_to_all")
    config = deepspeed_config(plan)
    assert config["sequence_parallel_size"] * config["data_parallel_size"] == plan.world_size
    assert "data_parallel_size" not in deepspeed_config(Plan(context=2, tensor=2)), "two sizes would not fill the ranks"


def test_its_own_parser_reads_the_plan_back():
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: its parser was not asked")
    from deepspeed.runtime.config import DeepSpeedConfig

    for plan in PLANS:
        read = DeepSpeedConfig(deepspeed_config(plan, microbatch_size=2, max_norm=1.0, workload=GPT))
        zero = read.zero_config
        assert zero.stage == plan.sharding.stage
        assert (zero.offload_optimizer is not None) == (plan.sharding.offload != "none")
        assert (zero.offload_param is not None) == (plan.sharding.offload == "all")
        assert read.gradient_accumulation_steps == plan.num_microbatches
        assert read.train_micro_batch_size_per_gpu == 2
        assert read.gradient_clipping == 1.0
        assert not zero.model_extra, "a field that it does not know"
        if plan.sharding.stage == 3:
            assert zero.param_persistence_threshold == 0
        if plan.precision is not None:
            assert read.bfloat16_config.enabled == (plan.precision.compute == "bfloat16")
            assert read.float16_config.enabled == (plan.precision.compute == "float16")
