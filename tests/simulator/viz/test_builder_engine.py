"""The builder's engine, run by node, says what Python says: faults and their places, times, memory, texts, names, pars."""

import collections
import functools
import importlib.util
import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from distlab.plan import SCHEDULES, ScheduleError, make_schedule, parse_schedule, validate
from distlab.plan.schedules.families import TIMED
from simulator import simulate_schedule
from simulator.viz.builder.levels import levels_json, shortest, times_of

HERE = Path(__file__).parent
SCRIPTS = [HERE.parents[2] / "simulator" / "viz" / "builder" / name for name in ("engine.js", "known.js")]
BY_HAND = [name for name in SCHEDULES if name not in TIMED]
JUNK = [
    "x",
    "F",
    "0f0",
    "00F0",
    "0F01",
    "0F",
    "4294967296F0",
    "1SEND_F0",
    "3UNSHARD",
    "0REDUCE_GRAD1",
    "(0F1;3B0)OVERLAP_F_B",
    "(0F1;)OVERLAP_F_B",
]
JUNK += [*" \t\r\x0b\x1c\x85\u2028\xa0\ufeff\u3000", "\n\n", "٣F0", "-1F0", "0F0;"]


def ask(questions):
    """Ask the engine all questions in one run of node: PATH's, or playwright's own."""
    node, own = shutil.which("node"), importlib.util.find_spec("playwright")
    node = node or (own and Path(own.origin).with_name("driver") / "node")
    if not node:
        pytest.skip("there is no node: install it, or playwright, which brings one")
    lines = "\n".join(map(json.dumps, questions))
    command = [node, HERE / "ask_engine.mjs", *SCRIPTS]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def ready(site, done):
    """Yield what may run once `done` has."""
    _, home, split, num_microbatches = site
    for s in range(len(home)):
        for m in range(num_microbatches):
            back = "BI"[split[s, m]]
            if (s, "F", m) not in done:
                if s == 0 or (s - 1, "F", m) in done:
                    yield s, "F", m
            elif (s, back, m) not in done:
                if s == len(home) - 1 or not done.isdisjoint({(s + 1, "I", m), (s + 1, "B", m)}):
                    yield s, back, m
            elif back == "I" and (s, "W", m) not in done:
                yield s, "W", m


def legal_moves(rng, site):
    """Let ready actions run in a drawn order."""
    done = {}  # in their order
    weight = {kind: rng.random() + 0.01 for kind in "FBIW"}  # orders of a different character
    while options := list(ready(site, done.keys())):
        done[rng.choices(options, [weight[kind] for _, kind, _ in options])[0]] = True
    return list(done)


def rows_of(site, moves):
    return [["{}{}{}".format(*one) for one in moves if site[1][one[0]] == rank] for rank in range(site[0])]


def text_of(rows):
    return "\n".join(",".join(row) or "," for row in rows)


def drawn_site(rng, ranks=5, per=3, microbatches=6):
    """Stages on ranks in a loop, as a V or anyhow (a rank may have none); each backward pass whole or split."""
    ranks, per, microbatches = rng.randint(1, ranks), rng.randint(1, per), rng.randint(1, microbatches)
    loop = [stage % ranks for stage in range(ranks * per)]
    folded = [r if stage // ranks % 2 == 0 else ranks - 1 - r for stage, r in enumerate(loop)]
    home = rng.choice([loop, loop, folded, [rng.randrange(ranks) for _ in loop]])
    whole = rng.choice([0.0, 1.0, 0.5])
    split = {(s, m): rng.random() >= whole for s in range(len(home)) for m in range(microbatches)}
    return ranks, home, split, microbatches


def spoiled(rng, rows):
    """Make one or two faults: swap, move, drop or repeat an action, or change its kind or number."""
    for _ in range(rng.choice([1, 1, 2])):
        if not (full := [row for row in rows if row]):
            break
        row, other = rng.choice(full), rng.choice(full)
        i, j = rng.randrange(len(row)), rng.randrange(len(row))
        match rng.choice(["swap"] * 4 + ["move", "drop", "repeat", "kind", "number"]):
            case "swap":
                row[i], row[j] = row[j], row[i]
            case "move":
                other.insert(rng.randint(0, len(other)), row.pop(i))
            case "drop":
                del row[i]
            case "repeat":
                row.insert(j, row[i])
            case "kind":
                row[i] = row[i].translate(str.maketrans("FBIW", rng.choice(["BFWI", "IIBB", "WWFF"])))
            case "number":
                row[i] = row[i][:-1] + str(rng.choice([0, 3, 7, 11]))
    return rows


def drawn_times(rng, num_stages):
    """A number or one per stage: whole, of one digit or of many; some stages may be slow."""

    def draw():
        number = rng.choice([lambda: rng.randint(0, 5), lambda: round(rng.uniform(0, 4), 1), lambda: rng.uniform(0, 3)])
        return [number() for _ in range(num_stages)] if rng.random() < 0.5 else number()

    slow = rng.choice([1, [rng.choice([1, 1.5, 0.7]) for _ in range(num_stages)]])
    return {"F": draw(), "I": draw(), "W": draw(), "message": rng.choice([0, draw(), draw()]), "slow": slow}


def drawn_orders(rng, count):
    """Yield questions about orders: legal, half-built, spoiled, or rows from two legal orders (often a deadlock)."""
    for case in range(count):
        site, whole = drawn_site(rng), case % 8 != 4
        moves = legal_moves(rng, site)
        if not whole:  # but with its last stage
            least = 1 + next(i for i, (stage, _, _) in enumerate(moves) if stage == len(site[1]) - 1)
            moves = moves[: rng.randint(least, len(moves))]
        rows = rows_of(site, moves)
        if case % 4 == 3:
            rows = [rng.choice(pair) for pair in zip(rows, rows_of(site, legal_moves(rng, site)), strict=True)]
        elif case % 2:
            rows = spoiled(rng, rows)
        if any(rows):
            times = drawn_times(rng, parse_schedule(text_of(rows)).num_stages)
            yield {"ask": "run", "text": text_of(rows), "times": times, "whole": whole}


def expected(text, times, whole):
    """What Python says of an order: its fault; or its times, with slack and waits by their definitions, and its edges."""
    plan = parse_schedule(text)
    try:
        _ = whole and validate(plan)
    except ScheduleError as error:
        return {"rank": error.rank, "step": error.step, "action": str(error.action)}, {}, {}
    ran = simulate_schedule(plan, times_of({"times": times}))
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
    numbers |= {"peaks": list(ran.peak_in_flight), "span": round(ran.steady_s * 1e9)}
    numbers |= {"slack": [length - e - tail(i) for i, e in enumerate(end)], "chains": [*map(chain, range(len(end)))]}
    return None, numbers, {(a, b): end[a] + wait for (a, b), wait in edges.items()}


SEEDS = [(0, 2400), *(pytest.param(seed, 6000, marks=pytest.mark.soak) for seed in (1, 2, 3))]


@pytest.mark.parametrize(("seed", "count"), SEEDS)
def test_orders_have_the_verdict_the_place_and_the_times_of_python(seed, count):
    questions, legal = list(drawn_orders(random.Random(seed), count)), 0
    for asked, answer in zip(questions, ask(questions), strict=True):
        fault, numbers, edges = expected(asked["text"], asked["times"], asked["whole"])
        found, path = answer["fault"], answer.get("path")
        assert (found and {key: found[key] for key in ("rank", "step", "action")}) == fault, asked
        assert answer["moved"] == (fault is None), asked
        assert {key: answer[key] for key in numbers} == numbers, asked
        if path:
            legal += 1
            assert [bool(words) for words in answer["why"]] == [bool(chain) for chain in numbers["chains"]]
            assert (answer["start"][path[0]], answer["end"][path[-1]]) == (0, answer["length"])
            assert all(edges[a, b] == answer["start"][b] for a, b in zip(path, path[1:], strict=False))
            assert not any(answer["slack"][i] for i in path)
    assert 0.4 * count < legal < 0.8 * count


def test_texts_are_read_alike():
    rng, texts, refused = random.Random(4), [], collections.Counter()
    for _ in range(600):
        site = drawn_site(rng)
        text = text_of(rows_of(site, legal_moves(rng, site)))[: rng.choice([30, 200])].rpartition(",")[0]
        for _ in range(rng.randint(1, 3)):
            i = rng.randint(0, len(text))
            text = text[:i] + rng.choice([",", "", " "]) + rng.choice(JUNK) + rng.choice([",", "", " "]) + text[i:]
        texts.append(text)
    for text, answer in zip(texts, ask({"ask": "parse", "text": text} for text in texts), strict=True):
        try:
            said = str(parse_schedule(text))
        except ValueError as error:  # the same line and column
            said, answer = str(error).partition(":")[0], answer["error"].partition(":")[0]
        assert answer == said, repr(text)
        refused[said.startswith("line")] += 1
    assert min(refused.values()) > 50


def test_known_schedules_are_those_of_python_and_are_named_whatever_the_numbers():
    cases = []
    for family in map(SCHEDULES.get, BY_HAND):
        for p, m in [(p, m) for p in range(1, 9) for m in (1, 2, 5, 8, 13)]:
            for v in {"one": [1], "v": [2]}.get(family.placement, [2, 3]):
                text = str(make_schedule(family.name, p, m, stages_per_rank=v))
                cases.append((family, text, {"home": family.home(p, v), "ranks": p, "microbatches": m}))
    for (family, text, site), answer in zip(cases, ask({"ask": "known", **site} for *_, site in cases), strict=True):
        found, named, renumbered = answer[family.title]
        assert found == text
        assert family.title in named["is"]
        assert named == renumbered
    late = [
        re.sub(r",\d+W\d+", "", row) + "".join(re.findall(r",\d+W\d+", row)) for row in text_of_zb_h1().splitlines()
    ]
    asked = [{"ask": "name", "text": text, "home": [0, 1, 2, 3]} for text in ("\n".join(late), text_of_zb_h1())]
    assert [one[key] for one in ask(asked) for key in ("is", "like")] == [[], ["ZB-H1"], ["ZB-H1"], []]


def text_of_zb_h1():
    return str(make_schedule("zb_h1", 4, 8))


def test_par_is_the_shortest_schedule_of_python_within_the_limit():
    rng, sites, fits = random.Random(5), [], 0
    for _ in range(150):
        family = SCHEDULES[rng.choice(BY_HAND)]
        ranks, per = rng.randint(1, 4), {"one": 1, "v": 2}.get(family.placement, rng.randint(2, 3))
        site = {"ranks": ranks, "microbatches": rng.randint(1, 6), "home": list(family.home(ranks, per))}
        site |= {"kinds": rng.choice(["FB", "FIW", "FBIW"]), "limit": rng.choice([None, 1, 2, 4, 6, 9])}
        sites.append(site | {"times": drawn_times(rng, ranks * per)})
    sites += json.loads(levels_json())
    for site, answer in zip(sites, ask({"ask": "par", **site} for site in sites), strict=True):
        best = shortest(site, SCHEDULES if "par" in site else BY_HAND)
        assert answer == (best and [round(best[0] * 1e6), best[1]]), site
        fits += best is not None
    assert 100 < fits < len(sites)


def test_a_dead_end_is_said_at_the_move_that_makes_it():
    """An exhaustive search of what may still run, within the limit, is the judge."""
    rng, asked, alive, dead = random.Random(6), [], [], collections.Counter()
    for _ in range(120):
        site = ranks, home, split, microbatches = drawn_site(rng, 3, 3, 2)
        limits = [rng.randint(1, 4) for _ in range(ranks)]
        options = functools.partial(within, limits, site)
        total, done, moves = sum(2 + is_split for is_split in split.values()), frozenset(), []

        @functools.cache
        def ends(done, options=options, total=total):
            return len(done) == total or any(ends(done | {one}) for one in options(done))

        while can := options(done):
            moves.append(rng.choice(can))
            done |= {moves[-1]}
            alive.append(ends(done))
        asked.append({"ranks": ranks, "microbatches": microbatches, "home": home, "kinds": "FBIW", "limit": limits})
        asked[-1] |= {"ask": "ends", "moves": ["{}{}{}".format(*one) for one in moves]}
    said = [one for answer in ask(asked) for one in answer]
    for (why, dead_end, before), lives in zip(said, alive, strict=True):
        assert (why, dead_end == "", before) == ("", lives, dead_end)
        dead[lives] += 1
    assert min(dead[True], dead[False]) > 100


def within(limits, site, done):
    """List what may run once `done` has, on ranks that hold so much at most."""
    held = collections.Counter(site[1][stage] for stage, kind, _ in done if kind == "F")
    held.subtract(site[1][stage] for stage, kind, _ in done if kind in "BW")
    full = [held[rank] >= limit for rank, limit in enumerate(limits)]
    return [one for one in ready(site, done) if one[1] != "F" or not full[site[1][one[0]]]]
