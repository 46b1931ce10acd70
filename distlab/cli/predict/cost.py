"""Say what a training run takes: days, dollars, goodput with failures, how often to save, which number of GPUs pays.

The plan file's [run] says how many tokens, at which price, and what fails; flags take its place or change it. The same
plan is then spread over other numbers of devices with the same batch: distlab plan searches for the best plan of each.
The sweet spot among them has the least product of days and dollars.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.arguments import check_output, counts_of_devices, positive_number
from distlab.cli.predict.simulate import check_size

if TYPE_CHECKING:
    from simulator import Bill, Curve, PlanFile, Run

DRAWN = 2_000_000  # failures, over all drawn runs


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Declare the flags of `distlab cost`."""
    command.add_argument("file", metavar="PLAN.toml", help="a plan file, such as distlab plan --save writes")
    command.add_argument("--tokens", type=positive_number, metavar="N", help="tokens of the run, such as 15e12")
    command.add_argument("--price", type=positive_number, metavar="DOLLARS", help="of a device for an hour")
    add_failures(command)
    what = "further numbers of devices (default: an eighth to 16 times the plan's)"
    command.add_argument("--gpus", type=counts_of_devices, metavar="N[,N...]", help=what)
    command.add_argument("--seed", type=int, default=0, metavar="N", help="of the failures that are drawn (default 0)")
    command.add_argument("--curve", "--picture", type=Path, metavar="FILE", help="save the cost curve as PNG")
    command.add_argument("--goodput", type=Path, metavar="FILE", help="save where the time goes as PNG")
    command.add_argument("--json", action="store_true", help="print all of it as JSON")


def add_failures(command: argparse.ArgumentParser) -> None:
    """Declare the flag that says how often devices fail."""
    what = "failures of a device in an hour: llama-3, llama-3-all, none, or a number such as 2e-5"
    command.add_argument("--failures", type=_rate, metavar="RATE", help=what)


def _rate(text: str) -> str | float:
    """Convert, for argparse; whether a name is known is the record's to say."""
    try:
        return float(text)
    except ValueError:
        return text


def main(arguments: argparse.Namespace) -> int:
    """Simulate the plan on each number of devices, add failures and prices, print, and draw what was asked for."""
    from simulator import bill, counts_of, curve, read_plan_file, spread
    from simulator.plan_file import told_of

    for flag in ("curve", "goodput"):
        check_output(f"--{flag}", getattr(arguments, flag), picture=True)
    said = read_plan_file(arguments.file)
    run = _run(arguments, said)
    own = said.plan.world_size
    counts = sorted({own, *(arguments.gpus or counts_of(said.plan))})
    with told_of(arguments.file):
        check_size(replace(said.plan, num_microbatches=said.plan.num_microbatches * max(1, own // counts[0])))
        found = spread(*said.made(), said.plan, counts, order=said.order)
    if why := found.left_out.get(own):
        fix = f"; distlab simulate {arguments.file} says what to change" if "fit" in why else ""
        raise ValueError(f"{arguments.file}: {why}{fix}")
    bills, left_out = [], dict(found.left_out)
    for step in found.steps:
        try:
            bills.append(bill(step, run))
        except ValueError as error:
            if step.plan.world_size == own:
                raise
            left_out[step.plan.world_size] = str(error)
    costs = curve(bills)
    chosen = next(each for each in bills if each.num_devices == own)
    _draw(arguments, chosen, costs)
    told = facts(chosen, costs, left_out, seed=arguments.seed)
    print(json.dumps(told, indent=2) if arguments.json else text(told))
    return 0


def _run(arguments: argparse.Namespace, said: PlanFile) -> Run:
    from simulator import Failures, Run

    if said.run is None and arguments.tokens is None:
        raise ValueError(f"{arguments.file} has no [run] with num_tokens; add it, or --tokens such as 1e12")
    run = said.run or Run(arguments.tokens)
    failures = run.failures
    if arguments.failures is not None:
        failures = replace(failures or Failures(), rate=arguments.failures)
    return Run(arguments.tokens or run.num_tokens, arguments.price or run.price, failures)


def _draw(arguments: argparse.Namespace, chosen: Bill, costs: Curve) -> None:
    if arguments.curve:
        from simulator.viz import draw_cost_curve

        draw_cost_curve(costs).figure.savefig(arguments.curve, dpi=150)
    if arguments.goodput:
        from simulator.viz import draw_goodput

        if chosen.run.failures is None:
            raise ValueError("--goodput shows failures, and the run has none; add --failures, such as llama-3")
        save_s, seed = chosen.goodput.save_s, arguments.seed
        picture = draw_goodput(chosen.run.failures, chosen.num_devices, save_s, seed=seed)
        picture.figure.savefig(arguments.goodput, dpi=150)


def facts(chosen: Bill, costs: Curve, left_out: dict[int, str], *, seed: int = 0) -> dict[str, Any]:
    """Return the run, its goodput and the cost curve as JSON-ready values."""
    step, run = chosen.step, chosen.run
    said: dict[str, Any] = {"model": step.workload.name, "cluster": step.cluster.name, "tokens": run.num_tokens}
    said |= row(chosen) | {"price": run.price, "failures": None}
    if run.failures is not None:
        said["failures"] = _failures(chosen, seed)
    said |= curve_facts(costs, row)
    return said | {"left_out": {str(count): why for count, why in left_out.items()}}


def curve_facts(costs: Curve, row: Callable[[Bill], dict[str, Any]]) -> dict[str, Any]:
    """Return the bills of a curve as JSON-ready values, each as `row` says, and the places of the three best."""
    three = {"shortest": costs.shortest, "cheapest": costs.cheapest, "sweet_spot": costs.sweet}
    places = {name: costs.bills.index(each) for name, each in three.items()}
    return {"curve": [row(each) for each in costs.bills], **places}


def marks(said: dict[str, Any]) -> list[str]:
    """Return what stands behind each bill of a curve: whether it is one of the three best."""
    three = ("shortest", "cheapest", "sweet_spot")
    names = [[name.replace("_", " ") for name in three if said[name] == place] for place in range(len(said["curve"]))]
    return [f"  <- {', '.join(each)}" if each else "" for each in names]


def row(each: Bill) -> dict[str, Any]:
    """Return one bill as JSON-ready values."""
    plan = each.step.plan
    said: dict[str, Any] = {"devices": each.num_devices, "data": plan.data, "microbatches": plan.num_microbatches}
    said |= {"step_s": each.step.steady_s, "mfu": each.step.mfu, "num_steps": each.num_steps}
    return said | {"goodput": each.goodput.useful, "days": each.days, "dollars": each.dollars}


def _failures(chosen: Bill, seed: int) -> dict[str, Any]:
    """Return what fails, where the time goes, the interval in four ways, and days of lucky and of unlucky runs."""
    import numpy as np

    from simulator import best_by_trial, best_s, daly_s, draw_runs, young_s

    failures, good = chosen.run.failures, chosen.goodput
    assert failures is not None, "the caller has looked"
    rate = failures.published
    said: dict[str, Any] = {"per_device_hour": rate.per_device_hour, "source": rate.source, "save_s": good.save_s}
    said |= {"restart_s": failures.restart_s, "expected": 0.0, "mtbf_s": None, "interval_s": None}
    said |= {name: getattr(good, name) for name in ("useful", "saving", "lost", "restarting", "slow")}
    if math.isinf(good.mtbf_s):
        return said
    both, seconds = (good.save_s, good.mtbf_s), chosen.days * 24 * 3600
    trial = best_by_trial(*both, restart_s=failures.restart_s, seed=seed)
    said |= {"mtbf_s": good.mtbf_s, "interval_s": good.interval_s, "expected": seconds / good.mtbf_s}
    said["best_interval_s"] = {
        "exact": best_s(*both),
        "young": young_s(*both),
        "daly": daly_s(*both),
        "monte_carlo": trial,
    }
    num_runs = int(np.clip(DRAWN / said["expected"], 50, 1000))
    works: dict[str, Any] = {"save_s": good.save_s, "restart_s": failures.restart_s, "num_runs": num_runs, "seed": seed}
    ends = draw_runs(seconds * (good.useful + good.slow), good.mtbf_s, good.interval_s, **works)
    low, high = np.percentile(ends, [10, 90]) / 86_400
    return said | {"drawn_days": {"runs": num_runs, "mean": ends.mean() / 86_400, "low": low, "high": high}}


def text(said: dict[str, Any]) -> str:
    """Lay the run and the curve out for a terminal."""
    from simulator.units import format_s, format_span

    paid = f", {said['dollars']:,.0f} dollars at {said['price']:g} for a device and an hour" if said["price"] else ""
    steps = f"{said['num_steps']:,} steps of {format_s(said['step_s'])}, MFU {said['mfu']:.1%}"
    rows = [
        ("run", f"{said['model']}, {said['tokens']:.3g} tokens, on {said['devices']:,} devices of {said['cluster']}"),
        ("steps", steps),
        ("time", f"{format_span(86_400 * said['days'])}{paid}"),
    ]
    rows += _failure_rows(said["failures"]) if said["failures"] else []
    lines = [f"{name:<14} {value}" for name, value in rows]
    lines.append("the same plan and batch on other numbers of devices")
    for each, mark in zip(said["curve"], marks(said), strict=True):
        parts = [f"{each['devices']:>8,} devices", f"{format_span(86_400 * each['days']):>10}"]
        parts += [f"{each['dollars']:>14,.0f} dollars"] if each["dollars"] is not None else []
        lines.append(f"{'  '.join(parts)}  step {format_s(each['step_s'])}, goodput {each['goodput']:.1%}{mark}")
    lines += [f"{int(count):>8,} devices  left out: {why}" for count, why in said["left_out"].items()]
    return "\n".join(lines)


def _failure_rows(said: dict[str, Any]) -> list[tuple[str, str]]:
    from simulator.units import format_span

    parts = ", ".join(f"{said[name]:.1%} {name}" for name in ("saving", "lost", "restarting", "slow") if said[name])
    rows = [("goodput", f"{said['useful']:.1%} of the time{f': {parts}' if parts else ''}")]
    if said["mtbf_s"] is None:
        return [*rows, ("failures", said["source"])]
    best = ", ".join(f"{name.replace('_', ' ')} {format_span(each)}" for name, each in said["best_interval_s"].items())
    drawn = said["drawn_days"]
    rows += [
        ("failures", f"{said['expected']:,.3g}, one in {format_span(said['mtbf_s'])}; {said['source']}"),
        ("checkpoints", f"after {format_span(said['interval_s'])} of training, {format_span(said['save_s'])} each"),
        ("best interval", best),
        ("drawn runs", f"{drawn['low']:.4g} to {drawn['high']:.4g} days in 8 of 10, {drawn['mean']:.4g} on average"),
    ]
    return rows
