"""Commands about a whole run: `plan` (the best plan of all), `cost` (what a run by one plan takes)."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.command import check_output, counts_of_devices, flag, flags, positive_number
from distlab.cli.flags import add_flags, cluster_of, tables_said
from distlab.cli.simulate import check_size
from distlab.course.flags import number
from distlab.plan.sharding import OFFLOADS

if TYPE_CHECKING:
    from simulator import Bill, Curve, PlanFile, Question, Run, Search

DRAWN = 2_000_000  # failures, over all drawn runs
BEST = ("shortest", "cheapest", "sweet_spot")  # of a curve


def _rate(text: str) -> str | float:
    """Convert, for argparse; whether a name is known is the record's to say."""
    try:
        return float(text)
    except ValueError:
        return text


FAILED = "failures of a device in an hour: llama-3, llama-3-all, b200-504, opt-175b, none, or a number such as 2e-5"
FAILURES = flag("--failures", type=_rate, metavar="RATE", help=FAILED)
CLUSTERS = "a preset or a TOML file with [cluster], and dollars for a device and an hour; give the flag again for more"
FIXED = ("float8", "precision.compute", "precision.master", "cut", "context_kind", "offload_activations")
WISH = "what the best plan is; cheapest without prices: of the fewest device-hours"
WHOLE = "leave out recompute per operator and of some blocks, which Megatron-LM and DeepSpeed do not run"


def _priced(text: str) -> tuple[str, float | None]:
    name, _, price = text.partition(":")
    return name, positive_number(price) if price else None


@flag("--cluster", type=_priced, action="append", metavar="NAME[:PRICE]", help=f"{CLUSTERS} (default dgx-a100)")
@flag("--stack", metavar="NAME", help="what its software reaches (distlab simulate --list)")
@flag("--gpus", type=counts_of_devices, default=(8,), metavar="N[,N...]", help="devices")
@flag("--batch", type=number(least=1), default=256, metavar="N", help="samples of a step")
@flag("--wish", choices=("fastest", "cheapest"), default="fastest", help=WISH)
@flag("--tokens", type=positive_number, metavar="N", help="tokens of the run, such as 1e12: days and dollars")
@FAILURES
@flag("--days", type=positive_number, metavar="N", help="leave out plans whose run takes longer")
@flag("--headroom", type=number(least=0, most=99), default=10, metavar="N", help="per cent of memory to keep free")
@flag("--offload", choices=OFFLOADS, help="what goes to the host's memory (default: nothing, unless nothing fits)")
@flag("--whole-recompute", action="store_true", help=WHOLE)
@flag("--top", type=number(least=1, most=20), default=3, metavar="N", help="plans to show")
@flag("--save", type=Path, metavar="PLAN.toml", help="write the best as a file for distlab simulate")
@flag("--curve", "--picture", type=Path, metavar="FILE", help="save the cost curve as PNG")
@flag("--json", action="store_true", help="print the plans as JSON")
@flags(lambda command: add_flags(command, "workload", *(f"plan.{name}" for name in FIXED)))
def plan(arguments: argparse.Namespace) -> int:
    """Find the best plan for a model, a batch and a cluster: the fastest or the cheapest, why, and what it costs.

    Every way to divide the devices is bounded from below, and simulated in the order of its bound until nothing can be
    better. Several clusters, with prices, and several numbers of devices give a cost curve. Ctrl-C ends the search with
    the best so far.
    """
    from simulator import Failures, Run, bill, search
    from simulator.plan_file import told_of

    for name in ("curve", "days"):
        if getattr(arguments, name) and not arguments.tokens:
            raise ValueError(f"--{name} needs the run's length; add --tokens, such as --tokens 1e12")
    check_output("--save", arguments.save)
    check_output("--curve", arguments.curve, picture=True)
    with told_of("--failures"):
        failures = None if arguments.failures is None else Failures(arguments.failures)
    found: list[tuple[Search, list[Bill]]] = []
    left_out: dict[str, float] = {}  # days of the shortest run
    asked = _questions(arguments)
    for _, question in asked:
        on = f"{question.cluster.num_devices} x {question.cluster.name}"
        _say(f"{on}: listing every plan")
        one = search(question)
        best = one.advised(arguments.top, partial(_say, f"{on}: {{:,}} plans left, {{}} simulated"))
        _say("")
        run = Run(arguments.tokens or 1e9, question.price, failures)  # without --tokens, steps only compare plans
        billed = [bill(choice.step, run) for choice in best]
        if bills := [each for each in billed if not arguments.days or each.days <= arguments.days]:
            found.append((one, bills))
        else:
            left_out[on] = min((each.days for each in billed), default=math.inf)
        if not one.is_complete:
            print("interrupted: better plans may be left", file=sys.stderr)
            break
    if not found:
        raise ValueError(_why_none(one, min(left_out.values(), default=math.inf), as_json=arguments.json))

    least = "price" if arguments.wish == "cheapest" else "days"
    pairs = [(one, bill) for one, bills in found for bill in bills]
    ranked = sorted(pairs, key=lambda pair: getattr(pair[1], least))[: arguments.top]
    bests = [bills[0] for _, bills in found]
    file = next(said for said, question in asked if question is ranked[0][0].found.question)
    _save(arguments, file, ranked[0][1], bests)
    said = _facts(ranked[0][0], [bill for _, bill in ranked], bests, has_tokens=arguments.tokens is not None)
    why = {on: f"the shortest run takes {days:.3g} days" for on, days in left_out.items() if days < math.inf}
    said["left_out"] = {on: why.get(on, "nothing fits") for on in left_out}
    print(json.dumps(said, indent=2) if arguments.json else _text(said))
    return 0


def _why_none(last: Search, shortest: float, *, as_json: bool) -> str:
    """Return why no plan is left, in one line, and print the ways out where that is memory."""
    from simulator import nearest, ways_out

    if shortest < math.inf:
        return f"no plan ends in time: the shortest does with --days {1.005 * shortest:.3g}"
    if not last.is_complete:
        return "no plan that fits had been found when the search was interrupted; let it run longer"
    ways = [str(way) for way in ways_out(last.found.question)]
    print(json.dumps({"plans": [], "ways_out": ways}, indent=2) if as_json else "\n   ".join(["ways out", *ways]))
    return f"no plan fits: {nearest(last)}"


def _questions(arguments: argparse.Namespace) -> list[tuple[PlanFile, Question]]:
    """Return what each cluster is called in a plan file, and the question for each number of its devices."""
    from simulator import Question, Stack

    if "workload.microbatch_size" in vars(arguments):
        raise ValueError("--microbatch is what the search chooses; leave it out")
    offloads = OFFLOADS if arguments.offload is None else (arguments.offload,)
    asked: list[tuple[PlanFile, Question]] = []
    for name, dollars in arguments.cluster or [("dgx-a100", None)]:
        flags = {"cluster.name": name} | ({"cluster.stack": arguments.stack} if arguments.stack else {})
        said = tables_said(argparse.Namespace(**vars(arguments) | flags))
        for count in arguments.gpus:
            machine = cluster_of(said.cluster, count)
            if max(count, machine.num_devices) > machine.devices_per_node and count != machine.num_devices:
                raise ValueError(f"--gpus {count} does not fill nodes of {machine.devices_per_node}; use a multiple")
            named = Path(name).stem if name.endswith(".toml") else machine.name
            machine = replace(machine, num_devices=count, name=named)
            rest: dict[str, Any] = {"headroom": arguments.headroom / 100, "price": dollars, "offloads": offloads}
            rest |= {"partial_recompute": not arguments.whole_recompute, "fixed": replace(said.plan, data=1)}
            if isinstance(own := machine.software, Stack) and (said.cluster.stack or own.alone):  # others are assumed
                rest |= {each: known for each in ("axes", "stages") if (known := getattr(own, each))}
            asked.append((said, Question(said.workload, machine, arguments.batch, **rest)))
    if len({question.price is None for _, question in asked}) > 1:
        raise ValueError("some clusters have a price and others none; give one to all, such as dgx-h100:2.50")
    return asked


def _say(text: str, *numbers: int) -> None:
    """Show where the search is, where standard error is a terminal: one line, which the next text replaces."""
    if sys.stderr.isatty():
        print(f"\r{text.format(*numbers):<78}\r", end="", file=sys.stderr, flush=True)


def _save(arguments: argparse.Namespace, said: PlanFile, best: Bill, bests: list[Bill]) -> None:
    from simulator import curve
    from simulator.viz import draw_cost_curve

    if arguments.save:
        plan, model = best.step.plan, said.workload.with_microbatch(best.step.workload.samples)
        own: dict[str, Any] = {"workload": model, "cluster": replace(said.cluster, num_devices=plan.world_size)}
        file = replace(said, **own, plan=plan, run=best.run if arguments.tokens else None)
        arguments.save.write_text(file.text(), encoding="utf-8")
    if arguments.curve:
        draw_cost_curve(curve(bests)).figure.savefig(arguments.curve, dpi=150)


def _facts(own: Search, ranked: list[Bill], bests: list[Bill], *, has_tokens: bool) -> dict[str, Any]:
    from simulator import beside, curve, near_fit, reasons, sheet_note, words_of
    from simulator.validation.confidence import words_on_plans

    def row(bill: Bill) -> dict[str, Any]:
        step, machine = bill.step, bill.step.cluster
        said: dict[str, Any] = {"cluster": machine.name, "devices": machine.num_devices}
        said |= {"plan": words_of(step.plan, step.workload.samples), "step_s": step.steady_s, "mfu": step.mfu}
        said |= {"max_memory_bytes": step.memory.max_bytes, "host_memory_bytes": step.memory.host_bytes}
        said |= {"goodput": bill.goodput.useful, "goodput_range": bill.goodput_range} if bill.run.failures else {}
        return said | ({"days": bill.days, "dollars": bill.dollars} if has_tokens else {})

    best = next(choice for choice in own.choices if choice.step is ranked[0].step)
    said: dict[str, Any] = {"model": best.step.workload.name, "searched": len(own.found)}
    said |= {"simulated": own.num_simulated, "is_complete": own.is_complete, "plans": [row(bill) for bill in ranked]}
    said["error"] = words_on_plans([bill.step for bill in ranked])
    said |= {"why": [reason._asdict() for reason in reasons(own, best)], "nearly_fits": near_fit(own)}
    said["notes"] = sorted({sheet_note(bill.step.cluster.device) for bill in [*ranked, *bests]} - {""})
    said |= {"beside": beside(own, best)}
    return said | (curve_facts(curve(bests), row) if len(bests) > 1 else {})


def _text(said: dict[str, Any]) -> str:
    from simulator.units import format_bytes, format_s

    def line(row: dict[str, Any]) -> str:
        parts = [f"{row['devices']} x {row['cluster']}: {format_s(row['step_s'])}, MFU {row['mfu']:.1%}"]
        on_host = f", {format_bytes(row['host_memory_bytes'])} of the host per rank" if row["host_memory_bytes"] else ""
        parts.append(f"{format_bytes(row['max_memory_bytes'])} held{on_host}")
        if "goodput" in row:
            parts.append("goodput {:.1%} ({:.1%} to {:.1%})".format(row["goodput"], *row["goodput_range"]))
        if "days" in row:
            parts.append(f"{row['days']:.3g} days" + (f", {row['dollars']:,.0f} dollars" if row["dollars"] else ""))
        return "; ".join(parts)

    lines = [f"{said['model']}: {said['searched']:,} plans on this cluster, {said['simulated']} of them simulated"]
    for place, row in enumerate(said["plans"], 1):
        lines += [f"{place}. {row['plan']}", f"   {line(row)}"]
    lines += [f"note: {note}" for note in said["notes"]]
    lines += [f"error of these times: {said['error']}", *(["why the first"] if said["why"] else [])]
    for reason in said["why"]:
        lines += [f"   {reason['part']}: {reason['instead']}".rstrip(": "), f"      {reason['rule']}"]
    lines += [f"faster, if it fitted: {said['nearly_fits']}"] if said["nearly_fits"] else []
    lines += [f"{name}: {text}" for name, texts in said["beside"].items() for text in texts]
    if "curve" in said:
        lines.append("the best plan of each")
        lines += [f"   {line(row)}{mark}" for row, mark in marked(said)]
    lines += [f"left out: {on}: {why}" for on, why in said["left_out"].items()]
    return "\n".join(lines)


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
    from simulator import bill, counts_of, curve, read_plan_file, sheet_note, spread
    from simulator.plan_file import told_of
    from simulator.validation.confidence import words_on_plans
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
    told |= {"error": words_on_plans([chosen.step]), "note": sheet_note(chosen.step.cluster.device)}
    told |= _cost_row(chosen) | {"price": run.price, "failures": run.failures and _failures(chosen)}
    told |= curve_facts(costs, _cost_row) | {"left_out": {str(count): why for count, why in left_out.items()}}
    print(json.dumps(told, indent=2) if arguments.json else _cost_text(told))
    return 0


def _run(arguments: argparse.Namespace, said: PlanFile) -> Run:
    from simulator import Failures, Run
    from simulator.plan_file import told_of

    if said.run is None and arguments.tokens is None:
        raise ValueError(f"{arguments.file} has no [run] with num_tokens; add it, or --tokens such as 1e12")
    run = said.run or Run(arguments.tokens)
    with told_of("--failures"):
        rate = arguments.failures
        failures = run.failures if rate is None else replace(run.failures or Failures(), rate=rate)
    return Run(arguments.tokens or run.num_tokens, arguments.price or run.price, failures)


def curve_facts(costs: Curve, row: Callable[[Bill], dict[str, Any]]) -> dict[str, Any]:
    """Return the bills of a curve as JSON-ready values, each as `row` says, and the places of the three best."""
    best = zip(BEST, (costs.shortest, costs.cheapest, costs.sweet), strict=True)
    return {"curve": [row(each) for each in costs.bills]} | {name: costs.bills.index(each) for name, each in best}


def marked(said: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Return each bill of a curve, and what stands behind it: whether it is one of the three best."""
    names = [[name.replace("_", " ") for name in BEST if said[name] == place] for place in range(len(said["curve"]))]
    return [(row, f"  <- {', '.join(each)}" if each else "") for row, each in zip(said["curve"], names, strict=True)]


def _cost_row(each: Bill) -> dict[str, Any]:
    plan = each.step.plan
    said: dict[str, Any] = {"devices": each.num_devices, "data": plan.data, "microbatches": plan.num_microbatches}
    said |= {"step_s": each.step.steady_s, "mfu": each.step.mfu, "num_steps": each.num_steps}
    return said | {"goodput": each.goodput.useful, "days": each.days, "dollars": each.dollars}


def _failures(chosen: Bill) -> dict[str, Any]:
    """Return what fails, where the time goes, how often to save, and days of lucky and of unlucky runs."""
    import numpy as np

    from simulator import best_s, daly_s, draw_runs, young_s

    failures, good = chosen.run.failures, chosen.goodput
    assert failures is not None, "the caller has looked"
    said: dict[str, Any] = failures.published._asdict() | good._asdict() | {"restart_s": failures.restart_s}
    said |= {"range": chosen.goodput_range, "store": failures.store.source}
    if math.isinf(good.mtbf_s):
        return said | {"expected": 0.0, "mtbf_s": None, "interval_s": None}
    both, seconds = (good.save_s, good.mtbf_s), chosen.days * 24 * 3600
    expected = seconds / good.mtbf_s
    best = {"exact": best_s(*both), "young": young_s(*both), "daly": daly_s(*both)}
    num_runs = int(np.clip(DRAWN / expected, 50, 1000))
    lost_s = failures.restart_s + failures.lag_s(chosen.step.workload, chosen.step.plan)
    works: dict[str, Any] = {"save_s": good.save_s, "restart_s": lost_s, "num_runs": num_runs}
    ends = draw_runs(seconds * good.useful, good.mtbf_s, good.interval_s, **works) / 86_400
    low, high = np.percentile(ends, [10, 90])
    said |= {"expected": expected, "best_interval_s": best}
    return said | {"drawn_days": {"runs": num_runs, "mean": ends.mean(), "low": low, "high": high}}


def _cost_text(said: dict[str, Any]) -> str:
    from simulator.units import format_s, format_span, in_words

    paid = f", {said['dollars']:,.0f} dollars at {said['price']:g} for a device and an hour" if said["price"] else ""
    tokens, devices = in_words(said["tokens"]), f"{said['devices']:,} devices of {said['cluster']}"
    rows = [
        ("run", f"{said['model']}, {tokens} tokens, on {devices}"),
        ("steps", f"{said['num_steps']:,} steps of {format_s(said['step_s'])}, MFU {said['mfu']:.1%}"),
        ("time", f"{format_span(86_400 * said['days'])}{paid}"),
        ("error", said["error"]),
    ]
    rows += [("note", said["note"])] if said["note"] else []
    rows += _failure_rows(said["failures"]) if said["failures"] else []
    lines = [*(f"{name:<14} {value}" for name, value in rows), "the same plan and batch on other numbers of devices"]
    for each, mark in marked(said):
        parts = [f"{each['devices']:>8,} devices", f"{format_span(86_400 * each['days']):>10}"]
        parts += [f"{each['dollars']:>14,.0f} dollars"] if each["dollars"] is not None else []
        lines.append(f"{'  '.join(parts)}  step {format_s(each['step_s'])}, goodput {each['goodput']:.1%}{mark}")
    lines += [f"{int(count):>8,} devices  left out: {why}" for count, why in said["left_out"].items()]
    return "\n".join(lines)


def _failure_rows(said: dict[str, Any]) -> list[tuple[str, str]]:
    from simulator.units import format_span

    parts = ", ".join(f"{said[name]:.1%} {name}" for name in ("saving", "lost", "restarting") if said[name])
    rows = [("goodput", f"{said['useful']:.1%} of the time{f': {parts}' if parts else ''}")]
    if said["mtbf_s"] is None:
        return [*rows, ("failures", said["source"])]
    within = "{:.1%} to {:.1%} by published failures and stores, with restarts in {}; by hand they take hours"
    rows.append(("", within.format(*said["range"], format_span(said["restart_s"]))))
    best = ", ".join(f"{name} {format_span(each)}" for name, each in said["best_interval_s"].items())
    drawn = said["drawn_days"]
    return [
        *rows,
        ("failures", f"{said['expected']:,.3g}, one in {format_span(said['mtbf_s'])}; {said['source']}"),
        ("checkpoints", f"after {format_span(said['interval_s'])} of training, {format_span(said['save_s'])} each"),
        ("store", said["store"]),
        ("best interval", best),
        ("drawn runs", f"{drawn['low']:.4g} to {drawn['high']:.4g} days in 8 of 10, {drawn['mean']:.4g} on average"),
    ]
