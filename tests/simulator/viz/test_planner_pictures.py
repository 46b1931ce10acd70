"""The planner and the strategy map show a plan's own figures, and say the same in words."""

from dataclasses import replace

import pytest
from pen_facts import clashes, words

from distlab.plan import Plan, Sharding
from simulator import (
    Failures,
    ModelDescription,
    Question,
    Run,
    bill,
    cluster,
    gpt_workload,
    link,
    search,
    simulate,
    strategy_map,
    strategy_of,
)
from simulator.viz import describe_planner, describe_strategy_map, draw_strategy_map, planner_figure

WORKLOAD = gpt_workload(hidden_size=1024, num_layers=8, num_heads=16, sequence_length=1024, vocab_size=8192)
MACHINE = cluster("dgx-h100", 32)
RUN = Run(1e9, 2.0, Failures("llama-3"))


@pytest.mark.parametrize("plan", [Plan(), Plan(2, 4, 8, tensor=2), Plan(8, sharding=Sharding(3))])
def test_the_planner_shows_degrees_cost_a_step_and_memory(plan):
    paid = bill(simulate(WORKLOAD, MACHINE, plan), RUN)
    figure, text = planner_figure(paid), describe_planner(paid)
    assert clashes(figure) == []
    assert f"=  {plan.world_size} rank{'s' if plan.world_size > 1 else ''}" in words(figure)
    cost = f"{paid.dollars:,.0f} dollars"
    assert any(cost in line for line in words(figure))
    assert cost in text
    assert "Memory of the fullest rank" in text


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
    figure, text = draw_strategy_map(fast), describe_strategy_map(fast)
    assert clashes(figure) == []
    assert any(line.startswith("T  ") for line in words(figure))
    assert text.splitlines()[1] == "llama-2-7b on 1 GPU: does not fit, or does not divide."
    assert "data 16, tensor 2" in text.splitlines()[2]
    assert draw_strategy_map(fast[:1]) is not None


def test_the_map_has_the_plan_that_a_whole_search_finds():
    """Two samples per rank, where bounds rank plain replicas behind plans that gather."""
    machine = cluster("dgx-h100", 128, stack="megatron")
    (field,) = strategy_map(("gpt-2-1.5b",), machine, (128,), batch_size=256)
    whole = search(Question(ModelDescription(model="gpt-2-1.5b"), machine, 256))
    assert field.choice.plan == whole.best(1)[0].plan
    assert field.strategy == "data"
