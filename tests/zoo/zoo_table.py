"""Write benchmarks/ZOO.md: model x technique x ranks, what became of each, with torch's own next to it.

PYTHONPATH=tests/zoo python -m zoo_table            # all techniques, all models on 2 ranks, some on 4
PYTHONPATH=tests/zoo python -m zoo_table FullyShard # one technique on 2 ranks, printed only
"""

import datetime
import platform
import sys
import warnings
from pathlib import Path

import torch
from test_more import MORE, OTHERS
from zoo_kinds import KINDS
from zoo_techniques import OURS, PEERS, UPDATES, one_process, outcomes

from distlab.comm import RankError, Ranks

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "ZOO.md"


def run_all(techniques, num_ranks, kinds):
    """Return {technique: {kind: outcome}}; what ranks say differently is joined."""
    warnings.simplefilter("ignore")
    expected = {name: one_process(kind) for name, kind in kinds.items()}
    found = {}
    for technique in techniques:
        print(f"{num_ranks} ranks: {technique}", file=sys.stderr, flush=True)
        found[technique] = {}
        ranks = Ranks(num_ranks, timeout_s=60)
        for name, kind in kinds.items():
            try:
                said = ranks.run(outcomes, technique, {name: kind}, {name: expected[name]})
                found[technique][name] = " / ".join(dict.fromkeys(each[name] for each in said))
            except RankError as error:
                found[technique][name] = f"the ranks ended: {str(error).splitlines()[0]}"
            if not found[technique][name].startswith(("equal", "not tried")):  # it may leave a broken group
                ranks.close()
                ranks = Ranks(num_ranks, timeout_s=60)
        ranks.close()
    return found


def _cell(said, notes):
    """Return a word for the table, and the number of the note that has the rest."""
    if said == "equal":
        return said
    if said not in notes:
        notes.append(said)
    words = [start for start in ("differs", "not tried") if said.startswith(start)] or ["refused"]
    return f"{words[0]} [{notes.index(said) + 1}]"


def table(techniques, num_ranks, notes, kinds):
    """Return the table of one number of ranks as Markdown; add what was said to the notes."""
    found = run_all(techniques, num_ranks, kinds)
    rows = []
    for name in kinds:
        cells = [_cell(found[technique][name], notes) for technique in techniques]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    head = f"| model | {' | '.join(techniques)} |\n|{'---|' * (len(techniques) + 1)}"
    return "\n".join([f"## {num_ranks} ranks\n", head, *rows, ""])


def main():
    techniques = sys.argv[1:] or [*OURS, *PEERS]
    notes: list[str] = []
    tables = [table(techniques, 2, notes, KINDS | MORE | OTHERS)]
    if not sys.argv[1:]:
        tables.append(table([name for name in techniques if not name.startswith("pipeline")], 4, notes, KINDS))
    text = "\n".join([*tables, "## Notes\n", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])
    print(text)
    if not sys.argv[1:]:
        today = datetime.datetime.now(datetime.UTC).date()
        intro = (
            "# Models that were not written for this package\n\nEach model is trained for "
            f"{UPDATES} updates of AdamW in float64, and compared with one process on the whole\nbatch: equal is "
            "within 1e-9, or 1e-6 where a block computes in float32 (two types). The last columns are\ntorch's own. "
            "`make zoo` writes this. A number leads to what was said, and a refusal is any error. Torch's\ntensor "
            "parallelism gets the same plan in its own styles. It leaves a module's number of heads as it is; its\n"
            "users change that by hand.\n\n"
            f"{today}, {platform.machine()}, {platform.system()}, CPU and gloo; torch {torch.__version__}, Python "
            f"{platform.python_version()}.\n\n"
        )
        FILE.write_text(intro + text + "\n")


if __name__ == "__main__":
    main()
