"""Errors shortened for a notebook, predictions in words, pictures with words."""

import pytest

from distlab.notebook import predict, show
from distlab.notebook.display import Picture, png_of
from distlab.notebook.trouble import explain, shorten

ERROR = """rank 1 of 2 raised TypeError: no

--- rank 1 ---
Traceback (most recent call last):
  File "<ranks In[3]>", line 2, in <module>
    dist.all_reduce(3)
  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81, in wrapper
    return func(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^
TypeError: no

--- the other ranks ---
rank 0 was still running"""


def test_frames_of_torch_are_left_out():
    assert shorten(ERROR) == ERROR.replace(
        '  File "/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 81, in wrapper\n'
        "    return func(*args, **kwargs)\n"
        "           ^^^^^^^^^^^^^^^^^^^^^\n",
        "",
    )


def test_frames_of_torch_stay_where_there_are_no_others():
    only = ERROR.replace('  File "<ranks In[3]>", line 2, in <module>\n    dist.all_reduce(3)\n', "")
    assert shorten(only) == only


def test_a_name_that_only_the_notebook_has():
    text = "rank 0 of 2 raised NameError: name 'flat' is not defined"
    assert "%%ranks --push flat" in explain(text, {"flat": 1})
    assert "--push" not in explain(text, {"other": 1})


def test_an_interrupt_is_told_first():
    text = explain("the call was interrupted\n\nrank 0 waits in recv", {})
    assert text.startswith("You stopped the ranks. This is where each one stood:")
    assert "rank 0 waits in recv" in text


@pytest.mark.parametrize(
    ("predicted", "measured", "says"),
    [
        (2.0, 2.0, "you predicted 2 ms, measured 2 ms: exactly"),
        (2.1, 2.0, "within 5%"),
        (1.9, 2.0, "within 5%"),
        (8.0, 2.0, "4x too much"),
        (0.5, 2.0, "4x too little"),
        (1.0, 2100.0, "2,100x too little"),
        (0.0, 2.0, "off by 2 ms"),
        (-1.0, 2.0, "off by 3 ms"),
        (3.0, 0.0, "off by 3 ms"),
    ],
)
def test_a_prediction_is_compared(predicted, measured, says):
    guess = predict("How long?", unit="ms")
    assert guess.commit(predicted) == f"your prediction: {predicted:.4g} ms"
    assert guess.compare(measured).endswith(says)


def test_a_default_counts_only_where_nothing_was_typed():
    guess = predict("How long?", "ms")
    box = guess._widget().children[1].children[0]
    box.value = "50"
    guess.default(60)
    assert (guess.value, box.value) == (50.0, "50")
    empty = predict("How long?", "ms")
    empty.default(60)
    assert empty.value == 60.0


def test_no_prediction_is_said_and_stops_nothing():
    assert predict("How long?").compare(3).startswith("measured 3; you predicted nothing")
    assert predict("How long?").compare(3, how="simulated").startswith("simulated 3; you predicted nothing")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "3", None, True])
def test_a_prediction_is_a_finite_number(value):
    with pytest.raises(ValueError, match="finite number of ms"):
        predict("How long?", "ms").commit(value)


def test_the_box_commits_and_shows_what_code_commits():
    guess = predict("How long?", "ms")
    bundle = guess._repr_mimebundle_()
    assert bundle["text/plain"] == "Predict: How long? (not answered yet)"
    assert "application/vnd.jupyter.widget-view+json" in bundle
    box, unit, button = guess._widget().children[1].children
    assert (box.placeholder, unit.value) == ("your number", "ms")
    box.value = "3,5"
    assert guess.value == 3.5
    guess.commit(4)
    assert box.value == "4"
    guess.commit(1234567.125)
    assert (guess.value, box.value) == (1234567.125, "1234567.125")
    guess.commit(4)
    box.value = "soon"
    assert guess.value == 4.0
    box.value = "nan"
    button.click()
    assert guess.value == 4.0
    box.value = "5"
    button.click()
    assert guess.value == 5.0


def test_the_box_says_what_was_understood():
    guess = predict("How long?", "ms")
    said, row = guess._widget().children
    row.children[0].value = "2.5"
    assert said.value == "Predict: How long? (2.5 ms)"
    row.children[0].value = "<b>"
    assert said.value == "Predict: How long? (&#x27;&lt;b&gt;&#x27; is no number; write one such as 3.2)"


def test_a_picture_has_alt_text_and_words():
    from matplotlib.figure import Figure

    bundle = Picture(png_of(Figure()), 'a "big" picture')._repr_mimebundle_()
    assert bundle["text/plain"] == 'a "big" picture'
    assert 'alt="a &quot;big&quot; picture"' in bundle["text/html"]
    with pytest.raises(ValueError, match="needs the text"):
        show(b"png", " ")
