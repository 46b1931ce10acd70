"""GUIDES: each snippet shows the fault that is named, and none when mended; nothing that a learner does hangs or stays.

`make test` tries every third of them, `make soak` all.
"""

import _thread
import json
import sys
import threading
from pathlib import Path

import pytest

from distlab.course.notebook.ranks import CellError

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
sys.path.append(str(LESSONS))

from guides import ASKED, RANKS, TRIALS, ask, close, judged, made, table, verdict  # noqa: E402

# By trial: the number that the page asks for, a text of the mended one's sentence, and who waits where it hangs.
FOUND = {
    "zero_grad": (3.0, "[1.0, 1.0, 1.0] times"),
    "sampler": (32, "8 on each rank, 32 on all four, 32 different"),
    "set_epoch": (1, "different orders: 3"),
    "spawn": (0, "Both processes have the sum"),
    "none_skipped": (1, "The means are [2.5, 2.0, 2.5]", "rank 0 waits in all_reduce #3"),
    "every_microbatch": (10, "3 all-reduces; 10 of 10"),
    "lars_norm": (19.0, "1.00 times as long as the paper's. A bias's first is 1 times its second"),
    "top_k": (100, "sent 24 kB, 4 %"),
    "own_places": (0, "at 100 of its 100 places"),
    "ten_bits": (383, "with 10; zeros have scale 1e-30"),
    "nothing_sent": (0, "sent 1,536 bytes"),
    "wrong_tensor": (0, "4 of 4 ranks have the mean"),
    "loss_of_chunks": (8.0, "1.00 times as long"),
    "missing_box": (6, "8 boxes ran", "rank 0 waits in recv from 1"),
    "backward_order": (8, "up to 4 micro-batches"),
    "gather_cuts": (0, "128 of 128 numbers have a gradient"),
    "input_gradient": (4, "Different gradients: 1. Rank 0's is 100%"),
    "bias_times": (4.0, "1.00 times"),
    "heads_split": (4, "with 8 heads"),
    "one_unit": (100, "25 % of the model"),
    "one_shard": (250, "1000 are in the file"),
    "not_atomic": (0, "4 of 4 ranks can read a checkpoint; rank 0's is of step 100"),
    "same_run": (13, "steps [5, 5, 5, 5]. Rank 0 saw batches [0, 1, 2, 3, 4, 5, 6, 7]; weights are off by up to 0"),
    "saved_in_except": (0, "rank 2 of 4 raised ValueError: sample 17 has no label", "rank 2: barrier #4"),
    "world_size": (4, "The three ranks count 3", "rank 0 waits in all_reduce"),
    "empty_section": (0, "optimizer"),
}
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
    judged(TRIALS["set_epoch"], repaired)
    timer = threading.Timer(0.5, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        judged(TRIALS["set_epoch"], hung)
    timer.join()
    assert RANKS.pids == ()
    assert judged(TRIALS["set_epoch"], repaired).right
