"""A plan as Megatron-LM's flags: what follows `pretrain_gpt.py`, one flag with its value per line.

Source: megatron/training/arguments.py of NVIDIA/Megatron-LM at commit 000c4ac24f61 (2025, Megatron-Core 0.15).
"""

from __future__ import annotations

from simulator.export.parts import Exported, Options, notes, order_is_usual, refuse, types_of
from simulator.hardware.presets import given
from simulator.models.by_name import ALIBI, GPT, LLAMA
from simulator.models.llama import LlamaSizes
from simulator.models.parts import tokens_of
from simulator.plan_file import PlanFile
from simulator.stage.modules import names_in

SLOW_DATA = ("data", "pipeline", "expert", "context", "tensor")  # --use-tp-pp-dp-mapping
SCHEDULES = ("one_f_one_b", "interleaved")
FORMATS = {
    "mxfp8": ["--fp8-format e4m3", "--fp8-recipe mxfp8"],
    "nvfp4": ["--fp4-format e2m1", "--fp4-recipe nvfp4"],
}
CONTEXT_KINDS = {"ring": "p2p", "all_to_all": "a2a", "all_gather": "all_gather"}
STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
SAID = (  # sizes that a flag says
    *("hidden_size", "num_layers", "num_heads", "num_key_value_heads", "head_size", "feed_forward_size", "is_gated"),
    *("vocab_size", "ties_embedding", "attention_biases", "head_norms", "mixture", "num_experts", "top_k"),
    "expert_size",
)


def megatron_flags(said: PlanFile, options: Options) -> Exported:
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
    first, stop = said.workload.workload().blocks
    if (stop - first) % (plan.pipeline * plan.stages_per_rank):  # each end counts as a block, see `even_blocks`
        flags += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    if plan.context > 1:
        flags.append(f"--cp-comm-type {CONTEXT_KINDS[plan.context_kind]}")
    if plan.expert > 1:
        flags.append(f"--expert-model-parallel-size {plan.expert}")
        flags += ["--expert-tensor-parallel-size 1"] if plan.fold_experts else []
    if (room := said.workload.capacity_factor) is not None:
        flags += [f"--moe-expert-capacity-factor {room}", "--moe-pad-expert-input-to-capacity"]
    flags += ["--sequence-parallel"] if plan.sequence_parallel else []
    flags += ["--use-tp-pp-dp-mapping"] if not order_is_usual(said) else []
    flags += _sharding(said) + _types(said)
    if plan.recompute == "selective" or names_in(plan):
        modules = f" --recompute-modules {plan.recompute.replace(',', ' ')}" if names_in(plan) else ""
        flags.append(f"--recompute-granularity selective{modules}")
    if plan.recompute == "full":
        flags += ["--recompute-granularity full", f"--recompute-method {plan.recompute_method}"]
        flags.append(f"--recompute-num-layers {plan.recompute_layers}")
    if plan.float8 != "none":
        flags += FORMATS.get(plan.float8, ["--fp8-format hybrid", "--fp8-recipe tensorwise"])
        flags += ["--fp8-param-gather"] if plan.float8 == "gathers" else []
    flags.append(f"--clip-grad {0.0 if options.max_norm is None else options.max_norm}")
    return Exported("\n".join(flags) + "\n", notes("megatron", plan))


def _refuse(said: PlanFile) -> None:
    plan, name = said.plan, said.workload.model or ""
    wide = [axis for axis in said.order if getattr(plan, axis) > 1]
    is_slow = wide == [axis for axis in SLOW_DATA if axis in wide]
    layers, stages = len(said.workload.workload().layers) - 2, plan.pipeline * plan.stages_per_rank
    sizes = LLAMA.get(name) or said.workload.llama_sizes()
    found = (given(sizes) | given(sizes.mixture or sizes)) if sizes else {}
    unsaid = [field for field in found if field not in SAID]
    has = {
        "a config.json": said.workload.config is not None,
        "ALiBi": name in GPT and GPT[name][-1] == ALIBI,
        "sizes that no flag says": bool(unsaid),
        "no such schedule": plan.schedule not in SCHEDULES,
        "unequal stages": layers % stages > 0 and (layers + 2) % stages > 0,
        "neither the usual order nor slow data": not (order_is_usual(said) or is_slow),
    }
    words = {"model": name or "these sizes", "unsaid": ", ".join(unsaid), "schedules": ", ".join(SCHEDULES)}
    refuse("megatron", "Megatron-LM", said, has, layers=layers, stages=stages, **words)


def _model(said: PlanFile) -> list[str]:
    own = said.workload
    workload = own.workload()
    length = tokens_of(workload)
    name = own.model or ""
    sizes = LLAMA.get(name) or own.llama_sizes()
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
