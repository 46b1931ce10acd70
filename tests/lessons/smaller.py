"""What `make test` runs smaller in cells of notebooks: timings that no cell compares, and drawn trainings and maps.

By lesson: a text of one cell without the tag nbval-check-output, and what stands in its place. `make soak` runs the
cells as they are.
"""

SMALLER = {
    "01": {"repeats=25": "repeats=2", "for _ in range(20):": "for _ in range(2):", "blocks=40": "blocks=4"},
    "02": {
        "ranks.run(time_all, programs, sizes, 15)": "ranks.run(time_all, programs, sizes, 2)",
        "def time_rings(repeats=9)": "def time_rings(repeats=2)",
        "programs[:3], TRIED[name], 15)": "programs[:3], TRIED[name], 2)",
        "ranks.run(time_levels, 2_097_152, 9)": "ranks.run(time_levels, 2_097_152, 2)",
    },
    "03": {"def side_by_side(num_steps=10)": "def side_by_side(num_steps=4)"},
    "04": {
        "epochs=20, dtype=torch.float32": "epochs=4, dtype=torch.float32",
        "def scaled(batch, epochs=20": "def scaled(batch, epochs=4",
        "num_updates=4": "num_updates=2",
        "blocks=12, steps=10": "blocks=4, steps=2",
    },
    "05": {
        "NUM_STEPS = 80": "NUM_STEPS = 40",
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
    "09": {"for _ in range(8)]  # in turns": "for _ in range(2)]  # in turns"},
    "10": {
        "def step_seconds(order, num_steps=6)": "def step_seconds(order, num_steps=2)",
        "def turn_by_turn(num_steps=6)": "def turn_by_turn(num_steps=2)",
    },
    "11": {"def side_by_side(num_steps=5)": "def side_by_side(num_steps=2)"},
    "12": {"real_run(interval, mtbf_s, 1.2,": "real_run(interval, mtbf_s, 0.05,"},
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
