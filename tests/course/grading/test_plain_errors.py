"""Errors of Python and torch in words: the text that this torch really raises is known, and a check tells it."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distlab.course.grading import load_lesson, reference_of
from distlab.course.grading.check import examine
from distlab.course.grading.diagnosis.blame import in_words

ONES, LEAF = torch.ones(7), torch.ones(2, requires_grad=True)
MISTAKES = {
    "float index": (lambda: ONES[torch.tensor([1.0])], "must be an integer"),
    "float places": (lambda: ONES.index_add(0, torch.tensor([1.0]), ONES[:1]), "must be an integer"),
    "float size": (lambda: torch.zeros(7 / 2), "must be an integer"),
    "float slice": (lambda: [1, 2][: 4 / 2], "must be an integer"),
    "float range": (lambda: range(4 / 2), "must be an integer"),
    "no padding": (lambda: ONES.view(-1, 4), "7 elements do not fill the shape [-1, 4]"),
    "not transposed": (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "columns in a (3) as rows in b (2)"),
    "sizes": (lambda: ONES + ONES[:4], "sizes 7 and 4 meet"),
    "None": (lambda: None + 1, "a value is None here"),
    "None's attribute": (lambda: None.grad, "a value is None here"),
    "list for tensor": (lambda: torch.abs([1.0]), "torch wants a tensor here, and got a list"),
    "dtypes": (lambda: torch.ones(2, 2) @ torch.ones(2, 2).double(), "different dtypes meet"),
    "dtypes put": (lambda: ONES.clone().index_put_((torch.tensor([1]),), ONES[:1].double()), "different dtypes"),
    "cast": (lambda: torch.ones(2, dtype=torch.int64).add_(0.5), "different dtypes meet"),
    "bits of floats": (lambda: ONES & ONES, "shifts, & and | need integers"),
    "mean of integers": (lambda: torch.tensor([1, 2]).mean(), "convert the tensor to float first"),
    "leaf": (lambda: LEAF.add_(1), "torch.no_grad()"),
    "no graph": (lambda: ONES.sum().backward(), "does not depend on parameters"),
    "if tensor": (lambda: bool(ONES > 0), ".any(), .all()"),
    "not contiguous": (lambda: torch.ones(2, 3).T.view(6), ".contiguous()"),
    "past a tuple": (lambda: torch.ones(1).chunk(2)[1], "the tuple is shorter than this index needs"),
    "outside": (lambda: ONES[None].gather(1, torch.tensor([[9]])), "places count from 0 to its size - 1"),
    "bytes begin anywhere": (lambda: torch.zeros(9).byte()[1:5].view(torch.float32), "read as numbers here (Float"),
    "too few bytes": (lambda: torch.zeros(3).byte().view(torch.float32), "piece.clone() begins anew"),
    "changed in place": (lambda: changed_in_place(), "autograd needs this tensor as it was"),
    "number sent": (lambda: dist.all_reduce(1.0), "sends tensors, and here `tensor` is something else"),
}


def changed_in_place():
    y = LEAF.exp()
    y += 1
    y.sum().backward()


def test_the_usual_errors_have_words():
    for mistake, words in MISTAKES.values():
        with pytest.raises(Exception) as caught:  # noqa: PT011  the text is what is looked at
            mistake()
        assert words in in_words(f"raised {caught.type.__name__}: {caught.value}"), caught.value
    for silent in ("list indices must be integers or slices, not str", "'int' object has no attribute 'numel'"):
        assert in_words(f"raised TypeError: {silent}") == "", "it may be no tensor, and no float"


def float_places(gradient, k):
    """Top-k whose places came through a float tensor."""
    places = gradient.abs().topk(k).indices.to(gradient.dtype)
    return gradient[places]


def test_a_check_says_the_fault_and_the_line():
    report = examine(load_lesson("05").exercise("05.top_k"), float_places, worlds=(1,))
    assert (report.verdict, report.fault) == ("wrong", "raised")
    assert "must be an integer" in report.message
    assert f"line {float_places.__code__.co_firstlineno + 3}, in float_places" in report.message


def test_a_value_that_the_budget_cannot_use_is_told():
    exercise = load_lesson("01").exercise("01.fit")
    needs_more = replace(exercise, budget=lambda evidence: evidence.results[0]["no such case"])
    report = examine(needs_more, reference_of(exercise))
    assert (report.verdict, report.fault) == ("wrong", "returned")
    assert "what it returned cannot be judged" in report.message
