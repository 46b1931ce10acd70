"""Check one submission in this process: `python -m distlab.course.classroom.one TASK`, where TASK is JSON.

Its code runs in ranks only. Each report is a line of JSON on what was this process' standard output, as soon as it is
there; no rank inherits that, and what else is printed is dropped.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MAX_MORE_PROCESSES = 1024  # threads count too: eight ranks have some hundred, and other submissions run beside this one


def main() -> None:
    """Check the exercises one after the other."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1) as out, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        from distlab.comm.launch.fork_client import OPTIMIZERS, PRELOAD, fork_server
        from distlab.course.grading import load_lesson
        from distlab.course.grading.answer.submission import isolated_submission
        from distlab.course.grading.check import examine
        from distlab.course.grading.guard import limit_number_of_processes

        limit_number_of_processes(MAX_MORE_PROCESSES)
        lesson = load_lesson(task["lesson"], Path(task["folder"]))
        if not lesson.uses_optimizers():
            fork_server([module for module in PRELOAD if module != OPTIMIZERS])
        try:
            functions, notes = isolated_submission(task["file"], lesson)
        except ValueError as error:
            print(json.dumps({"unread": str(error)}), file=out)
            return
        print(json.dumps({"notes": [*notes]}), file=out)
        for exercise in lesson.exercises:
            report = examine(exercise, functions[exercise.name], seed=task["seed"])
            print(json.dumps(report.as_dict()), file=out)


if __name__ == "__main__":
    main()
