"""Published steps on H100s as cases: Megatron-Core, NeMo, Llama 3, torchtitan and nanotron. All use flash attention.

What a source does not say is assumed here: see each function.
"""

from __future__ import annotations

from typing import Any

from distlab.plan import Plan, Precision, Sharding, Workload
from simulator.models.attention_kernel import fuse_attention
from simulator.models.gpt import gpt_workload
from simulator.models.llama import LlamaSizes, llama_workload
from simulator.validation.case import FSDP, Case, read_table

PEAK = 989.4e12
MIXED = Precision("bfloat16", gradients="float32")


def seconds_of(workload: Workload, plan: Plan, mfu: float) -> float:
    """Return the time of a step from its published MFU."""
    counted = workload.counted_flops * plan.num_microbatches * plan.num_replicas
    return counted / (mfu * PEAK * plan.world_size)


def megatron_core() -> list[Case]:
    """Return weak scaling at a vocabulary of 131,072 with a distributed optimizer and overlapped exchanges.

    Not said: micro-batches (assumed: all that a replica has; with a pipeline one sample), stages per rank of the
    pipeline (assumed: four), how attention is counted (assumed: all pairs).
    """
    cases = []
    for row in read_table("megatron_core_h100_weak_scaling"):
        data, batch, tensor = int(row["dp"]), int(row["global_batch"]), int(row["tp"])
        pipeline = int(row["pp"])
        plain = gpt_workload(
            hidden_size=int(row["hidden"]),
            num_layers=int(row["layers"]),
            num_heads=int(row["heads"]),
            sequence_length=4096,
            vocab_size=131072,
            microbatch_size=1 if pipeline > 1 else batch // data,
        )
        workload = fuse_attention(plain)
        plan = Plan(
            data=data,
            pipeline=pipeline,
            tensor=tensor,
            num_microbatches=batch // data // workload.samples,
            sequence_parallel=tensor > 1,
            sharding=Sharding(1),
            precision=MIXED,
            schedule="interleaved" if pipeline > 1 else "one_f_one_b",
            stages_per_rank=4 if pipeline > 1 else 1,
            cut="blocks",
        )
        measured = seconds_of(workload, plan, float(row["tflops_per_gpu"]) * 1e12 / PEAK)
        stack, size = "transformer-engine", row["model"]
        cases.append(Case("Megatron-Core", size, size, workload, plan, "dgx-h100", stack, measured))
    return cases


# Sizes of NVIDIA's benchmarks: their published operations per token fit them to 0.5 %. Nemotron's have no gates.
NEMO_GPT = {"GPT3-5B": (4096, 24, 32), "GPT3-20B": (6144, 44, 48), "GPT3-175B": (12288, 96, 96)}
NEMO_LLAMA = {
    "LLAMA2-7B": LlamaSizes(4096, 32, 32, 32, 11008, 32000),
    "LLAMA2-13B": LlamaSizes(5120, 40, 40, 40, 13824, 32000),
    "LLAMA2-70B": LlamaSizes(8192, 80, 64, 8, 28672, 32000),
    "LLAMA3-8B": LlamaSizes(4096, 32, 32, 8, 14336, 128256),
    "LLAMA3-70B": LlamaSizes(8192, 80, 64, 8, 28672, 128256),
    "Nemotron-8B": LlamaSizes(4096, 32, 32, 32, 16384, 256000, is_gated=False),
    "Nemotron-15B": LlamaSizes(6144, 32, 48, 8, 24576, 256000, is_gated=False),
    "Nemotron-22B": LlamaSizes(6144, 40, 48, 48, 24576, 256000, is_gated=False),
    "Nemotron-340B": LlamaSizes(18432, 96, 96, 8, 73728, 256000, is_gated=False),
}


def nemo() -> list[Case]:
    """Return NVIDIA's own benchmarks of NeMo in 16 and 8 bits, on 8 to 2,048 GPUs: nothing recomputed.

    Gradients are summed and kept in 16 bits, as its launch scripts say (NVIDIA/NeMo-Framework-Launcher, examples,
    optim.grad_sync_dtype=bf16, 2024): with 32 bits 15B and 20B would not fit.
    """
    cases = []
    for row in read_table("nemo_h100_steps"):
        model, micro, gpus, batch = row["model"], int(row["micro_batch"]), int(row["gpus"]), int(row["global_batch"])
        tensor, pipeline, context, stages = (int(row[key]) for key in ("tp", "pp", "cp", "vp"))
        data = gpus // (tensor * pipeline * context)
        own: dict[str, Any] = {"sequence_length": int(row["seq_len"]), "microbatch_size": micro}
        if model in NEMO_LLAMA:
            plain = llama_workload(NEMO_LLAMA[model], **own)
        else:
            hidden, layers, heads = NEMO_GPT[model]
            plain = gpt_workload(hidden_size=hidden, num_layers=layers, num_heads=heads, vocab_size=51200, **own)
        plan = Plan(
            data=data,
            pipeline=pipeline,
            tensor=tensor,
            context=context,
            num_microbatches=batch // data // micro,
            sequence_parallel=tensor > 1,
            sharding=Sharding(1),
            precision=Precision("bfloat16", gradients="bfloat16", reduce="bfloat16"),
            float8="products" if row["precision"] == "fp8" else "none",
            schedule="interleaved" if stages > 1 else "one_f_one_b",
            stages_per_rank=stages,
            cut="blocks",
        )
        tokens = batch * int(row["seq_len"]) / gpus
        measured = float(row["step_s"] or tokens / float(row["tokens_per_s_per_gpu"]))
        label = f"{model} {row['precision']} on {gpus}"
        cases.append(Case("NeMo", label, model, fuse_attention(plain), plan, "dgx-h100", "nemo", measured))
    return cases


def llama3() -> list[Case]:
    """Return the step of Llama 3 405B on 8,192 GPUs at 8,192 positions: nothing recomputed (2407.21783, Table 4).

    Stages per rank: four. The source's first chunk has the embedding alone, which means eight: 2.3 points shorter.
    """
    row = read_table("llama3_table4_mfu")[0]
    plain = llama_workload(LlamaSizes(16384, 126, 128, 8, 53248, 128256), sequence_length=int(row["seq_len"]))
    workload = fuse_attention(plain)
    plan = Plan(
        data=int(row["dp"]),
        pipeline=int(row["pp"]),
        tensor=int(row["tp"]),
        num_microbatches=int(row["batch_per_dp"]),
        sequence_parallel=True,
        sharding=Sharding(1),
        precision=MIXED,
        schedule="interleaved",
        stages_per_rank=4,
        cut="blocks",
    )
    measured = seconds_of(workload, plan, float(row["tflops_per_gpu"]) * 1e12 / PEAK)
    return [Case("Llama 3", "405B", "405B", workload, plan, "dgx-h100", "transformer-engine", measured)]


def torchtitan() -> list[Case]:
    """Return Llama 3.1 8B by FSDP, eager and compiled, in 16 and 8 bits, on the 500 W part (2410.06511, Tables 1 to 3).

    Recompute is per operator, at 32,768 positions full. In 8 bits parameters are gathered so too (assumed: the source
    says that Float8 is on). Gradients are scattered in float32, torchtitan's default. The row of Table 2 has no context
    parallelism.
    """
    cases = []
    for row in read_table("torchtitan_published"):
        plain = llama_workload(
            LlamaSizes(4096, 32, 32, 8, 14336, 128256),
            sequence_length=int(row["seq_len"]),
            microbatch_size=int(row["local_batch"]),
        )
        workload = fuse_attention(plain)
        plan = Plan(
            data=int(row["gpus"]),
            sharding=Sharding(3),
            precision=FSDP,
            recompute="full" if row["act_ckpt"] == "full" else "operators",
            float8="gathers" if "Float8" in row["config"] else "none",
        )
        tokens = int(row["seq_len"]) * int(row["local_batch"])
        measured = tokens / float(row["tokens_per_s_per_gpu"])
        stack = "compiled-fsdp" if "compile" in row["config"] else "eager-fsdp"
        label = f"{row['config']} on {row['gpus']}"
        structure = f"{row['gpus']}, s={row['seq_len']}"
        cases.append(Case("torchtitan", label, structure, workload, plan, "h100-500w", stack, measured))
    return cases


# 1.34 and 8.86 billion: nanotron, scripts/scaling_benchmarks.py, 2025; embedding and head tied in the smaller.
NANOTRON = {
    "1.34": LlamaSizes(2048, 16, 32, 32, 8192, 131072, ties_embedding=True),
    "8.86": LlamaSizes(4096, 32, 32, 32, 14336, 131072),
}


def nanotron() -> list[Case]:
    """Return the best plans of nanotron for two sizes on 8 to 256 GPUs: a million tokens per step, sequences of 4,096.

    Not said: whether anything is recomputed (assumed: nothing).
    """
    cases = []
    for row in read_table("nanotron_ultrascale_best_configs"):
        micro, tensor = int(row["micro_batch"]), int(row["tp"])
        plain = llama_workload(NANOTRON[row["model_params_b"]], sequence_length=4096, microbatch_size=micro)
        workload = fuse_attention(plain)
        plan = Plan(
            data=int(row["dp"]),
            pipeline=int(row["pp"]),
            tensor=tensor,
            num_microbatches=int(row["grad_accum"]),
            sequence_parallel=tensor > 1,
            sharding=Sharding(int(row["zero_stage"])),
            precision=MIXED,
        )
        measured = seconds_of(workload, plan, float(row["mfu_pct"]) / 100)
        size = f"{row['model_params_b']}B"
        label = f"{size} on {row['gpus']}"
        cases.append(Case("nanotron", label, f"{row['gpus']} GPUs", workload, plan, "dgx-h100", "nanotron", measured))
    return cases


H100_FAMILIES = (megatron_core, nemo, llama3, torchtitan, nanotron)
