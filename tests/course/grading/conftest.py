"""The small lesson that these tests check answers to."""

from dataclasses import replace
from pathlib import Path

import pytest

from distlab.comm import Ranks
from distlab.course.grading import load_lesson


@pytest.fixture(scope="session")
def lesson():
    return load_lesson("91", Path(__file__).parent / "lessons")


@pytest.fixture(scope="session")
def mean_exercise(lesson):
    """The mean over ranks, with little memory."""
    return replace(lesson.exercise("91.mean"), memory_limit_bytes=256 << 20)


@pytest.fixture(scope="session", autouse=True)
def warm_ranks():
    """Load torch for ranks before anything is timed."""
    with Ranks(1, echo=False) as ranks:
        ranks.run(int)
