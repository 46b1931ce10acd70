"""Run a script on ranks of this machine: what torchrun does, on ranks that are forked with torch loaded.

Each rank finds the variables that torchrun would set, and makes its own process group. It tells its launcher what went
wrong as it would tell torchrun (`record_failure`). Of several failures the cause comes first, and nothing is left.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from distlab.comm.launch.failures import RankError, RankTimeout, standing
from distlab.comm.launch.ranks import Ranks

SAID = 3  # exit status of a rank that has said all there is to say: a wrong result, told in its own words
_HUNG = "raised RankTimeout: "


class ScriptRefused(ValueError):
    """What a script was asked for cannot be: one line is enough."""


def run_script(
    script: str | Path,
    num_ranks: int,
    arguments: Sequence[str] = (),
    *,
    echo: Callable[[int, str], None],
    limit_s: float = 600.0,
) -> int:
    """Run a script on ranks of this machine and return 0, or 1 when its ranks said themselves what is wrong.

    Args:
        script: the Python file.
        num_ranks: how many processes run it.
        arguments: its own arguments.
        echo: called with (rank, line) for each line of output, in this thread.
        limit_s: after this everything is killed.

    Raises:
        RankError: a rank failed; the text begins with the root cause.
        RankTimeout: the script did not end in time.
        ValueError: the script does not exist, or an argument cannot be; or the ranks refused theirs.
    """
    if not Path(script).is_file():
        raise ValueError(f"there is no script {script}; pass the path of a Python file")
    try:
        with Ranks(num_ranks, timeout_s=limit_s, record=False, echo=echo, joined=False) as ranks:
            return int(SAID in ranks.run(_run_here, str(script), [*arguments]))
    except RankError as error:
        refused = f"raised {ScriptRefused.__name__}: "
        if error.failures and error.failures[0].summary.startswith(refused):
            raise ValueError(error.failures[0].summary.removeprefix(refused)) from None
        hung = {one.rank: one for one in error.failures if one.summary.startswith(_HUNG)}
        if not hung or any(one.rank not in hung and not one.is_noise for one in error.failures):
            raise
        words = next(iter(hung.values())).summary.removeprefix(_HUNG).strip() or "the ranks hang"
        stacks = {rank: one.traceback for rank, one in hung.items()}
        raise RankTimeout("\n".join([words, *standing(stacks, [])]), None, error.failures) from None


def _run_here(script: str, arguments: list[str]) -> int:
    """Run the script in this rank; return its exit status where it said all there is to say."""
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0, SAID):
            raise
        return int(left.code or 0)
    return 0
