"""The committed notebooks: what was run and shown, the glossary's links, and lessons of two sittings."""

import ast
import builtins
import functools
import json
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from distlab.course.grading import lessons, load_lesson
from distlab.course.grading.answer.source import names_for_functions
from distlab.course.grading.progress import MARKER, change_entry, now
from distlab.course.notebook.course import make_copies
from tests.lessons.short_kernels import SMALLER

LESSONS = Path(__file__).resolve().parents[2] / "lessons"
FIRST_PICTURE, MOST_WITHOUT = 6, 15  # the cell in which the first picture stands at the latest; cells without one
WIDTH, LONGEST = 103, 480  # characters that stand in 1280 pixels; of any line
ROW = re.compile(r"\S {2,}\S")  # two spaces or more between words: a column begins
NOTEBOOKS = sorted(LESSONS.rglob("*.ipynb"))


def outputs_of(cell):
    return cell.get("outputs", ())


def has_image(output):
    data = output.get("data", {})
    return "image/png" in data or "<img" in "".join(data.get("text/html", ()))


def longest_without(places, num_cells):
    """How many cells in a row show nothing, and the first of them."""
    ends = [0, *places, num_cells + 1]
    return max((after - before - 1, before + 1) for before, after in zip(ends, ends[1:], strict=False))


def is_too_long(line):
    return len(line) > (WIDTH if ROW.search(line.strip()) else LONGEST)


def printed(output):
    """What a cell printed; a picture's text is left out."""
    data = output.get("data", {})
    return "".join(output.get("text", "") or ("" if len(data) > 1 else data.get("text/plain", "")))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_notebook_was_run_links_inside_and_prints_lines_that_fit(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert "widgets" not in notebook["metadata"]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    if path.stem == "solution":
        assert not any(cell["outputs"] or cell["execution_count"] for cell in code), "kept without outputs"
    else:
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    assert "application/vnd.jupyter.widget-view+json" not in text
    assert str(LESSONS.parent) not in text
    assert "](../../" not in text, "name the file in words; Jupyter's root is the folder of the copies"
    lines = [line for cell in code for output in outputs_of(cell) for line in printed(output).splitlines()]
    assert [line for line in lines if is_too_long(line)] == []


@pytest.mark.parametrize("path", sorted(LESSONS.glob("*/lesson.ipynb")), ids=lambda path: path.parent.name)
def test_a_lesson_opens_with_a_picture_and_never_goes_on_for_long_without_one(path):
    cells = json.loads(path.read_text())["cells"]
    cells = [cell for cell in cells if "[Map of the course]" not in "".join(cell["source"])]  # the builder's links
    places = [i for i, cell in enumerate(cells, 1) if any(map(has_image, outputs_of(cell)))]
    assert min(places, default=FIRST_PICTURE + 1) <= FIRST_PICTURE
    most, first = longest_without(places, len(cells))
    assert most <= MOST_WITHOUT, f"{most} cells without a picture, from cell {first} on"


@pytest.mark.parametrize("path", sorted(LESSONS.glob("*/lesson.py")), ids=lambda path: path.parent.name)
def test_a_prediction_is_shown_again_beside_what_came_true(path):
    text = path.read_text("utf-8")
    guesses = re.findall(r"^(\w+) = predict\(", text, re.MULTILINE)
    assert guesses
    assert [name for name in guesses if not re.search(rf"\b{name}\.compare\b", text)] == []


def test_what_is_long_and_what_is_an_image():
    found = [longest_without(*asked) for asked in (([3, 10], 12), ([9, 10], 12), ([1], 12), ([], 12))]
    assert found == [(6, 4), (8, 1), (11, 2), (12, 1)]
    assert not has_image({"data": {"text/html": ["<b>Correct.</b><table></table>"], "text/plain": ["Correct."]}})
    assert has_image({"data": {"text/html": ['<img alt="a ring" src="data:image/png;base64,">']}})
    assert has_image({"data": {"image/png": ""}})
    assert is_too_long("ring   4.5 MB".ljust(WIDTH, ".") + "..")
    assert not is_too_long("ring   4.5 MB".ljust(WIDTH, "."))
    assert not is_too_long("a sentence of many words " * 8)
    assert is_too_long("[0.004630905110388994, " * 40)


@pytest.mark.parametrize("lesson", SMALLER)
def test_what_make_test_runs_smaller_stands_in_one_cell_that_is_not_compared(lesson):
    (path,) = LESSONS.glob(f"{lesson}_*/solution.ipynb")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for text in SMALLER[lesson]:
        found = [cell for cell in cells for _ in range("".join(cell["source"]).count(text))]
        assert len(found) == 1, text
        assert "nbval-check-output" not in found[0]["metadata"].get("tags", ()), text


ENTRIES = re.findall(r"^### (.+)\n\nLesson ([\d, ]+)\. \S", (LESSONS / "GLOSSARY.md").read_text(), re.M)
LINK = re.compile(r"\]\(\.\./GLOSSARY\.md(?:#([^)]*))?\)")
LESSON_NOTEBOOKS = {path.parent.name[:2]: path for path in LESSONS.glob("[0-9][0-9]_*/lesson.ipynb")}


@functools.cache
def text_of(number):
    (folder,) = LESSONS.glob(f"{number}_*")
    text = (folder / "lesson.py").read_text().replace("\n# ", " ").lower()
    return re.sub(r"[\s_-]+", " ", text)


def anchor(words):
    """The anchor that a heading gets, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", words.lower()).replace(" ", "-")


def markdown_of(path):
    """The text cells of a notebook, without the code that stands in them, in their order."""
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def test_entries_stand_in_order_and_in_the_lesson_that_the_glossary_names():
    entries = [words for words, _ in ENTRIES]
    assert len(entries) > 40
    assert entries == sorted(entries, key=str.lower)
    linked = {number: LINK.findall(markdown_of(path)) for number, path in LESSON_NOTEBOOKS.items()}
    for words, number in ((words, number) for words, numbers in ENTRIES for number in numbers.split(", ")):
        for word in words.split(", "):
            assert re.sub(r"[\s_-]+", " ", word.lower()) in text_of(number), f"{word} is not in lesson {number}"
        assert linked[number].count(anchor(words)) == 1, f"lesson {number} links {words!r} once, where it explains it"


def test_links_resolve_where_the_learner_opens_the_lessons(tmp_path):
    make_copies(LESSONS, tmp_path)
    known = {anchor(words) for words, _ in ENTRIES}
    found = [(path, words) for path in tmp_path.glob("*/*.ipynb") for words in LINK.findall(markdown_of(path))]
    assert len(found) > 20
    assert [pair for pair in found if pair[1] not in known or not (pair[0].parents[1] / "GLOSSARY.md").is_file()] == []
    pages = re.findall(r"\]\((\w+\.md)\)", markdown_of(tmp_path / "START.ipynb"))
    assert pages == ["GLOSSARY.md", "CHEATSHEET.md"]
    assert all((tmp_path / page).is_file() for page in pages)


@pytest.mark.parametrize("page", ["GLOSSARY.md", "CHEATSHEET.md"])
def test_an_older_page_is_replaced_unless_the_learner_wrote_in_it(tmp_path, page):
    lessons, copy = tmp_path / "lessons", tmp_path / "work" / page
    lessons.mkdir()
    for text in ("first", "second"):
        (lessons / page).write_text(text)
        make_copies(lessons, tmp_path / "work")
        assert copy.read_text() == text
    copy.write_text("second, and a note of mine")
    (lessons / page).write_text("third")
    make_copies(lessons, tmp_path / "work")
    assert copy.read_text() == "second, and a note of mine"


MOST_IN_ONE_SITTING = 90
SECOND = "# Sitting two"
FOLDERS = ("03_data_parallel", "08_tensor_parallel")
OWN = '''
def average_gradients(module):
    """Mine."""
    import torch.distributed as dist
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.grad if parameter.grad is not None else parameter.new_zeros(parameter.shape)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
'''


def notebook(folder="03_data_parallel"):
    return nbformat.read(LESSONS / folder / "solution.ipynb", as_version=4)


def second_half(made):
    """The lesson's first code cell, and all cells from the heading of the second sitting on."""
    (start,) = (i for i, cell in enumerate(made.cells) if cell.source.startswith(SECOND))
    first = next(cell for cell in made.cells if cell.cell_type == "code")
    return [first, *made.cells[start:]]


def names_in(code, kind):
    """The names that a cell reads (ast.Load) or defines (ast.Store), also those of functions, arguments and imports."""
    nodes = list(ast.walk(ast.parse(code)))
    found = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, kind)}
    if kind is ast.Store:
        found |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        found |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        found |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_second_sitting_reads_no_name_of_the_first(folder):
    of_extension = {"check", "predict", "hint", "solution", "show", "last_records", *names_for_functions()}
    defined = set(dir(builtins)) | of_extension
    for cell in second_half(notebook(folder))[1:]:
        if cell.cell_type == "code":
            defined |= names_in(cell.source, ast.Store)
            assert names_in(cell.source, ast.Load) <= defined, cell.source


def test_a_lesson_of_two_hours_has_two_sittings_that_add_up():
    for number in lessons(LESSONS):
        lesson = load_lesson(number, LESSONS)
        said = f"{lesson.minutes} minutes, in two sittings of (\\d+) and (\\d+) minutes"
        found = re.search(said, (lesson.folder / "lesson.py").read_text())
        assert (found is not None) == (lesson.folder.name in FOLDERS) == (lesson.minutes > MOST_IN_ONE_SITTING), number
        if found:
            assert sum(map(int, found.groups())) == lesson.minutes
            headings = [cell.source.splitlines()[0] for cell in notebook(lesson.folder.name).cells]
            assert headings.count("# The end of sitting one") == 1
            assert sum(line.startswith(SECOND) for line in headings) == 1


def test_the_second_sitting_takes_what_was_saved_and_passed(tmp_path, monkeypatch, capsys):
    (tmp_path / MARKER).touch()
    folder = tmp_path / "03_data_parallel"
    folder.mkdir()
    saved = ["%load_ext distlab.course.notebook", OWN, "def fill_buckets(sizes_bytes, bucket_bytes):\n    1/0"]
    cells = [nbformat.v4.new_code_cell(text) for text in saved]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "03_data_parallel.ipynb")
    change_entry("03.average", lambda entry: replace(entry, attempts=1, first_passed=now()), folder)
    change_entry("03.buckets", lambda entry: replace(entry, attempts=1, failed=1), folder)
    _, bring = [cell for cell in second_half(notebook()) if cell.cell_type == "code"][:2]
    monkeypatch.chdir(folder)
    exec(bring.source, names := names_for_functions())
    assert "from your notebook: 03.average\n" in capsys.readouterr().out
    assert names["average_gradients"].__doc__ == "Mine."
    assert names["fill_buckets"]([4, 4], 4) == [[1], [0]]
