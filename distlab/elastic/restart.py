"""Start ranks anew when some have failed: what `torchrun --max-restarts` does, for functions that `run` starts.

run_elastic(train, 4)                                   # 4 ranks again after each failure
run_elastic(train, lambda start: max(1, 4 - start))     # one fewer each time, as when machines are lost
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from distlab.comm import Nodes, RankError, run
from distlab.comm.launch.ranks import Watching


def run_elastic(
    fn: Callable[..., Any],
    world_size: int | Callable[[int], int],
    *,
    args: Sequence[Any] = (),
    max_restarts: int = 3,
    timeout_s: float = 600.0,
    nodes: Nodes | int = 1,
    **watching: Unpack[Watching],
) -> list[Any]:
    """Call fn(*args) on ranks as `distlab.comm.run` does, and again on new ranks when it fails.

    A function that raises ValueError is not started again: it would refuse the same arguments.

    Args:
        fn: trains; begins where the last checkpoint is, as with `ElasticRun` or `plain_train`.
        world_size: number of ranks, or a function that returns it for each start (0, 1, ...).
        args: of fn.
        max_restarts: starts after the first one.
        timeout_s: how long one start may take; ranks that hang are ended then.
        nodes: as of `run`.
        watching: as of `run`.

    Returns:
        What each rank of the last start returned.

    Raises:
        ValueError: as `run`.
        RankError: the last start failed too; the text begins with the root cause.
    """
    if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
        raise ValueError(f"max_restarts is {max_restarts!r}; pass a whole number, at least 0")
    for start in itertools.count():
        num_ranks = world_size(start) if callable(world_size) else world_size
        try:
            return run(fn, num_ranks, args=args, timeout_s=timeout_s, nodes=nodes, **watching)
        except RankError as error:
            refused = bool(error.failures) and error.failures[0].summary.startswith("raised ValueError")
            if refused or start >= max_restarts:
                raise
            first = str(error).partition("\n")[0]
            warnings.warn(f"{first}; starting anew (restart {start + 1} of {max_restarts})", stacklevel=2)
    raise AssertionError("itertools.count never ends")
