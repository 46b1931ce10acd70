"""What shapes and numbers of products cost: tiles, waves, 8 bits, experts over nodes; and what backward runs again."""

from dataclasses import replace
from itertools import chain, combinations
from statistics import mean

import pytest

import simulator as sim
from distlab.plan import Device, Link, Plan, Protocol, Sharding, Software
from simulator import LlamaSizes, cluster, fuse_attention, llama_workload, memory_of, simulate
from simulator.hardware.cost import Sent
from simulator.memory.model_states import ACTIVATIONS, BUFFERS
from simulator.stage.products import FULL, START, slowdown, with_shapes
from simulator.stage.recomputed import recomputed

MACHINE = sim.cluster("dgx-a100", 8, stack=sim.Stack("plain"))
SIZES = {"hidden_size": 1024, "num_layers": 2, "num_heads": 16, "sequence_length": 1024, "vocab_size": 50304}


def seconds(rows, columns, depth):
    """Time in units of a term of a product of one element at the best rate."""
    return rows * columns * depth * slowdown(rows, columns, depth, 108)


def test_a_wave_takes_as_long_with_one_tile_as_with_all():
    assert seconds(128, 256, 4096) == pytest.approx(seconds(128 * 100, 256, 4096))
    assert seconds(128 * 109, 256, 4096) == pytest.approx(2 * seconds(128 * 100, 256, 4096))
    assert seconds(100, 200, 4096) == pytest.approx(seconds(128, 256, 4096))


def test_short_sums_start_as_often_as_long_ones():
    full = 128 * 108, 256
    assert slowdown(*full, 512, 108) == pytest.approx(FULL * (512 + START) / 512)
    assert slowdown(*full, 100_000, 108) == 1.0


@pytest.mark.parametrize("workload", [
    sim.gpt_workload(**SIZES, microbatch_size=4),
    sim.llama_workload(sim.LlamaSizes(1024, 2, 16, 4, 2816, 50304), sequence_length=1024, microbatch_size=4),
], ids=["gpt", "llama"])  # fmt: skip
def test_products_have_the_flops_of_their_region(workload):
    for layer in workload.layers:
        for region in layer.regions:
            inner = region.attention.forward.matmul_flops if region.attention else 0.0
            flops = sum(2.0 * each.rows * each.columns * each.depth for each in region.products)
            assert flops == pytest.approx(region.forward.matmul_flops - inner)


def test_narrow_parts_of_a_layer_take_longer_than_their_share():
    workload = sim.gpt_workload(**SIZES)
    free = replace(MACHINE, device=replace(MACHINE.device, multiprocessors=None))
    block = workload.layers[1]
    whole, parts = (with_shapes(block, Plan(tensor=n), MACHINE) for n in (1, 8))
    assert parts.forward.matmul_flops > 2 * whole.forward.matmul_flops > 2 * block.forward.matmul_flops
    assert with_shapes(block, Plan(tensor=8), free) is block
    assert sim.cluster("dgx-a100", 8, stack="best-case").device.multiprocessors is None  # the best shape
    slow, fast = (sim.simulate(workload, each, Plan(tensor=8)) for each in (MACHINE, free))
    assert slow.duration_s > fast.duration_s
    assert slow.mfu * slow.steady_s == pytest.approx(fast.mfu * fast.steady_s)  # the same work counts


S8, H8, F8 = 64, 256, 512
NARROW_LLAMA = fuse_attention(llama_workload(LlamaSizes(H8, 2, 4, 4, F8, 128), sequence_length=S8))


def both_rates(**rates):
    device = Device("both", 1e12, 1e30, 1e15, attention_flops_per_s=1e30, float8_flops_per_s=2e12)
    device = replace(device, float4_flops_per_s=4e12)
    return replace(sim.cluster("dgx-h100", 8, stack="best-case"), device=replace(device, **rates))


def block_and_head(where, **plan):
    """Return forward and backward of the first block, and of the head."""
    stage = sim.simulate(NARROW_LLAMA, where, Plan(**plan)).stages[0]
    return stage.forward_ns[1], stage.backward_ns[1], stage.forward_ns[3], stage.backward_ns[3]


def test_products_of_blocks_take_half_and_the_head_as_long():
    wide = block_and_head(both_rates())
    for kind, times in (("products", 2), ("mxfp8", 2), ("nvfp4", 4)):
        narrow = block_and_head(both_rates(), float8=kind)
        assert [*narrow[:2]] == [pytest.approx(each / times, abs=1) for each in wide[:2]]
        assert narrow[2:] == wide[2:]


def test_quantising_reads_and_writes_four_bytes_an_element_and_six_where_layouts_are_cast_one_by_one():
    """Gathered parameters, which come in 8 bits, are read and written once: 2 bytes."""
    rates = dict.fromkeys(("matmul_flops_per_s", "float8_flops_per_s", "float4_flops_per_s"), 1e30)
    slow = both_rates(memory_bytes_per_s=1e9, **rates)
    twice = replace(slow, software=Software(casts_twice=True))
    states, weights = S8 * (H8 + H8 + H8 + F8), 3 * H8 * H8 + H8 * H8 + 3 * F8 * H8  # inputs of products; parameters
    out = S8 * (3 * H8 + H8 + 2 * F8 + H8)  # outputs, whose gradients they are
    wide, own = block_and_head(slow), {"data": 2, "sharding": Sharding(3), "float8": "gathers"}
    for where, kind, each in ((slow, "mxfp8", 4 + 1 / 16), (slow, "nvfp4", 5 + 1 / 8)):
        assert block_and_head(where, float8=kind)[0] - wide[0] == pytest.approx(each * (states + weights), abs=2)
    for where, each in ((slow, 4), (twice, 6)):
        narrow = block_and_head(where, float8="products")
        assert narrow[0] - wide[0] == pytest.approx(each * (states + weights), abs=2)
        assert narrow[1] - wide[1] == pytest.approx(each * out, abs=2)
        assert block_and_head(where, **own)[0] - wide[0] == pytest.approx(each * states + 2 * weights, abs=2)


def test_units_of_blocks_are_gathered_in_half_the_bytes():
    plans = [Plan(4, sharding=Sharding(3), float8=kind) for kind in ("products", "gathers")]
    wide, narrow = (sim.simulate(NARROW_LLAMA, both_rates(), plan) for plan in plans)
    gathers = [[unit.gather.num_bytes for unit in step.stages[0].units] for step in (wide, narrow)]
    assert gathers[1] == [gathers[0][0], *(size // 2 for size in gathers[0][1:])]  # the root stays as it is
    root, block = gathers[0][:2]
    held = [sim.memory_of(NARROW_LLAMA, plan).stages[0] for plan in plans]
    assert held[0].forward[1, BUFFERS] - held[1].forward[1, BUFFERS] == block  # its own and the next: half of two
    assert held[1].forward[0, BUFFERS] >= root


SX, HX, FX, K = 512, 256, 384, 2
MIXED_SIZES = LlamaSizes(HX, 1, 4, 4, FX, 128, mixture=sim.Mixture(4, K))


def nodes_by_counting(experts, top_k, nodes, groups=1, most=1):
    """Return the mean number of nodes over all choices of groups, and of experts in them."""
    place, size = experts // nodes, experts // groups
    every = [range(group * size, (group + 1) * size) for group in range(groups)]
    pools = [chain(*chosen) for chosen in combinations(every, most)]
    return mean(len({one // place for one in chosen}) for pool in pools for chosen in combinations(pool, top_k))


@pytest.mark.parametrize(
    ("experts", "top_k", "nodes", "groups"),
    [(8, 2, 4, None), (8, 2, 2, None), (12, 5, 3, None), (4, 1, 4, None), (8, 2, 4, (4, 2)), (16, 3, 8, (4, 2))],
)
def test_on_how_many_nodes_a_tokens_experts_are(experts, top_k, nodes, groups):
    sizes = replace(MIXED_SIZES, mixture=sim.Mixture(experts, top_k, most_groups=groups))
    found = sim.llama_workload(sizes, sequence_length=SX).layers[1].experts.nodes_of_a_token(nodes)
    assert found == pytest.approx(nodes_by_counting(experts, top_k, nodes, *(groups or ())))


def test_a_token_goes_to_a_node_and_to_a_rank_once():
    """Four ranks on two nodes: of two experts both are in the other node one time in six, and one is four times."""
    machine = replace(sim.cluster("dgx-h100", 16, stack="best-case"), devices_per_node=2)
    mixed = fuse_attention(llama_workload(MIXED_SIZES, sequence_length=SX))
    ways = [replace(machine, software=replace(machine.software, dispatches_once=once)) for once in (False, True)]
    twice, once = (simulate(mixed, way, Plan(expert=4)).stages[0].calls[0][1] for way in ways)
    rows = 2 * K * SX * HX
    nodes = 2 * (1 - 1 / 6)
    links = {"intra_node": machine.intra_node, "inter_node": machine.inter_node}
    each_s = sim.hierarchical_all_to_all_s(rows, 2, 2, **links)
    kernel_s = sim.dispatch_s(rows, 2, 2, **links, sent=Sent(1.0, nodes / K))
    for calls, seconds, part in ((twice, each_s, 1.0), (once, kernel_s, nodes / K)):
        there, back = calls[-2:]
        assert there.num_bytes == back.num_bytes == rows
        assert there.end_ns - there.start_ns == pytest.approx(seconds * 1e9, abs=1)
        assert there.sent_bytes == pytest.approx(rows * (1 / 4 + 2 / 4 * part))


def test_a_dispatch_kernel_sends_to_ranks_and_nodes_at_once():
    links = {"intra_node": Link("wire", (Protocol(1e-6, 1e11),)), "inter_node": Link("slow", (Protocol(5e-6, 1e10),))}
    assert sim.dispatch_s(8e6, 8, 1, **links, sent=Sent(0.5, 1.0)) == pytest.approx(1e-6 + 7 / 8 * 0.5 * 8e-5)
    assert sim.dispatch_s(8e6, 4, 2, **links, sent=Sent(0.5, 0.25)) == pytest.approx(5e-6 + 1 / 2 * 0.25 * 8e-4)
    assert sim.dispatch_s(8e6, 1, 1, **links, sent=Sent(1.0, 1.0)) == 0.0


def test_an_interleaved_schedule_hides_experts_calls_over_nodes():
    mixed = fuse_attention(llama_workload(replace(MIXED_SIZES, num_layers=4), sequence_length=SX))
    machine = replace(sim.cluster("dgx-h100", 8, stack="best-case"), devices_per_node=2)
    plan = Plan(pipeline=2, expert=4, num_microbatches=4, schedule="interleaved", stages_per_rank=2)
    alone = replace(plan, schedule="one_f_one_b", stages_per_rank=1)
    for said, hidden in ((plan, 0.75), (replace(plan, recompute="full"), 0.0), (alone, 0.0)):
        ways = [replace(machine, software=replace(machine.software, expert_overlap=part)) for part in (0.0, 0.75)]
        calls = [simulate(mixed, way, said).stages[0].calls[0][1] for way in ways]
        none, some = (sum(call.exposed_ns for call in each) for each in calls)
        assert some == pytest.approx((1 - hidden) * none, rel=1e-3)


# A device on which products alone take time: 1 ns each 1,000 operations.
ONLY_PRODUCTS = Device("products", 1e12, 1e30, 1e15, attention_flops_per_s=1e30)
ONE = replace(cluster("dgx-a100", 1, stack="best-case"), device=ONLY_PRODUCTS)
S, B, H, KV, F = 32, 2, 64, 32, 160
FEW_LAYERS = LlamaSizes(H, 6, 4, 2, F, 96)
TOKENS = S * B
LLAMA = fuse_attention(llama_workload(FEW_LAYERS, sequence_length=S, microbatch_size=B))


def backward_ns(workload, **plan):
    """Return the backward of the third block."""
    return simulate(workload, ONE, Plan(**plan)).stages[0].backward_ns[3]


def kept(workload, **plan):
    """Return what the third block keeps."""
    return int(memory_of(workload, Plan(**plan)).stages[0].kept[3, ACTIVATIONS])


LATENT = replace(FEW_LAYERS, latent=sim.LatentSizes(24, 16, 8, 4, 6), mixture=sim.Mixture(4, 2, 96, shared_size=48))
DEEP = fuse_attention(llama_workload(LATENT, sequence_length=S, microbatch_size=B))
ROWS, SHARED = 2 * (96 + 2 * 96 + 96), (2 * (48 + 2 * 48 + 48), 2 * 3 * 48 * H)  # of a row and of a token
# Of a module: bytes of a token that are not kept, and operations that run again for it.
MODULES = [
    # Of wq, wk, wv, wo, w1, w3, w2 every second one runs again; outputs of the others and of attention stay.
    (LLAMA, "operators", 8 * H + 4 * (H + KV) + 8 * F - 2 * (3 * H + KV + F + H), 2 * (KV * H + H * H + F * H)),
    (LLAMA, "layernorm", 2 * 2 * H, 0),
    (LLAMA, "mlp", 2 * (F + 2 * F + F), 2 * 3 * F * H),
    (LLAMA, "mlp_act", 2 * (F + F), 0),
    (LLAMA, "core_attn", 0, 0),
    (llama_workload(FEW_LAYERS, sequence_length=S, microbatch_size=B), "core_attn", 2 * 4 * S, 2 * 2 * S * H),
    (DEEP, "layernorm", 2 * 2 * H, 0),
    (DEEP, "mla_up_proj", 2 * 4 * (12 + 12 + 6), 2 * (4 * 12 * 16 + 4 * (8 + 6) * 24)),
    (DEEP, "shared_experts", *SHARED),
    (DEEP, "moe_act", 2 * 2 * (96 + 96), 0),
    (DEEP, "moe", 2 * (ROWS + 2 * 2 * H) + SHARED[0], 2 * 2 * 3 * 96 * H + SHARED[1]),
]


@pytest.mark.parametrize(("workload", "name", "dropped", "operations"), MODULES)
def test_a_module_that_runs_again_keeps_less_and_takes_its_forward(workload, name, dropped, operations):
    assert kept(workload) - kept(workload, recompute=name) == TOKENS * dropped
    longer = backward_ns(workload, recompute=name) - backward_ns(workload)
    assert longer == pytest.approx(TOKENS * operations / 1000, abs=2)


def test_what_goes_into_a_product_is_a_byte_less_in_8_bits_and_experts_rows_are_sent_again():
    narrow = [kept(LLAMA, float8="products", recompute=name) for name in ("none", "layernorm", "layernorm,mlp")]
    assert (narrow[0] - narrow[1], narrow[1] - narrow[2]) == (TOKENS * 2 * H, TOKENS * (2 * 3 + 1) * F)
    steps = [
        simulate(DEEP, cluster("dgx-h100", 2), Plan(expert=2, recompute=name)) for name in ("none", "moe", "moe_act")
    ]
    sent = [[call.num_bytes for call in step.stages[0].calls[1][3] if "rows" in call.name] for step in steps]
    assert sent == [[], [2 * 2 * TOKENS * H] * 2, []]


def test_only_a_block_that_runs_again_takes_longer():
    def times(**plan):
        return simulate(LLAMA, ONE, Plan(**plan)).stages[0].backward_ns

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
