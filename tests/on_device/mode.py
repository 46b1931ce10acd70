"""OnDevice: what a user's program makes lies on a device; what a technique makes stays where the technique put it.

A test of a technique is a user's program: models, batches, oracles. It says nothing of devices. In this mode its
tensors (also those of `distlab.blocks.models` and `distlab.blocks.data`) are made on the CPU and moved, so random
numbers are the same on every device. Code of a technique is left alone: a tensor that it makes on the wrong device is
then an error in the test, as it would be for a user.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map

from distlab.comm import device

TORCH = str(Path(torch.__file__).parent)
USERS_MODULES = ("distlab.blocks.models", "distlab.blocks.data", "distlab.rng", "distlab.measure")
RANDOM_IN_PLACE = {
    getattr(Tensor, name)
    for name in ("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "geometric_")
}
RANDOM = {torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.multinomial, torch.normal}
RANDOM |= {Tensor.bernoulli, Tensor.multinomial}


class OnDevice(TorchFunctionMode):
    """Put what this thread's user code makes on a device, in a `with` block."""

    def __init__(self, place: torch.device) -> None:
        super().__init__()
        self.place = place

    def __enter__(self) -> Any:
        self._unseen = {name: getattr(torch, name) for name in ("from_numpy", "frombuffer")}  # by modes of torch
        for name, make in self._unseen.items():
            setattr(torch, name, lambda *args, make=make, **kwargs: self._moved(make(*args, **kwargs)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for name, make in self._unseen.items():
            setattr(torch, name, make)
        super().__exit__(*error)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors():
            made = func(*args, **kwargs)
            return self._moved(made) if kwargs.get("device") is None and kwargs.get("out") is None else made
        fills = func in RANDOM_IN_PLACE or getattr(func, "__module__", "") == "torch.nn.init"
        draws = (fills or func in RANDOM) and any(map(_on_gpu, args)) and _drawn_by_the_host(kwargs) and made_by_user()
        if draws and fills:
            drawn = args[0].detach().cpu()
            func(drawn, *args[1:], **kwargs)
            with torch.no_grad():
                return args[0].copy_(drawn)
        if draws:
            return self._moved(func(*tree_map(_to_cpu, args), **tree_map(_to_cpu, kwargs)))
        if func is Tensor.numpy and _on_gpu(args[0]) and made_by_user():
            return args[0].cpu().numpy(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def _moved(self, made: Any) -> Any:
        if not isinstance(made, Tensor) or made.device == self.place or made.is_meta or not made_by_user():
            return made
        return made.detach().to(self.place).requires_grad_(made.requires_grad)


def _on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_cpu and not value.is_meta


def _drawn_by_the_host(kwargs: dict[str, Any]) -> bool:
    generator = kwargs.get("generator")
    return generator is None or generator.device.type == "cpu"


def _to_cpu(value: Any) -> Any:
    return value.cpu() if _on_gpu(value) else value


def made_by_user() -> bool:
    """Return whether the nearest code that is not torch's is a test, or stands for what a user writes."""
    frame = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename in (__file__,) or TORCH in frame.f_code.co_filename):
        frame = frame.f_back
    name = "" if frame is None else frame.f_globals.get("__name__", "")
    return not name.startswith("distlab.") or name.startswith(USERS_MODULES)


def moved(values: Any, place: torch.device) -> Any:
    """Return values with every tensor in lists, tuples and dicts on a device."""
    move = lambda one: one.detach().to(place).requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one  # noqa: E731
    return tree_map(move, values)


def prepare() -> None:
    """Make a GPU's numbers repeat, and those of float32 exact to float32."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


def run_on_device(kind: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Run on each rank: call a test's function with its tensors on the rank's device; return results on the CPU."""
    import torch.distributed as dist

    prepare()
    place = device.device_of(kind, dist.get_rank())
    with OnDevice(place):
        return moved(fn(*moved(args, place)), torch.device("cpu"))
