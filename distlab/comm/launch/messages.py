"""What the launcher and a rank say to each other: settings, calls and replies.

All that is large lies in files of the set's private folder: the settings and the call, which every rank reads, and each
rank's result. Over a socket pair, which only these two processes hold, goes the word that a call is there, and how it
went: a `Failure` or None, as JSON, so that nothing of the rank's own runs in the launcher. A rank that has stopped
never blocks its launcher.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import inspect
import io
import linecache
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.comm.nodes import Nodes

SETTINGS, CALL = "settings", "call"  # files of a set's folder
START = b"call"  # the word that a call is there


@dataclass(frozen=True)
class Settings:
    """What the ranks of a set need before their first call.

    Attributes:
        world_size: number of ranks.
        backend: as of `run`.
        group_timeout_s: how long a collective may wait.
        record: whether calls are recorded into the folder.
        plain: whether results go back as plain data (`distlab.comm.plain`).
        nodes: the nodes that the ranks make.
        joined: whether they are in a process group; else what they run makes its own.
        environment: the launcher's environment variables.
        import_path: the launcher's sys.path.
        directory: the launcher's working directory.
    """

    world_size: int
    backend: str | None
    group_timeout_s: float
    record: bool
    plain: bool
    nodes: Nodes
    joined: bool
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    import_path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    directory: str = field(default_factory=os.getcwd)


def rank_file(folder: Path, rank: int, what: str) -> Path:
    """File of a rank: its "result"; its "stack" when asked or in a crash; a script's "error" (`record_failure`)."""
    return folder / f"rank{rank}.{what}"


def write_new(path: Path, data: bytes) -> None:
    """Write a file in the place of one that may be there, into which to write takes milliseconds; OSError: no room."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def pack_call(fn: Callable[..., object], args: Sequence[object]) -> bytes:
    """Pickle a function and its arguments by value, with the sources that a traceback will want.

    These are the lines that exist in this process alone: notebook cells, doctests, text executed by hand.

    Raises:
        ValueError: something in the function or its arguments cannot be pickled; the text names it.
    """
    cached = list(linecache.cache.items())  # at once: other threads may add to it
    known = [(name, entry) for name, entry in cached if len(entry) == 4 and not os.path.exists(name)]
    sources = {name: (size, None, list(lines), full_name) for name, (size, _, lines, full_name) in known}
    try:
        with _sent_by_value([fn, *args]):
            return pickle.dumps((_dump((fn, tuple(args))), sources))
    except Exception as error:
        name, culprit = getattr(fn, "__qualname__", None) or repr(fn), _culprit(fn, args)
        raise ValueError(
            f"{name} cannot be sent to the ranks: {culprit or 'it'} cannot be pickled "
            f"({type(error).__name__}: {error}); make such an object inside the function instead"
        ) from error


def _dump(value: object) -> bytes:
    """Pickle by value as cloudpickle does, with four repairs.

    First, every module is sent by its name. Otherwise a function that names `torch` and some attribute `.ops` makes
    cloudpickle send the module torch.ops, whose class it cannot pickle. Second, a class written inside the function may
    read names in its body (bases, annotations). cloudpickle overlooks them; they are sent with the function.
    Third, the step of an optimizer that was used here has torch's hooks around it. A copy of these would call none of
    the rank's hooks, such as the trial of an optimizer of shards; so the step travels bare. Fourth, code keeps the name
    of its file, with which errors name a line; cloudpickle 3.1.3 writes "<dynamic-code>" instead.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: object) -> object:
            if (
                isinstance(obj, types.ModuleType)
                and type(obj) is not types.ModuleType
                and sys.modules.get(obj.__name__) is obj
            ):
                return importlib.import_module, (obj.__name__,)
            if isinstance(obj, types.FunctionType) and getattr(obj, "hooked", False) and hasattr(obj, "__wrapped__"):
                return _with_hooks, (obj.__wrapped__,)
            if isinstance(obj, types.CodeType):
                make, parts = self.dispatch_table[types.CodeType](obj)
                file = {"<dynamic-code>": obj.co_filename}
                return make, tuple(file.get(part, part) if isinstance(part, str) else part for part in parts)
            return super().reducer_override(obj)

        def _dynamic_function_reduce(self, function: types.FunctionType) -> Any:
            reduced = super()._dynamic_function_reduce(function)
            _, slots = reduced[2]
            missing = {name: function.__globals__[name] for name in _names_in_classes(function)}
            slots["__globals__"] = missing | slots["__globals__"]
            return reduced

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _with_hooks(step: types.FunctionType) -> Any:
    import torch

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return hooked


def _names_in_classes(function: types.FunctionType) -> list[str]:
    """Name the globals that bodies of classes inside a function read."""
    found: list[str] = []
    inside = [function.__code__]
    while inside:
        code = inside.pop()
        inside += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        if not code.co_flags & inspect.CO_OPTIMIZED:  # a class's body, where names are looked up one by one
            read = [step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_NAME"]
            found += [name for name in read if name in function.__globals__]
    return [name for name in found if not name.startswith("__")]


@contextlib.contextmanager
def _sent_by_value(values: Sequence[object]) -> Iterator[None]:
    """Within the block, functions of modules that a rank could not import by name travel by value, as __main__'s do.

    Such modules were loaded by path, or built by hand: a benchmark, a lesson, a test.
    """
    import cloudpickle

    names = {getattr(value, "__module__", None) for value in values}
    names -= cloudpickle.list_registry_pickle_by_value()
    modules = [sys.modules[name] for name in names if name in sys.modules and not _is_importable(sys.modules[name])]
    with contextlib.ExitStack() as undo:
        for module in modules:
            cloudpickle.register_pickle_by_value(module)
            undo.callback(cloudpickle.unregister_pickle_by_value, module)
        yield


def _is_importable(module: types.ModuleType) -> bool:
    """Whether importing a module's name in a different process leads to the same file."""
    name, file = module.__name__, getattr(module, "__file__", None)
    if name == "__main__" or "." in name or file is None:  # cloudpickle knows __main__; a package is found by its name
        return True
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    spec = next((spec for spec in specs if spec is not None), None)
    return spec is not None and spec.origin is not None and os.path.abspath(spec.origin) == os.path.abspath(file)


def _culprit(fn: Callable[..., object], args: Sequence[object]) -> str | None:
    import cloudpickle

    named = [(f"argument {index}", value) for index, value in enumerate(args)]
    with contextlib.suppress(TypeError, ValueError):  # no function of Python's, or an outer variable has no value yet
        outer = inspect.getclosurevars(fn)
        named += [(f"the outer variable {name!r}", value) for name, value in outer.nonlocals.items()]
        named += [(f"the global variable {name!r}", value) for name, value in outer.globals.items()]
    for name, value in named:
        try:
            cloudpickle.dumps(value)
        except Exception:
            return name
    return None
