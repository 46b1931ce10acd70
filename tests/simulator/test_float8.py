"""Products of 8 bits: their rate, what quantising streams, gathers of half the bytes, devices that have none."""

from dataclasses import replace

import pytest

from distlab.plan import Device, Plan, Precision, Sharding, Software
from simulator import LlamaSizes, cluster, fuse_attention, llama_workload, memory_of, simulate
from simulator.memory.model_states import BUFFERS
from simulator.step.timed import notes_on

SIZES = LlamaSizes(
    hidden_size=256, num_layers=2, num_heads=4, num_key_value_heads=4, feed_forward_size=512, vocab_size=128
)
S, H, F = 64, 256, 512
LLAMA = fuse_attention(llama_workload(SIZES, sequence_length=S))


def machine(**rates):
    device = Device("both", 1e12, 1e30, 1e15, attention_flops_per_s=1e30, float8_flops_per_s=2e12)
    return replace(cluster("dgx-h100", 8, stack="best-case"), device=replace(device, **rates))


def passes(where, **plan):
    """Return forward and backward of the first block, and of the head."""
    stage = simulate(LLAMA, where, Plan(**plan)).stages[0]
    return stage.forward_ns[1], stage.backward_ns[1], stage.forward_ns[3], stage.backward_ns[3]


def test_products_of_blocks_take_half_and_the_head_as_long():
    wide, narrow = passes(machine()), passes(machine(), float8="products")
    assert [narrow[0], narrow[1]] == [pytest.approx(wide[0] / 2, abs=1), pytest.approx(wide[1] / 2, abs=1)]
    assert narrow[2:] == wide[2:]


def test_quantising_reads_and_writes_four_bytes_an_element():
    slow = machine(memory_bytes_per_s=1e9, matmul_flops_per_s=1e30, float8_flops_per_s=1e30)
    into = S * (H + H + H + F) + (3 * H * H + H * H + 2 * F * H + F * H)  # inputs of products, and their parameters
    out = S * (3 * H + H + 2 * F + H)  # outputs, whose gradients they are
    wide, narrow = passes(slow), passes(slow, float8="products")
    assert narrow[0] - wide[0] == pytest.approx(4 * into, abs=2)
    assert narrow[1] - wide[1] == pytest.approx(4 * out, abs=2)


def test_layouts_cast_one_by_one_read_16_bits_twice_and_gathered_parameters_are_turned():
    """6 bytes an element in place of 4; parameters that come in 8 bits are read and written once: 2."""
    slow = machine(memory_bytes_per_s=1e9, matmul_flops_per_s=1e30, float8_flops_per_s=1e30)
    twice = replace(slow, software=Software(casts_twice=True))
    states, weights = S * (H + H + H + F), 3 * H * H + H * H + 3 * F * H
    wide, once, both = passes(slow), passes(slow, float8="products"), passes(twice, float8="products")
    assert both[0] - wide[0] == pytest.approx(6 * (states + weights), abs=2)
    assert (both[1] - wide[1]) / (once[1] - wide[1]) == pytest.approx(6 / 4, rel=1e-6)
    own = {"data": 2, "sharding": Sharding(3), "float8": "gathers"}
    for where, each in ((slow, 4), (twice, 6)):
        assert passes(where, **own)[0] - wide[0] == pytest.approx(each * states + 2 * weights, abs=2)


def test_units_of_blocks_are_gathered_in_half_the_bytes():
    own = {"data": 4, "sharding": Sharding(3)}
    wide, narrow = (simulate(LLAMA, machine(), Plan(**own, float8=kind)) for kind in ("products", "gathers"))
    gathers = [[unit.gather.num_bytes for unit in step.stages[0].units] for step in (wide, narrow)]
    assert gathers[1] == [gathers[0][0], *(size // 2 for size in gathers[0][1:])]  # the root stays as it is
    root, block = gathers[0][:2]
    held = [memory_of(LLAMA, Plan(**own, float8=kind)).stages[0] for kind in ("products", "gathers")]
    assert held[0].forward[1, BUFFERS] - held[1].forward[1, BUFFERS] == block  # its own and the next: half of two
    assert held[1].forward[0, BUFFERS] >= root


def test_devices_without_8_bits_refuse_in_one_line():
    where = cluster("dgx-a100")
    with pytest.raises(
        ValueError, match=f"{where.device.name} has no products of 8 bits; use a device that has"
    ) as told:
        simulate(LLAMA, where, Plan(float8="products"))
    assert "\n" not in str(told.value)


def test_plans_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="float8 is 'all'; choose one of none, products, gathers"):
        Plan(float8="all")
    with pytest.raises(ValueError, match="the stage is 1; use float8 'products', or stage 3"):
        Plan(data=2, float8="gathers", sharding=Sharding(1))
    with pytest.raises(ValueError, match="products in 8 bits are Plan's float8"):
        Precision("float8")
    assert "not modelled" in notes_on(Plan(float8="products"))[0]
