"""Published steps as cases, each family with what its source does not say and is assumed here, and the reason.

On A100s, with plain attention: Megatron-LM, zero-bubble, BLOOM and vTrain. Models have a vocabulary of 51,200 unless
the source says otherwise. Megatron-LM of those years sums gradients in float32 behind the
last backward ("flat"). Steps that a plan file can say stand in `plan_rows.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distlab.plan import Plan, Sharding
from simulator.models.gpt import gpt_step_flops
from simulator.validation.case import MEGATRON, SIXTEEN_BITS, Case, Row, gpt, plan_of, read_table

DEEPSPEED = "megatron-deepspeed"
FULL_FLAT: dict[str, Any] = {"recompute": "full", "gradient_sync": "flat"}
GPT_3 = (12288, 96, 96, 2048)
# Micro-batch and stages per rank of Table 1, from examples/sc21/run_table_1.sh of NVIDIA/Megatron-LM, 2021.
SC21_RUNS = {1.7: (16, 1), 7.5: (16, 1), 39.1: (4, 1), 145.6: (2, 2)}


def sc21() -> Iterator[Case]:
    """Yield the weak scaling of Megatron-LM and its step of 175B: full recompute (2104.04473, Tables 1 and 2)."""
    steps = []
    for row in read_table("megatron_sc21_table1_weak_scaling"):
        micro, stages = SC21_RUNS[row["params_b"]]
        degrees = {"data": row["dp_derived"], "pipeline": row["pp"], "tensor": row["tp"]}
        plan = plan_of(row["global_batch"], micro, stages=stages, precision=MEGATRON, **degrees, **FULL_FLAT)
        workload = gpt(row["hidden"], row["layers"], row["heads"], 2048, micro)
        steps.append((f"{row['params_b']}B", workload, plan, row["derived_iter_time_s"]))
    row = next(row for row in read_table("megatron_sc21_table2_ptdp_vs_zero3") if row["scheme"] == "PTD-P")
    flops = gpt_step_flops(*GPT_3[:2], 2048, 51200, row["global_batch"], recompute="full")
    seconds = flops / row["gpus"] / (row["achieved_tflops_per_gpu"] * 1e12)
    plan = plan_of(row["global_batch"], 1, data=4, pipeline=12, tensor=8, precision=MEGATRON, **FULL_FLAT)
    steps.append(("175B", gpt(*GPT_3, 1), plan, seconds))
    for size, workload, plan, seconds in steps:
        yield Case("Megatron-LM SC21", size, size, workload, plan, "dgx-a100", "megatron", seconds)


SCHEDULE_OF = {"1F1B": "one_f_one_b", "ZB-1p": "zb_1p", "ZB-2p": "zb_2p", "1F1B-I": "interleaved"}


def zero_bubble() -> Iterator[Case]:
    """Yield steps of 1F1B and zero bubble: one stage per GPU, nothing recomputed (2401.10241, Table 4)."""
    for row in read_table("zerobubble_table4_throughput_memory"):
        micro, count, ranks, model = row["micro_batch"], row["num_microbatches"], row["pp_gpus"], row["model"]
        workload = gpt(row["hidden"], row["layers"], row["heads"], row["seq"], micro)
        schedule = SCHEDULE_OF[row["schedule"]]
        plan = Plan(pipeline=ranks, num_microbatches=count, schedule=schedule, precision=MEGATRON, cut="blocks")
        seconds = micro * count / (row["samples_per_gpu_per_s"] * ranks)
        where = ("dgx-a100", "megatron", seconds, f"{model} m={count}")
        label, held = f"{model} {row['schedule']} m={count}", float(row["memory_gb"])
        yield Case("zero-bubble", label, model, workload, plan, *where, memory_gib=held)


def bloom() -> Iterator[Case]:
    """Yield sweeps before the training of BLOOM: full recompute, ZeRO-1, 384 GPUs, a vocabulary of 250,880.

    Until 02-28 gradients were added up and sent in 16 bits, and with more than 100B parameters every launch waited for
    its kernel (CUDA_LAUNCH_BLOCKING=1): bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, 2022.

    Runs that ended for want of memory are left out, and heads of 108 elements, which no tensor core takes: 156.84 s in
    place of 118.12 s. The row with 8 replicas and 1,568 samples is among no alternatives: with 2,048 samples the same
    plan takes 1.1 s more, for 480 samples that take 12 s at the data sheet's rate.
    """
    for row in read_table("bloom_prequel_a100_sweeps"):
        hidden, heads, data, micro, batch = (row[key] for key in ("nhidden", "nheads", "dp", "mbs", "gbs"))
        if not row["sec_per_iter"] or hidden // heads % 8 or batch % (data * micro):
            continue
        layers, degrees = row["nlayers"] or 72, {"data": data, "pipeline": row["pp"], "tensor": row["tp"]}
        plan = plan_of(batch, micro, sharding=Sharding(1), precision=SIXTEEN_BITS, **degrees, **FULL_FLAT)
        workload = gpt(hidden, layers, heads, row["seq_len"], micro, 250880)
        label = f"h={hidden} l={layers} a={heads} dp={data} pp={row['pp']} mbs={micro} gbs={batch}"
        is_disturbed = (data, batch) == (8, 1568)
        choice = f"h={hidden} gbs={batch}" if row["section"] == "GBS Variations" and not is_disturbed else ""
        where = ("jean-zay", DEEPSPEED, row["sec_per_iter"], choice)
        yield Case("BLOOM", label, "Jean Zay", workload, plan, *where)


def vtrain_many_nodes() -> Iterator[Case]:
    """Yield 26 plans of 3.6B on 64 GPUs in 8 nodes (vTrain), with gradients of 16 bits as its own simulator counts.

    Full recompute and 800 Gb/s per node are those of its configurations (VIA-Research/vTrain, config/validation/multi).
    """
    rows = read_table("vtrain_ground_truth_multi_node_a100")
    yield from (_vtrain(row, "vTrain, 8 nodes", "full", DEEPSPEED) for row in rows)


def vtrain_one_node() -> Iterator[Case]:
    """Yield 720 plans of models 1,024 wide on 2 to 8 GPUs (vTrain), which its source computed from profiled layers.

    Not said: whether anything is recomputed, and the gradients' type. Nothing and 16 bits are assumed: rows of 2, 4 and
    8 replicas differ by 1.39 and 0.75 ms, which is a ring of 0.71 GB at 230 GB/s; 32 bits would need twice the wire.
    """
    rows = read_table("vtrain_ground_truth_single_node_a100")
    yield from (_vtrain(row, "vTrain, 1 node", "none", "vtrain-profile") for row in rows)


def _vtrain(row: Row, family: str, recompute: str, stack: str) -> Case:
    micro, batch, layers, data = row["micro batch"], row["global batch"], row["# layers"], row["data parallelism"]
    tensor, pipeline = row["tensor parallelism"], row["pipeline parallelism"]
    degrees = {"data": data, "pipeline": pipeline, "tensor": tensor}
    plan = plan_of(batch, micro, **degrees, recompute=recompute, gradient_sync="flat")
    choice = f"l={layers} gpus={row['# GPUs']} batch={batch}"
    label = f"{choice} mbs={micro} dp={data} tp={tensor} pp={pipeline}"
    structure = "3.6B" if family == "vTrain, 8 nodes" else f"l={layers}"
    workload = gpt(row["hidden size"], layers, row["attention heads"], row["sequence length"], micro)
    where = ("a100-4-cards", stack, row["iteration time (ms)"] / 1e3, choice)
    return Case(family, label, structure, workload, plan, *where)


FAMILIES = (sc21, zero_bubble, bloom, vtrain_many_nodes, vtrain_one_node)
