"""Sizes of Llama's relatives from the fields of a Hugging Face configuration: a table of families.

Left out of parameters: two numbers in each block of Apertus, of its activation; an expert's biases, gates of shared
experts and sinks of attention (GPT-OSS: 0.05 % of all), and layers that predict further tokens.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from importlib import resources
from types import MappingProxyType
from typing import Any

from simulator.models.hugging_face.fields import Fields, windows, windows_behind, windows_of_neo
from simulator.models.llama import LatentSizes, LlamaSizes
from simulator.models.parts import Mixture

Own = Mapping[str, Any]  # fields of LlamaSizes that a family sets in its own way
BIASES: Own = MappingProxyType({"attention_biases": True, "output_bias": True, "feed_forward_biases": True})
AS_GPT: Own = MappingProxyType({"is_gated": False, "norm_parameters": 2})
NAMES, ROWS = (
    tomllib.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))
    for name in ("names.toml", "families.toml")
)


def _sizes(fields: Fields, *, ties: bool = False, head_size: int = 0, **changes: Any) -> LlamaSizes:
    """Return the sizes that Llama and its relatives share; `ties` and `head_size` hold where a file is silent."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    own: dict[str, Any] = {
        "ties_embedding": fields.flag("tie_word_embeddings", ties),
        "head_size": fields.count("head_dim", head_size, least=0) or None,
        "feed_forward_biases": fields.flag("mlp_bias"),
    }
    if "attention_biases" not in changes:
        own |= dict.fromkeys(("attention_biases", "output_bias"), fields.flag("attention_bias"))
    wide = changes.pop("feed_forward_size", 0) or fields.count("intermediate_size")
    layers, shared = fields.count("num_hidden_layers"), fields.count("num_key_value_heads", heads)
    return LlamaSizes(hidden, layers, heads, shared, wide, fields.count("vocab_size"), **(own | changes))


def _quadruple(fields: Fields) -> Fields:
    """Take a feed-forward part of four times the hidden size, where the file says nothing of it."""
    return fields.assume(intermediate_size=4 * fields.count("hidden_size"))


def _hunyuan(fields: Fields, **changes: Any) -> LlamaSizes:
    norms = fields.only(use_cla=False, norm_type=("rms", "hf_rms")).flag("use_qk_norm", True)
    return _sizes(fields, head_norms=norms, **changes)


def _cohere(fields: Fields, **changes: Any) -> LlamaSizes:
    fields.only(use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True)
    return _sizes(fields, ties=True, num_norms=1, wide_norms=fields.flag("use_qk_norm"), **changes)


def _falcon(fields: Fields) -> LlamaSizes:
    is_new, shares = fields.flag("new_decoder_architecture"), fields.flag("multi_query", True)
    is_parallel, has_biases = fields.flag("parallel_attn", True), fields.flag("bias")
    fields.flag("alibi")
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    given = fields.count("num_kv_heads", heads)
    fields.assume(num_key_value_heads=given if is_new else 1 if shares else heads)
    fields.assume(intermediate_size=fields.count("ffn_hidden_size", 4 * hidden))
    norms = fields.count("num_ln_in_parallel_attn", 2 if is_new or not is_parallel else 1)
    return _sizes(
        fields, **AS_GPT, **(BIASES if has_biases else {"attention_biases": False}), num_norms=norms, ties=True
    )


def _mpt(fields: Fields) -> LlamaSizes:
    inner = fields.call(**NAMES["mpt"]).inner("attn_config").only(qk_ln=False)
    heads, width = fields.count("num_attention_heads"), fields.count("expansion_ratio", 4) * fields.count("hidden_size")
    fields.assume(num_key_value_heads=inner.count("kv_n_heads", heads), intermediate_size=width)
    learns = fields.flag("learned_pos_emb", True) and not inner.flag("alibi") and not inner.flag("rope")
    bare = fields.only(norm_type=("low_precision_layernorm", "layernorm")).flag("no_bias", True)
    own: Own = {"attention_biases": False} if bare else {**BIASES, **AS_GPT}
    positions = fields.count("max_position_embeddings", 2048) if learns else 0
    return _sizes(fields, **{"is_gated": False, "num_positions": positions, **own}, ties=True)


def _bigcode(fields: Fields) -> LlamaSizes:
    heads = fields.call(**NAMES["gpt2"]).count("num_attention_heads")
    fields.assume(num_key_value_heads=1 if fields.flag("multi_query", True) else heads)
    positions = _quadruple(fields).count("max_position_embeddings")
    return _sizes(fields, **BIASES, **AS_GPT, num_positions=positions, ties=True)


def _gptj(fields: Fields) -> LlamaSizes:
    """Take the sizes of GPT-J and CodeGen: one norm in a block, biases in its feed-forward part and in the head."""
    named = _quadruple(fields.call(**NAMES["gpt2"]))
    return _sizes(named, **AS_GPT, feed_forward_biases=True, head_bias=True, num_norms=1)


def _gpt_neo(fields: Fields) -> LlamaSizes:
    _quadruple(fields.call(num_hidden_layers="num_layers", num_attention_heads="num_heads"))
    own = {**AS_GPT, **BIASES, "attention_biases": False, "num_positions": fields.count("max_position_embeddings")}
    return _sizes(fields, **own, ties=True, windows=windows_of_neo(fields))


def _chatglm(fields: Fields) -> LlamaSizes:
    fields.call(num_hidden_layers="num_layers", intermediate_size="ffn_hidden_size", vocab_size="padded_vocab_size")
    fields.call(head_dim="kv_channels", max_position_embeddings="seq_length")
    fields.only(add_bias_linear=False, rmsnorm=True, post_layer_norm=True)
    if fields.flag("multi_query_attention"):
        fields.assume(num_key_value_heads=fields.count("multi_query_group_num"))
    return _sizes(fields, attention_biases=fields.flag("add_qkv_bias"))


def _lfm2(fields: Fields, **changes: Any) -> LlamaSizes:
    """Take the sizes of LFM2: short convolutions in place of attention in most blocks, normed heads in the others."""
    fields.only(conv_bias=False, block_use_swiglu=True)
    layers, width = fields.count("num_hidden_layers"), fields.count("conv_L_cache", 3)
    fields.only(**dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), fields.count("hidden_size")))
    fields.only(num_heads=fields.count("num_attention_heads"))
    attend = fields.values.get("full_attn_idxs")
    fields.rest -= {"full_attn_idxs"}  # the same in an older form
    known: list[object] = attend if isinstance(attend, list) else list(range(layers))
    older = ["full_attention" if layer in known else "conv" for layer in range(layers)]
    said: Any = fields.values.get("layer_types") or older
    if not isinstance(said, list) or len(said) != layers or not {*map(str, said)} <= {"full_attention", "conv"}:
        raise ValueError(f"{fields.where}: layer_types is {said!r}; write full_attention or conv for each of {layers}")
    own: dict[str, Any] = {"convolutions": tuple(width if kind == "conv" else 0 for kind in said), "head_norms": True}
    return _sizes(fields, ties=fields.flag("tie_embedding", True), **(own | changes))


def _lfm2_dense(fields: Fields) -> LlamaSizes:
    wide = fields.count("intermediate_size", fields.count("block_ff_dim", 12288))
    if fields.flag("block_auto_adjust_ff_dim", True):
        multiple = fields.only(block_ffn_dim_multiplier=1.0).count("block_multiple_of", 256)
        wide = -(-(2 * wide // 3) // multiple) * multiple
    return _lfm2(fields, feed_forward_size=wide)


def _experts(fields: Fields, name: str = "num_experts", **sizes: Any) -> Mixture:
    """Take experts, and how many of them a token goes to; transformers 5 writes num_local_experts for num_experts."""
    if name not in fields.values and "num_local_experts" in fields.values:
        name = "num_local_experts"
    return Mixture(fields.count(name), fields.count("num_experts_per_tok"), **sizes)


def _mixed(
    fields: Fields, *, experts: str = "num_local_experts", has_biases: bool = False, **changes: Any
) -> LlamaSizes:
    """Take the sizes of a model with experts in each block, as wide as its feed-forward part would be."""
    return _sizes(fields, mixture=_experts(fields, experts, has_biases=has_biases), **changes)


def _qwen_mixed(fields: Fields, **changes: Any) -> LlamaSizes:
    fields.only(mlp_only_layers=([], None))
    width, every = fields.count("moe_intermediate_size"), fields.count("decoder_sparse_step", 1)
    shared = fields.count("shared_expert_intermediate_size", 0, least=0)
    mixture = _experts(fields, expert_size=width, shared_size=shared, every=every)
    return _sizes(fields, mixture=mixture, windows=windows_behind(fields), **changes)


def _llama4(fields: Fields) -> LlamaSizes:
    """Take the sizes of Llama 4. Of Maverick, every second block has experts; norms of queries have no weights."""
    width, every = fields.count("intermediate_size"), fields.count("interleave_moe_layer_step", 1)
    fields.only(moe_layers=(None, [], list(range(every - 1, fields.count("num_hidden_layers"), every))))
    mixture = _experts(fields, "num_local_experts", expert_size=width, shared_size=width, every=every)
    norms, wide = fields.flag("use_qk_norm", True), fields.count("intermediate_size_mlp", 16384)
    return _sizes(fields, mixture=mixture, feed_forward_size=wide, head_norms=norms)


def _routed(fields: Fields, *, router_bias: bool = True) -> Mixture:
    """Take routed and shared experts by the names of DeepSeek-V2, which others keep; first layers may have none."""
    width = fields.count("moe_intermediate_size")
    groups, most = fields.count("n_group", 1), fields.count("topk_group", 1)
    said = fields.values.get("mlp_layer_types")  # transformers 5 writes them for the number of dense ones
    first = fields.count("first_k_dense_replace", said.count("dense") if isinstance(said, list) else 0, least=0)
    fields.only(mlp_layer_types=(None, ["dense"] * first + ["sparse"] * (fields.count("num_hidden_layers") - first)))
    limits = most < groups and fields.values.get("topk_method") != "greedy"
    return _experts(
        fields,
        "n_routed_experts",
        expert_size=width,
        shared_size=width * fields.count("n_shared_experts", 0, least=0),
        dense_layers=first,
        router_bias=router_bias,
        most_groups=(groups, most) if limits else None,
    )


def _deepseek(fields: Fields) -> LlamaSizes:
    bias = fields.values["model_type"] != "deepseek_v2"
    fields.only(attention_bias=False, moe_layer_freq=1)
    fields.only(topk_method="noaux_tc" if bias else ("greedy", "group_limited_greedy"))
    mixture = _routed(fields, router_bias=bias)
    sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    latent = LatentSizes(fields.count("kv_lora_rank"), fields.count("q_lora_rank", 0), *map(fields.count, sizes))
    return _sizes(fields, mixture=mixture, latent=latent)


def _ernie_mixed(fields: Fields) -> LlamaSizes:
    fields.only(use_bias=False, moe_layer_interval=1)
    fields.only(moe_layer_end_index=(-1, None, fields.count("num_hidden_layers") - 1))
    fields.call(n_routed_experts="moe_num_experts", num_experts_per_tok="moe_k")
    fields.call(n_shared_experts="moe_num_shared_experts", first_k_dense_replace="moe_layer_start_index")
    return _sizes(fields, mixture=_routed(fields, router_bias=fields.flag("moe_use_aux_free", True)))


def _hunyuan_mixed(fields: Fields) -> LlamaSizes:
    fields.call(num_experts_per_tok="moe_topk").only(moe_layer_num_skipped=0)
    width = fields.count("moe_intermediate_size", fields.count("intermediate_size"))
    shared = width * fields.count("num_shared_expert", 1)
    return _hunyuan(fields, mixture=_experts(fields, expert_size=width, shared_size=shared))


def _minimax(fields: Fields) -> LlamaSizes:
    fields.only(qk_norm_type="per_layer", shared_intermediate_size=0)
    fields.only(attn_type_list=(None, [1] * fields.count("num_hidden_layers")))  # 0 is linear attention
    mixture = _experts(fields, "num_local_experts", router_bias=fields.flag("use_routing_bias", True))
    norms = fields.flag("use_qk_norm", True)
    return _sizes(fields, wide_norms=norms, mixture=mixture, windows=windows(fields))


def _lfm2_mixed(fields: Fields) -> LlamaSizes:
    width, first = fields.count("moe_intermediate_size"), fields.count("num_dense_layers", 2, least=0)
    biased = fields.flag("use_expert_bias", True)
    return _lfm2(fields, mixture=_experts(fields, expert_size=width, dense_layers=first, router_bias=biased))


def _dbrx(fields: Fields) -> LlamaSizes:
    inner, wide = fields.call(**NAMES["mpt"]).inner("attn_config"), fields.inner("ffn_config")
    width = wide.count("ffn_hidden_size")
    fields.assume(num_key_value_heads=inner.count("kv_n_heads", 1), intermediate_size=width)
    mixture = Mixture(wide.count("moe_num_experts"), wide.count("moe_top_k"), expert_size=width)
    return _sizes(fields, mixture=mixture)


def _stablelm(fields: Fields) -> LlamaSizes:
    num_norms = 1 if fields.flag("use_parallel_residual") else 2
    own = {"attention_biases": fields.flag("use_qkv_bias"), "wide_norms": fields.flag("qk_layernorm")}
    return _sizes(fields, **own, norm_parameters=2, num_norms=num_norms)  # a norm per head: wide ones have as many


_EACH: tuple[Callable[..., LlamaSizes], ...] = (
    *(_sizes, _hunyuan, _cohere, _falcon, _mpt, _bigcode, _gptj, _gpt_neo, _chatglm, _lfm2_dense, _stablelm),
    *(_mixed, _qwen_mixed, _llama4, _deepseek, _ernie_mixed, _hunyuan_mixed, _minimax, _lfm2_mixed, _dbrx),
)
READERS = {each.__name__[1:]: each for each in _EACH}


def _read(row: Mapping[str, Any], fields: Fields) -> LlamaSizes:
    """Take the sizes of a family by its row of families.toml, whose first lines say what its keys mean."""
    own = {**row}
    fields.only(**own.pop("only", {})).assume(**own.pop("assume", {}))
    reader = READERS[own.pop("by", "sizes")]
    own |= {size: fields.flag(*said) for size, said in own.pop("flags", {}).items()}
    for name, sizes in (("biases", BIASES), ("as_gpt", AS_GPT)):
        own |= sizes if own.pop(name, False) else {}
    if "windows" in own:
        own["windows"] = windows(fields, **own["windows"])
    if own.pop("windows_behind", False):
        own["windows"] = windows_behind(fields)
    if own.pop("routed", False):
        own["mixture"] = _routed(fields)
    return reader(fields, **own)


FAMILIES: Mapping[str, Callable[[Fields], LlamaSizes]] = MappingProxyType(
    {name: partial(_read, row) for name, row in ROWS.items()}
)
