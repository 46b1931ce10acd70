"""What the pictures of the lessons read that a lesson measures on ranks: small, recorded once or made up, uneven."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lesson_pictures import FOLDERS

from distlab.models import GPT, GPTConfig
from distlab.plan import ActionTimes, Cluster, Plan, make_schedule
from distlab.trace import Span, Trace
from simulator import cluster, device, gpt_workload, link, memory_of, simulate, simulate_schedule
from simulator.memory.memory import KINDS
from simulator.viz import Overlay, cut_weights

WORK = gpt_workload(hidden_size=128, num_layers=4, num_heads=4, sequence_length=64, vocab_size=256)
FOUR = cluster("dgx-h100", 4)


class Recorded(list[Any]):
    """Calls, as a recorder's records hand them out."""

    ranks: tuple[int, ...] = ()

    def calls(self, rank: int) -> list[Any]:
        """Return one rank's calls."""
        return [call for call in self if call.rank == rank]

    def to_trace(self) -> Trace:
        """Return the calls as spans."""
        return Trace.from_spans(
            Span(c.rank, "communication", f"{c.op} {c.peer} #{c.number}", c.op, c.start_ns, c.end_ns, c.num_bytes)
            for c in self
        )


def messages(
    rounds: Iterable[Iterable[tuple[int, int]]], num_bytes: int, one_ns: int = 50_000, after_ns: int = 0
) -> Recorded:
    """Return the calls of messages (from, to) that are sent round by round, each taken `one_ns` after its round.

    A sender waits from the start of its call, or, for `after_ns`, from the moment at which the message was taken.
    """
    calls = Recorded()
    for number, pairs in enumerate(rounds):
        for sender, receiver in pairs:
            shared = {"number": number, "group": (0, 1), "num_bytes": num_bytes, "channel": 100 * sender + receiver}
            start_ns = number * one_ns + 10 * sender + 1
            times = {"start_ns": start_ns, "end_ns": start_ns + one_ns - 17 * sender}
            for rank, peer, op in ((sender, receiver, "send"), (receiver, sender, "recv")):
                waits = {"wait_ns": times["start_ns"], "state": "done"}
                if after_ns:
                    waits["wait_ns"] = one_ns // 2
                if after_ns and op == "send":
                    waits |= {"wait_ns": times["end_ns"] + 50, "end_ns": times["end_ns"] + after_ns}
                calls.append(SimpleNamespace(rank=rank, peer=peer, op=op, **shared, **(times | waits)))
    calls.sort(key=lambda call: call.start_ns)
    calls.ranks = tuple(sorted({call.rank for call in calls}))
    return calls


def deadlock() -> Recorded:
    """Return the calls of two ranks that both receive first."""
    shared = {"op": "recv", "number": 0, "group": (0, 1), "num_bytes": 8, "state": "waiting", "end_ns": 0}
    return Recorded(
        SimpleNamespace(rank=rank, peer=1 - rank, start_ns=rank + 1, wait_ns=rank + 1, channel=rank, **shared)
        for rank in range(2)
    )


def in_turn(*results: Recorded) -> type:
    """Return a class in place of Ranks, whose uses hand out these records one after the other."""
    waiting = iter(results)

    class Ranks:
        def __init__(self, *_: Any, **__: Any) -> None:
            found = next(waiting)
            self.records = lambda: found

        def __enter__(self) -> Ranks:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def run(self, *_: Any, **__: Any) -> None:
            pass

    return Ranks


def measured_like(trace: Trace, slower: float = 1.12) -> Trace:
    """Return a trace like a predicted one, as a run would give it: slower, and uneven from rank to rank."""
    jitter = slower + 0.03 * trace.rank
    return Trace.from_spans(
        span._replace(start_ns=int(span.start_ns * factor), end_ns=int(span.end_ns * factor))
        for span, factor in zip(trace, jitter.tolist(), strict=True)
    )


def overlay_on(predicted: Trace, trouble: str = "") -> Overlay:
    """Return a predicted step with measured ones laid over it, uneven."""
    measured = measured_like(predicted)
    steps_s = [measured.duration_s * factor for factor in (0.97, 0.99, 1.0, 1.02, 1.08)]
    return Overlay(
        measured, predicted, steps_s, [predicted.duration_s * factor for factor in (0.96, 1.0, 1.03)], trouble
    )


def overlay_of_plan(plan: Plan, ranks: int) -> Overlay:
    """Return the overlay of a small GPT's step."""
    return overlay_on(simulate(WORK, cluster("dgx-h100", ranks), plan).trace)


def held_parts(num_ranks: int = 4) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return what each rank of lesson 8's tensor-parallel GPT holds, and how it is cut."""
    model = GPT(GPTConfig(context=32, num_layers=4, num_heads=4, hidden_size=64), torch.Generator().manual_seed(0))
    weights = {name: one.detach() for name, one in model.named_parameters()}
    splits = {name: split for name, value in weights.items() if (split := _split(name, value)) is not None}
    return [(part, splits) for part in cut_weights(weights, splits, num_ranks)]


def _split(name: str, value: Any) -> SimpleNamespace | None:
    if "token_embedding" in name or "widen" in name:
        return SimpleNamespace(dim=0, sections=(value.shape[0],))
    if "query_key_value" in name:
        return SimpleNamespace(dim=0, sections=(value.shape[0] // 3,) * 3)
    return SimpleNamespace(dim=1, sections=(value.shape[1],)) if "output.weight" in name else None


def over_time(memory: Any) -> tuple[Any, Any]:
    """Return a measured curve like a predicted one: a little less of everything, in milliseconds."""
    times, rows = memory.over_time()
    assert rows.shape[1] == len(KINDS)
    return times * 470_000_000 // times[-1], rows * 98 // 100


def losses(last: float, wild: float = 0.0) -> torch.Tensor:
    """Return the losses of 80 updates, which end at `last` or run away."""
    update = torch.arange(80.0)
    return last + 1.5 * torch.exp(-update / 12) + wild * (update / 60) ** 3


def given_01() -> dict[str, Any]:
    token = messages([[(0, 1)], [(1, 2)], [(2, 3)], [(3, 0)]], 4)
    shift = messages([[(rank, (rank + 1) % 4) for rank in range(4)]], 8, after_ns=20_000)
    play = messages([[(number % 2, 1 - number % 2)] for number in range(6)], 10**6, 238_000)
    sizes = [10, 100, 1_000, 4_000, 16_000, 64_000, 128_000, 256_000, 512_000, 1_000_000]
    times_s = [9.7e-5 + size / 4.1e9 * (1 + 0.1 * (-1) ** n) for n, size in enumerate(sizes)]
    swap = SimpleNamespace(records=deadlock, close=lambda: None)
    inputs = {"sizes": sizes, "times_s": times_s, "shortest": play.to_trace()}
    return {"Ranks": in_turn(token, shift), "pass_token": None, "swap": swap, **inputs}


def given_02() -> dict[str, Any]:
    ring = messages([[(rank, (rank + 1) % 4) for rank in range(4)] for _ in range(6)], 12_000)
    tree = messages([[(rank, rank + 2**step) for rank in range(2**step)] for step in range(3)], 48_000)
    sizes = [4_096, 65_536, 524_288, 2_097_152, 8_388_608]
    ways = np.array([[1e-3, 6e-4, 7e-4, 5e-4]]) + np.outer(sizes, [3e-9, 5e-9, 3.1e-9, 2e-9])
    records = {"ring_all_reduce": ring, "tree_broadcast": tree}
    names = {name: SimpleNamespace(name=name) for name in records}
    steps = [(f"step {step + 1}", "send", step * 90_000, (step + 1) * 90_000, 12_000) for step in range(6)]
    predicted = Trace.from_spans(Span(rank, "communication", *step) for rank in range(4) for step in steps)
    given = {"sizes": sizes, "measured_s": ways, "overlay": overlay_on(predicted)}
    return {"record": lambda what, _: records[what.name], **given, **names}


def given_03() -> dict[str, Any]:
    plans = {rung: Plan(4, gradient_sync=rung) for rung in ("per_parameter", "flat", "bucketed", "overlapped")}
    overlays = {rung: overlay_of_plan(plan, 4) for rung, plan in plans.items()}
    busy = "The machine was not calm: other processes took 0.6 cores while ranks computed."
    overlay = overlay_on(overlays["overlapped"].predicted, busy)
    return {"WORK": WORK, "MACHINE": FOUR, "overlays": overlays, "overlay": overlay}


def given_05() -> dict[str, Any]:
    names = ("top-1 %", "random 10 %", "1 bit, by range", "signs")
    here = Cluster("here", device("h100-sxm"), 2, 1, link("nvlink4"), link("ethernet-10g"))
    overlay = overlay_on(simulate(WORK, here, Plan(2)).trace)
    without = {name: losses(3.2 + number / 9, number == 1) for number, name in enumerate(names)}
    remembering = {name: losses(3.13 + number / 50) for number, name in enumerate(names)}
    curves = {"plain": losses(3.1), "without": without, "remembering": remembering}
    return {**curves, "HOOKS": dict.fromkeys(names), "WORK": WORK, "HERE": here, "CODEC": None, "overlay": overlay}


def given_06() -> dict[str, Any]:
    plain, full = memory_of(WORK, Plan(2)), memory_of(WORK, Plan(2, recompute="full"))
    return {"plain": plain, "over_time": over_time(plain), "full": full, "recomputed_over_time": over_time(full)}


def given_07() -> dict[str, Any]:
    return {"overlay": overlay_of_plan(Plan(2), 2)}


def given_08() -> dict[str, Any]:
    predicted = simulate(WORK, FOUR, Plan(tensor=2))
    spans = predicted.layer_trace
    per_rank = [[(spans.select(spans.rank == rank), None)] * 3 for rank in (0, 1)]
    returned = {"held_parts": held_parts(), "recorded_steps": per_rank}
    return {
        **{name: name for name in returned},
        "ranks": SimpleNamespace(run=lambda name: returned[name]),
        "result": SimpleNamespace(predicted=predicted),
        "overlay": overlay_on(predicted.trace),
    }


def given_09() -> dict[str, Any]:
    one_f_one_b, zb_h1 = (
        simulate_schedule(make_schedule(kind, 4, 8), ActionTimes(1.0, 1.0, 1.0), unit_s=2e-3)
        for kind in ("one_f_one_b", "zb_h1")
    )
    return {"overlay": overlay_on(one_f_one_b.trace), "seen": {"ZB, yours": (measured_like(zb_h1.trace), zb_h1)}}


def given_10() -> dict[str, Any]:
    return {"overlay": overlay_of_plan(Plan(tensor=2, pipeline=2, num_microbatches=2), 4)}


def given_11() -> dict[str, Any]:
    return {"overlay": overlay_of_plan(Plan(context=2), 2)}


INPUTS = {folder.name[:2]: globals().get(f"given_{folder.name[:2]}", dict) for folder in FOLDERS}
