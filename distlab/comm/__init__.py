"""Real ranks on this machine or under torchrun: start them, group them, watch what they send, explain how they fail.

Start at `launch.ranks`. Then read `p2p` (messages between two ranks), `groups` (process groups) and `agree` (the same
value on every rank; `together` raises one error on all ranks). `device` is the one place that talks to CUDA. `record`
writes down every call, and `watch` finds ranks that cannot go on. `rendezvous` and `clocks` join ranks of several
machines. `checks` refuses wrong arguments. `standby` lets torchrun's ranks start at once. `plain` reads what an
untrusted process sends, or a file that may come from anyone. `command` writes a command so that it runs
where its reader stands. Under all this: `nodes` (nodes on one machine) over `shared_memory` (a backend).
Names load on first use, so that importing the package does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.comm.agree import agree as agree  # first, or the name would come to mean the submodule of the same name
from distlab.faces import lazy

if TYPE_CHECKING:
    from distlab.comm.groups import (
        Nodes as Nodes,
        choose_backend as choose_backend,
        clock_offsets_ns as clock_offsets_ns,
        entry as entry,
        mesh_groups as mesh_groups,
        node_groups as node_groups,
        process_group as process_group,
    )
    from distlab.comm.launch.failures import RankError as RankError, RankTimeout as RankTimeout
    from distlab.comm.launch.ranks import Ranks as Ranks, run as run, warm as warm
    from distlab.comm.record.read import Records as Records, read_records as read_records
    from distlab.comm.record.recorder import Recorder as Recorder, recorded as recorded
    from distlab.comm.record.throttle import throttled as throttled


__getattr__ = lazy(__name__)
