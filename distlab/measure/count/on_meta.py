"""Modules on the meta device, whose tensors have no values: attention is fused there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class FusedOnMeta(TorchFunctionMode):
    """Calls the CPU's fused attention for tensors on the meta device, for which torch has the plain kernels alone."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
        given |= kwargs or {}
        if func is not scaled_dot_product_attention or given.get("dropout_p") or given["query"].device.type != "meta":
            return func(*args, **(kwargs or {}))
        known = {name: given[name] for name in ("is_causal", "attn_mask", "scale") if name in given}
        states = (given[name] for name in ("query", "key", "value"))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states, **known)[0]


@contextmanager
def on_meta(module: nn.Module) -> Iterator[None]:
    """In place of torch's error, say that this module cannot run where tensors have no values.

    Raises:
        ValueError: the module is on the meta device, and asks for values.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(p.is_meta for p in module.parameters()):
            raise
        why = f"where no tensor has values: {str(error).splitlines()[0][:120]}"
        raise ValueError(
            f"{type(module).__name__} does not run on the meta device, {why}; count it on the CPU"
        ) from error
