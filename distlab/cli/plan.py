"""`plan`: the best plan of all."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.command import check_output, counts_of_devices, flag, flags, positive_number
from distlab.cli.cost import FAILURES, curve_facts, marked
from distlab.cli.flags import add_flags, cluster_of, tables_said
from distlab.course.flags import number

if TYPE_CHECKING:
    from simulator import Bill, Question, Search


def _priced(text: str) -> tuple[str, float | None]:
    """Convert a cluster's name, with a price behind it, for argparse's `type`."""
    name, _, price = text.partition(":")
    return name, positive_number(price) if price else None


@flag(
    "--cluster",
    type=_priced,
    action="append",
    metavar="NAME[:PRICE]",
    help="a cluster of the presets, with dollars for a device and an hour; give the flag again for more "
    "(default dgx-a100)",
)
@flag("--stack", metavar="NAME", help="what its software reaches (distlab simulate --list)")
@flag("--gpus", type=counts_of_devices, default=(8,), metavar="N[,N...]", help="devices")
@flag("--batch", type=number(least=1), default=256, metavar="N", help="samples of a step")
@flag("--wish", choices=("fastest", "cheapest"), default="fastest", help="what the best plan is")
@flag("--tokens", type=positive_number, metavar="N", help="tokens of the run, such as 1e12: days and dollars")
@FAILURES
@flag("--headroom", type=number(least=0, most=99), default=5, metavar="N", help="per cent of memory to keep free")
@flag(
    "--whole-recompute",
    action="store_true",
    help="leave out recompute per operator and of some blocks, which Megatron-LM and DeepSpeed do not run",
)
@flag("--top", type=number(least=1, most=20), default=3, metavar="N", help="plans to show")
@flag("--save", type=Path, metavar="PLAN.toml", help="write the best as a file for distlab simulate")
@flag("--curve", "--picture", type=Path, metavar="FILE", help="save the cost curve as PNG")
@flag("--json", action="store_true", help="print the plans as JSON")
@flags(lambda command: add_flags(command, "workload"))
def plan(arguments: argparse.Namespace) -> int:
    """Find the best plan for a model, a batch and a cluster: the fastest or the cheapest, why, and what it costs.

    Every way to divide the devices is bounded from below, and simulated in the order of its bound until nothing can be
    better. Several clusters, with prices, and several numbers of devices give a cost curve. Ctrl-C ends the search with
    the best so far.
    """
    from simulator import Failures, Run, bill, search

    if arguments.curve and not arguments.tokens:
        raise ValueError("--curve shows days and dollars of a run; add --tokens, such as --tokens 1e12")
    check_output("--save", arguments.save)
    check_output("--curve", arguments.curve, picture=True)
    failures = None if arguments.failures is None else Failures(arguments.failures)
    found: list[tuple[Search, list[Bill]]] = []
    for question in _questions(arguments):
        one = search(question)
        best = one.best(arguments.top, tell=_tell(f"{question.cluster.num_devices} x {question.cluster.name}"))
        run = Run(arguments.tokens or 1e9, question.price, failures)  # without --tokens, steps only compare plans
        if bills := [bill(choice.step, run) for choice in best]:
            found.append((one, bills))
        if not one.is_complete:
            print("interrupted: better plans may be left", file=sys.stderr)
            break
    if not found:
        raise ValueError(_why_none(one))

    def weight(pair: tuple[Search, Bill]) -> float:
        return pair[1].price if arguments.wish == "cheapest" else pair[1].days

    ranked = sorted(((one, bill) for one, bills in found for bill in bills), key=weight)[: arguments.top]
    bests = [bills[0] for _, bills in found]
    _save(arguments, *ranked[0], bests)
    said = _facts(ranked[0][0], [bill for _, bill in ranked], bests, has_tokens=arguments.tokens is not None)
    print(json.dumps(said, indent=2) if arguments.json else _text(said))
    return 0


def _why_none(last: Search) -> str:
    from simulator.units import format_bytes

    if not last.is_complete:
        return "no plan that fits had been found when the search was interrupted; let it run longer"
    least, free = last.least_bytes, last.found.question.device.memory_bytes
    holds = f"on {last.found.question.cluster.num_devices} devices each holds at least {format_bytes(least)}"
    return f"no plan fits: {holds} and has {format_bytes(free)} for it; use more devices, or devices with more memory"


def _questions(arguments: argparse.Namespace) -> list[Question]:
    from simulator import ClusterDescription, Question

    if "workload.microbatch_size" in vars(arguments):
        raise ValueError("--microbatch is what the search chooses; leave it out")
    model, asked = tables_said(arguments).workload, []
    for name, dollars in arguments.cluster or [("dgx-a100", None)]:
        for count in arguments.gpus:
            machine = cluster_of(ClusterDescription(name, stack=arguments.stack), count)
            if max(count, machine.num_devices) > machine.devices_per_node and count != machine.num_devices:
                raise ValueError(f"--gpus {count} does not fill nodes of {machine.devices_per_node}; use a multiple")
            own: dict[str, Any] = {"headroom": arguments.headroom / 100, "price": dollars}
            own["partial_recompute"] = not arguments.whole_recompute
            asked.append(Question(model, replace(machine, num_devices=count), arguments.batch, **own))
    if len({question.price is None for question in asked}) > 1:
        raise ValueError("some clusters have a price and others none; give one to all, such as dgx-h100:2.50")
    return asked


def _tell(name: str) -> Callable[[int, int, float], None] | None:
    """Return what shows the search's progress, where standard error is a terminal."""

    def show(left: int, simulated: int, best_s: float) -> None:
        text = f"{name}: {simulated} steps simulated, {left} plans left, best {best_s:.4g} s"
        print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)

    return show if sys.stderr.isatty() else None


def _save(arguments: argparse.Namespace, own: Search, best: Bill, bests: list[Bill]) -> None:
    """Write the best plan as a file, and draw the cost curve, each where a file is named."""
    from simulator import ClusterDescription, PlanFile, curve
    from simulator.viz import draw_cost_curve

    if arguments.save:
        question, step = own.found.question, best.step
        model = question.model.with_microbatch(step.workload.samples)
        machine = ClusterDescription(step.cluster.name, step.cluster.num_devices, arguments.stack)
        file = PlanFile(model, machine, step.plan, run=best.run if arguments.tokens else None)
        arguments.save.write_text(file.text(), encoding="utf-8")
    if arguments.curve:
        draw_cost_curve(curve(bests)).figure.savefig(arguments.curve, dpi=150)


def _facts(own: Search, ranked: list[Bill], bests: list[Bill], *, has_tokens: bool) -> dict[str, Any]:
    """Return the plans, the reasons and the cost curve as JSON-ready values."""
    from simulator import curve, near_fit, reasons, words_of

    def row(bill: Bill) -> dict[str, Any]:
        step, machine = bill.step, bill.step.cluster
        said: dict[str, Any] = {"cluster": machine.name, "devices": machine.num_devices}
        said |= {"plan": words_of(step.plan, step.workload.samples), "step_s": step.steady_s, "mfu": step.mfu}
        said["max_memory_bytes"] = step.memory.max_bytes
        if bill.run.failures:
            said["goodput"] = bill.goodput.useful
        return said | ({"days": bill.days, "dollars": bill.dollars} if has_tokens else {})

    best = next(choice for choice in own.choices if choice.step is ranked[0].step)
    said = {
        "model": best.step.workload.name,
        "searched": len(own.found),
        "simulated": own.num_simulated,
        "is_complete": own.is_complete,
        "plans": [row(bill) for bill in ranked],
        "why": [reason._asdict() for reason in reasons(own, best)],
        "nearly_fits": near_fit(own),
    }
    return said | (curve_facts(curve(bests), row) if len(bests) > 1 else {})


def _text(said: dict[str, Any]) -> str:
    """Lay the answer out for a terminal."""
    from simulator.units import format_bytes, format_s

    def line(row: dict[str, Any]) -> str:
        parts = [f"{row['devices']} x {row['cluster']}: {format_s(row['step_s'])}, MFU {row['mfu']:.1%}"]
        parts.append(f"{format_bytes(row['max_memory_bytes'])} held")
        if "goodput" in row:
            parts.append(f"goodput {row['goodput']:.1%}")
        if "days" in row:
            parts.append(f"{row['days']:.3g} days" + (f", {row['dollars']:,.0f} dollars" if row["dollars"] else ""))
        return "; ".join(parts)

    lines = [f"{said['model']}: {said['searched']:,} plans on this cluster, {said['simulated']} of them simulated"]
    for place, row in enumerate(said["plans"], 1):
        lines += [f"{place}. {row['plan']}", f"   {line(row)}"]
    if said["why"]:
        lines.append("why the first")
    for reason in said["why"]:
        lines += [f"   {reason['part']}: {reason['instead']}".rstrip(": "), f"      {reason['rule']}"]
    if said["nearly_fits"]:
        lines.append(f"faster, if it fitted: {said['nearly_fits']}")
    if "curve" in said:
        lines.append("the best plan of each")
        lines += [f"   {line(row)}{mark}" for row, mark in marked(said)]
    return "\n".join(lines)
