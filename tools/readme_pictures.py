"""Make the README's pictures: a training step that moves, a check that explains a hang, a widget of a lesson.

`python tools/readme_pictures.py` writes `step.gif`, `hang.png` and `widget.png` in `assets`. The first two show what
really ran: four ranks train the small GPT with bucketed, overlapped all-reduces; a wrong answer is checked. The others
need Chromium (`make browser`), and with `notebooks` as its argument it makes these alone. Run it with nothing else
running: the moving picture shows measured times.
"""

from __future__ import annotations

import inspect
import io
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Ranks
from distlab.data_parallel import DataParallel, train_step
from distlab.trace import SpanWriter, Trace
from simulator.viz import draw_train_step, step_of, to_png

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "browser"))
from browser_lab import open_lab, write_notebook  # noqa: E402

ASSETS = ROOT / "assets"
CONFIG = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128)
BUCKET_BYTES = 700_000
TITLE = "One training step of four real ranks: how four gradients become one mean"
WIDGET = """from simulator.viz import schedule_panel
schedule_panel("zb_h1", "one_f_one_b", ranks=4, microbatches=6)"""
NUM_STEPS, NUM_FRAMES, FRAME_MS, LAST_MS = 12, 48, 110, 2_500
WIDTH_PX, NUM_COLOURS, MOST_BYTES = 960, 64, 2_000_000
"""Size of the moving picture: readable in a README's column, and quick to load."""


def shift(tensor: torch.Tensor) -> torch.Tensor:
    """Hand the tensor to the next rank, return the one that came from the rank before: with a mistake."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    dist.recv(received, (rank - 1) % world_size)
    dist.send(tensor, (rank + 1) % world_size)
    return received


def train() -> Trace:
    """Train a few steps on this rank; return what it marked."""
    corpus = ByteCorpus(python_documentation(), context=CONFIG.context)
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    replica = DataParallel(model, bucket_bytes=BUCKET_BYTES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spans = SpanWriter(dist.get_rank())
    for step in range(NUM_STEPS):
        batch = corpus.batch(step, 32, rank=dist.get_rank(), world_size=dist.get_world_size())
        train_step(model, optimizer, batch=batch, loss_fn=GPT.loss, synchronize=replica.synchronize, spans=spans)
    return spans.trace()


def measured_step() -> Trace:
    """Return the step of median length, of four ranks."""
    with Ranks(4) as ranks:
        marks = ranks.run(train)
        calls = ranks.records().to_trace()
    calls = calls.select(calls.is_word("lane", "communication"))
    both = Trace.concatenate([calls, *marks])
    steps = [step_of(both, number) for number in range(2, NUM_STEPS)]
    return sorted(steps, key=lambda step: step.duration_s)[len(steps) // 2]


def moving_picture(step: Trace) -> bytes:
    """Return a GIF that goes through the step from its first to its last moment."""
    frames = []
    for number in range(NUM_FRAMES + 1):
        png = to_png(draw_train_step(step, at_s=number / NUM_FRAMES * step.duration_s, title=TITLE).figure)
        frame = Image.open(io.BytesIO(png)).convert("RGB")
        height = round(frame.height * WIDTH_PX / frame.width)
        frames.append(frame.resize((WIDTH_PX, height), Image.Resampling.LANCZOS))
    colours = frames[len(frames) // 2].quantize(NUM_COLOURS)
    frames = [frame.quantize(palette=colours, dither=Image.Dither.NONE) for frame in frames]
    out = io.BytesIO()
    times = [FRAME_MS] * NUM_FRAMES + [LAST_MS]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)
    return out.getvalue()


def screenshot(part: str, *cells: str) -> bytes:
    """Return a PNG of a part of a notebook that has run some cells, as JupyterLab shows it."""
    with tempfile.TemporaryDirectory() as work:
        write_notebook(Path(work) / "picture.ipynb", ["%load_ext distlab.course.notebook", *cells])
        with open_lab(Path(work), "picture.ipynb") as notebook:
            notebook.run_all()
            notebook.page.wait_for_timeout(2000)  # a timeline is drawn sharp when nothing has moved for a moment
            return notebook.page.locator(part).last.screenshot()


def main() -> int:
    """Write all pictures; fail where the moving one is too large for a README."""
    wrong = "\n".join(line for line in inspect.getsource(shift).splitlines() if '"""' not in line)
    hang = screenshot(".jp-CodeCell", f"{wrong}\n\n\ncheck('01.shift', shift);")
    (ASSETS / "hang.png").write_bytes(hang)
    (ASSETS / "widget.png").write_bytes(screenshot(".jp-OutputArea-output:has(.distlab-timeline)", WIDGET))
    if sys.argv[1:] == ["notebooks"]:
        return 0
    gif = moving_picture(measured_step())
    (ASSETS / "step.gif").write_bytes(gif)
    print(f"assets/step.gif: {len(gif) / 1e6:.2f} MB of at most {MOST_BYTES / 1e6:g}")
    return int(len(gif) > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
