"""Which unit comes next, so that its gather is on the wire while the one before it computes.

A model does not say in which order it calls its units, so the order is noted while it happens. Forward: as in the last
pass (in the first: as the units were registered). Backward: the reverse of this pass's forward.

A gather takes all ranks, so all must run the same units in the same order. A rank that leaves the order of the last
pass cannot know whether the others leave it too. So it first gathers what the old order has left, as ranks do that keep
to it. Then the ranks compare how they go on. Where one rank alone skips a block, all of them say so, and none waits.

Backward is simpler: autograd knows from the start which parts of the graph it will run. So before the first gather of a
backward pass, the ranks compare the units that it will reach.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from distlab.comm import agree
from distlab.sharding.fsdp.flat_unit import Unit

if TYPE_CHECKING:
    from distlab.sharding.fsdp.hooks import WatchedModule


class Order:
    """The order of a model's units, as far as it is known.

    Attributes:
        prefetch: units that are gathered ahead; 0 gathers each when it is needed.
        begun: units whose forward has begun in this pass, in order.
        ended: units whose forward has ended in this pass, in order; backward takes them from the end.
        thread: in which this pass began; None outside of a pass.
    """

    def __init__(self, wrapped: list[WatchedModule], prefetch: int, group: ProcessGroup | None) -> None:
        self.prefetch, self.group = prefetch, group
        self.begun: list[WatchedModule] = []
        self.ended: list[WatchedModule] = []
        self.thread: int | None = None
        self._in_pass = False
        self._expected = wrapped
        self._ahead: list[WatchedModule] = []  # of the units expected in this pass, those that have not begun
        self._nodes: deque[tuple[str, Any]] = deque(maxlen=256 * len(wrapped))  # of the graph, with the unit's name
        self._compared: set[int] = set()  # backward passes
        self._awaits_backward = False

    def start_pass(self) -> None:
        """Begin a forward pass."""
        self.begun, self.ended, self._in_pass, self._ahead = [], [], True, [*self._expected]
        self.thread = threading.get_ident()

    def begin(self, one: WatchedModule) -> list[WatchedModule]:
        """Note that a unit's forward begins; return those to gather ahead.

        Sends nothing while the order is that of the last pass. After the first difference: what the old order has left
        is gathered, and 40 bytes per rank are compared before each unit.

        Raises:
            ValueError: on every rank: ranks go on with different units.
        """
        if not self._in_pass:
            return []
        if not self._ahead or self._ahead[0] is not one:
            self._gather_rest()
            self._compare(one.name or "root")
        self.begun.append(one)
        del self._ahead[:1]
        return self._ahead[: self.prefetch]

    def end(self, one: WatchedModule) -> tuple[list[WatchedModule], int]:
        """Note that a unit's forward ends; return the list of those that ended, and its place there."""
        if not self._in_pass:
            return [], 0
        self.ended.append(one)
        return self.ended, len(self.ended) - 1

    def end_pass(self) -> None:
        """End a forward pass: compare 40 bytes per rank.

        Raises:
            ValueError: on every rank: ranks ran different units.
        """
        self._gather_rest()
        self._in_pass, self.thread = False, None
        self._compare("the end")
        self._expected = self.begun

    def note_graph(self, units: Sequence[Unit], views: Sequence[Sequence[Tensor]]) -> None:
        """Remember where backward reaches units that begin to be used."""
        for unit, tensors in zip(units, views, strict=True):
            if tensors and tensors[0].grad_fn is not None:
                self._nodes.append((unit.name or "root", tensors[0].grad_fn))
                self._awaits_backward = True

    def begin_backward(self) -> None:
        """Before a backward pass gathers anything: compare the units that it will reach, 40 bytes per rank.

        Raises:
            ValueError: on every rank: backward reaches other units on some ranks.
        """
        task = torch._C._current_graph_task_id()
        if task in self._compared:
            return
        self._compared.add(task)
        self._compare_reached([name for name, node in self._nodes if torch._C._will_engine_execute_node(node)])

    def end_step(self) -> None:
        """Compare also where no backward pass has reached any unit on this rank; forget the graph.

        Raises:
            ValueError: on every rank: backward reached some unit on other ranks.
        """
        if self._awaits_backward:
            self._compare_reached([])
        self._nodes.clear()
        self._compared.clear()

    def _compare_reached(self, names: Sequence[str]) -> None:
        self._awaits_backward = False
        agree(sorted(names), self.group, what="the units that this backward pass reaches (does a loss use them all?)")

    def _gather_rest(self) -> None:
        """Gather and free what the old order has left, when and as ranks do that run it."""
        while self._ahead:
            one = self._ahead.pop(0)
            one.finish_gather()
            for other in self._ahead[: self.prefetch]:
                other.start_gather()
            one.settle()

    def _compare(self, pending: str) -> None:
        names = [one.name or "root" for one in self.begun]
        agree([*names, pending], self.group, what="the units that this forward pass runs, in order")
