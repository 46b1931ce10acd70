"""The levels of the schedule builder, and the par of each: the shortest of the library's schedules that fit it.

A pipeline is plain data, the same in levels.toml, in JSON and in engine.js. Memory is counted in activations of one
stage of one micro-batch, as `PipelineRun.peak_in_flight` counts them.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from distlab.plan import SCHEDULES, ActionTimes, make_schedule, parse_schedule
from simulator.pipeline.simulate_schedule import simulate_schedule


def times_of(pipeline: dict[str, Any]) -> ActionTimes:
    """Return the times of a pipeline's actions; `slow` are factors of each stage's F, I and W."""
    times = {"message": 0, "slow": 1} | pipeline["times"]
    forward, inputs, weights = (np.multiply(times[kind], times["slow"]).tolist() for kind in "FIW")
    return ActionTimes(forward, inputs, weights, times["message"])


def shortest(pipeline: dict[str, Any], names: Iterable[str] = SCHEDULES) -> tuple[float, str, str] | None:
    """Return milliseconds, title and text of the shortest of these schedules that fits a pipeline and its limit.

    Where no B may be placed, an I and its W stand for it.
    """
    ranks, kinds, limit, found = pipeline["ranks"], pipeline["kinds"], pipeline.get("limit"), []
    stages = len(pipeline["home"]) // ranks
    options: dict[str, Any] = {"times": times_of(pipeline), "memory_limit": limit, "stages_per_rank": stages}
    for name in names:
        family = SCHEDULES[name]
        lies = {"one": stages == 1, "loop": stages > 1, "v": stages == 2}[family.placement]
        if not lies or list(family.home(ranks, stages)) != pipeline["home"]:
            continue
        text = str(make_schedule(name, ranks, pipeline["microbatches"], **options))
        text = text if "B" in kinds else re.sub(r"(\d+)B(\d+)", r"\1I\2,\1W\2", text)
        run = simulate_schedule(parse_schedule(text), options["times"])
        if {*re.findall("[A-Z]", text)} <= {*kinds} and (not limit or max(run.peak_in_flight) <= limit):
            found.append((int(run.end_ns.max()) / 1e6, family.title, text))
    return min(found, key=lambda one: one[0], default=None)


@cache
def levels_json() -> str:
    """Return the levels as JSON: pipelines with `id`, words, `par` in ms, and `best`, the schedule of par."""
    levels = tomllib.loads(Path(__file__).with_name("levels.toml").read_text("utf-8"))["level"]
    for number, level in enumerate(levels, 1):
        family = next(one for one in SCHEDULES.values() if one.placement == level["placement"])
        level |= {"id": str(number), "home": list(family.home(level["ranks"], family.stages_per_rank()))}
        best = shortest(level)
        assert best is not None, f"no schedule fits level {number}"
        level |= {"par": best[0], "best": {"title": best[1], "text": best[2]}}
    return json.dumps(levels)
