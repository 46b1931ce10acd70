"""Profiles of torch.profiler as steps: kernels by where they were launched, operators of a CPU, collectives, damage."""

import gzip
import json

import pytest

from distlab.trace import Span, read_profile

LOOP, ENGINE, STREAM, NCCL = 11, 12, 7, 20


def event(name, cat, tid, ts, dur, **args):
    return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launched(name, tid, at, start, dur, correlation, *, stream=STREAM, cat="kernel"):
    call = event("cudaLaunchKernel", "cuda_runtime", tid, at, 1, correlation=correlation)
    return [call, event(name, cat, stream, start, dur, correlation=correlation)]


def gpu_step(number, begin):
    """A step of 1,000 us: kernels run 100 us behind their launch, in the order of forward, backward, sum, update."""
    base = 100 * number
    rows = [
        event(f"ProfilerStep#{number}", "user_annotation", LOOP, begin, 1000),
        event(f"ProfilerStep#{number}", "gpu_user_annotation", STREAM, begin + 100, 900),
        event("Optimizer.step#Adam.step", "user_annotation", LOOP, begin + 700, 100),
    ]
    rows += launched("gemm", LOOP, begin + 10, begin + 110, 100, base + 1)
    rows += launched("gelu", LOOP, begin + 20, begin + 212, 50, base + 2)
    rows += launched("gemm", ENGINE, begin + 300, begin + 400, 200, base + 3)
    rows += launched(
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL", ENGINE, begin + 350, begin + 500, 250, base + 4, stream=NCCL
    )
    rows += launched("multi_tensor_apply", LOOP, begin + 710, begin + 810, 120, base + 5)
    rows += launched("Memcpy DtoH", LOOP, begin + 900, begin + 950, 10, base + 6, cat="gpu_memcpy")
    return rows


def write(tmp_path, events, **around):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"traceEvents": events} | around))
    return path


def test_kernels_belong_to_the_pass_that_launched_them(tmp_path):
    path = write(tmp_path, gpu_step(3, 5000) + gpu_step(4, 6000), distributedInfo={"rank": 2, "world_size": 4})
    found = read_profile(path)
    assert found.rank == 2
    assert found.seconds == (1e-3, 1e-3)
    assert [span.kind for span in found.steps[0]] == ["F", "B", "all_reduce", "optimizer", "copy"]
    forward, backward, sum_, update, copy = found.steps[1]
    assert forward == Span(2, "compute", "forward", "F", 6_110_000, 6_262_000), "two kernels that are 2 us apart"
    assert (backward.start_ns, backward.end_ns) == (6_400_000, 6_600_000)
    assert (sum_.lane, sum_.start_ns, sum_.end_ns) == ("communication", 6_500_000, 6_750_000)
    assert (update.kind, update.end_ns) == ("optimizer", 6_930_000)
    assert (copy.kind, copy.lane) == ("copy", "compute")


def test_a_kernel_that_runs_after_its_step_counts_where_it_was_launched(tmp_path):
    late = launched("gemm", LOOP, 5990, 6100, 50, 999)
    found = read_profile(write(tmp_path, gpu_step(3, 5000) + late + gpu_step(4, 6300)))
    assert max(span.end_ns for span in found.steps[0]) == 6_150_000
    assert min(span.start_ns for span in found.steps[1]) == 6_410_000


def test_a_zipped_file_is_read(tmp_path):
    path = tmp_path / "profile.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": gpu_step(1, 0)}).encode()))
    assert len(read_profile(path).steps) == 1


def test_the_median_step_is_the_middle_one(tmp_path):
    steps = [gpu_step(1, 0), gpu_step(2, 2000), gpu_step(3, 4000)]
    for rows, length in zip(steps, (1000, 1800, 1200), strict=True):
        rows[0]["dur"] = length
    found = read_profile(write(tmp_path, [row for rows in steps for row in rows]))
    assert found.median is found.steps[2]


def test_torchs_own_profiler_on_a_cpu(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, schedule

    path = tmp_path / "cpu.json"
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(32, 64)).square().mean().backward()
            optimizer.step()
            profiler.step()
    found = read_profile(path)
    assert len(found.steps) == len(found.seconds) == 3
    for trace, seconds in zip(found.steps, found.seconds, strict=True):
        kinds = [span.kind for span in trace]
        assert set(kinds) == {"F", "B", "optimizer"}
        assert kinds.index("F") < kinds.index("B") < kinds.index("optimizer")
        assert 0 < trace.duration_s <= seconds


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "has no steps"),
        ([event("ProfilerStep#1", "user_annotation", LOOP, 0, 10)], "no kernels and no operators"),
        ([*gpu_step(1, 0), event("gemm", "kernel", 7, "soon", 5)], "expected a number of microseconds"),
        ([*gpu_step(1, 0), event("gemm", "kernel", 7, 5, -5)], "expected a duration of at least 0"),
        ([*gpu_step(1, 0), "nothing"], "expected an object"),
        ("nothing", "is no Chrome trace"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(tmp_path, events, words):
    with pytest.raises(ValueError, match=words) as caught:
        read_profile(write(tmp_path, events))
    assert "\n" not in str(caught.value)


def test_odd_fields_are_passed_over(tmp_path):
    odd = [{"ph": "X", "ts": 1, "dur": 1}, {"ph": "X", "name": "x", "ts": 1, "args": [1]}, {"ph": "i", "name": "mark"}]
    found = read_profile(write(tmp_path, odd + gpu_step(1, 0), distributedInfo={"rank": "two"}))
    assert (found.rank, len(found.steps)) == (0, 1)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace at"):
        read_profile(tmp_path / "missing.json")
