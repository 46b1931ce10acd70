"""Bring SUPPORTED.md up to date: what became of each model of the zoo under each technique on 2 ranks, and its words.

PYTHONPATH=tests/zoo python -m zoo_supported

All else stands in the page itself: it is cut at empty lines, and the tables and the list of words are made anew.
"""

import warnings
from pathlib import Path

from zoo_kinds import KINDS, OUTSIDE
from zoo_techniques import OURS, one_process, outcomes

from distlab.comm import run

FILE = Path(__file__).resolve().parents[2] / "SUPPORTED.md"


def cell(said: str) -> str:
    """Return the word of an outcome for the table."""
    return "-" if said.startswith("not tried") else "equal" if said == "equal" else "refused"


def row(name: str, said: list[str]) -> str:
    return f"| {name} | {' | '.join(map(cell, said))} |"


def main() -> None:
    warnings.simplefilter("ignore")
    every = KINDS | OUTSIDE
    expected = {name: one_process(kind) for name, kind in every.items()}
    found = {}
    for technique in OURS:
        said = run(outcomes, 2, args=(technique, every, expected), timeout_s=170)[0]
        found |= {(technique, name): text for name, text in said.items()}
    head = f"| model | {' | '.join(OURS)} |\n|{'---|' * (len(OURS) + 1)}"
    tables = [[head, *(row(n, [found[t, n] for t in OURS]) for n in kinds)] for kinds in (KINDS, OUTSIDE)]
    words = {n: dict.fromkeys(found[t, n] for t in OURS if cell(found[t, n]) == "refused") for n in OUTSIDE}
    blocks = FILE.read_text().split("\n\n")
    for at, block in enumerate(blocks):
        if block.startswith("| model |"):
            blocks[at] = "\n".join(tables.pop(0))
        elif block.startswith("- **"):
            blocks[at] = "\n".join(f"- **{name}**: {'; '.join(texts)}" for name, texts in words.items())
    FILE.write_text("\n\n".join(blocks))


if __name__ == "__main__":
    main()
