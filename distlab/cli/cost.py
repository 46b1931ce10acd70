"""`cost`: what a whole run takes."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.command import check_output, counts_of_devices, flag, positive_number
from distlab.cli.simulate import check_size

if TYPE_CHECKING:
    from simulator import Bill, Curve, PlanFile, Run

BEST = ("shortest", "cheapest", "sweet_spot")  # of a curve


def _rate(text: str) -> str | float:
    """Convert, for argparse; whether a name is known is the record's to say."""
    try:
        return float(text)
    except ValueError:
        return text


FAILURES = flag(
    "--failures",
    type=_rate,
    metavar="RATE",
    help="failures of a device in an hour: llama-3, llama-3-all, none, or a number such as 2e-5",
)


@flag("file", metavar="PLAN.toml", help="a plan file, such as distlab plan --save writes")
@flag("--tokens", type=positive_number, metavar="N", help="tokens of the run, such as 15e12")
@flag("--price", type=positive_number, metavar="DOLLARS", help="of a device for an hour")
@FAILURES
@flag("--gpus", type=counts_of_devices, metavar="N[,N...]", help="devices (default: an eighth to 16 times the plan's)")
@flag("--curve", "--picture", type=Path, metavar="FILE", help="save the cost curve as PNG")
@flag("--json", action="store_true", help="print all of it as JSON")
def cost(arguments: argparse.Namespace) -> int:
    """Say what a training run takes: days, dollars, goodput with failures, how often to save, what number of GPUs pays.

    The plan file's [run] says how many tokens, at which price, and what fails; flags take its place or change it. The
    same plan is then spread over other numbers of devices with the same batch: distlab plan searches for the best plan
    of each. The sweet spot among them has the least product of days and dollars.
    """
    from simulator import bill, counts_of, curve, read_plan_file, spread
    from simulator.plan_file import told_of
    from simulator.viz import draw_cost_curve

    check_output("--curve", arguments.curve, picture=True)
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
    if arguments.curve:
        draw_cost_curve(costs).figure.savefig(arguments.curve, dpi=150)
    told = {"model": chosen.step.workload.name, "cluster": chosen.step.cluster.name, "tokens": run.num_tokens}
    told |= _row(chosen) | {"price": run.price, "failures": run.failures and _failures(chosen)}
    told |= curve_facts(costs, _row) | {"left_out": {str(count): why for count, why in left_out.items()}}
    print(json.dumps(told, indent=2) if arguments.json else _text(told))
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


def curve_facts(costs: Curve, row: Callable[[Bill], dict[str, Any]]) -> dict[str, Any]:
    """Return the bills of a curve as JSON-ready values, each as `row` says, and the places of the three best."""
    best = zip(BEST, (costs.shortest, costs.cheapest, costs.sweet), strict=True)
    return {"curve": [row(each) for each in costs.bills]} | {name: costs.bills.index(each) for name, each in best}


def marked(said: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return each bill of a curve, and what stands behind it: whether it is one of the three best."""
    names = [[name.replace("_", " ") for name in BEST if said[name] == place] for place in range(len(said["curve"]))]
    return [(row, f"  <- {', '.join(each)}" if each else "") for row, each in zip(said["curve"], names, strict=True)]


def _row(each: Bill) -> dict[str, Any]:
    """Return one bill as JSON-ready values."""
    plan = each.step.plan
    said: dict[str, Any] = {"devices": each.num_devices, "data": plan.data, "microbatches": plan.num_microbatches}
    said |= {"step_s": each.step.steady_s, "mfu": each.step.mfu, "num_steps": each.num_steps}
    return said | {"goodput": each.goodput.useful, "days": each.days, "dollars": each.dollars}


def _failures(chosen: Bill) -> dict[str, Any]:
    """Return what fails, where the time goes, and how often to save."""
    failures, good = chosen.run.failures, chosen.goodput
    assert failures is not None, "the caller has looked"
    rate = failures.published
    said: dict[str, Any] = {"per_device_hour": rate.per_device_hour, "source": rate.source, "save_s": good.save_s}
    said |= {"restart_s": failures.restart_s, "expected": 0.0, "mtbf_s": None, "interval_s": None}
    said |= {name: getattr(good, name) for name in ("useful", "saving", "lost", "restarting", "slow")}
    if math.isinf(good.mtbf_s):
        return said
    expected = chosen.days * 24 * 3600 / good.mtbf_s
    return said | {"mtbf_s": good.mtbf_s, "interval_s": good.interval_s, "expected": expected}


def _text(said: dict[str, Any]) -> str:
    """Lay the run and the curve out for a terminal."""
    from simulator.units import format_s, format_span

    paid = f", {said['dollars']:,.0f} dollars at {said['price']:g} for a device and an hour" if said["price"] else ""
    rows = [
        ("run", f"{said['model']}, {said['tokens']:.3g} tokens, on {said['devices']:,} devices of {said['cluster']}"),
        ("steps", f"{said['num_steps']:,} steps of {format_s(said['step_s'])}, MFU {said['mfu']:.1%}"),
        ("time", f"{format_span(86_400 * said['days'])}{paid}"),
    ]
    rows += _failure_rows(said["failures"]) if said["failures"] else []
    lines = [f"{name:<14} {value}" for name, value in rows]
    lines.append("the same plan and batch on other numbers of devices")
    for each, mark in marked(said):
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
    return [
        *rows,
        ("failures", f"{said['expected']:,.3g}, one in {format_span(said['mtbf_s'])}; {said['source']}"),
        ("checkpoints", f"after {format_span(said['interval_s'])} of training, {format_span(said['save_s'])} each"),
    ]
