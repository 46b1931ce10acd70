"""What the lessons' notebooks have that plain Python lacks: `%load_ext distlab.course.notebook`.

The `extension` adds `%%ranks` and `%ranks` (`magics`) and puts the names that lessons use into the notebook; `display`
shows pictures with their words. `learner` is what you have and did, `jupyter` the server behind `make lessons`. Names
load on first use, so that importing the package needs no IPython.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.faces import lazy

if TYPE_CHECKING:
    from distlab.course.notebook.display import show as show
    from distlab.course.notebook.extension import (
        load_ipython_extension as load_ipython_extension,
        unload_ipython_extension as unload_ipython_extension,
    )
    from distlab.course.notebook.learner.course import course_map as course_map
    from distlab.course.notebook.learner.page import progress_page as progress_page
    from distlab.course.notebook.learner.prediction import predict as predict
    from distlab.course.notebook.learner.stuck import hint as hint, saved_answers as saved_answers, solution as solution
    from distlab.course.notebook.magics.magic import last_records as last_records
    from distlab.course.notebook.magics.trouble import in_cells as in_cells


__getattr__ = lazy(__name__)
