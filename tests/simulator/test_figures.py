"""Figures of small steps stay as they are: plans of every kind, with what was predicted of each in figures.json.

Other tests say why a figure is right. This one notices that it has changed. Where that was meant, write them anew:
`python tests/simulator/test_figures.py`.
"""

import json
from pathlib import Path

import pytest

from distlab.plan import Plan, Precision, Sharding
from distlab.plan.compression import Compression
from simulator import LlamaSizes, cluster, fuse_attention, gpt_workload, llama_workload, mix_experts, simulate

FIGURES = Path(__file__).with_name("figures.json")
SIZES = {"hidden_size": 256, "num_heads": 8, "sequence_length": 128, "vocab_size": 1000, "microbatch_size": 2}
MODELS = {
    "gpt": gpt_workload(num_layers=8, **SIZES),
    "experts": mix_experts(gpt_workload(num_layers=4, **SIZES), 4, top_k=2),
    "llama": fuse_attention(llama_workload(LlamaSizes(256, 6, 8, 4, 512, 1000), sequence_length=256)),
}
PARTS = {"sharding": Sharding, "precision": Precision, "compression": Compression}


def figures_of(row):
    """Simulate a row's plan and return what is kept of it."""
    plan = {name: PARTS[name](**value) if name in PARTS else value for name, value in row["plan"].items()}
    step = simulate(MODELS[row["model"]], cluster(row["cluster"], row["devices"], stack=row["stack"]), Plan(**plan))
    busy = {}
    for span in step.layer_trace:
        lane = f"{span.lane} {span.kind}"
        busy[lane] = busy.get(lane, 0) + span.end_ns - span.start_ns
    return {
        "seconds": [step.duration_s, step.steady_s, step.bubble_fraction, step.mfu],
        "exposed_s": list(step.exposed_by_axis.values()),
        "sent_bytes": list(step.sent_bytes_by_axis.values()),
        "peak_bytes": step.memory.peak_bytes.max(axis=0).tolist(),
        "fullest_bytes": [step.memory.max_bytes, step.memory.host_bytes],
        "busy_ns": busy,
    }


def read():
    return json.loads(FIGURES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("row", read(), ids=lambda row: row["name"])
def test_a_steps_figures_are_what_they_were(row):
    for what, figures in figures_of(row).items():
        assert row["figures"][what] == pytest.approx(figures, rel=1e-12), what


if __name__ == "__main__":
    rows = [row | {"figures": figures_of(row)} for row in read()]
    FIGURES.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n", encoding="utf-8")
