"""The advisor: bounds that no step is below, a search that finds what simulating everything finds, reasons."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import simulator as sim
from distlab.plan import Plan, Precision
from distlab.plan.sharding import OFFLOADS

HALF = Precision("bfloat16", gradients="bfloat16")
FIXED = (Plan(), Plan(cut="blocks"), Plan(offload_activations=True), Plan(precision=HALF))
SMALL = sim.ModelDescription(hidden_size=512, num_layers=4, num_heads=8, vocab_size=8000, sequence_length=256)
GATED = replace(SMALL, num_key_value_heads=4, feed_forward_size=1024, attention="flash")
MIXED = replace(SMALL, num_key_value_heads=4, feed_forward_size=512, num_experts=4, top_k=2)
ADAPTED = (replace(GATED, lora_rank=8), replace(MIXED, lora_rank=8, weights="nf4", optimizer="adamw-8bit"))


def machine_of(memory_bytes, num_devices=8, per_node=8, name="dgx-a100"):
    own = sim.cluster(name)
    device = replace(own.device, memory_bytes=memory_bytes)
    return replace(own, device=device, num_devices=num_devices, devices_per_node=per_node)


def everything(found):
    """Simulate each row that fits: no bound, no order."""
    device, times = found.question.device, {}
    for row in range(len(found)):
        step = sim.simulate(found.workload(row), found.question.cluster, found.plan(row))
        if step.memory.fits(device):
            times[row] = step.steady_s
    return times


def checked(one):
    """Simulate everything: the search finds the best five, simulates less, and leaves out nothing that fits."""
    times = everything(one.found)
    assert times, "nothing fits"
    best = one.best(5)
    assert [choice.seconds for choice in best] == sorted(times.values())[:5]
    assert one.num_simulated < len(one.found) / 2
    for row, seconds in times.items():
        assert one.may_fit(row), "a plan that fits was left out"
        assert max(one.found.bound_s[row], one.tight_s(row)) <= seconds
    return best


@pytest.mark.parametrize(
    ("model", "machine", "batch"),
    [
        pytest.param(SMALL, machine_of(80e9, 4), 8, marks=pytest.mark.soak),  # where all fits, least is left out
        pytest.param(SMALL, machine_of(0.6e9, 8, 4), 4, marks=pytest.mark.soak),
        (GATED, machine_of(1.2e9, 4, 2, "dgx-h100"), 4),
        (MIXED, machine_of(0.8e9, 4, 2), 2),
    ],
    ids=["roomy", "tight", "wires", "experts"],
)
def test_the_search_finds_what_simulating_all_plans_finds(model, machine, batch):
    checked(sim.search(sim.Question(model, machine, batch)))


@settings(max_examples=5, deadline=None)
@given(
    model=st.sampled_from([SMALL, GATED, MIXED, *ADAPTED]),
    memory=st.floats(0.5e9, 80e9),
    layout=st.sampled_from([(8, 8), (8, 2), (16, 4), (12, 4), (6, 6), (1, 8)]),
    name=st.sampled_from(["dgx-a100", "dgx-h100", "rtx-4090-server", "dgx-b200"]),
    batch=st.sampled_from([4, 12, 24]),
    data=st.data(),
)
def test_no_step_is_shorter_than_its_bound_and_none_holds_less(model, memory, layout, name, batch, data):
    fixed, offloads = data.draw(st.sampled_from(FIXED)), data.draw(st.sampled_from([OFFLOADS, OFFLOADS[:1]]))
    rest = {"fixed": fixed, "offloads": offloads, "partial_recompute": data.draw(st.booleans())}
    try:
        one = sim.search(sim.Question(model, machine_of(memory, *layout, name), batch, **rest))
    except ValueError:
        return  # nothing divides the batch
    found = one.found
    for row in data.draw(st.lists(st.integers(0, len(found) - 1), min_size=6, max_size=6, unique=len(found) > 6)):
        plan, workload = found.plan(row), found.workload(row)
        step = sim.simulate(workload, found.question.cluster, plan)
        assert max(found.bound_s[row], one.tight_s(row)) <= step.steady_s, plan
        held = (step.memory.max_bytes, step.memory.host_bytes)
        assert all(least <= own for least, own in zip(one.pipelines.least_bytes(row), held, strict=True)), plan
        assert plan.world_size == layout[0]
        assert plan.num_replicas * plan.num_microbatches * workload.samples == batch


def test_recompute_in_part_is_searched_to_the_same_best():
    """It is better than what whole recompute alone reaches."""
    question = sim.Question(GATED, machine_of(0.22e9, 2, 2), 8)
    one, whole = sim.search(replace(question, partial_recompute=True)), sim.search(question)
    best = one.best(1)
    assert (best[0].plan.recompute, best[0].plan.recompute_layers) == ("full", 2)
    assert best[0].seconds < whole.best()[0].seconds
    ways = {(shape.recompute, shape.recompute_layers) for shape in one.found.shapes}
    assert ways - {(shape.recompute, 1) for shape in whole.found.shapes} == {("operators", 1), ("full", 2), ("full", 4)}


def test_stages_of_equal_blocks_and_the_degrees_of_a_stack_bound_what_is_searched():
    question = sim.Question(replace(SMALL, num_layers=6), machine_of(80e9), 8, fixed=Plan(cut="blocks"))
    found = sim.search(question).found
    assert {*(found.pipeline * found.per_rank).tolist()} == {1, 2, 4, 6, 8}  # the two ends may count as blocks
    few = sim.search(replace(question, axes=("data", "tensor"), stages=(0, 3))).found
    assert ({*few.pipeline.tolist()}, {*few.sharding.tolist()}) == ({1}, {0, 3})
    assert {(shape.context, shape.expert) for shape in few.shapes} == {(1, 1)}
    assert {shape.tensor for shape in few.shapes} == {1, 2, 4, 8}


def test_it_repeats_and_an_interrupt_gives_the_best_so_far():
    question = sim.Question(SMALL, machine_of(0.9e9, 4), 8)
    first, again = sim.search(question), sim.search(question)
    assert [c.plan for c in first.best(3)] == [c.plan for c in again.best(3)]
    stopped = sim.search(question)
    simulated = stopped.exact

    def stop(row):
        if stopped.num_simulated >= 2:
            raise KeyboardInterrupt
        return simulated(row)

    stopped.exact = stop
    best = stopped.best(1)
    assert not stopped.is_complete
    assert [choice.seconds for choice in best] == [min(choice.seconds for choice in stopped.choices)]


def test_the_reasons_hold_when_everything_is_simulated():
    """ "At least 12 % longer without it" is true of every plan without it."""
    one = sim.search(sim.Question(SMALL, machine_of(0.5e9, 4, 2), 4))
    best = one.best()[0]
    told = {reason.part.split(" = ")[0]: reason.instead for reason in sim.reasons(one, best)}
    assert told
    times = everything(one.found)
    for name, text in told.items():
        plain = {"recompute": "none", "sequence_parallel": False}.get(name, 1)
        own = {row: one.found.plan(row) for row in times}
        values = {
            row: int(plan.sharding.stage == 0) if name == "sharding" else getattr(plan, name)
            for row, plan in own.items()
        }
        without = [times[row] for row, value in values.items() if value == plain]
        if text == "without it nothing fits":
            assert not without
        else:
            told_s = best.seconds * (1 + float(text.split("%")[0].split()[-1]) / 100)
            least, slack = min(without, default=np.inf), 0.006 * best.seconds
            assert least <= told_s + slack if "at most" in text else least >= told_s - slack


def test_one_device_is_told_not_to_distribute_and_what_nearly_fits_what_it_lacks():
    machines = (machine_of(80e9, 1), machine_of(80e9, 4), machine_of(0.3e9, 4))
    one, roomy, tight = (sim.search(sim.Question(SMALL, machine, 8)) for machine in machines)
    best, *_ = [each.best()[0] for each in (one, roomy, tight)]
    assert best.plan.world_size == 1
    assert "Do not distribute" in sim.reasons(one, best)[0].rule
    assert sim.words_of(best.plan, best.microbatch).startswith("one device")
    assert sim.near_fit(roomy) == ""
    assert "too much; it could take" in sim.near_fit(tight)
    rows = range(0, len(tight.found), 7)
    held = [sim.memory_of(tight.found.workload(row), tight.found.plan(row)).max_bytes for row in rows]
    assert 0 < tight.memory(tight.nearest()).max_bytes <= min(held)


def test_a_batch_that_the_devices_do_not_divide_is_told_as_a_reason():
    """8 devices and 12 samples: no plan has 8 replicas, whatever else it has. 16 devices and 7: there is no plan."""
    tiny = sim.ModelDescription(hidden_size=64, num_layers=2, num_heads=8)
    for batch, is_told in ((12, True), (16, False)):
        found = sim.search(sim.Question(tiny, machine_of(80e9), batch))
        assert (f"batch = {batch}" in [reason.part for reason in sim.reasons(found, found.best()[0])]) == is_told
    with pytest.raises(ValueError, match="no plan divides 7 samples among 16 devices"):
        sim.search(sim.Question(replace(tiny, num_layers=1, num_heads=1, sequence_length=15), machine_of(80e9, 16), 7))
