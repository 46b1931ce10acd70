"""What every benchmark shares: its command line when it is started as a script, and its choice of device."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator

from _rows import Row

from distlab.comm.device import is_available, num_gpus


def run_script(
    doc: str | None,
    rows: Callable[..., Iterator[Row]],
    *,
    devices: bool = False,
    then: Callable[..., Iterator[str]] | None = None,
) -> None:
    """Print a benchmark's rows as they come: `--quick` for a few blocks, and `--device` where it runs on GPUs too.

    Args:
        doc: the text of --help, the benchmark's own.
        rows: called with `quick=`, and with `device=` where `devices`.
        devices: whether it takes a device.
        then: called in the same way; yields lines to print after the rows.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few blocks: shows that it runs, proves nothing")
    if devices:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = vars(parser.parse_args())
    try:
        for line in itertools.chain(rows(**options), then(**options) if then else ()):
            print(line, flush=True)
    except ValueError as error:
        sys.exit(f"error: {error}")


def backend_of(device: str, num_ranks: int) -> str:
    """Return the backend of ranks on a device: nccl where each has a GPU of its own, else gloo.

    Raises:
        ValueError: cuda was asked for and this machine has none.
    """
    if device == "cuda" and not is_available():
        raise ValueError("device cuda: torch sees no GPU here; leave --device out")
    return "nccl" if device == "cuda" and num_gpus() >= num_ranks else "gloo"
