"""Sizes of models by name, by a Hugging Face configuration and by a few words: parameters and work."""

import json
from math import prod

import pytest
from test_released_models import RELEASED

from distlab.plan import Plan
from simulator import (
    LatentSizes,
    LlamaSizes,
    Mixture,
    ModelDescription,
    cluster,
    llama_workload,
    memory_of,
    model_by_name,
    simulate,
    workload_from_config,
)

# Parameters (and the router's biases) of transformers 5.23's models of these sizes, built on the meta device, 2026-11.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen-2.5-0.5b": 494_032_768,
    "qwen-2.5-7b": 7_615_616_512,
    "qwen-2.5-72b": 72_706_203_648,
    "qwen-3-8b": 8_190_735_360,
    "qwen-3-30b-a3b": 30_532_122_624,
    "qwen-3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v3": 671_026_419_200,
    "gpt-2-124m": 124_439_808,
    "gpt-2-1.5b": 1_557_611_200,
    "opt-125m": 125_239_296,
    "opt-6.7b": 6_658_473_984,
    "bloom-560m": 559_214_592,
    "bloom-176b": 176_247_271_424,
}
# Parameters that work on one token, in billions, as the papers say; embeddings count in some of them.
ACTIVE = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39.1, "deepseek-v3": 37, "qwen-3-30b-a3b": 3.3, "qwen-3-235b-a22b": 22}

LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}
LLAMA |= {"max_position_embeddings": 131072, "rope_theta": 500000.0, "torch_dtype": "bfloat16"}
QWEN3 = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32}
QWEN3 |= {"num_key_value_heads": 4, "intermediate_size": 6144, "vocab_size": 151936, "head_dim": 128}
QWEN3 |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": []}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
OPT = {"model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "ffn_dim": 16384}
OPT |= {"max_position_embeddings": 2048, "vocab_size": 50272, "word_embed_proj_dim": 4096, "prefix": "</s>"}
BLOOM = {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880}
GEMMA = {"model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 8}
GEMMA |= {"num_key_value_heads": 1, "intermediate_size": 16384, "vocab_size": 256000, "hidden_activation": "gelu"}
OLMO = {"model_type": "olmo2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
OLMO |= {"num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 100352, "tie_word_embeddings": False}
CONFIGS = {
    "llama-3-8b": LLAMA,
    "deepseek-v3": RELEASED["DeepSeek-V3"]["config"],
    "qwen-2.5-7b": RELEASED["Qwen2.5-7B"]["config"],
    "qwen-3-30b-a3b": QWEN3,
    "mixtral-8x7b": RELEASED["Mixtral-8x7B"]["config"],
    "gpt-2-124m": GPT2,
    "opt-6.7b": OPT,
    "bloom-176b": BLOOM,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_transformers(name):
    assert model_by_name(name).num_parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_products_are_those_of_the_active_parameters(name):
    """2 operations per token and active parameter in forward, scores and the embedding apart."""
    workload = model_by_name(name, attention="flash")
    tokens = workload.layers[0].output_bytes // (2 * workload.layers[0].parameter_shapes[0][1])
    active = sum(layer.forward.matmul_flops for layer in workload.layers) / (2 * tokens) / 1e9
    embedding = workload.layers[0].num_parameters / 1e9
    assert active < ACTIVE[name] * 1.01
    assert active + embedding > ACTIVE[name] * 0.99


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_is_the_model_by_name(name):
    own = {"sequence_length": 1024, "microbatch_size": 2, "attention": "flash"}
    found, known = workload_from_config(CONFIGS[name], **own), model_by_name(name, **own)
    assert found.layers == known.layers
    assert (found.optimizer, found.samples) == (known.optimizer, known.samples)


# Parameters that the sizes of gemma-2b and OLMo-2-7B give; test_released_models has those of other families.
@pytest.mark.parametrize(("config", "parameters"), [(GEMMA, 2_506_172_416), (OLMO, 7_298_617_344)])
def test_configurations_without_a_model_by_name(config, parameters):
    workload = workload_from_config(config, sequence_length=1024)
    assert workload.num_parameters == parameters
    assert all(
        sum(prod(shape) for shape in layer.parameter_shapes) == layer.num_parameters for layer in workload.layers
    )
    tensor = 1 if config is GEMMA else 2  # its one key-value head is not divided
    step = simulate(workload, cluster("dgx-h100", 4 * tensor), Plan(2, 2, 4, tensor=tensor))
    assert step.duration_s > 0


def test_normed_queries_and_keys_keep_their_inputs():
    plain, normed = (
        workload_from_config(OLMO | {"model_type": family}, sequence_length=1024, attention="flash")
        for family in ("llama", "olmo2")
    )
    more = normed.layers[1].activation_bytes - plain.layers[1].activation_bytes
    assert more == 2 * 1024 * (4096 + 4096)
    assert normed.layers[1].num_parameters - plain.layers[1].num_parameters == 4096 + 4096
    assert normed.layers[1].forward.memory_bytes > plain.layers[1].forward.memory_bytes
    assert normed.layers[1].forward.matmul_flops == plain.layers[1].forward.matmul_flops


def test_a_configuration_has_a_length_and_a_kernel_of_its_own(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    workload = workload_from_config(path)
    assert workload.layers == model_by_name("llama-3-8b", sequence_length=4096).layers
    assert workload_from_config(GPT2).layers == model_by_name("gpt-2-124m").layers
    assert workload_from_config(GPT2, attention="flash").layers[1].score_bytes == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"model_type": "mamba"},
            r"config: a mamba model has state-space layers \(Mamba\): that is not modelled; count the",
        ),
        ({"loop_count": 3}, r"unknown field 'loop_count' in a llama configuration; take it out"),
        ({"hidden_size": None}, r"config: hidden_size is None; write a whole number of at least 1"),
        ({"num_hidden_layers": -2}, r"num_hidden_layers is -2; write a whole number"),
        ({"vocab_size": "many"}, r"vocab_size is 'many'; write a whole number"),
        ({"num_attention_heads": True}, r"num_attention_heads is True; write a whole number"),
        ({"num_attention_heads": 31}, r"heads must divide the hidden size"),
        ({"tie_word_embeddings": "no"}, r"tie_word_embeddings is 'no'; write true or false"),
        (
            {"model_type": "qwen2_moe", "mlp_only_layers": [3]},
            r"mlp_only_layers is \[3\]; only \[\] or null is modelled",
        ),
        ({"model_type": "gemma3", "text_config": {}}, r"a gemma3 model has its language model in text_config"),
        ({"num_hidden_layers": 10**9}, r"num_layers is 1,000,000,000; pass at most 10,000"),
        ({"intermediate_size": 10**400}, r"config: intermediate_size is a number of 401 digits; write at most"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_field(change, text):
    with pytest.raises(ValueError, match=text):
        workload_from_config(LLAMA | change)


def test_what_a_configuration_lacks_is_named(tmp_path):
    with pytest.raises(ValueError, match="intermediate_size is missing"):
        workload_from_config({name: value for name, value in LLAMA.items() if name != "intermediate_size"})
    with pytest.raises(ValueError, match="has 1024 positions; sequences of 2048 do not fit"):
        workload_from_config(GPT2, sequence_length=2048)
    with pytest.raises(ValueError, match="n_inner is 1000; only 3072 or null is modelled"):
        workload_from_config(GPT2 | {"n_inner": 1000})
    for text in ("{", "[1]", "\x00"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: (not JSON|expected an object)"):
            workload_from_config(tmp_path / "config.json")


def test_a_feed_forward_part_without_a_gate_has_two_products():
    gated = llama_workload(LlamaSizes(64, 2, 8, 2, 256, 100), sequence_length=32)
    plain = llama_workload(LlamaSizes(64, 2, 8, 2, 256, 100, is_gated=False), sequence_length=32)
    tokens, h, f = 32, 64, 256
    assert gated.num_parameters - plain.num_parameters == 2 * h * f
    assert gated.layers[1].forward.matmul_flops - plain.layers[1].forward.matmul_flops == 2 * tokens * h * f
    assert gated.layers[1].activation_bytes - plain.layers[1].activation_bytes == 4 * tokens * f
    assert gated.layers[1].regions[0] == plain.layers[1].regions[0]


def test_latent_attention_is_cut_by_heads_and_keeps_narrow_products_whole():
    latent = LatentSizes(key_value_rank=32, query_rank=48, head_size=16, rotary_size=8, value_size=16)
    workload = llama_workload(LlamaSizes(128, 2, 8, 8, 256, 100, latent=latent), sequence_length=64)
    block, tokens = workload.layers[1], 64
    narrow = 128 * (48 + 32 + 8)
    heads = 48 * 8 * 24 + 32 * 8 * 32 + 8 * 16 * 128
    assert block.num_parameters == narrow + heads + 3 * 128 * 256 + 2 * 128 + 48 + 32
    assert block.tensor_parameters == heads + 3 * 128 * 256
    scores = 2 * tokens * tokens * 8 * (24 + 16)
    assert block.forward.matmul_flops == 2 * tokens * (narrow + heads + 3 * 128 * 256) + scores
    straight = LlamaSizes(128, 2, 8, 8, 256, 100, latent=latent._replace(query_rank=0))
    assert straight.num_parameters == workload.num_parameters + 2 * (128 * 8 * 24 - 128 * 48 - 48 - 48 * 8 * 24)


@pytest.mark.parametrize("plan", [Plan(expert=4), Plan(tensor=2, expert=2), Plan(pipeline=2, expert=2)])
def test_experts_of_a_llama_are_shared_out(plan):
    """Experts go to ranks whole; a shared expert and the dense layers stay on all of them."""
    mixture = Mixture(4, 2, expert_size=64, shared_size=32, dense_layers=1)
    workload = llama_workload(LlamaSizes(64, 3, 8, 2, 256, 100, mixture=mixture), sequence_length=64)
    assert [layer.experts is None for layer in workload.layers] == [True, True, False, False, True]
    assert workload.layers[2].expert_parameters == 4 * 3 * 64 * 64
    assert workload.layers[2].regions[-1].name == "feed-forward"  # the shared expert
    alone, many = (memory_of(workload, each).of("parameters") for each in (Plan(), plan))
    assert many < alone
    step = simulate(workload, cluster("dgx-a100"), plan)
    assert step.duration_s > 0
    assert step.sent_bytes_by_axis["expert"] > 0


def test_a_description_is_a_name_a_file_or_sizes(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert ModelDescription(model="llama-3-8b").workload() == model_by_name("llama-3-8b")
    long = ModelDescription(config=str(path), sequence_length=8192).workload()
    assert long.layers == model_by_name("llama-3-8b").layers
    sizes = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 32000, "feed_forward_size": 14336}
    mixed = ModelDescription(**sizes, num_key_value_heads=8, num_experts=8, top_k=2)
    assert mixed.workload().num_parameters == PUBLISHED["mixtral-8x7b"]
    assert mixed.with_microbatch(4).workload().samples == 4
    assert ModelDescription(num_key_value_heads=4, is_gated=False).workload().layers[1].num_parameters < 50_400_000


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"model": "llama-3-8b", "config": "c.json"}, "are two models"),
        ({"model": "llama-3-8b", "num_heads": 4}, "has its own sizes; leave out num_heads"),
        ({"num_experts": 2, "top_k": 3}, "top_k is 3 of 2 experts"),
        ({"attention": "fast"}, "attention is 'fast'"),
        ({"hidden_size": 0, "is_gated": True}, "hidden_size is 0"),
        ({"num_layers": 10**9}, "GPT: num_layers is 1,000,000,000; pass at most 10,000"),
        ({"num_layers": 10**9, "is_gated": True}, "Llama: num_layers is 1,000,000,000; pass at most 10,000"),
        ({"num_experts": 10**9}, "num_experts is 1,000,000,000; pass at most 10,000"),
        ({"model": "llama-3-8b", "microbatch_size": 10**308}, "microbatch_size is a number of 309 digits; pass at"),
        ({"sequence_length": 10**30}, "sequence_length is a number of 31 digits; pass at most 1,000,000,000"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(said, text):
    with pytest.raises(ValueError, match=text):
        ModelDescription(**said).workload()
