"""Fill in lessons/INSTRUCTORS.md: the lessons' times and points, and the answer that each question's code prints.

python tools/instructor_guide.py           # write it
python tools/instructor_guide.py --check   # say whether it is as it should be
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

from distlab.course.grading import lessons, load_lesson

FOLDER = Path(__file__).resolve().parents[1] / "lessons"
GUIDE = FOLDER / "INSTRUCTORS.md"
QUESTION = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n.*?```\n)?", re.DOTALL)
TABLE = re.compile(r"(<!-- lessons -->\n).*?(<!-- end of lessons -->)", re.DOTALL)


def main() -> int:
    """Write the guide, or check it; 1 if it is not as it should be."""
    old = GUIDE.read_text(encoding="utf-8")
    new = filled(old)
    if "--check" in sys.argv[1:]:
        if old != new:
            print("lessons/INSTRUCTORS.md is not up to date: run python tools/instructor_guide.py")
        return int(old != new)
    GUIDE.write_text(new, encoding="utf-8")
    return 0


def filled(text: str) -> str:
    """Return the guide with its table of lessons and all answers."""
    rows = "\n".join(row(number) for number in lessons(FOLDER))
    heads = "| lesson | minutes | of them exercises | exercises | points |\n|---|---|---|---|---|"
    text = TABLE.sub(lambda found: f"{found[1]}\n{heads}\n{rows}\n\n{found[2]}", text)
    return QUESTION.sub(lambda found: f"```python\n{found['code']}```\n\n```text\n{answer(found['code'])}```\n", text)


def row(number: str) -> str:
    """Return a lesson's row."""
    lesson = load_lesson(number, FOLDER)
    exercises = lesson.exercises
    numbers = lesson.minutes, sum(e.minutes for e in exercises), len(exercises), sum(e.difficulty for e in exercises)
    return f"| {number} {lesson.title} | {' | '.join(map(str, numbers))} |"


def answer(code: str) -> str:
    """Return what the code of a question prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "question", "exec"), {"__name__": "question"})
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
