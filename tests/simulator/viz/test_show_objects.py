"""A plan, mesh, schedule, trace, memory or step shows its own picture with text and alt text, at least its text."""

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


def test_an_object_is_a_picture_and_a_text():
    gpt = model_by_name("gpt-2-1.5b")
    step = simulate(gpt, cluster("dgx-h100", 8), Plan(data=8))
    heights = {}
    for item, alt, text in (
        (Mesh([("data", 2), ("tensor", 4)]), "8 ranks = data (2) x tensor (4)", "tensor: 2 groups of 4"),
        (one_f_one_b(4, 8), "leaves 27.3 % of 4 ranks' time idle", "(1 ms per F, I and W) on 4 ranks"),
        (data_parallel(2), "Compute fills", "Timeline of 2 ranks"),
        (memory_of(gpt, Plan(data=2)), "A rank peaks at", "Memory: Each rank peaks"),
        (Plan(data=4), "4 ranks = data (4)", "data: 1 group of 4"),
        (Plan(data=2, pipeline=4, num_microbatches=8), "idle", "on 4 ranks and 8 micro-batches"),
        (step, "of the peak is used", "Memory of the fullest rank"),
    ):
        data, metadata = item._repr_mimebundle_(include=None, exclude=None)
        picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
        assert alt in metadata["image/png"]["alt"]
        assert text in data["text/plain"]
        assert picture.width == 1280
        heights[text] = picture.height
    assert heights["on 4 ranks and 8 micro-batches"] > heights["data: 1 group of 4"] + 100, "a schedule under the mesh"


def test_what_cannot_be_drawn_shows_its_own_text():
    for item in (Mesh([("data", 1024)]), Trace.from_spans([]), parse_schedule("0F0,1B0,0B0\n1F0"), Plan(data=1024)):
        assert item._repr_mimebundle_() == ({"text/plain": repr(item)}, {})


def test_a_kernel_shows_the_picture_with_its_alt_text_and_terminal_text_stays():
    pytest.importorskip("ipykernel", reason="a kernel needs the notebooks extra")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = ["from distlab.plan import Mesh\nimport simulator.viz", "Mesh([('data', 4)])"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    (output,) = notebook.cells[1].outputs
    assert output.data["image/png"]
    assert "4 ranks = data (4)" in output.metadata["image/png"]["alt"]
    assert output.data["text/plain"]


def test_plans_alone_load_no_picture_and_pictures_neither_widgets_nor_pyplot_nor_torch():
    plans = "import sys; from distlab.plan import Mesh; "
    plans += "sys.exit('matplotlib' in sys.modules or hasattr(Mesh, '_repr_mimebundle_'))"
    pictures = "import sys; sys.modules['ipywidgets'] = None; sys.modules['IPython'] = None; import simulator.viz; "
    pictures += "sys.exit(bool({'torch', 'matplotlib.pyplot', 'anywidget'} & set(sys.modules)))"
    for code in (plans, pictures):
        assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
