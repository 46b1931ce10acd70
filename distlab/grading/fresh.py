"""Fresh ranks for one run after another: while one set runs, the next one is started and the last one is taken down.

Starting processes and joining them takes as long as a short run; a check on 1, 2, 3 and 4 ranks would wait for that
four times. The time limit of a run begins when its ranks are ready: a slow machine is not the fault of an answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distlab.comm import Ranks

ON_EVERY_RANK = (
    "distlab.grading.sandbox.guard",
    "distlab.grading.diagnosis.values",
    "distlab.grading.diagnosis.traffic",
    "distlab.grading.causes.as_if",
)
START_TIMEOUT_S = 120.0  # the first ranks of a program wait for torch to be loaded


class Unavailable(RuntimeError):
    """Ranks cannot be started on this machine, whatever the answer."""


def ready() -> None:
    """Do nothing on a rank: it has joined its group when this returns."""


def start_ranks(world_size: int, timeout_s: float) -> Ranks:
    """Start ranks and wait until all have joined their group; then their time limit is timeout_s.

    Raises:
        Unavailable: they do not start.
    """
    from distlab.comm import Ranks
    from distlab.comm.checks import backend_outside

    backend = backend_outside("gloo")  # where a wrong answer leaves ranks waiting, as on GPUs: some faults need that
    ranks = Ranks(world_size, timeout_s=START_TIMEOUT_S, backend=backend, record=True, echo=False, plain=True)
    try:
        ranks.run(ready)
    except (RuntimeError, OSError, ValueError) as error:
        ranks.close()
        raise Unavailable(f"{world_size} rank{'s' * (world_size > 1)} cannot be started here: {error}") from error
    except BaseException:
        ranks.close()
        raise
    ranks.timeout_s = timeout_s
    return ranks


@contextlib.contextmanager
def fresh_ranks(worlds: Sequence[int], timeout_s: float) -> Iterator[Iterator[Ranks]]:
    """Yield an iterator over sets of fresh ranks, one per world size; nothing of them is left after the block.

    Raises:
        Unavailable: from the iterator, when ranks do not start.
    """
    from distlab.comm.launch.fork_client import preload

    try:
        preload(*ON_EVERY_RANK)
    except (RuntimeError, OSError) as error:
        raise Unavailable(str(error)) from error
    with ThreadPoolExecutor(2, thread_name_prefix="ranks") as background:
        started: list[Future[Ranks]] = []
        closed: list[Future[None]] = []

        def sets() -> Iterator[Ranks]:
            started.append(background.submit(start_ranks, worlds[0], timeout_s))
            for index in range(len(worlds)):
                ranks = started[index].result()
                if index + 1 < len(worlds):
                    started.append(background.submit(start_ranks, worlds[index + 1], timeout_s))
                yield ranks
                closed.append(background.submit(_kill, ranks))

        try:
            yield sets()
        finally:
            for future in started[len(closed) :]:
                with contextlib.suppress(Unavailable):
                    _kill(future.result())


def _kill(ranks: Ranks) -> None:
    """End ranks at once: their answer is here, and nothing of them is needed."""
    with contextlib.suppress(RuntimeError):
        ranks.kill()
