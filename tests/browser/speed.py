"""How long a reader waits: from a key press, or from an assignment in the kernel, to the painted frame that shows it.

The clock starts at the browser's time stamp of the key press (or in the kernel, right before the assignment) and stops
in the first task after the frame that shows the new view at full sharpness: boxes, or pixel columns made for that view,
not the old ones stretched. So a key press on 31,000 boxes includes the way to the kernel and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from browser_lab import Notebook

SETUP = """
import ipywidgets
import numpy as np
from distlab.trace import Trace
from simulator.viz import Panel, Timeline, draw_timeline

def pipeline(num_ranks, num_microbatches):
    rank, index = np.divmod(np.arange(num_ranks * 2 * num_microbatches), 2 * num_microbatches)
    start = (index // 2 * 30 + index % 2 * 10 + rank * 10) * 1_000_000
    kind = np.array(["F", "B"])[index % 2]
    end = start + np.where(index % 2, 20, 10) * 1_000_000
    return Trace.from_columns(rank=rank, lane="compute", name=kind.tolist(), kind=kind.tolist(), start_ns=start,
                              end_ns=end, stage=rank, microbatch=index // 2)

def draw(ranks, microbatches):
    trace = pipeline(ranks, microbatches)
    return draw_timeline(trace)
"""
CELLS = [
    SETUP,
    "ranks, microbatches = ipywidgets.IntSlider(4, min=1, max=8), ipywidgets.IntSlider(6, min=2, max=9)\n"
    "panel = Panel(draw, ranks=ranks, microbatches=microbatches); panel",
    "some = Timeline(pipeline(16, 63)); some",
    "many = Timeline(pipeline(64, 243)); many",
]
SCHEDULES = [
    "from simulator.viz import schedule_panel\nsmall = schedule_panel(ranks=16, microbatches=63); small",
    "large = schedule_panel(ranks=64, microbatches=1023); large",
]
DEGREES = [
    "from distlab.plan import Plan\nfrom simulator import cluster, model_by_name\n"
    "from simulator.viz import degrees_panel\n"
    "plan = Plan(data=8, tensor=8, sequence_parallel=True, recompute='selective')\n"
    "degrees = degrees_panel(model_by_name('llama-2-7b'), cluster('dgx-h100', 64), plan=plan); degrees"
]
RECORDER = Path(__file__).with_name("speed.js").read_text("utf-8")


class Speed(NamedTuple):
    """What was done, the waits in seconds, and the bar."""

    claim: str
    waits_s: list[float]
    bar_s: float


def slowdown(notebook: Notebook) -> float:
    """Return how many times longer work takes in the kernel than its processor time: 1 on an idle machine."""
    work = "begin, used = time.perf_counter(), time.process_time()\nwhile time.process_time() < used + 0.3: pass\n"
    return float(notebook.execute(f"import time\n{work}print((time.perf_counter() - begin) / 0.3)"))


def measure(notebook: Notebook, repeats: int) -> Iterator[Speed]:
    """Measure the panel and both timelines of a notebook that has run CELLS."""
    page = notebook.page
    page.evaluate(RECORDER)
    image, slider = page.locator(".distlab-picture img").first, page.locator(".noUi-handle").nth(1)
    keys = ["ArrowRight", "ArrowRight", "ArrowLeft", "ArrowLeft"]
    waits = [pressed(notebook, slider, image, keys[index % 4]) for index in range(repeats + 1)]
    yield Speed("a key on a slider to the Panel's new picture", waits[1:], 0.1)
    for place, (name, count, bar_s) in enumerate((("some", "2,016", 0.05), ("many", "31,104", 0.15))):
        canvas = page.locator(".distlab-timeline canvas").nth(place)
        waits = timed(repeats, lambda index, seen=canvas: pressed(notebook, seen, seen, "+-"[index % 2]))
        yield Speed(f"a key to the frame, {count} boxes", waits, bar_s)
        codes = [f"{name}.view = (0.0, {part} * {name}.limit_s)" for part in (0.9, 1.0)]
        waits = timed(repeats, lambda index, seen=canvas, codes=codes: assigned(notebook, seen, codes[index % 2]))
        yield Speed(f"an assignment of view to the frame, {count} boxes", waits, bar_s)


def measure_schedules(notebook: Notebook, repeats: int) -> Iterator[Speed]:
    """Measure the two panels of SCHEDULES: a key on the slider of micro-batches, to the frame with the new schedule."""
    notebook.page.evaluate(RECORDER)
    for place, (count, bar_s) in enumerate((("2,016", 0.05), ("131,072", 0.15))):
        panel = notebook.page.locator(".widget-vbox", has=notebook.page.locator(".distlab-timeline")).nth(place)
        yield Speed(
            f"a key on a slider to another schedule, {count} boxes",
            on_slider(notebook, repeats, panel, "micro-batches", ".distlab-timeline canvas", "ArrowRight", "ArrowLeft"),
            bar_s,
        )


def measure_degrees(notebook: Notebook, repeats: int) -> Iterator[Speed]:
    """Measure the panel of DEGREES, the notebook's last picture: a key on a degree's slider, to the new picture."""
    notebook.page.evaluate(RECORDER)
    panel = notebook.page.locator(".widget-vbox", has=notebook.page.locator(".distlab-picture")).last
    waits = on_slider(notebook, repeats, panel, "tensor", ".distlab-picture img", "ArrowLeft", "ArrowRight")
    yield Speed("a key on a slider of degrees to the panel's new picture", waits, 0.1)


def on_slider(notebook: Notebook, repeats: int, panel: Any, name: str, seen: str, *keys: str) -> list[float]:
    """Return the waits for what a panel shows, after two keys in turn on one of its sliders."""
    slider, shown = slider_of(panel, name), panel.locator(seen)
    return timed(repeats, lambda index: pressed(notebook, slider, shown, keys[index % 2]))


def slider_of(panel: Any, description: str) -> Any:
    """Return the handle of a panel's slider."""
    return panel.locator(".widget-hslider", has_text=description).locator(".noUi-handle")


def pressed(notebook: Notebook, focused: Any, seen: Any, key: str) -> float:
    """Press a key where it is heard, and return the seconds until what is seen has its new frame painted."""
    focused.scroll_into_view_if_needed()
    focused.focus()
    notebook.page.evaluate("(seen) => window.watch(seen)", seen.element_handle())
    notebook.page.keyboard.press(key)
    return float(notebook.page.evaluate("async () => (await window.painted) - window.pressedAt")) / 1000


def assigned(notebook: Notebook, canvas: Any, code: str) -> float:
    """Run an assignment in the kernel and return the seconds until its frame is painted."""
    notebook.page.evaluate("(seen) => window.watch(seen)", canvas.element_handle())
    start_s = float(notebook.execute(f"import time; print(time.time()); {code}"))
    return float(notebook.page.evaluate("async () => await window.painted")) / 1000 - start_s


def timed(repeats: int, once: Callable[[int], float]) -> list[float]:
    """Measure an even number of times after two that warm up."""
    return [once(index) for index in range(2 + repeats + repeats % 2)][2:]
