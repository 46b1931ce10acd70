"""Windows of attention: pairs of positions that they leave, and which layers have one by a config.json."""

import pytest

from simulator import LlamaSizes, fuse_attention, llama_workload, workload_from_config
from simulator.models.attention_kernel import causal_share

BASE = {"hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
BASE |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 1024}


def windows_of(workload):
    return [region.attention.window for layer in workload.layers for region in layer.regions if region.attention]


def read(family, **fields):
    return windows_of(workload_from_config(BASE | {"model_type": family} | fields))


def test_a_window_leaves_so_many_pairs():
    for sequence, window in ((64, 16), (64, 64), (64, 100), (1000, 1)):
        sizes = LlamaSizes(64, 1, 4, 4, 128, 100, windows=(window,))
        inner = next(
            region.attention
            for layer in llama_workload(sizes, sequence_length=sequence).layers
            for region in layer.regions
            if region.attention
        )
        pairs = sum(min(position, window) for position in range(1, sequence + 1))
        assert causal_share(inner) == pytest.approx(pairs / sequence**2, abs=0.5 * min(window, sequence) / sequence**2)


@pytest.mark.parametrize(("window", "part"), [(64, 1.0), (32, 0.75), (16, 0.4375), (200, 1.0)])
def test_fused_attention_computes_what_the_window_leaves_and_mfu_counts_twice_that(window, part):
    def made(windows):
        return fuse_attention(llama_workload(LlamaSizes(64, 2, 4, 4, 128, 100, windows=windows), sequence_length=64))

    whole, narrow = made(()), made((window, None))
    flops = [work.layers[1].forward.attention_flops for work in (whole, narrow)]
    assert flops[1] == pytest.approx(part * flops[0])
    assert narrow.layers[2].forward == whole.layers[2].forward
    assert narrow.layers[1].input_gradient.attention_flops == pytest.approx(2.5 * flops[1])
    inner = 12 * 64**2 * 64  # two products forward, four backward, over all pairs
    assert whole.counted_flops - narrow.counted_flops == pytest.approx((1 - part) * inner)


def test_plain_attention_computes_all_pairs():
    sizes = LlamaSizes(64, 1, 4, 4, 128, 100)
    bare = llama_workload(sizes, sequence_length=64)
    narrow = llama_workload(LlamaSizes(64, 1, 4, 4, 128, 100, windows=(8,)), sequence_length=64)
    assert narrow.layers[1].forward == bare.layers[1].forward
    with pytest.raises(ValueError, match="2 windows for 1 layers"):
        LlamaSizes(64, 1, 4, 4, 128, 100, windows=(8, 8))


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("mistral", {"sliding_window": 16}, [16] * 6),
        ("mistral", {"sliding_window": None}, [None] * 6),
        ("mistral", {}, [4096] * 6),  # as its class has it
        ("llama", {}, [None] * 6),
        ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1}, [None] * 6),
        ("gemma2", {"sliding_window": 16}, [16, None] * 3),
        ("gemma3_text", {"sliding_window": 16}, [16] * 5 + [None]),
        ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 3}, [16, 16, None] * 2),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, [128, None] * 3),
        ("cohere2", {"sliding_window": 16}, [16, 16, 16, None, 16, 16]),
        ("phi3", {"sliding_window": 2047}, [2047] * 6),
        ("starcoder2", {"sliding_window": None, "use_bias": True}, [None] * 6),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, [None] * 6),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 4}, [None] * 4 + [16] * 2),
        (
            "gemma2",
            {"sliding_window": 8, "layer_types": ["full_attention"] * 5 + ["sliding_attention"]},
            [None] * 5 + [8],
        ),
        ("gpt_neo", {"window_size": 32, "attention_types": [[["global", "local"], 3]]}, [None, 32] * 3),
    ],
)
def test_families_say_which_layers_have_a_window(family, fields, expected):
    neo = {"num_layers": 6, "num_heads": 4} if family == "gpt_neo" else {}
    drop = ("num_key_value_heads", "num_hidden_layers", "num_attention_heads", "intermediate_size") if neo else ()
    values = {name: value for name, value in BASE.items() if name not in drop} | {"model_type": family} | fields | neo
    assert windows_of(workload_from_config(values)) == expected


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sliding_window": 0}, "sliding_window is 0; write a whole number of at least 1"),
        (
            {"sliding_window": 8, "layer_types": ["full_attention"]},
            "layer_types has 1 types for 6 layers; write one for each",
        ),
        ({"sliding_window": 8, "layer_types": ["linear"] * 6}, "layer_types has 'linear'; only"),
        ({"sliding_window": 8, "layer_types": 7}, "layer_types has 7 for 6 layers"),
        ({"sliding_window": 8, "layer_types": [[]] * 6}, "only"),
    ],
)
def test_windows_that_make_no_sense_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        read("gemma2", **fields)


def test_a_huge_count_of_layers_is_refused_at_once():
    neo = BASE | {"model_type": "gpt_neo", "num_layers": 6, "num_heads": 4, "attention_types": [[["local"], 10**12]]}
    drop = ("num_key_value_heads", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    with pytest.raises(ValueError, match="7 types for 6 layers"):
        workload_from_config({name: value for name, value in neo.items() if name not in drop})
