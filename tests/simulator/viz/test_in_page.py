"""Widgets that pages compute say, for drawn values of their controls, word for word what Python says."""

import importlib.util
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from viz_traces import call

from distlab.plan import Link, Plan, Protocol, Sharding
from simulator import gpt_workload, link, simulate
from simulator.memory.memory import memory_of
from simulator.models.by_name import model_by_name
from simulator.runs.failures import RATES, Failures
from simulator.runs.money import Run, bill, curve
from simulator.viz import draw_memory, draw_train_step
from simulator.viz.collectives.ring import draw_ring_frame, ring_steps
from simulator.viz.runs import draw_cost_curve

pytest.importorskip("anywidget", reason="what pages are given stands beside the panels")
sys.path.append(str(Path(__file__).resolve().parents[3] / "docs" / "site"))
from site_build import computed  # noqa: E402

ANSWER = """
const { PLAYERS, Pen } = window.distlabPlayers, { given, asked } = JSON.parse(require("fs").readFileSync(0));
for (const [name, data, values] of asked) {
  const state = PLAYERS[name].state({ ...given[name], ...data }, values), pen = new Pen(600);
  PLAYERS[name].draw(pen, state);
  if (/NaN|undefined/.test(pen.svg)) throw new Error(`${name} ${JSON.stringify(values)}: ${pen.svg}`);
  console.log(JSON.stringify([...PLAYERS[name].say(state), name === "memory" ? state.rows : []]));
}"""
DRAW = random.Random(13)
GIVEN = {"memory": computed.memory(), "cost": computed.cost()}


def links():
    """Return a wire, and what a page is given of it."""
    slow = Protocol(DRAW.uniform(1e-7, 1e-5), DRAW.uniform(1e8, 1e9), DRAW.choice([1e4, 1e7]))
    fast, more = Protocol(DRAW.uniform(1e-6, 1e-4), DRAW.uniform(1e8, 1e11)), {"start_s": 3e-5, "idle_steps": 0.4}
    wire = DRAW.choice([link("nvlink4"), Link("w", (slow, fast)), Link("w", (fast,), **more)])
    return wire, {"links": {"w": computed.link_data(wire)}}


def memory(model, device, ranks, stage, recompute, precision, microbatch, tensor):
    more = {"precision": computed.PRECISIONS[precision], "sharding": Sharding(stage), "sequence_parallel": tensor > 1}
    workload = model_by_name(model, microbatch_size=microbatch)
    found = memory_of(workload, Plan(ranks, tensor=tensor, recompute=recompute, **more))
    shown = draw_memory(found, capacity_bytes=GIVEN["memory"]["devices"][device])
    return {}, shown.title, shown.words, found.over_time()[1][:, :-1].tolist()  # no errors of compression


def cost(price, tokens, failures, restart):
    run = Run(tokens, price, Failures(failures, restart_s=60 * restart))
    shown = draw_cost_curve(curve([bill(step, run) for step in computed.cost_steps()]))
    return {}, shown.title, shown.words.removeprefix(f"{shown.title}. "), []


def ring(ranks, bytes, link, step):
    (wire, data), part = links(), round(bytes / ranks)
    ns = round(1e9 * min(p.latency_s + part / p.bytes_per_s for p in wire.protocols if part <= p.most_bytes))
    moments = [(at * 2 * ns, at * 2 * ns, (at * 2 + 1) * ns) for at in range(2 * ranks - 2)]
    sides = [(rank, op, (rank + to) % ranks) for rank in range(ranks) for op, to in (("send", 1), ("recv", -1))]
    steps = ring_steps([call(*side, times, num_bytes=part) for times in moments for side in sides])
    shown = draw_ring_frame(steps, min(step, 2 * ranks - 2))
    return data, shown.title, shown.words.removeprefix(f"{shown.title}. "), []


def step(sync, ranks, link, bucket, samples, moment):
    (wire, data), sizes = links(), {"num_heads": 4, "sequence_length": 64, "microbatch_size": int(samples)}
    sizes |= {
        "hidden_size": 64 * DRAW.randint(1, 9),
        "num_layers": DRAW.randint(1, 6),
        "vocab_size": DRAW.randint(99, 9999),
    }
    workload, machine = gpt_workload(**sizes), computed.on_wire(wire)
    found = simulate(workload, machine, Plan(ranks, gradient_sync=sync, bucket_bytes=bucket))
    first, each, *_ = draw_train_step(found.trace, moment * found.duration_s).words.split("\n")
    data |= {"models": {samples: computed.step_of(workload, machine)}, "memory": machine.device.memory_bytes_per_s}
    title, rest = first.split(". ", 1)
    return data, title, f"{rest}\n{each.replace('rank 0:', 'each rank:', 1)}", []


DRAWN = {  # what draws a control's values: those that pages offer, and more
    memory: {"model": [*GIVEN["memory"]["models"]], "device": [*GIVEN["memory"]["devices"]],
             "ranks": [1, 2, 8, 64, 1024], "stage": range(4), "recompute": ["none", "selective", "operators", "full"],
             "precision": [*computed.PRECISIONS], "microbatch": [1, 4, 32], "tensor": [1, 2, 8]},
    cost: {"price": [0.5, 2.5, 7.9], "tokens": [1e9, 15e12, 1e14], "failures": [*RATES], "restart": range(1, 121)},
    ring: {"ranks": range(2, 9), "bytes": [1000, 999_983, 123_456_789], "link": ["w"], "step": range(15)},
    step: {"sync": ["per_parameter", "flat", "bucketed", "overlapped"], "ranks": [2, 8, 64], "link": ["w"],
           "bucket": range(10**5, 10**7), "samples": "1248", "moment": [0.0, 0.1, 0.3, 0.55, 0.77, 0.98, 1.0]},
}  # fmt: skip


def parts(said):
    """Return the words and the numbers of a title and a text."""
    pieces = re.split(r"(\d[\d,]*\.?\d*)", " | ".join(said))
    return pieces[::2], [float(piece.replace(",", "")) for piece in pieces[1::2]]


def test_what_a_page_computes_is_what_python_computes():
    node, own = shutil.which("node"), importlib.util.find_spec("playwright")
    node = node or (own and Path(own.origin).with_name("driver") / "node")
    if not node:
        pytest.skip("there is no node: install it, or playwright, which brings one")
    asked, expected = [], []
    for make, controls in list(DRAWN.items()) * 16:
        values = {name: DRAW.choice(choices) for name, choices in controls.items()}
        data, *answer = make(**values)
        if make is ring:
            values["step"] = min(values["step"], 2 * values["ranks"] - 2)
        asked.append((make.__name__, data, values))
        expected.append(answer)
    command = [node, "-e", f"const window = {{}};\n{computed.script()}{ANSWER}"]
    given = json.dumps({"given": GIVEN, "asked": asked})
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    for (name, _, values), (*said, rows), line in zip(asked, expected, done.stdout.splitlines(), strict=True):
        *shown, found = json.loads(line)
        (words, numbers), (expected_words, expected_numbers) = map(parts, (shown, said))
        assert (words, found) == (expected_words, rows), (name, values)
        assert numbers == pytest.approx(expected_numbers, rel=0.0101), (name, values)  # a tie in the third digit
