"""What pyproject.toml cannot say: the wheel brings the lessons; links of a package's page lead to the repository."""

import re
import shutil
import sys
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LEFT_OUT = shutil.ignore_patterns("solution.ipynb", "lesson.py", "START.py", "GUIDES.py", "__pycache__", ".*")
SAID = tomllib.loads(Path("pyproject.toml").read_text())
VERSION, ADDRESSES = SAID["project"]["version"], SAID["tool"]["distlab"]
for name, address in ADDRESSES.items():
    if address and not re.fullmatch(r"https://\S*[^\s/]", address):
        sys.exit(f"pyproject.toml, [tool.distlab]: {name} = {address!r}: begin with https:// and end without a slash")
REPOSITORY, WEBSITE = ADDRESSES["repository"], ADDRESSES["website"]


class BuildWithLessons(build_py):
    """Copy lessons/ into the package, without the executed solutions and the notebooks' sources."""

    def run(self) -> None:
        """Build the package, then add the lessons; an editable install uses the checkout's."""
        super().run()
        if not self.editable_mode:
            course = Path(self.build_lib) / "distlab" / "_course" / "lessons"
            shutil.copytree("lessons", course, ignore=LEFT_OUT, dirs_exist_ok=True)


def readme() -> str:
    """Return README.md for a package's page: links and pictures lead to this version in the repository, once known."""
    text = Path("README.md").read_text()
    if not REPOSITORY:
        return text

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1] == "!" else "blob"
        return f"{link[1]}{link[2]}({REPOSITORY}/{kind}/v{VERSION}/{link[3] or 'README.md'}"

    return re.sub(r"(!?)(\[[^]]*\])\((?!https?:)([^)#]*)", absolute, text)


def urls() -> dict[str, str]:
    """Return the links beside a package's page: none while the addresses are not known."""
    pages = {"Source": "", "Issues": "/issues", "Changelog": f"/blob/v{VERSION}/CHANGELOG.md"}
    of_repository = {name: REPOSITORY + page for name, page in pages.items() if REPOSITORY}
    return of_repository | ({"Documentation": WEBSITE} if WEBSITE else {})


setup(
    cmdclass={"build_py": BuildWithLessons},
    long_description=readme(),
    long_description_content_type="text/markdown",
    project_urls=urls(),
)
