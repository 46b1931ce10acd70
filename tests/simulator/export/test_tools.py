"""Every export: what a plan says is there; a part that a tool cannot express is named in one line.

What each tool gets of each plan stands in exports.json. `python tests/simulator/export/test_tools.py` writes the file
anew; read its diff, and run `make test-exports`, in which the tools' own parsers read the same plans.
"""

import csv
import json
import re
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from plan_files import BF16, DATA_FIRST, PLANS, SHARDED, WIDE, said

import simulator
from distlab.cli.simulate import TOOLS as NAMES
from distlab.plan import Plan, Precision, Sharding
from distlab.plan.compression import Compression
from simulator import ModelDescription, model_by_name
from simulator.export import TOOLS, Options, export

TENSOR_FIRST = ("tensor", "pipeline", "data", "expert", "context")


def test_the_command_line_knows_all_tools():
    assert tuple(TOOLS) == NAMES


@pytest.mark.parametrize("name", ["qwen-3-8b", "gpt-3-175b", "mixtral-8x7b"])
def test_megatrons_flags_count_as_many_parameters_as_the_model(name):
    """The sizes in the flags are those of the model: weights of products, without biases and norms."""
    lines = export(said(Plan(1), model=ModelDescription(name)), "megatron").text.splitlines()
    flags = dict(line.partition(" ")[::2] for line in lines)
    number = {key: int(value) for key, value in flags.items() if str(value).isdigit()}
    hidden, depth, heads = (number[f"--{key}"] for key in ("hidden-size", "num-layers", "num-attention-heads"))
    head = number.get("--kv-channels", hidden // heads)
    groups = number.get("--num-query-groups", heads)
    width = number.get("--ffn-hidden-size", 4 * hidden)
    parts = (3 if "--swiglu" in flags else 2) * hidden * width * number.get("--num-experts", 1)
    tables = 2 if "--untie-embeddings-and-output-weights" in flags else 1
    counted = depth * (2 * hidden * head * (heads + groups) + parts) + tables * number["--vocab-size"] * hidden
    assert counted == pytest.approx(model_by_name(name).num_parameters, rel=2e-3)


KEPT = Path(__file__).with_name("exports.json")


def written():
    """Export each plan to its tool; return texts and notes by tool."""
    return {
        tool: [[*found.text.splitlines(), *found.notes] for found in (export(own, tool, Options(0.5)) for own in plans)]
        for tool, plans in PLANS.items()
    }


def test_each_tool_gets_of_each_plan_what_it_got():
    known = json.loads(KEPT.read_text("utf-8"))
    for tool, found in written().items():
        assert found == known[tool], tool


# Options of sbatch, Slurm 23.11.
SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "requeue", "output"}


def test_bash_reads_the_slurm_script_and_sbatch_knows_its_options():
    text = export(said(WIDE), "slurm", Options(script='train.py --note "it\'s"')).text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert set(re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)) <= SBATCH
    assert text.index("#SBATCH --output") < text.index("set -e")


SAID_WHOLE = {  # no tool has a note on these, but megatron and accelerate on what is in no plan
    "deepspeed": said(sharding=Sharding(2), precision=BF16, first_bucket_bytes=25_000_000),
    **dict.fromkeys(("fsdp2", "torchtitan"), said(sharding=Sharding(3), precision=BF16)),
    **dict.fromkeys(("megatron", "accelerate"), said(num_microbatches=1, sharding=Sharding(3))),
}
MADE = {"sharding": Sharding, "precision": Precision, "compression": Compression}
HAS = {
    part: {name: MADE[name](**value) if isinstance(value, dict) else value for name, value in keys.items()}
    for part, keys in tomllib.loads(KEPT.with_name("parts_of_plans.toml").read_text("utf-8")).items()
}
# Parts that a plan alone does not have: the whole file, and words of the refusal.
OWN = [
    ("torchtitan", said(model=ModelDescription("gpt-2-1.5b")), "the model gpt-2-1.5b"),
    ("torchtitan", said(model=ModelDescription(hidden_size=64, num_heads=4)), "the model of these sizes"),
    ("torchtitan", said(Plan(2, 2, 2), order=DATA_FIRST), "order = ['data'"),
    ("torchtitan", said(Plan(1, context=2), sharding=Sharding(3, replicas=2)), "2 replicas do not divide 1 ranks"),
    ("megatron", said(model=ModelDescription("bloom-7.1b")), "ALiBi"),
    ("megatron", said(model=ModelDescription("deepseek-v3")), "latent, shared_size, dense_layers"),
    ("megatron", said(model=ModelDescription(sliding_window=64)), "windows of these sizes"),
    ("megatron", said(Plan(2, 2, 2, tensor=2), order=TENSOR_FIRST), "order = ['tensor'"),
    ("accelerate", said(SHARDED, data=2, tensor=2, order=TENSOR_FIRST), "order"),
    ("slurm", said(Plan(12)), "12 ranks on nodes of 8"),
    ("deepspeed", said(Plan(2, 2, 2, sharding=Sharding(2))), "pipelines take ZeRO stage 0 or 1, and the plan has pipe"),
    ("deepspeed", said(precision=Precision("float64")), "DeepSpeed has no float64 (precision.compute)"),
    ("horovod", said(), "no export to 'horovod'"),
]
OF_FILES = ("no configuration of the model", "an order of its own", "a config.json", "ALiBi", "sizes that no flag says")
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


if __name__ == "__main__":
    KEPT.write_text(json.dumps(written(), indent=1, ensure_ascii=False) + "\n", "utf-8")
