"""What backward computes again: per operator, of some blocks, in groups. Times and bytes by hand, and their order."""

from dataclasses import replace

from distlab.plan import Device, Plan
from simulator import LlamaSizes, cluster, fuse_attention, llama_workload, memory_of, simulate
from simulator.memory.model_states import ACTIVATIONS
from simulator.stage.recomputed import recomputed

# A device on which products alone take time: 1 ns each 1,000 operations.
ONLY_PRODUCTS = Device("products", 1e12, 1e30, 1e15, attention_flops_per_s=1e30)
SIZES = LlamaSizes(
    hidden_size=64, num_layers=6, num_heads=4, num_key_value_heads=2, feed_forward_size=160, vocab_size=96
)
S, B, H, KV, F = 32, 2, 64, 32, 160
TOKENS = S * B
LLAMA = fuse_attention(llama_workload(SIZES, sequence_length=S, microbatch_size=B))


def one(device=ONLY_PRODUCTS, **changes):
    return replace(cluster("dgx-a100", 1, stack="best-case"), device=device, **changes)


def backward_ns(workload, machine=None, **plan):
    """Return the backward of the third block."""
    return simulate(workload, machine or one(), Plan(**plan)).stages[0].backward_ns[3]


def kept(workload, **plan):
    """Return what the third block keeps."""
    return int(memory_of(workload, Plan(**plan)).stages[0].kept[3, ACTIVATIONS])


def test_every_second_product_of_a_llama_runs_again():
    # wq, wk, wv, wo, w1, w3, w2: the second, fourth and sixth
    again = 2 * TOKENS * (KV * H + H * H + F * H)
    assert backward_ns(LLAMA, recompute="operators") - backward_ns(LLAMA) == round(again / 1000)


def test_a_llama_keeps_its_input_and_the_outputs_of_attention_and_of_other_products():
    rows = 4 * TOKENS * SIZES.num_heads  # the logarithm of each row's sum
    outputs = 2 * TOKENS * (H + KV + F + H)  # wq, wv, w1, w2
    assert kept(LLAMA, recompute="operators") == 2 * TOKENS * H + outputs + 2 * TOKENS * H + rows


def test_only_a_block_that_runs_again_takes_longer():
    def times(**plan):
        return simulate(LLAMA, one(), Plan(**plan)).stages[0].backward_ns

    none, full = times(), times(recompute="full")
    every = times(recompute="full", recompute_method="every", recompute_layers=3)
    block = times(recompute="full", recompute_method="block", recompute_layers=2)
    assert every == (none[0], full[1], none[2], none[3], full[4], none[5], none[6], none[7])
    assert block == (none[0], full[1], full[2], *none[3:])
    assert times(recompute="full", recompute_method="uniform", recompute_layers=3) == full


def test_a_group_keeps_one_input_and_its_backward_holds_what_ran_again():
    both = memory_of(LLAMA, Plan(recompute="full", recompute_method="uniform", recompute_layers=2)).stages[0]
    each, none = memory_of(LLAMA, Plan(recompute="full")).stages[0], memory_of(LLAMA, Plan()).stages[0]
    whole, inputs = int(none.kept[1, ACTIVATIONS]), 2 * TOKENS * H
    assert both.kept[1:7, ACTIVATIONS].tolist() == [inputs, 0] * 3
    more = (both.backward - each.backward).sum(axis=1)[1:7].tolist()
    assert more == [0, whole] * 3  # the second of a group has its input from the first, whose activations are there too


def test_stages_count_their_first_blocks_and_a_model_its_every_second():
    def found(method, layers, cut):
        return recomputed(LLAMA, Plan(recompute="full", recompute_method=method, recompute_layers=layers), cut).tolist()

    assert found("block", 2, (0, 4)) == [False, True, True, False]
    assert found("block", 2, (4, 8)) == [True, True, False, False]
    assert found("every", 2, (0, 4)) == [False, True, False, True]
    assert found("every", 2, (4, 8)) == [False, True, False, False]
    assert found("block", 99, (0, 8)) == [False, *[True] * 6, False]
