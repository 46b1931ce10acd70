"""Published steps on A100s as cases: Megatron-LM, Korthikanti, zero-bubble, BLOOM, vTrain, MosaicML, ZeRO-3 and FSDP.

What a source does not say is assumed here, in one place, with the reason. Models have a vocabulary of 51,200 unless the
source says otherwise. Megatron-LM of those years sums gradients in float32 behind the last backward ("flat").
"""

from __future__ import annotations

from functools import cache

from distlab.plan import Plan, Precision, Sharding, Workload
from simulator.models.attention_kernel import fuse_attention
from simulator.models.gpt import gpt_step_flops, gpt_workload
from simulator.validation.case import FSDP, Case, Row, read_table

MEGATRON = Precision("bfloat16", gradients="float32")
SIXTEEN_BITS = Precision("bfloat16", gradients="bfloat16", reduce="bfloat16")
DEEPSPEED = "megatron-deepspeed"


@cache
def gpt(hidden: int, layers: int, heads: int, sequence: int, batch: int, vocabulary: int = 51200) -> Workload:
    """Return a GPT with plain attention."""
    return gpt_workload(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        sequence_length=sequence,
        vocab_size=vocabulary,
        microbatch_size=batch,
    )


# Micro-batch and stages per rank of Table 1, from examples/sc21/run_table_1.sh of NVIDIA/Megatron-LM, 2021.
SC21_RUNS = {"1.7": (16, 1), "7.5": (16, 1), "39.1": (4, 1), "145.6": (2, 2)}


def sc21() -> list[Case]:
    """Return the weak scaling of Megatron-LM and its step of 175B: full recompute (2104.04473, Tables 1 and 2)."""
    cases = []
    for row in read_table("megatron_sc21_table1_weak_scaling"):
        micro, per_rank = SC21_RUNS[row["params_b"]]
        data, pipeline = int(row["dp_derived"]), int(row["pp"])
        plan = Plan(
            data=data,
            pipeline=pipeline,
            tensor=int(row["tp"]),
            num_microbatches=int(row["global_batch"]) // data // micro,
            recompute="full",
            gradient_sync="flat",
            precision=MEGATRON,
            cut="blocks",
            schedule="interleaved" if per_rank > 1 else "one_f_one_b",
            stages_per_rank=per_rank,
        )
        workload = gpt(int(row["hidden"]), int(row["layers"]), int(row["heads"]), 2048, micro)
        size = f"{row['params_b']}B"
        measured = float(row["derived_iter_time_s"])
        cases.append(Case("Megatron-LM SC21", size, size, workload, plan, "dgx-a100", "megatron", measured))
    row = next(row for row in read_table("megatron_sc21_table2_ptdp_vs_zero3") if row["scheme"] == "PTD-P")
    flops = gpt_step_flops(12288, 96, 2048, 51200, int(row["global_batch"]), recompute="full")
    seconds = flops / int(row["gpus"]) / (float(row["achieved_tflops_per_gpu"]) * 1e12)
    plan = Plan(
        data=4,
        pipeline=12,
        tensor=8,
        num_microbatches=int(row["global_batch"]) // 4,
        recompute="full",
        gradient_sync="flat",
        precision=MEGATRON,
        cut="blocks",
    )
    cases.append(
        Case("Megatron-LM SC21", "175B", "175B", gpt(12288, 96, 96, 2048, 1), plan, "dgx-a100", "megatron", seconds)
    )
    return cases


def korthikanti() -> list[Case]:
    """Return steps of 22B and 175B with full, or with selective recompute and sequences split (2205.05198)."""
    cases = []
    for row in read_table("korthikanti_table3_5_iteration_time"):
        micro, per_rank = int(row["micro_batch"]), int(row["interleave_m"])
        workload = gpt(int(row["hidden"]), int(row["layers"]), int(row["heads"]), int(row["seq"]), micro)
        for name, recompute in (("full", "full"), ("seqpar_selective", "selective")):
            plan = Plan(
                pipeline=int(row["pp"]),
                tensor=int(row["tp"]),
                num_microbatches=int(row["global_batch"]) // micro,
                recompute=recompute,
                sequence_parallel=recompute == "selective",
                precision=MEGATRON,
                cut="blocks",
                schedule="interleaved" if per_rank > 1 else "one_f_one_b",
                stages_per_rank=per_rank,
            )
            measured = float(row["full_recompute_s" if name == "full" else "seqpar_selective_s"])
            label = f"{row['model']} {name}"
            cases.append(
                Case("Korthikanti", label, row["model"], workload, plan, "dgx-a100", "megatron", measured, row["model"])
            )
    return cases


SCHEDULE_OF = {"1F1B": "one_f_one_b", "ZB-1p": "zb_1p", "ZB-2p": "zb_2p", "1F1B-I": "interleaved"}


def zero_bubble() -> list[Case]:
    """Return steps of 1F1B and zero bubble: one stage per GPU, nothing recomputed (2401.10241, Table 4)."""
    cases = []
    for row in read_table("zerobubble_table4_throughput_memory"):
        micro, count, ranks = int(row["micro_batch"]), int(row["num_microbatches"]), int(row["pp_gpus"])
        workload = gpt(int(row["hidden"]), int(row["layers"]), int(row["heads"]), int(row["seq"]), micro)
        schedule = SCHEDULE_OF[row["schedule"]]
        plan = Plan(pipeline=ranks, num_microbatches=count, schedule=schedule, precision=MEGATRON, cut="blocks")
        seconds = micro * count / (float(row["samples_per_gpu_per_s"]) * ranks)
        label = f"{row['model']} {row['schedule']} m={count}"
        choice = f"{row['model']} m={count}"
        cases.append(Case("zero-bubble", label, row["model"], workload, plan, "dgx-a100", "megatron", seconds, choice))
    return cases


def bloom() -> list[Case]:
    """Return sweeps before the training of BLOOM: full recompute, ZeRO-1, 384 GPUs, a vocabulary of 250,880.

    Until 02-28 gradients were added up and sent in 16 bits, and with more than 100B parameters every launch waited for
    its kernel (CUDA_LAUNCH_BLOCKING=1): bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, 2022.

    Runs that ended for want of memory are left out, and heads of 108 elements, which no tensor core takes: 156.84 s in
    place of 118.12 s. The row with 8 replicas and 1,568 samples is among no alternatives: with 2,048 samples the same
    plan takes 1.1 s more, for 480 samples that take 12 s at the data sheet's rate.
    """
    cases = []
    for row in read_table("bloom_prequel_a100_sweeps"):
        hidden, heads = int(row["nhidden"]), int(row["nheads"])
        if not row["sec_per_iter"] or hidden // heads % 8:
            continue
        data, micro, batch = int(row["dp"]), int(row["mbs"]), int(row["gbs"])
        layers = int(row["nlayers"] or 72)
        if batch % (data * micro):
            continue
        plan = Plan(
            data=data,
            pipeline=int(row["pp"]),
            tensor=int(row["tp"]),
            num_microbatches=batch // data // micro,
            recompute="full",
            sharding=Sharding(1),
            gradient_sync="flat",
            precision=SIXTEEN_BITS,
            cut="blocks",
        )
        workload = gpt(hidden, layers, heads, int(row["seq_len"]), micro, 250880)
        degrees = f"dp={data} pp={row['pp']}"
        label = f"h={hidden} l={layers} a={heads} {degrees} mbs={micro} gbs={batch}"
        is_disturbed = (data, batch) == (8, 1568)
        choice = f"h={hidden} gbs={batch}" if row["section"] == "GBS Variations" and not is_disturbed else ""
        cases.append(
            Case("BLOOM", label, "Jean Zay", workload, plan, "jean-zay", DEEPSPEED, float(row["sec_per_iter"]), choice)
        )
    return cases


def vtrain_many_nodes() -> list[Case]:
    """Return 26 plans of 3.6B on 64 GPUs in 8 nodes (vTrain), with gradients of 16 bits as its own simulator counts.

    Full recompute and 800 Gb/s per node are those of its configurations (VIA-Research/vTrain, config/validation/multi).
    """
    rows = read_table("vtrain_ground_truth_multi_node_a100")
    return [_vtrain(row, "vTrain, 8 nodes", "full", DEEPSPEED) for row in rows]


def vtrain_one_node() -> list[Case]:
    """Return 720 plans of models 1,024 wide on 2 to 8 GPUs (vTrain), which its source computed from profiled layers.

    Not said: whether anything is recomputed, and the gradients' type. Nothing and 16 bits are assumed: rows of 2, 4 and
    8 replicas differ by 1.39 and 0.75 ms, which is a ring of 0.71 GB at 230 GB/s; 32 bits would need twice the wire.
    """
    rows = read_table("vtrain_ground_truth_single_node_a100")
    return [_vtrain(row, "vTrain, 1 node", "none", "vtrain-profile") for row in rows]


def _vtrain(row: Row, family: str, recompute: str, stack: str) -> Case:
    micro, data, batch = int(row["micro batch"]), int(row["data parallelism"]), int(row["global batch"])
    tensor, pipeline, layers = int(row["tensor parallelism"]), int(row["pipeline parallelism"]), int(row["# layers"])
    sizes = (int(row["hidden size"]), layers, int(row["attention heads"]), int(row["sequence length"]))
    plan = Plan(
        data=data,
        pipeline=pipeline,
        tensor=tensor,
        num_microbatches=batch // data // micro,
        recompute=recompute,
        gradient_sync="flat",
        cut="blocks",
    )
    label = f"l={layers} gpus={row['# GPUs']} batch={batch} mbs={micro} dp={data} tp={tensor} pp={pipeline}"
    choice = f"l={layers} gpus={row['# GPUs']} batch={batch}"
    structure = "3.6B" if family == "vTrain, 8 nodes" else f"l={layers}"
    seconds = float(row["iteration time (ms)"]) / 1e3
    return Case(family, label, structure, gpt(*sizes, micro), plan, "a100-4-cards", stack, seconds, choice)


def zero_three() -> list[Case]:
    """Return 175B by ZeRO's stage 3 over 48 nodes: DeepSpeed of 2021, full recompute (2104.04473, Table 2)."""
    row = next(row for row in read_table("megatron_sc21_table2_ptdp_vs_zero3") if row["scheme"] == "ZeRO-3")
    samples, gpus, micro = int(row["global_batch"]), int(row["gpus"]), int(row["micro_batch"])
    flops = gpt_step_flops(12288, 96, 2048, 51200, samples, recompute="full")
    seconds = flops / gpus / (float(row["achieved_tflops_per_gpu"]) * 1e12)
    plan = Plan(data=gpus, num_microbatches=samples // gpus // micro, recompute="full", sharding=Sharding(3))
    workload = gpt(12288, 96, 96, 2048, micro)
    return [Case("SC21 ZeRO-3", "175B", "175B", workload, plan, "dgx-a100", DEEPSPEED, seconds)]


def fsdp_paper() -> list[Case]:
    """Return 175B by FSDP, 1 and 2 samples per GPU: plain attention, a vocabulary of 50,000 (2304.11277, section 5.4).

    The rates hold on 128 to 512 GPUs; 256 are taken. The rates count what full recompute runs again.
    """
    rates = {row["what"]: float(row["value"]) for row in read_table("fsdp_ddp_scalars")}
    cases = []
    for micro, what in ((1, "FSDP GPT-175B A100 128-512 GPUs batch 1"), (2, "FSDP GPT-175B batch 2")):
        seconds = gpt_step_flops(12288, 96, 2048, 50000, micro, recompute="full") / (rates[what] * 1e12)
        plan = Plan(data=256, recompute="full", sharding=Sharding(3))
        workload = gpt(12288, 96, 96, 2048, micro, 50000)
        label = f"175B, {micro} per GPU"
        cases.append(Case("FSDP paper", label, label, workload, plan, "dgx-a100", "fsdp-plain", seconds))
    return cases


def mosaicml() -> list[Case]:
    """Return MPT 7B and 13B by FSDP on one node: flash attention, a vocabulary of 50,368 (llm-foundry).

    Every micro-batch scatters its gradients, in float32: mosaicml/composer, mixed_precision "DEFAULT", 2023.
    """
    cases = []
    for row in read_table("mosaicml_llmfoundry_fsdp_throughput"):
        sequence, ranks, micro = int(row["seqlen_(t)"]), int(row["#_gpus"]), int(row["microbatchsize"])
        layers, hidden = (32, 4096) if row["model"] == "7b" else (40, 5120)
        plain = gpt_workload(
            hidden_size=hidden,
            num_layers=layers,
            num_heads=hidden // 128,
            sequence_length=sequence,
            vocab_size=50368,
            microbatch_size=micro,
        )
        workload = fuse_attention(plain)
        plan = Plan(
            data=ranks,
            num_microbatches=int(row["gradaccum"]),
            sharding=Sharding(3),
            precision=FSDP,
            recompute="full" if row["activation_checkpointing"] == "True" else "none",
        )
        seconds = int(row["globalbatchsize_(t)"]) / (int(row["throughput_(t/s/gpu)"]) * ranks)
        label = f"{row['model']} s={sequence}"
        cases.append(Case("MosaicML", label, f"s={sequence}", workload, plan, "dgx-a100", "fsdp", seconds))
    return cases


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
