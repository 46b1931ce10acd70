"""A plan, mesh, schedule, trace, memory or step shows its own picture with text and alt text, and never less than text.

The last test runs a real kernel, as a notebook does.
"""

import base64
import io
import subprocess
import sys

import pytest
from PIL import Image
from viz_traces import data_parallel

import simulator.viz  # noqa: F401  (the import gives the classes their pictures)
from distlab.plan import Mesh, Plan, one_f_one_b, parse_schedule
from distlab.trace import Trace
from simulator import cluster, memory_of, model_by_name, simulate


def shown(item):
    data, metadata = item._repr_mimebundle_(include=None, exclude=None)
    picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
    return data["text/plain"], metadata["image/png"]["alt"], picture


def small_step():
    return simulate(model_by_name("gpt-2-1.5b"), cluster("dgx-h100", 8), Plan(data=8))


@pytest.mark.parametrize(
    ("make", "alt", "text"),
    [
        (lambda: Mesh([("data", 2), ("tensor", 4)]), "8 ranks = data (2) x tensor (4)", "tensor: 2 groups of 4"),
        (lambda: one_f_one_b(4, 8), "leaves 27.3 % of 4 ranks' time idle", "(1 ms per F, I and W) on 4 ranks"),
        (lambda: data_parallel(2), "Compute fills", "Timeline of 2 ranks"),
        (lambda: memory_of(model_by_name("gpt-2-1.5b"), Plan(data=2)), "A rank peaks at", "Memory: Each rank peaks"),
        (lambda: Plan(data=2, pipeline=4, num_microbatches=8), "data (2)", "on 4 ranks and 8 micro-batches"),
        (small_step, "of the peak is used", "Memory of the fullest rank"),
    ],
)
def test_an_object_is_a_picture_and_a_text(make, alt, text):
    said, title, picture = shown(make())
    assert alt in title
    assert text in said
    assert picture.width == 1280


def test_a_plan_shows_its_schedule_under_its_mesh():
    plain, piped = shown(Plan(data=4)), shown(Plan(data=4, pipeline=2, num_microbatches=4))
    assert piped[2].height > plain[2].height + 100
    assert "idle" in piped[1]
    assert "idle" not in plain[1]


@pytest.mark.parametrize(
    "item", [Mesh([("data", 1024)]), Trace.from_spans([]), parse_schedule("0F0,1B0,0B0\n1F0"), Plan(data=1024)]
)
def test_what_cannot_be_drawn_shows_its_own_text(item):
    data, metadata = item._repr_mimebundle_()
    assert data == {"text/plain": repr(item)}
    assert metadata == {}


def test_a_kernel_shows_the_picture_with_its_alt_text_and_terminal_text_stays():
    pytest.importorskip("ipykernel", reason="a kernel needs the notebooks extra")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [
        "from distlab.plan import Mesh, one_f_one_b\nimport simulator.viz",
        "Mesh([('data', 4)])",
        "one_f_one_b(2, 4)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    for cell, alt in zip(notebook.cells[1:], ("4 ranks = data (4)", "idle"), strict=True):
        (output,) = cell.outputs
        assert output.data["image/png"]
        assert alt in output.metadata["image/png"]["alt"]
        assert output.data["text/plain"]


def test_plans_alone_load_no_picture_and_know_none():
    code = "import sys; from distlab.plan import Mesh; "
    code += "sys.exit('matplotlib' in sys.modules or hasattr(Mesh, '_repr_mimebundle_'))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
