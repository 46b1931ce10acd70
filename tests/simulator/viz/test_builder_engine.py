"""The builder's engine says what Python says, on drawn cases: verdict, times, memory, texts, names, dead ends, pars."""

import collections
import functools
import json
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
from viz_traces import path_of_node

from distlab.plan import SCHEDULES, make_schedule, parse_schedule, validate, zb_h1
from distlab.plan.schedules.families import TIMED
from simulator import simulate_schedule
from simulator.viz.builder.levels import levels_json, shortest, times_of

HERE = Path(__file__).parent
SCRIPTS = [HERE.parents[2] / "simulator" / "viz" / "builder" / name for name in ("engine.js", "known.js")]
BY_HAND = [name for name in SCHEDULES if name not in TIMED]
JUNK = "x F 0f0 00F0 0F01 0F 4294967296F0 1SEND_F0 3UNSHARD 0REDUCE_GRAD1 (0F1;3B0)OVERLAP_F_B (0F1;)OVERLAP_F_B -1F0"
BLANKS = " \t\r\x0b\x1c\x85\u2028\xa0\ufeff\u3000"


def ask(*questions):
    """Let node draw and answer."""
    command = [path_of_node(), HERE / "draw_orders.mjs", json.dumps(questions), *SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def expected(ran):
    """What Python says of a run, with slack and waits by their definitions; and when what an action needs is there."""
    start, end, need = (column.tolist() for column in (ran.start_ns, ran.end_ns, ran.compiled.needed))
    far, firsts, after = ran.compiled.remote.tolist(), set(ran.order.offsets.tolist()), collections.defaultdict(list)
    edges = {(i - 1, i): 0 for i in range(len(end)) if i not in firsts}
    edges |= {(n, i): far[i] * int(ran.handover_ns[ran.order.stage[n]]) for i, n in enumerate(need) if n >= 0}
    for (a, b), wait in edges.items():
        after[a].append((b, wait))

    @functools.cache
    def tail(i):  # the longest way from an action's end to the end of the step
        return max((wait + end[b] - start[b] + tail(b) for b, wait in after[i]), default=0)

    def chain(i):
        return [need[i], *chain(need[i])] if start[i] > (0 if i in firsts else end[i - 1]) else []

    length = max(end, default=0)
    numbers = {"start": start, "end": end, "length": length, "bubble": ran.bubble_fraction}
    numbers |= {"peaks": list(ran.peak_in_flight), "slack": [length - e - tail(i) for i, e in enumerate(end)]}
    numbers["chains"] = [*map(chain, range(len(end)))]
    return numbers, {(a, b): end[a] + wait for (a, b), wait in edges.items()}


SEEDS = [(7, 2100), *(pytest.param(seed, 6000, marks=pytest.mark.soak) for seed in (1, 2, 3))]


@pytest.mark.parametrize(("seed", "count"), SEEDS)
def test_orders_have_the_verdict_and_the_times_of_python(seed, count):
    seen = collections.Counter()
    for case in ask({"ask": "orders", "seed": seed, "count": count})[0]:
        plan, fault = parse_schedule(case["text"]), ""
        try:
            _ = case["whole"] and validate(plan)
        except ValueError as error:
            fault = getattr(error, "advice", "idle").split()[0]
        assert case["moved"] == (not fault), case
        seen[fault] += 1
        try:
            ran = simulate_schedule(plan, times_of(case))
        except ValueError:  # validate refuses more
            assert fault, case
            continue
        numbers, arrives = expected(ran)
        assert {key: case[key] for key in numbers} == numbers, case
        assert [bool(words) for words in case["why"]] == [bool(chain) for chain in case["chains"]]
        if path := case["path"]:
            assert (case["start"][path[0]], case["end"][path[-1]]) == (0, case["length"])
            assert all(arrives[a, b] == case["start"][b] for a, b in zip(path, path[1:], strict=False))
            assert not any(case["slack"][i] for i in path)
    assert min(seen[first] for first in ("", "idle", "move", "remove", "add", "break")) > 0.01 * count, seen


def test_texts_are_read_alike_or_refused_at_the_same_place():
    refused, junk = collections.Counter(), [*JUNK.split(), *BLANKS, "\n\n", "٣F0", "0F0;"]
    for text, answer in ask({"ask": "texts", "count": 800, "junk": junk})[0]:
        try:
            said = str(parse_schedule(text))
        except ValueError as error:  # "line 2, column 5"
            said = str(error).partition(":")[0]
        assert answer == said, repr(text)
        refused[said.startswith("line")] += 1
    assert min(refused.values()) > 50


def test_known_schedules_are_those_of_python_and_have_names_whatever_the_numbers():
    sites = []
    for (place, v), p, m in product([("one", 1), ("loop", 2), ("loop", 3), ("v", 2)], range(1, 9), (1, 2, 5, 8, 13)):
        families = [SCHEDULES[name] for name in BY_HAND if SCHEDULES[name].placement == place]
        texts = {one.title: str(make_schedule(one.name, p, m, stages_per_rank=v)) for one in families}
        sites.append((texts, {"ask": "known", "home": families[0].home(p, v), "ranks": p, "microbatches": m}))
    for (texts, _), answer in zip(sites, ask(*(site for _, site in sites)), strict=True):
        for title, text in texts.items():
            found, named, renumbered = answer[title]
            assert (found, title in named["is"], renumbered) == (text, True, named)
    text = str(zb_h1(4, 8))
    late = [re.sub(r",\d+W\d+", "", row) + "".join(re.findall(r",\d+W\d+", row)) for row in text.splitlines()]
    named = ask(*({"ask": "name", "text": one, "home": [0, 1, 2, 3]} for one in (text, "\n".join(late))))
    assert named == [{"is": ["ZB-H1"], "like": []}, {"is": [], "like": ["ZB-H1"]}]


def test_par_is_the_shortest_schedule_of_python_within_the_limit():
    levels, fits = json.loads(levels_json()), 0
    for site, answer, stops in ask({"ask": "pars", "count": 200, "sites": levels})[0]:
        best = shortest(site, SCHEDULES if "par" in site else BY_HAND)
        assert (answer and (answer["length"], answer["title"])) == (best and (round(best[0] * 1e6), best[1])), site
        assert not stops, site
        fits += best is not None
    assert 50 < fits < 200
    assert len(levels) == 12
    assert levels[-2]["par"] == levels[1]["par"]  # 1F1B's, in half of its memory
    level = levels[-1]  # "Beat ZB-H1 with less memory"; a whole stage is two of the level's
    run = simulate_schedule(zb_h1(3, 4), times_of({"times": level["times"] | {"slow": 2}}))
    assert f"takes {run.duration_s * 1e3:g} ms" in level["says"]
    assert level["par"] / 1e3 < run.duration_s
    assert level["limit"] < 2 * max(run.peak_in_flight)


def test_a_dead_end_is_said_at_the_move_that_makes_it():
    counts = ask({"ask": "deadEnds", "count": 150})[0]
    assert set(counts) == {"alive, is alive", "dead, is dead"}, counts
    assert min(counts.values()) > 100
