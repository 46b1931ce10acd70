"""For a learner who is stuck, or comes back: an exercise's hints one by one, its solution, your own saved answers.

    hint("03.flat")                  shows the hints so far and the next one
    solution("03.flat")              shows the reference, after three failed checks and all hints
    flat, = saved_answers("03.flat") takes your function from your notebook, if it has passed

What was seen is kept with the progress.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distlab.course.grading import load_lesson, load_submission, progress, reference_of
from distlab.course.grading.lesson import source_text


class Note:
    """A text for a notebook, which shows it as Markdown, or as HTML where there is some."""

    def __init__(self, text: str, markdown: str = "", page: str | None = None) -> None:
        self.text, self.markdown, self.page = text, markdown or text, page

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.markdown

    def _repr_html_(self) -> str | None:
        return self.page


def hint(name: str) -> Note:
    """Show the hints of an exercise that you have seen, and the next one; that is noted in your progress.

    Args:
        name: the exercise, such as "03.flat".

    Raises:
        ValueError: no lesson has an exercise of this name.
    """
    exercise = load_lesson(name).exercise(name)
    total = len(exercise.hints)
    told = progress.change_entry(name, lambda entry: replace(entry, hints=min(entry.hints + 1, total)))
    seen = max(1, min(progress.entry_of(name).hints, total))  # 1: also where nothing can be kept
    shown = [(f"Hint {number} of {total}:", text) for number, text in enumerate(exercise.hints[:seen], 1)]
    text = "\n\n".join([*(f"{head} {words}" for head, words in shown), told]).rstrip()
    return Note(text, "\n\n".join([*(f"**{head}** {words}" for head, words in shown), told]).rstrip())


def solution(name: str) -> Note:
    """Show the reference of an exercise, once you have tried; before that, say in one line what is still missing.

    It is shown after three failed checks and all hints, or after a check that passed. Where you had not passed,
    your progress says from then on that you have seen it.

    Args:
        name: the exercise, such as "03.flat".

    Raises:
        ValueError: no lesson has an exercise of this name.
    """
    exercise = load_lesson(name).exercise(name)
    entry = progress.entry_of(name)
    needed, total = progress.FAILED_CHECKS, len(exercise.hints)
    failed, hints = min(entry.failed, needed), min(entry.hints, total)
    todo = [f'check("{name}", {exercise.function}) checks your function'] if failed < needed else []
    todo += [f'hint("{name}") shows and counts the next hint'] if hints < total else []
    if todo and not entry.passed and not entry.solution_seen:
        so_far = f"{failed} of {needed} failed checks, {hints} of {total} hints seen so far"
        return Note(f"solution: {so_far}; {' and '.join(todo)}")
    if not (text := source_text(reference_of(exercise))):
        return Note(f"solution: this copy has no solution of {name}; ask your instructor")
    foot = ""
    if not entry.passed:
        foot = progress.change_entry(name, lambda one: replace(one, solution_seen=one.solution_seen or progress.now()))
    source = "\n\n\n".join(filter(None, ["\n".join(exercise.imports), text]))
    head = f"The solution of {name}:"
    code = "white-space:pre;overflow-x:auto"  # a line that is too long scrolls; it does not break inside a word
    page = f'<div>{head}</div><pre style="{code}">{html.escape(source)}</pre><div>{html.escape(foot)}</div>'
    return Note("\n\n".join(filter(None, [head, source, foot])), f"{head}\n\n```python\n{source}\n```\n\n{foot}", page)


def saved_answers(name: str, *more: str) -> tuple[Callable[..., Any], ...]:
    """Return your functions of one lesson from your saved notebook, where their checks have passed; else the reference.

    Args:
        name: an exercise, such as "03.average".
        more: further ones of the same lesson.

    Raises:
        ValueError: no lesson has an exercise of this name, or your notebook cannot be read.
    """
    names, lesson = (name, *more), load_lesson(name)
    yours = [name for name in names if progress.work_folder() and progress.entry_of(name).passed]
    saved = load_submission(str(progress.working_copy(lesson.folder.name)), lesson) if yours else {}
    yours = [name for name in yours if name in saved]
    print("from your notebook:", ", ".join(yours) or "nothing yet, so these are the reference's")
    return tuple(saved[name] if name in yours else reference_of(lesson.exercise(name)) for name in names)
