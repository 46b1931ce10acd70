"""Sizes of models by name, by a Hugging Face configuration and by a few words: parameters, work and refusals.

`released_models.json` has configurations of many families, each with its parameters in all: those of transformers
5.24's models of these files, built on the meta device in November 2026, with the numbers that balance a router. Of
families that it has not they are the makers' own (Kimi K2, InternLM 2.5, ChatGLM 3, Baichuan 2, Grok 1), and of rows
with "within" those of model cards, in billions; where these count a tied head twice (Falcon), as transformers counts.
Left out in this library: biases of GPT-OSS's experts, gates of shared experts.
"""

import json
import re
import tomllib
from functools import cache
from math import prod
from pathlib import Path

import pytest

import simulator as sim
from distlab.plan import Plan, Work
from simulator.memory.memory import KINDS
from simulator.models.by_name import MODELS

RELEASED = json.loads(Path(__file__).with_name("released_models.json").read_text(encoding="utf-8"))
BY_NAME = {row["by_name"]: row["config"] for row in RELEASED.values() if "by_name" in row}
LLAMA, GPT2, OLMO = BY_NAME["llama-3-8b"], BY_NAME["gpt-2-124m"], RELEASED["OLMo-2-7B"]["config"]
SMALL = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100}
TOKENS = 64
PUBLISHED = tomllib.loads(Path(__file__).with_name("published_parameters.toml").read_text("utf-8"))
# Billions that work on a token, as papers and makers say. Embeddings count in some of them.
ACTIVE_RELEASED = {"Llama-4-Scout": 17.17, "Llama-4-Maverick": 17.17, "Qwen3-Coder-480B": 35.5, "OLMoE-1B-7B": 1.28}
ACTIVE_RELEASED |= {"Kimi-K2": 32.9, "Mixtral-8x7B": 12.88, "gpt-oss-120b": 5.13}  # the last without the embedding


@cache
def model(name):
    return sim.workload_from_config(RELEASED[name]["config"], sequence_length=TOKENS)


def share_of(layer):
    return layer.experts.top_k / layer.experts.num_experts if layer.experts else 1.0


def block_of(**changes):
    return sim.workload_from_config(SMALL | changes, sequence_length=32).layers[1]


def test_models_by_name_have_the_parameters_of_transformers():
    assert {name: sim.model_by_name(name).num_parameters for name in PUBLISHED} == PUBLISHED
    for name in MODELS:
        workload = sim.model_by_name(name, sequence_length=128)
        memory = sim.memory_of(workload, Plan(recompute="full"))
        assert sum(memory.of(kind) for kind in KINDS[:4]) == sim.adam_state_bytes(workload.num_parameters)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_configuration_is_the_model_by_name(name):
    own = {"sequence_length": 1024, "microbatch_size": 2, "attention": "flash"}
    found, known = sim.workload_from_config(BY_NAME[name], **own), sim.model_by_name(name, **own)
    assert found.layers == known.layers
    assert (found.optimizer, found.samples) == (known.optimizer, known.samples)


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_model_has_its_parameters_and_the_products_of_its_matrices(name):
    """Two operations for each element of each matrix that a token meets: of k experts out of E; none of an embedding.

    OLMo 3 sees all positions in every fourth layer, Maverick has experts in every second.
    """
    workload, row = model(name), RELEASED[name]
    within = row.get("within", 0 if "by_name" in row else 5e-4)
    assert workload.num_parameters == pytest.approx(row["parameters"], rel=within)
    assert all(sum(map(prod, layer.parameter_shapes)) == layer.num_parameters for layer in workload.layers)
    assert 0 < sim.simulate(workload, sim.cluster("dgx-h100"), Plan(4, 2, 4)).mfu < 1
    first, *blocks, head = workload.layers
    matrices = 0.0
    for layer in (*blocks, head):
        for size, shape, axis in zip(layer.parameter_sizes, layer.shapes, layer.parameter_axes, strict=True):
            if len(shape) == 2 and shape[1] > 16:  # no vector, and no short convolution
                matrices += size * (share_of(layer) if axis == "expert" else 1.0)
    if not any(len(shape) == 2 for shape in head.shapes):  # the head is the embedding
        matrices += first.shapes[0][0] * first.shapes[0][1]
    inner = sum(part.attention.forward.matmul_flops for each in blocks for part in each.regions if part.attention)
    products = sum(layer.forward.matmul_flops for layer in workload.layers) - inner
    assert products / (2 * TOKENS) == pytest.approx(matrices, rel=1e-6)
    if name in ACTIVE_RELEASED:
        active = sum(each.num_parameters - (1 - share_of(each)) * each.expert_parameters for each in workload.layers)
        active -= first.num_parameters if name.startswith("gpt-oss") else 0
        assert active / 1e9 == pytest.approx(ACTIVE_RELEASED[name], rel=0.005)
    if name == "Llama-4-Maverick":
        assert [bool(block.experts) for block in blocks] == [False, True] * 24
        assert [(16384, 5120) in block.parameter_shapes for block in blocks] == [True, False] * 24
    if name == "olmo-3-7b":
        other = sim.workload_from_config(row["config"] | {"sliding_window": 16}, sequence_length=TOKENS).layers[1:-1]
        flops = [[block.forward.attention_flops for block in each] for each in (blocks, other)]
        assert [one == two for one, two in zip(*flops, strict=True)] == [False, False, False, True] * 8


def test_norms_and_biases_of_a_block():
    """A norm more is 4 B s h bytes streamed, 2 kept and its weights; a bias is parameters alone."""
    plain, normed, bare = block_of(), block_of(model_type="gemma2", head_dim=16), block_of(model_type="olmo")
    tokens, h = 32, 64
    assert normed.num_parameters - plain.num_parameters == 2 * h
    assert normed.forward.memory_bytes - plain.forward.memory_bytes == 2 * 4 * tokens * h
    assert normed.activation_bytes - plain.activation_bytes == 2 * 2 * tokens * h
    assert plain.num_parameters - bare.num_parameters == 2 * h
    assert bare.sequence_calls == ()
    added = block_of(attention_bias=True, mlp_bias=True)
    assert added.num_parameters - plain.num_parameters == 4 * h + 2 * 128 + h
    assert added.forward == plain.forward
    wide = block_of(model_type="olmo2")  # normed queries and keys keep their inputs
    assert wide.activation_bytes - plain.activation_bytes == 2 * tokens * (h + h)
    assert wide.num_parameters - plain.num_parameters == h + h
    assert wide.forward.memory_bytes > plain.forward.memory_bytes
    assert wide.forward.matmul_flops == plain.forward.matmul_flops


def test_latent_attention_is_cut_by_heads_and_keeps_narrow_products_whole():
    latent = sim.LatentSizes(key_value_rank=32, query_rank=48, head_size=16, rotary_size=8, value_size=16)
    workload = sim.llama_workload(sim.LlamaSizes(128, 2, 8, 8, 256, 100, latent=latent), sequence_length=64)
    block, tokens = workload.layers[1], 64
    narrow = 128 * (48 + 32 + 8)
    heads = 48 * 8 * 24 + 32 * 8 * 32 + 8 * 16 * 128
    assert block.num_parameters == narrow + heads + 3 * 128 * 256 + 2 * 128 + 48 + 32
    assert block.tensor_parameters == heads + 3 * 128 * 256
    scores = 2 * tokens * tokens * 8 * (24 + 16)
    assert block.forward.matmul_flops == 2 * tokens * (narrow + heads + 3 * 128 * 256) + scores
    straight = sim.LlamaSizes(128, 2, 8, 8, 256, 100, latent=latent._replace(query_rank=0))
    assert straight.num_parameters == workload.num_parameters + 2 * (128 * 8 * 24 - 128 * 48 - 48 - 48 * 8 * 24)


def test_a_short_convolution_takes_the_place_of_attention():
    """By hand: 4 h^2 + 3 h weights; products of 8 h^2 a token; no scores, no heads for tensor ranks to divide."""
    h, width, tokens = 64, 96, 32
    sizes = sim.LlamaSizes(h, 2, 4, 2, width, 100, convolutions=(3, 0), head_norms=True)
    convolved, attends = sim.llama_workload(sizes, sequence_length=tokens).layers[1:3]
    assert convolved.num_parameters == 4 * h * h + 3 * h + 3 * h * width + 2 * h
    assert convolved.forward.matmul_flops == 2 * tokens * (4 * h * h + 3 * h * width)
    assert convolved.score_bytes == 0 < attends.score_bytes
    assert convolved.activation_bytes == tokens * (8 * h + 2 * 6 * h + 8 * width)
    assert all(region.attention is None for region in convolved.regions)
    workload = sim.workload_from_config(RELEASED["LFM2-1.2B"]["config"], sequence_length=1024)
    plans = (Plan(2, tensor=4, sequence_parallel=True), Plan(2, 4, 8), Plan(4, context=2))
    for plan in (*plans, Plan(4, tensor=2, recompute="operators"), Plan(8, recompute="full")):
        step = sim.simulate(workload, sim.cluster("dgx-h100"), plan)
        assert 0 < step.mfu < 1
        assert step.memory.max_bytes > 0
    alone, cut = (sim.memory_of(workload, Plan(tensor=ranks)).of("parameters") for ranks in (1, 2))
    assert cut < 0.51 * alone


def test_experts_of_a_llama_are_shared_out():
    """Experts go to ranks whole; a shared expert and the dense layers stay on all of them."""
    sizes = (sim.LlamaSizes(64, 3, 8, 2, 256, 100, mixture=sim.Mixture(4, 2, 64, 32, 1, has_biases=n)) for n in (0, 1))
    workload, biased = (sim.llama_workload(each, sequence_length=64) for each in sizes)
    for name, size in (("forward", 28), ("input_gradient", 40)):  # of biases, which are added expert by expert
        assert getattr(biased.layers[2], name).without(getattr(workload.layers[2], name)) == Work(
            0, size * 2 * 64**2, 12
        )
    assert [layer.experts is None for layer in workload.layers] == [True, True, False, False, True]
    assert workload.layers[2].expert_parameters == 4 * 3 * 64 * 64
    assert workload.layers[2].regions[-1].name == "feed-forward"  # the shared expert
    plan = Plan(tensor=2, expert=2)
    alone, many = (sim.memory_of(workload, each).of("parameters") for each in (Plan(), plan))
    assert many < alone
    step = sim.simulate(workload, sim.cluster("dgx-a100"), plan)
    assert step.duration_s > 0
    assert step.sent_bytes_by_axis["expert"] > 0


@pytest.mark.parametrize(("dense", "every", "mixed"), [(0, 1, "xxxx"), (1, 1, ".xxx"), (0, 2, ".x.x"), (2, 2, "...x")])
def test_which_blocks_have_experts(dense, every, mixed):
    mixture = sim.Mixture(4, 2, dense_layers=dense, every=every)
    assert "".join(".x"[mixture.has_experts(layer)] for layer in range(4)) == mixed


def test_a_description_is_a_name_a_file_or_sizes(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert sim.ModelDescription(model="llama-3-8b").workload() == sim.model_by_name("llama-3-8b")
    long = sim.ModelDescription(config=str(path), sequence_length=8192).workload()
    assert long.layers == sim.model_by_name("llama-3-8b").layers
    sizes = {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 32000, "feed_forward_size": 14336}
    mixed = sim.ModelDescription(**sizes, num_key_value_heads=8, num_experts=8, top_k=2)
    assert mixed.workload().num_parameters == RELEASED["Mixtral-8x7B"]["parameters"]
    assert mixed.with_microbatch(4).workload().samples == 4
    assert sim.ModelDescription(num_key_value_heads=4, is_gated=False).workload().layers[1].num_parameters < 50_400_000
    assert sim.workload_from_config(path).layers == sim.model_by_name("llama-3-8b", sequence_length=4096).layers
    assert sim.workload_from_config(GPT2).layers == sim.model_by_name("gpt-2-124m").layers
    assert sim.workload_from_config(GPT2, attention="flash").layers[1].score_bytes == 0


REFUSED = [  # a configuration, and words of its refusal
    *map(tuple, json.loads(Path(__file__).with_name("wrong_configurations.json").read_text("utf-8"))),
    ({"model_type": "gemma2", "sliding_window": 8, "layer_types": [[]] * 32}, "only"),
    ({"intermediate_size": 10**400}, "config: intermediate_size is a number of 401 digits; write at most"),
    (GPT2 | {"n_inner": 1000}, "n_inner is 1000; only 3072 or null is modelled"),
    (RELEASED["dbrx"]["config"] | {"attn_config": 3}, "attn_config is 3; write a table of fields"),
    (RELEASED["Hunyuan-A13B"]["config"] | {"moe_topk": [8, 7] * 16}, "moe_topk is [8, 7, 8, 7, 8, 7, ...]; write a"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_a_wrong_configuration_is_refused_in_one_line(change, words):
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        sim.workload_from_config(change if len(change) > 3 else LLAMA | change)
    assert "\n" not in str(refused.value)


def test_lengths_and_files_that_do_not_fit_are_refused(tmp_path):
    scout, path = RELEASED["Llama-4-Scout"]["config"], tmp_path / "config.json"
    assert sim.workload_from_config(scout, sequence_length=8192).num_parameters > 1e11
    with pytest.raises(ValueError, match="chunks of attention_chunk_size 8192, which is not modelled; use at most 81"):
        sim.workload_from_config(scout, sequence_length=8193)
    with pytest.raises(ValueError, match="has 1024 positions; sequences of 2048 do not fit"):
        sim.workload_from_config(GPT2, sequence_length=2048)
    with pytest.raises(ValueError, match="intermediate_size is missing"):
        sim.workload_from_config({name: value for name, value in LLAMA.items() if name != "intermediate_size"})
    for text in ("{", "", "[1]", "\x00", "[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: (not JSON \(|expected an object)") as refused:
            sim.workload_from_config(path)
        assert "\n" not in str(refused.value)
