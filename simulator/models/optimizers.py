"""What an optimizer keeps of each parameter, and what an update of all parameters takes.

    adamw           two states of each parameter
    sgd             none
    sgd-momentum    one
    muon            one of each matrix inside the blocks, which five Newton-Schulz iterations make orthogonal; of all
                    other parameters AdamW's two

States have the type of what is updated, the master weights or the parameters. A name that ends in -32bit, -16bit or
-8bit has states of a type of its own. States of 8 bits have a 32-bit scale for each block of 256.

Source: Dettmers et al. 2022 (2110.02861), blocks of pytorch/ao 0.7 and bitsandbytes 0.45, 2024; Jordan 2024, "Muon: An
    optimizer for hidden layers in neural networks"; Liu et al. 2025 (2502.16982), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from distlab.plan import Work, Workload, newton_schulz_flops

STATES: Mapping[str, int] = MappingProxyType({"adamw": 2, "sgd": 0, "sgd-momentum": 1, "muon": 1})
SUFFIXES: Mapping[str, float] = MappingProxyType({"-32bit": 4.0, "-16bit": 2.0, "-8bit": 1 + 4 / 256})  # bytes of each
OPTIMIZERS = (*STATES, *(f"{kind}{suffix}" for kind, count in STATES.items() if count for suffix in SUFFIXES))
UPDATED_BYTES = 12  # a gradient and a parameter are read and a parameter is written, in float32


def check_optimizer(name: str) -> None:
    """Refuse an optimizer that does not exist.

    Raises:
        ValueError: which there are; or why its states cannot have bits of their own.
    """
    kind, _, bits = name.rpartition("-")
    if name not in OPTIMIZERS and STATES.get(kind) == 0 and f"-{bits}" in SUFFIXES:
        ways = f"write {kind}, or an optimizer with states, such as adamw-{bits}"
        raise ValueError(f"optimizer is {name!r} and {kind} keeps no states that could have {bits[:-3]} bits; {ways}")
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer is {name!r}; choose one of {', '.join(OPTIMIZERS)}")


def with_optimizer(workload: Workload, name: str) -> Workload:
    """Return the workload with the states and the update of an optimizer of OPTIMIZERS, over what is trained of it.

    Cost: reads a gradient and a parameter, writes the parameter, reads and writes each state; a kernel a tensor. Muon's
        products of a matrix [m, n], m <= n, are 5 (4 m^2 n + 2 m^3) operations, and its states an average over a model.

    Raises:
        ValueError: there is no such optimizer.
    """
    check_optimizer(name)
    kind, _, bits = name.rpartition("-")
    width = SUFFIXES.get(f"-{bits}")
    count, flops = float(STATES[name if width is None else kind]), 0.0
    if name.startswith("muon"):
        blocks = [layer.shapes for layer in workload.layers if layer.input_bytes]
        matrices = [shape for shapes in blocks for shape in shapes if len(shape) == 2]
        flops = sum(newton_schulz_flops(shape) for shape in matrices)
        count = STATES["adamw"] - sum(map(math.prod, matrices)) / max(1, workload.num_parameters)
    moved = UPDATED_BYTES + 2 * count * (width or 4)
    return replace(
        workload,
        optimizer=Work(flops, moved * workload.num_parameters, workload.num_tensors),
        optimizer_bytes_per_parameter=count * (width or 4),
        has_own_state_type=width is not None,
    )
