"""What users of `distlab simulate` met: each was wrong once."""

import json
import re

import pytest

from distlab.cli import main


def said(capsys, *flags):
    assert main(["simulate", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_a_plan_with_several_stages_per_rank_that_does_not_fit_is_advised(capsys, schedule):
    """The advice tries 1F1B, which has one stage per rank: it once ended with an error about that."""
    flags = ["--model", "gpt-3-175b", "--tensor", "8", "--pipeline", "8", "--data", "1", "--microbatches", "64"]
    found = said(capsys, *flags, "--schedule", schedule, "--stages-per-rank", "2")
    assert found.startswith("does not fit")
    assert "add --" in found
    advised = re.search(r"; add (--.*?), and it needs", found).group(1).split()
    if "one_f_one_b" in advised:
        assert advised[advised.index("--stages-per-rank") + 1] == "1"


def test_mfu_is_over_the_data_sheet_and_the_other_rate_has_its_own_name(capsys):
    found = said(capsys, "--cluster", "dgx-a100")
    assert re.search(r"MFU +\d+\.\d% of the data sheet's 312 TFLOP/s per rank", found)
    assert re.search(r"of achievable products +\d+\.\d% of \d+ TFLOP/s", found)
    facts = json.loads(said(capsys, "--cluster", "dgx-a100", "--json"))
    assert facts["mfu"] < facts["utilization_of_achieved_rate"]
    assert "utilization" not in facts


def test_sharded_parameters_in_a_pipeline_have_a_time(capsys):
    flags = ["--sharding", "3", "--pipeline", "8", "--data", "2", "--layers", "30", "--microbatches", "8", "--json"]
    assert json.loads(said(capsys, *flags))["duration_s"] > 0


def test_json_has_one_number_per_place_in_the_pipeline(capsys):
    flags = ["--data", "100", "--pipeline", "4", "--microbatches", "8", "--json"]
    facts = json.loads(said(capsys, *flags))
    assert facts["ranks"] == 400
    assert len(facts["sent_bytes_by_pipeline_rank"]) == 4
    assert "sent_bytes_per_rank" not in facts


def test_micro_batches_that_megatron_refuses_are_named(capsys):
    flags = ["--data", "1", "--pipeline", "4", "--schedule", "interleaved", "--microbatches"]
    assert "which Megatron-LM refuses: use a multiple of 4" in said(capsys, *flags, "10")
    assert "Megatron" not in said(capsys, *flags, "8")
    assert json.loads(said(capsys, *flags, "10", "--json"))["notes"]


def test_expert_ranks_without_experts_are_named(capsys):
    """A dense model's are replicas; of a mixture, more ranks than experts."""
    flags = ("--cluster", "dgx-h100", "--sharding", "1", "--json")
    mixed = ("--experts", "4", "--top-k", "2")
    told = [
        json.loads(said(capsys, *flags, *more, "--expert", str(ranks)))["notes"]
        for more, ranks in (((), 2), (mixed, 8), (mixed, 4), ((), 1))
    ]
    assert told[0] == ["the model has no experts, so that 2 expert ranks are replicas: use data"]
    assert told[1][1:] == ["8 expert ranks share 4 experts, so that most have none: use 4"]
    assert told[1][0].startswith("mixtures of experts: not modelled is what hosts wait for")
    assert told[2:] == [told[1][:1], []]


def test_memory_is_that_of_the_stack_that_drives_the_cluster(capsys):
    """Megatron-LM keeps gradients once, FSDP's software of a plan without shards twice: 4 bytes a parameter."""
    flags = ("--data", "2", "--microbatches", "2", "--sharding", "1", "--json", "--stack")
    found = [json.loads(said(capsys, *flags, name)) for name in ("megatron", "fsdp")]
    once, twice = (facts["memory_bytes_by_kind"]["gradients"] for facts in found)
    assert twice == 2 * once
    assert found[0]["max_memory_bytes"] < found[1]["max_memory_bytes"]


def test_a_plan_that_nearly_fills_its_device_is_told_so(capsys):
    """Of 80 GB: what is counted leaves out what the allocator keeps besides, up to 13 %."""
    flags = ("--model", "llama-3-8b", "--cluster", "dgx-h100", "--sharding", "3", "--json", "--recompute")
    full, free = (json.loads(said(capsys, *flags, kind)) for kind in ("none", "full"))
    assert 80e9 / 1.13 < full["max_memory_bytes"] <= 80e9
    assert full["notes"][0].startswith("near the device's memory: published runs")
    assert free["max_memory_bytes"] < 80e9 / 1.13
    assert free["notes"] == []


def test_an_mfu_above_1_says_why(capsys):
    """Long sequences on a device at its best: papers count pairs that a causal mask hides."""
    flags = ["--hidden", "256", "--layers", "2", "--heads", "8", "--vocabulary", "100", "--stack", "best-case"]
    long, short = (
        json.loads(said(capsys, *flags, "--attention", "flash", "--sequence", length, "--json"))
        for length in ("100000", "1024")
    )
    assert long["mfu"] > 1
    assert "all pairs of positions" in long["notes"][0]
    assert short["mfu"] < 1
    assert not short["notes"]


def test_a_step_of_a_run_is_told_where_it_is_shorter(capsys):
    flags = ["--data", "1", "--pipeline", "4", "--microbatches", "16", "--layers", "32", "--vocabulary", "512"]
    flags += ["--hidden", "4096", "--schedule"]
    assert "step in a run" in said(capsys, *flags, "zb_h2")
    assert "step in a run" not in said(capsys, *flags, "one_f_one_b")


def test_a_llama_by_sizes_and_flash_attention(capsys, refused):
    sizes = ["--hidden", "4096", "--layers", "32", "--heads", "32", "--vocabulary", "32000", "--feed-forward", "11008"]
    facts = json.loads(said(capsys, *sizes, "--json"))
    assert facts["parameters"] == 6_738_415_616  # Llama 2 7B
    grouped = json.loads(said(capsys, *sizes, "--kv-heads", "8", "--attention", "flash", "--json"))
    assert grouped["parameters"] < facts["parameters"]
    assert grouped["memory_bytes_by_kind"]["activations"] < facts["memory_bytes_by_kind"]["activations"]
    assert "leave out --feed-forward" in refused("simulate", "--model", "llama-2-7b", "--feed-forward", "8")


def test_a_model_from_a_hugging_face_configuration(capsys, refused, tmp_path):
    path = tmp_path / "config.json"
    sizes = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    path.write_text(json.dumps(sizes | {"intermediate_size": 1024, "vocab_size": 1000}))
    facts = json.loads(said(capsys, "--config", str(path), "--json"))
    assert facts["parameters"] == 4 * (4 * 512**2 + 3 * 512 * 1024 + 2 * 512) + 2 * 1000 * 512 + 512
    path.write_text(json.dumps(sizes | {"loops": 2, "intermediate_size": 1024, "vocab_size": 1000}))
    for flags, text in (
        (["--config", str(path)], "unknown field 'loops'"),
        (["--config", str(tmp_path / "none.json")], "No such file"),
        (["--config", str(path), "--kv-heads", "2"], "leave out --kv-heads"),
    ):
        assert text in refused("simulate", *flags)


def test_a_plan_file_says_what_flags_say(capsys, refused, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("""
    [workload]
    num_layers = 8
    [cluster]
    name = "dgx-h100"
    [plan]
    data = 2
    pipeline = 2
    num_microbatches = 4
    """)
    flags = ["--layers", "8", "--cluster", "dgx-h100", "--data", "2", "--pipeline", "2", "--microbatches", "4"]
    assert said(capsys, str(path), "--json") == said(capsys, *flags, "--json")
    for told in ("8", "2"):  # also where it is the flags' default
        assert "leave out --data" in refused("simulate", str(path), "--data", told)
    assert "No such file" in refused("simulate", str(tmp_path / "none.toml"))
    many = ["--pipeline", "8", "--microbatches", "1000000"]
    assert "8,000,000 passes" in refused("simulate", *many)


def test_the_stack_is_chosen_by_name(capsys, refused):
    slow, best = (
        json.loads(said(capsys, "--stack", name, "--json"))["duration_s"] for name in ("megatron", "best-case")
    )
    assert slow > 1.1 * best
    assert "no preset 'abacus' among the stacks" in refused("simulate", "--stack", "abacus")
    assert re.search(r"  megatron +Megatron-LM of 2021 .*; \d+%, \d+%\n", said(capsys, "--list"))


def test_a_step_that_takes_long_says_so_first(capsys, monkeypatch):
    few = ["simulate", "--model", "gpt-2-1.5b", "--data", "1", "--pipeline", "4", "--microbatches", "8"]
    assert main(few) == 0
    assert "takes up to a minute" not in capsys.readouterr().err
    monkeypatch.setattr("distlab.cli.predict.simulate.MANY_PASSES", 31)
    assert main(few) == 0
    assert capsys.readouterr().err == "simulating 32 passes; this takes up to a minute\n"


def test_the_same_memory_is_told_twice(capsys):
    """Layers of unequal time: what does not fit was counted by a cut that was not the step's, 151 GB beside 171."""
    flags = ["--model=deepseek-v3", "--cluster=h800", "--pipeline=16", "--expert=64", "--microbatches=16"]
    facts = json.loads(said(capsys, *flags, "--sharding", "1", "--json"))
    told = re.search(r"the plan needs (\S+ \S+) and", facts["why_not"]).group(1)
    shown = said(capsys, *flags, "--sharding", "1")
    assert f"memory, fullest rank   {told} of 80 GB: DOES NOT FIT" in shown


def test_products_wider_than_16_bits_are_said_to_be_timed_as_those(capsys):
    flags = ["--model", "llama-3-8b", "--sharding", "3", "--recompute", "full", "--json", "--precision"]
    wide, narrow = (json.loads(said(capsys, *flags, kind))["notes"] for kind in ("float32", "bfloat16"))
    assert wide[0].startswith("float32: products are timed at the device's one rate")
    assert not any("one rate" in note for note in narrow)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ("[workload]\nnum_heads = 17\n[plan]\ndata = 8", r"\[workload\] GPT: 17 heads do not divide hidden_size 2048"),
        ("[workload]\nconfig = 'none.json'", r"\[workload\] config none.json: No such file or directory"),
        ("[plan]\ntensor = 3", r"3 \(tensor\) ranks cannot divide 16 heads evenly; use a divisor of 16"),
        ("[plan]\npipeline = 30", r"the plan has 30 pipeline stages; workload 'GPT 1.32B' has 26 layers"),
        ("[cluster]\nname = 'none'", r"\[cluster\] no preset 'none' among the clusters"),
        ("[plan]\ndata = 2000000", r"the plan has 2,000,000 ranks; simulate takes at most"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "cost"])
def test_what_is_wrong_in_a_plan_file_is_told_with_its_name(tmp_path, capsys, command, tables, told):
    path = tmp_path / "odd.toml"
    path.write_text(f"{tables}\n[run]\nnum_tokens = 1e9\n")
    assert main([command, str(path)]) == 2
    assert re.match(rf"distlab {command}: {re.escape(str(path))}: {told}", capsys.readouterr().err)


def test_the_parameters_of_a_tiny_model_are_counted_one_by_one(capsys):
    flags = ["--hidden", "8", "--heads", "1", "--layers", "1", "--vocabulary", "1", "--sequence", "1", "--data", "1"]
    assert re.search(r"model +GPT 0.000888M, 888 parameters", said(capsys, *flags))
