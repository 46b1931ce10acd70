"""The planner and the strategy map show a plan's own figures, and say the same in words."""

from dataclasses import replace

import pytest

from distlab.plan import Plan, Sharding
from simulator import (
    ModelDescription,
    Question,
    cluster,
    link,
    search,
    strategy_map,
    strategy_of,
)

MACHINE = cluster("dgx-h100", 32)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (Plan(), "one device"),
        (Plan(2), "data"),
        (Plan(2, sharding=Sharding(1)), "ZeRO-1"),
        (Plan(2, sharding=Sharding(2)), "ZeRO-2"),
        (Plan(2, sharding=Sharding(3)), "FSDP"),
        (Plan(2, tensor=2, sharding=Sharding(3)), "tensor"),
        (Plan(2, 2, 2), "pipeline"),
        (Plan(2, 2, 2, tensor=2), "tensor and pipeline"),
    ],
)
def test_a_plan_is_named_by_what_it_splits(plan, name):
    assert strategy_of(plan) == name


def test_the_map_has_a_field_for_each_model_and_count_and_the_wire_moves_it():
    fast, slow = (
        strategy_map(("llama-2-7b",), replace(MACHINE, inter_node=link(wire)), (1, 32), batch_size=64)
        for wire in ("infiniband-ndr", "ethernet-10g")
    )
    assert [(field.num_devices, field.strategy) for field in fast] == [(1, ""), (32, "tensor")]
    assert fast[1].choice.seconds < slow[1].choice.seconds


def test_the_map_has_the_plan_that_a_whole_search_finds():
    """Two samples per rank, where bounds rank plain replicas behind plans that gather."""
    machine = cluster("dgx-h100", 128, stack="megatron")
    (field,) = strategy_map(("gpt-2-1.5b",), machine, (128,), batch_size=256)
    whole = search(Question(ModelDescription(model="gpt-2-1.5b"), machine, 256))
    assert field.choice.plan == whole.best(1)[0].plan
    assert field.strategy == "data"
