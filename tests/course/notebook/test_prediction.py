"""Predictions in words: what the learner said, nothing that the learner did not say, and what is closed until then."""

import json
import math
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from distlab.course.grading import progress
from distlab.course.grading.progress import FILE, MARKER, OPEN, Record
from distlab.course.notebook import predict
from distlab.course.notebook.prediction import CLOSED
from distlab.course.notebook.ranks import CellError


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin outside a folder of working copies, with nothing remembered."""
    monkeypatch.chdir(tmp_path)
    new_kernel(monkeypatch)


def new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    predict.cache_clear()
    monkeypatch.setattr(progress, "_remembered", Record())


@pytest.fixture
def shell(monkeypatch):
    """IPython without a notebook."""
    made = InteractiveShell()
    monkeypatch.setattr("IPython.get_ipython", lambda: made)
    monkeypatch.setattr(InteractiveShell, "_instance", made)
    return made


def widget(guess):
    """Return what the notebook shows: the words, the row of the box, the box and its two buttons."""
    guess._repr_mimebundle_()
    said, row, _ = guess._box.children
    box, unit, commit, show = row.children
    assert (unit.value, box.placeholder) == (guess.unit, "your number")
    return said, row, box, commit, show


COMPARED = [(2.0, 2.0, "you predicted 2 ms, measured 2 ms: exactly")]
COMPARED += [(1.9, 2.0, "within 5%"), (8.0, 2.0, "4x too much")]
COMPARED += [(0.5, 2.0, "4x too little"), (1.0, 2100.0, "2,100x too little"), (0.0, 2.0, "off by 2 ms")]
COMPARED += [(3.0, 0.0, "off by 3 ms"), (-1.0, 2.0, "off by 3 ms"), (3.0, math.inf, "infx too little")]


def test_a_prediction_is_compared_and_none_is_said():
    for number, (predicted, measured, says) in enumerate(COMPARED):
        guess = predict(f"How long {number}?", unit="ms", signed=True)
        assert guess.commit(predicted) == f"Predict: How long {number}? ({predicted:.4g} ms)"
        assert guess.compare(measured).endswith(says)
    guess = predict("How far?")
    assert guess.compare(3, how="simulated") == "simulated 3. You gave no number."


def test_what_is_no_prediction_is_refused_in_one_line():
    for value in (float("nan"), -float("inf"), 10**400, "3", None, True, -1):
        guess = predict("How long?", "ms", signed=value != -1)
        words = "not negative; got -1" if value == -1 else "finite number of ms"
        with pytest.raises(CellError, match=words) as error:
            guess.commit(value)
        assert error.value._render_traceback_() == [str(error.value)]
        assert guess.value is None
    with pytest.raises(CellError, match="a number from 0 to 60; got 61"):
        predict("How many?", "of 60").commit(61)


def test_an_answer_is_kept_with_what_came_true_in_the_folder_of_progress(tmp_path, monkeypatch):
    (tmp_path / MARKER).touch()
    predict("How long?", "ms").commit(50)
    widget(predict("How many?"))[2].value = "3"
    kept = json.loads((tmp_path / FILE).read_text())
    assert (kept["predictions"], kept["measured"]) == ({"How long? (ms)": 50.0, "How many?": 3.0}, {})
    del kept["measured"]  # as an older version wrote it
    (tmp_path / FILE).write_text(json.dumps(kept))
    new_kernel(monkeypatch)
    again = predict("How long?", "ms")
    assert (again.value, again.closed, widget(again)[2].value) == (50.0, False, "50")
    assert again.compare(40) == "you predicted 50 ms, measured 40 ms: 1.2x too much"
    assert again.commit(40).endswith("(you have seen the answer: a number that comes later does not count)")
    again.compare(60)
    kept = json.loads((tmp_path / FILE).read_text())
    assert (kept["predictions"]["How long? (ms)"], kept["measured"]) == (50.0, {"How long? (ms)": 40.0})
    assert predict("How wide?", "ms").value is predict("How long?", "s").value is None
    predict("How much?", "ms", signed=True).commit(-3)
    assert predict("How much?", "ms").value is None, "a number that cannot be is no answer"
    (tmp_path / FILE).write_text("{")
    said, _, box, _, _ = widget(predict("How deep?", "ms"))
    box.value = "3"
    assert said.value.startswith("Predict: How deep? (3 ms) (progress.json could not be read")


FIRST = "Predict first: {} (closed until you commit to a number or press Show me; in code: .commit(3.2) or .show_me())"


def test_a_cell_stays_closed_until_a_number_is_given_and_opens_by_itself(tmp_path, shell, capsys):
    (tmp_path / MARKER).touch()
    guess = shell.user_ns["guess"] = predict("How long?", "ms")
    for cell in ("guess.lock()\nprint('a table', guess.compare(5))", "guess.lock(); value = 7"):
        shell.execution_count += 1
        assert shell.run_cell(cell).success
        assert (out := capsys.readouterr().out).count(FIRST.format("How long?")) == 1, "once a cell"
        assert "5 ms" not in out
    assert shell.user_ns["value"] == 7, "what follows runs"
    _, row, box, _, _ = widget(guess)
    assert CLOSED in guess._box._dom_classes
    box.value = "4"
    assert guess._box.children[0].value == "Predict: How long? (you predicted 4 ms, measured 5 ms: 1.2x too little)"
    assert (CLOSED in guess._box._dom_classes, row.layout.display) == (False, "none")
    assert "measured 5 ms: 1.2x too little" in capsys.readouterr().out, "saved in the notebook, seen in a terminal"


@pytest.mark.parametrize("writable", [True, False])
def test_show_me_opens_and_keeps_no_number(tmp_path, monkeypatch, shell, writable):
    (tmp_path / MARKER).touch()
    if not writable:
        monkeypatch.setattr("os.fsync", lambda *_: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    guess = predict("How long?", "ms")
    assert guess.compare(5) == "Your prediction stands above."
    said, _, box, _, show = widget(guess)
    show.click()
    assert said.value == "Predict: How long? (measured 5 ms. You gave no number.)"
    box.value = "5"
    assert said.value.endswith("(you have seen the answer: a number that comes later does not count)")
    assert (guess.value, guess.closed) == (None, False)
    new_kernel(monkeypatch)
    assert progress.record_of() == Record({}, {}, {"How long? (ms)": 5.0} if writable else {})
    assert predict("How long?", "ms").closed == (not writable)


def test_nothing_is_closed_where_numbers_are_not_kept_or_the_folder_is_open(tmp_path):
    guess = predict("How long?", "ms")
    assert (guess.lock(), guess.compare(5)) == (False, "measured 5 ms. You gave no number.")
    (tmp_path / MARKER).touch()
    assert guess.compare(5) == FIRST.format("How long?"), "without IPython"
    (tmp_path / MARKER).write_text(OPEN)
    assert guess.compare(5) == "measured 5 ms. You gave no number."


TYPED = [
    ("2.5", "2.5 ms"),
    (" 2.5 ms", "2.5 ms"),
    ("1E+3", "1000 ms"),
    ("<b>", "&#x27;&lt;b&gt;&#x27; is not a number; write one such as 3.2 or 1000"),
    ("-5", "&#x27;-5&#x27; cannot be the answer: write a number of ms that is not negative"),
    ("inf", "&#x27;inf&#x27; cannot be the answer: write a finite number of ms"),
    ("3,5", "&#x27;3,5&#x27; is not a number; write one such as 3.2 or 1000"),
]


def test_the_box_commits_shows_what_code_commits_and_says_what_was_understood(monkeypatch):
    for typed, says in TYPED:
        new_kernel(monkeypatch)
        said, _, box, _, _ = widget(predict("How long?", "ms"))
        box.value = typed
        assert said.value == f"Predict: How long? ({says})"
    new_kernel(monkeypatch)
    guess = predict("How long?", "ms")
    bundle = guess._repr_mimebundle_()
    assert bundle["text/plain"] == "Predict: How long? (not answered yet)"
    assert "application/vnd.jupyter.widget-view+json" in bundle
    said, _, box, button, _ = widget(guess)
    button.click()
    assert said.value == "Predict: How long? (Type a number first.)"
    box.value = "3.5"
    assert guess.value == 3.5
    box.value = ""
    button.click()
    assert (guess.value, said.value) == (3.5, "Predict: How long? (Type a number first.)")
    for number, shown in ((1234567.125, "1234567.125"), (4, "4")):
        guess.commit(number)
        assert (guess.value, box.value) == (number, shown)
    for typed, value in (("soon", 4.0), ("-5", 4.0), ("1e999", 4.0), ("5", 5.0)):
        box.value = typed
        button.click()
        assert guess.value == value
