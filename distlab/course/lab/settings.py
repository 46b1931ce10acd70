"""A lab's settings: one frozen dataclass with few fields of its own, turned into flags with help from its docstring."""

from __future__ import annotations

import argparse
import types
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from distlab.blocks.data import ByteCorpus, python_documentation, read_text
from distlab.blocks.models import GPTConfig
from distlab.comm.nodes import Nodes
from distlab.course.flags import Parser, number
from distlab.faces import attributes_of

SettingsT = TypeVar("SettingsT", bound="CommonSettings")


def flag(default: Any, *, least: float | None = None, most: float | None = None, size: bool = False) -> Any:
    """Declare a field of settings with limits; `size` reads bytes with a unit, such as 64KiB."""
    return field(default=default, metadata={"least": least, "most": most, "size": size})


@dataclass(frozen=True)
class CommonSettings:
    """What every lab can be told.

    Attributes:
        impl: whose functions run: reference, mine (your working copy), a module, a .py file or a notebook (.ipynb).
        trace: folder for each rank's trace, all of them merged (timeline.json) and a picture (timeline.png).
        device: cpu or cuda; auto takes GPUs when every rank has its own.
        backend: auto takes nccl on GPUs, else shared (ranks of a Linux host meet in memory) where it works, else gloo.
        nodes: nodes that the ranks make: shared memory inside each, a wire between them.
        between: the wire of each rank to other nodes, such as 40MB/s,200us; empty: 1GB/s,50us.
        limit_s: seconds after which `distlab lab` ends a lab that hangs; torchrun itself has no such limit.
        json: print the results as JSON.
    """

    impl: str = "reference"
    trace: Path | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backend: Literal["auto", "gloo", "shared"] = "auto"
    nodes: int = flag(1, least=1)
    between: str = ""
    limit_s: float = flag(300.0, least=1, most=1_000_000)
    json: bool = False

    def nodes_of(self, num_ranks: int) -> Nodes:
        """Return the nodes that a number of ranks makes; a ValueError: they do not fill them, or the wire is none."""
        return Nodes.for_ranks(Nodes(self.nodes, self.between or None), num_ranks)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse, on every rank, a number of ranks that these settings do not fit; a ValueError says what to pass."""


@dataclass(frozen=True)
class GPTSettings(CommonSettings):
    """What labs that train a small GPT on a text can be told too.

    Attributes:
        samples: samples in a rank's batch.
        hidden: hidden size of the model, a multiple of 4.
        layers: blocks of the model.
        data: a text file to train on instead of Python's documentation.
    """

    samples: int = flag(4, least=1)
    hidden: int = flag(64, least=4)
    layers: int = flag(4, least=1)
    data: Path | None = None

    def __post_init__(self) -> None:
        self.model  # noqa: B018 (its own rules are checked here, before any rank starts)

    @property
    def model(self) -> GPTConfig:
        """Sizes of the GPT."""
        return GPTConfig(context=64, num_layers=self.layers, num_heads=4, hidden_size=self.hidden)

    def corpus(self) -> ByteCorpus:
        """Return the text, in samples of the model's length."""
        length = self.model.context
        return ByteCorpus(python_documentation() if self.data is None else read_text(self.data, length), length)


def parser_of(settings: type[CommonSettings], prog: str) -> Parser:
    """Return a parser that has one flag for each field."""
    described, hints = attributes_of(settings), get_type_hints(settings)
    parser = Parser(prog=prog, description=(settings.__doc__ or "").splitlines()[0], allow_abbrev=False)
    for entry in fields(settings):
        shown = "" if entry.default is None or hints[entry.name] is bool else f" (default {_text(entry.default)})"
        words = f"{described.get(entry.name, '')}{shown}".replace("%", "%%")
        how = _how_read(entry, hints[entry.name])
        name = f"--{entry.name.replace('_', '-')}"
        parser.add_argument(name, dest=entry.name, default=entry.default, help=words, **how)
    return parser


def parse(settings: type[SettingsT], arguments: Sequence[str] | None, prog: str) -> SettingsT:
    """Read settings from the command line; a user's mistake is one line and exit status 2."""
    parser = parser_of(settings, prog)
    values = vars(parser.parse_args(arguments))
    try:
        return settings(**values)
    except ValueError as error:
        parser.error(str(error))


def what_is_run(settings: CommonSettings) -> str:
    """Write the settings that change what is measured, to compare two runs by."""
    common = {entry.name for entry in fields(CommonSettings)}
    mine = {name: value for name, value in asdict(settings).items() if name not in common}
    return ", ".join(f"{name}={_text(value)}" for name, value in mine.items())


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _how_read(entry: Field[Any], hint: Any) -> dict[str, Any]:
    """Return how a field's text becomes its value, and what its help calls it, as options of `add_argument`."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    kind = get_args(hint)[0] if isinstance(hint, types.UnionType) else hint  # Path | None
    if kind is Path:
        return {"type": Path, "metavar": "DIR" if entry.name == "trace" else "FILE"}
    if kind is str:
        return {"type": str, "metavar": "TEXT"}
    one = number(get_args(kind)[0] if get_origin(kind) is tuple else kind, **entry.metadata)
    if get_origin(kind) is tuple:
        return {"type": lambda text: tuple(one(part) for part in text.split(",")), "metavar": "A,B,..."}
    return {"type": one, "metavar": "SIZE" if entry.metadata.get("size") else "N"}
