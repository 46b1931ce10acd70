"""What the builder makes of a lesson's source, and what it refuses."""

import json
import re

import pytest


def built(build, folder, kind="lesson"):
    assert build.main(["90", "--folder", str(folder)]) == 0
    return build.nbformat.read(folder / "90_tiny" / f"{kind}.ipynb", as_version=4)


def cell_of(notebook, role, name):
    return next(cell for cell in notebook.cells if cell.metadata.get("distlab", {}).get(role) == name)


def change(folder, old, new, file="lesson.py"):
    path = folder / "90_tiny" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_stub_has_the_docstring_and_no_body(build, tiny):
    assert cell_of(built(build, tiny), "exercise", "90.total").source == (
        "# Exercise 90.total: about 2 minutes, difficulty 1 of 3\n"
        "import torch\nimport torch.distributed as dist\n\n\n"
        "def total(tensor: torch.Tensor) -> torch.Tensor:\n"
        '    """Return the sum of every rank\'s tensor, on every rank.\n\n'
        "    Args:\n"
        "        tensor: this rank's own.\n"
        '    """\n'
        '    raise NotYet("90.total")'
    )


def test_a_wrong_version_keeps_its_fault_and_loses_its_name_and_docstring(build, tiny):
    source = cell_of(built(build, tiny), "exercise", "90.mean").source
    assert "def mean(tensor" in source
    assert "return answer / 2" in source
    assert "Return the mean of every rank" in source
    assert "mean_of_two" not in source
    assert "whatever the number" not in source


def test_the_solution_is_the_functions_own_text(build, tiny):
    solution = built(build, tiny, "solution")
    text = (tiny / "90_tiny" / "solutions.py").read_text()
    for name in ("90.total", "90.mean"):
        function = cell_of(solution, "exercise", name).source.partition("\n\n\n")[2]
        assert function in text
        assert "raise NotYet" not in function
    assert text.count("def ") == 2


def test_hints_are_folded_and_the_check_hands_on_a_function(build, tiny):
    notebook = built(build, tiny)
    hints = cell_of(notebook, "hints", "90.total").source
    assert hints.count("<details>") == hints.count("</details>") == 3
    assert "Copy, all-reduce the copy, return it." in hints
    assert cell_of(notebook, "check", "90.total").source == 'total = check("90.total", total).function'
    kinds = [next(iter(cell.metadata.get("distlab", {"text": 0}))) for cell in notebook.cells]
    at = kinds.index("exercise")
    assert kinds[at : at + 3] == ["exercise", "hints", "check"]


def test_no_solution_reaches_the_lesson(build, tiny):
    built(build, tiny)
    text = (tiny / "90_tiny" / "lesson.ipynb").read_text()
    assert "get_world_size" not in text
    assert "Copy of" not in text
    assert "the sum is made in place" not in text


def test_the_notebook_knows_about_its_lesson(build, tiny):
    facts = built(build, tiny).metadata.distlab
    assert facts.title == "A tiny lesson"
    assert (facts.minutes, facts.exercises, facts.kind) == (5, ["90.total", "90.mean"], "lesson")


def test_magics_and_tags_arrive(build, tiny):
    notebook = built(build, tiny)
    sources = [cell.source for cell in notebook.cells]
    assert "%load_ext distlab.course.notebook" in sources
    assert any(source.startswith("%%ranks 2\nx = torch.full") for source in sources)
    assert [cell.metadata.tags for cell in notebook.cells if "tags" in cell.metadata] == [["nbval-check-output"]]


def test_building_twice_gives_the_same_file(build, tiny):
    built(build, tiny)
    path = tiny / "90_tiny" / "lesson.ipynb"
    first = path.read_bytes()
    built(build, tiny)
    assert path.read_bytes() == first
    ids = [cell["id"] for cell in json.loads(first)["cells"]]
    assert len(set(ids)) == len(ids)


def test_an_id_stays_when_other_cells_change(build, tiny):
    before = {cell["id"]: cell.source for cell in built(build, tiny).cells}
    change(tiny, "Five minutes.", "Ten minutes.")
    after = {cell["id"]: cell.source for cell in built(build, tiny).cells}
    assert len(before.keys() - after.keys()) == 1


def test_outputs_of_unchanged_cells_are_kept(build, tiny):
    notebook = built(build, tiny)
    path = tiny / "90_tiny" / "lesson.ipynb"
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [build.nbformat.v4.new_output("stream", text="kept")]
    path.write_text(build.nbformat.writes(notebook))
    change(tiny, "print(x.tolist())", "print(x)")
    outputs = [len(cell.outputs) for cell in built(build, tiny).cells if cell.cell_type == "code"]
    assert outputs.count(0) == 1


def tamper(notebook, what):
    cell = notebook.cells[3]
    if what == "text":
        cell.source += "\n# edited by hand"
    elif what == "metadata":
        cell.metadata["tags"] = ["x"]
    elif what == "id":
        cell["id"] = "0123"
    elif what == "gone":
        del notebook.cells[3]
    elif what == "order":
        notebook.cells[3], notebook.cells[4] = notebook.cells[4], notebook.cells[3]
    elif what == "title":
        notebook.metadata["distlab"]["title"] = "Another"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("text", "cell 4 ('%%ranks 2') has a different text than its source"),
        ("metadata", "cell 4 ('%%ranks 2') has other metadata"),
        ("id", "cell 4 ('%%ranks 2') is new or has changed"),
        ("gone", "cell 4 ('%%ranks 2') is new or has changed"),
        ("order", "the cells stand in a different order"),
        ("title", "the notebook's metadata differ"),
    ],
)
def test_drift_is_named(build, tiny, capsys, what, says):
    notebook = built(build, tiny)
    path = tiny / "90_tiny" / "lesson.ipynb"
    tamper(notebook, what)
    path.write_text(build.nbformat.writes(notebook))
    before = path.read_bytes()
    capsys.readouterr()
    assert build.main(["90", "--check", "--folder", str(tiny)]) == 1
    printed = capsys.readouterr().out
    assert says in printed
    assert "solution.ipynb is as its source" in printed
    assert path.read_bytes() == before, "--check changes nothing"


def test_drift_of_a_function_is_named(build, tiny, capsys):
    built(build, tiny)
    change(tiny, "dist.get_world_size()", "float(dist.get_world_size())", "solutions.py")
    assert build.main(["90", "--check", "--folder", str(tiny)]) == 1
    assert "solution.ipynb differs from its source" in capsys.readouterr().out


def test_outputs_alone_are_no_drift(build, tiny):
    notebook = built(build, tiny)
    path = tiny / "90_tiny" / "lesson.ipynb"
    notebook.cells[3].outputs = [build.nbformat.v4.new_output("stream", text="12.3 ms")]
    path.write_text(build.nbformat.writes(notebook))
    assert build.main(["90", "--check", "--folder", str(tiny)]) == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('exercise="90.total"', 'exercise="90.other"', "exercise '90.other' is not in exercises.py"),
        ('exercise="90.total"', 'exercise="90.mean"', "exercise '90.mean' is there 2 times"),
        ('# %% exercise="90.mean"', "# %%\n1", "no cell for 90.mean"),
    ],
)
def test_a_source_that_cannot_be_built(build, tiny, capsys, old, new, says):
    change(tiny, old, new)
    assert build.main(["90", "--folder", str(tiny)]) == 2
    assert says in capsys.readouterr().err


def test_a_function_that_is_not_there(build, tiny, capsys):
    change(tiny, '"solutions:mean"', '"solutions:nothing"', "exercises.py")
    assert build.main(["90", "--folder", str(tiny)]) == 2
    assert "has no module-level function 'nothing'" in capsys.readouterr().err
    assert build.main(["17", "--folder", str(tiny)]) == 2
    assert "there is no lesson '17'" in capsys.readouterr().err


BAD_CELLS = {
    "16 lines; at most 15": "\n".join(f"x{i} = {i}" for i in range(16)),
    "installs (pip install)": "import os\nos.system('pip install torch')",
    "runs a shell command": "!ls",
    "downloads (urlopen)": "from urllib.request import urlopen",
    "does not parse": "if x",
    "the code cell after it must set its .value or .view": "panel = ring_panel(records)",
    "uses shutil, which cell 6 imports": "def size():\n    return shutil.disk_usage('.')\n\n\n# %%\nimport shutil",
}


@pytest.mark.parametrize("says", BAD_CELLS)
def test_a_cell_that_breaks_a_rule_is_named(build, tiny, capsys, says):
    text = re.sub("^([!%])", r"# \1", BAD_CELLS[says], flags=re.MULTILINE)
    change(tiny, "# %% [markdown]\n# A fact", f"# %%\n{text}\n\n# %% [markdown]\n# A fact")
    assert build.main(["90", "--folder", str(tiny)]) == 1
    assert says in capsys.readouterr().out


def test_a_widget_that_is_moved_breaks_no_rule(build, tiny):
    cells = '# %%\npanel = Panel(draw)\npanel\n\n# %%\npanel.controls["n"].value = 3\n\n# %% [markdown]\n# A fact'
    change(tiny, "# %% [markdown]\n# A fact", cells)
    assert build.main(["90", "--folder", str(tiny)]) == 0


@pytest.mark.parametrize("image", ["![](ring.png)", '<img src="ring.png">', '<img src="ring.png" alt="">'])
def test_an_image_needs_alt_text(build, tiny, capsys, image):
    change(tiny, "# A fact", f"# {image}\n#\n# A fact")
    assert build.main(["90", "--folder", str(tiny)]) == 1
    assert "an image without alt text" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_a_notebook_that_runs_keeps_what_a_reader_can_see(build, tiny, capsys):
    change(
        tiny,
        "# A fact",
        "# %%\npredict('How long?')\n\n# %%\nprint(check.__code__.co_filename)\n\n# %% [markdown]\n# A fact",
    )
    assert build.main(["90", "--execute", "--folder", str(tiny)]) == 0, capsys.readouterr().out
    notebook = build.nbformat.read(tiny / "90_tiny" / "lesson.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = json.dumps(outputs)
    assert "[rank 1] [2.0, 2.0, 2.0]" in text
    assert "Predict: How long?" in text
    assert "widget-view" not in text
    assert "distlab/course/grading/check.py" in text
    assert str(build.ROOT) not in text
    assert "not kept" not in text, "run in a folder of working copies"
    assert list((tiny.parent / "work").iterdir()) == []
    assert "Not yet attempted." in text
    solution = build.nbformat.read(tiny / "90_tiny" / "solution.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in solution.cells)


def test_a_run_keeps_what_differs_in_numbers_alone_and_a_picture_stands_once(build, tiny, tmp_path):
    new, png = (
        build.nbformat.v4,
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==",
    )
    picture = {"image/png": png, "text/html": f'<img src="data:image/png;base64,{png}">', "text/plain": "3 ms & more"}

    def ran(*texts):
        cells = [new.new_code_cell("show()", id=name, execution_count=1) for name in ("one", "two")]
        for cell, text in zip(cells, texts, strict=True):
            cell.outputs = [new.new_output("display_data", picture | {"text/plain": text})]
        notebook = new.new_notebook(cells=cells)
        build.tidy(notebook)
        return notebook

    first, again = ran("3 ms & more", "3 ms too long"), ran("4.5 ms & more", "3 ms too short")
    (shown, said) = first.cells[0].outputs
    assert set(shown.data) == {"image/png", "text/plain"}
    assert said.data == {"text/html": '<p class="said" style="white-space:pre-wrap">3 ms &amp; more</p>'}
    build.write(first, tmp_path / "lesson.ipynb")
    build.keep_outputs(again, tmp_path / "lesson.ipynb")
    assert [cell.outputs[0].data["text/plain"] for cell in again.cells] == ["3 ms & more", "3 ms too short"]


def test_an_error_in_a_cell_is_named(build, tiny, capsys):
    notebook = built(build, tiny)
    path = tiny / "90_tiny" / "lesson.ipynb"
    error = build.nbformat.v4.new_output("error", ename="ZeroDivisionError", evalue="division by zero", traceback=[])
    warning = build.nbformat.v4.new_output("stream", name="stderr", text="careful\n")
    picture = build.nbformat.v4.new_output("display_data", {"image/png": "", "text/plain": "<Figure size 640x480>"})
    notebook.cells[3].outputs = [error, warning, picture]
    path.write_text(build.nbformat.writes(notebook))
    assert build.main(["90", "--check", "--folder", str(tiny)]) == 1
    printed = capsys.readouterr().out
    assert "cell 4 ('%%ranks 2'): ended with ZeroDivisionError: division by zero" in printed
    assert "wrote to standard error: 'careful'" in printed
    assert "a picture without words" in printed
