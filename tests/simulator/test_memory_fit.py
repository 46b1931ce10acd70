"""A plan that does not fit says by how much, where, and the smallest change that fits; and the change does fit."""

from dataclasses import replace

import numpy as np
import pytest

from distlab.plan import Device, Layer, Plan, Sharding, Work, Workload
from distlab.plan.compression import Compression
from simulator import DoesNotFitError, check_fit, memory_of, model_by_name
from simulator.memory.advice import find_change, split_samples
from simulator.memory.memory import KINDS

WORKLOAD = model_by_name("gpt-2-124m")  # one sample a micro-batch, which cannot be cut
FOUR = model_by_name("gpt-2-124m", microbatch_size=4)
NO_ROOM = 1_000_000


def device(num_bytes, host=None):
    return Device("card", 1e12, 1e11, num_bytes, host_memory_bytes=host)


def size_of(**options):
    return memory_of(WORKLOAD, Plan(**options)).max_bytes


def smallest_change(workload, plan, on):
    """Return the plan with the smallest change that fits, or None."""
    change = find_change(workload, plan, on)
    return change and change.plan


def refusal(plan, on, workload=WORKLOAD):
    with pytest.raises(DoesNotFitError) as caught:
        check_fit(workload, plan, on)
    return caught.value


def test_one_byte_too_little_is_refused_with_everything_said():
    need = size_of(data=4)
    error = refusal(Plan(data=4), device(need - 1))
    assert isinstance(error, ValueError)
    text = str(error)
    assert text.startswith("ranks 0 to 3: the plan needs ")
    assert "card has" in text
    for kind in ("activations", "optimizer", "parameters", "gradients", "master weights", "logits"):
        assert kind in text
    assert "smallest change that fits: Sharding(stage=1), which holds" in text
    assert error.change.plan == Plan(data=4, sharding=Sharding(1))


def test_the_fullest_stage_and_its_ranks_are_named():
    wide = [Layer(f"l{i}", (size,), Work(1.0), Work(1.0), Work(1.0)) for i, size in enumerate((10, 10, 5000, 10))]
    workload = Workload("w", tuple(wide))
    error = refusal(Plan(pipeline=4, data=2, tensor=3), device(1000), workload)
    assert str(error).startswith("ranks 12 to 17 (stage 2): the plan needs 120 kB")
    assert str(refusal(Plan(pipeline=4), device(1000), workload)).startswith("rank 2 (stage 2)")


@pytest.mark.parametrize(
    "wanted",
    [
        {"sharding": Sharding(2)},
        {"recompute": "selective"},
        {"recompute": "selective", "sharding": Sharding(2)},
        {"recompute": "full", "sharding": Sharding(3)},
    ],
)
def test_what_a_plan_needs_is_found_and_nothing_dearer(wanted):
    """With exactly the room that the wanted plan takes, the answer fits and no cheaper candidate does."""
    room = size_of(data=8, **wanted)
    found = smallest_change(WORKLOAD, Plan(data=8), device(room))
    assert found is not None
    assert memory_of(WORKLOAD, found).max_bytes <= room
    if wanted != {"recompute": "selective"}:  # a stage of sharding alone may be leaner, and costs less
        assert found == Plan(data=8, **wanted)


def test_micro_batches_are_cut_where_nothing_else_fits_and_keep_their_work():
    half = split_samples(FOUR, 2)
    room = memory_of(half, Plan(num_microbatches=2)).max_bytes
    error = refusal(Plan(), device(room), FOUR)
    assert (error.change.split, error.change.plan.num_microbatches) == (2, 2)
    assert "micro-batches half as large and num_microbatches=2" in str(error)
    assert (half.samples, half.num_parameters) == (2, FOUR.num_parameters)
    for mine, whole in zip(half.layers, FOUR.layers, strict=True):
        assert 2 * mine.activation_bytes == whole.activation_bytes
        assert 2 * mine.forward.matmul_flops == whole.forward.matmul_flops
        assert mine.forward.num_kernels == whole.forward.num_kernels
    with pytest.raises(ValueError, match="do not divide 4 samples"):
        split_samples(FOUR, 3)


def test_what_a_plan_has_is_never_taken_back():
    plan = Plan(data=8, recompute="full", sharding=Sharding(2))
    found = smallest_change(WORKLOAD, plan, device(size_of(data=8, recompute="full", sharding=Sharding(3))))
    assert found == replace(plan, sharding=Sharding(3))
    compressed = Plan(data=8, compression=Compression("top_k"))
    change = find_change(WORKLOAD, compressed, device(0.8 * memory_of(WORKLOAD, compressed).max_bytes))
    assert change.plan.sharding.stage == 0


def test_offload_is_offered_where_the_host_has_memory():
    plan = Plan(data=8, sharding=Sharding(3), recompute="full")
    lean = memory_of(WORKLOAD, replace(plan, sharding=Sharding(3, offload="optimizer")))
    room = lean.max_bytes
    assert smallest_change(WORKLOAD, plan, device(room)) is None  # nobody said what the host has
    assert smallest_change(WORKLOAD, plan, device(room, lean.host_bytes - 1)) is None
    found = smallest_change(WORKLOAD, plan, device(room, lean.host_bytes))
    assert found.sharding.offload == "optimizer"


def test_offload_without_memory_is_refused():
    plan = Plan(data=8, sharding=Sharding(3, offload="all"))
    needed = memory_of(WORKLOAD, plan).host_bytes
    error = refusal(plan, device(80e9, needed - 1000))
    assert "offload 'all' needs" in str(error)
    assert "of the host's memory" in str(error)
    assert "0 B of it" in str(refusal(plan, device(80e9, 0.0)))
    check_fit(WORKLOAD, plan, device(80e9, needed))
    check_fit(WORKLOAD, plan, device(80e9))


def test_where_nothing_fits_more_ranks_are_named():
    error = refusal(Plan(data=2), device(1.5e9), model_by_name("gpt-2-1.5b"))
    assert error.change is None
    ranks = int(str(error).partition("use data=")[2].split()[0])
    plan = Plan(data=ranks, sharding=Sharding(3), recompute="full")
    assert memory_of(model_by_name("gpt-2-1.5b"), plan).max_bytes <= 1.5e9
    assert "one layer alone is too large" in str(refusal(Plan(), device(NO_ROOM)))


def test_what_a_step_holds_is_what_does_not_fit():
    """The plan as it is is no advice, although a different cut of its stages fits."""
    plan = Plan(data=2)
    counted = memory_of(WORKLOAD, plan)
    more = replace(counted, at_peak_bytes=counted.at_peak_bytes + np.eye(1, len(KINDS), dtype=np.int64) * 1000)
    room = device(counted.max_bytes)
    check_fit(WORKLOAD, plan, room)
    with pytest.raises(DoesNotFitError, match="1 kB too much") as found:
        check_fit(WORKLOAD, plan, room, memory=more)
    assert found.value.change.plan != plan
