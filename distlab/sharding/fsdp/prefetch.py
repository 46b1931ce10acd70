"""Which unit comes next, so that its gather is on the wire while the one before it computes.

A model does not say in which order it calls its units, so the order is noted while it happens. Forward: as in the last
pass (in the first: as the units were registered). Backward: the reverse of this pass's forward. A wrong guess costs a
gather that is not used; the numbers stay right.
"""

from __future__ import annotations

from distlab.sharding.fsdp.flat_unit import Unit


class SubmoduleUnits:
    """The units of one submodule: one, and one more where parameters are frozen.

    Attributes:
        name: of the submodule; "" is the root.
        units: gathered and freed together.
    """

    def __init__(self, name: str, units: list[Unit]) -> None:
        self.name, self.units = name, units

    def start_gather(self) -> None:
        """Begin to make the units whole; do not wait."""
        for unit in self.units:
            unit.start_gather()

    def finish_gather(self) -> None:
        """Make the units whole."""
        self.start_gather()
        for unit in self.units:
            unit.finish_gather()

    def free(self) -> None:
        """Free the whole parameters of the units."""
        for unit in self.units:
            unit.free()


class Order:
    """The order of a model's units, as far as it is known.

    Attributes:
        prefetch: units that are gathered ahead; 0 gathers each when it is needed.
        begun: units whose forward has begun in this pass, in order.
        ended: units whose forward has ended in this pass, in order; backward takes them from the end.
    """

    def __init__(self, wrapped: list[SubmoduleUnits], prefetch: int) -> None:
        self.prefetch = prefetch
        self.begun: list[SubmoduleUnits] = []
        self.ended: list[SubmoduleUnits] = []
        self._expected = wrapped

    def start_pass(self) -> None:
        """Begin a forward pass."""
        self.begun, self.ended = [], []

    def begin(self, one: SubmoduleUnits) -> list[SubmoduleUnits]:
        """Note that a unit's forward begins; return those to gather ahead."""
        place = len(self.begun)
        self.begun.append(one)
        if place >= len(self._expected) or self._expected[place] is not one:
            return []
        return self._expected[place + 1 : place + 1 + self.prefetch]

    def end(self, one: SubmoduleUnits) -> int:
        """Note that a unit's forward ends; return its place among those that ended."""
        self.ended.append(one)
        return len(self.ended) - 1

    def end_pass(self) -> bool:
        """End a forward pass; return whether its order was another one than expected."""
        changed = self.begun != self._expected
        self._expected = self.begun
        return changed

    @staticmethod
    def before(ended: list[SubmoduleUnits], place: int, prefetch: int) -> list[SubmoduleUnits]:
        """Return the units to gather ahead when backward reaches the one at `place`: the nearest first."""
        return ended[max(0, place - prefetch) : place][::-1]
