"""Published steps on A100s as cases: Megatron-LM, Korthikanti, zero-bubble, BLOOM, vTrain, MosaicML, ZeRO-3 and FSDP.

What a source does not say is assumed here, in one place, with the reason. Models have a vocabulary of 51,200 unless the
source says otherwise. Megatron-LM of those years sums gradients in float32 behind the last backward ("flat").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distlab.plan import Plan, Sharding
from simulator.models.attention_kernel import fuse_attention
from simulator.models.gpt import gpt_step_flops
from simulator.validation.case import FSDP, MEGATRON, SIXTEEN_BITS, Case, Row, gpt, plan_of, read_table

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
    row, seconds = _table_2("PTD-P")
    plan = plan_of(row["global_batch"], 1, data=4, pipeline=12, tensor=8, precision=MEGATRON, **FULL_FLAT)
    steps.append(("175B", gpt(*GPT_3, 1), plan, seconds))
    for size, workload, plan, seconds in steps:
        yield Case("Megatron-LM SC21", size, size, workload, plan, "dgx-a100", "megatron", seconds)


def _table_2(scheme: str) -> tuple[Row, float]:
    """Return a row of Table 2, and its step's time by equation 3."""
    row = next(row for row in read_table("megatron_sc21_table2_ptdp_vs_zero3") if row["scheme"] == scheme)
    flops = gpt_step_flops(12288, 96, 2048, 51200, row["global_batch"], recompute="full")
    return row, flops / row["gpus"] / (row["achieved_tflops_per_gpu"] * 1e12)


def korthikanti() -> Iterator[Case]:
    """Yield steps of 22B and 175B with full, or with selective recompute and sequences split (2205.05198)."""
    for row in read_table("korthikanti_table3_5_iteration_time"):
        micro, model = row["micro_batch"], row["model"]
        workload = gpt(row["hidden"], row["layers"], row["heads"], row["seq"], micro)
        degrees = {"pipeline": row["pp"], "tensor": row["tp"], "stages": row["interleave_m"]}
        for name, recompute, time in (
            ("full", "full", "full_recompute_s"),
            ("seqpar_selective", "selective", "seqpar_selective_s"),
        ):
            splits = recompute == "selective"
            own = {"recompute": recompute, "sequence_parallel": splits, "precision": MEGATRON, **degrees}
            where = ("dgx-a100", "megatron", row[time], model)
            plan = plan_of(row["global_batch"], micro, **own)
            yield Case("Korthikanti", f"{model} {name}", model, workload, plan, *where)


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
        yield Case("zero-bubble", f"{model} {row['schedule']} m={count}", model, workload, plan, *where)


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


def zero_three() -> Iterator[Case]:
    """Yield 175B by ZeRO's stage 3 over 48 nodes: DeepSpeed of 2021, full recompute (2104.04473, Table 2)."""
    row, seconds = _table_2("ZeRO-3")
    micro, sharding = row["micro_batch"], Sharding(3)
    plan = plan_of(row["global_batch"], micro, data=row["gpus"], recompute="full", sharding=sharding, cut="time")
    yield Case("SC21 ZeRO-3", "175B", "175B", gpt(*GPT_3, micro), plan, "dgx-a100", DEEPSPEED, seconds)


def fsdp_paper() -> Iterator[Case]:
    """Yield 175B by FSDP, 1 and 2 samples per GPU: plain attention, a vocabulary of 50,000 (2304.11277, section 5.4).

    The rates hold on 128 to 512 GPUs; 256 are taken. The rates count what full recompute runs again.
    """
    rates = {row["what"]: row["value"] for row in read_table("fsdp_ddp_scalars")}
    for micro, what in ((1, "FSDP GPT-175B A100 128-512 GPUs batch 1"), (2, "FSDP GPT-175B batch 2")):
        seconds = gpt_step_flops(12288, 96, 2048, 50000, micro, recompute="full") / (rates[what] * 1e12)
        plan, label = Plan(data=256, recompute="full", sharding=Sharding(3)), f"175B, {micro} per GPU"
        where = ("dgx-a100", "fsdp-plain", seconds)
        yield Case("FSDP paper", label, label, gpt(*GPT_3, micro, 50000), plan, *where)


def mosaicml() -> Iterator[Case]:
    """Yield MPT 7B and 13B by FSDP on one node: flash attention, a vocabulary of 50,368 (llm-foundry).

    Every micro-batch scatters its gradients, in float32: mosaicml/composer, mixed_precision "DEFAULT", 2023.
    """
    for row in read_table("mosaicml_llmfoundry_fsdp_throughput"):
        sequence, ranks, micro = row["seqlen_(t)"], row["#_gpus"], row["microbatchsize"]
        layers, hidden = (32, 4096) if row["model"] == "7b" else (40, 5120)
        workload = fuse_attention(gpt(hidden, layers, hidden // 128, sequence, micro, 50368))
        recompute = "full" if row["activation_checkpointing"] == "True" else "none"
        own: dict[str, Any] = {"sharding": Sharding(3), "precision": FSDP, "recompute": recompute}
        plan = Plan(data=ranks, num_microbatches=row["gradaccum"], **own)
        where = ("dgx-a100", "fsdp", row["globalbatchsize_(t)"] / (row["throughput_(t/s/gpu)"] * ranks))
        yield Case("MosaicML", f"{row['model']} s={sequence}", f"s={sequence}", workload, plan, *where)


A100_FAMILIES = (
    sc21,
    korthikanti,
    zero_bubble,
    bloom,
    vtrain_many_nodes,
    vtrain_one_node,
    mosaicml,
    zero_three,
    fsdp_paper,
)
