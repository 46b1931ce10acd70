"""`pytest -p tests.lessons.short_kernels`: checks and measurements in kernels take seconds, for `make test`.

A check runs on 3 ranks, or on the last of its exercise's numbers; one that finds a stub wrong fails its cell
(test_bodies.py checks the solutions). A measurement takes one short window. What no cell compares is smaller: timings,
drawn trainings and maps. `make soak` runs the cells as they are.
"""

import importlib
from pathlib import Path

from tests.lessons.pictures_in_kernels import at_start_of_kernels

# By lesson: a text of one cell without the tag nbval-check-output, and what stands in its place.
SMALLER = {
    "01": {"repeats=25": "repeats=2", "blocks=40": "blocks=4"},
    "02": {
        "ranks.run(time_all, programs, sizes, 15)": "ranks.run(time_all, programs, sizes, 2)",
        "num_windows=5, steps_per_window=4": "num_windows=1, steps_per_window=2",
        "programs[:3], TRIED[name], 15)": "programs[:3], TRIED[name], 2)",
        "ranks.run(time_levels, 2_097_152, 9)": "ranks.run(time_levels, 2_097_152, 2)",
    },
    "03": {"def side_by_side(num_steps=10)": "def side_by_side(num_steps=4)"},
    "04": {
        "epochs=20, dtype=torch.float32": "epochs=4, dtype=torch.float32",
        "def scaled(batch, epochs=20": "def scaled(batch, epochs=4",
        "num_updates=4": "num_updates=2",
        "for num_updates in (0, 100):": "for num_updates in (0, 3):",
        "blocks=12, steps=10": "blocks=4, steps=2",
    },
    "05": {
        "NUM_STEPS = 80": "NUM_STEPS = 40",
        "SPEEDS = (5e6, 20e6, 80e6, 320e6)": "SPEEDS = (20e6, 320e6)",
        "rounds.append(pair.run(lambda: calibration(QUANTIZE).measure())[0])": "rounds.append(ROUND)",
        "compression, num_steps=7)": "compression, num_steps=4)",
        "def side_by_side(name, num_steps=12)": "def side_by_side(name, num_steps=5)",
    },
    "06": {
        "num_steps=60, lr=3e-4": "num_steps=12, lr=3e-4",
        "ready_to_step(warm_up=10)": "ready_to_step(warm_up=2)",
        "def side_by_side(first, second, num_steps=7)": "def side_by_side(first, second, num_steps=4)",
    },
    "07": {
        "def side_by_side(prepare, theirs, num_steps=10)": "def side_by_side(prepare, theirs, num_steps=4)",
        'block.compile(backend="aot_eager")': 'block.compile(backend="eager")',
    },
    "08": {"def seconds_alone(num_steps=8)": "def seconds_alone(num_steps=3)", "num_steps=12": "num_steps=4"},
    "09": {
        "for _ in range(8)]  # in turns": "for _ in range(2)]  # in turns",
        "schedule, 2, WIDE_BATCH, 5)": "schedule, 1, WIDE_BATCH, 5)",
        "def shortest(step, num_steps=2)": "def shortest(step, num_steps=1)",
        "def turn_by_turn(name, num_steps=3)": "def turn_by_turn(name, num_steps=2)",
    },
    "10": {
        "def step_seconds(order, num_steps=6)": "def step_seconds(order, num_steps=2)",
        "def turn_by_turn(num_steps=6)": "def turn_by_turn(num_steps=2)",
    },
    "11": {
        "def side_by_side(num_steps=5)": "def side_by_side(num_steps=2)",
        "SIZE = (1, 8, 1024, 32)": "SIZE = (1, 8, 256, 32)",
        "LONGER = GPTConfig(context=512,": "LONGER = GPTConfig(context=128,",
    },
    "12": {"real_run(interval, mtbf_s, 1.2,": "real_run(interval, mtbf_s, 0.05,"},
    "14": {
        ', ("no file", ["-c", SPAWNED])):': ",):",
        '{"missing": [], "elsewhere": ["--rdzv-endpoint", f"127.0.0.1:{free_port}"]}': '{"missing": []}',
        '("missing", "elsewhere", "early", "late")': '("missing", "early", "late")',
        'took["elsewhere: until it gives up"]': 'took["missing: until it gives up"]',
        'SHORT = "is_host=0,join_timeout=3,': 'SHORT = "is_host=0,join_timeout=1,',
    },
    "15": {
        '("gpt-2-1.5b", "llama-2-7b", "qwen-2.5-32b", "llama-2-70b"), (1, 8, 32, 128)': '("gpt-2-1.5b",), (1, 8)',
        '("llama-2-7b", "llama-2-70b"), SLOW, (8, 32, 128)': '("llama-2-7b",), SLOW, (8, 32)',
    },
}


def smaller(lines: list[str], lesson: str) -> list[str]:
    """Return the lines of a cell of a lesson as `make test` runs them."""
    text = "".join(lines)
    for whole, small in SMALLER.get(lesson, {}).items():
        text = text.replace(whole, small)
    return text.splitlines(keepends=True)


def pytest_configure(config):
    at_start_of_kernels("short_kernels", "shorten")


def shorten():
    """Make it so in this kernel, and where its ranks are forked."""
    from IPython import get_ipython

    from distlab.comm.launch import fork_client

    get_ipython().input_transformers_cleanup.append(lambda lines: smaller(lines, Path.cwd().name[:2]))
    fork_client.PRELOAD += ("tests.lessons.one_window",)
    check = importlib.import_module("distlab.course.grading.check")
    on_all = check.examine

    def examine(exercise, fn, *, worlds=None, seed=None):
        chosen = (3,) if 3 in exercise.worlds else exercise.worlds[-1:]
        report = on_all(exercise, fn, worlds=worlds or chosen, seed=seed)
        assert report.verdict != "wrong" or exercise.broken, str(report)
        return report

    check.examine = examine
