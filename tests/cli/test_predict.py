"""`simulate`, `plan`, `cost` and `export`: flags and plan files, what is said of them, and what to change."""

import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from distlab.cli import main
from distlab.cli.simulate import TOOLS

PNG = b"\x89PNG"
TEXT = """
[workload]
hidden_size = 512
num_layers = 4
num_heads = 8
vocab_size = 8000
sequence_length = 256
[cluster]
name = "dgx-a100"
[plan]
data = 2
pipeline = 2
num_microbatches = 8
"""
RUN = """
[run]
num_tokens = 1e12
price = 2.0
failures = { rate = 1e-3, save_s = 20, restart_s = 300 }
"""


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "plan.toml"
    found.write_text(TEXT + RUN)
    return found


TOKENS = "[run]\nnum_tokens = 1e12\n"
FILES = [  # a plan file, flags of `cost`, and what is told
    (TEXT, "", r"has no \[run\] with num_tokens"),
    (TEXT, "--tokens 1e9 --failures weekly", "one of llama-3"),
    (TEXT, "--tokens 1e9 --curve curve.txt", "expected a picture"),
    (TEXT.replace("512", "40960"), "--tokens 1e9", "does not fit"),
    (TEXT + "[run]\ntokens = 1e9\n", "", r"did you mean 'num_tokens'\?"),
    (TEXT + "[run]\nprice = 2.0\n", "", r"\[run\] lacks num_tokens"),
    (TEXT + TOKENS + "price = -2.0\n", "", r"the price is -2\.0"),
]
BOTH = [  # a plan file, and what `simulate` and `cost` tell of it, in the same words
    ("[workload]\nnum_heads = 17\n[plan]\ndata = 8", r"\[workload\] GPT: 17 heads do not divide hidden_size 2048"),
    ("[workload]\nconfig = 'none.json'", r"\[workload\] config none.json: No such file or directory"),
    ("[plan]\ntensor = 3", r"3 \(tensor\) ranks cannot divide 16 heads evenly; use a divisor of 16"),
    ("[plan]\ndata = 2000000", r"the plan has 2,000,000 ranks; simulate takes at most"),
]


def test_what_is_wrong_in_a_plan_file_is_one_line(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.toml"
    for text, flags, told in FILES:
        path.write_text(text)
        assert re.search(told, refused("cost", "plan.toml", *flags.split()))
    for text, told in BOTH:
        path.write_text(f"{text}\n{TOKENS}")
        for command in ("simulate", "cost"):
            assert re.match(rf"distlab {command}: plan\.toml: {told}", refused(command, "plan.toml"))
    path.write_text(TEXT)
    for told in ("8", "2"):  # also where it is the flags' default
        assert "leave out --data" in refused("simulate", "plan.toml", "--data", told)


def test_a_step_as_json_with_its_files(facts, tmp_path):
    picture, trace, memory = tmp_path / "step.png", tmp_path / "step.json", tmp_path / "memory.png"
    files = ["--picture", picture, "--trace", trace, "--memory", memory]
    found = facts("simulate", "--data", "100", "--pipeline", "4", "--microbatches", "8", *files)
    assert (found["ranks"], len(found["sent_bytes_by_pipeline_rank"])) == (400, 4)
    assert 0 < found["bubble_fraction"] < 1
    assert found["duration_s"] > 0
    assert picture.read_bytes()[:4] == memory.read_bytes()[:4] == PNG
    assert json.loads(trace.read_text())["traceEvents"]


def test_presets_and_a_plan_that_fits(said):
    listed = said("simulate", "--list")
    assert re.search(r"  dgx-a100 +8 x a100-sxm-80gb of 80 GB; .* of .*B/s inside, .* of .*B/s between nodes", listed)
    assert re.search(r"  llama-2-7b +6.738 billion", listed)
    assert re.search(r"  megatron +Megatron-LM of 2021 .*; \d+%, \d+%\n", listed)
    found = said("simulate", "--cluster", "dgx-a100")
    assert "NOT FIT" not in found
    assert "exposed communication" in found
    assert re.search(r"MFU +\d+\.\d% of the data sheet's 312 TFLOP/s per rank", found)
    assert re.search(r"of achievable products +\d+\.\d% of \d+ TFLOP/s", found)
    assert re.search(r"step +.* samples per second", found)
    assert re.search(r"error of the time +\d.* published steps like it .*\n(.*\n)*error of the memory +\d", found)


PIPELINES = "--tensor 8 --pipeline 8 --data 1 --microbatches 64 --schedule interleaved --stages-per-rank 2"


@pytest.mark.parametrize(
    "flags",
    [
        f"--model gpt-3-175b {PIPELINES}",  # the advice tries 1F1B, with one stage per rank
        "--model llama-2-7b --data 1 --sequence 2048 --recompute full",  # one rank: sharding carries offload
        "--model llama-2-70b --data 8",  # no single change
    ],
)
def test_the_flags_that_simulate_advises_make_the_plan_fit(said, facts, flags):
    found = said("simulate", *flags.split())
    assert found.startswith("does not fit")
    assert "DOES NOT FIT" in found
    assert "if it fitted" in found
    assert "samples per second" not in found, "no claim on speed"
    told, advised = re.search(r"the plan needs (\S+ \S+) and .*; add (--.*?), and it needs", found).groups()
    assert f"memory, fullest rank   {told} of " in found, "the same memory is told twice"
    assert facts("simulate", *flags.split(), *advised.split())["fits"] is True  # the later flag counts


def test_what_fills_the_memory_also_where_no_time_is_simulated(said, facts, refused, tmp_path):
    model = ["simulate", "--model", "llama-2-7b", "--data", "8"]
    assert "  optimizer            53.9 GB" in said(*model)
    plan = ["--sharding", "3", "--recompute", "full", "--offload", "all", "--precision", "bfloat16"]
    found = facts(*model, *plan)
    assert found["fits"] is True
    assert found["memory_bytes_by_kind"]["parameters"] == 0
    assert found["host_memory_bytes"] == pytest.approx(18 * 6.738e9 / 8, rel=1e-3)
    some = ["--recompute-method", "every", "--recompute-layers", "2", "--float8", "gathers"]
    found = facts(*model, "--cluster", "dgx-h100", "--sharding", "3", "--recompute", "full", *some)
    assert "not modelled" in found["notes"][0]
    own = ("simulate", "--data", "2", "--microbatches", "2", "--sharding", "1", "--stack")
    once, twice = (facts(*own, name)["memory_bytes_by_kind"]["gradients"] for name in ("megatron", "fsdp"))
    assert twice == 2 * once  # software of FSDP keeps the gradients of a plan without shards twice
    split = ["--model", "gpt-3-175b", "--tensor", "8", "--pipeline", "8", "--data", "2", "--sharding", "3"]
    split += ["--schedule", "zb_h1", "--sequence-parallel"]
    shown = said("simulate", *split, "--memory", tmp_path / "memory.png")
    assert "2 (data) x 8 (pipeline) x 8 (tensor)" in shown
    assert "not simulated" in shown
    assert (tmp_path / "memory.png").exists()
    assert "use --memory" in refused("simulate", *split, "--picture", tmp_path / "step.png")


NOTES = Path(__file__).with_name("notes.txt").read_text("utf-8")  # a plan, a note, and a change without it


def test_what_to_know_of_a_plan_is_noted(facts):
    for row in NOTES.splitlines():
        flags, words, change = row.split(" | ")
        assert words in "\n".join(facts("simulate", *flags.split())["notes"])
        assert words not in "\n".join(facts("simulate", *flags.split(), *change.split())["notes"])


def test_a_step_of_a_run_is_told_where_it_is_shorter_and_a_long_simulation_first(said, capsys, monkeypatch):
    flags = ["simulate", "--data", "1", "--pipeline", "4", "--layers", "32", "--vocabulary", "512", "--hidden", "4096"]
    assert "step in a run" in said(*flags, "--microbatches", "16", "--schedule", "zb_h2")
    assert "step in a run" not in said(*flags, "--microbatches", "16")
    monkeypatch.setattr("distlab.cli.simulate.MANY_PASSES", 31)
    assert main([*flags, "--microbatches", "8"]) == 0
    assert capsys.readouterr().err == "simulating 32 passes; this takes up to a minute\n"


def test_models_by_sizes_and_by_a_hugging_face_configuration(said, facts, refused, tmp_path):
    sizes = ["--hidden", "4096", "--layers", "32", "--heads", "32", "--vocabulary", "32000", "--feed-forward", "11008"]
    plain = facts("simulate", *sizes)
    grouped = facts("simulate", *sizes, "--kv-heads", "8", "--attention", "flash")
    assert plain["parameters"] == 6_738_415_616  # Llama 2 7B
    assert grouped["parameters"] < plain["parameters"]
    assert grouped["memory_bytes_by_kind"]["activations"] < plain["memory_bytes_by_kind"]["activations"]
    tiny = ["--hidden", "8", "--heads", "1", "--layers", "1", "--vocabulary", "1", "--sequence", "1", "--data", "1"]
    assert re.search(r"model +GPT 0.000888M, 888 parameters", said("simulate", *tiny))
    path = tmp_path / "config.json"
    llama = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    llama |= {"intermediate_size": 1024, "vocab_size": 1000}
    path.write_text(json.dumps(llama))
    found = facts("simulate", "--config", path)
    assert found["parameters"] == 4 * (4 * 512**2 + 3 * 512 * 1024 + 2 * 512) + 2 * 1000 * 512 + 512
    assert "leave out --kv-heads" in refused("simulate", "--config", path, "--kv-heads", "2")
    path.write_text(json.dumps(llama | {"loops": 2}))
    assert "unknown field 'loops'" in refused("simulate", "--config", path)


def test_a_plan_file_says_what_flags_say(said, facts, capsys, tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[workload]\nmodel = "llama-3-8b"\n[cluster]\nname = "dgx-h100"\n[plan]\ndata = 16\n')
    flags = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--data", "16"]
    in_file, in_flags = (facts("simulate", *each) for each in ([path], flags))
    change = re.search(r"write (sharding = .*?) in \[plan\], and it needs", in_file.pop("why_not"))[1]
    assert "add --sharding 3" in in_flags.pop("why_not")
    assert in_file == in_flags
    path.write_text(f"{path.read_text()}{change}\n")
    assert facts("simulate", path)["fits"]
    flags += ["--sharding", "3"]
    for tool in TOOLS:
        assert main(["export", str(path), "--to", tool]) == 0
        from_file = capsys.readouterr()
        assert (main(["export", "--to", tool, *flags]), capsys.readouterr()) == (0, from_file)
        assert from_file.out.endswith("\n")
    plan = ["--data=64", "--sharding=3", "--microbatches=4", "--replicas=8", "--max-norm=1", "--precision=bfloat16"]
    assert main(["export", "--to", "deepspeed", *plan, "--microbatch=2", "--offload=optimizer"]) == 0
    told = capsys.readouterr()
    assert "# replicas=8: no counterpart" in told.err
    assert json.loads(told.out)["train_micro_batch_size_per_gpu"] == 2
    code = said("export", "--to", "fsdp2", "--sharding=3", "--blocks=model.layers", "--pipeline=2")
    assert "# pipeline=2: not here" in code
    assert "model.layers" in code


SMALL = ["plan", "--hidden=512", "--layers=4", "--heads=8", "--vocabulary=8000", "--sequence=256", "--batch=8"]


def test_the_best_plans_with_reasons_and_a_file_of_the_first(facts, tmp_path):
    path = tmp_path / "best.toml"
    found = facts(*SMALL, "--gpus", "4", "--top", "2", "--save", path)
    first, second = found["plans"]
    assert first["step_s"] <= second["step_s"]
    xla = facts(*SMALL, "--gpus=4", "--cluster=tpu-v5e-pod")["searched"]  # by the degrees of its stack
    assert found["searched"] > xla > found["simulated"] > 0 < found["is_complete"]
    assert all(reason["rule"] for reason in found["why"])
    assert facts("simulate", path)["steady_s"] == pytest.approx(first["step_s"])


def test_a_curve_over_clusters_and_counts_with_days_and_dollars_and_failures(said, facts, tmp_path):
    path, picture = tmp_path / "best.toml", tmp_path / "curve.png"
    flags = [*SMALL, "--cluster", "dgx-a100:1.5", "--cluster", "dgx-h100:3", "--gpus", "1,2", "--tokens", "1e9"]
    flags += ["--top", "1"]
    plain = facts(*flags, "--wish", "cheapest")
    rows = [(row["devices"], row["cluster"]) for row in plain["curve"]]
    assert rows == [(count, name) for name in ("dgx-a100", "dgx-h100") for count in (1, 2)]
    cheapest = min(plain["curve"], key=lambda row: row["dollars"])
    assert plain["plans"][0] == cheapest == plain["curve"][plain["cheapest"]]
    days = [row["days"] for row in plain["curve"]]
    assert len(facts(*flags, "--days", sorted(days)[1])["curve"]) == 2
    shown = said(*flags, "--failures", "llama-3")
    assert all(words in shown for words in ("dollars", "sweet spot", "1. ", "goodput", "error of these times: "))
    found = facts(*flags, "--failures", "1e-2", "--curve", picture, "--save", path)
    for row, other in zip(plain["curve"], found["curve"], strict=True):
        assert other["goodput"] < 1
        assert other["days"] == pytest.approx(row["days"] / other["goodput"])
    assert picture.read_bytes()[:4] == PNG
    assert facts("cost", path)["days"] == pytest.approx(found["plans"][0]["days"])


OWN = Path(__file__).with_name("own_cluster.toml").read_text("utf-8")


def test_where_nothing_fits_the_nearest_plan_is_told_in_full_and_each_way_out_is_what_its_search_finds(
    facts, capsys, tmp_path
):
    path, best = tmp_path / "own.toml", tmp_path / "best.toml"
    path.write_text(OWN)
    flags = [*SMALL, f"--cluster={path}", "--gpus=2"]
    assert main([*flags, "--offload=none"]) == 2
    told = capsys.readouterr()
    numbers = r"distlab plan: no plan fits: on 2 devices the nearest \(.*\) "
    numbers += r"needs (\S+) MB, (\S+) MB more than the (\S+) MB"
    needs, missing, has = map(float, re.match(numbers, told.err).groups())
    assert needs == pytest.approx(has + missing, abs=0.6)
    found, ways = facts(*flags, "--save", best), [line.strip() for line in told.out.splitlines()[1:]]
    assert found["beside"]["other way out"] == ways[1:]
    assert ways[0].startswith(f"offload: {found['plans'][0]['plan']}: ")
    assert needs > found["plans"][0]["max_memory_bytes"] / 1e6
    assert f"needs {needs:.0f} MB" in found["beside"]["without offload nothing fits"][0]
    more = ("--lora-rank=16", "--lora-rank=16 --weights=nf4", "--optimizer=adamw-8bit")
    more = (f"--gpus={ways[1].split()[0]}", "--offload-activations", *more, "--headroom=3")
    for way, change in zip(ways[1:], more, strict=True):
        offload = ["--offload=none"] * ("activations" not in change)
        if not way.endswith(": nothing fits"):
            assert facts(*flags, "--top=1", *offload, *change.split())["plans"][0]["plan"] in way
    again = facts("simulate", best)
    assert again["steady_s"] == pytest.approx(found["plans"][0]["step_s"])
    assert again["fits"]


def test_what_plan_cannot_take_is_one_line_with_a_way_out(refused, tmp_path):
    path = tmp_path / "own.toml"
    rows = tomllib.loads(Path(__file__).with_name("plan_mistakes.toml").read_text("utf-8"))["rows"]
    for before, after, flags, words in rows:
        path.write_text(OWN.replace(before, after))
        assert re.search(words, refused(*SMALL, f"--cluster={path}", "--stack=fsdp", *flags.split()))


def test_a_search_says_where_it_is_on_a_terminal_alone_and_leaves_its_line_empty(capsys, monkeypatch):
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert main([*SMALL, "--gpus=8"]) == 0
        told = capsys.readouterr().err.split("\r")
        for words in ("listing every plan", " plans left, "):
            assert (words in "".join(told)) == is_terminal
    assert told[-2:] == [" " * 78, ""]


def test_a_search_that_is_interrupted_before_it_found_a_plan_does_not_say_that_none_fits(capsys, monkeypatch):
    nothing = SimpleNamespace(advised=lambda top, tell: [], is_complete=False)
    monkeypatch.setattr("simulator.search", lambda question: nothing)
    assert main(SMALL) == 2
    assert "no plan that fits had been found when the search was interrupted" in capsys.readouterr().err


def test_a_run_its_goodput_and_its_curve(facts, path):
    found = facts("cost", path)
    failures = found["failures"]
    assert (found["devices"], failures["mtbf_s"]) == (4, pytest.approx(3600 / 4e-3))
    assert found["dollars"] == pytest.approx(found["days"] * 24 * 4 * 2.0)
    assert failures["interval_s"] == failures["best_interval_s"]["exact"]
    assert failures["drawn_days"]["mean"] == pytest.approx(found["days"], rel=0.01)
    assert [row["devices"] for row in found["curve"]] == [2, 4, 8, 16, 32]
    assert found["curve"][found["shortest"]]["days"] == min(row["days"] for row in found["curve"])
    assert found["curve"][found["cheapest"]]["dollars"] == min(row["dollars"] for row in found["curve"])
    assert facts("simulate", path)["fits"], "a run in the file is no hindrance"


def test_a_run_in_words_and_pictures_and_what_flags_say_that_the_file_does_not(said, facts, path, tmp_path):
    picture = tmp_path / "curve.png"
    text = said("cost", path, "--gpus", "2,4,6", "--curve", picture)
    for words in ("goodput", "by published failures and stores", "error  ", "one in 10.4 days", "<- shortest"):
        assert words in text, words
    assert "nan" not in text
    assert "6 devices  left out: 3 replicas do not divide the batch of 16 micro-batches" in text
    assert picture.read_bytes()[:4] == PNG
    path.write_text(TEXT)
    tokens = ("cost", path, "--tokens", "1e9")
    found = facts(*tokens)
    assert (found["dollars"], found["failures"], found["goodput"]) == (None, None, 1.0)
    found = facts(*tokens, "--price", "3", "--failures", "llama-3")
    assert found["price"] == 3.0
    assert "2407.21783" in found["failures"]["source"]
    assert facts(*tokens, "--failures", "none")["failures"]["mtbf_s"] is None
    assert "no failures" in said(*tokens, "--failures", "none")
