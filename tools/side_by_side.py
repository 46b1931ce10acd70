"""Run the tests in several processes that take one file after the other from a queue; what failed comes last.

    .venv/bin/python tools/side_by_side.py tests --ignore tests/browser -- -m "not soak"

What stands after `--` goes to pytest. Each process collects only what it runs (tests/one_queue.py).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = "tests/one_queue.py"
LONGEST = ("test_mutants.py", "test_zoo.py")  # begun last, these would run on alone
NUM_SLOWEST = 10
NONE_CHOSEN = 5  # pytest's exit status where no test was chosen
OUTCOMES = ("failure", "error", "skipped")  # as junit's files call them
TELL_S = 30.0


def test_files(places: Sequence[Path], ignored: Sequence[Path]) -> list[str]:
    """Return the files of tests in these places, the longest first, then by name."""
    found = [path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("test_*.py")))]
    kept = [path for path in dict.fromkeys(found) if not any(path.is_relative_to(each) for each in ignored)]
    return [str(path) for path in sorted(kept, key=lambda path: path.name not in LONGEST)]


class Process:
    """One process of pytest, with what it prints in a file."""

    def __init__(self, queue: Path, number: int, options: Sequence[str]) -> None:
        self.queue, self.log, self.results = queue, queue / f"{number}.log", queue / f"{number}.xml"
        command = [sys.executable, "-m", "pytest", "-p", "tests.one_queue", "--queue", str(queue)]
        command += [f"--junitxml={self.results}", *options, PLUGIN]
        with self.log.open("w") as log:
            self.running = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def failed(self) -> bool:
        """Return whether a test failed, or the process did not come to its end."""
        return self.running.returncode not in (0, NONE_CHOSEN) or not self.results.is_file()

    def story(self) -> str:
        """Return what it printed; of one that died in a test, also which test that was and what had failed before."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        if self.results.is_file():
            return text
        notes = [self.queue / f"{self.running.pid}.{what}" for what in ("failed", "now")]
        failed, now = (note.read_text(encoding="utf-8") if note.is_file() else "" for note in notes)
        return f"{text}\n{failed}\nthis process ended (status {self.running.returncode}) in {now or 'no test'}\n"

    def cases(self) -> list[tuple[float, str, str]]:
        """Return the seconds of each test that ended, what came of it, and its name."""
        if not self.results.is_file():
            return []
        return [
            (
                float(case.get("time", 0)),
                next((child.tag for child in case if child.tag in OUTCOMES), "passed"),
                f"{case.get('classname')}::{case.get('name')}",
            )
            for case in ElementTree.parse(self.results).getroot().iter("testcase")
        ]


def run(files: Sequence[str], options: Sequence[str], num_processes: int) -> int:
    """Run the files; print what failed and the slowest tests; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="distlab-tests-") as folder:
        queue = Path(folder)
        (queue / "files").write_text("\n".join(files), encoding="utf-8")
        taken = queue / "taken"
        taken.mkdir()
        processes = [Process(queue, number, options) for number in range(num_processes)]
        try:
            told = time.monotonic()
            while any(process.running.poll() is None for process in processes):
                time.sleep(0.2)
                if time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    print(f"{len(list(taken.iterdir()))} of {len(files)} files of tests have begun", flush=True)
        finally:
            for process in processes:
                process.running.terminate()
            for process in processes:
                process.running.wait()
        cases = sorted((case for process in processes for case in process.cases()), reverse=True)
        wrong = [process for process in processes if process.failed()]
        for process in wrong:
            print(process.story(), flush=True)
        counts = Counter(outcome for _, outcome, _ in cases)
        print(f"{len(files)} files: {', '.join(f'{number} {outcome}' for outcome, number in counts.items())}; slowest:")
        print("\n".join(f"{seconds:8.2f} s  {name}" for seconds, _, name in cases[:NUM_SLOWEST]))
        return 1 if wrong else 0


def main() -> int:
    """Read the command line and run."""
    end = [*sys.argv, "--"].index("--")
    arguments, options = sys.argv[1:end], sys.argv[end + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("places", nargs="+", type=Path, help="folders or files of tests")
    parser.add_argument("--ignore", action="append", default=[], type=Path, help="a folder or file to leave out")
    parser.add_argument("--processes", type=int, default=4, help="how many at once")
    known = parser.parse_args(arguments)
    files = test_files(known.places, known.ignore)
    if not files:
        print(f"no file of tests in {', '.join(map(str, known.places))}", file=sys.stderr)
        return 2
    return run(files, options, min(known.processes, len(files)))


if __name__ == "__main__":
    sys.exit(main())
