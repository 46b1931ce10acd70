"""Run the tests marked `equality` on a device and a backend, without pytest; one line of JSON for each.

    python tests/on_device/run.py --device cuda --backend gloo [--technique data_parallel] [--world-size 2] [--list]

A verdict is "equal", "differs", "not available" (with the reason in words: a backend's or a machine's limit) or
"failed". Nothing is left out in silence.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
NEIGHBOURS = ("sharding", "checkpoint", "hybrid")  # folders with modules that their tests share
sys.path[:0] = [str(TESTS), *(str(TESTS / name) for name in NEIGHBOURS)]
if "pytest" not in sys.modules:  # inside pytest programs can be listed, not run
    sys.path.insert(0, str(TESTS / "on_device" / "stand_in"))
if str(TESTS.parent) not in sys.path:
    sys.path.append(str(TESTS.parent))

import cloudpickle  # noqa: E402
import pytest  # noqa: E402 (the stand-in)
import torch  # noqa: E402

from on_device import TECHNIQUES  # noqa: E402
from on_device.mode import OnDevice, prepare  # noqa: E402
from on_device.ranks import Machine, NotHere  # noqa: E402

LIMITS = re.compile(  # what a backend says of a call that it does not have
    r"gloo.{0,80}(not supported|unsupported|does not support)|unsupported device type|nccl.{0,200}Duplicate GPU",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Program:
    """One equality test with one set of parameters.

    Attributes:
        technique: whose.
        name: file, test and parameters.
        world_sizes: how many ranks its parameters ask for; () where only the test itself knows.
    """

    technique: str
    name: str
    world_sizes: tuple[int, ...]
    function: Callable[..., None] = field(repr=False)
    module: ModuleType = field(repr=False)
    parameters: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Outcome:
    """What came of a program: the verdict, why in one line, how long it took."""

    verdict: str
    words: str
    seconds: float
    traceback: str = ""


@cache
def _all_programs() -> tuple[Program, ...]:
    found: list[Program] = []
    for path in sorted(TESTS.rglob("test_*.py")):
        if "mark.equality(" in path.read_text():
            found += _programs_of(path)
    return tuple(found)


def programs(technique: str | None = None) -> list[Program]:
    """Return the equality programs of a technique, or all.

    Raises:
        ValueError: there is no such technique.
    """
    if technique is not None and technique not in TECHNIQUES:
        raise ValueError(f"no technique {technique!r}; choose one of {', '.join(TECHNIQUES)}")
    return [one for one in _all_programs() if technique in (None, one.technique)]


def _programs_of(path: Path) -> Iterator[Program]:
    name = "on_device_" + "_".join(path.relative_to(TESTS).with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "it is a file of Python"
    assert spec.loader is not None, "it is a file of Python"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # ranks cannot import it by its name
    for key, function in vars(module).items():
        marks = getattr(function, "pytestmark", [])
        for technique in [mark.args[0] for mark in marks if key.startswith("test_") and mark.name == "equality"]:
            for number, parameters in enumerate(_parameter_sets(marks)):
                words = f"[{'-'.join(map(_short, parameters.values()))}]" if parameters else ""
                words = words if len(words) <= 60 and "<" not in words else f"[{number}]"
                sizes = tuple(v for k, v in parameters.items() if k in ("world_size", "num_ranks", "n"))
                whole = f"{path.relative_to(TESTS)}::{key}{words}"
                yield Program(technique, whole, sizes, function, module, parameters)


def _parameter_sets(marks: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield every combination of what `parametrize` names."""
    rows = []
    for mark in marks:
        if mark.name == "parametrize":
            names = [one.strip() for one in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            sets = [one for one in mark.args[1] if not getattr(one, "marks", ())]  # soak's are too long
            rows.append([dict(zip(names, _values(one, len(names)), strict=True)) for one in sets])
    for combination in itertools.product(*rows):
        yield {name: value for one in combination for name, value in one.items()}


def _values(one: Any, count: int) -> Any:
    return one if count > 1 or isinstance(one, pytest.Param) else (one,)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else str(getattr(value, "__name__", value))


def run_program(
    program: Program, device: str = "cuda", backend: str | None = None, timeout_s: float = 60.0, *, machine: Any = None
) -> Outcome:
    """Run one program; `machine` keeps ranks alive between programs (and then says device and backend)."""
    own = machine is None
    machine = Machine(device, backend, timeout_s) if own else machine
    begin = time.monotonic()
    try:
        with _home(machine.kind), ExitStack() as stack:
            program.function(**_arguments(program, machine, stack))
        verdict, words, trace = "equal", "", ""
    except (NotHere, pytest.Skipped) as error:
        verdict, words, trace = "not available", str(error), ""
    except Exception as error:
        text = " ".join(str(error).split())
        is_difference = isinstance(error, AssertionError) or "raised AssertionError" in text
        verdict = "not available" if LIMITS.search(text) else "differs" if is_difference else "failed"
        words, trace = f"{type(error).__name__}: {text[:300]}", traceback.format_exc()
    finally:
        if own:
            machine.close()
    return Outcome(verdict, words, round(time.monotonic() - begin, 2), trace)


@contextmanager
def _home(kind: str) -> Iterator[None]:
    """Let this process's side of a test, its oracles too, use the device as well."""
    if kind != "cpu":
        prepare()
    with nullcontext() if kind == "cpu" else OnDevice(torch.device(kind, 0)):
        yield


def _arguments(program: Program, machine: Machine, stack: ExitStack) -> dict[str, Any]:
    made: dict[str, Any] = {"ranks": machine.ranks, "record_property": lambda name, value: None}
    fixtures = {key: one for key, one in vars(program.module).items() if getattr(one, "is_fixture", False)}

    def value_of(name: str) -> Any:
        if name == "tmp_path" and name not in made:
            made[name] = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="equality-")))
        if name not in made:
            if name not in fixtures:
                raise LookupError(f"the test wants the fixture {name!r}, which this runner does not have")
            function, key = fixtures[name], (program.module.__name__, name)
            if key in machine.made:
                return machine.made[key]
            value = function(**{one: value_of(one) for one in inspect.signature(function).parameters})
            made[name] = stack.enter_context(contextmanager(lambda: value)()) if inspect.isgenerator(value) else value
            if function.scope == "module" and not inspect.isgenerator(value):
                machine.made[key] = value
        return made[name]

    for name, function in fixtures.items():
        if function.autouse:
            value_of(name)
    wanted = [one for one in inspect.signature(program.function).parameters if one not in program.parameters]
    return {name: value_of(name) for name in wanted} | program.parameters


def main() -> int:
    """Run what the command names; exit 1 where something differs or failed."""
    parser = argparse.ArgumentParser(description="equality programs on a device, without pytest")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--backend", choices=("gloo", "nccl"))
    parser.add_argument("--technique", choices=TECHNIQUES)
    parser.add_argument("--world-size", type=int, help="only programs whose parameters ask for so many ranks")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of one call on the ranks")
    parser.add_argument("--list", action="store_true", help="name the programs, run none")
    chosen = parser.parse_args()
    machine = Machine(chosen.device, chosen.backend, chosen.seconds)
    wrong = 0
    try:
        for program in programs(chosen.technique):
            if chosen.world_size is not None and program.world_sizes != (chosen.world_size,):
                continue
            row: dict[str, Any] = {"technique": program.technique, "program": program.name}
            row |= {"device": chosen.device, "backend": chosen.backend, "world_sizes": program.world_sizes}
            if not chosen.list:
                outcome = run_program(program, machine=machine)
                row |= asdict(outcome)
                wrong += outcome.verdict in ("differs", "failed")
            print(json.dumps(row), flush=True)
    finally:
        machine.close()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
