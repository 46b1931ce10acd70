"""Published tables of memory, bubbles, collectives and runs, derived again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from distlab.plan import SCHEDULES, ActionTimes, Layer, Plan, Schedule, Sharding, Work, Workload, zb_1p, zb_2p
from simulator.hardware.cost import library_all_reduce_s
from simulator.hardware.presets import cluster, link
from simulator.memory.memory import KINDS, memory_of
from simulator.models.by_name import model_by_name
from simulator.models.gpt import gpt_step_flops
from simulator.pipeline.simulate_schedule import simulate_schedule
from simulator.runs.failures import checkpoint_bytes
from simulator.stage.products import slowdown
from simulator.step.simulate import simulate
from simulator.units import GB, GIB, TB
from simulator.validation.case import MEGATRON, Row, gpt, read_table
from simulator.validation.refit import FITS

LARGE_BYTES = 64 * 2**20
SECONDS_A_DAY = 86_400


class Derived(NamedTuple):
    """A published figure and what the simulator gives for it."""

    table: str
    label: str
    predicted: float
    published: float


def zero_states() -> Iterator[Derived]:
    """Derive model states of 7.5B under ZeRO, in GB (1910.02054, Table 1)."""
    layer = Layer("all", (7_500_000_000,), Work(), Work(), Work())
    workload = Workload("7.5B", (layer,), bytes_per_parameter=2, master_bytes_per_parameter=4)
    stages = {"Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
    for row in read_table("zero_table1_model_state_gb"):
        plan = Plan(data=row["dp_degree"], sharding=Sharding(stages[row["stage"]]))
        memory = memory_of(workload, plan)
        states = sum(memory.of(kind) for kind in KINDS[:4]) / GB
        yield Derived("ZeRO Table 1, GB", f"{row['stage']} of {row['dp_degree']}", states, float(row["gb_published"]))


def activations() -> Iterator[Derived]:
    """Derive activations of 22B and 175B, in GiB; the figure leaves out the embedding's (2205.05198, Figure 1)."""
    for row in read_table("korthikanti_fig1_memory_gib"):
        large, split = row["model"] == "175B", row["recompute"] != "none"
        own: dict[str, Any] = {"pipeline": 8, "schedule": "interleaved", "stages_per_rank": 3} if large else {}
        own |= {"sequence_parallel": True, "recompute": "selective"} if split else {}
        plan = Plan(tensor=8, num_microbatches=64, precision=MEGATRON, **own)
        workload = model_by_name("gpt-3-175b" if large else "gpt-22b", microbatch_size=1 if large else 4)
        embedding, *others = workload.layers
        alone = replace(workload, layers=(replace(embedding, activation_bytes=0), *others))
        held = memory_of(alone, plan).of("activations") / GIB
        label = f"{row['model']} {row['recompute']}"
        yield Derived("Korthikanti Figure 1, GiB", label, held, float(row["activations_gib"]))


def layer_times() -> Iterator[Derived]:
    """Derive forward and backward of a layer of 22B, in ms: no constant was fitted to them (2205.05198, Table 4)."""
    workload = gpt(6144, 48, 64, 2048, 4)
    for row in read_table("korthikanti_table4_layer_time"):
        plan = Plan(tensor=8, precision=MEGATRON, **FITS["plans of Table 4"][row["experiment"]])
        stage = simulate(workload, cluster("dgx-a100", stack="megatron"), plan).stages[0]
        both = (stage.forward_ns[1] + stage.backward_ns[1]) / 1e6
        yield Derived("Korthikanti Table 4, ms of a layer", row["experiment"], both, float(row["combined_ms"]))


def profiled_layers() -> Iterator[Derived]:
    """Derive forward and backward of a layer 1,024 wide, in ms, with nothing recomputed (vTrain, one node).

    The source's times of steps were computed from profiled layers: they are linear in the number of micro-batches to
    all digits. What a layer more adds to a micro-batch more is the layer's time.
    """
    steps = {}
    for row in read_table("vtrain_ground_truth_single_node_a100"):
        micro, tensor, layers = row["micro batch"], row["tensor parallelism"], row["# layers"]
        count = row["global batch"] // row["data parallelism"] // micro
        if row["# GPUs"] == 8 and row["pipeline parallelism"] == 1:
            steps[micro, tensor, layers, count] = row["iteration time (ms)"]
    machine = cluster("a100-4-cards")
    for micro, tensor in sorted({key[:2] for key in steps if key[0] < 8}):  # of 8 samples there are 2 micro-batches
        shallow, deep = (steps[micro, tensor, layers, 4] - steps[micro, tensor, layers, 2] for layers in (12, 24))
        stage = simulate(gpt(1024, 24, 16, 1024, micro), machine, Plan(tensor=tensor)).stages[0]
        both = (stage.forward_ns[1] + stage.backward_ns[1]) / 1e6
        label = f"{micro} samples, {tensor} ranks"
        yield Derived("vTrain, ms of a profiled layer", label, both, (deep - shallow) / 24)


HEADS_HIDDEN = {"1.5B": (24, 2304), "6.2B": (32, 4096)}
NAMES = {"1F1B": "one_f_one_b", "ZB-H1": "zb_h1", "ZB-H2": "zb_h2"}


def bubbles() -> Iterator[Derived]:
    """Derive bubble rates from profiled times of F, I, W and messages (2401.10241, Tables 5 and 9).

    Schedules made by hand have the printed rate. Searched ones (ZB-1p, ZB-2p) have that or less.
    """
    rows = read_table("zerobubble_table9_profiled_ms")
    profiled_of = {(row["model"], row["num_microbatches"]): row for row in rows}
    for row in read_table("zerobubble_table5_bubble_rates"):
        row_of = profiled_of[row["model"], row["num_microbatches"]]
        own = ActionTimes(*(row_of[f"T_{letter}_ms"] for letter in ("F", "B", "W", "comm")))
        run = simulate_schedule(_schedule(row, own), own)
        microbatches = row["num_microbatches"]
        work = microbatches * sum(row_of[f"T_{letter}_ms"] for letter in "FBW") / 1e3
        label = f"{row['model']} {row['schedule']} m={microbatches}"
        yield Derived("zero-bubble Table 5", label, 1 - work / run.steady_s, float(row["bubble_rate"]))


def _schedule(row: Row, times: ActionTimes) -> Schedule:
    size, name = (row["stages"], row["num_microbatches"]), row["schedule"]
    if name in NAMES:
        return SCHEDULES[NAMES[name]].make(*size)
    if name == "ZB-1p":
        return zb_1p(*size, times)
    heads, hidden = HEADS_HIDDEN[row["model"]]
    return zb_2p(*size, times, held_after_input_gradient=32 * hidden / (34 * hidden + 5 * heads * 1024))


PCIE_RATE = 0.76 * 312e12  # that products without waste reach on an A100 of 300 W: the rows' own
A100_MULTIPROCESSORS = 108


def products() -> Iterator[Derived]:
    """Derive rates of matrix products of many shapes, in TFLOP/s: tiles, waves and starts were fitted to these rows."""
    for row in read_table("matmul_efficiency_a100_pcie"):
        if row["measured_tflops"]:
            sides = dict(part.strip().split("=") for part in row["shape"].split(","))
            rows, columns, depth = (int(sides[side]) for side in "mnk")
            rate = PCIE_RATE / slowdown(rows, columns, depth, A100_MULTIPROCESSORS) / 1e12
            yield Derived("products on A100 PCIe (fitted), TFLOP/s", row["shape"], rate, float(row["measured_tflops"]))


def collectives() -> Iterator[Derived]:
    """Derive all-reduces in a node, in microseconds, by the rows that NVLink 3 and NVLink 4's switch were fitted to."""
    for row in read_table("collectives_measured"):
        for start, name, wire in (
            ("A100 NVLink3", "8 A100, newer nccl", "nvlink3"),
            ("H200 NVLink4", "8 H200", "nvlink4-switch"),
        ):
            if row["hardware"].startswith(start) and row["time_us"]:
                table, size = f"all-reduce, {name} (fitted), us", row["size_bytes"]
                yield _all_reduce(table, size, row["ranks"], row["time_us"], wire)
    for row in read_table("vtrain_allreduce_lut"):
        size, ranks = row["size_bytes"], row["ranks"]
        yield _all_reduce(f"all-reduce, {ranks} A100 (fitted), us", size, ranks, row["time_us_out_of_place"])


def _all_reduce(table: str, size: int, ranks: int, published: float, wire: str = "nvlink3") -> Derived:
    large = "from 64 MiB" if size >= LARGE_BYTES else "smaller"
    seconds = library_all_reduce_s(size, ranks, link(wire))
    return Derived(f"{table}, {large}", f"{size} bytes", seconds * 1e6, float(published))


def training_days() -> Iterator[Derived]:
    """Derive the days that 175B takes for 300 billion tokens at the printed rates (2104.04473, Table 2)."""
    for row in read_table("megatron_sc21_table2_ptdp_vs_zero3"):
        samples = row["global_batch"]
        flops = gpt_step_flops(12288, 96, 2048, 51200, samples, recompute="full")
        step_s = flops / (row["gpus"] * row["achieved_tflops_per_gpu"] * 1e12)
        days = 300e9 / (samples * 2048) * step_s / SECONDS_A_DAY
        yield Derived("SC21 Table 2, days of 300B tokens", row["scheme"], days, float(row["days_for_300B_tokens"]))


def checkpoints() -> Iterator[Derived]:
    """Derive the size of a checkpoint of 1T parameters, in TB (2104.04473, section 5.10)."""
    rows = {row["what"]: row["value"] for row in read_table("megatron_sc21_scalars")}
    size = checkpoint_bytes(model_by_name("gpt-1t"), Plan()) / TB
    yield Derived("SC21 section 5.10, TB of a checkpoint", "1T", size, rows["1T checkpoint size"])


EXACT: tuple[Callable[[], Iterator[Derived]], ...] = (
    *(zero_states, activations, layer_times, profiled_layers, bubbles),
    *(products, collectives, training_days, checkpoints),
)
