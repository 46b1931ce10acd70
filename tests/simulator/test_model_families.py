"""Families of Hugging Face configurations beside Llama: parameters as their makers or transformers count them."""

from math import prod

import pytest

from distlab.plan import Plan
from simulator import cluster, simulate, workload_from_config

SAME = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def sizes(family, hidden, layers, heads, shared, width, vocabulary, **others):
    values = dict(zip(SAME, (hidden, layers, heads, shared, width), strict=True))
    return {"model_type": family, "vocab_size": vocabulary, **values, **others}


OLD_FALCON = {
    "multi_query": True,
    "new_decoder_architecture": False,
    "parallel_attn": True,
    "bias": False,
    "alibi": False,
}
NO_TIES = {"tie_word_embeddings": False}
# Families that released_models.json has not. Billions of parameters: of model cards; where these count a tied head
# twice (Falcon), as transformers counts.
MODELS = {
    "olmo-7b": (sizes("olmo", 4096, 32, 32, 32, 11008, 50304, clip_qkv=None, **NO_TIES), 6.888),
    "olmo-3-7b": (sizes("olmo3", 4096, 32, 32, 32, 11008, 100278, sliding_window=4096, attention_bias=False), 7.298),
    "qwen-3-vl-8b, text": (sizes("qwen3_vl_text", 4096, 36, 32, 8, 12288, 151936, head_dim=128), 8.191),
    "qwen-3-vl-30b-a3b, text": (
        sizes("qwen3_vl_moe_text", 2048, 48, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8)
        | {"moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []},
        30.53,
    ),
    "command-r-plus": (sizes("cohere", 12288, 64, 96, 8, 33792, 256000, use_qk_norm=True), 103.8),
    "glm-4-9b": (sizes("glm4", 4096, 40, 32, 2, 13696, 151552, head_dim=128, attention_bias=False), 9.40),
    "falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71}
        | {"vocab_size": 65024, **OLD_FALCON},
        6.922,
    ),
    "starcoder": (
        {
            "model_type": "gpt_bigcode",
            "n_embd": 6144,
            "n_head": 48,
            "n_layer": 40,
            "n_positions": 8192,
            "n_inner": 24576,
        }
        | {"vocab_size": 49152, "multi_query": True},
        15.52,
    ),
    "gpt-neo-2.7b": (
        {"model_type": "gpt_neo", "hidden_size": 2560, "num_heads": 20, "num_layers": 32, "vocab_size": 50257}
        | {"max_position_embeddings": 2048, "intermediate_size": None, "window_size": 256},
        2.651,
    ),
    "dbrx": (
        {"model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40, "max_seq_len": 32768}
        | {"vocab_size": 100352, "attn_config": {"clip_qkv": 8, "kv_n_heads": 8}}
        | {"ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}},
        131.6,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_family_has_its_published_parameters(name):
    config, billions = MODELS[name]
    workload = workload_from_config(config, sequence_length=256)
    assert workload.num_parameters / 1e9 == pytest.approx(billions, rel=0.005)
    layers = workload.layers
    assert all(sum(map(prod, layer.parameter_shapes)) == layer.num_parameters for layer in layers)
    step = simulate(workload, cluster("dgx-h100"), Plan(data=4, pipeline=2, num_microbatches=4))
    assert 0 < step.mfu < 1


def test_norms_and_biases_of_a_block():
    """A norm more is 4 B s h bytes streamed, 2 kept and its weights; a bias is parameters alone."""
    plain = workload_from_config(sizes("llama", 64, 2, 4, 4, 128, 100), sequence_length=32).layers[1]
    normed = workload_from_config(sizes("gemma2", 64, 2, 4, 4, 128, 100, head_dim=16), sequence_length=32).layers[1]
    tokens, h = 32, 64
    assert normed.num_parameters - plain.num_parameters == 2 * h
    assert normed.forward.memory_bytes - plain.forward.memory_bytes == 2 * 4 * tokens * h
    assert normed.activation_bytes - plain.activation_bytes == 2 * 2 * tokens * h
    bare = workload_from_config(sizes("olmo", 64, 2, 4, 4, 128, 100), sequence_length=32).layers[1]
    assert plain.num_parameters - bare.num_parameters == 2 * h
    assert bare.sequence_calls == ()
    biased = sizes("llama", 64, 2, 4, 4, 128, 100, attention_bias=True, mlp_bias=True)
    added = workload_from_config(biased, sequence_length=32).layers[1]
    assert added.num_parameters - plain.num_parameters == 4 * h + 2 * 128 + h
    assert added.forward == plain.forward


@pytest.mark.parametrize("family", ["persimmon", "openelm", "bailing_moe", "qwen4", None, 3, [], {}])
def test_what_is_no_decoder_of_a_known_kind_is_refused_in_one_line(family):
    with pytest.raises(ValueError, match=r"^config: model_type is .*; known are llama, ") as refused:
        workload_from_config(sizes(family, 64, 2, 4, 4, 128, 100))
    assert "\n" not in str(refused.value)


def test_olmo_3_sees_all_positions_in_every_fourth_layer_alone():
    whole, short = (dict(MODELS["olmo-3-7b"][0], sliding_window=size) for size in (None, 128))
    flops = [
        [each.forward.attention_flops for each in workload_from_config(own).layers[1:-1]] for own in (whole, short)
    ]
    assert [one == other for one, other in zip(*flops, strict=True)] == [False, False, False, True] * 8


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}', "hidden_size is there twice, write it once"),
        ('{"a": {"b": 1, "b": 2}}', "b is there twice, write it once"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("", r"not JSON \(Expecting value"),
    ],
)
def test_a_file_that_json_takes_or_dies_of_is_refused_in_one_line(tmp_path, text, said):
    """The standard library takes the last of two equal fields, and ends with RecursionError where lists nest."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"config.json: {said}.*pass the config.json of a model$") as refused:
        workload_from_config(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 5}, "^config: Llama: .*key-value heads the heads"),
        ({"hidden_size": 65}, "^config: Llama: .*heads must divide the hidden size"),
        ({"hidden_size": 0}, "^config: hidden_size is 0; write a whole number of at least 1"),
        ({"_name_or_path": ["x"]}, "^config: _name_or_path is .*; write a text of one line"),
        ({"_name_or_path": "a\nb\x1b[31m"}, "^config: _name_or_path is .*; write a text of one line"),
    ],
)
def test_sizes_that_do_not_go_together_are_told_with_their_file(changes, said):
    """Names are printed: one with a line's end or an escape would write over the terminal."""
    with pytest.raises(ValueError, match=said):
        workload_from_config(sizes("llama", 64, 2, 4, 4, 128, 100) | changes)


def test_a_table_inside_of_a_configuration_must_be_one():
    with pytest.raises(ValueError, match="attn_config is 3; write a table of fields"):
        workload_from_config(MODELS["dbrx"][0] | {"attn_config": 3})
