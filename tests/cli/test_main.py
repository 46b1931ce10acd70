"""The command line: one clear line and exit 2 for a user's mistake, JSON where a program reads it."""

import inspect
import re
import shlex
import subprocess
import sys

import pytest

from distlab.cli import claims

SPLIT = "simulate --sharding 3 --pipeline 8 --data 2 --layers 30 --schedule zb_h1"
SMALL = "plan --hidden=512 --layers=4 --heads=8 --vocabulary=8000 --sequence=256 --batch=8"
MISTAKES = f"""
| distlab
fly | invalid choice: 'fly'
tour --ranks 0 | 0 cannot be used; pass 1 to 1024
tour --ranks four | 'four' is not a whole number; pass 1 to 1024
tour --ranks 100000 | 100000 cannot be used; pass 1 to 1024
tour --data /nowhere/at/all.txt | /nowhere/at/all.txt
tour --data / | /
tour --data /dev/null | /dev/null
tour --device abacus | abacus
tour --device cuda | cuda
tour --output {__file__} | expected the path of a folder, got a file
calibrate --ranks 4 --nodes 3 | 3
calibrate --between 1MB/s | 1MB/s
calibrate --output / | --output /: expected the path of a file, got a folder
calibrate --output {__file__}/a/b.json | cannot be written
bench --save {__file__} | expected results of distlab bench
bench perpetual_motion | no benchmark is called 'perpetual_motion'
gpu --only perpetual_motion | choose from machine, plans,
gpu --minutes 0 | is not a positive number
gpu --out {__file__} | expected the path of a folder
gpu --out {__file__}/a | cannot be written
lesson start --port 80000 | 80000 cannot be used; pass 1 to 65535
simulate --memory step.docx | expected a picture such as step.png, got .docx
simulate --cluster abacus | 'abacus' is neither a preset nor a file
simulate --cluster {__file__} | is not a calibration
simulate --stack abacus | no preset 'abacus' among the stacks
simulate --layers 2 --pipeline 64 --data 1 | 64 pipeline stages
simulate --layers 0 | is 0; pass a whole number of at least 1
simulate --hidden 100 --heads 3 | 3 heads do not divide
simulate --data 100000000 | 100,000,000 ranks; simulate takes at most 1,000,000
simulate --pipeline 8 --microbatches 1000000 | 8,000,000 passes
simulate --schedule dualpipe | schedule is 'dualpipe'; choose one of naive,
simulate --sharding 4 | choose 0, 1, 2 or 3
simulate --sharding two | --sharding is "two"; write a whole number
simulate --experts 0 | --experts is 0; pass a whole number of at least 1
simulate --recompute-layers 2 | --recompute-method and --recompute-layers choose blocks of recompute
simulate --model llama-2-7b --feed-forward 8 | leave out --feed-forward
simulate --float8 products | a100-sxm-80gb has no products of 8 bits
simulate none.toml | distlab simulate: none.toml: No such file or directory
simulate '' | directory
{SPLIT} | splits them
{SPLIT} | --memory
export --to torchtitan '' | directory
export | --to
export --to horovod | horovod
export --to fsdp2 --max-norm -1 | '-1' is not a positive number
export --to fsdp2 --sharding 3 --blocks 'my layers' | my layers
export --to torchtitan --model llama-3-8b --sharding 1 | sharding
export missing.toml --to slurm | missing.toml: No such file
export missing.toml --to slurm --data 2 | leave out --data
export --to torchrun --script ' ' | script
export --to slurm --data 12 | 12
export --to deepspeed --sharding 2 --pipeline 2 | pipeline
{SMALL} --curve curve.png | add --tokens
{SMALL} --failures weekly | one of llama-3
{SMALL} --hidden 65536 --gpus 2 | no plan fits: on 2 devices the leanest (tensor 2,
{SMALL} --gpus 12 | --gpus 12 does not fill nodes of 8
{SMALL} --microbatch 2 | --microbatch is what the search chooses
{SMALL} --cluster dgx-x | 'dgx-x' is neither a preset nor a file
{SMALL} --cluster dgx-a100:1 --cluster dgx-h100 | some clusters have a price and others none
{SMALL} --cluster dgx-a100:x | argument --cluster: 'x' is not a positive number
{SMALL} --model gpt-3-175b | has its own sizes
{SMALL} --gpus 0 | 0 cannot be used
{SMALL} --tokens -1 | '-1' is not a positive number
{SMALL} --headroom 100 | 100 cannot be used; pass 0 to 99
lab 17 | distlab lab: there is no lab 17; labs are 01, 02, 03
lab x | 'x' names no lesson
lab 01 --ranks 0 | distlab lab 01: argument --ranks: 0 cannot be used; pass 1 to 1024
lab 01 --trace {__file__} | expected the path of a folder, got a file
lab 03 --data nothing.txt | distlab lab 03: --data nothing.txt: there is no such file; pass the path
lab 03 --hidden 30 | 4 heads do not divide hidden_size 30
lab 02 --ranks 4 --ranks-per-machine 3 | --ranks-per-machine 3 does not divide 4 ranks
lab 04 --ranks 3 --batch 1 | a batch of 1 of the 1,437 digits, less than 3 ranks; pass --batch 3
lab 04 --ranks 2 --batch 718 | less than 2 ranks; pass --batch 717
lab 08 --ranks 5 | heads is 24, which 5 ranks do not divide
lab 09 --ranks 3 --layers 5 | layers is 5; 6 stages need one each
lab 10 --ranks 8 --tensor 3 | does not fill 8 ranks
lab 11 --ranks 4 --length 50 | pass --length 48
"""
WORK = ("measure.calibrate", "cli.tour.run_training", "cli.claims.load", "comm.launch.script.run_script")


@pytest.mark.parametrize("row", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_and_exit_2_before_any_work(row, refused, monkeypatch):
    for work in WORK:
        monkeypatch.setattr(f"distlab.{work}", None)
    if "cuda" in row and pytest.importorskip("torch").cuda.is_available():
        pytest.skip("this machine has a GPU, so asking for one is no mistake")
    command, _, words = row.partition("| ")
    assert words in refused(*shlex.split(command))


PLAN = """
[workload]
hidden_size = 512
num_layers = 4
num_heads = 8
vocab_size = 8000
sequence_length = 256
[plan]
data = 2
pipeline = 2
num_microbatches = 8
"""
RUN = "[run]\nnum_tokens = 1e12\n"
FILES = [  # a plan file, flags of `cost`, and what is told
    (PLAN, "", r"has no \[run\] with num_tokens"),
    (PLAN, "--tokens 1e9 --failures weekly", "one of llama-3"),
    (PLAN, "--tokens 1e9 --failures -1", r"rate is -1\.0"),
    (PLAN, "--tokens 1e9 --failures 1e9", "does not get on"),
    (PLAN, "--tokens 1e9 --curve curve.txt", "expected a picture"),
    (PLAN.replace("512", "40960"), "--tokens 1e9", "does not fit"),
    (PLAN + "[run]\ntokens = 1e9\n", "", r"did you mean 'num_tokens'\?"),
    (PLAN + "[run]\nprice = 2.0\n", "", r"\[run\] lacks num_tokens"),
    (PLAN + RUN + "price = -2.0\n", "", r"the price is -2\.0"),
]
BOTH = [  # a plan file, and what `simulate` and `cost` tell of it, in the same words
    ("[workload]\nnum_heads = 17\n[plan]\ndata = 8", r"\[workload\] GPT: 17 heads do not divide hidden_size 2048"),
    ("[workload]\nconfig = 'none.json'", r"\[workload\] config none.json: No such file or directory"),
    ("[plan]\ntensor = 3", r"3 \(tensor\) ranks cannot divide 16 heads evenly; use a divisor of 16"),
    ("[plan]\npipeline = 30", r"the plan has 30 pipeline stages; workload 'GPT 1.32B' has 26 layers"),
    ("[cluster]\nname = 'none'", r"\[cluster\] no preset 'none' among the clusters"),
    ("[plan]\ndata = 2000000", r"the plan has 2,000,000 ranks; simulate takes at most"),
]


def test_what_is_wrong_in_a_plan_file_is_one_line(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "plan.toml"
    for text, flags, told in FILES:
        path.write_text(text)
        assert re.search(told, refused("cost", "plan.toml", *flags.split()))
    for text, told in BOTH:
        path.write_text(f"{text}\n{RUN}")
        for command in ("simulate", "cost"):
            assert re.match(rf"distlab {command}: plan\.toml: {told}", refused(command, "plan.toml"))
    path.write_text(PLAN)
    for told in ("8", "2"):  # also where it is the flags' default
        assert "leave out --data" in refused("simulate", "plan.toml", "--data", told)


def test_doctor_finds_what_ranks_need_here(facts):
    found = facts("doctor")
    assert found["healthy"] is True
    assert found["works"]["ranks on the CPU (distlab tour)"] is True
    assert {check["name"] for check in found["checks"]} >= {"torch", "gloo", "nccl", "gpus", "loopback", "browser"}


def test_a_place_that_cannot_be_written_is_refused_before_torch_is_loaded():
    code = "import sys; from distlab.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    words = ["calibrate", "--output", "/"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 False\n"


def test_every_benchmark_has_rows_of_which_few_can_be_asked_for(said):
    assert said("bench", "--list").split() == claims.names()
    for name in claims.names():
        rows = claims.load(name).rows
        assert inspect.isgeneratorfunction(rows), name
        assert "quick" in inspect.signature(rows).parameters, name
