"""Each tool's own parser reads its file: `make test-exports` installs the tools; without one its test is skipped."""

import argparse
import importlib
import json
import shlex
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from plan_files import PLANS, SHARDED, WIDE, said

from simulator.export import Options, export
from simulator.export.torchtitan import SCHEDULES

NOT_HERE = "is not installed: its parser was not asked (make test-exports)"


@pytest.mark.parametrize("own", PLANS["torchtitan"][:8], ids=lambda own: own.workload.model)
def test_torchtitan_makes_its_configuration(own, tmp_path, monkeypatch):
    pytest.importorskip("torchtitan", reason=f"torchtitan {NOT_HERE}")
    pytest.importorskip("triton", reason=f"triton, which torchtitan's models import, {NOT_HERE}")
    from torchtitan.config.manager import ConfigManager

    parallel = pytest.importorskip("torchtitan.distributed.parallel_dims")
    pipelines = importlib.import_module("torchtitan.distributed.pipeline_parallel")
    (tmp_path / "plan.py").write_text(export(own, "torchtitan", Options(1.0)).text)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("plan", None)
    try:
        config = ConfigManager().parse_args(["--module", "plan", "--config", "plan"])
    finally:
        sys.modules.pop("plan", None)
    plan, training = own.plan, config.training
    dims = parallel.ParallelDims.from_config(
        config.parallelism, plan.world_size
    )  # refuses degrees that do not multiply
    assert (dims.tp, dims.cp, dims.pp, dims.ep) == (plan.tensor, plan.context, plan.pipeline, plan.expert)
    assert dims.dp_replicate * dims.dp_shard == plan.num_replicas
    assert training.global_batch_size == own.workload.microbatch_size * plan.num_microbatches * plan.num_replicas
    assert training.global_batch_size % (training.local_batch_size * plan.num_replicas) == 0
    assert (training.max_norm, training.mixed_precision_param) == (1.0, "bfloat16")
    policy = {"none": "NoneType", "selective": "SelectiveAC.Config", "full": "FullAC.Config"}[plan.recompute]
    assert type(config.activation_checkpoint).__qualname__ == policy
    if plan.pipeline > 1:
        stages, *_ = pipelines._get_pipeline_metadata(dims, config.parallelism, config.model_spec.model)
        assert stages == plan.pipeline * plan.stages_per_rank


@pytest.mark.parametrize("own", PLANS["accelerate"][:6], ids=lambda own: f"stage {own.plan.sharding.stage}")
def test_accelerate_reads_its_file_and_knows_each_flag_that_it_makes(own, tmp_path, monkeypatch):
    pytest.importorskip("accelerate", reason=f"accelerate {NOT_HERE}")
    pytest.importorskip("transformers", reason=f"transformers, which accelerate asks of tensor ranks, {NOT_HERE}")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig

    path = tmp_path / "plan.json"
    path.write_text(export(own, "accelerate", Options(1.0)).text)
    read = load_config_from_file(str(path))  # refuses unknown keys
    assert read.num_processes == own.plan.world_size
    known = vars(launch_command_parser().parse_args(["train.py"]))
    for part in (read.fsdp_config, read.parallelism_config, read.deepspeed_config):
        unknown = [key for key in part if key not in known]
        assert not unknown, f"accelerate launch has no flag for {unknown}"
    if read.parallelism_config:
        sizes = {key.removeprefix("parallelism_config_"): value for key, value in read.parallelism_config.items()}
        sizes.pop("cp_comm_strategy", None)
        assert ParallelismConfig(**sizes).total_size == own.plan.world_size


ARGUMENTS = tomllib.loads(Path(__file__).with_name("megatron_arguments.toml").read_text("utf-8"))
FIELDS, OF_TRAINING = ARGUMENTS.pop("fields"), ARGUMENTS.pop("of_training")["names"]


def megatron_arguments(own):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, count in ARGUMENTS.items():
        parser.add_argument(
            f"--{name}", **({"action": "store_true"} if count == 0 else {"nargs": "+"} if count > 1 else {})
        )
    return parser.parse_args(shlex.split(export(own, "megatron", Options(1.0)).text))


def test_megatrons_arguments_have_every_flag():
    assert all(megatron_arguments(own).num_layers for own in PLANS["megatron"])
    own = said(SHARDED, float8="gathers", recompute="full", recompute_method="block", recompute_layers=8)
    found = megatron_arguments(own)
    assert (found.fp8_format, found.fp8_recipe, found.fp8_param_gather) == ("hybrid", "tensorwise", True)
    assert (found.recompute_method, found.recompute_num_layers) == ("block", "8")
    assert megatron_arguments(said(SHARDED, recompute="mlp,layernorm")).recompute_modules == ["mlp", "layernorm"]


@pytest.mark.parametrize("own", PLANS["megatron"][:6], ids=lambda own: own.workload.model)
def test_megatron_core_makes_its_configurations_of_the_flags(own):
    pytest.importorskip("megatron.core", reason=f"megatron-core {NOT_HERE}")
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    classes = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    types = {each.name: each.type for kind in classes for each in fields(kind)}
    values = {}
    for name, value in vars(megatron_arguments(own)).items():
        field = FIELDS.get(name, name)
        if value in (None, False) or not field or name in OF_TRAINING:
            continue
        assert field in types, f"Megatron-Core has no field for --{name.replace('_', '-')}"
        number = str(value).replace(".", "", 1).isdigit()
        values[field] = (float(value) if "." in value else int(value)) if number else value
    values["add_bias_linear"] = not values.pop("add_bias_linear", False)
    values.pop("attention_backend", None)  # an enumeration there, chosen by this very name
    made = []
    for kind in classes:
        names = {each.name for each in fields(kind)}
        own_values = {name: value for name, value in values.items() if name in names}
        if kind is TransformerConfig and own.plan.pipeline > 1:
            own_values["pipeline_dtype"] = torch.bfloat16
        made.append(kind(**own_values))  # each refuses what does not go together
    model, ddp, optimizer = made
    assert model.tensor_model_parallel_size == own.plan.tensor
    assert model.virtual_pipeline_model_parallel_size in (None, own.plan.stages_per_rank)
    assert ddp.use_distributed_optimizer == (own.plan.sharding.stage > 0)
    assert optimizer.clip_grad == 1.0


@pytest.mark.parametrize("own", PLANS["torchrun"], ids=lambda own: f"{own.plan.world_size} ranks")
def test_torchruns_own_parser_reads_the_command(own):
    torchrun = pytest.importorskip("torch.distributed.run")
    _, *words = shlex.split(export(own, "torchrun", Options(script="train.py --name 'a b'")).text)
    read = torchrun.parse_args(words)
    nodes, most = torchrun.parse_min_max_nnodes(read.nnodes)
    assert (nodes, nodes * int(read.nproc_per_node)) == (most, own.plan.world_size)
    assert (read.training_script, read.training_script_args) == ("train.py", ["--name", "a b"])
    (job,) = json.loads(export(own, "jobset").text)["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    words = shlex.split(container["command"][-1].replace('"$JOB_COMPLETION_INDEX"', "0"))
    assert words[:2] == ["exec", "torchrun"]
    assert torchrun.parse_min_max_nnodes(torchrun.parse_args(words[2:]).nnodes) == (nodes, nodes)


def test_the_training_operators_client_reads_the_pytorchjob():
    pytest.importorskip("kubeflow.training", reason=f"kubeflow-training {NOT_HERE}")
    from kubeflow.training import models
    from kubeflow.training.api_client import ApiClient

    text = export(said(WIDE), "pytorchjob").text

    class Answer:
        data = text

    client = ApiClient()
    read = client.deserialize(Answer(), models.KubeflowOrgV1PyTorchJob)
    assert read.spec.pytorch_replica_specs["Worker"].replicas == WIDE.world_size // 8 - 1
    assert client.sanitize_for_serialization(read) == json.loads(text), "a field that it does not know"


def test_trainers_client_reads_the_jobset():
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=f"kubeflow-trainer-api {NOT_HERE}")
    text = export(said(WIDE), "jobset").text
    read = models.JobsetV1alpha2JobSet.from_dict(json.loads(text))
    assert read.spec.replicated_jobs[0].template.spec.completions == WIDE.world_size // 8
    assert json.loads(read.to_json()) == json.loads(text), "a field that it does not know"


def test_torch_has_every_schedule_that_torchtitan_is_given():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for name in SCHEDULES.values():
        assert schedules.get_schedule_class(name).__name__


def test_deepspeeds_own_parser_reads_the_plan_back():
    pytest.importorskip("deepspeed", reason=f"DeepSpeed {NOT_HERE}")
    from deepspeed.runtime.config import DeepSpeedConfig

    for own in PLANS["deepspeed"][:-2]:
        plan, read = own.plan, DeepSpeedConfig(json.loads(export(own, "deepspeed", Options(1.0)).text))
        zero = read.zero_config
        assert zero.stage == plan.sharding.stage
        assert (zero.offload_optimizer is not None) == (plan.sharding.offload != "none")
        assert (zero.offload_param is not None) == (plan.sharding.offload == "all")
        assert read.gradient_accumulation_steps == plan.num_microbatches
        assert (read.train_micro_batch_size_per_gpu, read.gradient_clipping) == (2, 1.0)
        assert not zero.model_extra, "a field that it does not know"
        if plan.sharding.stage == 3:
            assert zero.param_persistence_threshold == 0
        if plan.precision is not None:
            assert read.bfloat16_config.enabled == (plan.precision.compute == "bfloat16")
            assert read.float16_config.enabled == (plan.precision.compute == "float16")
