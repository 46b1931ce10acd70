"""Predictions in words: what the learner said, and nothing that the learner did not say."""

import json
from pathlib import Path

import pytest

from distlab.course.grading import progress
from distlab.course.grading.progress import FILE, MARKER, Record
from distlab.course.notebook import predict
from distlab.course.notebook.learner.prediction import Prediction, PredictionError

NOTHING = "measured 3; you predicted nothing"


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin outside a folder of working copies, with nothing remembered."""
    monkeypatch.chdir(tmp_path)
    new_kernel(monkeypatch)


def new_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_remembered", Record())


def widget(guess: Prediction):
    """Return what the notebook shows: the words, the box and the button."""
    said, row = guess._widget().children
    box, _, button = row.children
    return said, box, button


@pytest.mark.parametrize(
    ("predicted", "measured", "says"),
    [
        (2.0, 2.0, "you predicted 2 ms, measured 2 ms: exactly"),
        (1.9, 2.0, "within 5%"),
        (8.0, 2.0, "4x too much"),
        (0.5, 2.0, "4x too little"),
        (1.0, 2100.0, "2,100x too little"),
        (0.0, 2.0, "off by 2 ms"),
        (3.0, 0.0, "off by 3 ms"),
    ],
)
def test_a_prediction_is_compared(predicted, measured, says):
    guess = predict("How long?", unit="ms")
    assert guess.commit(predicted) == f"your prediction: {predicted:.4g} ms"
    assert guess.compare(measured).endswith(says)
    assert guess.answer == f"You said {predicted:.4g} ms."


def test_a_signed_answer_may_be_negative():
    guess = predict("How much shorter?", "%", signed=True)
    guess.commit(-1.0)
    assert guess.compare(2.0).endswith("off by 3 %")


def test_an_assumed_number_is_never_the_learners():
    guess = predict("How long?", "ms")
    _, box, _ = widget(guess)
    guess.default(200)
    assert (guess.value, guess.given, box.value) == (200.0, False, "")
    assert widget(guess)[1].value == ""
    assert repr(guess) == "Predict: How long? (not answered yet)"
    assert guess.compare(199.5) == "measured 199.5 ms. You gave no number; 200 ms was assumed."
    assert guess.answer == "You gave no number; 200 ms was assumed."
    again = predict("How long?", "ms")
    assert (again.value, again.given) == (None, False)


def test_an_answer_counts_before_and_after_the_default():
    guess = predict("How long?", "ms")
    _, box, _ = widget(guess)
    box.value = "50"
    guess.default(60)
    assert (guess.value, guess.given, box.value) == (50.0, True, "50")
    late = predict("How long, later?", "ms")
    late.default(60)
    late.commit(70)
    assert late.compare(70) == "you predicted 70 ms, measured 70 ms: exactly"


def test_no_prediction_is_said_and_stops_nothing():
    assert predict("How long?").compare(3).startswith(NOTHING)
    assert predict("How long?").compare(3, how="simulated").startswith("simulated 3; you predicted nothing")
    assert predict("How long?").answer == "You gave no number."


@pytest.mark.parametrize("value", [float("nan"), -float("inf"), 10**400, "3", None, True])
def test_a_prediction_is_a_finite_number(value):
    for signed in (False, True):
        guess = predict("How long?", "ms", signed=signed)
        for take in (guess.commit, guess.default):
            with pytest.raises(ValueError, match="finite number of ms"):
                take(value)
        assert guess.value is None


def test_what_cannot_be_is_refused_in_one_line():
    for value, unit in ((-1, "ms"), (-0.1, "")):
        guess, words = predict("How much?", unit), f"of {unit or 'something'} that is not negative; got {value}"
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
    assert predict("How wide?", "ms").value is None
    assert predict("How long?", "s").value is None
    predict("How much?", "ms", signed=True).commit(-3)
    assert predict("How much?", "ms").value is None, "a number that cannot be is no answer"


def test_a_file_that_cannot_be_read_is_told(tmp_path):
    (tmp_path / MARKER).touch()
    (tmp_path / FILE).write_text("{")
    guess = predict("How long?", "ms")
    said, box, _ = widget(guess)
    box.value = "3"
    assert said.value.startswith("Predict: How long? (3 ms) (progress.json could not be read")
    (tmp_path / FILE).write_text("{")
    assert guess.commit(4).startswith("your prediction: 4 ms (progress.json could not be read")


def test_the_box_commits_and_shows_what_code_commits():
    guess = predict("How long?", "ms")
    bundle = guess._repr_mimebundle_()
    assert bundle["text/plain"] == "Predict: How long? (not answered yet)"
    assert "application/vnd.jupyter.widget-view+json" in bundle
    box, unit, button = guess._widget().children[1].children
    assert (box.value, box.placeholder, unit.value) == ("", "your number", "ms")
    box.value = "3.5"
    assert guess.value == 3.5
    guess.commit(4)
    assert box.value == "4"
    guess.commit(1234567.125)
    assert (guess.value, box.value) == (1234567.125, "1234567.125")
    guess.commit(4)
    for refused in ("soon", "-5", "1e999"):
        box.value = refused
        button.click()
        assert guess.value == 4.0
    box.value = "5"
    button.click()
    assert guess.value == 5.0


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("2.5", "2.5 ms"),
        ("<b>", "&#x27;&lt;b&gt;&#x27; is not a number; write one such as 3.2 or 1000"),
        ("-5", "&#x27;-5&#x27; cannot be the answer: write a number of ms that is not negative"),
        ("inf", "&#x27;inf&#x27; cannot be the answer: write a finite number of ms"),
        (" ", "Type a number first."),
        ("3,5", "&#x27;3,5&#x27; is not a number; write one such as 3.2 or 1000"),
        ("1E+3", "1000 ms"),
    ],
)
def test_the_box_says_what_was_understood(typed, says):
    guess = predict("How long?", "ms")
    said, box, _ = widget(guess)
    box.value = typed
    assert said.value == f"Predict: How long? ({says})"


def test_an_empty_commit_says_something():
    guess = predict("How long?", "ms")
    said, box, button = widget(guess)
    button.click()
    assert said.value == "Predict: How long? (Type a number first.)"
    assert guess.value is None
    box.value = "3"
    box.value = ""
    button.click()
    assert said.value == "Predict: How long? (Type a number first; 3 ms stays your answer.)"
    assert guess.value == 3.0
