"""GUIDES: each snippet shows the fault that is named, and none when mended; nothing that a learner does hangs or stays.

`make test` tries every third of them, `make soak` all.
"""

import _thread
import json
import sys
import threading
import tomllib
from pathlib import Path

import pytest

from distlab.course.notebook.ranks import CellError

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
sys.path.append(str(LESSONS))

from guides import ASKED, RANKS, TRIALS, ask, close, judged, made, table, verdict  # noqa: E402

FOUND = tomllib.loads(Path(__file__).with_name("guides_found.toml").read_text("utf-8"))
BY_CHANCE = {"empty_section": 50, "wrong_tensor": 1}  # milliseconds; a rank that is late may have the sum in time
HANGS = {name for name, found in FOUND.items() if found[2:]}
CASES = [pytest.param(name, marks=[pytest.mark.soak] * (place % 3 > 0)) for place, name in enumerate(FOUND)]


def repaired(sampler, epochs):
    return [tuple(map(int, sampler)) for epoch in range(epochs) if sampler.set_epoch(epoch) is None]


def hung(sampler, epochs):
    while True:
        pass


@pytest.fixture(scope="module", autouse=True)
def ranks_end():
    yield
    close()


@pytest.mark.parametrize("name", CASES)
def test_as_printed_it_shows_its_fault_and_mended_none(name, monkeypatch):
    one, (number, mended, *waits) = TRIALS[name], FOUND[name]
    monkeypatch.setitem(judged.__globals__, "LIMIT_S", 5.0 if name in HANGS else 60.0)  # only a hang reaches it
    first, then = (judged(one, made(one, text)) for text in one.versions)
    assert first.number == pytest.approx(number, rel=0.01, abs=BY_CHANCE.get(name, 1e-9)), first
    assert (first.right, then.right) == (False, True), (first, then)
    assert all(text in first.sentence for text in waits)
    assert mended in then.sentence
    if one.draw is not None:
        assert one.draw(first, then).words


def test_the_page_has_each_trial_once_and_links_to_headings():
    notebook = json.loads((LESSONS / "GUIDES.ipynb").read_text(encoding="utf-8"))
    named = [cell["metadata"].get("distlab", {}).get("trial") for cell in notebook["cells"]]
    assert sorted(FOUND) == sorted(TRIALS) == sorted({name for name in named if name})
    assert all(named.count(name) == 3 for name in FOUND)
    for one in TRIALS.values():
        (lesson,) = LESSONS.glob(f"{one.words[4]}_*/lesson.py")
        assert f"# {one.words[5]}" in lesson.read_text(encoding="utf-8"), f"{one.words[0]}: no heading {one.words[5]!r}"
        assert f'href="{lesson.parent.name}/lesson.ipynb"' in one.link


def test_a_learners_own_version_is_tried_and_what_goes_wrong_is_said():
    with pytest.raises(CellError, match="Run the cell above first"):  # also where it has a syntax error
        verdict("set_epoch")
    ask("set_epoch", repaired).commit(1)
    shown = verdict("set_epoch")
    for text in ("you predicted 1 orders, measured 3 orders", "As it stands above: right", "+        sampler.set"):
        assert text in shown.text
        assert text in shown.page
    wrongs = (lambda *_: 1 / 0, "4 raised ZeroDivisionError"), (lambda *_: 7, "raised TypeError"), (hung, "rank")
    for wrong, says in wrongs:
        ASKED["set_epoch"] = wrong, ASKED["set_epoch"][1]
        assert says in verdict("set_epoch").text
    rows = table().text.splitlines()
    assert "Three epochs, shuffled: Ranks back: 0." in rows
    assert "A loader on every rank: not on trial in this session" in rows
    assert RANKS.pids == ()


def test_a_snippet_that_is_interrupted_leaves_nothing_and_the_next_one_runs():
    def is_interrupted():
        judged(TRIALS["set_epoch"], repaired)  # the ranks are there: the interrupt meets the snippet, not their start
        timer = threading.Timer(0.5, _thread.interrupt_main)
        timer.start()
        try:
            return not judged(TRIALS["set_epoch"], hung)
        except KeyboardInterrupt:
            return True
        finally:
            timer.join()

    assert any(is_interrupted() for _ in range(5)), "Python drops one that falls into a callback, and not each time"
    assert (RANKS.pids, judged(TRIALS["set_epoch"], repaired).right) == ((), True)
