"""Sizes of models with experts from the fields of a Hugging Face configuration, family by family.

Left out of parameters: an expert's biases, gates of shared experts and sinks of attention (GPT-OSS: 0.05 % of all), and
layers that predict further tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from simulator.models.attention_products import LatentSizes
from simulator.models.hugging_face.families import lfm2_sizes, llama_sizes, of_hunyuan
from simulator.models.hugging_face.fields import Fields
from simulator.models.hugging_face.windows import windows, windows_behind
from simulator.models.llama import LlamaSizes
from simulator.models.mixture_of_experts import Mixture


def _chosen(fields: Fields, name: str = "num_experts", **sizes: Any) -> Mixture:
    """Take experts, and how many of them a token goes to; transformers 5 writes num_local_experts for num_experts."""
    if name not in fields.values and "num_local_experts" in fields.values:
        name = "num_local_experts"
    return Mixture(fields.count(name), fields.count("num_experts_per_tok"), **sizes)


def _mixed(fields: Fields, *, experts: str = "num_local_experts", **changes: Any) -> LlamaSizes:
    """Take the sizes of a model with experts in each block, as wide as its feed-forward part would be."""
    return llama_sizes(fields, mixture=_chosen(fields, experts), **changes)


def _qwen(fields: Fields, **changes: Any) -> LlamaSizes:
    fields.only("mlp_only_layers", [], None)
    mixture = _chosen(
        fields,
        expert_size=fields.count("moe_intermediate_size"),
        shared_size=fields.count("shared_expert_intermediate_size", 0, least=0),
        every=fields.count("decoder_sparse_step", 1),
    )
    return llama_sizes(fields, mixture=mixture, windows=windows_behind(fields), **changes)


def _qwen2(fields: Fields) -> LlamaSizes:
    return _qwen(fields, attention_biases=fields.flag("qkv_bias", default=True))


def _qwen3(fields: Fields) -> LlamaSizes:
    fields.only("qkv_bias", False)
    return _qwen(fields, head_norms=fields.flag("use_qk_norm", default=True))


def _phimoe(fields: Fields) -> LlamaSizes:
    return _mixed(fields, norm_parameters=2, head_bias=fields.flag("lm_head_bias"), windows=windows(fields))


def _llama4(fields: Fields) -> LlamaSizes:
    """Take the sizes of Llama 4. Of Maverick, every second block has experts; norms of queries have no weights."""
    width, every = fields.count("intermediate_size"), fields.count("interleave_moe_layer_step", 1)
    fields.only("moe_layers", None, [], list(range(every - 1, fields.count("num_hidden_layers"), every)))
    mixture = _chosen(fields, "num_local_experts", expert_size=width, shared_size=width, every=every)
    norms, wide = fields.flag("use_qk_norm", default=True), fields.count("intermediate_size_mlp", 16384)
    return llama_sizes(fields, mixture=mixture, feed_forward_size=wide, head_norms=norms)


def _routed(fields: Fields, *, router_bias: bool) -> Mixture:
    """Take routed and shared experts by the names of DeepSeek-V2, which others keep; first layers may have none."""
    width = fields.count("moe_intermediate_size")
    groups, most = fields.count("n_group", 1), fields.count("topk_group", 1)
    said = fields.values.get("mlp_layer_types")  # transformers 5 writes them for the number of dense ones
    first = fields.count("first_k_dense_replace", said.count("dense") if isinstance(said, list) else 0, least=0)
    kinds = ["dense"] * first + ["sparse"] * (fields.count("num_hidden_layers") - first)
    fields.only("mlp_layer_types", None, kinds)
    limits = most < groups and fields.values.get("topk_method") != "greedy"
    return _chosen(
        fields,
        "n_routed_experts",
        expert_size=width,
        shared_size=width * fields.count("n_shared_experts", 0, least=0),
        dense_layers=first,
        router_bias=router_bias,
        most_groups=(groups, most) if limits else None,
    )


def _deepseek(fields: Fields) -> LlamaSizes:
    fields.only("attention_bias", False)
    fields.only("moe_layer_freq", 1)
    bias = fields.values["model_type"] != "deepseek_v2"
    fields.only("topk_method", *(["noaux_tc"] if bias else ["greedy", "group_limited_greedy"]))
    mixture = _routed(fields, router_bias=bias)
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = LatentSizes(fields.count("kv_lora_rank"), fields.count("q_lora_rank", 0), *map(fields.count, sizes))
    return llama_sizes(fields, mixture=mixture, latent=latent)


def _glm4(fields: Fields) -> LlamaSizes:
    mixture = _routed(fields, router_bias=True)
    biases, norms = fields.flag("attention_bias"), fields.flag("use_qk_norm")
    return llama_sizes(fields, attention_biases=biases, head_norms=norms, mixture=mixture)


def _ernie(fields: Fields) -> LlamaSizes:
    fields.only("use_bias", False)
    fields.only("moe_layer_interval", 1)
    fields.only("moe_layer_end_index", -1, None, fields.count("num_hidden_layers") - 1)
    fields.call(n_routed_experts="moe_num_experts", num_experts_per_tok="moe_k")
    fields.call(n_shared_experts="moe_num_shared_experts", first_k_dense_replace="moe_layer_start_index")
    biased = fields.flag("moe_use_aux_free", default=True)
    return llama_sizes(fields, mixture=_routed(fields, router_bias=biased))


def _hunyuan(fields: Fields) -> LlamaSizes:
    fields.call(num_experts_per_tok="moe_topk")
    fields.only("moe_layer_num_skipped", 0)
    width = fields.count("moe_intermediate_size", fields.count("intermediate_size"))
    mixture = _chosen(fields, expert_size=width, shared_size=width * fields.count("num_shared_expert", 1))
    return llama_sizes(fields, mixture=mixture, **of_hunyuan(fields))


def _minimax(fields: Fields) -> LlamaSizes:
    fields.only("qk_norm_type", "per_layer")
    fields.only("shared_intermediate_size", 0)
    fields.only("attn_type_list", None, [1] * fields.count("num_hidden_layers"))  # 0 is linear attention
    mixture = _chosen(fields, "num_local_experts", router_bias=fields.flag("use_routing_bias", default=True))
    norms = fields.flag("use_qk_norm", default=True)
    return llama_sizes(fields, wide_norms=norms, mixture=mixture, windows=windows(fields))


def _lfm2(fields: Fields) -> LlamaSizes:
    width, first = fields.count("moe_intermediate_size"), fields.count("num_dense_layers", 2, least=0)
    biased = fields.flag("use_expert_bias", default=True)
    mixture = _chosen(fields, expert_size=width, dense_layers=first, router_bias=biased)
    return lfm2_sizes(fields, mixture=mixture)


def _dbrx(fields: Fields) -> LlamaSizes:
    fields.call(hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads")
    fields.call(max_position_embeddings="max_seq_len")
    inner, wide = fields.inner("attn_config"), fields.inner("ffn_config")
    width = wide.count("ffn_hidden_size")
    fields.assume(num_key_value_heads=inner.count("kv_n_heads", 1), intermediate_size=width)
    mixture = Mixture(wide.count("moe_num_experts"), wide.count("moe_top_k"), expert_size=width)
    return llama_sizes(fields, mixture=mixture)


MIXTURES: Mapping[str, Callable[[Fields], LlamaSizes]] = MappingProxyType(
    {
        "mixtral": lambda fields: _mixed(fields, windows=windows(fields)),
        "granitemoe": partial(_mixed, ties=True),
        "phimoe": _phimoe,
        "olmoe": partial(_mixed, experts="num_experts", wide_norms=True),
        "gpt_oss": lambda fields: _mixed(fields, head_size=64, windows=windows(fields, pattern=2, default=128)),
        "grok-1": partial(_mixed, experts="num_experts", num_norms=4, ties=True),
        "qwen2_moe": _qwen2,
        "qwen3_moe": _qwen3,
        "qwen3_vl_moe_text": _qwen3,
        "llama4_text": _llama4,
        "dbrx": _dbrx,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "kimi_k2": _deepseek,
        "glm4_moe": _glm4,
        "glm4_moe_lite": _deepseek,
        "dots1": lambda fields: llama_sizes(fields, head_norms=True, mixture=_routed(fields, router_bias=True)),
        "ernie4_5_moe": _ernie,
        "hunyuan_v1_moe": _hunyuan,
        "lfm2_moe": _lfm2,
        "minimax_m2": _minimax,
    }
)
