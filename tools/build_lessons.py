"""Build the notebooks of the lessons from their sources.

    python tools/build_lessons.py                  every lesson, START and GUIDES
    python tools/build_lessons.py 03 --execute     one lesson; run it too, and keep what its cells show
    python tools/build_lessons.py --check          change nothing; name each cell that differs from its source

lesson.ipynb is committed as it ran once, solution.ipynb without outputs. Outputs of cells that did not change are kept,
and so are those that a new run shows again with other numbers alone (times, mostly): history grows by what is new.
`--fresh` takes all of the new run: pass it where pictures look different now, since their words do not say so.
A picture whose measured times are more than 15 % off the predicted ones, or that says that the machine was not calm,
is no good example: the notebook runs again, three times at most, and then is not kept, unless `--far` is passed.
`--check` compares text, ids and metadata, not outputs, which hold times.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import lesson_gates
import nbformat
from lesson_notebook import KINDS, make_notebook, read_source
from nbformat import NotebookNode

from distlab.course.grading.progress import MARKER, OPEN, copy_in

ROOT = Path(__file__).resolve().parent.parent
LESSONS = ROOT / "lessons"
CELL_TIMEOUT_S = 120
_NUMBER = re.compile(r"\d[\d,.]*")
MOST_OFF, TRIES = 0.15, 3
_TIMES = re.compile(r"(predicted|measured) ([\d.,]+) (s|ms|us)\b")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("lessons", nargs="*", metavar="NN", help="a lesson's number, START or GUIDES; default: all")
    parser.add_argument("--check", action="store_true", help="name the cells that differ from their source; exit 1")
    parser.add_argument("--execute", action="store_true", help="run the notebooks and keep what their cells show")
    parser.add_argument("--fresh", action="store_true", help="with --execute: keep no output of an earlier run")
    parser.add_argument("--far", action="store_true", help="with --execute: keep measured times far off predicted ones")
    parser.add_argument("--folder", type=Path, default=LESSONS, help="where the lessons are")
    arguments = parser.parse_args(argv)
    wrong = 0
    try:
        for path in sources(arguments.folder.resolve(), arguments.lessons):
            wrong += _one(path, arguments)
    except ValueError as error:
        print(f"build_lessons: {error}", file=sys.stderr)
        return 2
    return 1 if wrong else 0


def sources(folder: Path, wanted: list[str]) -> list[Path]:
    """Return the sources to build: those named, or all.

    Raises:
        ValueError: there is none of that name.
    """
    found = {path.parent.name.partition("_")[0]: path for path in sorted(folder.glob("[0-9][0-9]_*/lesson.py"))}
    found |= {name: path for name in ("START", "GUIDES") if (path := folder / f"{name}.py").is_file()}
    names = [f"{int(name):02}" if name.isdigit() else name for name in wanted]
    for name in names:
        if name not in found:
            raise ValueError(f"there is no lesson {name!r} in {folder}; there are {', '.join(found) or 'none'}")
    return [found[name] for name in names or found]


def notebooks(path: Path) -> Iterator[tuple[Path, NotebookNode]]:
    """Yield the path and the content of each notebook that a source makes."""
    source = read_source(path)
    if path.name != "lesson.py":
        yield path.with_suffix(".ipynb"), make_notebook(source, "lesson")
        return
    for kind in KINDS:
        yield path.parent / f"{kind}.ipynb", make_notebook(source, kind)


def drift(made: NotebookNode, path: Path) -> list[str]:
    """Return what differs between a notebook and what its source makes, a line for each cell."""
    if not path.is_file():
        return [f"{path.name} is missing; run python tools/build_lessons.py"]
    kept = nbformat.read(path, as_version=4)
    lines = [] if kept.metadata == made.metadata else ["the notebook's metadata differ"]
    there = {cell.get("id", f"no id {i}"): cell for i, cell in enumerate(kept.cells)}
    for number, cell in enumerate(made.cells, 1):
        old = there.pop(cell["id"], None)
        name = f"cell {number} ({lesson_gates.first_line(cell)})"
        if old is None:
            lines.append(f"{name} is new or has changed")
        elif (old.source, old.cell_type) != (cell.source, cell.cell_type):
            lines.append(f"{name} has a different text than its source")
        elif _metadata(old) != _metadata(cell):
            lines.append(f"{name} has other metadata: {_metadata(old)}, its source {_metadata(cell)}")
    lines += [f"a cell is no longer in the source ({lesson_gates.first_line(cell)})" for cell in there.values()]
    if not lines and [cell["id"] for cell in kept.cells] != [cell["id"] for cell in made.cells]:
        lines.append("the cells stand in a different order")
    return lines


def _metadata(cell: NotebookNode) -> dict[str, object]:
    return {name: value for name, value in cell.metadata.items() if name != "execution"}


def keep_outputs(made: NotebookNode, path: Path) -> None:
    """Take over the outputs of cells that are the same as in the notebook on disk, and now say nothing new."""
    if not path.is_file():
        return
    try:
        there = {cell.get("id"): cell for cell in nbformat.read(path, as_version=4).cells}
    except Exception:  # whatever stood there is no notebook, and is replaced
        return
    for cell in made.cells:
        old = there.get(cell["id"])
        same = cell.cell_type == "code" and old is not None and old.source == cell.source
        keeps = old is not None and same and (cell.execution_count is None or _words(cell) == _words(old))
        if keeps and not (cell.execution_count and far_off([old])):
            cell["outputs"] = old.outputs
            cell["execution_count"] = cell.execution_count or old.execution_count


def far_off(cells: list[NotebookNode]) -> list[str]:
    """Return a line for each picture whose measured times are far off the predicted ones, or of a busy machine."""
    lines = []
    for number, cell in enumerate(cells, 1):
        for words in (one.data["text/plain"] for one in cell.get("outputs", ()) if "image/png" in one.get("data", {})):
            offs = [float(percent) / 100 for percent in re.findall(r"an error of [-+]([\d.]+) %", words)]
            for part in re.split(r"; |\. |\n", words.lower()):
                found = {which: float(time.replace(",", "")) * _SECONDS[s] for which, time, s in _TIMES.findall(part)}
                offs += [abs(found["predicted"] / found["measured"] - 1)] if len(found) == 2 else []
            if max([0, *offs]) > MOST_OFF or "not calm" in words:
                lines.append(f"cell {number}: measured and predicted differ by {max([0, *offs]):.0%}: {words[:70]}")
    return lines


def _words(cell: NotebookNode) -> list[str]:
    """Return what a cell shows, without its numbers: of a picture its words."""
    shown = ([output.get("text"), output.get("evalue"), output.get("data")] for output in cell.outputs)
    texts = (
        "".join(text.get("text/plain") or text.get("text/html", "")) if isinstance(text, dict) else text
        for output in shown
        for text in output
        if text is not None
    )
    return [_NUMBER.sub("#", text) for text in texts]


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run every cell in a kernel of its own, and keep what a reader without a kernel can see."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError

    lessons = folder if folder.name == LESSONS.name else folder.parent
    beside = lessons.parent / "work"
    beside.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=beside, prefix=".build-") as work:  # as if you had opened it
        (Path(work) / MARKER).write_text(OPEN)  # what a learner must predict first is shown
        copy_in(Path(work), folder.name).parent.mkdir()
        nbformat.write(notebook, copy_in(Path(work), folder.name))
        resources = {"metadata": {"path": work}}
        client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", allow_errors=True, resources=resources
        )
        try:
            client.execute()  # an error in a cell is shown in it, and a complaint of the gates
        except CellTimeoutError as error:
            raise ValueError(f"{folder.name}: {str(error).strip()}") from None
    tidy(notebook)


def tidy(notebook: NotebookNode) -> None:
    """Remove what only this run knows: the state of widgets, times of execution, this machine's folders."""
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell["outputs"] = [part for output in _joined(cell.outputs) for part in _pictures_once(output)]
        for output in cell.get("outputs", ()):
            for data in (output.get("data", {}), output):
                data.pop("application/vnd.jupyter.widget-view+json", None)
                for name in ("text", "text/plain", "text/html", "evalue", "traceback"):
                    if name in data:
                        data[name] = _without_folders(data[name])


def _pictures_once(output: NotebookNode) -> Iterator[NotebookNode]:
    """Yield an output as it is kept: a picture as its PNG alone, which its HTML holds too, and its words below it."""
    data = output.get("data", {})
    if "image/png" in data:
        data["image/png"] = _with_few_colours(data["image/png"])
        data.pop("text/html", None)
        words = f'<p class="said" style="white-space:pre-wrap">{html.escape(data["text/plain"])}</p>'
        yield output
        yield nbformat.v4.new_output("display_data", {"text/html": words})
    else:
        yield output


def _joined(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    """Join what was printed in several pieces, whose borders are a matter of chance."""
    last: NotebookNode | None = None
    for output in outputs:
        if last is not None and output.output_type == "stream" == last.output_type and output.name == last.name:
            last["text"] += output.text
            continue
        last = output
        yield output


def _without_folders(text: str | list[str]) -> str | list[str]:
    if isinstance(text, list):
        return [str(_without_folders(line)) for line in text]
    return re.sub(rf"{re.escape(sys.prefix)}/lib/python[\d.]+/(site-packages/)?", "", text).replace(f"{ROOT}/", "")


def _with_few_colours(png: str) -> str:
    """Store a picture in base64 with a palette of 64 colours: a quarter of the bytes, and no difference to see."""
    from PIL import Image

    out = io.BytesIO()
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.quantize(64, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def _one(path: Path, arguments: argparse.Namespace) -> int:
    """Build or check one lesson's notebooks; return how many complaints there are."""
    wrong, check, runs = 0, arguments.check, arguments.execute and not arguments.check
    for target, made in notebooks(path):
        start = time.monotonic()
        lines = drift(made, target) if check else []
        shown, off = target.name != "solution.ipynb", list[str]()
        for _ in range(TRIES if shown and runs else 0):
            execute(made, target.parent)
            if not arguments.fresh:
                keep_outputs(made, target)
            if not (off := [] if arguments.far else far_off(made.cells)):
                break
        if shown and not runs and not lines:
            keep_outputs(made, target)
        if not check and not off:
            nbformat.validate(made)
            write(made, target)
        lines += [*off, *lesson_gates.complaints(made)]
        name = target.relative_to(path.parents[1] if path.name == "lesson.py" else path.parent)
        did = "not kept" if off else "written"
        if check:
            did = "differs from its source" if lines else "is as its source"
        print(
            f"{name} {did} ({time.monotonic() - start:.1f} s)", *(f"  {line}" for line in lines), sep="\n", flush=True
        )
        wrong += len(lines)
    return wrong


def write(notebook: NotebookNode, path: Path) -> None:
    """Put the notebook in place all at once, so that nobody reads half of it."""
    part = path.with_suffix(".part")
    part.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
