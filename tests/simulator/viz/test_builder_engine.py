"""The builder's engine, run by node: verdicts, places of faults, times, memory, texts, schedules and pars are Python's."""

import collections
import functools
import importlib.util
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from distlab.plan import ActionTimes, ScheduleError, parse_schedule, validate
from simulator import simulate_schedule

HERE = Path(__file__).parent
ENGINE = HERE.parents[2] / "simulator" / "viz" / "builder" / "engine.js"
JUNK = ["x", "F", "0f0", "00F0", "0F01", "0F", "4294967296F0", "1SEND_F0", "0RECV_F0", "3UNSHARD", "0REDUCE_GRAD1",
        "0F0;", "(0F1;3B0)OVERLAP_F_B", "(0F1;)OVERLAP_F_B", " ", "\t", ",,", "\n\n", "\r", "\x0b", "\x1c", "\x85", "\u2028",
        "\xa0", "\ufeff", "\u3000", "٣F0", "-1F0", "0B0.5"]  # fmt: skip


def ask(questions):
    """Ask the engine all questions in one run of node: PATH's, or playwright's own."""
    node, own = shutil.which("node"), importlib.util.find_spec("playwright")
    if not node and own:
        node = str(Path(own.origin).parent / "driver" / "node")
    if not node:
        pytest.skip("there is no node: install it, or playwright, which brings one")
    lines = "\n".join(map(json.dumps, questions))
    command = [node, HERE / "ask_engine.mjs", ENGINE]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def legal_order(rng, site):
    """Let ready actions run in a drawn order; return each rank's row and the moves."""
    ranks, home, split, num_microbatches = site
    last, done, rows, moves = len(home) - 1, set(), [[] for _ in range(ranks)], []
    weight = {kind: rng.random() + 0.01 for kind in "FBIW"}  # orders of a different character

    def ready():
        for s in range(last + 1):
            for m in range(num_microbatches):
                back = "BI"[split[s, m]]
                if (s, "F", m) not in done:
                    if s == 0 or (s - 1, "F", m) in done:
                        yield s, "F", m
                elif (s, back, m) not in done:
                    if s == last or (s + 1, "I", m) in done or (s + 1, "B", m) in done:
                        yield s, back, m
                elif back == "I" and (s, "W", m) not in done:
                    yield s, "W", m

    while options := list(ready()):
        action = rng.choices(options, [weight[kind] for _, kind, _ in options])[0]
        done.add(action)
        moves.append((home[action[0]], "{}{}{}".format(*action)))
        rows[home[action[0]]].append(moves[-1][1])
    return rows, moves


def drawn_site(rng):
    """Stages on ranks in a loop, as a V or anyhow (a rank may have none); each backward pass whole or split."""
    ranks, per, num_microbatches = rng.randint(1, 5), rng.randint(1, 3), rng.randint(1, 6)
    loop = [stage % ranks for stage in range(ranks * per)]
    folded = [r if stage // ranks % 2 == 0 else ranks - 1 - r for stage, r in enumerate(loop)]
    home = rng.choice([loop, loop, folded, [rng.randrange(ranks) for _ in loop]])
    whole = rng.choice([0.0, 1.0, 0.5])
    split = {(s, m): rng.random() >= whole for s in range(len(home)) for m in range(num_microbatches)}
    return ranks, home, split, num_microbatches


def spoiled(rng, rows):
    """Make one or two faults: swap, move, drop or repeat an action, or change its kind or number."""
    rows = [list(row) for row in rows]
    for _ in range(rng.choice([1, 1, 2])):
        if not (full := [row for row in rows if row]):
            break
        row, other = rng.choice(full), rng.choice(full)
        i, j = rng.randrange(len(row)), rng.randrange(len(row))
        match rng.choice(["swap"] * 4 + ["across", "drop", "repeat", "kind", "number"]):
            case "swap":
                row[i], row[j] = row[j], row[i]
            case "across":
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


def text_of(rows):
    return "\n".join(",".join(row) or "," for row in rows)


def drawn_times(rng, num_stages):
    """A number or one per stage: whole, of one digit or of many; some stages may be slow."""

    def draw():
        number = rng.choice([lambda: rng.randint(0, 5), lambda: round(rng.uniform(0, 4), 1), lambda: rng.uniform(0, 3)])
        return [number() for _ in range(num_stages)] if rng.random() < 0.5 else number()

    slow = rng.choice([1, [rng.choice([1, 1.5, 0.7]) for _ in range(num_stages)]])
    return {"F": draw(), "I": draw(), "W": draw(), "message": rng.choice([0, draw(), draw()]), "slow": slow}


def in_python(times, num_stages):
    def each(value, factors=1):
        value, factors = ([x] * num_stages if not isinstance(x, list) else x for x in (value, factors))
        return [x * factor for x, factor in zip(value, factors, strict=True)]

    return ActionTimes(*(each(times[kind], times["slow"]) for kind in "FIW"), each(times["message"]))


def expected(text, times, whole):
    """What Python says of an order: its fault, or its times with slack and waits by their definitions."""
    plan = parse_schedule(text)
    try:
        _ = whole and validate(plan)
    except ScheduleError as error:
        return {"rank": error.rank, "step": error.step, "action": str(error.action)}, None
    ran = simulate_schedule(plan, in_python(times, plan.num_stages))
    start, end, need = (column.tolist() for column in (ran.start_ns, ran.end_ns, ran.compiled.needed))
    travels, offsets = ran.compiled.remote.tolist(), ran.order.offsets.tolist()
    wait = [int(ran.handover_ns[ran.order.stage[n]]) if far else 0 for n, far in zip(need, travels, strict=True)]
    free = [0 if i in offsets else end[i - 1] for i in range(len(end))]
    edges = [(i - 1, i, 0) for i in range(len(end)) if i not in offsets]
    edges += [(n, i, wait[i]) for i, n in enumerate(need) if n >= 0]
    after = collections.defaultdict(list)  # of each action: those that need it, and how long they wait
    for a, b, far in edges:
        after[a].append((b, far))

    @functools.cache
    def tail(i):  # the longest way from an action's end to the end of the step
        return max((far + end[b] - start[b] + tail(b) for b, far in after[i]), default=0)

    chains = []
    for i in range(len(end)):
        chain, at = [], i
        while start[at] > free[at]:
            at = need[at]
            chain.append(at)
        chains.append(chain)
    length = max(end, default=0)
    numbers = {
        "start": start,
        "end": end,
        "length": length,
        "bubble": ran.bubble_fraction,
        "peaks": list(ran.peak_in_flight),
    }
    numbers |= {"span": round(ran.steady_s * 1e9), "slack": [length - e - tail(i) for i, e in enumerate(end)]}
    return None, numbers | {"chains": chains, "edges": {(a, b): end[a] + far for a, b, far in edges}}


def drawn_orders(rng, count):
    """Yield questions about orders: legal, half-built, spoiled, or rows from several legal orders (deadlocks)."""
    for case in range(count):
        site = drawn_site(rng)
        rows, moves = legal_order(rng, site)
        whole = case % 8 != 4
        if case % 4 == 3:
            rows = [rng.choice([row, legal_order(rng, site)[0][rank]]) for rank, row in enumerate(rows)]
        elif case % 2:
            rows = spoiled(rng, rows)
        elif not whole:
            kept = moves[: rng.randint(len(site[1]), len(moves))]
            rows = [[name for home, name in kept if home == rank] for rank in range(site[0])]
            if parse_schedule(text_of(rows)).num_stages < len(site[1]):  # its last stage would be a different one
                continue
        if any(rows):
            text = text_of(rows)
            times = drawn_times(rng, parse_schedule(text).num_stages)
            yield {"ask": "run", "text": text, "times": times, "whole": whole}


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 2400), *(pytest.param(n, 6000, marks=pytest.mark.soak) for n in (1, 2, 3))]
)
def test_orders_have_the_verdict_the_place_and_the_times_of_python(seed, count):
    rng = random.Random(seed)
    questions, legal = list(drawn_orders(rng, count)), 0
    for asked, answer in zip(questions, ask(questions), strict=True):
        fault, numbers = expected(asked["text"], asked["times"], asked["whole"])
        assert answer["moved"] == (fault is None), asked
        found = answer["fault"]
        assert (found and {key: found[key] for key in ("rank", "step", "action")}) == fault, asked
        if fault:
            continue
        legal += 1
        chains, edges, path = numbers.pop("chains"), numbers.pop("edges"), answer["path"]
        assert {key: answer[key] for key in numbers} == numbers, asked
        assert [chain for chain, _ in answer["why"]] == chains, asked
        assert [bool(words) for _, words in answer["why"]] == [bool(chain) for chain in chains]
        assert answer["start"][path[0]] == 0
        assert answer["end"][path[-1]] == answer["length"]
        assert all(edges[a, b] == answer["start"][b] for a, b in zip(path, path[1:], strict=False))
        assert not any(answer["slack"][i] for i in path)
    assert 0.4 * count < legal < 0.8 * count


def test_texts_are_read_alike():
    rng, texts, agreed = random.Random(4), [], collections.Counter()
    for _ in range(600):
        text = text_of(legal_order(rng, drawn_site(rng))[0])[: rng.choice([30, 200])].rpartition(",")[0]
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
        agreed[said.startswith("line")] += 1
    assert min(agreed.values()) > 50
