"""Published steps of NVIDIA's benchmarks that no constant was fitted to: sizes, context ranks, mixtures of experts.

Half of these rows, drawn at random, were predicted once, after the simulator's mixtures of experts had been changed.
Errors of those halves: dense models 1.6 to 5.0 %, Grok-1 5.0 % (8.2 % before), other mixtures 18 % (26 % before).

Nemotron-15B's bias hid that steps on 2,048 GPUs were too long, by latencies of buckets of 25 MB, and all others too
short. Now all are, by 4 %.

Grok-1 ran with experts that tensor ranks divide, which the simulator does not have: its steps are 6 % too short. Of the
last two tables experts are on all tensor ranks too ("folded"), so that one expert rank stands for as many here.
"""

from dataclasses import replace

import pytest

from distlab.plan import Plan, Precision, Sharding
from simulator import ModelDescription, cluster, simulate, stack

BFLOAT16 = Precision("bfloat16", gradients="bfloat16", reduce="bfloat16")
MIXED = Precision("bfloat16", gradients="float32")
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
NEMOTRON = {"vocab_size": 256000, "num_key_value_heads": 8, "is_gated": False, "attention": "flash"}
NEMOTRON_15B = NEMOTRON | {"hidden_size": 6144, "num_layers": 32, "num_heads": 48, "feed_forward_size": 24576}
NEMOTRON_340B = NEMOTRON | {"hidden_size": 18432, "num_layers": 96, "num_heads": 96, "feed_forward_size": 73728}
LLAMA_405B = {"hidden_size": 16384, "num_heads": 128, "num_key_value_heads": 8, "feed_forward_size": 53248}
LLAMA_405B |= {"vocab_size": 128256, "attention": "flash"}
GROK = {"hidden_size": 6144, "num_heads": 48, "num_key_value_heads": 8, "feed_forward_size": 32768, "num_experts": 8}
GROK |= {"top_k": 2, "vocab_size": 131072, "attention": "flash"}


def seconds(model, tokens, samples, gpus, batch, *, on="dgx-h100", own=None, precision=BFLOAT16, **degrees):
    """Return the predicted step of a batch; the replicas are what degrees and experts leave of the GPUs."""
    made = ModelDescription(**model, sequence_length=tokens, microbatch_size=samples).workload()
    degrees = {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "stages_per_rank": 1, "cut": "blocks"} | degrees
    replicas = gpus // (degrees["tensor"] * degrees["pipeline"] * degrees["context"])
    plan = Plan(
        data=replicas // degrees["expert"],
        num_microbatches=batch // replicas // samples,
        sequence_parallel=degrees["tensor"] > 1,
        sharding=Sharding(1),
        precision=precision,
        schedule="interleaved" if degrees["stages_per_rank"] > 1 else "one_f_one_b",
        **degrees,
    )
    return simulate(made, cluster(on, gpus, stack=own or "nemo"), plan).steady_s


def both(pairs, predict):
    """Return predicted and measured seconds in 16 and in 8 bits."""
    for key, measured in pairs:
        for kind, each in zip(("none", "products"), measured, strict=True):
            yield predict(key, kind), each


# NVIDIA/dgxc-benchmarking@0b71cfda nemotron/README_15b.md, NeMo 24.12, DGX H100, 2025: seconds in bf16 and in fp8.
STEPS_15B = [(2.812, 2.039), (2.824, 2.046), (2.845, 2.048), (2.859, 2.059)]
STEPS_15B += [(2.852, 2.075), (2.875, 2.12), (2.895, 2.094), (2.887, 2.12)]
# The same @143b90dd nemotron/README_340b.md and llama3.1/README_8b.md, README_70b.md, README_405b.md, NeMo 24.09.
STEPS_340B = [(4.61, 3.16), (4.67, 3.21), (4.7, 3.26), (4.73, 3.34), (4.84, 3.49)]
STEPS_8B = [(12.91, 9.67), (13.0, 9.73), (13.05, 9.75), (13.08, 9.8), (13.1, 9.82)]
STEPS_70B = [(14.72, 11.01), (14.73, 10.93), (14.8, 11.16), (14.89, 11.18), (14.92, 11.28), (14.98, 11.39)]
# GPUs, layers, batch, pipeline
SIZES_405B = [(32, 7, 126, 1), (96, 21, 126, 3), (192, 42, 252, 3), (576, 126, 252, 9)]
SIZES_405B += [(1152, 126, 504, 9), (2304, 126, 1008, 9)]
STEPS_405B = [(8.85, 5.8), (8.75, 5.71), (16.93, 11.0), (17.2, 11.24), (17.52, 11.31), (17.62, 12.35)]
# The same @143b90dd grok1/README_314b.md: GPUs, tokens, layers, pipeline, context, expert ranks, batch.
SIZES_GROK = [(8, 4096, 2, 1, 1, 2, 1024), (16, 4096, 4, 1, 1, 4, 1024), (32, 4096, 4, 1, 1, 8, 1024)]
SIZES_GROK += [(64, 8192, 8, 1, 2, 8, 1024), (128, 8192, 16, 2, 2, 8, 1024), (256, 8192, 32, 4, 2, 8, 1024)]
SIZES_GROK += [(512, 8192, 64, 8, 2, 8, 1024), (1024, 8192, 64, 8, 2, 8, 2048), (2048, 8192, 64, 8, 2, 8, 4096)]
STEPS_GROK = [(24.03, 19.89), (21.52, 17.08), (10.64, 8.3), (20.64, 16.21), (20.64, 16.48)]
STEPS_GROK += [(20.7, 16.55), (20.83, 16.69), (21.0, 16.89), (21.09, 17.04)]


def nemotron_15b():
    pairs = zip(GPUS[1:], STEPS_15B, strict=True)
    return both(pairs, lambda n, kind: seconds(NEMOTRON_15B, 4096, 4, n, 4 * n, tensor=4, float8=kind))


def nemotron_340b():
    own = {"tensor": 8, "pipeline": 8, "stages_per_rank": 12}
    pairs = zip(GPUS[4:], STEPS_340B, strict=True)
    return both(pairs, lambda n, kind: seconds(NEMOTRON_340B, 4096, 1, n, n // 4, float8=kind, **own))


def llama_8b():
    pairs = zip(GPUS, STEPS_8B, strict=False)
    return both(pairs, lambda n, kind: seconds({"model": "llama-3-8b"}, 8192, 1, n, 16 * n, context=2, float8=kind))


def llama_70b():
    own = {"tensor": 4, "pipeline": 4, "context": 2, "stages_per_rank": 5}
    pairs = zip(GPUS[3:], STEPS_70B, strict=True)
    return both(pairs, lambda n, kind: seconds({"model": "llama-3-70b"}, 8192, 1, n, 2 * n, float8=kind, **own))


def llama_405b():
    def predict(size, kind):
        gpus, layers, batch, pipeline = size
        own = {"tensor": 8, "context": 2, "pipeline": pipeline, "stages_per_rank": 7 if pipeline > 1 else 1}
        return seconds(LLAMA_405B | {"num_layers": layers}, 8192, 1, gpus, batch, float8=kind, cut="time", **own)

    return both(zip(SIZES_405B, STEPS_405B, strict=True), predict)


def grok():
    def predict(size, kind):
        gpus, tokens, layers, pipeline, context, experts, batch = size
        own = {"tensor": 4, "context": context, "pipeline": pipeline, "stages_per_rank": 8 if pipeline > 1 else 1}
        return seconds(GROK | {"num_layers": layers}, tokens, 1, gpus, batch, expert=experts, float8=kind, **own)

    return both(zip(SIZES_GROK, STEPS_GROK, strict=True), predict)


# Model, GPUs, samples of a step and of a micro-batch, tensor, pipeline, stages a rank, expert ranks, 8 bits, measured
# seconds or tokens per GPU and second; loads are even, all tokens kept, 4,096 tokens a sample.
SMALL, LARGE, V3 = "qwen-3-30b-a3b", "qwen-3-235b-a22b", "deepseek-v3"
H100, B200 = "dgx-h100", "dgx-b200"
DROPLESS = [
    # yanring/Megatron-MoE-ModelZoo@c1ad0b5c best_practice/Qwen3/readme.md, 2025
    (LARGE, H100, 256, 2048, 1, 2, 8, 4, 16, "none", 19.7, None),
    (LARGE, H100, 256, 2048, 1, 2, 32, 3, 4, "none", 24.2, None),
    (LARGE, H100, 256, 2048, 1, 4, 8, 4, 2, "none", 29.0, None),
    # NVIDIA/dgxc-benchmarking@1b172ed8 qwen3/pretrain and @14fb6ae6 deepseek_v3/pretrain, README.md, 2025
    (LARGE, H100, 256, 2048, 1, 2, 8, 4, 16, "none", 25.532, None),
    (V3, H100, 1024, 8192, 1, 2, 16, 1, 32, "none", 52.04, None),
    # docs/performance-summary.md of pufanyi/Megatron-Bridge@21a2ced8, 25.09, and NVIDIA-NeMo/Megatron-Bridge@00b7660b
    (V3, H100, 1024, 8192, 1, 2, 8, 4, 32, "products", None, 1297),
    (V3, B200, 256, 2048, 1, 1, 16, 1, 8, "products", None, 2139),
    (LARGE, B200, 64, 1024, 1, 1, 8, 2, 8, "products", None, 3269),
    # NVIDIA-NeMo/Automodel@01926a5c docs/performance-summary.md, 2025; by FSDP, which moves as much inside a node
    (SMALL, H100, 8, 512, 4, 1, 1, 1, 8, "none", 21.773, None),
]
# The same table of 25.09: tokens beyond an even load are dropped, and NCCL's all-to-all sends each row.
DROPPING = [
    (SMALL, H100, 16, 512, 2, 1, 2, 24, 8, "products", None, 10494),
    (LARGE, H100, 256, 2048, 1, 2, 8, 4, 16, "products", None, 1204),
    (V3, B200, 256, 2048, 1, 1, 16, 1, 8, "products", None, 2265),
    (SMALL, B200, 8, 512, 1, 1, 1, 1, 8, "products", None, 18066),
    (LARGE, B200, 64, 1024, 1, 1, 8, 2, 8, "products", None, 4104),
]


def small_experts(rows, own):
    for name, on, gpus, batch, samples, tensor, pipeline, stages, experts, kind, measured, rate in rows:
        degrees = {"tensor": tensor, "pipeline": pipeline, "stages_per_rank": stages, "expert": experts}
        cut = "blocks" if name == SMALL else "time"
        more = {"on": on, "own": own, "precision": MIXED, "float8": kind, "cut": cut}
        found = seconds({"model": name}, 4096, samples, gpus, batch, **more, **degrees)
        yield found, measured or batch * 4096 / gpus / rate


def dropless():
    return small_experts(DROPLESS, "nemo")


def dropping():
    return small_experts(DROPPING, replace(stack("nemo"), dispatches_once=False))


@pytest.mark.parametrize(
    ("rows", "count", "error", "bias"),
    [
        (nemotron_15b, 16, 0.045, 0.045),
        (nemotron_340b, 10, 0.025, 0.01),
        (llama_8b, 10, 0.035, 0.035),
        (llama_70b, 12, 0.045, 0.04),
        (llama_405b, 12, 0.045, 0.04),
        (grok, 18, 0.065, 0.065),
        (dropless, 9, 0.175, 0.11),
        (dropping, 5, 0.09, 0.015),
    ],
)
def test_benchmarks_that_nobody_fitted_are_as_near_as_was_measured(rows, count, error, bias):
    errors = [predicted / measured - 1 for predicted, measured in rows()]
    assert len(errors) == count
    assert sum(map(abs, errors)) / count < error
    assert abs(sum(errors) / count) < bias
