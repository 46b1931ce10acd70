"""What a call may leave behind where values do not show it: hooks, attributes, options of optimizers, torch's switches.

`marks` looks at an argument, `switches` at the process. Both give plain values by name, to be compared after the call.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
import gc
import hashlib
import logging
import os
import resource
import signal
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OPENED_BY_LIBRARIES = ("/dev/shm/", "/dev/urandom", "/dev/random", "/proc/", "/sys/", "/memfd:")


def marks(name: str, value: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield kind, place and value of what hangs on an argument: "hooks", "attributes", "option" or "state"."""
    if isinstance(value, Tensor):
        yield "hooks", name, sum(len(getattr(value, hooks, None) or ()) for hooks in _TENSOR_HOOKS)
        yield "attributes", name, sorted(vars(value))
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            place = f"{name}.{path}" if path else name
            own = vars(module)
            hooks = [each for key, each in own.items() if key.endswith("_hooks") and isinstance(each, dict)]
            yield "hooks", place, sum(map(len, hooks))
            yield "attributes", place, sorted(own)
            yield "option", f"{place}.training", module.training
        for path, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield from marks(f"{name}.{path}", tensor)
    elif isinstance(value, torch.optim.Optimizer):
        yield "hooks", name, sum(len(getattr(value, hooks, ())) for hooks in _OPTIMIZER_HOOKS)
        groups = {f"{name}.param_groups[{index}]": group for index, group in enumerate(value.param_groups)}
        for place, group in {**groups, f"{name}.defaults": value.defaults}.items():
            yield "option", f"the number of parameters in {place}", len(group.get("params", ()))
            for key, option in group.items():
                if key != "params":
                    yield "option", f"{place}[{key!r}]", option if isinstance(option, bool | int) else repr(option)
    elif isinstance(value, torch.Generator):
        yield "state", f"the generator {name}", _digest(value.get_state().numpy().tobytes())
    elif isinstance(value, np.random.Generator):
        yield "state", f"the generator {name}", _digest(repr(value.bit_generator.state).encode())
    elif isinstance(value, np.ndarray):
        yield "state", name, _digest(repr((value.dtype, value.shape, value.tolist())).encode())
    elif isinstance(value, set):
        yield "state", name, sorted(map(repr, value))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from marks(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from marks(f"{name}[{index}]", item)


def left_on(before: list[tuple[str, str, Any]], after: list[tuple[str, str, Any]]) -> list[list[str]]:
    """Return kind and place of each mark that differs, and what is to be said of it."""
    old = {(kind, place): value for kind, place, value in before}
    return [
        [kind, place, _words(kind, place, old[kind, place], value)]
        for kind, place, value in after
        if (kind, place) in old and old[kind, place] != value
    ]


def _words(kind: str, place: str, old: Any, new: Any) -> str:
    if kind == "hooks":
        if new < old:
            return f"it took {old - new} of the caller's hooks from {place}; leave them there"
        many = "a hook" if new - old == 1 else f"{new - old} hooks"
        return f"it leaves {many} on {place}; keep what the register function returns, and call its remove()"
    if kind == "attributes":
        put, gone = sorted({*new} - {*old}), sorted({*old} - {*new})
        what = f"it leaves the attribute {put[0]!r} on" if put else f"it took the attribute {gone[0]!r} from"
        return f"{what} {place}, which belongs to the caller"
    if kind == "option":
        return f"it changed {place} from {old} to {new}; put it back"
    return f"it changed {place}, which belongs to the caller; leave it as it is, or work on a copy"


class Switch(NamedTuple):
    """One thing that the whole process uses: how to read it, and how to set it."""

    get: Callable[[], Any]
    put: Callable[[Any], Any]


@functools.cache  # read before and after each call
def _switches() -> dict[str, Switch]:
    found = {
        "the number of threads of torch": Switch(torch.get_num_threads, torch.set_num_threads),
        "the deterministic mode": Switch(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
        ),
        "torch's anomaly mode": Switch(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "torch's autocast": Switch(
            lambda: torch.is_autocast_enabled("cpu"), lambda value: torch.set_autocast_enabled("cpu", value)
        ),
        "the precision of float32 products": Switch(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        ),
        "torch's use of oneDNN": Switch(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
        "the garbage collector (gc.isenabled)": Switch(
            gc.isenabled, lambda value: gc.enable() if value else gc.disable()
        ),
        "what numpy does on errors (numpy.seterr)": Switch(np.geterr, lambda value: np.seterr(**value)),
        "how torch prints (torch.set_printoptions)": Switch(
            lambda: dict(vars(torch._tensor_str.PRINT_OPTS)),
            lambda value: vars(torch._tensor_str.PRINT_OPTS).update(value),
        ),
        "the recursion limit": Switch(sys.getrecursionlimit, sys.setrecursionlimit),
        "the list of folders that Python imports from (sys.path)": Switch(
            lambda: list(sys.path), lambda value: sys.path.__setitem__(slice(None), value)
        ),
        "the switch interval of threads": Switch(sys.getswitchinterval, sys.setswitchinterval),
        "the level of the root logger": Switch(lambda: logging.root.level, logging.root.setLevel),
        "the precision of decimal numbers": Switch(
            lambda: decimal.getcontext().prec, lambda value: setattr(decimal.getcontext(), "prec", value)
        ),
        "the flushing of denormals (torch.set_flush_denormal)": Switch(_flushes_denormals, torch.set_flush_denormal),
        "Python's tracing of memory (tracemalloc)": Switch(
            tracemalloc.is_tracing, lambda value: tracemalloc.start() if value else tracemalloc.stop()
        ),
        "the program's sys.excepthook": Switch(lambda: sys.excepthook, lambda value: setattr(sys, "excepthook", value)),
    }
    for number in signal.Signals:
        found[f"the handler of {number.name}"] = Switch(
            functools.partial(signal.getsignal, number), functools.partial(_handle, number)
        )
    return found


def _handle(number: int, handler: Any) -> None:
    with contextlib.suppress(ValueError, OSError, TypeError):  # not the main thread, or a handler made in C
        signal.signal(number, handler)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Put back, at the end, what one call may switch: a later one shall show that it switches it too."""
    found = _switches()
    old = {name: switch.get() for name, switch in found.items()}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name, switch in found.items():
            if switch.get() != old[name]:
                switch.put(old[name])


def switches() -> dict[str, Any]:
    """Return the state of what the whole process uses, by name."""
    return {
        **{name: switch.get() for name, switch in _switches().items()},
        "torch's inference mode": torch.is_inference_mode_enabled(),
        "the number of modes that catch torch's functions": torch._C._len_torch_function_stack(),
        "the number of hooks on all modules": _num_module_hooks(),
        "the number of hooks on all optimizers": _num_optimizer_hooks(),
        "the number of warnings that are errors": sum(each[0] == "error" for each in warnings.filters),
        "the number of open files": _num_open_files(),
    }


def kept() -> dict[str, Any]:
    """Return what each call must leave as it is: no later call would show that it did not."""
    found: dict[str, Any] = {"the rights of new files (os.umask)": os.umask(0o77)}
    os.umask(found["the rights of new files (os.umask)"])
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    found["the program's limits (resource.setrlimit)"] = [resource.getrlimit(limit) for limit in limits]
    policy = getattr(sys.modules.get("asyncio.events"), "_event_loop_policy", None)
    found["the event loop (asyncio.set_event_loop)"] = id(getattr(getattr(policy, "_local", None), "_loop", None))
    for name in ("stdout", "stderr"):
        found[f"sys.{name}"] = (id(getattr(sys, name)), _is_open(getattr(sys, name)))
    return found


def _is_open(stream: Any) -> bool:
    try:
        os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _flushes_denormals() -> bool:
    return not bool(torch.tensor(1e-310, dtype=torch.float64) * 1)


def _num_module_hooks() -> int:
    module: Any = nn.modules.module
    places = [each for name, each in vars(module).items() if name.startswith("_global_") and name.endswith("_hooks")]
    return sum(len(each) for each in places if isinstance(each, dict))


def _num_optimizer_hooks() -> int:
    module: Any = sys.modules["torch.optim.optimizer"]
    return len(module._global_optimizer_pre_hooks) + len(module._global_optimizer_post_hooks)


def _num_open_files() -> int:
    """Count the files that this process has open; what libraries open for themselves counts for nothing."""
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:  # systems other than Linux
        return 0
    return sum(_is_file(number) for number in numbers)


def _is_file(number: str) -> bool:
    try:
        path = os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return False
    if not path.startswith("/") or path.startswith(_OPENED_BY_LIBRARIES):
        return False
    return not os.path.isdir(path)  # a folder is opened to be flushed


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def from_to(old: Any, new: Any) -> str:
    """Say what a state was and is, where that is a word or a number."""
    if isinstance(old, bool) and isinstance(new, bool):
        return f" (it was {'on' if old else 'off'}, and is {'on' if new else 'off'})"
    is_short = all((type(each) is int and abs(each) < 10**6) or isinstance(each, str) for each in (old, new))
    return f" (it was {old}, and is {new})" if is_short and len(f"{old}{new}") <= 60 else ""
