"""GUIDES: each snippet shows the fault that is named, and none with its line; nothing that a learner does hangs.

`make test` tries every third of them, `make soak` all.
"""

import json
import math
import sys
from pathlib import Path

import pytest

from distlab.course.notebook.ranks import CellError

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
sys.path.append(str(LESSONS))

from guides import TRIALS, ask, close, table, verdict  # noqa: E402
from guides.trial import try_out  # noqa: E402

# What is measured of each snippet as printed: the number that the page asks for.
NUMBERS = {"zero_grad": 3.0, "sampler": 32, "set_epoch": 1}
CASES = [pytest.param(name, marks=[pytest.mark.soak] * (place % 3 > 0)) for place, name in enumerate(NUMBERS)]
HANGS = ()


@pytest.fixture(scope="module", autouse=True)
def ranks_end():
    yield
    close()


@pytest.fixture(autouse=True)
def limit(monkeypatch, request):
    """A limit that only a hang reaches, but where one is shown."""
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name is not None and name not in HANGS:
        monkeypatch.setattr("guides.trial.LIMIT_S", 30.0)


@pytest.mark.parametrize("name", CASES)
def test_as_printed_it_shows_its_fault_and_with_its_line_none(name):
    told = try_out(TRIALS[name])
    assert told.printed.number == pytest.approx(NUMBERS[name], rel=0.01), str(told)
    assert (told.printed.right, told.mended.right) == (False, True), str(told)
    assert told.printed.sentence != told.mended.sentence
    assert "\n+" in told.difference


def test_the_page_has_each_trial_once_and_its_links_lead_to_headings():
    notebook = json.loads((LESSONS / "GUIDES.ipynb").read_text(encoding="utf-8"))
    named = [cell["metadata"].get("distlab", {}).get("trial") for cell in notebook["cells"]]
    assert [name for name in dict.fromkeys(named) if name] == list(NUMBERS)
    assert sorted(NUMBERS) == sorted(TRIALS)
    assert all(named.count(name) == 3 for name in NUMBERS)
    for one in TRIALS.values():
        number, _, heading = one.lesson.partition(" ")
        (lesson,) = LESSONS.glob(f"{number}_*/lesson.py")
        assert f"# {heading}\n" in lesson.read_text(encoding="utf-8"), f"{one.title}: no heading {heading!r}"


def test_a_learners_own_version_is_tried_and_what_goes_wrong_is_said():
    with pytest.raises(CellError, match="Run the cell above first"):
        verdict("set_epoch")  # also where the cell above has a syntax error
    guess = ask("set_epoch", repaired)
    guess.commit(1)
    told = verdict("set_epoch")
    assert (told.printed.right, told.printed.number, told.compared) == (
        True,
        3,
        "you predicted 1 orders, measured 3 orders: 3x too little",
    )
    rows = {row[0]: row[1] for row in table()}
    assert rows[TRIALS["set_epoch"].title].startswith("Rank 0 saw its samples in 3 of 3")
    assert rows[TRIALS["sampler"].title] == "not on trial in this session"
    assert 'href="03_data_parallel/lesson.ipynb"' in told._repr_html_()
    for wrong, says in (
        (broken, "rank 0 of 4 raised ZeroDivisionError"),
        (unusual, "cannot be judged (TypeError"),
        (hung, "rank 0"),
    ):
        found = try_out(TRIALS["set_epoch"], wrong).printed
        assert (math.isnan(found.number), found.right, says in found.sentence) == (True, False, True), found


def repaired(sampler, epochs):
    return [list(map(int, sampler)) for epoch in range(epochs) if sampler.set_epoch(epoch) is None]


def broken(sampler, epochs):
    return 1 / (epochs - 3)


def unusual(sampler, epochs):
    return 7


def hung(sampler, epochs):
    while True:
        pass
