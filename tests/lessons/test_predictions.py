"""What START draws of a learner's predictions: each beside what came true, by lesson and kind, and a sentence."""

import json

from distlab.course.grading.progress import FILE, MARKER
from lessons.predictions import Guess, guesses, misjudged, my_predictions


def test_each_number_is_drawn_beside_what_came_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / MARKER).touch()
    assert str(my_predictions()).startswith("Nothing yet: commit to a number")
    late = "The receiver comes 200 ms late. How long does the sender spend in send? (ms)"
    given = {late: 100.0, "Bytes? (MB)": 8.0, "Which rank?": 1.0, "Shorter? (%)": -3.0, "How far? (x)": 2.0}
    true = {late: 200.0, "Bytes? (MB)": 2.0, "Which rank?": 2.0, "Shorter? (%)": 5.0, "Shown alone? (x)": 2.0}
    (tmp_path / FILE).write_text(json.dumps({"schema": 1, "exercises": {}, "predictions": given, "measured": true}))
    assert guesses() == [Guess("01", "times", 0.5), Guess("guides", "bytes", 4.0)]
    assert my_predictions().title == "2 predictions: typically within 2.8x of what came true"
    assert [tuple(line.get_ydata()) for line in my_predictions().figure.axes[0].lines][1:3] == [(0.5,), (4.0,)]
    found = [*guesses(), Guess("03", "times", 0.1), Guess("03", "times", 4.0), Guess("06", "bytes", 1.5)]
    assert misjudged(found).startswith("You misjudge times most: typically by 4x, 2 of 3 too low; you judge bytes best")
