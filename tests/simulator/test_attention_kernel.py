"""Flash attention: its operations, its bytes, and what utilization counts of it."""

from dataclasses import replace

import pytest

from distlab.plan import Cluster, Device, Link, Plan, Protocol
from simulator import (
    LlamaSizes,
    fuse_attention,
    gpt_step_flops,
    gpt_workload,
    llama_workload,
    memory_of,
    mix_experts,
    model_by_name,
    simulate,
)
from simulator.memory.advice import split_samples

H, A, S, B, L = 512, 8, 256, 3, 2
GPT = gpt_workload(hidden_size=H, num_layers=L, num_heads=A, sequence_length=S, vocab_size=1000, microbatch_size=B)
LLAMA = llama_workload(LlamaSizes(H, L, A, 2, 1024, 1000), sequence_length=S, microbatch_size=B)
FREE = Link("free", (Protocol(0.0, 1e30),))
MODELS = pytest.mark.parametrize("plain", [GPT, LLAMA], ids=["GPT", "Llama"])


@MODELS
@pytest.mark.parametrize("is_causal", [True, False])
def test_forward_and_backward_have_the_papers_operations(plain, is_causal):
    """Forward 4 B s^2 h, backward 10, half of both where a mask hides half of the pairs."""
    fused = fuse_attention(plain, is_causal=is_causal).layers[1]
    pairs = 4.0 * B * S * S * H / (2 if is_causal else 1)
    assert fused.forward.attention_flops == pairs
    assert fused.input_gradient.attention_flops == 2.5 * pairs
    assert fused.weight_gradient == plain.layers[1].weight_gradient
    assert fused.forward.matmul_flops == pytest.approx(plain.layers[1].forward.matmul_flops - 4.0 * B * S * S * H)


@MODELS
def test_no_bytes_grow_with_the_square_of_the_sequence(plain):
    layer, before = fuse_attention(plain).layers[1], plain.layers[1]
    assert layer.score_bytes == 0
    assert layer.activation_bytes == before.activation_bytes - before.score_bytes + 4 * B * S * A
    assert layer.forward.memory_bytes == before.forward.memory_bytes - 2 * before.score_bytes
    assert layer.score_forward.num_kernels == 0


@MODELS
def test_utilization_counts_all_pairs_for_either_kernel(plain):
    device = Device("products", 312e12, 1e30, 1e30)
    machine = Cluster("ideal", device, 8, 8, FREE, FREE)
    for model in (plain, fuse_attention(plain), fuse_attention(plain, is_causal=False)):
        step = simulate(model, machine, Plan())
        counted = step.mfu * step.duration_s * 312e12
        assert counted == pytest.approx(sum(plain.matmul_flops), rel=1e-9)
    if plain is GPT:
        assert counted == pytest.approx(gpt_step_flops(H, L, S, 1000, B), rel=1e-9)


def test_attention_has_a_rate_of_its_own():
    machine = Cluster("m", Device("card", 1e14, 1e30, 1e30, attention_flops_per_s=1e13), 1, 1, FREE, FREE)
    equal = replace(machine, device=replace(machine.device, attention_flops_per_s=None))
    fused = fuse_attention(GPT)
    slower = simulate(fused, machine, Plan()).duration_s - simulate(fused, equal, Plan()).duration_s
    work = L * 3.5 * 2.0 * B * S * S * H
    assert slower == pytest.approx(work / 1e13 - work / 1e14, rel=1e-4)


@pytest.mark.parametrize("plan", [Plan(tensor=4), Plan(context=4), Plan(tensor=2, sequence_parallel=True)])
def test_ranks_divide_it_as_they_divide_plain_attention(plan):
    machine = Cluster("ideal", Device("products", 1e12, 1e30, 1e30), 8, 8, FREE, FREE)
    fused = fuse_attention(GPT)
    alone, many = (simulate(fused, machine, each).duration_s for each in (Plan(), plan))
    assert alone / many == pytest.approx(plan.tensor * plan.context, rel=1e-6)


def test_recomputing_scores_of_flash_attention_changes_nothing():
    fused = fuse_attention(GPT)
    memories = [memory_of(fused, Plan(recompute=kind)).max_bytes for kind in ("none", "selective")]
    assert memories[0] == memories[1]


def test_mixtures_and_parts_of_micro_batches_keep_it():
    both = fuse_attention(mix_experts(GPT, 4))
    assert both.layers[1].forward.attention_flops == 2.0 * B * S * S * H
    third = split_samples(fuse_attention(GPT), 3)
    assert 3 * third.counted_flops == pytest.approx(GPT.counted_flops)


def test_what_has_no_scores_is_refused():
    with pytest.raises(ValueError, match="no attention that keeps scores"):
        fuse_attention(fuse_attention(GPT))


def test_models_are_fused_by_name():
    assert model_by_name("llama-3-8b").layers[1].score_bytes == 0
    assert model_by_name("llama-2-7b").layers[1].score_bytes > 0
    assert model_by_name("llama-2-7b", attention="flash").layers[1].score_bytes == 0
    assert model_by_name("llama-3-8b").num_parameters / 1e9 == pytest.approx(8.03, abs=0.01)
    assert model_by_name("llama-3-405b").num_parameters / 1e9 == pytest.approx(405.9, abs=0.5)
    assert model_by_name("qwen-2.5-7b").num_parameters / 1e9 == pytest.approx(7.61, abs=0.02)
    with pytest.raises(ValueError, match="choose one of plain, flash"):
        model_by_name("llama-3-8b", attention="fast")


def test_tied_embeddings_are_counted_once():
    sizes = LlamaSizes(H, L, A, 2, 1024, 1000)
    tied = replace(sizes, ties_embedding=True)
    workload = llama_workload(tied, sequence_length=S)
    assert sizes.num_parameters - tied.num_parameters == 1000 * H
    assert workload.num_parameters == tied.num_parameters
    assert workload.matmul_flops == llama_workload(sizes, sequence_length=S).matmul_flops
