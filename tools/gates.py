"""Run every gate, two at a time, the slow ones first, and stop at the end with the list of those that failed.

Gates take seconds and need no rank: format, lint, types, the floors of the design, spelling, notebooks that are what
their source says, and the tests of tests/architecture (sizes, the tree, what imports what).
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
GATES = {
    "types": ["mypy"],
    "architecture": ["python", "-m", "pytest", "tests/architecture"],
    "notebooks": ["python", "tools/build_lessons.py", "--check"],
    "spelling": ["codespell"],
    "floors": ["lint-imports", "--no-cache"],
    "lint": ["ruff", "check", "--quiet", "."],
    "format": ["ruff", "format", "--check", "--quiet", "."],
}


def run(name: str) -> tuple[str, float, subprocess.CompletedProcess[str]]:
    """Run one gate; return its name, its seconds and what came of it."""
    start = time.monotonic()
    program, *arguments = GATES[name]
    done = subprocess.run([str(BIN / program), *arguments], cwd=ROOT, capture_output=True, text=True)
    return name, time.monotonic() - start, done


def main() -> int:
    """Run the gates named on the command line, or all."""
    names = sys.argv[1:] or list(GATES)
    unknown = [name for name in names if name not in GATES]
    if unknown:
        print(f"no gate is called {unknown[0]!r}; choose from {', '.join(GATES)}", file=sys.stderr)
        return 2
    failed = []
    with ThreadPoolExecutor(2) as two:
        for name, seconds, done in two.map(run, names):
            print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {name} ({seconds:.1f} s)", flush=True)
            if done.returncode:
                failed.append(name)
                print(done.stdout + done.stderr, flush=True)
    if failed:
        print(f"gates that failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
