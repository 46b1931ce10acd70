"""A plan as a file: read, refused in one line, written and read again; configurations at random, senseless ones too."""

import json
import math
import shlex
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

import simulator as sim
from distlab.plan import AXES, SCHEDULES, Plan, Precision, Sharding, records
from distlab.plan.compression import METHODS, Compression
from distlab.plan.partition import CUTS
from distlab.plan.sharding import DTYPE_BYTES, OFFLOADS
from simulator.export import TOOLS, export
from simulator.hardware import presets
from simulator.hardware.presets import OwnDevice, OwnLink
from simulator.models.adapters import LORA_MODULES, WEIGHTS
from simulator.models.optimizers import OPTIMIZERS

MOST_RANKS_DRAWN, LONGEST_S = 64, 60.0  # for one configuration: more counts as hanging
NUMBER = (1e6, 1e8, 1e10, 1e12, 1e15)
MODEL = {  # values of each field to draw from, the likelier ones several times
    "hidden_size": (64, 128, 96, 256, 256, 100),
    "num_heads": (1, 3, 4, 8, 8, 16),
    "num_layers": (1, 2, 5, 8, 12, 16, 24),
    "vocab_size": (1, 50, 1000, 50257),
    "sequence_length": (1, 17, 48, 96, 4096),
    "microbatch_size": (1, 1, 2, 3, 16),
    "attention": (None, "plain", "flash"),
    "loss_chunks": (1, 1, 2, 50),
}
TRAINED = {"optimizer": OPTIMIZERS, "lora_rank": (1, 4, 8), "lora_modules": LORA_MODULES}
TRAINED |= {"weights": (*WEIGHTS[:1] * 3, *WEIGHTS)}
WINDOWED = {"sliding_window": (1, 32, 99), "full_attention_every": (None, 2), "document_length": (None, 7, 999)}
LIKE_LLAMA = {"num_key_value_heads": (8, 8, 1, 2), "feed_forward_size": (1, 200, 256)}
LIKE_LLAMA |= dict.fromkeys(("ties_embedding", "is_gated", "head_norms"), (True, False))
MIXED = {"num_experts": (2, 4, 6), "top_k": (1, 2, 3), "expert_load": (1.0, 1.5)}
DEVICE = {
    "matmul_flops_per_s": (None, *NUMBER, 1e18),
    **dict.fromkeys(("memory_bytes_per_s", "memory_bytes"), (None, *NUMBER)),
    "launch_s": (None, None, 0.0, 1e-6, 0.1),
    "host_memory_bytes": (None, None, 0.0, 1e12),
    "host_link_bytes_per_s": (None, 1e9),
    "loader_samples_per_s": (None, None, 1.0, 1e6),
}
WIRE = {"latency_s": (0.0, 1e-9, 1e-5, 1.0), "bytes_per_s": NUMBER}
CLUSTER = {"name": presets.names("clusters"), "stack": (None, *presets.names("stacks"))}
CLUSTER |= {"devices_per_node": (None, 1, 2, 3, 8)}
DEGREES = (1, 1, 1, 2, 2, 2, 3, 4, 8)
PLAN = {
    "data": DEGREES,
    "pipeline": DEGREES,
    "tensor": (1, 1, 1, 2, 2, 4, 5),
    "context": (1, 1, 1, 1, 2, 3),
    "expert": (1, 1, 1, 2),
    "num_microbatches": (1, 2, 3, 5, 8, 9, 16),
    "schedule": ("one_f_one_b", *SCHEDULES, *SCHEDULES),
    "gradient_sync": records.GRADIENT_SYNCS,
    "bucket_bytes": (1, 10_000, 25_000_000),
    "recompute": (*records.RECOMPUTES * 8, "layernorm", "mlp,core_attn", "moe_act"),
    "float8": (*("none",) * 13, *records.FLOAT8),
    "sequence_parallel": (True, False, False),
    "context_kind": records.CONTEXT_KINDS,
    "cut": ("time", "time", *CUTS),
    "offload_activations": (*(False,) * 24, True),
    "fold_experts": (*(False,) * 49, True),
}
SOME = {"recompute_method": records.RECOMPUTE_METHODS, "recompute_layers": (1, 2, 3, 99)}
SHARDING = {"unit_layers": (1, 2, 50), "reshard_after_forward": (True, True, False)}
SHARDING |= {"prefetch": (0, 1, 9), "replicas": (1, 1, 1, 1, 1, 2)}
PRECISION = {name: tuple(DTYPE_BYTES) for name in ("compute", "reduce", "gradients")} | {"master": (True, False)}


def drawn(random, table, often=1.0):
    """Return a value of each field, so often; else nothing."""
    return {name: random.choice(values) for name, values in table.items()} if random.random() < often else {}


def random_file(random):
    """Make a plan file, or raise as its records do: degrees may not divide, wires have 1 MB per second."""
    model = drawn(random, MODEL) | drawn(random, LIKE_LLAMA, 0.4) | drawn(random, MIXED, 0.15)
    model |= drawn(random, TRAINED, 0.2) | drawn(random, WINDOWED, 0.03)
    machine, plan = drawn(random, CLUSTER), drawn(random, PLAN)
    machine["device"] = OwnDevice(**own) if (own := drawn(random, DEVICE, 0.3)) else None
    for wire in ("intra_node", "inter_node"):
        named, own = random.choice(presets.names("links")), drawn(random, WIRE, 0.15)
        machine[wire] = OwnLink(**own) if own else named if random.random() < 0.2 else None
    stage = random.randint(0, 3)
    if random.random() < 0.1:
        plan["compression"] = Compression(random.choice(METHODS), ratio=random.choice((1e-9, 0.1, 1)))
        stage = 0 if random.random() < 0.9 else stage
    if plan["float8"] == "gathers" and stage < 3 and random.random() < 0.9:  # it is about parameters that are gathered
        plan["float8"] = "none"
    plan["stages_per_rank"] = SCHEDULES[plan["schedule"]].stages_per_rank()
    plan |= drawn(random, {"stages_per_rank": (1, 1, 2, 3)}, 0.1)
    plan |= drawn(random, SOME, 0.5) if plan["recompute"] == "full" else {}
    plan["precision"] = Precision(**own) if (own := drawn(random, PRECISION, 0.5)) else None
    offload = "none" if stage == 0 or random.random() < 0.8 else random.choice(OFFLOADS if stage == 3 else OFFLOADS[:2])
    order = tuple(random.sample(AXES, len(AXES)))
    plan["sharding"] = Sharding(stage, **drawn(random, SHARDING), offload=offload)
    return sim.PlanFile(sim.ModelDescription(**model), sim.ClusterDescription(**machine), Plan(**plan), order)


def check_trace(seed, step):
    """See that no lane does two things at once, that what is sent is received, and that all is over at the end.

    Two neighbours may send to a rank at the same time, so its lanes of receives are left out. Between device and host
    each direction is looked at alone: copies of both may run at once.
    """
    sends, receives = (step.trace.is_word("lane", f"{what} forward", f"{what} backward") for what in ("send", "recv"))
    sent, received = (step.trace.num_bytes[rows].sum() for rows in (sends, receives))
    assert sent == received, f"seed {seed}: {sent} bytes sent, {received} received"
    trace = step.trace.select(~receives)
    to_device = trace.is_word("name", *[word for word in trace.words if word.startswith("to device ")])
    lanes = trace.lane + len(trace.words) * to_device
    order = np.lexsort((trace.end_ns, trace.start_ns, lanes, trace.rank))
    rank, lane, start, end = (column[order] for column in (trace.rank, lanes, trace.start_ns, trace.end_ns))
    same = (rank[1:] == rank[:-1]) & (lane[1:] == lane[:-1])
    overlap = np.flatnonzero(same & (start[1:] < end[:-1]))
    assert not len(overlap), f"seed {seed}: {trace[order[overlap[0]]]} and {trace[order[overlap[0] + 1]]}"
    last_ns = trace.end_ns.max()
    assert last_ns <= step.duration_s * 1e9 * (1 + 1e-12) + 1, f"seed {seed}: {last_ns} ns, {step.duration_s} s"


def check_export(written, tool):
    """See that a tool gets a file that its language can read, or that one line says why not; torchtitan knows names."""
    own = replace(written, workload=sim.ModelDescription("llama-3-8b")) if tool == "torchtitan" else written
    refused = ""
    try:
        text = export(own, tool).text
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "\n" not in refused
    elif tool in ("deepspeed", "accelerate", "pytorchjob", "jobset"):
        json.loads(text)
    elif tool in ("torchtitan", "fsdp2"):
        compile(text, tool, "exec")
    else:
        assert shlex.split(text, comments=True)


def check_configuration(seed):
    """Draw a plan, write it, read it back and simulate it; return whether it has a time: a ValueError answers too."""
    began, written, step = time.monotonic(), None, None
    try:
        written = random_file(Random(seed))
        step = written.simulate()
    except ValueError as error:
        if len(str(error).splitlines()) != 1:
            raise AssertionError(f"seed {seed}: not refused in one line") from error
    if written is not None:
        assert sim.plan_of_text(written.text()) == written, f"seed {seed}: it does not read back"
        check_export(written, list(TOOLS)[seed % len(TOOLS)])
    if step is None:
        return False
    figures = [step.duration_s, step.steady_s, step.mfu, step.bubble_fraction, step.exposed_communication_s]
    figures += step.exposed_by_axis.values()
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures), f"seed {seed}: {figures}"
    assert 0 < step.steady_s <= step.duration_s, f"seed {seed}: {step.steady_s} in a run, {step.duration_s} alone"
    assert step.memory.max_bytes > 0, f"seed {seed}: {step.memory.max_bytes} bytes"
    if written.plan.world_size <= MOST_RANKS_DRAWN:
        check_trace(seed, step)
    took = time.monotonic() - began
    assert took < LONGEST_S, f"seed {seed}: {took:.0f} s for one configuration"
    return True


TEXT = Path(__file__).with_name("plan.toml").read_text("utf-8")


def test_a_file_is_the_step_that_its_words_say(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(TEXT)
    found = sim.read_plan_file(path)
    plan = Plan(2, 4, 8, tensor=2, sharding=Sharding(1), precision=Precision("bfloat16"))
    assert found.plan == plan
    workload, order = sim.model_by_name("gpt-3-175b", microbatch_size=2), ("data", "pipeline", *AXES[2:])
    own = sim.simulate(workload, sim.cluster("dgx-h100", 16), plan, order=order)
    step = found.simulate()
    assert (step.duration_s, step.steady_s) == (own.duration_s, own.steady_s)
    assert (step.memory.max_bytes, sim.plan_of_text(found.text())) == (own.memory.max_bytes, found)


def test_a_run_stands_in_the_file_and_reads_back():
    text = TEXT + '[run]\nnum_tokens = 15e12\nprice = 2\nfailures = { rate = "llama-3", restart_s = 900 }\n'
    found = sim.plan_of_text(text)
    assert found.run == sim.Run(15e12, 2.0, sim.Failures("llama-3", restart_s=900.0))
    assert sim.plan_of_text(found.text()) == found
    assert sim.plan_of_text(TEXT).run is None
    own = replace(found, run=sim.Run(1e9, failures=sim.Failures(2e-5, save_s=3.0)))
    assert sim.plan_of_text(own.text()) == own
    with pytest.raises(ValueError, match="write \\[workload\\], \\[cluster\\], \\[plan\\] and \\[run\\]"):
        sim.plan_of_text(TEXT + "[money]\nprice = 2\n")


def test_figures_of_ones_own_replace_the_presets():
    own = """
    [workload]
    [cluster]
    name = "dgx-a100"
    stack = "best-case"
    devices_per_node = 4
    device = { memory_bytes = 40e9, matmul_flops_per_s = 100e12 }
    intra_node = "nvlink2"
    inter_node = { latency_s = 1e-5, bytes_per_s = 10e9 }
    [plan]
    data = 8
    """
    found = sim.plan_of_text(own)
    machine = found.cluster.cluster(8)
    assert (machine.devices_per_node, machine.num_devices) == (4, 8)
    assert machine.device.memory_bytes == 40e9
    assert machine.device.memory_bytes_per_s == sim.cluster("dgx-a100", stack="best-case").device.memory_bytes_per_s
    assert (machine.intra_node.name, machine.inter_node.protocols[0].bytes_per_s) == ("nvlink2", 10e9)
    slower = sim.PlanFile(found.workload, sim.ClusterDescription(stack="megatron", device=OwnDevice(1e14)), found.plan)
    own = slower.cluster.cluster(8).device
    assert own.matmul_flops_per_s == pytest.approx(sim.stack("megatron").matmul_fraction * 1e14)
    assert sim.plan_of_text(found.text()) == found


def test_a_device_with_faster_products_has_no_slower_data_sheet():
    """MFU is over the data sheet, which is at least what products reach; a slower device keeps its sheet's rate."""
    for rate, peak in ((1e12, 1e12), (1e10, 1e11)):
        made = sim.ClusterDescription("laptop", device=OwnDevice(rate)).cluster(1).device
        assert (made.matmul_flops_per_s, made.peak_flops_per_s) == (rate, peak)
    told = sim.ClusterDescription("laptop", device=OwnDevice(1e12, peak_flops_per_s=5e12)).cluster(1).device
    assert told.peak_flops_per_s == 5e12


WRONG = tomllib.loads(Path(__file__).with_name("wrong_lines.toml").read_text("utf-8"))


@pytest.mark.parametrize(("before", "after", "text"), [(old, *row) for old, rows in WRONG.items() for row in rows])
def test_what_is_wrong_is_told_in_one_line(tmp_path, before, after, text):
    assert before in TEXT
    path = tmp_path / "plan.toml"
    kept = TEXT if "100" not in after else TEXT.replace("num_devices = 16", "")
    path.write_text(kept.replace(before, after, 1))
    with pytest.raises(ValueError, match=text) as caught:
        sim.read_plan_file(path).simulate()
    assert "\n" not in str(caught.value)


def test_files_that_editors_save_otherwise_and_files_that_no_editor_makes(tmp_path):
    """A mark at the start, as Windows' editors write it, is no fault; other alphabets and empty files are."""
    path = tmp_path / "plan.toml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert sim.read_plan_file(path) == sim.plan_of_text(TEXT)
    for data, words in (
        (TEXT.encode("utf-16"), r"this is not text in UTF-8; save it as UTF-8$"),
        (b"# nothing yet\n", r"the file is empty; write \[workload\], \[cluster\] and \[plan\]"),
        (b"a = " + b"[" * 50_000, "tables or lists are nested too deeply"),
        (b"[plan]\nsharding = " + b"{a=" * 3000 + b"1" + b"}" * 3000, "tables or lists are nested too deeply"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"plan.toml: {words}"):
            sim.read_plan_file(path)


def test_random_configurations_have_a_time_or_a_reason():
    """Each reads back. Also senseless ones: degrees that do not divide, wires of 1 MB per second, odd heads."""
    assert sum(map(check_configuration, range(150))) > 18


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_thousand_random_configurations_have_a_time_or_a_reason(part, record_property):
    """No crash, no figure that is infinite or not a number, and none that takes LONGEST_S: 20 parts of 5,000.

    About one in seven has a time; the others are refused.
    """
    record_property("tried", 5000)
    assert sum(map(check_configuration, range(5000 * part, 5000 * (part + 1)))) > 700
