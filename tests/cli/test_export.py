"""A plan's flags become a file of a different tool, and what it cannot say is told beside it."""

import json

import pytest

from distlab.cli import main


def test_deepspeed_is_json_with_notes_beside_it(capsys):
    plan = ["--data", "64", "--sharding", "3", "--microbatches", "4", "--microbatch", "2", "--offload", "optimizer"]
    plan += ["--replicas", "8", "--max-norm", "1.0", "--precision", "bfloat16"]
    assert main(["export", "--to", "deepspeed", *plan]) == 0
    said = capsys.readouterr()
    config = json.loads(said.out)
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    assert (config["gradient_accumulation_steps"], config["train_micro_batch_size_per_gpu"]) == (4, 2)
    assert (config["gradient_clipping"], config["bf16"]) == (1.0, {"enabled": True})
    assert "# replicas=8: no counterpart" in said.err
    assert main(["export", "--to", "deepspeed", *plan, "--hidden", "1024"]) == 0
    smaller = json.loads(capsys.readouterr().out)["zero_optimization"]["stage3_prefetch_bucket_size"]
    assert 0 < smaller < config["zero_optimization"]["stage3_prefetch_bucket_size"]


@pytest.mark.parametrize("stage", [0, 3])
def test_fsdp2_is_code(stage, capsys):
    flags = ["--sharding", str(stage), "--blocks", "model.layers", "--pipeline", "2"]
    assert main(["export", "--to", "fsdp2", *flags]) == 0
    said = capsys.readouterr()
    compile(said.out, "export.py", "exec")
    assert "# pipeline=2: not here" in said.out
    assert ("fully_shard(model" in said.out) == ("model.layers" in said.out) == (stage > 0)
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


MISTAKES = [
    ([], "--to"),
    (["--to", "horovod"], "horovod"),
    (["--to", "fsdp2", "--max-norm", "-1"], "'-1' is not a positive number"),
    (["--to", "fsdp2", "--sharding", "3", "--blocks", "my layers"], "my layers"),
    (["--to", "torchtitan", "--model", "llama-3-8b", "--sharding", "1"], "sharding"),
    (["missing.toml", "--to", "slurm"], "missing.toml: No such file"),
    (["missing.toml", "--to", "slurm", "--data", "2"], "leave out --data"),
    (["--to", "torchrun", "--script", " "], "script"),
    (["--to", "slurm", "--data", "12"], "12"),
    (["--to", "deepspeed", "--sharding", "2", "--pipeline", "2"], "pipeline"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(arguments, words, refused):
    assert words in refused("export", *arguments)
