"""Whatever is sharded, replicas train the same model, and the calls of sharding can be fitted."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sharding_cases import cluster_of, plan_of, spans_of, workload_of

from distlab.data import python_documentation
from distlab.measure import CalibrationRound, Round, TrainingRun, measure_round, predict_step, time_training
from distlab.measure.count.gpt import without_accumulation
from distlab.measure.machine.fit import median_of
from distlab.measure.machine.speed import MESSAGE_BYTES, Observation
from distlab.measure.runs.calls import CallTimes, links_of, measure_sharding_calls
from distlab.measure.runs.overhead import ReplicaOverhead, phases_of, share_among_calls
from distlab.measure.runs.predict import ByteCost, Overhead
from distlab.measure.runs.replicas import make_replica
from distlab.models import GPT, GPTConfig
from distlab.plan import Contention, Plan, Sharding, Work
from simulator import Measured, all_gather_s, message_s, simulate
from simulator.hardware.cost import Steps, reduce_scatter_steps

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
    return found, measure_sharding_calls(torch.device("cpu"), stage=3)


def test_all_programs_train_the_same_model(ranks):
    for found, times in ranks(2).run(train_each, python_documentation()[:20_000]):
        losses, weights = found[0]
        assert losses[-1] < losses[0]
        for other_losses, other in found[1:]:
            assert other_losses == pytest.approx(losses, abs=1e-5)
            assert other.keys() == weights.keys()
            for name in weights:
                assert torch.allclose(other[name], weights[name], atol=1e-5), name
        assert len(times) == 5
        for part in times.values():
            assert part.num_bytes == MESSAGE_BYTES
            assert len(part.seconds) == len(MESSAGE_BYTES)
            assert min(part.seconds) > 0
        links = links_of(times)
        step = simulate(workload_of([1, 1]), cluster_of(2), plan_of(3, data=2), measured=Measured(links=links))
        assert {"start unit 1", "sum unit 1"} <= {span.name for span in spans_of(step, "compute")}


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


def test_what_calls_cost_the_computing_rank_is_fitted_as_one_piece_of_work():
    start, added = (tuple(1e-5 + size / rate for size in MESSAGE_BYTES) for rate in (1e10, 2e9))
    parts = {"all_gather start": start, "reduce_scatter start": start, "reduce_scatter sum": added}
    links = links_of(median_of([{name: timed(Steps(1, 1.0), each) for name, each in parts.items()}] * 3))
    for part, want in parts.items():
        for size, seconds in zip(MESSAGE_BYTES, want, strict=True):
            assert message_s(size, links[part]) == pytest.approx(seconds, rel=0.02)
    nothing = {"reduce_scatter sum": timed(Steps(1, 1.0), (0.0,) * len(MESSAGE_BYTES))}  # nccl adds up on the way
    assert message_s(8e6, links_of(nothing)["reduce_scatter sum"]) < 1e-6


@pytest.mark.parametrize("sharding", SHARDINGS[1:], ids=str)
def test_what_a_busy_rank_pays_for_calls_is_found_again_in_the_phases_of_a_step(sharding):
    seconds = tuple(1e-6 + size / 1e10 for size in MESSAGE_BYTES)
    kinds = ("all_gather", "reduce_scatter", "all_gather start", "reduce_scatter start", "reduce_scatter sum")
    seen = Observation("products", Work(1e9), 0.1), Observation("kernels", Work(0.0, 1e9, 100), 0.1)
    compute = Round(seen, (2e-4, 3e-4, 8e-4, 2.3e-3, 8.6e-3), Contention())
    measured = CalibrationRound(compute, {kind: timed(Steps(1, 1.0), seconds) for kind in kinds})
    costly = replace(measured, overhead=Overhead(gathers=(ByteCost(1e3, 0.02),), scatters=(ByteCost(1e3, 0.05),)))
    plan = Plan(data=2, sharding=sharding, bucket_bytes=4000, first_bucket_bytes=1000)
    alone, busy = (predict_step(workload_of([1, 1, 1], [500] * 3), each, plan) for each in (measured, costly))
    gathers, scatters = share_among_calls(np.subtract(phases_of(busy), phases_of(alone)), alone)
    assert gathers[0] / gathers[1] == pytest.approx(0.02, rel=0.02)
    assert scatters[0] / scatters[1] == pytest.approx(0.05, rel=0.02)


def test_what_a_busy_rank_pays_for_a_call_grows_with_its_bytes_as_in_the_references():
    seconds = tuple(1e-6 + size / 1e10 for size in MESSAGE_BYTES)
    kinds = ("all_gather", "reduce_scatter", "all_gather start", "reduce_scatter start", "reduce_scatter sum")
    seen = Observation("products", Work(1e9), 0.1), Observation("kernels", Work(0.0, 1e9, 100), 0.1)
    compute = Round(seen, (2e-4, 3e-4, 8e-4, 2.3e-3, 8.6e-3), Contention())
    measured = CalibrationRound(compute, {kind: timed(Steps(1, 1.0), seconds) for kind in kinds})
    plan, workload = Plan(data=2, sharding=Sharding(3)), workload_of([1, 1, 1], [500] * 3)  # 2,000 bytes per unit
    plain = predict_step(workload, measured, plan)
    for costs in (((1e3, 0.02), (4e3, 0.05)), ((4e3, 0.06), (8e3, 0.12))):
        gathers = tuple(ByteCost(*each) for each in costs)
        costly = predict_step(workload, replace(measured, overhead=Overhead(gathers=gathers)), plan)
        found = share_among_calls(np.subtract(phases_of(costly), phases_of(plain)), plain)[0]
        assert found[0] / found[1] == pytest.approx(0.03, rel=0.02)


def measure_busy_ranks():
    device = torch.device("cpu")
    busy = [ReplicaOverhead(Plan(data=2, sharding=sharding), device) for sharding in (Sharding(1), Sharding(3))]
    measured = CalibrationRound(measure_round(device), measure_sharding_calls(device, stage=3))
    return [each.measure(measured) for each in busy]


def test_what_a_busy_rank_pays_is_measured_alike_on_all_ranks(ranks):
    first, second = ranks(2).run(measure_busy_ranks)
    assert first == second
    one, three = first
    assert [len(costs) for costs in (one.gathers, one.scatters, three.gathers, three.scatters)] == [1, 1, 2, 2]
    small, large = three.gathers
    assert large.num_bytes > 1.5 * small.num_bytes


def test_gradients_that_are_taken_as_they_come_cost_no_addition():
    workload = workload_of([1.0], [1000])
    rest = without_accumulation(workload).layers[0].weight_gradient
    assert rest.matmul_flops == workload.layers[0].weight_gradient.matmul_flops
    assert (rest.memory_bytes, rest.num_kernels) == (0.0, 0)


@pytest.mark.parametrize("sharding", [Sharding(3, unit_layers=2), Sharding(1, offload="optimizer")])
def test_what_is_not_run_is_refused(sharding):
    with pytest.raises(ValueError, match="this measures stages 1 to 3 over all ranks.*use replicas=1"):
        make_replica(GPT(CONFIG), Plan(data=2, sharding=sharding), torch.optim.SGD)
