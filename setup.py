"""The wheel brings the lessons: whoever installs the package outside a checkout can start them. All else: pyproject."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LEFT_OUT = shutil.ignore_patterns("solution.ipynb", "lesson.py", "START.py", "GUIDES.py", "__pycache__", ".*")


class BuildWithLessons(build_py):
    """Copy lessons/ into the package, without the executed solutions and the notebooks' sources."""

    def run(self) -> None:
        """Build the package, then add the lessons; an editable install uses the checkout's."""
        super().run()
        if not self.editable_mode:
            course = Path(self.build_lib) / "distlab" / "_course" / "lessons"
            shutil.copytree("lessons", course, ignore=LEFT_OUT, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithLessons})
