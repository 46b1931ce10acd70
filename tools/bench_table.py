"""Write the table of bars into README.md from benchmarks/results.json."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- bars -->", "<!-- end of bars -->"


def table(results: dict) -> str:
    machines = sorted({describe(part["machine"]) for part in results.values()})
    lines = ["", *(f"Measured {machine}." for machine in machines), ""]
    lines += ["| claim | bar | measured | 95 % interval | holds |", "|---|---|---|---|---|"]
    for part in results.values():
        lines += [line(row) for row in part["rows"] if row["holds"] is not None]
    return "\n".join([*lines, ""])


def describe(machine: dict) -> str:
    gpus = f", {machine['gpus'][0]}" if machine["gpus"] else ""
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    where = f"on {machine['processor']}, {machine['cores']} cores, {memory}{gpus}"
    return f"{machine['date']} {where}, {machine['system']}, Python {machine['python']}, torch {machine['torch']}"


def line(row: dict) -> str:
    measured = f"{row['ratio']:.2f}x" if row["ratio"] is not None else f"{row['ours']:.3g} {row['unit']}"
    low, high = row["interval"]
    holds = "yes" if row["holds"] else "**no**"
    return f"| {row['claim']} | {row['bar']} | {measured} | {low:.3g} to {high:.3g} | {holds} |"


def main() -> int:
    results = json.loads((ROOT / "benchmarks" / "results.json").read_text())
    readme = ROOT / "README.md"
    text = readme.read_text()
    if START not in text or END not in text:
        print(f"README.md has no {START} ... {END}", file=sys.stderr)
        return 1
    replaced = re.sub(rf"{START}.*?{END}", lambda _: f"{START}\n{table(results)}\n{END}", text, flags=re.S)
    readme.write_text(replaced)
    return 0


if __name__ == "__main__":
    sys.exit(main())
