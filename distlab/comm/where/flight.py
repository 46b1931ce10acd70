"""Read dumps of torch's flight recorder, whoever wrote them, and say what torch's own analyzer finds in them.

torch writes one per rank when a call of nccl times out. A dump is a pickle of plain values: torch's own reader would
run what a pickle asks for, so it is read here, and no code of it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
from pathlib import Path
from typing import Any

from distlab.comm.plain import restricted_load

_WORLD = "0"  # torch's name for the group of all ranks in a call; some backends give it none in the list of groups


def read_dump(data: bytes, what: str) -> dict[str, Any]:
    """Read a dump of torch's flight recorder; a ValueError names `what` and says why it is none."""
    name = f"{what} is not a dump of torch's flight recorder: it"
    read = restricted_load(io.BytesIO(data), {}, name)
    if not isinstance(read, dict) or not {"version", "pg_config", "entries"} <= read.keys():
        raise ValueError(f"{name} lacks version, pg_config or entries")
    return read


def read_dumps(prefix: str | Path) -> dict[int, dict[str, Any]]:
    """Read the dumps PREFIX0, PREFIX1, ..., one per rank; a ValueError: there are none, or one is none."""
    start, dumps = Path(prefix), {}
    for path in sorted(start.parent.glob(f"{start.name}*")):
        rank = path.name[len(start.name) :]
        if rank.isdigit() and path.is_file():
            dumps[int(rank)] = read_dump(path.read_bytes(), str(path))
    if not dumps:
        raise ValueError(f"there are no files {prefix}0, {prefix}1, ...; pass the value of TORCH_FR_DUMP_TEMP_FILE")
    return dumps


def analyzed(dumps: dict[int, dict[str, Any]]) -> str:
    """Return what torch's analyzer says of dumps, as which ranks a call lacks; a ValueError: it cannot read them."""
    with contextlib.redirect_stderr(io.StringIO()):  # it says that it could draw tables with a different package
        from torch.distributed.flight_recorder.components.builder import build_db

    said, details = io.StringIO(), {}
    logger, handler = logging.getLogger("Flight Recorder"), logging.StreamHandler(said)
    others, logger.handlers = logger.handlers, [handler]
    how = argparse.Namespace(verbose=False, just_print_entries=False, allow_incomplete_ranks=True, mismatch_cap=10)
    try:
        for rank, dump in dumps.items():
            groups = {name or _WORLD: group for name, group in dump["pg_config"].items()}
            details[str(rank)] = dump | {"rank": rank, "pg_config": groups}
        build_db(details, how, next(iter(dumps.values()))["version"])
    except Exception as error:  # whatever it meets in a dump that is not torch's
        raise ValueError(
            f"torch's analyzer does not understand these dumps ({type(error).__name__}: {error})"
        ) from error
    finally:
        logger.handlers = others
    return said.getvalue().rstrip() or "no calls that differ, and none that lacks a rank"
