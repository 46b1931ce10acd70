"""Check one submission in this process, and write each report to a pipe as soon as it is there.

Run as `python -m distlab.classroom.one`; what to do comes as JSON in its one argument. The submission's code runs in
ranks only. Its prints go to this process' output; reports go through a pipe that no rank inherits.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MAX_MORE_PROCESSES = 1024  # threads count too: eight ranks have some hundred, and other submissions run beside this one


def main() -> None:
    """Check the exercises one after the other; one line of JSON for each."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    os.set_inheritable(task["pipe"], False)
    with open(task["pipe"], "w", encoding="utf-8") as pipe:
        from distlab.comm.launch.fork_client import OPTIMIZERS, PRELOAD, fork_server
        from distlab.grading import load_lesson
        from distlab.grading.answer.submission import isolated_submission
        from distlab.grading.check import examine
        from distlab.grading.guard import limit_number_of_processes

        limit_number_of_processes(MAX_MORE_PROCESSES)

        lesson = load_lesson(task["lesson"], Path(task["folder"]))
        if not lesson.uses_optimizers():
            fork_server([module for module in PRELOAD if module != OPTIMIZERS])
        try:
            functions, notes = isolated_submission(task["file"], lesson)
        except ValueError as error:
            _tell(pipe, {"unread": str(error)})
            return
        _tell(pipe, {"notes": list(notes)})
        for exercise in lesson.exercises:
            _tell(pipe, examine(exercise, functions[exercise.name], seed=task["seed"]).as_dict())


def _tell(pipe: Any, line: dict[str, Any]) -> None:
    pipe.write(json.dumps(line) + "\n")
    pipe.flush()


if __name__ == "__main__":
    main()
