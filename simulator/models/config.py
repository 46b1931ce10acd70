"""Workloads from a Hugging Face `config.json`, field by field.

Each family has its names for a few sizes. A field that neither says a size nor is known to leave sizes alone is
refused: what it changes would be missing in the prediction. Windows of attention are not modelled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from distlab.plan import Workload
from simulator.models.attention_kernel import with_kernel
from simulator.models.attention_products import LatentSizes
from simulator.models.gpt import as_released, gpt_workload, with_own_head
from simulator.models.llama import LlamaSizes, llama_workload
from simulator.models.mixture_of_experts import Mixture
from simulator.models.sizes import MOST, shown

MOST_TOKENS = 4096  # of a sequence where nobody says how long they are

# Fields that change neither sizes nor work: numerics, tokens, generation, what a file says of itself.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _name_or_path activation_dropout activation_function add_bos_token
add_cross_attention alpha apply_residual_connection_post_layernorm architectures attention_dropout
attention_softmax_in_fp32 attn_implementation attn_pdrop auto_map aux_loss_alpha bias_dropout_fusion bos_token_id
chunk_size_feed_forward classifier_dropout decoder_start_token_id dropout dtype embd_pdrop enable_bias eos_token_id
ep_size gradient_checkpointing hidden_act hidden_activation hidden_dropout id2label init_std initializer_range
is_encoder_decoder label2id layer_norm_elementwise_affine layer_norm_eps layer_norm_epsilon layer_types layerdrop
masked_softmax_fusion max_window_layers model_type n_ctx n_group norm_topk_prob num_nextn_predict_layers offset_alibi
original_max_position_embeddings output_attentions output_hidden_states output_router_logits pad_token_id
partial_rotary_factor prefix pretraining_tp problem_type qk_head_dim quantization_config reorder_and_upcast_attn
resid_pdrop return_dict rms_norm_eps rope_interleave rope_parameters rope_scaling rope_theta rotary_emb_base
rotary_pct routed_scaling_factor router_aux_loss_coef router_jitter_noise scale_attn_by_inverse_layer_idx
scale_attn_weights scoring_func seq_aux seq_length skip_bias_add skip_bias_add_qkv sliding_window slow_but_exact
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params
attention_multiplier embedding_multiplier logits_scaling no_rope_layer_interval no_rope_layers residual_multiplier
temperature tokenizer_class topk_group torch_dtype torchscript transformers_version unk_index unk_token_id use_cache
use_mrope use_parallel_residual use_sliding_window
"""
HARMLESS = frozenset(_HARMLESS.split())


class Fields:
    """The fields of a configuration, taken one by one; `rest` are those that nobody took."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where, self.rest = values, where, set(values) - HARMLESS

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number; without a default the field must be there.

        Raises:
            ValueError: it is not there, or no whole number of at least `least`.
        """
        self.rest.discard(name)
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if name not in self.values:
            raise ValueError(f"{self.where}: {name} is missing; write a whole number of at least {least}")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{self.where}: {name} is {value!r}; write a whole number of at least {least}")
        if value > MOST:
            raise ValueError(f"{self.where}: {name} is {shown(value)}; write at most {MOST:,}")
        return value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a field that is true or false.

        Raises:
            ValueError: it is neither.
        """
        self.rest.discard(name)
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}; write true or false")
        return value

    def only(self, name: str, *known: object) -> None:
        """Refuse a field with a value that is not modelled; the first is the default.

        Raises:
            ValueError: it has another value.
        """
        self.rest.discard(name)
        if (value := self.values.get(name, known[0])) not in known:
            shown = " or ".join(json.dumps(each) for each in known)
            raise ValueError(f"{self.where}: {name} is {json.dumps(value)}; only {shown} is modelled: change it")

    def finish(self) -> None:
        """Refuse fields that were not taken.

        Raises:
            ValueError: there are some.
        """
        if self.rest:
            raise ValueError(
                f"{self.where}: unknown field {min(self.rest)!r} in a {self.values['model_type']} configuration; take "
                "it out if it changes neither sizes nor work"
            )


def _llama_sizes(fields: Fields, **changes: object) -> LlamaSizes:
    """Take the sizes that Llama and its relatives share; biases of all products are not modelled."""
    fields.only("mlp_bias", False)
    heads = fields.count("num_attention_heads")
    head_size = fields.count("head_dim", 0, least=0)
    own = {
        "ties_embedding": fields.flag("tie_word_embeddings"),
        "head_size": head_size or None,
    } | changes
    return LlamaSizes(
        fields.count("hidden_size"),
        fields.count("num_hidden_layers"),
        heads,
        fields.count("num_key_value_heads", heads),
        fields.count("intermediate_size"),
        fields.count("vocab_size"),
        **own,  # type: ignore[arg-type]
    )


def _llama(fields: Fields) -> LlamaSizes:
    fields.only("attention_bias", False)
    return _llama_sizes(fields)


def _qwen2(fields: Fields) -> LlamaSizes:
    return _llama_sizes(fields, attention_biases=True)


def _qwen3(fields: Fields) -> LlamaSizes:
    fields.only("attention_bias", False)
    return _llama_sizes(fields, head_norms=True, head_size=fields.count("head_dim", 128))


def _qwen3_moe(fields: Fields) -> LlamaSizes:
    fields.only("attention_bias", False)
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [], None)
    width = fields.count("moe_intermediate_size")
    mixture = Mixture(fields.count("num_experts"), fields.count("num_experts_per_tok"), expert_size=width)
    return _llama_sizes(fields, head_norms=True, head_size=fields.count("head_dim", 128), mixture=mixture)


def _gemma(fields: Fields) -> LlamaSizes:
    fields.only("attention_bias", False)
    tied = fields.flag("tie_word_embeddings", default=True)
    return _llama_sizes(fields, head_size=fields.count("head_dim", 256), ties_embedding=tied)


def _smollm3(fields: Fields) -> LlamaSizes:
    fields.only("attention_bias", False)
    return _llama_sizes(fields, ties_embedding=fields.flag("tie_word_embeddings", default=True))


def _olmo2(fields: Fields) -> LlamaSizes:
    """Take the sizes of OLMo 2, whose norms follow attention and feed-forward part: as many, elsewhere."""
    fields.only("attention_bias", False)
    return _llama_sizes(fields, wide_norms=True)


def _mixtral(fields: Fields) -> LlamaSizes:
    mixture = Mixture(fields.count("num_local_experts"), fields.count("num_experts_per_tok"))
    return _llama_sizes(fields, mixture=mixture)


def _deepseek(fields: Fields) -> LlamaSizes:
    """Take the sizes of DeepSeek-V2 and V3; layers that predict further tokens are left out, as in its 671 billion."""
    fields.only("attention_bias", False)
    fields.only("moe_layer_freq", 1)
    width = fields.count("moe_intermediate_size")
    bias = fields.values["model_type"] == "deepseek_v3"
    fields.only("topk_method", *(["noaux_tc"] if bias else ["greedy", "group_limited_greedy"]))
    mixture = Mixture(
        fields.count("n_routed_experts"),
        fields.count("num_experts_per_tok"),
        expert_size=width,
        shared_size=width * fields.count("n_shared_experts", 0, least=0),
        dense_layers=fields.count("first_k_dense_replace", 0, least=0),
        router_bias=bias,
    )
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = LatentSizes(fields.count("kv_lora_rank"), fields.count("q_lora_rank", 0), *map(fields.count, sizes))
    return _llama_sizes(fields, mixture=mixture, latent=latent, head_size=None)


LLAMAS: Mapping[str, Callable[[Fields], LlamaSizes]] = {
    "llama": _llama,
    "mistral": _llama,
    "phi3": _llama,  # its matrices with one input are one; their products run as one in all of these
    "granite": _llama,
    "smollm3": _smollm3,
    "gemma": _gemma,
    "olmo2": _olmo2,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


def _gpt(fields: Fields, family: str) -> tuple[dict[str, int], int]:
    """Return the sizes of a GPT, and how many positions it learned."""
    if family == "gpt_neox":
        return _neox(fields), 0
    long, short = ("hidden_size", "num_hidden_layers", "num_attention_heads"), ("n_embd", "n_layer", "n_head")
    if family == "bloom":  # it was saved with names of either kind
        short = ("n_embed", *short[1:])
    names = [one if one in fields.values else other for one, other in zip(long, short, strict=True)]
    hidden, layers, heads = map(fields.count, long if family == "opt" else names)
    fields.only("ffn_dim" if family == "opt" else "n_inner", 4 * hidden, None)
    fields.only("tie_word_embeddings", True)
    positions = 0
    if family == "gpt2":
        positions = fields.count("n_positions")
    if family == "opt":
        fields.only("word_embed_proj_dim", hidden)
        for name in ("do_layer_norm_before", "enable_bias"):
            fields.only(name, True)
        fields.only("_remove_final_layer_norm", False)
        positions = fields.count("max_position_embeddings") + 2  # two more, for padding
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "vocab_size": fields.count("vocab_size")}
    return sizes, positions


def _neox(fields: Fields) -> dict[str, int]:
    """Return the sizes of a GPT-NeoX or Pythia: rotary positions, biases, and a head that is not tied."""
    hidden = fields.count("hidden_size")
    fields.only("intermediate_size", 4 * hidden)
    fields.only("attention_bias", True)
    fields.only("tie_word_embeddings", False)
    layers, heads, vocabulary = map(fields.count, ("num_hidden_layers", "num_attention_heads", "vocab_size"))
    return {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "vocab_size": vocabulary}


FAMILIES = (*LLAMAS, "gpt2", "opt", "bloom", "gpt_neox")


def workload_from_config(
    config: Mapping[str, object] | Path | str,
    *,
    microbatch_size: int = 1,
    sequence_length: int | None = None,
    bytes_per_parameter: int = 2,
    attention: str | None = None,
) -> Workload:
    """Return the workload of a Hugging Face configuration: a mapping, or the path of a `config.json`.

    Args:
        config: what `transformers` saves beside a model.
        microbatch_size: samples in a micro-batch.
        sequence_length: tokens; None: the model's most positions, but at most MOST_TOKENS.
        bytes_per_parameter: of parameters.
        attention: "plain" or "flash"; None: plain for GPT-2, OPT, BLOOM and GPT-NeoX, else flash.

    Raises:
        ValueError: the file is no JSON object; the family or a field is not known, or a value makes no sense.
        OSError: the file cannot be read.
    """
    where = "config" if isinstance(config, Mapping) else str(config)
    values = config if isinstance(config, Mapping) else _read(Path(config))
    fields, family = Fields(values, where), values.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"{where}: model_type is {family!r}; known are {', '.join(FAMILIES)}")
    name = values.get("_name_or_path") or None
    learned, own = 0, {"microbatch_size": microbatch_size, "bytes_per_parameter": bytes_per_parameter}
    if family in LLAMAS:
        sizes = LLAMAS[family](fields)
    else:
        gpt, learned = _gpt(fields, str(family))
    most = learned or fields.count("max_position_embeddings", MOST_TOKENS)
    fields.finish()
    length = min(most, MOST_TOKENS) if sequence_length is None else sequence_length
    if learned and length > learned:
        raise ValueError(f"{where}: the model has {learned} positions; sequences of {length} do not fit: use fewer")
    if family in LLAMAS:
        workload = llama_workload(sizes, sequence_length=length, **own, name=str(name) if name else None)
        return with_kernel(workload, attention or "flash")
    plain = gpt_workload(**gpt, sequence_length=length, **own)
    released = with_own_head(plain) if family == "gpt_neox" else as_released(plain, learned)
    return with_kernel(released, attention or "plain")


def _read(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{path}: not JSON ({error}); pass the config.json of a model") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object of fields, got {type(values).__name__}; pass a config.json")
    return values
