"""Run every gate, in the order of speed, and stop at the end with the list of those that failed.

Gates take seconds and need no rank: format, lint, types, the floors of the design, spelling, notebooks that are what
their source says, and the tests of tests/architecture (sizes, README tree, what imports what).
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
GATES = {
    "format": ["ruff", "format", "--check", "--quiet", "."],
    "lint": ["ruff", "check", "--quiet", "."],
    "floors": ["lint-imports", "--no-cache"],
    "spelling": ["codespell"],
    "types": ["mypy"],
    "notebooks": ["python", "tools/build_lessons.py", "--check"],
    "architecture": ["python", "-m", "pytest", "tests/architecture"],
}


def main() -> int:
    """Run the gates named on the command line, or all."""
    names = sys.argv[1:] or list(GATES)
    unknown = [name for name in names if name not in GATES]
    if unknown:
        print(f"no gate is called {unknown[0]!r}; choose from {', '.join(GATES)}", file=sys.stderr)
        return 2
    failed = []
    for name in names:
        start = time.monotonic()
        program, *arguments = GATES[name]
        done = subprocess.run([str(BIN / program), *arguments], cwd=ROOT, capture_output=True, text=True)
        print(f"{'ok    ' if done.returncode == 0 else 'FAILED'} {name} ({time.monotonic() - start:.1f} s)", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stdout + done.stderr, flush=True)
    if failed:
        print(f"gates that failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
