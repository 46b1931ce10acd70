"""Peak memory of a call: bytes of the tensors that it makes and that live at the same time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Watch(TorchDispatchMode):
    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known = known
        self._alive: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                storage, entry = leaf.untyped_storage(), self._alive.get(leaf.untyped_storage()._cdata)
                if storage._cdata not in self._known and (entry is None or entry[0].expired()):
                    self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def peak_bytes(fn: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Call fn(*args); return its result and the most bytes of new tensors that lived at once during the call.

    What the arguments hold already does not count, and a view of a tensor counts nothing. Memory that torch's operators
    use inside, for a moment, is not seen.
    """
    held = [leaf.untyped_storage() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    watch = _Watch({storage._cdata for storage in held})
    with watch:
        result = fn(*args)
    return result, watch.peak
