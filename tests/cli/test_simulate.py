"""`distlab simulate`: flags and plan files, what it says of a step, and what to change where it does not fit."""

import json
import re

import pytest

from distlab.cli import main


def said(capsys, *flags):
    assert main(["simulate", *flags]) == 0
    return capsys.readouterr().out


def facts(capsys, *flags):
    return json.loads(said(capsys, *flags, "--json"))


def test_a_step_as_json_with_its_files(capsys, tmp_path):
    picture, trace, memory = tmp_path / "step.png", tmp_path / "step.json", tmp_path / "memory.png"
    files = ["--picture", str(picture), "--trace", str(trace), "--memory", str(memory)]
    found = facts(capsys, "--data", "100", "--pipeline", "4", "--microbatches", "8", *files)
    assert found["ranks"] == 400
    assert len(found["sent_bytes_by_pipeline_rank"]) == 4
    assert 0 < found["bubble_fraction"] < 1
    assert found["duration_s"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert memory.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def test_presets_and_a_plan_that_fits(capsys):
    listed = said(capsys, "--list")
    assert re.search(r"  dgx-a100 +8 x a100-sxm-80gb of 80 GB; .* of .*B/s inside, .* of .*B/s between nodes", listed)
    assert re.search(r"  llama-2-7b +6.738 billion", listed)
    assert re.search(r"  megatron +Megatron-LM of 2021 .*; \d+%, \d+%\n", listed)
    found = said(capsys, "--cluster", "dgx-a100")
    assert "fit" not in found
    assert "exposed communication" in found
    assert re.search(r"MFU +\d+\.\d% of the data sheet's 312 TFLOP/s per rank", found)
    assert re.search(r"of achievable products +\d+\.\d% of \d+ TFLOP/s", found)
    assert re.search(r"step +.* samples per second", found)


def test_recompute_of_some_blocks_and_8_bits(capsys):
    machine = ["--model", "llama-3-8b", "--sharding", "3", "--cluster", "dgx-h100"]
    some = ["--recompute", "full", "--recompute-method", "every", "--recompute-layers", "2"]
    rows = [facts(capsys, *machine, *more) for more in ([], some, ["--recompute", "full"], ["--float8", "gathers"])]
    none, every, full, narrow = rows
    assert none["duration_s"] < every["duration_s"] < full["duration_s"]
    assert none["max_memory_bytes"] > every["max_memory_bytes"] > full["max_memory_bytes"]
    assert narrow["duration_s"] < none["duration_s"]
    assert "not modelled" in narrow["notes"][0]


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "llama-2-7b"],
        ["--hidden", "4096", "--layers", "32", "--microbatch", "16"],
        ["--model", "gpt-3-175b", "--tensor", "8", "--pipeline", "8", "--data", "1", "--microbatches", "64"]
        + ["--schedule", "interleaved", "--stages-per-rank", "2"],  # the advice tries 1F1B, with one stage per rank
    ],
)
def test_the_flags_that_simulate_advises_make_the_plan_fit(capsys, flags):
    found = said(capsys, *flags)
    assert found.startswith("does not fit")
    assert "DOES NOT FIT" in found
    assert "if it fitted" in found
    assert "samples per second" not in found, "no claim on speed"
    told, advised = re.search(r"the plan needs (\S+ \S+) and .*; add (--.*?), and it needs", found).groups()
    assert f"memory, fullest rank   {told} of " in found, "the same memory is told twice"
    assert facts(capsys, *flags, *advised.split())["fits"] is True  # the later flag counts


def test_what_fills_the_memory(capsys):
    model = ["--model", "llama-2-7b", "--data", "8"]
    assert "  optimizer            53.9 GB" in said(capsys, *model)
    plan = ["--sharding", "3", "--recompute", "full", "--offload", "all", "--precision", "bfloat16"]
    found = facts(capsys, *model, *plan)
    assert found["fits"] is True
    assert found["memory_bytes_by_kind"]["parameters"] == 0
    assert found["host_memory_bytes"] == pytest.approx(18 * 6.738e9 / 8, rel=1e-3)
    own = ("--data", "2", "--microbatches", "2", "--sharding", "1", "--stack")
    once, twice = (facts(capsys, *own, name)["memory_bytes_by_kind"]["gradients"] for name in ("megatron", "fsdp"))
    assert twice == 2 * once  # software of FSDP keeps the gradients of a plan without shards twice


def test_memory_is_counted_where_no_time_is_simulated(capsys, refused, tmp_path):
    split = ["--model", "gpt-3-175b", "--tensor", "8", "--pipeline", "8", "--data", "2", "--sharding", "3"]
    split += ["--schedule", "zb_h1", "--sequence-parallel"]
    found = said(capsys, *split, "--memory", str(tmp_path / "memory.png"))
    assert "2 (data) x 8 (pipeline) x 8 (tensor)" in found
    assert "not simulated" in found
    assert (tmp_path / "memory.png").exists()
    assert "use --memory" in refused("simulate", *split, "--picture", str(tmp_path / "step.png"))


LLAMA = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--sharding", "3"]
LONG = ["--hidden", "256", "--layers", "2", "--heads", "8", "--vocabulary", "100", "--stack", "best-case"]
NOTES = [  # a plan, what is noted of it, and a change with which it is not
    (
        ["--data", "1", "--pipeline", "4", "--schedule", "interleaved", "--microbatches", "10"],
        "which Megatron-LM refuses: use a multiple of 4",
        ["--microbatches", "8"],
    ),
    (LLAMA, "near the device's memory: published runs", ["--recompute", "full"]),
    ([*LONG, "--attention", "flash", "--sequence", "100000"], "all pairs of positions", ["--sequence", "1024"]),
    (
        [*LLAMA, "--precision", "float32"],
        "float32: products are timed at the device's one rate",
        ["--precision=bfloat16"],
    ),
    (["--expert", "2"], "the model has no experts, so that 2 expert ranks are replicas: use data", ["--expert=1"]),
    (
        ["--cluster", "dgx-h100", "--experts", "4", "--top-k", "2", "--expert", "8"],
        "8 expert ranks share 4 experts, so that most have none: use 4",
        ["--expert=4"],
    ),
]


@pytest.mark.parametrize(("flags", "words", "change"), NOTES)
def test_what_to_know_of_a_plan_is_noted(capsys, flags, words, change):
    assert words in "\n".join(facts(capsys, *flags)["notes"])
    assert words not in "\n".join(facts(capsys, *flags, *change)["notes"])


def test_a_step_of_a_run_is_told_where_it_is_shorter(capsys):
    flags = ["--data", "1", "--pipeline", "4", "--microbatches", "16", "--layers", "32", "--vocabulary", "512"]
    assert "step in a run" in said(capsys, *flags, "--hidden", "4096", "--schedule", "zb_h2")
    assert "step in a run" not in said(capsys, *flags, "--hidden", "4096")


def test_models_by_sizes_and_by_a_hugging_face_configuration(capsys, refused, tmp_path):
    sizes = ["--hidden", "4096", "--layers", "32", "--heads", "32", "--vocabulary", "32000", "--feed-forward", "11008"]
    plain, grouped = facts(capsys, *sizes), facts(capsys, *sizes, "--kv-heads", "8", "--attention", "flash")
    assert plain["parameters"] == 6_738_415_616  # Llama 2 7B
    assert grouped["parameters"] < plain["parameters"]
    assert grouped["memory_bytes_by_kind"]["activations"] < plain["memory_bytes_by_kind"]["activations"]
    tiny = ["--hidden", "8", "--heads", "1", "--layers", "1", "--vocabulary", "1", "--sequence", "1", "--data", "1"]
    assert re.search(r"model +GPT 0.000888M, 888 parameters", said(capsys, *tiny))
    path = tmp_path / "config.json"
    llama = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    llama |= {"intermediate_size": 1024, "vocab_size": 1000}
    path.write_text(json.dumps(llama))
    found = facts(capsys, "--config", str(path))
    assert found["parameters"] == 4 * (4 * 512**2 + 3 * 512 * 1024 + 2 * 512) + 2 * 1000 * 512 + 512
    assert "leave out --kv-heads" in refused("simulate", "--config", str(path), "--kv-heads", "2")
    path.write_text(json.dumps(llama | {"loops": 2}))
    assert "unknown field 'loops'" in refused("simulate", "--config", str(path))


def test_a_plan_file_says_what_flags_say(capsys, refused, tmp_path):
    path = tmp_path / "plan.toml"
    text = '[workload]\nnum_layers = 8\n[cluster]\nname = "dgx-h100"\n'
    path.write_text(f"{text}[plan]\ndata = 2\npipeline = 2\nnum_microbatches = 4\n")
    flags = ["--layers", "8", "--cluster", "dgx-h100", "--data", "2", "--pipeline", "2", "--microbatches", "4"]
    assert said(capsys, str(path), "--json") == said(capsys, *flags, "--json")
    for told in ("8", "2"):  # also where it is the flags' default
        assert "leave out --data" in refused("simulate", str(path), "--data", told)


def test_a_step_that_takes_long_says_so_first(capsys, monkeypatch):
    few = ["simulate", "--model", "gpt-2-1.5b", "--data", "1", "--pipeline", "4", "--microbatches", "8"]
    monkeypatch.setattr("distlab.cli.predict.simulate.MANY_PASSES", 31)
    assert main(few) == 0
    assert capsys.readouterr().err == "simulating 32 passes; this takes up to a minute\n"


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
def test_what_is_wrong_in_a_plan_file_is_told_with_its_name(tmp_path, refused, tables, told):
    path = tmp_path / "odd.toml"
    path.write_text(f"{tables}\n[run]\nnum_tokens = 1e9\n")
    for command in ("simulate", "cost"):
        assert re.match(rf"distlab {command}: {re.escape(str(path))}: {told}", refused(command, str(path)))
