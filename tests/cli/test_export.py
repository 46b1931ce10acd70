"""A plan's flags become a file of a different tool, and what it cannot say is told beside it."""

import json

import pytest

from distlab.cli import main


def test_deepspeed_is_json_with_notes_beside_it(capsys):
    plan = ["--data", "64", "--sharding", "3", "--microbatches", "4", "--microbatch", "2", "--offload", "optimizer"]
    assert (
        main(["export", "--to", "deepspeed", *plan, "--replicas", "8", "--max-norm", "1.0", "--precision", "bfloat16"])
        == 0
    )
    said = capsys.readouterr()
    config = json.loads(said.out)
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert (config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"]) == (4, 2)
    assert (config["gradient_clipping"], config["bf16"]) == (1.0, {"enabled": True})
    assert "# replicas=8: no counterpart" in said.err


def test_the_models_sizes_set_what_deepspeed_gathers_ahead(capsys):
    found = []
    for hidden in ("1024", "2048"):
        assert main(["export", "--to", "deepspeed", "--sharding", "3", "--hidden", hidden]) == 0
        found.append(json.loads(capsys.readouterr().out)["zero_optimization"]["stage3_prefetch_bucket_size"])
    assert 0 < found[0] < found[1]


@pytest.mark.parametrize("stage", range(4))
def test_fsdp2_is_code(stage, capsys):
    assert (
        main(["export", "--to", "fsdp2", "--sharding", str(stage), "--blocks", "model.layers", "--pipeline", "2"]) == 0
    )
    said = capsys.readouterr()
    compile(said.out, "export.py", "exec")
    assert "# pipeline=2: not here" in said.out
    assert ("fully_shard(model" in said.out) == (stage >= 2)
    assert ("model.layers" in said.out) == (stage >= 2)
    assert said.err == ""


def test_a_plan_file_is_exported_as_its_flags_are(capsys, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[workload]\nmodel = "llama-3-8b"\n[cluster]\nname = "dgx-h100"\n[plan]\ndata = 16\n')
    flags = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--data", "16"]
    for tool in ("torchtitan", "megatron", "accelerate", "torchrun", "slurm", "pytorchjob", "jobset"):
        assert main(["export", str(path), "--to", tool]) == 0
        from_file = capsys.readouterr()
        assert main(["export", "--to", tool, *flags]) == 0
        assert capsys.readouterr() == from_file
        assert from_file.out.endswith("\n")


MISTAKES = {
    "no tool": [],
    "unknown tool": ["--to", "horovod"],
    "no norm": ["--to", "fsdp2", "--max-norm", "-1"],
    "norm is text": ["--to", "fsdp2", "--max-norm", "one"],
    "no name": ["--to", "fsdp2", "--sharding", "3", "--blocks", "my layers"],
    "a part that it cannot express": ["--to", "torchtitan", "--model", "llama-3-8b", "--sharding", "1"],
    "no such file": ["missing.toml", "--to", "slurm"],
    "a flag beside a file": ["missing.toml", "--to", "slurm", "--data", "2"],
    "no script": ["--to", "torchrun", "--script", " "],
    "no fitting nodes": ["--to", "slurm", "--data", "12"],
    "pipeline with stage 2": ["--to", "deepspeed", "--sharding", "2", "--pipeline", "2"],
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_line_and_exit_2(arguments, refused):
    assert refused("export", *arguments).startswith("distlab export: ")
