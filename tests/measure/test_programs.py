"""Whatever is sharded, replicas train the same model, and the calls of sharding can be fitted."""

from dataclasses import replace

import pytest
import torch
from sharding_cases import workload_of

from distlab.blocks.data import python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.measure import CalibrationRound, Round, TrainingRun, measure_round, predict_step, time_training
from distlab.measure.count.gpt import without_accumulation
from distlab.measure.machine.fit import median_of
from distlab.measure.machine.speed import Observation
from distlab.measure.runs.calibrate import StepOverhead, solve_cost
from distlab.measure.runs.calls import MESSAGE_BYTES, CallTimes, kinds_of_calls, links_of, measure_calls
from distlab.measure.runs.predict import ByteCost, Overhead, costs_more
from distlab.measure.runs.programs import count_model, make_program, sgd
from distlab.plan import AXES, Contention, Plan, Sharding, Work
from distlab.plan.compression import Compression
from simulator import MeasuredCodec, all_gather_s
from simulator.hardware.cost import Steps, reduce_scatter_steps

CPU = torch.device("cpu")
CONFIG = GPTConfig(context=16, num_layers=2, num_heads=2, hidden_size=16)
SHARDINGS = (Sharding(), Sharding(1), Sharding(2), Sharding(3), Sharding(3, reshard_after_forward=False, prefetch=0))


def timed(steps, seconds):
    return CallTimes(steps, MESSAGE_BYTES, seconds)


def train_each(data):
    """Train under each sharding, and with three micro-batches under two of them; return losses and weights."""
    found = []
    for num_microbatches, shardings in ((1, SHARDINGS), (3, (Sharding(2), Sharding(3)))):
        for sharding in shardings:
            plan = Plan(data=2, bucket_bytes=4000, num_microbatches=num_microbatches, sharding=sharding)
            report = time_training(TrainingRun(CONFIG, plan, 6, num_updates=3, num_windows=0), data)
            found.append((report.losses, report.weights))
    return found, measure_calls(Plan(data=2, sharding=Sharding(3)), {}, CPU)


def test_all_programs_train_the_same_model(ranks):
    for found, times in ranks(2).run(train_each, python_documentation()[:20_000]):
        losses, weights = found[0]
        assert losses[-1] < losses[0]
        for other_losses, other in found[1:]:
            assert other_losses == pytest.approx(losses, abs=1e-5)
            assert other.keys() == weights.keys()
            for name in weights:
                assert torch.allclose(other[name], weights[name], atol=1e-5), name
        assert times.keys() == {"all_gather", "reduce_scatter", "all_reduce"}
        for part in times.values():
            assert part.num_bytes == MESSAGE_BYTES
            assert len(part.seconds) == len(MESSAGE_BYTES)
            assert min(part.seconds) > 0


def test_links_are_fitted_to_each_kind_of_call():
    slow = tuple(1e-3 + size / 2 / 1e8 for size in MESSAGE_BYTES)  # two ranks: half of the bytes travel
    fast = tuple(1e-4 + size / 2 / 1e9 for size in MESSAGE_BYTES)
    ring = reduce_scatter_steps(2)
    calls = {"all_gather": timed(ring, fast), "reduce_scatter": timed(ring, slow)}
    links = links_of(median_of([calls] * 3))
    for kind, want in (("all_gather", fast), ("reduce_scatter", slow)):
        for size, seconds in zip(MESSAGE_BYTES, want, strict=True):
            assert all_gather_s(size, 2, links[kind]) == pytest.approx(seconds, rel=0.02)
    assert links.keys() == {"all_gather", "reduce_scatter"}
    assert links_of({}) == {}


PLANS = {
    "calls of stage 1": Plan(data=2, sharding=Sharding(1), bucket_bytes=20_000, first_bucket_bytes=20_000),
    "calls of stage 3": Plan(data=2, sharding=Sharding(3)),
    "codec": Plan(data=2, compression=Compression("quantize", bits=8)),
    "actions": Plan(pipeline=2, num_microbatches=4, schedule="zb_h1"),
    "passes of replicas": Plan(data=2, num_microbatches=2),
    "passes of a mesh": Plan(tensor=2, context=2),
}


def made_up_round(plan):
    """A round in which all that the plan needs was timed."""
    seconds = tuple(1e-6 + size / 1e10 for size in MESSAGE_BYTES)
    seen = Observation("products", Work(1e9), 0.1), Observation("kernels", Work(0.0, 1e9, 100), 0.1)
    compute = Round(seen, (2e-4, 3e-4, 8e-4, 2.3e-3, 8.6e-3), Contention())
    calls = {kind: timed(Steps(1, 1.0), seconds) for kind in kinds_of_calls(plan)}
    codec = None if plan.compression is None else MeasuredCodec(plan.compression, 2, 1e-3, 1e-8, 2e-3, 1e-8)
    return CalibrationRound(compute, calls, codec)


@pytest.mark.parametrize("cost_s", [0.0, 0.02, -0.001])
@pytest.mark.parametrize("name", PLANS)
def test_the_cost_that_made_a_step_longer_is_found_again_from_its_length(name, cost_s):
    plan, measured = PLANS[name], made_up_round(PLANS[name])
    workload = count_model(
        GPTConfig(context=16, num_layers=4, num_heads=2, hidden_size=32, tied=False), 2, plan, device=CPU
    )
    overhead = Overhead((ByteCost(1e3, max(0.0, cost_s)),))
    costly = predict_step(workload, replace(measured, overhead=overhead), plan)
    wanted_s = costly.duration_s + 50 * min(0.0, cost_s)
    found = solve_cost(workload, wanted_s, measured, plan, order=AXES, cores=None)
    assert found.seconds < 0 if cost_s < 0 else found.seconds == pytest.approx(cost_s, rel=0.01, abs=1e-7)


def test_of_what_costs_more_the_plan_decides():
    assert {name: costs_more(plan) for name, plan in PLANS.items()} == {name: name.split()[0] for name in PLANS}
    found = Overhead((ByteCost(1e3, 0.02), ByteCost(3e3, -0.01)))  # below zero: the noise of a step
    assert (found.action_s, found.codec_slowdown) == pytest.approx((0.01, 1.005))
    assert (Overhead().action_s, Overhead().codec_slowdown) == (0.0, 1.0)


def test_what_a_busy_rank_pays_for_a_call_grows_with_its_bytes_as_in_the_references():
    plan, workload = Plan(data=2, sharding=Sharding(3)), workload_of([1, 1, 1], [500] * 3)  # 2,000 bytes per unit
    measured = made_up_round(plan)
    for costs in (((1e3, 0.02), (4e3, 0.05)), ((4e3, 0.06), (8e3, 0.12))):
        overhead = Overhead(tuple(ByteCost(*each) for each in costs))
        costly = predict_step(workload, replace(measured, overhead=overhead), plan)
        flat = predict_step(workload, replace(measured, overhead=Overhead((ByteCost(1.0, 0.03),))), plan)
        assert costly.duration_s == pytest.approx(flat.duration_s, rel=0.01)


def measure_busy_ranks():
    device = torch.device("cpu")
    measured = CalibrationRound(measure_round(device), measure_calls(Plan(data=2, sharding=Sharding(3)), {}, device))
    plans = [Plan(data=2, sharding=sharding) for sharding in (Sharding(1), Sharding(3))]
    return [StepOverhead(plan, AXES, device).measure(measured) for plan in plans]


def test_what_a_busy_rank_pays_is_measured_alike_on_all_ranks(ranks):
    first, second = ranks(2).run(measure_busy_ranks)
    assert first == second
    one, three = first
    assert [len(each.costs) for each in first] == [2, 2]
    assert {cost.num_bytes for cost in one.costs} == {Plan().bucket_bytes}, "buckets do not tell what a byte costs"
    small, large = three.costs
    assert large.num_bytes > 1.5 * small.num_bytes


def test_a_rank_that_trains_alone_has_no_overhead(ranks):
    def alone():
        device = torch.device("cpu")
        return StepOverhead(Plan(sharding=Sharding(3)), AXES, device).measure(CalibrationRound(measure_round(device)))

    assert ranks(1).run(alone) == [Overhead()]


def test_gradients_that_are_taken_as_they_come_cost_no_addition():
    workload = workload_of([1.0], [1000])
    rest = without_accumulation(workload).layers[0].weight_gradient
    assert rest.matmul_flops == workload.layers[0].weight_gradient.matmul_flops
    assert (rest.memory_bytes, rest.num_kernels) == (0.0, 0)


@pytest.mark.parametrize("sharding", [Sharding(3, unit_layers=2), Sharding(1, offload="optimizer")])
def test_what_is_not_run_is_refused(sharding):
    with pytest.raises(ValueError, match="this measures stages 1 to 3 over all ranks.*use replicas=1"):
        make_program(GPT(CONFIG), Plan(data=2, sharding=sharding), sgd, device=CPU, kind="replicas")
