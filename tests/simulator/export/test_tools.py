"""Every export: what a plan says is there; a part that a tool cannot express is named in one line."""

import ast
import csv
import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from plan_files import BF16, H100, LLAMA, SHARDED, WIDE, said

import simulator
from distlab.cli.simulate import TOOLS as NAMES
from distlab.plan import Plan, Precision, Sharding
from distlab.plan.compression import Compression
from simulator import ClusterDescription, ModelDescription, model_by_name
from simulator.export import TOOLS, Options, export

DATA_FIRST = ("data", "pipeline", "expert", "context", "tensor")
TENSOR_FIRST = ("tensor", "pipeline", "data", "expert", "context")
THIRD = Precision("float16", reduce="bfloat16", gradients="bfloat16")
MIXED = ModelDescription("qwen-3-30b-a3b")


def test_the_command_line_knows_all_tools():
    assert tuple(TOOLS) == NAMES


def settings_of(text):
    """Return what a torchtitan module sets: names of arguments and of fields, with their values as text."""
    tree = ast.parse(text)
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            found[node.arg] = ast.unparse(node.value)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            found[node.targets[0].attr] = ast.unparse(node.value)
    return found


def test_torchtitan_gets_degrees_batch_and_types():
    plan = Plan(8, 4, 16, tensor=2, context=2, sharding=Sharding(3, replicas=2), recompute="full", precision=BF16)
    found = settings_of(export(said(plan), "torchtitan", Options(0.5)).text)
    degrees = {name: found[f"{name}_degree"] for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")}
    assert degrees == {"tensor_parallel": "2", "pipeline_parallel": "4", "context_parallel": "2"}
    assert (found["data_parallel_replicate_degree"], found["data_parallel_shard_degree"]) == ("2", "4")
    assert (found["local_batch_size"], found["global_batch_size"]) == ("32", "256")
    assert (found["pipeline_parallel_microbatch_size"], found["pipeline_parallel_schedule"]) == ("2", "'1F1B'")
    assert (found["max_norm"], found["seq_len"]) == ("0.5", "8192")
    assert found["activation_checkpoint"] == "FullAC.Config()"
    assert found["fsdp_reshard_after_forward"] == "'always'"
    plain = settings_of(export(said(SHARDED), "torchtitan").text)
    assert (plain["local_batch_size"], plain["global_batch_size"]) == ("2", "128")
    assert plain["activation_checkpoint"] == "None"


def test_torchtitan_cuts_a_model_into_as_many_stages_as_the_plan():
    deep = ModelDescription("llama-3-70b")
    plan = Plan(1, 4, 8, schedule="interleaved", stages_per_rank=4)
    found = settings_of(export(said(plan, model=deep), "torchtitan").text)
    ends = [int(found[f"pipeline_parallel_{end}_stage_less_layers"]) for end in ("first", "last")]
    assert -(-(80 + sum(ends)) // int(found["pipeline_parallel_layers_per_stage"])) == 16
    two = export(said(Plan(1, 4, 8, schedule="interleaved", stages_per_rank=2)), "torchtitan").text
    assert "layers_per_stage" not in two


def flags_of(said_, options=Options()):  # noqa: B008
    lines = [line.split(" ", 1) for line in export(said_, "megatron", options).text.splitlines()]
    return {line[0]: line[1] if len(line) > 1 else True for line in lines}


def test_megatron_gets_the_model_and_the_plan():
    flags = flags_of(said(WIDE, model=ModelDescription("llama-3-70b")), Options(1.0))
    assert flags["--num-layers"] == "80"
    assert (flags["--num-attention-heads"], flags["--num-query-groups"]) == ("64", "8")
    assert (flags["--ffn-hidden-size"], flags["--vocab-size"]) == ("28672", "128256")
    assert (flags["--tensor-model-parallel-size"], flags["--pipeline-model-parallel-size"]) == ("8", "4")
    assert (flags["--micro-batch-size"], flags["--global-batch-size"]) == ("1", "256")
    assert (flags["--recompute-granularity"], flags["--clip-grad"]) == ("selective", "1.0")
    for name in ("--swiglu", "--sequence-parallel", "--use-distributed-optimizer", "--bf16", "--group-query-attention"):
        assert flags[name] is True
    assert "--use-tp-pp-dp-mapping" not in flags
    other = flags_of(said(WIDE, model=ModelDescription("gpt-3-175b"), order=DATA_FIRST))
    assert other["--use-tp-pp-dp-mapping"] is True
    assert "--swiglu" not in other
    mixed = flags_of(said(Plan(2, expert=4, num_microbatches=2), model=MIXED))
    assert (mixed["--num-experts"], mixed["--moe-router-topk"]) == ("128", "8")
    assert (mixed["--moe-ffn-hidden-size"], mixed["--expert-model-parallel-size"]) == ("768", "4")
    assert mixed["--global-batch-size"] == "16"
    sharded = flags_of(said(SHARDED))
    assert sharded["--data-parallel-sharding-strategy"] == "optim_grads_params"
    own = ModelDescription(hidden_size=512, num_layers=4, num_heads=8, num_key_value_heads=2, feed_forward_size=1536)
    sized = flags_of(said(Plan(2), model=own))
    assert (sized["--hidden-size"], sized["--num-query-groups"], sized["--ffn-hidden-size"]) == ("512", "2", "1536")


def test_recompute_per_operator_is_torchtitans_selective_policy():
    found = export(said(SHARDED, recompute="operators", float8="products"), "torchtitan").text
    assert settings_of(found)["activation_checkpoint"] == "SelectiveAC.Config()"
    partly = export(said(SHARDED, recompute="full", recompute_method="block", recompute_layers=4), "accelerate")
    assert json.loads(partly.text)["fsdp_config"]["fsdp_activation_checkpointing"] is False


@pytest.mark.parametrize(
    ("compute", "gradients", "flags"),
    [
        ("bfloat16", "float32", {"--bf16", "--accumulate-allreduce-grads-in-fp32"}),
        ("bfloat16", "bfloat16", {"--bf16", "--grad-reduce-in-bf16"}),
        ("float16", "float32", {"--fp16", "--accumulate-allreduce-grads-in-fp32"}),
        ("float16", "float16", {"--fp16"}),
        ("float32", "float32", set()),
    ],
)
def test_megatron_sums_gradients_in_their_type(compute, gradients, flags):
    found = flags_of(said(precision=Precision(compute, reduce=gradients, gradients=gradients)))
    of_types = {"--bf16", "--fp16", "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"}
    assert found.keys() & of_types == flags


@pytest.mark.parametrize("name", ["qwen-3-8b", "gpt-3-175b", "mixtral-8x7b"])
def test_megatrons_flags_count_as_many_parameters_as_the_model(name):
    """The sizes in the flags are those of the model: weights of products, without biases and norms."""
    flags = flags_of(said(Plan(1), model=ModelDescription(name)))
    number = {key: int(value) for key, value in flags.items() if str(value).isdigit()}
    hidden, depth, heads = (number[f"--{key}"] for key in ("hidden-size", "num-layers", "num-attention-heads"))
    head = number.get("--kv-channels", hidden // heads)
    groups = number.get("--num-query-groups", heads)
    width = number.get("--ffn-hidden-size", 4 * hidden)
    parts = (3 if "--swiglu" in flags else 2) * hidden * width * number.get("--num-experts", 1)
    tables = 2 if "--untie-embeddings-and-output-weights" in flags else 1
    counted = depth * (2 * hidden * head * (heads + groups) + parts) + tables * number["--vocab-size"] * hidden
    assert counted == pytest.approx(model_by_name(name).num_parameters, rel=2e-3)


def test_accelerate_gets_a_backend_for_each_stage():
    found = [json.loads(export(said(sharding=Sharding(stage)), "accelerate").text) for stage in range(4)]
    assert [one["distributed_type"] for one in found] == ["MULTI_GPU", "DEEPSPEED", "FSDP", "FSDP"]
    assert [one["num_processes"] for one in found] == [4] * 4
    assert found[1]["deepspeed_config"]["gradient_accumulation_steps"] == 8
    assert [one["fsdp_config"]["fsdp_reshard_after_forward"] for one in found[2:]] == [False, True]
    wide = json.loads(export(said(SHARDED, data=8, tensor=2, context=2), "accelerate").text)
    sizes = wide["parallelism_config"]
    assert sizes["parallelism_config_tp_size"] * sizes["parallelism_config_cp_size"] == 4
    assert sizes["parallelism_config_dp_shard_size"] == 8
    assert (wide["num_machines"], wide["num_processes"]) == (4, 32)


def test_launchers_start_as_many_ranks_as_the_plan_has():
    for plan in (Plan(4), Plan(8), Plan(4, 4, 8, tensor=2)):
        own, ranks = said(plan), plan.world_size
        script = export(own, "slurm").text
        number = {key: int(value) for key, value in re.findall(r"#SBATCH --([a-z-]+)=(\d+)", script)}
        assert number["nodes"] * number["gpus-per-node"] == ranks
        spec = json.loads(export(own, "pytorchjob").text)["spec"]
        pods = sum(each["replicas"] for each in spec["pytorchReplicaSpecs"].values())
        assert pods * int(spec["nprocPerNode"]) == ranks
        (job,) = json.loads(export(own, "jobset").text)["spec"]["replicatedJobs"]
        inner = job["template"]["spec"]
        (container,) = inner["template"]["spec"]["containers"]
        assert inner["completions"] * int(container["resources"]["limits"]["nvidia.com/gpu"]) == ranks
        assert f"--nnodes={inner['completions']} " in container["command"][-1]


# Options of sbatch, Slurm 23.11.
SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "requeue", "output"}


def test_bash_reads_the_slurm_script_and_sbatch_knows_its_options():
    text = export(said(WIDE), "slurm", Options(script='train.py --note "it\'s"')).text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    options = re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)
    assert set(options) <= SBATCH
    assert text.index("#SBATCH --output") < text.index("set -e")


SAID_WHOLE = {  # no tool has a note on these, but megatron and accelerate on what is in no plan
    "deepspeed": said(sharding=Sharding(2), precision=BF16, first_bucket_bytes=25_000_000),
    **dict.fromkeys(("fsdp2", "torchtitan"), said(sharding=Sharding(3), precision=BF16)),
    **dict.fromkeys(("megatron", "accelerate"), said(num_microbatches=1, sharding=Sharding(3))),
}
FULL = {"recompute": "full"}
# What gives a plan each part of limits.csv; a tool's name behind it: for that tool alone.
HAS = {
    **{axis: {axis: 2} for axis in ("tensor", "context", "expert", "pipeline")},
    "pipeline, deepspeed": {"pipeline": 2, "sharding": Sharding()},
    "pipeline of 1F1B": {"pipeline": 2, "sharding": Sharding()},
    "pipeline of a different schedule": {"pipeline": 2, "sharding": Sharding(), "schedule": "gpipe"},
    "stages of equal time": {"sharding": Sharding(1), "pipeline": 2},
    "context by a ring": {"context": 2},
    "context by all-to-alls": {"context": 2, "context_kind": "all_to_all"},
    "context with tensor or pipeline": {"context": 2, "tensor": 2},
    "sequence_parallel": {"tensor": 2, "sequence_parallel": True},
    "stage 1": {"sharding": Sharding(1)},
    "stage 2": {"sharding": Sharding(2)},
    "stage 3": {"sharding": Sharding(3, unit_layers=2)},
    "stage 0 with context": {"sharding": Sharding(), "context": 2},
    "stage 2 or 3 with a pipeline": {"pipeline": 2},
    "tensor or context below stage 2": {"sharding": Sharding(), "tensor": 2},
    "stage 3 that keeps parameters after forward": {"sharding": Sharding(3, reshard_after_forward=False)},
    "units of its own": {"sharding": Sharding(3, unit_layers=2)},
    "nothing ahead from stage 2 on": {"sharding": Sharding(3, prefetch=0)},
    "replicas of shards": {"sharding": Sharding(2, replicas=2)},
    "replicas with stage 1": {"sharding": Sharding(1, replicas=2)},
    "offload of all": {"sharding": Sharding(3, offload="all")},
    "offload of the optimizer": {"sharding": Sharding(3, offload="optimizer")},
    "offload of the optimizer below stage 2": {"sharding": Sharding(1, offload="optimizer")},
    "offload of the optimizer from stage 2 on": {"sharding": Sharding(3, offload="optimizer")},
    "full recompute of every block": FULL,
    "full recompute of some blocks": FULL | {"recompute_method": "block", "recompute_layers": 3},
    "recompute of chosen blocks": FULL | {"recompute_layers": 2},
    "recompute of several blocks at once": FULL | {"recompute_layers": 2},
    "recompute of every second block or so": FULL | {"recompute_method": "every", "recompute_layers": 2},
    "recompute that no flag says": FULL | {"recompute_layers": 4},
    "selective recompute": {"recompute": "selective"},
    "recompute by operators": {"recompute": "operators"},
    "float8": {"float8": "products"},
    "float16": {"precision": Precision("float16")},
    "float64": {"precision": Precision("float64")},
    "16 bits without a master": {"precision": Precision("bfloat16", master=False)},
    "16 bits, gradients not in float32": {"precision": Precision("bfloat16", gradients="bfloat16")},
    "no float32 at all": {"precision": Precision("bfloat16", master=False)},
    "gradients of a third type": {"precision": THIRD},
    "sums not in float32": {"precision": Precision("bfloat16", reduce="bfloat16")},
    "sums not in the gradients' type": {"precision": Precision("bfloat16", reduce="bfloat16")},
    "compression": {"sharding": Sharding(), "compression": Compression("top_k")},
    "no overlap": {"gradient_sync": "flat"},
    "a call for each parameter": {"gradient_sync": "per_parameter"},
    "gradients without buckets": {"gradient_sync": "flat"},
    "buckets of its own": {"bucket_bytes": 1_000_000},
    "a first bucket of its own": {"first_bucket_bytes": 1_000_000},
    "micro-batches without DeepSpeed": {"num_microbatches": 4},
    "several nodes": {"data": 16},
    "no such schedule": {"pipeline": 4, "sharding": Sharding(), "schedule": "zb_h1"},
    "unequal stages": {"pipeline": 3, "sharding": Sharding()},
    "stages that no setting cuts": {
        "pipeline": 2, "num_microbatches": 4, "sharding": Sharding(), "schedule": "interleaved", "stages_per_rank": 7,
    },
}  # fmt: skip
# Parts that a plan alone does not have: the whole file, and words of the refusal.
OWN = [
    ("torchtitan", said(model=ModelDescription("gpt-2-1.5b")), "the model gpt-2-1.5b"),
    ("torchtitan", said(model=ModelDescription(hidden_size=64, num_heads=4)), "the model of these sizes"),
    ("torchtitan", said(Plan(2, 2, 2), order=DATA_FIRST), "order = ['data'"),
    ("torchtitan", said(Plan(1, context=2), sharding=Sharding(3, replicas=2)), "2 replicas do not divide 1 ranks"),
    ("megatron", said(model=ModelDescription("bloom-7.1b")), "ALiBi"),
    ("megatron", said(model=ModelDescription("deepseek-v3")), "the latent attention of deepseek-v3"),
    ("megatron", said(Plan(2, 2, 2, tensor=2), order=TENSOR_FIRST), "order = ['tensor'"),
    ("accelerate", said(SHARDED, data=2, tensor=2, order=TENSOR_FIRST), "order"),
    ("slurm", said(Plan(12)), "12 ranks on nodes of 8"),
    ("deepspeed", said(Plan(2, 2, 2, sharding=Sharding(2))), "pipelines take ZeRO stage 0 or 1, and the plan has pipe"),
    ("deepspeed", said(precision=Precision("float64")), "DeepSpeed has no float64 (precision.compute)"),
    ("horovod", said(), "no export to 'horovod'"),
]
OF_FILES = ("no configuration of the model", "an order of its own", "a config.json", "ALiBi", "latent attention")
OF_FILES += ("neither the usual order nor slow data", "any plan", "a norm without DeepSpeed")
LIMITS = list(csv.DictReader((Path(simulator.__file__).parent / "export/limits.csv").read_text().splitlines()))


@pytest.mark.parametrize(("tool", "plan", "part"), OWN)
def test_a_part_that_a_tool_cannot_express_is_named_in_one_line(tool, plan, part):
    with pytest.raises(ValueError, match=re.escape(part)) as caught:
        export(plan, tool)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row", [row for row in LIMITS if row["where a plan has"] not in OF_FILES], ids=lambda row: row["words"][:30]
)
def test_what_a_tool_cannot_say_is_refused_or_noted_where_a_plan_has_it_alone(row):
    """fsdp2 and torchtitan write notes as comments of their code."""
    tool, feature = row["tool"], row["where a plan has"]
    whole = SAID_WHOLE[tool]
    having = replace(whole, plan=replace(whole.plan, **HAS.get(f"{feature}, {tool}", HAS.get(feature))))
    words = row["words"].split("{")[0]
    if row["as"] == "refused":
        export(whole, tool)
        with pytest.raises(ValueError, match=f"cannot express {re.escape(words)}") as caught:
            export(having, tool)
        assert "\n" not in str(caught.value)
        return
    without, found = (export(own, tool) for own in (whole, having))
    if tool in ("fsdp2", "torchtitan"):
        without, found = (each._replace(notes=re.findall("^# (.*)$", each.text, re.M)) for each in (without, found))
    assert not any(note.startswith(words) for note in without.notes)
    assert any(note.startswith(words) for note in found.notes), found.notes


def test_a_plan_that_a_tool_says_whole_has_no_notes():
    found = {tool: export(own, tool, Options(1.0)) for tool, own in SAID_WHOLE.items()}
    always = ("data, tokenizer, learning rate and number of steps are not in a plan",)
    samples = "in code, a DataLoader of 2 samples per rank"
    clipped = "in code, accelerator.clip_grad_norm_(parameters, 1.0)"
    assert [found[tool].notes for tool in SAID_WHOLE] == [(), (), (), always, (samples, clipped)]
    assert "# " not in found["torchtitan"].text
    assert clipped not in export(said(sharding=Sharding(1)), "accelerate", Options(1.0)).notes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"script": " "}, "the script is ' '"),
        ({"script": "train.py 'open"}, "the script is"),
        ({"image": ""}, "the image is ''"),
        ({"max_norm": -1.0}, "max_norm is -1.0"),
        ({"max_norm": float("nan")}, "max_norm is nan"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Options(**changes)


@settings(max_examples=50, deadline=None)
@given(
    tool=st.sampled_from(list(TOOLS)),
    model=st.sampled_from([LLAMA, MIXED, ModelDescription("gpt-3-175b"), ModelDescription(hidden_size=256)]),
    degrees=st.fixed_dictionaries({name: st.sampled_from([1, 1, 2, 4]) for name in ("data", "pipeline", "tensor")}),
    stage=st.integers(0, 3),
    schedule=st.sampled_from(["one_f_one_b", "gpipe", "zb_h1"]),
    recompute=st.sampled_from(["none", "selective", "operators", "full"]),
    precision=st.sampled_from([None, BF16, Precision(), Precision("float16", gradients="float16")]),
    per_node=st.sampled_from([None, 2, 4]),
)
def test_any_plan_gives_a_file_or_one_line(tool, model, degrees, stage, schedule, recompute, precision, per_node):
    plan = Plan(
        num_microbatches=4,
        sharding=Sharding(stage),
        schedule=schedule,
        recompute=recompute,
        precision=precision,
        **degrees,
    )
    machine = H100 if per_node is None else ClusterDescription("dgx-h100", devices_per_node=per_node)
    own, refused = said(plan, model=model, cluster=machine), None
    try:
        found = export(own, tool)
    except ValueError as error:
        refused = str(error)
    if refused is not None:
        assert "\n" not in refused
        return
    assert found.text.endswith("\n")
    assert "None" not in found.text or tool in ("torchtitan", "fsdp2", "pytorchjob")
    if tool in ("deepspeed", "accelerate", "pytorchjob", "jobset"):
        json.loads(found.text)
    if tool in ("torchtitan", "fsdp2"):
        compile(found.text, tool, "exec")
    if tool in ("torchrun", "megatron"):
        assert shlex.split(found.text)
