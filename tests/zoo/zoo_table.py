"""Write benchmarks/ZOO.md: model x technique, what became of each, with torch's own beside it.

PYTHONPATH=tests/zoo python -m zoo_table            # 2 ranks, all techniques
PYTHONPATH=tests/zoo python -m zoo_table FullyShard # one technique, printed only
"""

import sys
import warnings
from pathlib import Path

import torch
from zoo_kinds import KINDS
from zoo_techniques import OURS, PEERS, UPDATES, one_process, outcomes

from distlab.comm import RankError, Ranks

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "ZOO.md"


def run_all(techniques, num_ranks=2):
    """Return {technique: {kind: outcome}}; what ranks say differently is joined."""
    warnings.simplefilter("ignore")
    expected = {name: one_process(kind) for name, kind in KINDS.items()}
    found = {}
    for technique in techniques:
        found[technique] = {}
        for name, kind in KINDS.items():
            with Ranks(num_ranks, timeout_s=60) as ranks:  # fresh ones: a technique may leave a broken group
                try:
                    said = ranks.run(outcomes, technique, {name: kind}, {name: expected[name]})
                    found[technique][name] = " / ".join(dict.fromkeys(each[name] for each in said))
                except RankError as error:
                    found[technique][name] = f"the ranks ended: {str(error).splitlines()[0]}"
    return found


def _cell(said, notes):
    """Return a word for the table, and the number of the note that has the rest."""
    if said == "equal":
        return said
    if said not in notes:
        notes.append(said)
    words = [start for start in ("differs", "not tried") if said.startswith(start)] or ["refused"]
    return f"{words[0]} [{notes.index(said) + 1}]"


def main():
    techniques = sys.argv[1:] or [*OURS, *PEERS]
    found = run_all(techniques)
    notes: list[str] = []
    rows = []
    for name in KINDS:
        cells = [_cell(found[technique][name], notes) for technique in techniques]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    head = f"| model | {' | '.join(techniques)} |\n|{'---|' * (len(techniques) + 1)}"
    text = "\n".join([head, *rows, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])
    print(text)
    if not sys.argv[1:]:
        intro = (
            "# Models that are not ours\n\nEach model is trained for "
            f"{UPDATES} updates of AdamW on 2 ranks in float64, and compared with one process on\nthe whole batch. "
            f"The last columns are torch's own ({torch.__version__}). `make zoo` writes this.\n\n"
        )
        FILE.write_text(intro + text + "\n")


if __name__ == "__main__":
    main()
