"""The command line: one clear line and exit 2 for a user's mistake, JSON where a program reads it."""

import inspect
import json
import re
import subprocess
import sys

import pytest

from distlab.cli import bench, main

MISTAKES = [
    ([], ""),
    (["fly"], ""),
    (["tour", "--ranks", "0"], ""),
    (["tour", "--ranks", "-2"], ""),
    (["tour", "--ranks", "four"], ""),
    (["tour", "--ranks", "100000"], ""),
    (["tour", "--data", "/nowhere/at/all.txt"], ""),
    (["tour", "--data", "/"], ""),
    (["tour", "--device", "abacus"], ""),
    (["tour", "--device", "cuda"], ""),
    (["calibrate", "--ranks", "0"], ""),
    (["calibrate", "--ranks", "4", "--nodes", "3"], ""),
    (["calibrate", "--between", "1MB/s"], ""),
    (["calibrate", "--output", "/"], ""),
    (["calibrate", "--output", f"{__file__}/a/b.json"], ""),
    (["tour", "--output", __file__], ""),
    (["bench", "--save", f"{__file__}/b.json"], ""),
    (["bench", "--save", __file__], ""),
    (["simulate", "--picture", "/"], ""),
    (["simulate", "--memory", "step.docx"], ""),
    (["simulate", "--trace", f"{__file__}/step.json"], ""),
    (["lesson", "start", "--port", "80000"], ""),
    (["bench", "perpetual_motion"], ""),
    (["simulate", "--cluster", "abacus"], ""),
    (["simulate", "--cluster", __file__], ""),
    (["simulate", "--layers", "2", "--pipeline", "64", "--data", "1"], ""),
    (["simulate", "--schedule", "chaos"], ""),
    (["simulate", "--layers", "0"], ""),
    (["simulate", "--hidden", "100", "--heads", "3"], ""),
    (["simulate", "--data", "100000000"], "100,000,000 ranks; simulate takes at most 1,000,000"),
    (["simulate", "--schedule", "dualpipe"], "schedule is 'dualpipe'; choose one of naive, "),
    *((["simulate", "--sharding", stage], "choose 0, 1, 2 or 3") for stage in ("4", "-1")),
    (["simulate", "--sharding", "two"], '--sharding is "two"; write a whole number'),
    (["simulate", "--experts", "0"], "--experts is 0; pass a whole number of at least 1"),
    (["simulate", "--recompute-layers", "2"], "--recompute-method and --recompute-layers choose blocks of recompute"),
    (["simulate", "none.toml"], "distlab simulate: none.toml: No such file or directory\n"),
    # A script whose variable is empty was once told the step of the default plan.
    *(([*command, ""], "directory") for command in (["simulate"], ["export", "--to", "torchtitan"])),
    (
        ["simulate", *["--sharding", "3", "--pipeline", "8", "--data", "2", "--layers", "30", "--schedule", "zb_h1"]],
        "splits them",
    ),
    (
        ["simulate", *["--sharding", "3", "--pipeline", "8", "--data", "2", "--layers", "30", "--schedule", "zb_h1"]],
        "--memory",
    ),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_2_before_any_work(arguments, words, refused, monkeypatch):
    for work in (
        "distlab.measure.calibrate",
        "distlab.cli.measure.tour.run_tour",
        "distlab.cli.measure.bench.load_rows",
    ):
        monkeypatch.setattr(work, None)
    if "cuda" in arguments:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU, so asking for one is no mistake")
    assert words in refused(*arguments)


@pytest.mark.parametrize("content", [b"", b"\x00\x01binary\x00" * 100, b"too short"], ids=["empty", "binary", "short"])
def test_a_useless_data_file_is_refused_before_any_rank_starts(tmp_path, content, capsys):
    path = tmp_path / "data.txt"
    path.write_bytes(content)
    assert main(["tour", "--data", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_simulate_as_json(capsys, tmp_path):
    picture, trace, memory = tmp_path / "step.png", tmp_path / "step.json", tmp_path / "memory.png"
    arguments = ["simulate", "--data", "2", "--pipeline", "4", "--microbatches", "8", "--json"]
    files = ["--picture", str(picture), "--trace", str(trace), "--memory", str(memory)]
    assert main([*arguments, *files]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ranks"] == 8
    assert 0 < facts["bubble_fraction"] < 1
    assert facts["duration_s"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert memory.read_bytes().startswith(b"\x89PNG")
    assert json.loads(trace.read_text())["traceEvents"]


def test_simulate_takes_recompute_of_some_blocks_and_8_bits(capsys):
    machine = ["simulate", "--model", "llama-3-8b", "--sharding", "3", "--json"]
    some = ["--recompute", "full", "--recompute-method", "every", "--recompute-layers", "2"]
    found = {}
    for flags in ([], some, ["--recompute", "operators"], ["--recompute", "full"], ["--float8", "gathers"]):
        assert main([*machine, "--cluster", "dgx-h100", *flags]) == 0
        found[" ".join(flags)] = json.loads(capsys.readouterr().out)
    none, every, operators, full, narrow = found.values()
    for way in (every, operators):
        assert none["duration_s"] < way["duration_s"] < full["duration_s"]
        assert none["max_memory_bytes"] > way["max_memory_bytes"] > full["max_memory_bytes"]
    assert narrow["duration_s"] < none["duration_s"]
    assert "not modelled" in narrow["notes"][0]
    assert main([*machine, "--cluster", "dgx-a100", "--float8", "products"]) == 2
    assert "a100-sxm-80gb has no products of 8 bits" in capsys.readouterr().err


def test_simulate_lists_presets_and_prints_a_table(capsys):
    assert main(["simulate", "--list"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"  dgx-a100 +8 x a100-sxm-80gb of 80 GB; .* of .*B/s inside, .* of .*B/s between nodes", said)
    assert re.search(r"  llama-2-7b +6.738 billion", said)
    assert main(["simulate", "--cluster", "dgx-h100"]) == 0
    assert "exposed communication" in capsys.readouterr().out


def test_simulate_without_flags_shows_a_plan_that_fits(capsys):
    assert main(["simulate"]) == 0
    said = capsys.readouterr().out
    assert "fit" not in said
    assert "samples per second" in said


def test_simulate_makes_no_claim_on_speed_where_the_plan_does_not_fit(capsys):
    assert main(["simulate", "--model", "gpt-3-175b"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("does not fit")
    assert "if it fitted" in said
    assert "samples per second" not in said
    assert "utilization" not in said


@pytest.mark.parametrize(
    "flags", [["--model", "llama-2-7b"], ["--hidden", "4096", "--layers", "32", "--microbatch", "16"]]
)
def test_the_flags_that_simulate_advises_make_the_plan_fit(capsys, flags):
    assert main(["simulate", *flags]) == 0
    advised = re.search(r"; add (--.*?), and it needs", capsys.readouterr().out).group(1)
    named = advised.split()[::2]
    kept = [part for i in range(0, len(flags), 2) if flags[i] not in named for part in flags[i : i + 2]]
    assert main(["simulate", *kept, *advised.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_simulate_says_what_fills_the_memory_and_what_to_change(capsys):
    assert main(["simulate", "--model", "llama-2-7b", "--data", "8"]) == 0
    said = capsys.readouterr().out
    assert "DOES NOT FIT" in said
    assert "  optimizer            53.9 GB" in said
    assert "; add --recompute selective --sharding 1, and it needs " in said
    plan = ["--sharding", "3", "--recompute", "full", "--offload", "all", "--precision", "bfloat16", "--json"]
    assert main(["simulate", "--model", "llama-2-7b", "--data", "8", *plan]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] is True
    assert facts["memory_bytes_by_kind"]["parameters"] == 0
    assert facts["host_memory_bytes"] == pytest.approx(18 * 6.738e9 / 8, rel=1e-3)


def test_simulate_counts_memory_where_it_gives_no_time(capsys, tmp_path):
    split = ["simulate", "--model", "gpt-3-175b", "--tensor", "8", "--pipeline", "8", "--data", "2", "--sharding", "3"]
    split += ["--schedule", "zb_h1"]
    assert main([*split, "--sequence-parallel", "--memory", str(tmp_path / "memory.png")]) == 0
    said = capsys.readouterr().out
    assert "2 (data) x 8 (pipeline) x 8 (tensor)" in said
    assert "not simulated" in said
    assert (tmp_path / "memory.png").exists()
    assert main([*split, "--picture", str(tmp_path / "step.png")]) == 2
    assert "use --memory" in capsys.readouterr().err
    assert main(["simulate", "--model", "gpt-3-175b", "--hidden", "64"]) == 2
    assert "leave out --hidden" in capsys.readouterr().err


def test_bench_lists_its_names(capsys):
    assert main(["bench", "--list"]) == 0
    assert "collectives" in capsys.readouterr().out.split()


def test_doctor_finds_what_ranks_need_here(capsys):
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["healthy"] is True
    assert facts["works"]["ranks on the CPU (distlab tour)"] is True
    assert {check["name"] for check in facts["checks"]} >= {"torch", "gloo", "nccl", "gpus", "loopback", "browser"}


def test_the_console_script_is_installed():
    done = subprocess.run([sys.executable, "-m", "distlab", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("distlab ")


def test_a_place_that_cannot_be_written_is_refused_before_torch_is_loaded():
    code = "import sys; from distlab.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "calibrate", "--output", "/"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "2 False\n"
    assert "--output /: expected the path of a file, got a folder" in done.stderr


@pytest.mark.parametrize("name", bench.names())
def test_every_benchmark_has_rows_of_which_few_can_be_asked_for(name):
    rows = bench.load(name).rows
    assert inspect.isgeneratorfunction(rows)
    assert "quick" in inspect.signature(rows).parameters
