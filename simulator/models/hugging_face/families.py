"""Sizes of Llama's relatives from the fields of a Hugging Face configuration, family by family.

What is left out of parameters: an expert's biases, gates of shared experts and sinks of attention (GPT-OSS: 0.05 % of
all).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from simulator.models.attention_products import LatentSizes
from simulator.models.hugging_face.fields import Fields
from simulator.models.hugging_face.windows import windows, windows_behind, windows_of_neo
from simulator.models.llama import LlamaSizes
from simulator.models.mixture_of_experts import Mixture

ALL_BIASES = MappingProxyType({"attention_biases": True, "output_bias": True, "feed_forward_biases": True})
OF_GPT2 = MappingProxyType(
    {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    }
)


def _llama(fields: Fields, *, ties: bool = False, head_size: int = 0, **changes: Any) -> LlamaSizes:
    """Take the sizes that Llama and its relatives share; `ties` and `head_size` hold where a file is silent."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    own: dict[str, Any] = {
        "ties_embedding": fields.flag("tie_word_embeddings", default=ties),
        "head_size": fields.count("head_dim", head_size, least=0) or None,
        "feed_forward_biases": fields.flag("mlp_bias"),
    }
    if "attention_biases" not in changes:
        own |= dict.fromkeys(("attention_biases", "output_bias"), fields.flag("attention_bias"))
    return LlamaSizes(
        hidden,
        fields.count("num_hidden_layers"),
        heads,
        fields.count("num_key_value_heads", heads),
        fields.count("intermediate_size"),
        fields.count("vocab_size"),
        **(own | changes),
    )


def _qwen2_moe(fields: Fields) -> LlamaSizes:
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [], None)
    fields.only("qkv_bias", True)
    mixture = Mixture(
        fields.count("num_experts"),
        fields.count("num_experts_per_tok"),
        expert_size=fields.count("moe_intermediate_size"),
        shared_size=fields.count("shared_expert_intermediate_size"),
    )
    return _llama(fields, attention_biases=True, mixture=mixture, windows=windows_behind(fields))


def _qwen3_moe(fields: Fields) -> LlamaSizes:
    fields.only("decoder_sparse_step", 1)
    fields.only("mlp_only_layers", [], None)
    width = fields.count("moe_intermediate_size")
    mixture = Mixture(fields.count("num_experts"), fields.count("num_experts_per_tok"), expert_size=width)
    return _llama(fields, head_norms=True, head_size=128, mixture=mixture, windows=windows_behind(fields))


def _seed_oss(fields: Fields) -> LlamaSizes:
    biases = {"attention_biases": fields.flag("attention_bias", default=True)}
    return _llama(fields, **biases, output_bias=fields.flag("attention_out_bias"), head_size=128)


def _gemma2(fields: Fields) -> LlamaSizes:
    own = windows(fields, pattern=2, default=4096)
    return _llama(fields, head_size=256, ties=True, num_norms=4, windows=own)


def _gemma3(fields: Fields) -> LlamaSizes:
    """Take the sizes of Gemma 3, whose files leave out what its class has by default."""
    fields.assume(vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4)
    own = windows(fields, pattern=6, default=4096)
    return _llama(fields, head_size=256, ties=True, num_norms=4, head_norms=True, windows=own)


def _mixed(fields: Fields, *, experts: str = "num_local_experts", **changes: Any) -> LlamaSizes:
    """Take the sizes of a model with experts in each block, as wide as its feed-forward part would be."""
    return _llama(fields, mixture=Mixture(fields.count(experts), fields.count("num_experts_per_tok")), **changes)


def _phimoe(fields: Fields) -> LlamaSizes:
    return _mixed(fields, norm_parameters=2, head_bias=fields.flag("lm_head_bias"), windows=windows(fields))


def _llama4(fields: Fields) -> LlamaSizes:
    fields.only("interleave_moe_layer_step", 1)
    width = fields.count("intermediate_size")
    experts, chosen = fields.count("num_local_experts"), fields.count("num_experts_per_tok")
    return _llama(fields, mixture=Mixture(experts, chosen, expert_size=width, shared_size=width))


def _routed(fields: Fields, *, router_bias: bool) -> Mixture:
    """Take routed and shared experts by the names of DeepSeek-V2, which others keep; first layers may have none."""
    width = fields.count("moe_intermediate_size")
    groups, most = fields.count("n_group", 1), fields.count("topk_group", 1)
    limits = most < groups and fields.values.get("topk_method") != "greedy"
    return Mixture(
        fields.count("n_routed_experts"),
        fields.count("num_experts_per_tok"),
        expert_size=width,
        shared_size=width * fields.count("n_shared_experts", 0, least=0),
        dense_layers=fields.count("first_k_dense_replace", 0, least=0),
        router_bias=router_bias,
        most_groups=(groups, most) if limits else None,
    )


def _deepseek(fields: Fields) -> LlamaSizes:
    """Take the sizes of DeepSeek-V2 and V3; layers that predict further tokens are left out, as in its 671 billion."""
    fields.only("attention_bias", False)
    fields.only("moe_layer_freq", 1)
    bias = fields.values["model_type"] != "deepseek_v2"
    fields.only("topk_method", *(["noaux_tc"] if bias else ["greedy", "group_limited_greedy"]))
    mixture = _routed(fields, router_bias=bias)
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = LatentSizes(fields.count("kv_lora_rank"), fields.count("q_lora_rank", 0), *map(fields.count, sizes))
    return _llama(fields, mixture=mixture, latent=latent)


def _glm4_moe(fields: Fields) -> LlamaSizes:
    mixture = _routed(fields, router_bias=True)
    biases, norms = fields.flag("attention_bias"), fields.flag("use_qk_norm")
    return _llama(fields, attention_biases=biases, head_norms=norms, mixture=mixture)


def _cohere(fields: Fields) -> LlamaSizes:
    own = windows(fields, pattern=4, default=4096) if fields.values["model_type"] == "cohere2" else ()
    return _llama(fields, ties=True, num_norms=1, wide_norms=fields.flag("use_qk_norm"), windows=own)


def _stablelm(fields: Fields) -> LlamaSizes:
    fields.only("qk_layernorm", False)
    norms = 1 if fields.flag("use_parallel_residual") else 2
    return _llama(fields, attention_biases=fields.flag("use_qkv_bias"), norm_parameters=2, num_norms=norms)


def _phi(fields: Fields) -> LlamaSizes:
    fields.only("qk_layernorm", False)
    return _llama(fields, **ALL_BIASES, head_bias=True, is_gated=False, num_norms=1, norm_parameters=2)


def _starcoder2(fields: Fields) -> LlamaSizes:
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    fields.only("use_bias", True)
    return _llama(fields, **ALL_BIASES, is_gated=False, norm_parameters=2, ties=True, windows=windows(fields))


def _falcon(fields: Fields) -> LlamaSizes:
    is_new, shares = fields.flag("new_decoder_architecture"), fields.flag("multi_query", default=True)
    is_parallel, has_biases = fields.flag("parallel_attn", default=True), fields.flag("bias")
    fields.flag("alibi")
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    given = fields.count("num_kv_heads", heads)
    fields.assume(num_key_value_heads=given if is_new else 1 if shares else heads)
    fields.assume(intermediate_size=fields.count("ffn_hidden_size", 4 * hidden))
    norms = 2 if is_new or not is_parallel else 1
    norms = fields.count("num_ln_in_parallel_attn", norms)
    biases = dict(ALL_BIASES) if has_biases else {"attention_biases": False}
    return _llama(fields, **biases, is_gated=False, norm_parameters=2, num_norms=norms, ties=True)


def _mpt(fields: Fields) -> LlamaSizes:
    fields.call(hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads")
    fields.call(max_position_embeddings="max_seq_len")
    inner = fields.inner("attn_config")
    inner.only("qk_ln", False)
    heads, width = fields.count("num_attention_heads"), fields.count("expansion_ratio", 4) * fields.count("hidden_size")
    fields.assume(num_key_value_heads=inner.count("kv_n_heads", heads), intermediate_size=width)
    learns = fields.flag("learned_pos_emb", default=True) and not inner.flag("alibi") and not inner.flag("rope")
    fields.only("norm_type", "low_precision_layernorm", "layernorm")
    bare = fields.flag("no_bias", default=True)
    biases = {"attention_biases": False} if bare else dict(ALL_BIASES)
    positions = fields.count("max_position_embeddings", 2048) if learns else 0
    norms = 1 if bare else 2
    return _llama(fields, **biases, is_gated=False, norm_parameters=norms, num_positions=positions, ties=True)


def _dbrx(fields: Fields) -> LlamaSizes:
    fields.call(hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads")
    fields.call(max_position_embeddings="max_seq_len")
    inner, wide = fields.inner("attn_config"), fields.inner("ffn_config")
    width = wide.count("ffn_hidden_size")
    fields.assume(num_key_value_heads=inner.count("kv_n_heads", 1), intermediate_size=width)
    mixture = Mixture(wide.count("moe_num_experts"), wide.count("moe_top_k"), expert_size=width)
    return _llama(fields, mixture=mixture)


def _bigcode(fields: Fields) -> LlamaSizes:
    fields.call(**OF_GPT2)
    heads, shares = fields.count("num_attention_heads"), fields.flag("multi_query", default=True)
    fields.assume(num_key_value_heads=1 if shares else heads, intermediate_size=4 * fields.count("hidden_size"))
    positions = fields.count("max_position_embeddings")
    return _llama(fields, **ALL_BIASES, is_gated=False, norm_parameters=2, num_positions=positions, ties=True)


def _gptj(fields: Fields) -> LlamaSizes:
    """Take the sizes of GPT-J and CodeGen: one norm in a block, biases in its feed-forward part and in the head."""
    fields.call(**OF_GPT2)
    fields.assume(intermediate_size=4 * fields.count("hidden_size"))
    return _llama(fields, feed_forward_biases=True, head_bias=True, is_gated=False, num_norms=1, norm_parameters=2)


def _gpt_neo(fields: Fields) -> LlamaSizes:
    fields.call(num_hidden_layers="num_layers", num_attention_heads="num_heads")
    fields.assume(intermediate_size=4 * fields.count("hidden_size"))
    positions = fields.count("max_position_embeddings")
    own = dict(ALL_BIASES) | {"attention_biases": False, "is_gated": False, "norm_parameters": 2}
    return _llama(fields, **own, num_positions=positions, ties=True, windows=windows_of_neo(fields))


def _chatglm(fields: Fields) -> LlamaSizes:
    fields.call(num_hidden_layers="num_layers", intermediate_size="ffn_hidden_size", vocab_size="padded_vocab_size")
    fields.call(head_dim="kv_channels", max_position_embeddings="seq_length")
    fields.only("add_bias_linear", False)
    fields.only("rmsnorm", True)
    fields.only("post_layer_norm", True)
    if fields.flag("multi_query_attention"):
        fields.assume(num_key_value_heads=fields.count("multi_query_group_num"))
    return _llama(fields, attention_biases=fields.flag("add_qkv_bias"))


def _bare(fields: Fields, name: str) -> LlamaSizes:
    """Take the sizes of a Llama whose file says by another name that there are no biases."""
    fields.only(name, False)
    return _llama(fields, windows=windows(fields) if fields.values["model_type"] == "phi3" else ())


LLAMAS: Mapping[str, Callable[[Fields], LlamaSizes]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": lambda fields: _llama(fields, windows=windows(fields, default=4096)),
        "phi3": lambda fields: _bare(fields, "lm_head_bias"),  # products with one input run as one in all of these
        "granite": _llama,
        "baichuan": _llama,
        "internlm2": lambda fields: _bare(fields, "bias"),
        "ernie4_5": lambda fields: _bare(fields, "use_bias"),
        "smollm3": partial(_llama, ties=True),
        "gemma": partial(_llama, ties=True, head_size=256),
        "gemma2": _gemma2,
        "gemma3_text": _gemma3,
        "olmo": partial(_llama, norm_parameters=0),
        "olmo2": partial(_llama, wide_norms=True),  # its norms follow attention and feed-forward part
        "olmo3": lambda fields: _llama(fields, wide_norms=True, windows=windows(fields, pattern=4, default=4096)),
        "olmoe": partial(_mixed, experts="num_experts", wide_norms=True),
        "qwen2": lambda fields: _llama(fields, attention_biases=True, windows=windows_behind(fields)),
        "qwen2_moe": _qwen2_moe,
        "qwen3": lambda fields: _llama(fields, head_norms=True, head_size=128, windows=windows_behind(fields)),
        "qwen3_moe": _qwen3_moe,
        "qwen3_vl_text": partial(_llama, head_norms=True, head_size=128),
        "qwen3_vl_moe_text": _qwen3_moe,
        "seed_oss": _seed_oss,
        "glm": lambda fields: _llama(fields, attention_biases=fields.flag("attention_bias", default=True)),
        "glm4": lambda fields: _llama(fields, attention_biases=fields.flag("attention_bias"), num_norms=4),
        "glm4_moe": _glm4_moe,
        "chatglm": _chatglm,
        "mixtral": lambda fields: _mixed(fields, windows=windows(fields)),
        "granitemoe": partial(_mixed, ties=True),
        "phimoe": _phimoe,
        "gpt_oss": lambda fields: _mixed(fields, head_size=64, windows=windows(fields, pattern=2, default=128)),
        "grok-1": partial(_mixed, experts="num_experts", num_norms=4, ties=True),
        "llama4_text": _llama4,
        "dbrx": _dbrx,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "kimi_k2": _deepseek,
        "cohere": _cohere,
        "cohere2": _cohere,
        "nemotron": partial(_llama, is_gated=False, norm_parameters=2),
        "stablelm": _stablelm,
        "phi": _phi,
        "starcoder2": _starcoder2,
        "falcon": _falcon,
        "mpt": _mpt,
        "gpt_bigcode": _bigcode,
        "gptj": _gptj,
        "codegen": _gptj,
        "gpt_neo": _gpt_neo,
    }
)
