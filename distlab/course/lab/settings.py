"""A lab's settings: one frozen dataclass with few fields of its own, turned into flags with help from its docstring."""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from distlab.blocks.data import ByteCorpus, python_documentation, read_text
from distlab.blocks.models import GPTConfig
from distlab.comm.command import runnable
from distlab.comm.nodes import Nodes
from distlab.faces import attributes_of

MAX_FIELDS = 7  # of a lab's own
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|kB|MB|GB|KiB|MiB|GiB)?")
_UNITS = {None: 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

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
        """Return the nodes that a number of ranks makes.

        Raises:
            ValueError: the ranks do not fill them, or the wire is none.
        """
        return Nodes.for_ranks(Nodes(self.nodes, self.between or None), num_ranks)

    def check_ranks(self, num_ranks: int) -> None:
        """Refuse a number of ranks that these settings do not fit; every rank asks before the lab begins.

        Raises:
            ValueError: saying what to pass instead.
        """


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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {runnable(self.prog)} --help)\n")


def parser_of(settings: type[CommonSettings], prog: str) -> argparse.ArgumentParser:
    """Return a parser that has one flag for each field.

    Raises:
        ValueError: the dataclass has too many fields, or one of a type that no flag can have.
    """
    described = attributes_of(settings)
    own = len(fields(settings)) - len(fields(CommonSettings))
    if own > MAX_FIELDS:
        raise ValueError(f"{settings.__name__} has {own} fields of its own; a lab has at most {MAX_FIELDS}")
    parser = _Parser(prog=prog, description=(settings.__doc__ or "").splitlines()[0], allow_abbrev=False)
    hints = typing.get_type_hints(settings)
    for entry in fields(settings):
        if entry.default is MISSING:
            raise ValueError(f"{settings.__name__}.{entry.name} has no default; a lab runs without any flag")
        _add(parser, entry, hints[entry.name], described.get(entry.name, ""))
    return parser


def parse(settings: type[SettingsT], arguments: Sequence[str] | None, prog: str) -> SettingsT:
    """Read settings from the command line; a user's mistake is one line and exit status 2."""
    parser = parser_of(settings, prog)
    values = vars(parser.parse_args(arguments))
    try:
        return settings(**values)
    except ValueError as error:
        parser.error(str(error))


def as_arguments(settings: CommonSettings) -> list[str]:
    """Return the arguments that make these settings again: only what differs from the defaults."""
    arguments = []
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        if value == entry.default:
            continue
        name = f"--{entry.name.replace('_', '-')}"
        if isinstance(value, bool):
            arguments.append(name if value else f"--no-{name[2:]}")
        else:
            arguments += [name, _text(value)]
    return arguments


def what_is_run(settings: CommonSettings) -> str:
    """Write the settings that change what is measured, to compare two runs by."""
    common = {entry.name for entry in fields(CommonSettings)} - {"device"}
    mine = {name: value for name, value in asdict(settings).items() if name not in common and name != "device"}
    return ", ".join(f"{name}={_text(value)}" for name, value in mine.items())


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _add(parser: argparse.ArgumentParser, entry: Field[Any], hint: Any, text: str) -> None:
    """Add the flag of one field."""
    name = f"--{entry.name.replace('_', '-')}"
    shown = "" if entry.default is None or hint is bool else f" (default {_text(entry.default)})"
    words = f"{text}{shown}".replace("%", "%%")
    options: dict[str, Any] = {"dest": entry.name, "default": entry.default, "help": words}
    if hint is bool:
        parser.add_argument(name, action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(hint) is Literal:
        parser.add_argument(name, choices=typing.get_args(hint), **options)
    else:
        convert, meta = _converter(entry, hint)
        parser.add_argument(name, type=convert, metavar=meta, **options)


def _converter(entry: Field[Any], hint: Any) -> tuple[Callable[[str], Any], str]:
    """Return how a field's text becomes its value, and what its help calls it."""
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        hint = kinds[0] if len(kinds) == 1 else hint
    number = _number(entry, int if entry.metadata.get("size") else hint)
    if hint in (int, float):
        return number, "SIZE" if entry.metadata.get("size") else "N"
    if typing.get_origin(hint) is tuple:
        inner = _number(entry, typing.get_args(hint)[0])
        return (lambda text: tuple(inner(part) for part in text.split(","))), "A,B,..."
    if hint is Path:
        return Path, "DIR" if entry.name == "trace" else "FILE"
    if hint is str:
        return str, "TEXT"
    raise ValueError(f"no flag can be made of {entry.name}: {hint}; use int, float, str, bool, Path, Literal or tuple")


def _number(entry: Field[Any], kind: type) -> Callable[[str], Any]:
    least, most, size = (entry.metadata.get(name) for name in ("least", "most", "size"))
    limits = f"{least:g} or more" if most is None and least is not None else f"{least} to {most}"
    limits = "a number" if least is None and most is None else limits

    def convert(text: str) -> Any:
        try:
            value = _bytes(text) if size else kind(text)
        except ValueError:
            what = "a size such as 65536, 64KiB or 1MB" if size else ("a whole number" if kind is int else "a number")
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}; pass {limits}") from None
        if not (value == value and (least is None or value >= least) and (most is None or value <= most)):
            raise argparse.ArgumentTypeError(f"{text} cannot be used; pass {limits}")
        return value

    return convert


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    return int(float(found[1]) * _UNITS[found[2]])
