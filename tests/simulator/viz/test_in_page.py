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
from simulator.memory.memory import KINDS, memory_of
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
const [PLAYERS, Pen] = window.distlabPlayers;
for (const [name, data, values] of JSON.parse(require("fs").readFileSync(0))) {
  const state = PLAYERS[name].state(data, values), pen = new Pen(600);
  PLAYERS[name].draw(pen, state);
  if (/NaN|undefined/.test(pen.svg)) throw new Error(`${name} ${JSON.stringify(values)}: ${pen.svg}`);
  console.log(JSON.stringify([...PLAYERS[name].say(state), name === "memory" ? state.rows : []]));
}"""
RANDOM = random.Random(13)
MEMORY = computed.memory()


def wire():
    slow = (Protocol(RANDOM.uniform(1e-7, 1e-5), RANDOM.uniform(1e8, 1e9), RANDOM.choice([1e4, 1e7])),)
    fast = Protocol(RANDOM.uniform(1e-6, 1e-4), RANDOM.uniform(1e8, 1e11))
    more = {"start_s": RANDOM.choice([0.0, 3e-5]), "idle_steps": RANDOM.choice([0.0, 0.4])}
    return RANDOM.choice([link("nvlink4"), Link("w", (*slow, fast), **more)])


def memory(model, device, ranks, stage, recompute, precision, microbatch, tensor):
    width = {"recompute": recompute, "precision": computed.PRECISIONS[precision], "sharding": Sharding(stage)}
    plan = Plan(ranks, tensor=tensor, sequence_parallel=tensor > 1, **width)
    found = memory_of(model_by_name(model, microbatch_size=microbatch), plan)
    shown = draw_memory(found, capacity_bytes=MEMORY["devices"][device])
    return MEMORY, shown.title, shown.words, found.over_time()[1][:, : len(KINDS) - 1].tolist()


def cost(price, tokens, failures, restart):
    run = Run(tokens, price, Failures(failures, restart_s=60 * restart))
    shown = draw_cost_curve(curve([bill(step, run) for step in computed.steps_of_cost()]))
    return computed.cost(), shown.title, shown.words.removeprefix(f"{shown.title}. "), []


def ring(ranks, bytes, link, step):
    own, part, calls = wire(), round(bytes / ranks), []
    ns = round(1e9 * min(p.latency_s + part / p.bytes_per_s for p in own.protocols if part <= p.most_bytes))
    for number in range(2 * ranks - 2):
        for rank, (op, to) in ((rank, end) for rank in range(ranks) for end in (("send", 1), ("recv", -1))):
            times = (2 * number * ns, 2 * number * ns, (2 * number + 1) * ns)
            calls.append(call(rank, op, (rank + to) % ranks, times, num_bytes=part))
    shown = draw_ring_frame(ring_steps(calls), step % (2 * ranks - 1))
    return {"links": {link: computed.link_data(own)}}, shown.title, shown.words.removeprefix(f"{shown.title}. "), []


def step(sync, ranks, link, bucket, samples, moment):
    own, width, layers = wire(), 64 * RANDOM.randint(1, 9), RANDOM.randint(1, 6)
    sizes = {"hidden_size": width, "num_layers": layers, "num_heads": 4, "vocab_size": RANDOM.randint(100, 20_000)}
    workload, machine = gpt_workload(sequence_length=64, microbatch_size=int(samples), **sizes), computed.on_wire(own)
    found = simulate(workload, machine, Plan(ranks, gradient_sync=sync, bucket_bytes=bucket))
    first, each, *_ = draw_train_step(found.trace, moment * found.duration_s).words.split("\n")
    title, rest = first.split(". ", 1)
    data = {"memory": machine.device.memory_bytes_per_s, "links": {link: computed.link_data(own)}}
    data["models"] = {samples: computed.step_of(workload, machine)}
    return data, title, f"{rest}\n{each.replace('rank 0:', 'each rank:', 1)}", []


def parts(said):
    """Return the words and the numbers of a title and a text."""
    pieces = re.split(r"(\d[\d,]*\.?\d*)", " | ".join(said))
    return pieces[::2], [float(piece.replace(",", "")) for piece in pieces[1::2]]


DRAWN = {  # what draws a control's values: those that pages offer, and more
    memory: {"model": [*MEMORY["models"]], "device": [*MEMORY["devices"]], "ranks": [1, 2, 8, 64, 1024], "stage": range(4),
             "recompute": ["none", "selective", "operators", "full"], "precision": [*MEMORY["precisions"]],
             "microbatch": [1, 4, 32], "tensor": [1, 2, 8]},
    cost: {"price": [0.5, 2.5, 7.9], "tokens": [1e9, 15e12, 1e14], "failures": [*RATES], "restart": range(1, 121)},
    ring: {"ranks": range(2, 9), "bytes": [1000, 999_983, 123_456_789], "link": ["w"], "step": range(15)},
    step: {"sync": ["per_parameter", "flat", "bucketed", "overlapped"], "ranks": [2, 8, 64], "link": ["w"],
           "bucket": range(10**5, 10**7), "samples": "1248", "moment": [0.0, 0.1, 0.3, 0.55, 0.77, 0.98, 1.0]},
}  # fmt: skip


def test_what_a_page_computes_is_what_python_computes():
    node, own = shutil.which("node"), importlib.util.find_spec("playwright")
    if not node and not own:
        pytest.skip("there is no node: install it, or playwright, which brings one")
    node = node or str(Path(own.origin).parent / "driver" / "node")
    asked, expected = [], []
    for make, controls in list(DRAWN.items()) * 24:
        values = {name: RANDOM.choice(choices) for name, choices in controls.items()}
        data, *answer = make(**values)
        if make is ring:
            values["step"] %= 2 * values["ranks"] - 1
        asked.append((make.__name__, data, values))
        expected.append(answer)
    script = f"const window = {{}};\n{computed.script()}{ANSWER}"
    done = subprocess.run([node, "-e", script], input=json.dumps(asked), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    for (name, _, values), (*said, rows), line in zip(asked, expected, done.stdout.splitlines(), strict=True):
        *shown, found = json.loads(line)
        (words, numbers), (expected_words, expected_numbers) = map(parts, (shown, said))
        assert (words, found) == (expected_words, rows), (name, values)
        assert numbers == pytest.approx(expected_numbers, rel=0.006), (name, values)  # a tie in the third digit
