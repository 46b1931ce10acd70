"""What wrong results are right for is found by calling the reference with one thing changed; nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distlab.grading import load_lesson, reference_of
from distlab.grading.causes.as_if import changes_of
from distlab.grading.check import examine


def told(name: str, fn: Callable[..., Any], world: int = 1) -> str:
    report = examine(load_lesson(name).exercise(name), fn, worlds=(world,), seed=3)
    assert report.verdict == "wrong"
    return report.message


def heads_of_rank_0(weight, num_heads, num_shared, num_ranks, rank):
    if num_heads % num_ranks or num_shared % num_ranks:
        raise ValueError("heads do not divide")
    size = len(weight) // (num_heads + 2 * num_shared)
    sections = weight.split([num_heads * size, num_shared * size, num_shared * size])
    return torch.cat([section.chunk(num_ranks)[0] for section in sections])


def share_without_the_last(uptimes_s, interval_s, save_s, restart_s):
    uptimes_s = uptimes_s[:-1] or [1e9]
    kept_s = sum(max(each - restart_s, 0) // (interval_s + save_s) * interval_s for each in uptimes_s)
    return kept_s / sum(uptimes_s)


def rate_without_warm_up(step, base_lr, *, batch, base_batch, num_warmup):
    return base_lr * batch / base_batch


def test_an_argument_that_is_not_used_is_named() -> None:
    assert "what is right for rank=0, whatever rank is: is it used?" in told("08.heads", heads_of_rank_0)


def test_nothing_is_said_where_no_change_explains_it() -> None:
    message = told("12.share", lambda *given: 0.123 + share_without_the_last(*given))
    assert "what is right" not in message


def test_changes_are_those_of_the_drawn_arguments() -> None:
    exercise = load_lesson("08.heads").exercise("08.heads")
    reference = reference_of(exercise)
    changes = list(changes_of(exercise, reference, 0, 1))
    assert {change.what for change in changes} - {""} == {"weight", "num_heads", "num_shared", "num_ranks", "rank"}
    assert len(changes) < 60
    assert any("had changed places" in change.words for change in changes)


def test_a_record_is_changed_field_by_field_and_stays_as_it_was() -> None:
    exercise = load_lesson("15.fits").exercise("15.fits")
    reference = reference_of(exercise)
    changes = [one for one in changes_of(exercise, reference, 0, 1) if one.what == "plan.sharding.stage"]
    assert changes
    assert exercise.vary is not None
    given = exercise.vary.arguments(exercise.vary.draw(0, 0, 0, 1))
    assert given is not None
    zero = next(one for one in changes if "stage=0" in one.words)
    before = repr(given)
    assert zero.fn(*given) >= reference(*given)
    assert repr(given) == before
