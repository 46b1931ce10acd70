"""Published steps on H100s as cases: Megatron-Core, NeMo, Llama 3, torchtitan and nanotron. All use flash attention.

What a source does not say is assumed here: see each function.
"""

from __future__ import annotations

from collections.abc import Iterator

from distlab.plan import Plan, Sharding, Workload
from simulator.models.attention_kernel import fuse_attention
from simulator.models.by_name import LLAMA
from simulator.models.llama import LlamaSizes, llama_workload
from simulator.validation.case import FSDP, MEGATRON, SIXTEEN_BITS, Case, gpt, plan_of, read_table

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
        degrees = {"pipeline": row["pp"], "tensor": row["tp"], "context": row["cp"]}
        if model in NEMO_LLAMA:
            workload = _llama(NEMO_LLAMA[model], sequence, micro)
        else:
            workload = fuse_attention(gpt(*NEMO_GPT[model], sequence, micro))
        plan = plan_of(
            batch,
            micro,
            data=gpus // (row["tp"] * row["pp"] * row["cp"]),
            stages=row["vp"],
            sequence_parallel=row["tp"] > 1,
            sharding=Sharding(1),
            precision=SIXTEEN_BITS,
            float8="products" if row["precision"] == "fp8" else "none",
            **degrees,
        )
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
        plan = Plan(
            data=row["dp"],
            pipeline=row["pp"],
            tensor=tensor,
            num_microbatches=row["grad_accum"],
            sequence_parallel=tensor > 1,
            sharding=Sharding(row["zero_stage"]),
            precision=MEGATRON,
        )
        where = ("dgx-h100", "nanotron", _seconds(workload, plan, row["mfu_pct"] / 100))
        yield Case("nanotron", f"{size}B on {gpus}", f"{gpus} GPUs", workload, plan, *where)


H100_FAMILIES = (megatron_core, nemo, llama3, torchtitan, nanotron)
