"""What a right answer leaves behind is told: on which argument or in which part of the process, and by which call."""

import inspect
import re

import pytest
import torch
import torch.distributed as dist
from trial_answers import IMPORTS, written

from distlab.course.grading import load_lesson
from distlab.course.grading.answer.submission import isolated_submission
from distlab.course.grading.check import examine
from distlab.course.grading.variation.calls import left_on, marks

AVERAGE = load_lesson("03.average").exercise("03.average")


def average(module):
    for parameter in module.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


HOOK = "next(p for p in module.parameters() if p.requires_grad).register_"
BACK = "from 0 to 1; put back what you change"
LEFT = [
    (f"{HOOK}hook(lambda gradient: gradient * 2)", rf"it changed the number of hooks on module\.\S+ {BACK}"),
    ("module.register_forward_hook(lambda *given: None)", f"it changed the number of hooks on module {BACK}"),
    ("torch.rand(1)", "torch's random state is not what it was before"),
    ("torch.set_default_dtype(torch.float64)", "torch's default dtype from torch.float32 to torch.float64"),
    ("torch.set_num_threads(torch.get_num_threads() + 1)", r"changed the number of threads of torch from \d+ to \d+"),
    ("os.chdir('/')", r"it changed the working directory from \S+ to /"),
]


@pytest.mark.parametrize(("body", "says"), LEFT, ids=[body for body, _ in LEFT])
def test_what_is_left_is_named(tmp_path, body, says):
    fn = written(tmp_path, "average_gradients(module)", f"average(module)\n{body}", inspect.getsource(average))
    world = 2 if "forward" in body else 1
    report = examine(AVERAGE, fn, worlds=(world,), seed=0)
    assert report.fault == "state left behind", str(report)
    assert re.search(says.replace("it changed", "on rank 0 it changed") if world > 1 else says, report.message), report
    assert re.search("call 1, average_gradients|for everything that comes after", report.message)


@pytest.mark.parametrize("threads", ["", "    torch.set_num_threads(torch.get_num_threads() + 1)\n"])
def test_a_call_is_not_blamed_for_what_loading_its_file_switches(tmp_path, threads):
    """The rank that calls the function loads its file, whose folder it then imports from."""
    switches = "torch.manual_seed(7)\ntorch.set_num_threads(torch.get_num_threads() + 1)\n"
    body = inspect.getsource(average).replace("def average(", "def average_gradients(") + threads
    (tmp_path / "answers.py").write_text(IMPORTS + switches + body)
    functions, _ = isolated_submission(str(tmp_path / "answers.py"), load_lesson("03"))
    report = examine(AVERAGE, functions["03.average"], worlds=(1, 2), seed=0)
    assert report.fault == ("state left behind" if threads else None), str(report)
    assert ("it changed the number of threads of torch from" in report.message) == bool(threads)


_flat = {}


def average_flat(module):
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    row = torch.cat([(torch.zeros_like(one) if one.grad is None else one.grad).flatten() for one in parameters])
    row /= dist.get_world_size()
    dist.all_reduce(row)
    row = _flat.setdefault((row.numel(), row.dtype), row).copy_(row)
    for parameter, piece in zip(parameters, row.split([one.numel() for one in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter)


def test_gradients_that_share_a_kept_buffer_are_told():
    report = examine(load_lesson("03").exercise("03.flat"), average_flat, worlds=(1,), seed=1)
    assert report.fault == "kept", str(report)
    assert "right at first, but a later call changed module." in report.message


def test_hooks_in_lists_and_dicts_and_options_of_optimizers_are_compared():
    value = [{"b": torch.zeros(1, requires_grad=True)}, torch.optim.SGD([torch.zeros(1)], lr=0.5)]
    before = dict(marks("given", value))
    assert left_on(before, dict(marks("given", value))) == {}
    value[0]["b"].register_hook(lambda gradient: gradient)
    value[1].param_groups[0]["lr"] *= 0.5
    what, option = "the number of hooks on given[0]['b']", "given[1].param_groups[0]['lr']"
    told = {what: f"it changed {what} from 0 to 1", option: f"it changed {option} from 0.5 to 0.25"}
    assert left_on(before, dict(marks("given", value))) == told
