"""Collectives of a group whose ranks sit in several nodes: shared memory inside a node, sockets between nodes.

All-reduce, all-gather and reduce-scatter work on two levels: the ranks of a node share the work in memory, and each
exchanges its part with the ranks of its place in the other nodes. Where nodes have unequal numbers of ranks, each rank
exchanges with all others, at the price of one flat ring. Every call begins with a meeting of all ranks in shared
memory: calls that do not agree are named, and no rank counts a wire's time from another moment than the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from distlab.nodes.place import NodePlacement
from distlab.nodes.sockets import Block, Sockets
from distlab.shared_memory.collectives.collectives import Collectives, copy
from distlab.shared_memory.collectives.dense import bytes_of, parts
from distlab.shared_memory.collectives.reductions import Reduction, divide
from distlab.shared_memory.meeting import Meeting


class CrossingCollectives(Collectives):
    """The collectives of one rank in a group that crosses nodes.

    Args:
        meeting: of the whole group.
        inside: of the ranks of this rank's node, in order; None where it is alone there.
        place: where the group's ranks sit.
        sockets: to the group's ranks.
    """

    def __init__(self, meeting: Meeting, inside: Collectives | None, place: NodePlacement, sockets: Sockets) -> None:
        super().__init__(meeting)
        self.place, self.sockets = place, sockets
        self._node = inside
        self._row = inside if len(place.row) > 1 else None

    @contextmanager
    def _crossing(self, op: str, num_bytes: int, num_ranks: int) -> Iterator[None]:
        """Take the time of a collective on the wire, at least; the block moves the bytes."""
        since_s = time.monotonic()
        yield
        if self.sockets.pace is not None:
            self.sockets.pace.collective(op, num_bytes, num_ranks, since_s)

    def _begin(self) -> None:
        """Meet all, so that a failure of one ends what the ranks of a node do together."""
        super().barrier()
        if self._node is not None:
            self._node.meeting.begin(self.meeting.record)

    def barrier(self) -> None:
        """Wait until all are here, and a message has gone to every node."""
        self._begin()
        with self._crossing("barrier", 0, len(self.place.nodes)):
            pass

    def _swap(self, values: torch.Tensor) -> torch.Tensor:
        """Give row r of a matrix to the r-th rank of the column; return what each of them gives to this one."""
        got, column, me = torch.empty_like(values), self.place.column, self.place.column.index(self.rank)
        each = bytes_of(values) // len(column)
        give, take = (parts(matrix.data_ptr(), [each] * len(column)) for matrix in (values, got))
        others = [(number, peer) for number, peer in enumerate(column) if number != me]
        self.sockets.exchange({p: give[i] for i, p in others}, {p: take[i] for i, p in others})
        got[me] = values[me]
        return got

    def _spread(self, mine: Block, places: Sequence[int]) -> None:
        """Give a block to every rank of the column, and put theirs at `places`; this rank's own is there already."""
        others = [(peer, at) for peer, at in zip(self.place.column, places, strict=True) if peer != self.rank]
        self.sockets.exchange(dict.fromkeys([p for p, _ in others], mine), {p: (at, mine[1]) for p, at in others})

    def all_reduce(self, flat: torch.Tensor, reduction: Reduction, root: int = -1) -> None:
        """Combine: inside the nodes to parts, each part across the nodes, and gather the parts inside.

        With g ranks in each of m nodes and S bytes, a rank sends 2 (m-1)/m S/g bytes to other nodes.
        """
        self._begin()
        g, m = len(self.place.row), len(self.place.column)
        each, add = -(-flat.numel() // (g * m)), reduction._replace(divides=False)
        whole = flat.new_zeros(g * m * each)
        copy(whole.data_ptr(), flat.data_ptr(), bytes_of(flat))
        mine = whole
        if self._row is not None:
            mine = torch.empty_like(whole[: m * each])
            self._row.reduce_scatter(mine, list(whole.view(g, -1)), add)
        with self._crossing("all_reduce", bytes_of(mine), m):
            column = mine.view(m, -1)
            own = column[self.place.column.index(self.rank)]
            add.of(list(self._swap(column)), own)
            num_bytes = bytes_of(own)
            self._spread((own.data_ptr(), num_bytes), [mine.data_ptr() + i * num_bytes for i in range(m)])
        if self._row is not None:
            places = [block.data_ptr() for block in whole.view(g, -1)]
            self._row.all_gather(places, mine.data_ptr(), bytes_of(mine))
        if root in (-1, self.rank):
            if reduction.divides:
                divide(whole, self.size)
            copy(flat.data_ptr(), whole.data_ptr(), bytes_of(flat))

    def reduce_scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> None:
        """Combine inside each node what every node's rank of this place shall get, then across the nodes."""
        self._begin()
        add, column = reduction._replace(divides=False), self.place.column
        if self._row is None:
            values = torch.stack([inputs[peer] for peer in column])
        else:
            values = output.new_empty((len(column), output.numel()))
            for row, numbers in zip(values, self.place.nodes, strict=True):
                self._row.reduce_scatter(row, [inputs[number] for number in numbers], add)
        with self._crossing("reduce_scatter", bytes_of(values), len(column)):
            total = torch.empty_like(values[0])
            add.of(list(self._swap(values)), total)
        if reduction.divides:
            divide(total, self.size)
        copy(output.data_ptr(), total.data_ptr(), bytes_of(output))

    def all_gather(self, outputs: Sequence[int], source: int, num_bytes: int) -> None:
        """Gather across the nodes from the ranks of this place, then inside the node what each has got."""
        self._begin()
        column = self.place.column
        copy(outputs[self.rank], source, num_bytes)
        with self._crossing("all_gather", num_bytes, len(column)):
            self._spread((source, num_bytes), [outputs[peer] for peer in column])
        if self._row is not None:
            for peer, numbers in zip(column, self.place.nodes, strict=True):
                self._row.all_gather([outputs[number] for number in numbers], outputs[peer], num_bytes)

    def broadcast(self, address: int, num_bytes: int, root: int) -> None:
        """Send to one rank of each node, which shows it to the others there."""
        self._begin()
        leaders = [root if root in numbers else numbers[0] for numbers in self.place.nodes]
        leader = next(rank for rank, numbers in zip(leaders, self.place.nodes, strict=True) if self.rank in numbers)
        block = (address, num_bytes)
        if self.rank == leader:
            with self._crossing("broadcast", num_bytes, len(leaders)):
                if self.rank == root:
                    self.sockets.exchange({peer: block for peer in leaders if peer != root}, {})
                else:
                    self.sockets.exchange({}, {root: block})
        if self._node is not None:
            self._node.broadcast(address, num_bytes, self.place.mates.index(leader))

    def gather(self, outputs: Sequence[int], source: int, num_bytes: int, root: int) -> None:
        """Send to the root."""
        self._begin()
        with self._crossing("gather", num_bytes, len(self.place.nodes)):
            if self.rank == root:
                copy(outputs[root], source, num_bytes)
                self.sockets.exchange({}, {peer: (outputs[peer], num_bytes) for peer in self.others})
            else:
                self.sockets.exchange({root: (source, num_bytes)}, {})

    def scatter(self, output: int, sources: Sequence[int], num_bytes: int, root: int) -> None:
        """Send from the root."""
        self._begin()
        with self._crossing("scatter", num_bytes, len(self.place.nodes)):
            if self.rank == root:
                copy(output, sources[root], num_bytes)
                self.sockets.exchange({peer: (sources[peer], num_bytes) for peer in self.others}, {})
            else:
                self.sockets.exchange({}, {root: (output, num_bytes)})

    def all_to_all(self, outputs: Sequence[Block], inputs: Sequence[Block]) -> None:
        """Send each rank its block; only blocks for other nodes take time on the wire.

        Raises:
            ValueError: two ranks do not agree on how much one sends to the other.
        """
        self._begin()
        self.agree_on_sizes(outputs, inputs)
        copy(outputs[self.rank][0], inputs[self.rank][0], inputs[self.rank][1])
        away = [number for number in range(self.size) if number not in self.place.mates]
        sent = sum(inputs[number][1] for number in away)
        with self._crossing("gather", sent, len(away) + 1):  # a gather takes the time of exactly these bytes
            self.sockets.exchange(
                {peer: inputs[peer] for peer in self.others}, {peer: outputs[peer] for peer in self.others}
            )
