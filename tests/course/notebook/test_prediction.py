"""Predictions in words: what the learner said, and nothing that the learner did not say."""

import json
from pathlib import Path

import pytest

from distlab.course.grading import progress
from distlab.course.grading.progress import FILE, MARKER, Record
from distlab.course.notebook import predict
from distlab.course.notebook.prediction import PredictionError


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin outside a folder of working copies, with nothing remembered."""
    monkeypatch.chdir(tmp_path)
    new_kernel(monkeypatch)


def new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_remembered", Record())


def widget(guess):
    """Return what the notebook shows: the words, the box and the button."""
    said, row = guess._widget().children
    box, unit, button = row.children
    assert (unit.value, box.placeholder) == (guess.unit, "your number")
    return said, box, button


COMPARED = [
    (2.0, 2.0, "you predicted 2 ms, measured 2 ms: exactly"),
    (1.9, 2.0, "within 5%"),
    (8.0, 2.0, "4x too much"),
    (0.5, 2.0, "4x too little"),
    (1.0, 2100.0, "2,100x too little"),
    (0.0, 2.0, "off by 2 ms"),
    (3.0, 0.0, "off by 3 ms"),
    (-1.0, 2.0, "off by 3 ms"),
]


def test_a_prediction_is_compared_and_none_is_said():
    for predicted, measured, says in COMPARED:
        guess = predict("How long?", unit="ms", signed=True)
        assert guess.commit(predicted) == f"your prediction: {predicted:.4g} ms"
        assert guess.compare(measured).endswith(says)
        assert guess.answer == f"You said {predicted:.4g} ms."
    guess = predict("How far?")
    for how in ("measured", "simulated"):
        assert guess.compare(3, how=how).startswith(f"{how} 3; you predicted nothing")
    assert guess.answer == "You gave no number."


def test_an_assumed_number_is_never_the_learners():
    guess = predict("How long?", "ms")
    _, box, _ = widget(guess)
    guess.default(200)
    assert (guess.value, guess.given, box.value, widget(guess)[1].value) == (200.0, False, "", "")
    assert repr(guess) == "Predict: How long? (not answered yet)"
    assert guess.compare(199.5) == "measured 199.5 ms. You gave no number; 200 ms was assumed."
    assert guess.answer == "You gave no number; 200 ms was assumed."
    again = predict("How long?", "ms")
    assert (again.value, again.given) == (None, False)
    _, box, _ = widget(again)
    box.value = "50"
    again.default(60)
    assert (again.value, again.given, box.value) == (50.0, True, "50")
    late = predict("How long, later?", "ms")
    late.default(60)
    late.commit(70)
    assert late.compare(70) == "you predicted 70 ms, measured 70 ms: exactly"


def test_what_is_no_prediction_is_refused_in_one_line():
    for value in (float("nan"), -float("inf"), 10**400, "3", None, True, -1):
        guess = predict("How long?", "ms", signed=value != -1)
        words = "not negative; got -1" if value == -1 else "finite number of ms"
        for take in (guess.commit, guess.default):
            with pytest.raises(PredictionError, match=words) as error:
                take(value)
            assert error.value._render_traceback_() == [str(error.value)]
            assert "\n" not in str(error.value)
        assert guess.value is None


def test_an_answer_is_kept_in_the_folder_of_progress(tmp_path, monkeypatch):
    (tmp_path / MARKER).touch()
    assumed = predict("How wide?", "ms")
    assumed.default(3)
    assumed.compare(4)
    assert not (tmp_path / FILE).exists()
    predict("How long?", "ms").commit(50)
    widget(predict("How many?"))[1].value = "3"
    new_kernel(monkeypatch)
    assert json.loads((tmp_path / FILE).read_text())["predictions"] == {"How long? (ms)": 50.0, "How many?": 3.0}
    again = predict("How long?", "ms")
    again.default(60)
    assert again.compare(50) == "you predicted 50 ms, measured 50 ms: exactly"
    assert (again.given, widget(again)[1].value) == (True, "50")
    assert predict("How wide?", "ms").value is predict("How long?", "s").value is None
    predict("How much?", "ms", signed=True).commit(-3)
    assert predict("How much?", "ms").value is None, "a number that cannot be is no answer"
    (tmp_path / FILE).write_text("{")
    said, box, _ = widget(predict("How deep?", "ms"))
    box.value = "3"
    assert said.value.startswith("Predict: How deep? (3 ms) (progress.json could not be read")


TYPED = [
    ("2.5", "2.5 ms"),
    ("2.5 ms", "2.5 ms"),
    ("1E+3", "1000 ms"),
    ("<b>", "&#x27;&lt;b&gt;&#x27; is not a number; write one such as 3.2 or 1000"),
    ("-5", "&#x27;-5&#x27; cannot be the answer: write a number of ms that is not negative"),
    ("inf", "&#x27;inf&#x27; cannot be the answer: write a finite number of ms"),
    ("3,5", "&#x27;3,5&#x27; is not a number; write one such as 3.2 or 1000"),
]


def test_the_box_commits_shows_what_code_commits_and_says_what_was_understood(monkeypatch):
    for typed, says in TYPED:
        new_kernel(monkeypatch)
        said, box, _ = widget(predict("How long?", "ms"))
        box.value = typed
        assert said.value == f"Predict: How long? ({says})"
    new_kernel(monkeypatch)
    guess = predict("How long?", "ms")
    bundle = guess._repr_mimebundle_()
    assert bundle["text/plain"] == "Predict: How long? (not answered yet)"
    assert "application/vnd.jupyter.widget-view+json" in bundle
    said, box, button = widget(guess)
    button.click()
    assert said.value == "Predict: How long? (Type a number first.)"
    box.value = "3.5"
    assert guess.value == 3.5
    box.value = ""
    button.click()
    assert said.value == "Predict: How long? (Type a number first; 3.5 ms stays your answer.)"
    for number, shown in ((1234567.125, "1234567.125"), (4, "4")):
        guess.commit(number)
        assert (guess.value, box.value) == (number, shown)
    for typed, value in (("soon", 4.0), ("-5", 4.0), ("1e999", 4.0), ("5", 5.0)):
        box.value = typed
        button.click()
        assert guess.value == value
