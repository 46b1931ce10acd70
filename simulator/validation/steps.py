"""Published steps as cases, each family with what its source does not say and is assumed here, and the reason.

On A100s: Megatron-LM, Korthikanti, zero-bubble, BLOOM, vTrain, MosaicML, ZeRO-3 and FSDP. Models have a vocabulary of
51,200 unless the source says otherwise. Megatron-LM of those years sums gradients in float32 behind the last backward
("flat"). On H100s: Megatron-Core, NeMo, Llama 3, torchtitan and nanotron. All use flash attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distlab.plan import Plan, Sharding, Workload
from simulator.models.attention_kernel import fuse_attention
from simulator.models.by_name import LLAMA
from simulator.models.gpt import gpt_step_flops
from simulator.models.llama import LlamaSizes, llama_workload
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


PEAK = 989.4e12


def _llama(sizes: LlamaSizes, sequence: int, samples: int) -> Workload:
    return fuse_attention(llama_workload(sizes, sequence_length=sequence, microbatch_size=samples))


def _seconds(workload: Workload, plan: Plan, mfu: float) -> float:
    """Return the time of a step from its published MFU."""
    counted = workload.counted_flops * plan.num_microbatches * plan.num_replicas
    return counted / (mfu * PEAK * plan.world_size)


def megatron_core() -> Iterator[Case]:
    """Yield weak scaling at a vocabulary of 131,072 with a distributed optimizer and overlapped exchanges.

    Not said: micro-batches (assumed: all that a replica has; with a pipeline one sample), stages per rank of the
    pipeline (assumed: four), how attention is counted (assumed: all pairs).
    """
    for row in read_table("megatron_core_h100_weak_scaling"):
        data, batch, tensor, pipeline = (row[key] for key in ("dp", "global_batch", "tp", "pp"))
        micro, stages = (1, 4) if pipeline > 1 else (batch // data, 1)
        workload = fuse_attention(gpt(row["hidden"], row["layers"], row["heads"], 4096, micro, 131072))
        degrees = {"data": data, "pipeline": pipeline, "tensor": tensor, "sequence_parallel": tensor > 1}
        plan = plan_of(batch, micro, stages=stages, sharding=Sharding(1), precision=MEGATRON, **degrees)
        measured = _seconds(workload, plan, row["tflops_per_gpu"] * 1e12 / PEAK)
        stack, size = "transformer-engine", row["model"]
        yield Case("Megatron-Core", size, size, workload, plan, "dgx-h100", stack, measured)


# Sizes of NVIDIA's benchmarks: their published operations per token fit them to 0.5 %. Nemotron's have no gates.
NEMO_GPT = {"GPT3-5B": (4096, 24, 32), "GPT3-20B": (6144, 44, 48), "GPT3-175B": (12288, 96, 96)}
NEMO_LLAMA = {
    "LLAMA2-7B": LLAMA["llama-2-7b"],
    "LLAMA2-13B": LLAMA["llama-2-13b"],
    "LLAMA2-70B": LLAMA["llama-2-70b"],
    "LLAMA3-8B": LLAMA["llama-3-8b"],
    "LLAMA3-70B": LLAMA["llama-3-70b"],
    "Nemotron-8B": LlamaSizes(4096, 32, 32, 32, 16384, 256000, is_gated=False),
    "Nemotron-15B": LlamaSizes(6144, 32, 48, 8, 24576, 256000, is_gated=False),
    "Nemotron-22B": LlamaSizes(6144, 40, 48, 48, 24576, 256000, is_gated=False),
    "Nemotron-340B": LlamaSizes(18432, 96, 96, 8, 73728, 256000, is_gated=False),
}


def nemo() -> Iterator[Case]:
    """Yield NVIDIA's own benchmarks of NeMo in 16 and 8 bits, on 8 to 2,048 GPUs: nothing recomputed.

    Gradients are summed and kept in 16 bits, as its launch scripts say (NVIDIA/NeMo-Framework-Launcher, examples,
    optim.grad_sync_dtype=bf16, 2024): with 32 bits 15B and 20B would not fit.
    """
    for row in read_table("nemo_h100_steps"):
        model, micro, gpus, batch, sequence = (
            row[key] for key in ("model", "micro_batch", "gpus", "global_batch", "seq_len")
        )
        degrees = {"pipeline": row["pp"], "tensor": row["tp"], "context": row["cp"], "sequence_parallel": row["tp"] > 1}
        if model in NEMO_LLAMA:
            workload = _llama(NEMO_LLAMA[model], sequence, micro)
        else:
            workload = fuse_attention(gpt(*NEMO_GPT[model], sequence, micro))
        float8 = "products" if row["precision"] == "fp8" else "none"
        own: dict[str, Any] = {"sharding": Sharding(1), "precision": SIXTEEN_BITS, "float8": float8, **degrees}
        plan = plan_of(batch, micro, data=gpus // (row["tp"] * row["pp"] * row["cp"]), stages=row["vp"], **own)
        measured = float(row["step_s"] or batch * sequence / gpus / row["tokens_per_s_per_gpu"])
        label = f"{model} {row['precision']} on {gpus}"
        yield Case("NeMo", label, model, workload, plan, "dgx-h100", "nemo", measured)


def llama3() -> Iterator[Case]:
    """Yield the step of Llama 3 405B on 8,192 GPUs at 8,192 positions: nothing recomputed (2407.21783, Table 4).

    Stages per rank: four. The source's first chunk has the embedding alone, which means eight: 2.3 points shorter.
    """
    row = read_table("llama3_table4_mfu")[0]
    workload = _llama(LLAMA["llama-3-405b"], row["seq_len"], 1)
    degrees = {"data": row["dp"], "pipeline": row["pp"], "tensor": row["tp"], "sequence_parallel": True}
    batch = row["batch_per_dp"] * row["dp"]
    plan = plan_of(batch, 1, stages=4, sharding=Sharding(1), precision=MEGATRON, **degrees)
    measured = _seconds(workload, plan, row["tflops_per_gpu"] * 1e12 / PEAK)
    yield Case("Llama 3", "405B", "405B", workload, plan, "dgx-h100", "transformer-engine", measured)


def torchtitan() -> Iterator[Case]:
    """Yield Llama 3.1 8B by FSDP, eager and compiled, in 16 and 8 bits, on the 500 W part (2410.06511, Tables 1 to 3).

    Recompute is per operator, at 32,768 positions full. In 8 bits parameters are gathered so too (assumed: the source
    says that Float8 is on). Gradients are scattered in float32, torchtitan's default. The row of Table 2 has no context
    parallelism.
    """
    for row in read_table("torchtitan_published"):
        samples, sequence, gpus, config = row["local_batch"], row["seq_len"], row["gpus"], row["config"]
        workload = _llama(LLAMA["llama-3-8b"], sequence, samples)
        recompute = "full" if row["act_ckpt"] == "full" else "operators"
        float8 = "gathers" if "Float8" in config else "none"
        plan = Plan(data=gpus, sharding=Sharding(3), precision=FSDP, recompute=recompute, float8=float8)
        measured = sequence * samples / row["tokens_per_s_per_gpu"]
        where = ("h100-500w", "compiled-fsdp" if "compile" in config else "eager-fsdp", measured)
        structure = f"{gpus}, s={sequence}"
        yield Case("torchtitan", f"{config} on {gpus}", structure, workload, plan, *where)


# 1.34 and 8.86 billion: nanotron, scripts/scaling_benchmarks.py, 2025; embedding and head tied in the smaller.
NANOTRON = {
    1.34: LlamaSizes(2048, 16, 32, 32, 8192, 131072, ties_embedding=True),
    8.86: LlamaSizes(4096, 32, 32, 32, 14336, 131072),
}


def nanotron() -> Iterator[Case]:
    """Yield the best plans of nanotron for two sizes on 8 to 256 GPUs: a million tokens per step, sequences of 4,096.

    Not said: whether anything is recomputed (assumed: nothing).
    """
    for row in read_table("nanotron_ultrascale_best_configs"):
        size, gpus, tensor = row["model_params_b"], row["gpus"], row["tp"]
        workload = _llama(NANOTRON[size], 4096, row["micro_batch"])
        degrees = {"data": row["dp"], "pipeline": row["pp"], "tensor": tensor, "sequence_parallel": tensor > 1}
        sharding = Sharding(row["zero_stage"])
        plan = Plan(num_microbatches=row["grad_accum"], sharding=sharding, precision=MEGATRON, **degrees)
        where = ("dgx-h100", "nanotron", _seconds(workload, plan, row["mfu_pct"] / 100))
        yield Case("nanotron", f"{size}B on {gpus}", f"{gpus} GPUs", workload, plan, *where)


FAMILIES = (
    *(sc21, korthikanti, zero_bubble, bloom, vtrain_many_nodes, vtrain_one_node, mosaicml, zero_three, fsdp_paper),
    *(megatron_core, nemo, llama3, torchtitan, nanotron),
)
