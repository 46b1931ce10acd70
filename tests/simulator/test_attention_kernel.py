"""GPT's counts; flash attention: its operations, its bytes, what utilization counts of it; and what windows leave."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import simulator as sim
from distlab.plan import Cluster, Device, Link, Plan, Protocol
from simulator.models.attention_kernel import causal_share
from simulator.validation.case import gpt

H, A, S, B, L = 512, 8, 256, 3, 2
GPT = sim.gpt_workload(hidden_size=H, num_layers=L, num_heads=A, sequence_length=S, vocab_size=1000, microbatch_size=B)
LLAMA = sim.llama_workload(sim.LlamaSizes(H, L, A, 2, 1024, 1000), sequence_length=S, microbatch_size=B)
WINDOWS = tomllib.loads(Path(__file__).with_name("windows.toml").read_text("utf-8"))["rows"]
FREE = Link("free", (Protocol(0.0, 1e30),))
MODELS = pytest.mark.parametrize("plain", [GPT, LLAMA], ids=["GPT", "Llama"])


@MODELS
def test_forward_and_backward_have_the_papers_operations(plain):
    """Forward 4 B s^2 h, backward 10, half of both since a mask hides half of the pairs."""
    fused = sim.fuse_attention(plain).layers[1]
    pairs = 2.0 * B * S * S * H
    assert fused.forward.attention_flops == pairs
    assert fused.input_gradient.attention_flops == 2.5 * pairs
    assert fused.weight_gradient == plain.layers[1].weight_gradient
    assert fused.forward.matmul_flops == pytest.approx(plain.layers[1].forward.matmul_flops - 4.0 * B * S * S * H)

    layer, before = fused, plain.layers[1]  # no bytes grow with the square of the sequence
    assert layer.score_bytes == 0
    assert layer.activation_bytes == before.activation_bytes - before.score_bytes + 4 * B * S * A
    assert layer.forward.memory_bytes == before.forward.memory_bytes - 2 * before.score_bytes
    assert layer.score_forward.num_kernels == 0


@MODELS
def test_utilization_counts_all_pairs_for_either_kernel(plain):
    device = Device("products", 312e12, 1e30, 1e30)
    machine = Cluster("ideal", device, 8, 8, FREE, FREE)
    for model in (plain, sim.fuse_attention(plain)):
        step = sim.simulate(model, machine, Plan())
        counted = step.mfu * step.duration_s * 312e12
        assert counted == pytest.approx(sum(plain.matmul_flops), rel=1e-9)
    if plain is GPT:
        assert counted == pytest.approx(sim.gpt_step_flops(H, L, S, 1000, B), rel=1e-9)


BASE = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
BASE |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 1024}


def windows_of(workload):
    return [region.attention.window for layer in workload.layers for region in layer.regions if region.attention]


def test_a_window_leaves_so_many_pairs():
    for sequence, window in ((64, 16), (64, 64), (64, 100), (1000, 1)):
        sizes = sim.LlamaSizes(64, 1, 4, 4, 128, 100, windows=(window,))
        inner = sim.llama_workload(sizes, sequence_length=sequence).layers[1].regions[0].attention
        pairs = sum(min(position, window) for position in range(1, sequence + 1))
        assert causal_share(inner) == pytest.approx(pairs / sequence**2, abs=0.5 * min(window, sequence) / sequence**2)


@pytest.mark.parametrize(("window", "part"), [(16, 0.4375), (200, 1.0)])
def test_fused_attention_computes_what_the_window_leaves_and_mfu_counts_twice_that(window, part):
    def made(windows):
        sizes = sim.LlamaSizes(64, 2, 4, 4, 128, 100, windows=windows)
        return sim.fuse_attention(sim.llama_workload(sizes, sequence_length=64))

    whole, narrow = made(()), made((window, None))
    flops = [work.layers[1].forward.attention_flops for work in (whole, narrow)]
    assert flops[1] == pytest.approx(part * flops[0])
    assert narrow.layers[2].forward == whole.layers[2].forward
    assert narrow.layers[1].input_gradient.attention_flops == pytest.approx(2.5 * flops[1])
    inner = 12 * 64**2 * 64  # two products forward, four backward, over all pairs
    assert whole.counted_flops - narrow.counted_flops == pytest.approx((1 - part) * inner)


@pytest.mark.parametrize(("family", "fields", "expected"), WINDOWS)
def test_families_say_which_layers_have_a_window(family, fields, expected):
    neo = {"num_layers": 6, "num_heads": 4} if family == "gpt_neo" else {}
    drop = ("num_key_value_heads", "num_hidden_layers", "num_attention_heads", "intermediate_size") if neo else ()
    values = {name: value for name, value in BASE.items() if name not in drop} | {"model_type": family} | fields | neo
    assert windows_of(sim.workload_from_config(values)) == [width or None for width in expected]


SIZES = {"hidden_size": 96, "num_layers": 5, "sequence_length": 40, "vocab_size": 311}


def workload(**changes):
    return sim.gpt_workload(**({**SIZES, "num_heads": 4, "microbatch_size": 3} | changes))


def test_parameters_and_step_flops_are_the_formulas():
    h, layers, s, v = 96, 5, 40, 311
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert workload().num_parameters == sim.gpt_num_parameters(**SIZES) == pytest.approx(formula, rel=1e-12)
    layers = workload().layers
    forward = sum(layer.forward.matmul_flops for layer in layers)
    backward = sum((layer.input_gradient + layer.weight_gradient).matmul_flops for layer in layers)
    assert backward == 2 * forward
    assert forward + backward == pytest.approx(sim.gpt_step_flops(**SIZES, batch_size=3), rel=1e-12)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("plan", [Plan(tensor=8, sequence_parallel=True), Plan(data=4)])
def test_products_alone_take_what_the_formula_counts(plan, recompute):
    """Nothing is forgotten: what is recomputed, logits and scores are in, and tensor ranks divide them."""
    machine = Cluster("ideal", Device("products", 312e12, 1e30, 1e30), 8, 8, FREE, FREE)
    plan = replace(plan, recompute=recompute, num_microbatches=3)
    step = sim.simulate(gpt(2304, 24, 24, 2048, 4), machine, plan)  # the first of table 1 of 2104.04473
    flops = sim.gpt_step_flops(2304, 24, 2048, 51200, 3 * 4 * plan.data, recompute=recompute)
    assert step.duration_s == pytest.approx(flops / plan.world_size / 312e12, rel=1e-5)  # nanoseconds are whole
    assert step.samples_per_s == pytest.approx(3 * 4 * plan.data / step.duration_s)
