"""Widgets that pages compute say, for values drawn from their controls, word for word what Python says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from viz_traces import call, path_of_node

import simulator as sim
from distlab.plan import Plan, Sharding
from simulator.viz import draw_cost_curve, draw_memory, draw_train_step
from simulator.viz.collectives.ring import draw_ring_frame, ring_steps

pytest.importorskip("anywidget", reason="what pages are given stands beside the panels")
sys.path.append(str(Path(__file__).resolve().parents[3] / "docs" / "site"))
from site_build import computed  # noqa: E402

ANSWER = """
const { PLAYERS, Pen } = window.distlabPlayers, given = eval(`(${require("fs").readFileSync(0)})`);
let seed = 13;
const drawn = (options) => options[(seed = (seed * 48271) % 2147483647) % options.length];
for (const [name, { data }] of Object.entries(given)) for (let turn = 0; turn < 20; turn++) {
  const { controls, state, say, draw } = PLAYERS[name], pen = new Pen(600), values = { ...PLAYERS[name].begin };
  controls(data, values).forEach(([key], at) => { values[key] = drawn(controls(data, values)[at][2]); });
  const facts = state(data, values);
  draw(pen, facts);
  const drawing = JSON.stringify(pen.parts); // where null is what is no number
  if (/null|NaN|undefined/.test(drawing)) throw new Error(`${name} ${JSON.stringify(values)}: ${drawing}`);
  console.log(JSON.stringify([name, values, say(facts), name === "memory" ? facts.rows : []]));
}"""


def memory(model, device, ranks, stage, recompute, precision, microbatch, tensor):
    more = {"precision": computed.PRECISIONS[precision], "sharding": Sharding(stage), "sequence_parallel": tensor > 1}
    plan = Plan(ranks, tensor=tensor, recompute=recompute, **more)
    found = sim.memory_of(sim.model_by_name(model, microbatch_size=microbatch), plan)
    shown = draw_memory(found, capacity_bytes=sim.device(device).memory_bytes)
    return (shown.title, shown.words), found.over_time()[1][:, :-1].tolist()  # no errors of compression


def cost(price, tokens, failures, restart):
    run = sim.Run(tokens, price, sim.Failures(failures, restart_s=60 * restart))
    shown = draw_cost_curve(sim.curve([sim.bill(step, run) for step in computed.cost_steps()]))
    return shown.words.split(". ", 1), []


def ring(ranks, bytes, link, step):
    protocols, part = sim.link(link).protocols, round(bytes / ranks)
    ns = round(1e9 * min(p.latency_s + part / p.bytes_per_s for p in protocols if part <= p.most_bytes))
    moments = [(at * 2 * ns, at * 2 * ns, (at * 2 + 1) * ns) for at in range(2 * ranks - 2)]
    sides = [(rank, op, (rank + to) % ranks) for rank in range(ranks) for op, to in (("send", 1), ("recv", -1))]
    steps = ring_steps([call(*side, times, num_bytes=part) for times in moments for side in sides])
    return draw_ring_frame(steps, step).words.split(". ", 1), []


def step(sync, ranks, link, bucket, samples, moment, duration):
    workload = sim.gpt_workload(microbatch_size=int(samples), **computed.MODEL)
    machine = computed.on_wire(sim.link(link))
    found = sim.simulate(workload, machine, Plan(ranks, gradient_sync=sync, bucket_bytes=bucket))
    assert duration == round(found.duration_s * 1e9)
    first, each, *_ = draw_train_step(found.trace, moment * found.duration_s).words.split("\n")
    return f"{first}\n{each.replace('rank 0:', 'each rank:', 1)}".split(". ", 1), []


def parts(said):
    """Return the words and the numbers of a title and a text."""
    pieces = re.split(r"(\d[\d,]*\.?\d*)", " | ".join(said))
    return pieces[::2], [float(piece.replace(",", "")) for piece in pieces[1::2]]


def test_what_a_page_computes_is_what_python_computes():
    command = [path_of_node(), "-e", f"const window = {{}};\n{computed.script()}{ANSWER}"]
    given = json.dumps({name: computed.widget(name) for name in ("memory", "cost", "ring", "step")})
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = list(map(json.loads, done.stdout.splitlines()))
    assert len(answers) == 80
    for name, values, shown, rows in answers:
        said, expected_rows = globals()[name](**values)
        (words, numbers), (expected_words, expected_numbers) = map(parts, (shown, said))
        assert (words, rows) == (expected_words, expected_rows), (name, values)
        assert numbers == pytest.approx(expected_numbers, rel=0.0101), (name, values)  # a tie in the third digit
