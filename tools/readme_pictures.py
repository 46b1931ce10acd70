"""Make the README's pictures: a training step that moves, a check that explains a hang, a widget of a lesson.

`python tools/readme_pictures.py` writes `step.gif`, `hang.png` and `widget.png` in `assets`. The first two show what
really ran: four ranks train the small GPT with bucketed, overlapped all-reduces; a wrong answer is checked. The others
need Chromium (`make browser`). Run it with nothing else running: the moving picture shows measured times. With `widget`
as its argument it makes that one alone.
"""

from __future__ import annotations

import html
import inspect
import io
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from playwright.sync_api import sync_playwright

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Ranks
from distlab.course.grading import load_lesson
from distlab.course.grading.check import examine
from distlab.data_parallel import DataParallel, train_step
from distlab.trace import SpanWriter, Trace
from simulator.viz import draw_train_step, step_of, to_png

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "browser"))
from browser_lab import CHROMIUM_FLAGS, find_chromium, open_notebook, serve, write_notebook  # noqa: E402

ASSETS = ROOT / "assets"
CONFIG = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128)
BUCKET_BYTES = 700_000
TITLE = "One training step of four real ranks: how four gradients become one mean"
STYLE = """main { font: 15px system-ui, sans-serif; padding: 8px; background: white; color: #111 }
pre { font: 14px monospace; background: #f5f5f5; padding: 10px; margin: 0 0 10px }"""
WIDGET = """from simulator.viz import schedule_panel
schedule_panel("zb_h1", "one_f_one_b", ranks=4, microbatches=6)"""
SHARP = "() => document.querySelector('.distlab-timeline canvas')?.dataset.sharp === 'true'"
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


def picture_of_a_hang() -> bytes:
    """Return a PNG of the wrong answer and of what the check says to it, as a notebook shows them."""
    report = examine(load_lesson("01").exercise("01.shift"), shift)
    source = "\n".join(line for line in inspect.getsource(shift).splitlines() if '"""' not in line)
    code = f"<pre>{html.escape(source)}\n\n\ncheck(&quot;01.shift&quot;, shift)</pre>"
    answer = report._repr_mimebundle_()["text/html"]
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=list(CHROMIUM_FLAGS))
        page = browser.new_page(viewport={"width": WIDTH_PX, "height": 400}, device_scale_factor=1.5)
        page.set_content(f"<style>{STYLE}</style><main>{code}{answer}</main>")
        png = page.locator("main").screenshot()
        browser.close()
    return png


def picture_of_a_widget() -> bytes:
    """Return a PNG of a lesson's widget as a notebook shows it: two schedules, and the controls that change them."""
    with tempfile.TemporaryDirectory() as work, serve(Path(work)) as (base, token):
        write_notebook(Path(work) / "widget.ipynb", [WIDGET])
        with open_notebook(f"{base}/lab/tree/widget.ipynb?token={token}&reset", base) as notebook:
            notebook.run_all()
            notebook.page.wait_for_function(SHARP)
            return notebook.page.locator(".jp-OutputArea-output:has(.distlab-timeline)").screenshot()


def main() -> int:
    """Write all pictures; fail where the moving one is too large for a README."""
    (ASSETS / "widget.png").write_bytes(picture_of_a_widget())
    if sys.argv[1:] == ["widget"]:
        return 0
    gif = moving_picture(measured_step())
    (ASSETS / "step.gif").write_bytes(gif)
    (ASSETS / "hang.png").write_bytes(picture_of_a_hang())
    print(f"assets/step.gif: {len(gif) / 1e6:.2f} MB of at most {MOST_BYTES / 1e6:g}; assets/hang.png")
    return int(len(gif) > MOST_BYTES)


if __name__ == "__main__":
    sys.exit(main())
