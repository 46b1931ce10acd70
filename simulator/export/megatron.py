"""A plan as Megatron-LM's flags: what follows `pretrain_gpt.py`, one flag with its value per line.

Source: megatron/training/arguments.py of NVIDIA/Megatron-LM at commit 000c4ac24f61 (2025, Megatron-Core 0.15).
"""

from __future__ import annotations

from simulator.export.parts import Exported, Wish, has_master, order_is_usual, refuse, types_of
from simulator.models.by_name import ALIBI, GPT, LLAMA
from simulator.models.llama import LlamaSizes
from simulator.plan_file import PlanFile
from simulator.runs.money import tokens_of

TOOL = "Megatron-LM"
SLOW_DATA = ("data", "pipeline", "expert", "context", "tensor")  # --use-tp-pp-dp-mapping
SCHEDULES = ("one_f_one_b", "interleaved")
STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def megatron_flags(said: PlanFile, wish: Wish) -> Exported:
    """Return the flags that mean the plan, one per line.

    Raises:
        ValueError: Megatron-LM cannot express a part of the plan; the line names it.
    """
    plan, samples = said.plan, said.workload.microbatch_size
    _refuse(said)
    flags = _model(said)
    flags += [
        f"--micro-batch-size {samples}",
        f"--global-batch-size {samples * plan.num_microbatches * plan.num_replicas}",
        f"--tensor-model-parallel-size {plan.tensor}",
        f"--pipeline-model-parallel-size {plan.pipeline}",
        f"--context-parallel-size {plan.context}",
    ]
    if plan.stages_per_rank > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {plan.stages_per_rank}")
    if plan.context > 1:
        flags.append(f"--cp-comm-type {'p2p' if plan.context_kind == 'ring' else 'a2a'}")
    if plan.expert > 1:
        flags.append(f"--expert-model-parallel-size {plan.expert}")
    flags += ["--sequence-parallel"] if plan.sequence_parallel else []
    flags += ["--use-tp-pp-dp-mapping"] if not order_is_usual(said) else []
    flags += _sharding(said) + _types(said)
    if plan.recompute == "selective":
        flags.append("--recompute-granularity selective")
    if plan.recompute == "full":
        flags += ["--recompute-granularity full", f"--recompute-method {plan.recompute_method}"]
        flags.append(f"--recompute-num-layers {plan.recompute_layers}")
    if plan.float8 != "none":
        flags += ["--fp8-format hybrid", "--fp8-recipe tensorwise"]
        flags += ["--fp8-param-gather"] if plan.float8 == "gathers" else []
    flags.append(f"--clip-grad {0.0 if wish.max_norm is None else wish.max_norm}")
    return Exported("\n".join(flags) + "\n", tuple(_notes(said)))


def _refuse(said: PlanFile) -> None:
    plan, name = said.plan, said.workload.model or ""
    sharding = plan.sharding
    compute, reduce, gradients = types_of(plan)
    sizes = LLAMA[name][0] if name in LLAMA else None
    wide = [axis for axis in said.order if getattr(plan, axis) > 1]
    slow = wide == [axis for axis in SLOW_DATA if axis in wide]
    alibi = name in GPT and GPT[name][-1] == ALIBI
    layers, stages = len(said.workload.workload().layers) - 2, plan.pipeline * plan.stages_per_rank
    refuse(
        TOOL,
        (said.workload.config is not None, "a config.json", "give the model by name or by sizes"),
        (alibi, f"ALiBi, the positions of {name}", "use another model"),
        (sizes is not None and sizes.latent is not None, f"the latent attention of {name} here", "use another model"),
        (plan.schedule not in SCHEDULES, f"schedule = {plan.schedule!r}", f"use one of {', '.join(SCHEDULES)}"),
        (layers % stages > 0, f"{layers} layers in {stages} unequal stages", f"use a number that divides {layers}"),
        (sharding.stage >= 2 and plan.pipeline > 1, f"sharding stage {sharding.stage} with a pipeline", "use stage 1"),
        (sharding.offload == "all", "offload = 'all'", "use 'optimizer'"),
        (plan.compression is not None, "compression", "leave it out"),
        (plan.recompute == "operators", "recompute = 'operators'", "use 'selective' or 'full'"),
        (plan.recompute_method == "every", "recompute_method = 'every'", "use 'block' or 'uniform'"),
        (compute == "float64", "precision.compute = 'float64'", "use bfloat16, float16 or float32"),
        (gradients not in ("float32", compute), f"precision.gradients = {gradients!r}", f"use float32 or {compute}"),
        (reduce != gradients, "precision.reduce apart from precision.gradients", "make them equal"),
        (not has_master(plan) and compute != "float32", "precision.master = false", "leave it out"),
        (not (order_is_usual(said) or slow), f"order = {list(said.order)}", "put data or pipeline first"),
    )


def _model(said: PlanFile) -> list[str]:
    own = said.workload
    workload = own.workload()
    length = tokens_of(workload)
    name = own.model or ""
    sizes = LLAMA[name][0] if name in LLAMA else own.llama_sizes()
    if name in GPT:
        hidden, depth, heads, _, vocabulary, _ = GPT[name]
    elif sizes is not None:
        hidden, depth, heads, vocabulary = sizes.hidden_size, sizes.num_layers, sizes.num_heads, sizes.vocab_size
    else:
        hidden, depth, heads, vocabulary = own.gpt_sizes().values()
    flags = [f"--num-layers {depth}", f"--hidden-size {hidden}", f"--num-attention-heads {heads}"]
    flags += [f"--seq-length {length}", f"--max-position-embeddings {length}", f"--vocab-size {vocabulary}"]
    if not any(layer.score_bytes for layer in workload.layers):
        flags.append("--attention-backend flash")
    if sizes is not None:
        return flags + _llama(sizes)
    mixed = [f"--num-experts {own.num_experts}", f"--moe-router-topk {own.top_k}"]
    return flags + (mixed if own.num_experts > 1 else [])


def _llama(sizes: LlamaSizes) -> list[str]:
    flags = [f"--ffn-hidden-size {sizes.feed_forward_size}", "--normalization RMSNorm", "--disable-bias-linear"]
    flags += ["--position-embedding-type rope", *(["--swiglu"] if sizes.is_gated else [])]
    if sizes.num_key_value_heads != sizes.num_heads:
        flags += ["--group-query-attention", f"--num-query-groups {sizes.num_key_value_heads}"]
    flags += [] if sizes.ties_embedding else ["--untie-embeddings-and-output-weights"]
    flags += [f"--kv-channels {sizes.head_size}"] if sizes.head_size else []
    flags += ["--add-qkv-bias"] if sizes.attention_biases else []
    flags += ["--qk-layernorm"] if sizes.head_norms else []
    if sizes.mixture:
        width = sizes.mixture.expert_size or sizes.feed_forward_size
        flags += [f"--num-experts {sizes.mixture.num_experts}", f"--moe-router-topk {sizes.mixture.top_k}"]
        flags.append(f"--moe-ffn-hidden-size {width}")
    return flags


def _sharding(said: PlanFile) -> list[str]:
    plan, sharding = said.plan, said.plan.sharding
    overlaps = plan.gradient_sync == "overlapped"
    flags = ["--overlap-grad-reduce"] if overlaps else []
    if plan.gradient_sync in ("overlapped", "bucketed"):
        width = 4 if types_of(plan)[2] == "float32" else 2
        flags.append(f"--ddp-bucket-size {max(1, plan.bucket_bytes // width)}")
    if sharding.stage >= 1:
        flags += ["--use-distributed-optimizer", *(["--overlap-param-gather"] if overlaps else [])]
    if sharding.stage >= 2:
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {STRATEGIES[sharding.stage]}"]
    if sharding.replicas > 1:
        flags.append(f"--num-distributed-optimizer-instances {sharding.replicas}")
    return flags + (["--optimizer-cpu-offload"] if sharding.offload == "optimizer" else [])


def _types(said: PlanFile) -> list[str]:
    compute, _, gradients = types_of(said.plan)
    flags = {"bfloat16": ["--bf16"], "float16": ["--fp16"], "float32": []}[compute]
    if compute != "float32" and gradients == "float32":
        return [*flags, "--accumulate-allreduce-grads-in-fp32"]
    return [*flags, *(["--grad-reduce-in-bf16"] if compute == "bfloat16" else [])]  # float16 sums as it computes


def _notes(said: PlanFile) -> list[str]:
    plan, notes = said.plan, []
    if plan.gradient_sync == "per_parameter":
        notes.append("gradient_sync='per_parameter': Megatron-LM sums one buffer after backward")
    if plan.sharding.stage == 3 and (plan.sharding.unit_layers, plan.sharding.prefetch) != (1, 1):
        notes.append("unit_layers, prefetch: Megatron FSDP wraps each layer; --suggested-communication-unit-size")
    if plan.pipeline > 1 and plan.cut == "time":
        notes.append("pipeline: Megatron-LM gives every stage as many layers; the simulator balances their work")
    notes.append("data, tokenizer, learning rate and number of steps are not in a plan")
    return notes
