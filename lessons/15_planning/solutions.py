"""Reference solutions of lesson 15: whether a plan fits, how long its step takes, and what its run costs.

They are of first order: a few lines each, for a choice among plans. The library's versions count layer by layer and
message by message: `simulator.memory_of`, `simulator.simulate`, `simulator.search` and `simulator.bill`.
"""

from collections.abc import Callable, Sequence
from math import inf, sqrt

from distlab.plan import Cluster, Plan, Sharding
from simulator import Failures, ModelDescription, Run, bill, cluster, memory_of, simulate


def bytes_per_gpu(parameters: float, layers: int, hidden: int, sequence: int, plan: Plan) -> float:
    """Return the bytes that the fullest GPU of a plan holds: model states and activations.

    States, with Adam in mixed precision: 2 bytes per parameter for weights, 4 for gradients, which are
    added up in float32, and 12 for the optimizer.
    Tensor and pipeline ranks split all of them. The data ranks split what `plan.sharding.stage` says: 1 the 12 bytes of
    the optimizer, 2 gradients too, 3 weights too.

    Activations, with flash attention and micro-batches of one sequence: a layer keeps 34 bytes per token and hidden
    element. Tensor ranks split 24 of the 34; with `plan.sequence_parallel` they split all of them. With
    `plan.recompute` "full" a layer keeps 2 bytes in place of the 34, which sequence-parallel ranks split. A stage has
    its share of the layers. The first stage of 1F1B holds a micro-batch for each stage, but never more than there are.
    """
    share, stage = parameters / (plan.tensor * plan.pipeline), plan.sharding.stage
    states = 12 / (plan.data if stage >= 1 else 1)
    states += 4 / (plan.data if stage >= 2 else 1)
    states += 2 / (plan.data if stage >= 3 else 1)
    ranks = plan.tensor if plan.sequence_parallel else 1
    kept = 2 / ranks if plan.recompute == "full" else 10 / ranks + 24 / plan.tensor
    held = min(plan.pipeline, plan.num_microbatches)
    return share * states + kept * sequence * hidden * layers / plan.pipeline * held


def step_parts(
    parameters: float, layers: int, hidden: int, sequence: int, plan: Plan, cluster: Cluster
) -> dict[str, float]:
    """Return where the seconds of a step go: "compute", "tensor", "bubble" and "data".

    - compute: 6 operations per parameter and token, 8 where `plan.recompute` is "full". Tensor and pipeline ranks share
      them, at `cluster.device.matmul_flops_per_s`. A micro-batch is one sequence.
    - tensor: for each layer and micro-batch a rank sends 8 (t - 1) / t activations of 2 bytes, 12 (t - 1) / t with full
      recompute; an activation has `sequence` x `hidden` elements. Nothing hides them.
    - bubble: p - 1 times what a micro-batch takes on a stage, compute and tensor.
    - data: gradients of 2 bytes, all-reduced in a ring once per step. Two thirds of the last micro-batch's compute, its
      backward, hide them; only what is longer counts.

    A wire has `protocols[-1].bytes_per_s`. Tensor ranks are neighbours, and data ranks come next: a tensor group
    reaches over t GPUs, a data group over t x d. Up to `cluster.devices_per_node` use `cluster.intra_node`, more
    `cluster.inter_node`.
    """
    t, p, d, m = plan.tensor, plan.pipeline, plan.data, plan.num_microbatches

    def rate(reach: int) -> float:
        wire = cluster.intra_node if reach <= cluster.devices_per_node else cluster.inter_node
        return wire.protocols[-1].bytes_per_s

    is_full = plan.recompute == "full"
    one = (8 if is_full else 6) * parameters * sequence / (t * p) / cluster.device.matmul_flops_per_s
    activations = (12 if is_full else 8) * (t - 1) / t * 2 * sequence * hidden
    sent = activations * layers / p / rate(t)
    gradients = 2 * (d - 1) / d * 2 * parameters / (t * p) / rate(t * d)
    return {
        "compute": m * one,
        "tensor": m * sent,
        "bubble": (p - 1) * (one + sent),
        "data": max(0.0, gradients - 2 / 3 * one),
    }


def best_degrees(
    num_gpus: int,
    per_node: int,
    layers: int,
    heads: int,
    batch: int,
    fits: Callable[[int, int, int], bool],
    seconds: Callable[[int, int, int], float],
) -> tuple[int, int, int] | None:
    """Return the fastest (data, tensor, pipeline) that fits, or None where nothing does.

    All GPUs are used. The tensor degree divides the heads and the GPUs of a node, so that no group leaves its node. The
    pipeline degree divides the layers, the data degree the batch. `fits(data, tensor, pipeline)` and
    `seconds(data, tensor, pipeline)` say the rest; ask `seconds`, which is slow, only for what fits. Of equally fast
    ones take the smallest tensor degree, then the smallest pipeline degree.
    """
    found = []
    for tensor in range(1, per_node + 1):
        if per_node % tensor or heads % tensor or num_gpus % tensor:
            continue
        for pipeline in range(1, num_gpus // tensor + 1):
            data, left = divmod(num_gpus, tensor * pipeline)
            if left or layers % pipeline or batch % data or not fits(data, tensor, pipeline):
                continue
            found.append((seconds(data, tensor, pipeline), tensor, pipeline, data))
    if not found:
        return None
    _, tensor, pipeline, data = min(found)
    return data, tensor, pipeline


def run_bill(
    num_steps: int, step_s: float, num_gpus: int, price: float, mtbf_hours: float, save_s: float, restart_s: float
) -> tuple[float, float]:
    """Return the days and the dollars of a run in which GPUs fail.

    One GPU runs `mtbf_hours` between failures on average; any of them stops all. A checkpoint takes `save_s`, and a
    failure `restart_s` and the work since the last checkpoint: half an interval on average. Save every
    sqrt(2 x save_s x M) seconds, Young's interval; M are the seconds between failures of the whole job. Of all time
    these parts are lost: save_s / interval, interval / (2 M) and restart_s / M. The rest trains. Where nothing is left,
    both numbers are infinite. `price` is for a GPU and an hour.
    """
    between = 3600 * mtbf_hours / num_gpus
    interval = sqrt(2 * save_s * between)
    useful = 1 - save_s / interval - interval / (2 * between) - restart_s / between
    hours = num_steps * step_s / useful / 3600 if useful > 0 else inf
    return hours / 24, hours * num_gpus * price


def cheapest(offers: Sequence[tuple[str, int, float, float]], days: float) -> str | None:
    """Return the name of the offer whose whole run costs least, of those that are done within so many days.

    An offer is its name, its number of GPUs, the days that the run takes on them, and dollars for a GPU and an hour. Of
    equal costs take the shorter run. None: no offer is in time.
    """
    in_time = [offer for offer in offers if offer[2] <= days]
    if not in_time:
        return None
    return min(in_time, key=lambda offer: (24 * offer[1] * offer[2] * offer[3], offer[2]))[0]


def plan_70b(dollars: float, days: float) -> Plan:
    """Return the plan of a run of Llama 2 70B that costs least, within so many days and dollars.

    The run: 100 billion tokens in steps of 256 sequences, flash attention, H100s in machines of eight at 2.50 dollars
    for a GPU and an hour, failures as Llama 3's. The plan says how many GPUs: 8 to 512, whole machines. A GPU has 76
    GB for it. Micro-batches have one sequence. `simulate`, `memory_of` and `bill` may be asked.
    """
    model = ModelDescription(model="llama-2-70b", attention="flash").workload()
    run, found = Run(100e9, 2.50, Failures("llama-3")), []
    for num_gpus in (64, 128, 256, 512):
        machine = cluster("dgx-h100", num_gpus)
        for tensor, pipeline, stage in ((2, 1, 3), (4, 4, 1)):
            data = num_gpus // (tensor * pipeline)
            own = {"tensor": tensor, "sequence_parallel": True, "sharding": Sharding(stage)}
            plan = Plan(data, pipeline, 256 // data, **own)
            if memory_of(model, plan).max_bytes > 76e9:
                continue
            one = bill(simulate(model, machine, plan), run)
            if one.days <= days and one.dollars <= dollars:
                found.append((one.dollars, one.days, plan))
    return min(found, key=lambda each: each[:2])[2]
