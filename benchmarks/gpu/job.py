"""What a part is told, what it yields, and the list of parts in the order of their worth."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from _rows import Row

LABS = 11


@dataclass(frozen=True)
class Job:
    """What a part is told.

    Attributes:
        device: "cuda" or "cpu"; on the CPU all sizes are small, and no figure says anything about a GPU.
        num_gpus: GPUs that torch can use.
        seconds: after so many the part is ended; what it has yielded by then is kept.
        folder: for pictures and files.
        half: name of the half-precision type that the GPUs have: "bfloat16" or "float16".
        free_bytes: memory that is free on each GPU.
        may_share: whether several ranks may use one GPU.
        gpu: name of the GPU; empty on the CPU.
        whole: whether the GPU is whole: no slice of one (MIG).
        shrunk: whether an earlier try ran out of memory, so that sizes are halved.
        choice: which of several alike, such as the number of a lab.
    """

    device: str
    num_gpus: int
    seconds: float
    folder: Path
    half: str = "bfloat16"
    free_bytes: int = 0
    may_share: bool = True
    gpu: str = ""
    whole: bool = True
    shrunk: bool = False
    choice: str = ""

    @property
    def small(self) -> bool:
        """Whether this run only shows that the part works."""
        return self.device == "cpu"

    @property
    def num_ranks(self) -> int:
        """One rank for each GPU; two on the CPU."""
        return 2 if self.small else self.num_gpus

    @property
    def backend(self) -> str:
        """The backend of one rank for each device."""
        return "gloo" if self.small else "nccl"

    @property
    def where(self) -> str:
        """Words for claims: how many of which device."""
        return f"{self.num_ranks} ranks (cpu, gloo)" if self.small else f"{self.num_gpus} x {self.gpu}"


class Note(NamedTuple):
    """Words in place of a figure, such as what could not be measured, and why."""

    text: str


class Picture(NamedTuple):
    """A file in the report's folder, and what it shows."""

    name: str
    shows: str


Finding = Row | Note | Picture


class Part(NamedTuple):
    """One subject.

    Attributes:
        name: for --only.
        seconds: how long it takes at most, when the whole run may take ten minutes.
        module: its `findings(job)` yields rows, notes and pictures.
        choice: which of several that one module runs.
    """

    name: str
    seconds: float
    module: str
    choice: str = ""

    def findings(self, job: Job) -> Iterator[Finding]:
        """Run the part in this process."""
        found: Iterator[Finding] = importlib.import_module(self.module).findings(job)
        return found

    def summary(self) -> str:
        """Return the first line of the module's docstring; the module is read, not run."""
        found = find_spec(self.module)
        assert found is not None, self.module
        assert found.origin is not None, self.module
        lines = (ast.get_docstring(ast.parse(Path(found.origin).read_text(encoding="utf-8"))) or "").splitlines()
        return f"{lines[0].rstrip('.')}{f' ({self.choice})' if self.choice else ''}"


PARTS = (
    Part("machine", 20, "gpu.parts.machine"),
    Part("plans", 40, "gpu.parts.plans"),
    Part("equality_1", 40, "gpu.parts.equality", "1 rank"),
    Part("equality_2", 80, "gpu.parts.equality", "2 ranks"),
    Part("equality_4", 60, "gpu.parts.equality", "4 ranks"),
    Part("equality_n", 60, "gpu.parts.equality", "all GPUs"),
    Part("streams", 40, "gpu.parts.streams"),
    Part("model", 40, "gpu.parts.model"),
    Part("data_parallel", 50, "gpu.parts.data_parallel"),
    Part("sharding", 60, "gpu.parts.sharding"),
    Part("calibrate", 40, "gpu.parts.calibrate"),
    Part("predicted", 60, "gpu.parts.predicted"),
    Part("memory", 30, "gpu.parts.memory"),
    Part("tour", 75, "gpu.parts.course", "tour"),
    Part("compiled", 60, "gpu.parts.model", "compiled"),
    Part("optimizer", 25, "gpu.parts.optimizer"),
    Part("recompute", 25, "gpu.parts.recompute"),
    Part("pipeline", 35, "gpu.parts.pipeline"),
    Part("tensor_parallel", 35, "gpu.parts.tensor_parallel"),
    *(Part(f"lab_{number:02}", 60, "gpu.parts.course", f"lab {number:02}") for number in range(1, LABS + 1)),
)


def choose(names: list[str] | None) -> tuple[Part, ...]:
    """Return the parts of these names in the order of their worth; all without names.

    Raises:
        ValueError: a name that no part has; the text lists the names.
    """
    if not names:
        return PARTS
    known = [part.name for part in PARTS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--only: no part is called {unknown[0]!r}; choose from {', '.join(known)}")
    return tuple(part for part in PARTS if part.name in names)
