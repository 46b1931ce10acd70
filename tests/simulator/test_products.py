"""What shapes of products cost: tiles, waves, short sums; and layers whose products have shapes on a rank."""

from dataclasses import replace

import pytest

from distlab.plan import Plan
from simulator import LlamaSizes, Stack, cluster, gpt_workload, llama_workload, simulate
from simulator.stage.products import FULL, START, slowdown, with_shapes

MACHINE = cluster("dgx-a100", 8, stack=Stack("plain"))
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


@pytest.mark.parametrize(
    "workload",
    [
        gpt_workload(**SIZES, microbatch_size=4),
        llama_workload(LlamaSizes(1024, 2, 16, 4, 2816, 50304), sequence_length=1024, microbatch_size=4),
    ],
    ids=["gpt", "llama"],
)
def test_products_have_the_flops_of_their_region(workload):
    for layer in workload.layers:
        for region in layer.regions:
            inner = region.attention.forward.matmul_flops if region.attention else 0.0
            flops = sum(2.0 * each.rows * each.columns * each.depth for each in region.products)
            assert flops == pytest.approx(region.forward.matmul_flops - inner)


def test_narrow_parts_of_a_layer_take_longer_than_their_share():
    workload = gpt_workload(**SIZES)
    free = replace(MACHINE, device=replace(MACHINE.device, multiprocessors=None))
    block = workload.layers[1]
    whole, parts = (with_shapes(block, Plan(tensor=n), MACHINE) for n in (1, 8))
    assert parts.forward.matmul_flops > 2 * whole.forward.matmul_flops > 2 * block.forward.matmul_flops
    assert with_shapes(block, Plan(tensor=8), free) is block
    assert cluster("dgx-a100", 8, stack="best-case").device.multiprocessors is None  # the best shape
    slow, fast = (simulate(workload, each, Plan(tensor=8)) for each in (MACHINE, free))
    assert slow.duration_s > fast.duration_s
    assert slow.mfu * slow.steady_s == pytest.approx(fast.mfu * fast.steady_s)  # the same work counts
