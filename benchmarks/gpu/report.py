"""GPU.md: the machine, a row for each claim, what was not run and why, and every traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.job import PARTS
from gpu.results import Results, code_digest

FILE = "GPU.md"
PICTURE = "ratios.png"
HOLDS = {True: "yes", False: "**no**", None: "-"}


def write_report(results: Results) -> Path:
    """Write GPU.md and its picture into the folder of the results."""
    path = results.folder / FILE
    _draw_ratios(results)
    path.write_text("\n".join(_lines(results)) + "\n", encoding="utf-8")
    return path


def _ratios(results: Results) -> dict[str, float]:
    """Return the first ratio of times of each part: the row of its claim."""
    found: dict[str, float] = {}
    for part, row in results.rows():
        is_claim = " against " in row["claim"] and "predicted" not in row["claim"]
        if row["ratio"] is not None and row["unit"] == "s" and is_claim:
            found.setdefault(part, row["ratio"])
    return found


def _draw_ratios(results: Results) -> None:
    from simulator.viz import draw_bars  # here: it loads matplotlib

    (results.folder / PICTURE).unlink(missing_ok=True)
    if ratios := _ratios(results):
        device = str(results.key["device"])
        title = "Our time over the peer's: below 1 we are faster"
        draw_bars(ratios, unit="x", title=title, subtitle=device).figure.savefig(results.folder / PICTURE, dpi=150)


def headline(results: Results) -> str:
    """Say in one line how many bars hold and how many parts ended well."""
    judged = [row for _, row in results.rows() if row["holds"] is not None]
    done = sum(entry["status"] == "done" for entry in results.parts.values())
    small = " Small runs on the CPU: they show that the parts work." if results.key["device"] == "cpu" else ""
    return (
        f"{sum(row['holds'] for row in judged)} of {len(judged)} bars hold; {done} of {len(PARTS)} parts done.{small}"
    )


def _lines(results: Results) -> Iterator[str]:
    yield from ("# What one run found on GPUs", "", headline(results), "")
    yield from _machine(results)
    rows = results.rows()
    yield from _table("Claims", [entry for entry in rows if entry[1]["holds"] is not None])
    yield from _table("For information, without a bar", [entry for entry in rows if entry[1]["holds"] is None])
    yield from _notes(results)
    yield from _pictures(results)
    yield from _left_out(results)
    yield from _outputs(results)


def _machine(results: Results) -> Iterator[str]:
    facts: dict[str, Any] = results.facts
    yield from ("## Machine", "")
    yield f"- {facts['machine']}"
    for gpu in facts["gpus"] if results.key["device"] == "cuda" else []:
        capability = ".".join(map(str, gpu["capability"] or ())) or "not known"
        size = f"{gpu['memory_bytes'] / 2**30:.1f} GiB"
        yield f"- {gpu['name']}, {size}, compute capability {capability}, compute mode {gpu['mode']}"
    driver = facts["driver"] or "none"
    yield f"- driver {driver} (CUDA up to {facts['driver_cuda'] or 'not known'}), nccl {facts['nccl'] or 'none'}"
    yield (
        f"- Python {facts['python']}, torch {facts['torch']} (CUDA {facts['torch_cuda'] or 'none'}), "
        f"numpy {facts['numpy']}, distlab {facts['distlab']}"
    )
    yield from (f"- {note}" for note in results.notes)
    yield ""


def _table(title: str, rows: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    if not rows:
        return
    yield from (f"## {title}", "", "| part | claim | ours | peer | ratio | 95 % interval | bar | holds | note |")
    yield "|---|---|---|---|---|---|---|---|---|"
    for part, row in rows:
        peer = "" if row["peer"] is None else f"{row['peer']:.4g} {row['unit']}"
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.3f}"
        low, high = row["interval"]
        cells = (part, row["claim"], f"{row['ours']:.4g} {row['unit']}", peer, ratio, f"{low:.3g} to {high:.3g}")
        cells += (row["bar"], HOLDS[row["holds"]], row["note"])
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"
    yield ""


def _notes(results: Results) -> Iterator[str]:
    notes = [f"- {name}: {entry['note']}" for name, entry in results.said("note")]
    for name in results.ordered():
        part = results.parts[name]
        if part["shrunk"]:
            notes.append(f"- {name}: ran out of memory once, so all its sizes are halved")
        if part["code"] != code_digest():
            notes.append(f"- {name}: measured {part['date']} with other code than the rest")
    if notes:
        yield from ("## Notes", "", *notes, "")


def _pictures(results: Results) -> Iterator[str]:
    pictures = results.said("picture")
    has_ratios = (results.folder / PICTURE).is_file()
    if pictures or has_ratios:
        yield from ("## Pictures", "")
        if has_ratios:
            yield f"![Our time over the peer's, one bar for each timed part]({PICTURE})\n"
        yield from (f"![{entry['shows']}]({entry['picture']})\n" for _, entry in pictures)


def _left_out(results: Results) -> Iterator[str]:
    missing = [f"- {part.name}: {results.not_run[part.name]}" for part in PARTS if part.name in results.not_run]
    failed = [
        f"- {name}: {part['status']}; {part['reason']}"
        for name in results.ordered()
        if (part := results.parts[name])["status"] != "done"
    ]
    if missing or failed:
        yield from ("## What was not run, or did not end well", "", *failed, *missing, "")


def _outputs(results: Results) -> Iterator[str]:
    for name in results.ordered():
        if results.parts[name]["output"]:
            output = results.parts[name]["output"].replace("```", "'''")
            yield from (f"## Output of {name}", "", "```", output, "```", "")
