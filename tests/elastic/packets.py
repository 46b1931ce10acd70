"""Lose packets on purpose: a loopback interface of its own for a job, on which the kernel drops a share of them.

The job runs in a network namespace, so that nothing else on the machine loses any. TCP sends lost packets again: ranks
see a wire that is slow now and then, never wrong bytes.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lossy_loopback(share: float) -> Iterator[list[str]]:
    """Make such an interface, and yield the words that go before a command which shall use it.

        with lossy_loopback(0.01) as words:
            subprocess.run([*words, "torchrun", "--nproc-per-node", "4", "train.py"])

    Args:
        share: of packets that are lost, such as 0.01.

    Raises:
        ValueError: the share is not from 0 to below 1.
        RuntimeError: it cannot be made here; the text says why and what it needs.

    Source: tc-netem(8), "loss random".
    """
    if not 0 <= share < 1:
        raise ValueError(f"share is {share!r}; pass the part of packets to lose, such as 0.01")
    name = f"distlab-loss-{os.getpid()}"
    try:
        try:
            _do("ip", "netns", "add", name)
            _do("ip", "-n", name, "link", "set", "lo", "up")
            _do("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", "netem", "loss", f"{100 * share:g}%")
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", "") or str(error)).strip()
            raise RuntimeError(
                f"packets cannot be lost on purpose here ({why}); it needs Linux, root, iproute2 (ip, tc) and the "
                "kernel's netem"
            ) from None
        yield ["ip", "netns", "exec", name]
    finally:
        _quietly("ip", "netns", "delete", name)


def _do(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def _quietly(*words: str) -> None:
    try:
        subprocess.run(words, check=False, capture_output=True)
    except OSError:
        return  # there is no ip, so there is no namespace either
