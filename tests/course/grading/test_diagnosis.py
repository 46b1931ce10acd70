"""A fault is told by what was seen: the mistake's own words before general ones, and no blame for what was right."""

import functools
import re

import pytest
import torch
import torch.distributed as dist

from distlab.collectives import ring_all_gather
from distlab.comm.p2p import Receive, Send, exchange
from distlab.course.grading import load_lesson, reference_of
from distlab.course.grading.cases import few_cases
from distlab.course.grading.check import examine
from distlab.course.grading.diagnosis.blame import in_plain_names, messages_that_do_not_fit
from distlab.sharding import gather_into


def checked(name, fn, **options):
    return examine(load_lesson(name).exercise(name), fn, **options)


def never_divides(model, optimizer, *, microbatches, num_accumulated, loss_fn):
    for number, (inputs, targets) in enumerate(microbatches, start=1):
        loss_fn(model(inputs), targets).backward()
        if number % num_accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_what_a_wrapper_sends_in_backward_is_not_called_unwaited():
    report = checked("03.accumulate", never_divides)
    assert report.verdict == "wrong"
    assert "never waits" not in report.message


def in_the_order_of_a_set(shards, shapes):
    state = {}
    for name in set(shards):
        row = shards[name].new_empty(shards[name].numel() * dist.get_world_size())
        gather_into(row, shards[name])
        if dist.get_rank() == 0:
            state[name] = row[: shapes[name].numel()].view(shapes[name]).clone()
    return state


def test_ranks_do_not_share_the_order_of_a_set_of_names():
    assert checked("07.repair", in_the_order_of_a_set, worlds=(2,), seed=1).verdict == "wrong"


def skips_missing_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def test_the_exercises_own_words_come_before_a_difference_in_drawn_arguments():
    report = checked("03.average", skips_missing_gradients, worlds=(1, 2), seed=1)
    assert report.fault == "missing gradient"
    assert report.message.startswith("on 2 ranks: ")
    assert checked("03.average", skips_missing_gradients, worlds=(1,), seed=1).verdict == "wrong"


def mean_of_two(module):
    rank, n = dist.get_rank(), dist.get_world_size()
    for parameter in (one for one in module.parameters() if one.requires_grad):
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        every = [torch.empty_like(own) for _ in range(n)]
        dist.all_gather(every, own.contiguous())
        parameter.grad = (every[rank] + every[rank - 1]) / 2


def half_of_its_own(module):
    for tensor in [*module.parameters(), *module.buffers()]:
        first = tensor.detach().clone()
        dist.broadcast(first, 0)
        tensor.data = (tensor.data + first) / 2 if dist.get_rank() == 1 and first.is_floating_point() else first


PARTS = [
    ("03.average", mean_of_two, r"module\S+grad afterwards lacks rank 1's part; besides, all of it is 1.5x too large"),
    (
        *("03.broadcast", half_of_its_own),
        r"rank 1's module\S+ afterwards holds rank 0's tensor 0.5 times, rank 1's tensor 0.5",
    ),
]


def test_whose_parts_a_wrong_sum_holds_is_told_where_nothing_better_is_known():
    for name, fn, says in PARTS:  # of a partial there is no text to be repaired
        assert re.search(says, checked(name, functools.partial(fn), worlds=(3,), seed=3).message), fn


def added_on_top_for_one_gpu(num_steps, step_s, num_gpus, price, mtbf_hours, save_s, restart_s):
    between = 3600 * mtbf_hours / num_gpus
    lost = 2 * save_s / (2 * save_s * between) ** 0.5 + restart_s / between
    hours = num_steps * step_s * (1 + lost) / 3600 if lost < 1 else float("inf")
    return hours / 24, hours * price


def test_two_mistakes_at_once_are_told_and_the_few_cases_that_are_right_or_wrong(monkeypatch):
    monkeypatch.setattr("distlab.course.grading.agreement.BUDGET_S", 60.0)  # a busy machine tries fewer pairs
    message = checked("15.bill", added_on_top_for_one_gpu, worlds=(1,), seed=3).message
    assert message.startswith("two mistakes: lost time is a part of all time: divide by 1 - lost, not times 1 + lost;")
    assert "and the price is for one GPU: multiply by num_gpus. Seen: 64 GPUs that hardly fail: " in message
    want = [dict.fromkeys("abcde", 1), dict.fromkeys("abcde", 2)]
    assert few_cases([want[0], want[1] | {"d": 9}], want) == "\n  wrong in 1 of 5 cases: d"
    assert few_cases([want[0], dict.fromkeys("abcde", 1) | {"b": 2}], want) == "\n  right in 1 of 5 cases: b"
    assert few_cases(want[::-1], want) == few_cases(want, want) == ""


def too_long_chunks(tensor, group=None):
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = tensor.tensor_split(n)
    for step in range(n - 1):
        known, unknown = chunks[(rank - step) % n], torch.empty(len(chunks[0]) + 1, dtype=tensor.dtype)
        exchange(Receive(unknown, (rank - 1) % n), Send(known, (rank + 1) % n), group=group)
    return tensor


def other_shapes(tensor, group=None):
    dist.all_reduce(torch.ones(1 + dist.get_rank()))
    return tensor


@pytest.mark.parametrize("backend", ["gloo", "shared"])
def test_calls_that_do_not_fit_are_told_on_each_backend(backend, monkeypatch):
    monkeypatch.setenv("DISTLAB_BACKEND", backend)
    first, *lines = checked("02.ring_all_gather", too_long_chunks, worlds=(2,)).message.splitlines()
    assert re.search(r"rank \d sends float64\[\d\], rank \d receives it as float64\[\d\]: give both", first)
    assert len(lines) == 2
    assert "SIGABRT" not in first
    assert messages_that_do_not_fit("other text") is None
    report = checked("02.ring_all_gather", other_shapes, worlds=(2,))
    assert report.fault == "mismatch"
    for rank in range(2):
        assert f"rank {rank}: all_reduce #1 (float32[{rank + 1}], group [0, 1]) at " in report.message


@pytest.mark.parametrize("file", ["/tmp/ipykernel_17/42.py", "/tmp/ipython-input-3-ab12.py", "<ipython-input-3-ab12>"])
def test_a_cell_is_your_cell_whatever_the_kernel(file):
    assert in_plain_names(f"at {file}:8", len) == "at your cell, line 8"


def by_name(tensor, group=None):
    return ring_all_gather(tensor, group)


FLAT = reference_of(load_lesson("03").exercise("03.flat"))
OF_LIBRARY = "it calls distlab.collectives.ring.ring_all_gather of the library"
NOT_OWN = [
    ("02.ring_all_gather", by_name, "library", OF_LIBRARY),
    ("02.ring_all_gather", functools.partial(ring_all_gather), "library", OF_LIBRARY),
    ("03.flat", lambda module: FLAT(module), "reference", "write the function yourself"),
]


def test_neither_the_reference_nor_the_librarys_own_function_is_an_answer():
    for name, fn, fault, says in NOT_OWN:
        report = checked(name, fn, worlds=(1,))
        assert (report.verdict, report.fault) == ("wrong", fault), str(report)
        assert says in report.message


def test_what_a_check_cannot_use_is_told_by_itself_with_its_case_and_in_few_letters():
    told = "it returned 'wire'; expected list[list[tuple[int, int]]]"
    assert checked("13.resume", lambda *_: "wire", worlds=(1,)).message == told
    assert checked("13.exposed", lambda compute, calls: max(calls)).message.endswith("\n  in the case: nothing sent")
    parts = dict.fromkeys(("compute", "tensor", "bubble", "data"), -1.0)
    _, smallest, _ = checked("15.step", lambda *arguments: parts, seed=3).message.splitlines()
    assert re.search(r"step_parts\(.* cluster=Cluster\(.{109}\.\.\.\): the result", smallest), smallest
