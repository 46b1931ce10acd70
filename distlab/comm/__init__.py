"""Real ranks on this machine or under torchrun: start them, group them, watch what they send, explain how they fail.

Start at `launch.run`. Then read `p2p` (messages between two ranks), `groups` (process groups) and `agree` (the same
value on every rank; `together` raises one error on all ranks). `device` is the one place that talks to CUDA. `record`
writes down every call, and `watch` finds ranks that cannot go on. `rendezvous` and `clocks` join ranks of several
machines. `checks` refuses wrong arguments. `standby` lets torchrun's ranks start at once. `plain` reads what an
untrusted process sends, or a file that may come from anyone. `command` writes a command so that it runs
where its reader stands.
Names load on first use, so that importing the package does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from distlab.comm.agree import agree  # first, or the name would come to mean the submodule of the same name

if TYPE_CHECKING:
    from distlab.comm.groups import (
        Nodes,
        choose_backend,
        clock_offsets_ns,
        entry,
        mesh_groups,
        node_groups,
        process_group,
    )
    from distlab.comm.launch.failures import RankError, RankTimeout
    from distlab.comm.launch.launch import run, warm
    from distlab.comm.launch.ranks import Ranks
    from distlab.comm.record.read import Records, read_records
    from distlab.comm.record.recorder import Recorder, recorded
    from distlab.comm.record.throttle import throttled

_HOMES = {
    "run": "launch.launch",
    "warm": "launch.launch",
    "Ranks": "launch.ranks",
    "RankError": "launch.failures",
    "RankTimeout": "launch.failures",
    "process_group": "groups",
    "entry": "groups",
    "mesh_groups": "groups",
    "node_groups": "groups",
    "Nodes": "groups",
    "clock_offsets_ns": "groups",
    "choose_backend": "groups",
    "Recorder": "record.recorder",
    "recorded": "record.recorder",
    "Records": "record.read",
    "read_records": "record.read",
    "throttled": "record.throttle",
}
__all__ = [
    "Nodes",
    "RankError",
    "RankTimeout",
    "Ranks",
    "Recorder",
    "Records",
    "agree",
    "choose_backend",
    "clock_offsets_ns",
    "entry",
    "mesh_groups",
    "node_groups",
    "process_group",
    "read_records",
    "recorded",
    "run",
    "throttled",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"distlab.comm.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'distlab.comm' has no attribute {name!r}")
