"""Right answers to lesson 15, written in other ways than the reference."""

import itertools
import math

from distlab.plan import Plan, Sharding
from simulator import Failures, ModelDescription, Question, Run, bill, cluster, search


def fits_by_table(parameters, layers, hidden, sequence, plan):
    shards = [plan.data if plan.sharding.stage >= first else 1 for first in (3, 2, 1)]
    states = sum(size / shard for size, shard in zip((2, 4, 12), shards, strict=True))
    s = (1, plan.tensor)[plan.sequence_parallel]
    kept = {"full": 2 / s}.get(plan.recompute, 10 / s + 24 / plan.tensor)
    layer_share = layers / plan.pipeline * min(plan.num_microbatches, plan.pipeline)
    return math.fsum([states * parameters / (plan.pipeline * plan.tensor), kept * sequence * hidden * layer_share])


def fits_by_lookup(parameters, layers, hidden, sequence, plan):
    d, t = plan.data, plan.tensor
    states = {0: 18, 1: 6 + 12 / d, 2: 2 + 16 / d, 3: 18 / d}[plan.sharding.stage] / (t * plan.pipeline)
    outer = t if plan.sequence_parallel else 1
    units = 2 / outer if plan.recompute == "full" else 10 / outer + 24 / t
    held = sorted((plan.pipeline, plan.num_microbatches))[0]
    return parameters * states + units * sequence * hidden * layers * held / plan.pipeline


def _wire(cluster, reach):
    link = cluster.inter_node if reach > cluster.devices_per_node else cluster.intra_node
    return link.protocols[-1].bytes_per_s


def step_by_names(parameters, layers, hidden, sequence, plan, cluster):
    t, p, d, m = plan.tensor, plan.pipeline, plan.data, plan.num_microbatches
    flops, activations = {"full": (8, 12)}.get(plan.recompute, (6, 8))
    times = {"compute": flops * parameters * sequence / cluster.device.matmul_flops_per_s / t / p}
    times["tensor"] = activations * 2 * sequence * hidden * (t - 1) / t * layers / p / _wire(cluster, t)
    backward = times["compute"] / 1.5
    ring = (d - 1) * 4 * parameters / (d * t * p * _wire(cluster, t * d))
    bubble = sum(times.values()) * (p - 1)
    return {name: m * value for name, value in times.items()} | {"bubble": bubble, "data": max(ring - backward, 0.0)}


def step_by_shares(parameters, layers, hidden, sequence, plan, cluster):
    t, p, d, m, full = plan.tensor, plan.pipeline, plan.data, plan.num_microbatches, plan.recompute == "full"
    one = (6 + 2 * full) * parameters * sequence / (t * p * cluster.device.matmul_flops_per_s)
    calls = (8 + 4 * full) * (t - 1) * 2 * sequence * hidden / t * (layers / p) / _wire(cluster, t)
    ring = 4 * parameters / (t * p) * (d - 1) / d / _wire(cluster, t * d)
    late = max(0.0, ring - one + one / 3)
    return {"data": late, "bubble": (p - 1) * (one + calls), "compute": m * one, "tensor": m * calls}


def choose_by_product(num_gpus, per_node, layers, heads, batch, fits, seconds):
    best = None
    for tensor, pipeline in itertools.product(range(1, per_node + 1), range(1, num_gpus + 1)):
        if per_node % tensor or heads % tensor or layers % pipeline or num_gpus % (tensor * pipeline):
            continue
        degrees = (num_gpus // (tensor * pipeline), tensor, pipeline)
        if batch % degrees[0] == 0 and fits(*degrees):
            time = seconds(*degrees)
            if best is None or time < best[0]:
                best = time, degrees
    return best and best[1]


def choose_by_divisors(num_gpus, per_node, layers, heads, batch, fits, seconds):
    def divides(part, whole):
        return whole % part == 0

    every = [
        (d, t, num_gpus // (d * t))
        for t in filter(lambda t: divides(t, math.gcd(per_node, heads, num_gpus)), range(1, per_node + 1))
        for d in range(1, num_gpus // t + 1)
        if divides(d * t, num_gpus) and divides(d, batch) and divides(num_gpus // (d * t), layers)
    ]
    room = sorted((d, t, p) for d, t, p in every if fits(d, t, p))
    return min(room, key=lambda each: (seconds(*each), each[1], each[2]), default=None)


def bill_in_hours(num_steps, step_s, num_gpus, price, mtbf_hours, save_s, restart_s):
    mean, save, restart = mtbf_hours / num_gpus, save_s / 3600, restart_s / 3600
    every = (2 * save * mean) ** 0.5
    lost = save / every + every / mean / 2 + restart / mean
    if lost >= 1:
        return math.inf, math.inf
    hours = num_steps * step_s / 3600 / (1 - lost)
    return hours / 24, price * hours * num_gpus


def bill_by_halves(num_steps, step_s, num_gpus, price, mtbf_hours, save_s, restart_s):
    between = mtbf_hours * 3600 / num_gpus
    half = math.sqrt(save_s / (2 * between))  # at Young's interval saving and lost work are equal
    part = 1 - 2 * half - restart_s / between
    days = num_steps * step_s / part / 86_400 if part > 0 else float("inf")
    return days, 24 * days * num_gpus * price


def bill_as_a_list(num_steps, step_s, num_gpus, price, mtbf_hours, save_s, restart_s):
    rate = num_gpus / (3600 * mtbf_hours)
    interval = math.sqrt(2 * save_s / rate)
    useful = 1 - sum((save_s / interval, rate * interval / 2, rate * restart_s))
    gpu_hours = math.inf if useful <= 0 else num_gpus * num_steps * step_s / (3600 * useful)
    return [gpu_hours / num_gpus / 24, gpu_hours * price]


def cheapest_by_sorting(offers, days):
    in_time = sorted((gpus * time * price, time, name) for name, gpus, time, price in offers if time <= days)
    return in_time[0][2] if in_time else None


def cheapest_by_infinity(offers, days):
    def cost(offer):
        _, gpus, time, price = offer
        return (gpus * time * price if time <= days else math.inf, time)

    best = min(offers, key=cost, default=None)
    return best[0] if best is not None and best[2] <= days else None


def _fsdp(num_gpus):
    data = num_gpus // 2
    return Plan(data=data, tensor=2, num_microbatches=256 // data, sequence_parallel=True, sharding=Sharding(3))


def capstone_by_deadline(dollars, days):
    return _fsdp(next(count for count, took in ((128, 8.1), (256, 4.1), (512, 2.2)) if took <= days))


def capstone_by_the_advisor(dollars, days):
    described, best = ModelDescription(model="llama-2-70b", attention="flash"), None
    for num_gpus in (512, 256, 128, 64):
        question = Question(described, cluster("dgx-h100", num_gpus), 256)
        (choice,) = search(question, lambda shape: shape.context == shape.microbatch == 1).best(1)
        paid = bill(choice.step, Run(100e9, 2.5, Failures("llama-3")))
        if paid.days <= days and (best is None or paid.dollars < best.dollars):
            best = paid
    return best.step.plan
