"""Traces of other programs are read, their clocks aligned; what cannot be read is told in one line."""

import gzip
import json
import re
import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gpu_traces import seeded_gpu
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlab.cli import main
from distlab.profile import read_files
from distlab.trace import Span, Trace, rank_file, save_clocks, save_trace, write_chrome

HEALTHY = 0  # numbers of made-up runs: without marks
MARKED = 3  # with "## forward ##" around the passes


def written(folder, number):
    """Write a made-up GPU run, every second file gzipped, and return the paths."""
    documents, paths = seeded_gpu(number).documents, []
    for rank, document in enumerate(documents):
        data = json.dumps(document).encode()
        paths.append(folder / (f"rank{rank}.json.gz" if rank % 2 else f"rank{rank}.json"))
        paths[-1].write_bytes(gzip.compress(data) if rank % 2 else data)
    return paths


@pytest.mark.parametrize("number", [HEALTHY, MARKED])
def test_gpu_traces_of_several_ranks_come_on_one_clock(tmp_path, number):
    """Kernels are in the section of their launch, nccl's are calls with bytes, and clocks seconds apart are aligned."""
    documents = seeded_gpu(number).documents
    profile = read_files(written(tmp_path, number)).measured
    assert read_files([tmp_path]).measured.trace == profile.trace, "a folder is its files"
    assert profile.ranks == tuple(range(len(documents)))
    steps = [event for event in documents[0]["traceEvents"] if event["name"].startswith("ProfilerStep")]
    assert profile.num_steps == len(steps)
    for rank, row in profile.mean_s().items():
        kernels = [event for event in documents[rank]["traceEvents"] if event["cat"] == "kernel"]
        for section, name in (("forward", "gemm_kernel"), ("backward", "gemm_backward_kernel")):
            lasts_us = sum(event["dur"] for event in kernels if event["name"] == name)
            assert row[section] == pytest.approx(lasts_us / 1e6 / len(steps), rel=0.01)
        assert row["optimizer"] > 0
        assert "other" not in row
    assert (profile.calls.number >= 0).all()
    assert set(profile.calls.spans.num_bytes.tolist()) == {4_000_000}
    assert len(profile.notes) == len(documents) - 1
    assert "it was aligned on" in profile.notes[0]


def timed(name, category, thread, start, lasts, **args):
    return {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": thread, "ts": start, "dur": lasts, "args": args}


def by_thread(marked, told):
    """Steps of a GPU: the program launches two kernels, autograd's thread four, with three times as many operators."""
    made, correlation = [], 0
    for step in range(3):
        begin = 1000.0 * step
        made += [timed(f"ProfilerStep#{step}", "user_annotation", 1, begin, 1000.0)] * marked
        made += [timed("Optimizer.step#SGD.step", "user_annotation", 2, begin + 560, 1.0)]  # in a hook of backward
        made += [timed("aten::stack", "cpu_op", 3, begin + 10 * i, 5.0) for i in range(40)]  # a loader's thread
        for number in range(6):
            thread, at, correlation = 1 + (number > 1), begin + 20 + 80 * number, correlation + 1
            forward = {"Fwd thread id": 1 if told == "thread" and thread == 2 else 0}
            name = f"autograd::engine::evaluate_function: {number}" if told == "name" else f"MmBackward{number}"
            made += [timed(name, "cpu_op", 2, at, 50.0, **forward)] * (thread == 2)
            made += [timed("aten::mm", "cpu_op", thread, at + 2 * i, 1.0) for i in range(3 if thread == 2 else 2)]
            made += [timed("cudaLaunchKernel", "cuda_runtime", thread, at + 2.2, 0.5, correlation=correlation)]
            made += [timed("gemm", "kernel", 7, begin + 50 + 130 * number, 100.0, correlation=correlation)]
    return made


@pytest.mark.parametrize("told", ["name", "thread"])
@pytest.mark.parametrize("marked", [True, False])
def test_the_programs_kernels_are_forward_though_autograds_thread_has_more_operators(tmp_path, marked, told):
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": by_thread(marked, told)}))
    row = read_files([tmp_path]).measured.mean_s()[0]
    assert (row["forward"], row["backward"]) == pytest.approx((0.0002, 0.0004))


@pytest.mark.parametrize("category", ["user_annotation", "cpu_op"])
@pytest.mark.parametrize("name", ["gloo:all_reduce", "shared:all_reduce", "gloo:_all_gather_base", "mpi:all_to_all"])
def test_calls_of_any_backend_are_seen_with_their_bytes(tmp_path, name, category):
    words = ("forward", "backward", "optimizer")
    made = [timed(word, "user_annotation", 1, 100.0 * at, 90.0) for at, word in enumerate(words)]
    made.append(timed(name, category, 2, 150.0, 40.0, **{"Input Dims": [[5, 7], []], "Input type": ["double", ""]}))
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": made}))
    (call,) = read_files([tmp_path]).measured.calls.spans
    assert (call.kind, call.num_bytes) == (re.search("all_(reduce|gather|to_all)", name)[0], 5 * 7 * 8)


def test_of_calls_alone_it_is_said_that_nothing_is_known(tmp_path, capsys):
    """As of a lab that marks no sections: not that nothing is wrong."""
    save_clocks([0, 0], tmp_path)
    for rank in (0, 1):
        calls = [Span(rank, "communication", "all_reduce #1", "all_reduce", 10_000, 90_000_000, 4)]
        save_trace(Trace.from_spans(calls), rank_file(tmp_path, rank))
    assert main(["profile", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "(the whole trace, in which no step is marked, 2 ranks)" in said
    told = "ranks 0, 1: no section is marked and no kernel traced, so that nobody can tell what makes steps slow"
    assert told in said
    assert "Nothing was found" not in said


def write_kineto(folder: str) -> None:
    """Run on each rank: three steps of torch's DDP under torch.profiler, without any mark."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]))
    optimizer = torch.optim.AdamW(model.parameters())
    from torch.profiler import profile, schedule

    path = f"{folder}/rank{dist.get_rank()}.json"
    options = {"schedule": schedule(wait=0, warmup=1, active=3), "record_shapes": True}
    with profile(**options, on_trace_ready=lambda made: made.export_chrome_trace(path)) as running:
        for _ in range(4):
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            running.step()


@pytest.mark.gloo("torch.profiler sees gloo's calls, and none in shared memory")
def test_torch_profilers_traces_of_ddp_are_taken_apart_without_marks(ranks, tmp_path):
    ranks(2).run(write_kineto, str(tmp_path))
    profile = read_files([tmp_path]).measured
    assert (profile.ranks, profile.num_steps) == ((0, 1), 3)
    for row in profile.mean_s().values():
        assert min(row["forward"], row["backward"], row["optimizer"]) > 0
    sums = profile.calls.spans.is_word("kind", "all_reduce")
    assert sums.sum() == 2 * 3, "one bucket per step and rank"
    assert set(profile.calls.spans.num_bytes[sums].tolist()) == {4 * (64 * 64 + 64) * 4}
    assert (profile.calls.number[sums] >= 0).all()


def damaged(folder, rank=0):
    """The file of a rank, of which the last 2,000 bytes are missing."""
    path = written(folder, HEALTHY)[rank]
    path.write_bytes(path.read_bytes()[:-2000])
    return [path]


def same_rank_twice(folder):
    path = written(folder, HEALTHY)[0]
    return [path, shutil.copy(path, folder / "copy.json")]


def passes(rank):
    """A rank's trace in this project's words, without calls; each rank has a different clock."""
    times = {"start_ns": [rank * 5_000_000_000_000], "end_ns": [rank * 5_000_000_000_000 + 100]}
    return Trace.from_columns(rank=[rank], lane="compute", name=["F"], kind=["F"], **times)


def other_clock_without_calls(folder):
    return [write_chrome(folder / f"{rank}.json", measured=passes(rank)) for rank in (0, 1)]


def other_run(folder):
    """Rank 1's collectives take three times as long: no clock explains both."""
    paths = written(folder, HEALTHY)[:2]
    document = json.loads(gzip.decompress(paths[1].read_bytes()))
    for event in document["traceEvents"]:
        event["ts"] = 5e12 + (event["ts"] - 5e12) * 3
    paths[1].write_text(json.dumps(document))
    return paths


def text(content, folder):
    path = folder / "trace.json"
    path.write_bytes(content)
    return [path]


def folder_without_a_rank(folder):
    save_clocks([0, 0], folder)
    save_trace(passes(0), rank_file(folder, 0))
    return [folder]


def event(content, folder):
    return text(b'{"distributedInfo": {}, "traceEvents": [%s]}' % content, folder)


NOT_JSON = "is not JSON, or is cut off"
EXPECTED = "expected an object with ts and dur in microseconds, dur of at least 0"
BAD = {
    "a file that is cut off": (damaged, NOT_JSON),
    "a gzipped file that is cut off": (partial(damaged, rank=1), NOT_JSON),
    "a report of Nsight": (partial(text, b"SQLite format 3\0"), "is a report of Nsight Systems, which is not read"),
    "no file": (lambda folder: [folder / "none.json"], "there is no trace at"),
    "an empty folder": (lambda folder: [folder], "there is no trace to read"),
    "no rank": (partial(text, b'{"traceEvents": [], "distributedInfo": {"rank": 0}}'), "no section, kernel or call"),
    "a file of a different program": (partial(text, b"[]"), "a different program wrote it"),
    "two files of one rank": (same_rank_twice, "are both of rank 0; give one trace per rank"),
    "a different clock, no collective": (other_clock_without_calls, "has a different clock than rank 0's"),
    "a different run": (other_run, "contradict each other"),
    "no trace": (partial(text, b'{"a": 1}'), "is no Chrome trace"),
    "a missing rank": (folder_without_a_rank, "has no trace of rank 1, of 2 ranks"),
    "an event that is none": (partial(event, b"7"), f"event 0 is 7: 'int' object has no attribute 'get'; {EXPECTED}"),
    "an end before its start": (partial(event, b'{"ph": "X", "ts": 1, "dur": -1}'), EXPECTED),
}


def test_bad_input_is_one_clear_line(tmp_path, capsys):
    for case, (make, expected) in BAD.items():
        (tmp_path / case).mkdir()
        assert main(["profile", *map(str, make(tmp_path / case))]) == 2, case
        error = capsys.readouterr().err
        assert error.startswith("distlab profile: "), case
        assert error.count("\n") == 1, case
        assert expected in error, case


def test_what_one_rank_alone_cannot_tell_is_said(tmp_path):
    words = ("forward", "backward", "optimizer") * 2
    events = [{"ph": "X", "pid": 1, "tid": 1, "name": w, "ts": 10 * at, "dur": 9} for at, w in enumerate(words)]
    for claimed, told in ((6, "ranks 0, 1, 2, 4, 5 of 6 have"), (10_000, "9,999 ranks of 10,000 have")):
        document = {"distributedInfo": {"rank": 3, "world_size": claimed}, "traceEvents": events}
        (tmp_path / "told.json").write_text(json.dumps(document))
        missing, alone = read_files([tmp_path / "told.json"]).measured.notes
        assert missing == f"{told} no trace here and have not been looked at"
        assert alone == "this is rank 3 alone: whether it waits for bytes or for other ranks cannot be told"


def test_the_command_lays_a_prediction_beside_and_saves_pictures(tmp_path, capsys):
    """What `--save` writes holds both, and read back it says the same without the plan."""
    plan = tmp_path / "plan.toml"
    workload = '[workload]\nmodel = "gpt-2-124m"\nsequence_length = 128\n'
    plan.write_text(f'{workload}[cluster]\nname = "dgx-a100"\n[plan]\ndata = 2\n')
    kinds = {"sections": "png", "timeline": "png", "save": "json"}
    flags = [f"--{name}={tmp_path / name}.{kind}" for name, kind in kinds.items()]
    paths = written(tmp_path, HEALTHY)
    assert main(["profile", *map(str, paths), "--plan", str(plan), *flags]) == 0
    assert "\npredicted" in capsys.readouterr().out
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("sections", "timeline"))
    assert main(["profile", str(tmp_path / "save.json")]) == 0
    assert "\npredicted" in capsys.readouterr().out
    assert main(["profile", *map(str, paths), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"step_s", "sections_s", "findings", "notes"}
