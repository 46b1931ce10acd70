"""Released models of many families, each by its own config.json: parameters in all, and those that work on a token.

The figures are those of transformers 5.24's models of these files, built on the meta device in November 2026, with the
numbers that balance a router; of families that it has not, the makers' own (Kimi K2, InternLM 2.5, ChatGLM 3,
Baichuan 2, Grok 1). Left out in this library: biases of GPT-OSS's experts, gates of shared experts.
"""

import json
from functools import cache
from math import prod
from pathlib import Path

import pytest

from distlab.plan import Plan
from simulator import LlamaSizes, Mixture, cluster, llama_workload, memory_of, simulate, workload_from_config
from simulator.models.hugging_face.config import FAMILIES, NOT_MODELLED

RELEASED = json.loads(Path(__file__).with_name("released_models.json").read_text(encoding="utf-8"))
TOKENS = 64


@cache
def model(name):
    return workload_from_config(RELEASED[name]["config"], sequence_length=TOKENS)


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_of_a_released_model(name):
    workload = model(name)
    assert workload.num_parameters == pytest.approx(RELEASED[name]["parameters"], rel=5e-4)
    assert all(sum(map(prod, layer.parameter_shapes)) == layer.num_parameters for layer in workload.layers)
    assert 0 < simulate(workload, cluster("dgx-h100"), Plan(4, 2, 4)).mfu < 1


@pytest.mark.parametrize("name", RELEASED)
def test_products_are_those_of_the_matrices_that_a_token_meets(name):
    """Two operations for each element of each matrix, of k experts out of E; the embedding is looked up."""
    workload = model(name)
    first, *blocks, head = workload.layers
    matrices = 0.0
    for layer in (*blocks, head):
        share = layer.experts.top_k / layer.experts.num_experts if layer.experts else 1.0
        for size, shape, axis in zip(layer.parameter_sizes, layer.shapes, layer.parameter_axes, strict=True):
            if len(shape) == 2 and shape[1] > 16:  # no vector, and no short convolution
                matrices += size * (share if axis == "expert" else 1.0)
    if not any(len(shape) == 2 for shape in head.shapes):  # the head is the embedding
        matrices += first.shapes[0][0] * first.shapes[0][1]
    inner = sum(part.attention.forward.matmul_flops for each in blocks for part in each.regions if part.attention)
    products = sum(layer.forward.matmul_flops for layer in workload.layers) - inner
    assert products / (2 * TOKENS) == pytest.approx(matrices, rel=1e-6)


# Billions that work on a token, as the makers say; Qwen, Kimi and OLMoE count embeddings, GLM and ERNIE round down.
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-oss-120b", 5.13),  # without the embedding
        ("Llama-4-Scout", 17.17),
        ("Llama-4-Maverick", 17.17),
        ("Qwen3-Coder-480B", 35.5),
        ("OLMoE-1B-7B", 1.28),
        ("Kimi-K2", 32.9),
        ("Mixtral-8x7B", 12.88),
    ],
)
def test_active_parameters_of_a_released_mixture(name, billions):
    workload = model(name)
    active = 0.0
    for layer in workload.layers:
        share = layer.experts.top_k / layer.experts.num_experts if layer.experts else 1.0
        active += layer.num_parameters - (1 - share) * layer.expert_parameters
    active -= workload.layers[0].num_parameters if name.startswith("gpt-oss") else 0
    assert active / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize("what", NOT_MODELLED)
def test_a_family_that_is_not_modelled_is_refused_with_what_it_has(what):
    for name in NOT_MODELLED[what].split():
        for family in {name, f"{name}_text"} - set(FAMILIES):
            with pytest.raises(ValueError, match=f"a {family} model has ") as refused:
                workload_from_config({"model_type": family, "hidden_size": 64, "text_config": {}})
            assert what in str(refused.value)
            assert "workload_from_module" in str(refused.value)
            assert "\n" not in str(refused.value)


def test_all_unknown_fields_are_told_at_once():
    config = RELEASED["Llama-3.2-1B"]["config"]
    with pytest.raises(ValueError, match="unknown fields 'loops', 'mixer' in a llama .* they change neither"):
        workload_from_config(config | {"mixer": 3, "loops": 2})


def test_a_number_for_each_layer_is_one_where_they_are_equal():
    config = RELEASED["Hunyuan-A13B"]["config"]
    assert config["moe_topk"] == [8] * 32
    with pytest.raises(ValueError, match=r"moe_topk is \[8, 7, 8, 8, 8, 8, \.\.\.\]; write a whole number"):
        workload_from_config(config | {"moe_topk": [8, 7, *[8] * 30]})


def test_chunks_of_attention_are_refused_where_a_sequence_has_several():
    config = RELEASED["Llama-4-Scout"]["config"]
    assert workload_from_config(config, sequence_length=8192).num_parameters > 1e11
    with pytest.raises(
        ValueError, match="chunks of attention_chunk_size 8192, which is not modelled; use at most 8192"
    ):
        workload_from_config(config, sequence_length=8193)


def test_every_second_block_of_maverick_has_experts():
    workload = model("Llama-4-Maverick")
    assert [bool(block.experts) for block in workload.layers[1:-1]] == [False, True] * 24
    wide, narrow = workload.layers[1], workload.layers[2]
    assert (16384, 5120) in wide.parameter_shapes
    assert (16384, 5120) not in narrow.parameter_shapes


def test_a_short_convolution_takes_the_place_of_attention():
    """By hand: 4 h^2 + 3 h weights; products of 8 h^2 a token; no scores, no heads for tensor ranks to divide."""
    h, width, tokens = 64, 96, 32
    common = (h, 2, 4, 2, width, 100)
    workload = llama_workload(LlamaSizes(*common, convolutions=(3, 0), head_norms=True), sequence_length=tokens)
    convolved, attends = workload.layers[1:3]
    assert convolved.num_parameters == 4 * h * h + 3 * h + 3 * h * width + 2 * h
    assert convolved.forward.matmul_flops == 2 * tokens * (4 * h * h + 3 * h * width)
    assert convolved.score_bytes == 0 < attends.score_bytes
    assert convolved.activation_bytes == tokens * (8 * h + 2 * 6 * h + 8 * width)
    assert all(region.attention is None for region in convolved.regions)
    with pytest.raises(ValueError, match="1 convolutions for 2 layers; pass one for each"):
        LlamaSizes(*common, convolutions=(3,))


def test_a_model_of_convolutions_runs_by_any_plan():
    workload = workload_from_config(RELEASED["LFM2-1.2B"]["config"], sequence_length=1024)
    plans = (Plan(8), Plan(2, tensor=4, sequence_parallel=True), Plan(2, 4, 8), Plan(4, context=2))
    for plan in (*plans, Plan(4, tensor=2, recompute="operators"), Plan(8, recompute="full")):
        step = simulate(workload, cluster("dgx-h100"), plan)
        assert 0 < step.mfu < 1
        assert step.memory.max_bytes > 0
    assert memory_of(workload, Plan(1, tensor=2)).of("parameters") < 0.51 * memory_of(workload, Plan(1)).of(
        "parameters"
    )


@pytest.mark.parametrize(("dense", "every", "mixed"), [(0, 1, "xxxx"), (1, 1, ".xxx"), (0, 2, ".x.x"), (2, 2, "...x")])
def test_which_blocks_have_experts(dense, every, mixed):
    mixture = Mixture(4, 2, dense_layers=dense, every=every)
    assert "".join(".x"[mixture.has_experts(layer)] for layer in range(4)) == mixed
