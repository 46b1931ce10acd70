"""How the website is built: `make docs` writes it to build/site. Pages are taken from where they stand.

DISTLAB_DOCS_LESSONS chooses lessons, such as 09_*: a short build for tests.
"""

import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs" / "site"), str(ROOT)]
sys.modules.setdefault("rfc3987_syntax", None)  # nbformat's checker of addresses loads for 1.2 s: no page needs it

project = "distlab"
project_copyright = "the distlab authors, Apache-2.0"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "lessons/*.md", "lessons/*/*.md", "benchmarks/*.md"]
lessons = f"lessons/{os.environ.get('DISTLAB_DOCS_LESSONS', '[0-9]*')}/lesson.ipynb"
include_patterns += ["lessons/START.ipynb", "lessons/GUIDES.ipynb", lessons]
exclude_patterns = [".*", "build", "work", "tests", "distlab", "simulator", "tools", "assets", "**/__pycache__"]

OWN = ("players", "notebooks", "reference", "sources", "faults", "docstrings", "mathml")
extensions = ["myst_nb", "sphinx.ext.autodoc", *(f"site_build.{name}" for name in OWN)]

# Notebooks are shown as they were committed, and never run.
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "image/png", 1)]
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]
# A lesson's headings may skip a level; distlab and the simulator both have a Step.
suppress_warnings = ["myst.header", "ref.python"]
suppress_warnings += ["myst.xref_missing"] * ("DISTLAB_DOCS_LESSONS" in os.environ)  # lessons link to those left out
html_math_renderer = "mathml"

default_role = "py:obj"  # `name` links to what is documented, and else looks like code
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_title = "distlab"
html_baseurl = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["distlab"]["website"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_extra_path = ["front"]  # index.html, which leads to the front page
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses to files
html_theme_options = {"navigation_with_keys": False}
