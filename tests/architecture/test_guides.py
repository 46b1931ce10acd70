"""docs/guides.md answers 127 rows of the usual guides, and each place that it names is there."""

import functools
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides.md"
ROW = re.compile(r"\| (\d+) \| (.+) \| (.+) \| (.*) \|")
EXERCISES = "\n".join(path.read_text() for path in ROOT.glob("lessons/*/exercises.py"))


@functools.cache
def anchors_of(path):
    """Return the anchors of a notebook's or a page's headings, as the website and GitHub make them."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


def is_there(place):
    """Tell whether a place is one: a link to a page or a part of it, a file and a name in it, an exercise."""
    if link := re.fullmatch(r"\[[^]]+\]\(([^)#]+)#?(.*)\)", place):
        path = (PAGE.parent / link[1]).resolve()
        return path.is_file() and (not link[2] or link[2] in anchors_of(path))
    file, _, name = place.strip("`").partition("::")
    if "/" not in file:
        return f'name="{file}"' in EXERCISES
    text = (ROOT / file).read_text() if (ROOT / file).is_file() else None
    return text is not None and (not name or re.search(rf"^ *(def|class) {name}\b", text, re.MULTILINE) is not None)


def test_each_row_of_the_guides_is_answered_at_places_that_are_there():
    rows = ROW.findall(PAGE.read_text())
    assert [int(number) for number, *_ in rows] == list(range(1, 128))
    places = [(number, place) for number, *_, named in rows for place in named.split("; ") if place]
    assert [place for place in places if not is_there(place[1])] == []
    assert all(named or "Cannot be checked: " in answer for _, _, answer, named in rows)


def test_what_is_gone_is_noticed():
    for place in ("[a](nowhere.md)", "[a](platforms.md#nothing)", "`03.nothing`", "`distlab/faces.py::nothing`"):
        assert not is_there(place), place
