"""Sizes of Llama's relatives from the fields of a Hugging Face configuration, family by family.

Left out of parameters: two numbers in each block of Apertus, of its activation. `mixtures` has families with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from simulator.models.hugging_face.fields import Fields
from simulator.models.hugging_face.windows import windows, windows_behind, windows_of_neo
from simulator.models.llama import LlamaSizes

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


def llama_sizes(fields: Fields, *, ties: bool = False, head_size: int = 0, **changes: Any) -> LlamaSizes:
    """Return the sizes that Llama and its relatives share; `ties` and `head_size` hold where a file is silent.

    `changes` are fields of LlamaSizes that a family sets in its own way.
    """
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    own: dict[str, Any] = {
        "ties_embedding": fields.flag("tie_word_embeddings", default=ties),
        "head_size": fields.count("head_dim", head_size, least=0) or None,
        "feed_forward_biases": fields.flag("mlp_bias"),
    }
    if "attention_biases" not in changes:
        own |= dict.fromkeys(("attention_biases", "output_bias"), fields.flag("attention_bias"))
    wide = changes.pop("feed_forward_size", 0) or fields.count("intermediate_size")
    layers, shared = fields.count("num_hidden_layers"), fields.count("num_key_value_heads", heads)
    return LlamaSizes(hidden, layers, heads, shared, wide, fields.count("vocab_size"), **(own | changes))


def of_hunyuan(fields: Fields) -> dict[str, bool]:
    """Return what Hunyuan's files say in words of their own."""
    fields.only("use_cla", False)
    fields.only("norm_type", "rms", "hf_rms")
    return {"head_norms": fields.flag("use_qk_norm", default=True)}


def _seed_oss(fields: Fields) -> LlamaSizes:
    biases = {"attention_biases": fields.flag("attention_bias", default=True)}
    return llama_sizes(fields, **biases, output_bias=fields.flag("attention_out_bias"), head_size=128)


def _gemma2(fields: Fields) -> LlamaSizes:
    own = windows(fields, pattern=2, default=4096)
    return llama_sizes(fields, head_size=256, ties=True, num_norms=4, windows=own)


def _gemma3(fields: Fields) -> LlamaSizes:
    """Take the sizes of Gemma 3, whose files leave out what its class has by default."""
    fields.assume(vocab_size=262_208, num_attention_heads=8, num_key_value_heads=4)
    own = windows(fields, pattern=6, default=4096)
    return llama_sizes(fields, head_size=256, ties=True, num_norms=4, head_norms=True, windows=own)


def _cohere(fields: Fields) -> LlamaSizes:
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        fields.only(name, True)
    own = windows(fields, pattern=4, default=4096) if fields.values["model_type"] == "cohere2" else ()
    return llama_sizes(fields, ties=True, num_norms=1, wide_norms=fields.flag("use_qk_norm"), windows=own)


def _stablelm(fields: Fields) -> LlamaSizes:
    biases, norms = fields.flag("use_qkv_bias"), fields.flag("qk_layernorm")  # a norm per head: wide ones have as many
    own: dict[str, Any] = {"attention_biases": biases, "wide_norms": norms, "norm_parameters": 2}
    return llama_sizes(fields, **own, num_norms=1 if fields.flag("use_parallel_residual") else 2)


def _phi(fields: Fields) -> LlamaSizes:
    fields.only("qk_layernorm", False)
    return llama_sizes(fields, **ALL_BIASES, head_bias=True, is_gated=False, num_norms=1, norm_parameters=2)


def _starcoder2(fields: Fields) -> LlamaSizes:
    fields.only("mlp_type", "default")
    fields.only("norm_type", "layer_norm")
    fields.only("use_bias", True)
    return llama_sizes(fields, **ALL_BIASES, is_gated=False, norm_parameters=2, ties=True, windows=windows(fields))


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
    return llama_sizes(fields, **biases, is_gated=False, norm_parameters=2, num_norms=norms, ties=True)


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
    return llama_sizes(fields, **biases, is_gated=False, norm_parameters=norms, num_positions=positions, ties=True)


def _bigcode(fields: Fields) -> LlamaSizes:
    fields.call(**OF_GPT2)
    heads, shares = fields.count("num_attention_heads"), fields.flag("multi_query", default=True)
    fields.assume(num_key_value_heads=1 if shares else heads, intermediate_size=4 * fields.count("hidden_size"))
    positions = fields.count("max_position_embeddings")
    return llama_sizes(fields, **ALL_BIASES, is_gated=False, norm_parameters=2, num_positions=positions, ties=True)


def _gptj(fields: Fields) -> LlamaSizes:
    """Take the sizes of GPT-J and CodeGen: one norm in a block, biases in its feed-forward part and in the head."""
    fields.call(**OF_GPT2)
    fields.assume(intermediate_size=4 * fields.count("hidden_size"))
    return llama_sizes(fields, feed_forward_biases=True, head_bias=True, is_gated=False, num_norms=1, norm_parameters=2)


def _gpt_neo(fields: Fields) -> LlamaSizes:
    fields.call(num_hidden_layers="num_layers", num_attention_heads="num_heads")
    fields.assume(intermediate_size=4 * fields.count("hidden_size"))
    positions = fields.count("max_position_embeddings")
    own = dict(ALL_BIASES) | {"attention_biases": False, "is_gated": False, "norm_parameters": 2}
    return llama_sizes(fields, **own, num_positions=positions, ties=True, windows=windows_of_neo(fields))


def _chatglm(fields: Fields) -> LlamaSizes:
    fields.call(num_hidden_layers="num_layers", intermediate_size="ffn_hidden_size", vocab_size="padded_vocab_size")
    fields.call(head_dim="kv_channels", max_position_embeddings="seq_length")
    fields.only("add_bias_linear", False)
    fields.only("rmsnorm", True)
    fields.only("post_layer_norm", True)
    if fields.flag("multi_query_attention"):
        fields.assume(num_key_value_heads=fields.count("multi_query_group_num"))
    return llama_sizes(fields, attention_biases=fields.flag("add_qkv_bias"))


def _apertus(fields: Fields) -> LlamaSizes:
    fields.only("post_norm", False)
    return llama_sizes(fields, is_gated=False, head_norms=fields.flag("qk_norm", default=True))


def lfm2_sizes(fields: Fields, **changes: Any) -> LlamaSizes:
    """Return the sizes of LFM2: short convolutions in place of attention in most blocks, normed heads in the others."""
    fields.only("conv_bias", False)
    fields.only("block_use_swiglu", True)
    layers, width = fields.count("num_hidden_layers"), fields.count("conv_L_cache", 3)
    for same in ("block_dim", "conv_dim", "conv_dim_out"):
        fields.only(same, fields.count("hidden_size"))
    fields.only("num_heads", fields.count("num_attention_heads"))
    attend = fields.values.get("full_attn_idxs")
    fields.rest -= {"full_attn_idxs"}  # the same in an older form
    known: list[object] = attend if isinstance(attend, list) else list(range(layers))
    said: Any = fields.values.get("layer_types") or [
        ("full_attention" if at in known else "conv") for at in range(layers)
    ]
    if not isinstance(said, list) or len(said) != layers or not {*map(str, said)} <= {"full_attention", "conv"}:
        raise ValueError(f"{fields.where}: layer_types is {said!r}; write full_attention or conv for each of {layers}")
    own: dict[str, Any] = {"convolutions": tuple(width if kind == "conv" else 0 for kind in said), "head_norms": True}
    return llama_sizes(fields, ties=fields.flag("tie_embedding", default=True), **(own | changes))


def _lfm2(fields: Fields) -> LlamaSizes:
    wide = fields.count("intermediate_size", fields.count("block_ff_dim", 12288))
    if fields.flag("block_auto_adjust_ff_dim", default=True):
        fields.only("block_ffn_dim_multiplier", 1.0)
        multiple = fields.count("block_multiple_of", 256)
        wide = -(-(2 * wide // 3) // multiple) * multiple
    return lfm2_sizes(fields, feed_forward_size=wide)


def _bare(fields: Fields, name: str) -> LlamaSizes:
    """Take the sizes of a Llama whose file says by another name that there are no biases."""
    fields.only(name, False)
    return llama_sizes(fields, windows=windows(fields) if fields.values["model_type"] == "phi3" else ())


DENSE: Mapping[str, Callable[[Fields], LlamaSizes]] = MappingProxyType(
    {
        "llama": llama_sizes,
        "arcee": partial(llama_sizes, is_gated=False),
        "apertus": _apertus,
        "exaone4": lambda fields: llama_sizes(fields, head_norms=True, windows=windows(fields, pattern=4)),
        "hunyuan_v1_dense": lambda fields: llama_sizes(fields, **of_hunyuan(fields)),
        "lfm2": _lfm2,
        "ministral3": lambda fields: llama_sizes(fields, windows=windows(fields)),
        "mistral": lambda fields: llama_sizes(fields, windows=windows(fields, default=4096)),
        "phi3": lambda fields: _bare(fields, "lm_head_bias"),  # products with one input run as one in all of these
        "granite": llama_sizes,
        "baichuan": llama_sizes,
        "internlm2": lambda fields: _bare(fields, "bias"),
        "ernie4_5": lambda fields: _bare(fields, "use_bias"),
        "smollm3": partial(llama_sizes, ties=True),
        "gemma": partial(llama_sizes, ties=True, head_size=256),
        "gemma2": _gemma2,
        "gemma3_text": _gemma3,
        "olmo": partial(llama_sizes, norm_parameters=0),
        "olmo2": partial(llama_sizes, wide_norms=True),  # its norms follow attention and feed-forward part
        "olmo3": lambda fields: llama_sizes(fields, wide_norms=True, windows=windows(fields, pattern=4, default=4096)),
        "qwen2": lambda fields: llama_sizes(fields, attention_biases=True, windows=windows_behind(fields)),
        "qwen3": lambda fields: llama_sizes(fields, head_norms=True, head_size=128, windows=windows_behind(fields)),
        "qwen3_vl_text": partial(llama_sizes, head_norms=True, head_size=128),
        "seed_oss": _seed_oss,
        "glm": lambda fields: llama_sizes(fields, attention_biases=fields.flag("attention_bias", default=True)),
        "glm4": lambda fields: llama_sizes(fields, attention_biases=fields.flag("attention_bias"), num_norms=4),
        "chatglm": _chatglm,
        "cohere": _cohere,
        "cohere2": _cohere,
        "nemotron": partial(llama_sizes, is_gated=False, norm_parameters=2),
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
