"""A progress bar for work that happens in other processes: they count in a small file, the bar reads it."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.2


@contextlib.contextmanager
def progress_file(total: int, what: str) -> Iterator[Path]:
    """Show a bar on standard error, if that is a terminal, while ranks of the block write how far they are.

    Without tqdm there is no bar.
    """
    with tempfile.TemporaryDirectory(prefix="distlab-progress-") as folder:
        path = Path(folder) / "done"
        path.write_text("0")
        with _bar(path, total, what):
            yield path


@contextlib.contextmanager
def _bar(path: Path, total: int, what: str) -> Iterator[None]:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield
        return
    done = threading.Event()
    with tqdm(total=total, desc=what, disable=None, leave=False) as bar:

        def follow() -> None:
            while not done.wait(POLL_S):
                with contextlib.suppress(OSError, ValueError):
                    bar.update(int(path.read_text()) - bar.n)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def report(path: Path | None, done: int) -> None:
    """Write how far the work is; called by one rank."""
    if path is not None:
        path.write_text(str(done))
