"""What the lessons' notebooks have that plain Python lacks: `%load_ext distlab.course.notebook`.

The extension (`magic`; `ranks` is what it says) adds `%%ranks` and puts the names of lessons into a notebook. Of what a
learner has and did: `course` (copies, which are never overwritten, the map of lessons, and a page to print),
`prediction` (a number before a run), `stuck` (hints, solutions, saved answers). `jupyter` is the server behind
`make lessons`. Names load on first use, so that importing the package needs no IPython.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.faces import lazy

if TYPE_CHECKING:
    from distlab.course.notebook.course import course_map as course_map, progress_page as progress_page
    from distlab.course.notebook.magic import (
        last_records as last_records,
        load_ipython_extension as load_ipython_extension,
        show as show,
        unload_ipython_extension as unload_ipython_extension,
    )
    from distlab.course.notebook.prediction import predict as predict
    from distlab.course.notebook.ranks import in_cells as in_cells
    from distlab.course.notebook.stuck import hint as hint, saved_answers as saved_answers, solution as solution

__getattr__ = lazy(__name__)
