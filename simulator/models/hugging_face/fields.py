"""The fields of a Hugging Face `config.json`, taken one by one, so that fields that no reader took can be refused.

`windows` says how many positions a token of each layer sees. A file says what each layer is (`layer_types`), or its
family has a pattern: all layers, all but each second (Gemma 2, GPT-OSS), fourth (Cohere 2) or sixth (Gemma 3), or those
behind `max_window_layers` (Qwen). Chunks of Llama 4 are not modelled.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import islice
from types import MappingProxyType
from typing import Any

from simulator.models.parts import MOST, shown

# Fields that change neither sizes nor work: numerics, tokens, generation, what a file says of itself.
HARMLESS = frozenset(resources.files(__package__).joinpath("harmless.txt").read_text(encoding="utf-8").split())
COUNT_IT = "count the torch module itself, on the meta device: distlab.measure.workload_from_module"
Windows = tuple[int | None, ...]
TYPES = MappingProxyType(
    {"sliding_attention": True, "local": True, "full_attention": False, "global": False, "chunked_attention": False}
)


class Fields:
    """The fields of a config.json. A reader takes them one by one; `rest` holds the names not taken yet."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.values, self.where, self.rest = values, where, set(values) - HARMLESS
        self.names: dict[str, str] = {}

    def call(self, **names: str) -> Fields:
        """Say which names this family has for fields."""
        self.names |= names
        return self

    def assume(self, **defaults: int) -> Fields:
        """Give values to fields that the file leaves out or sets to null."""
        for name, value in defaults.items():
            if self.values.get(own := self.names.get(name, name)) is None:
                self.values = {**self.values, own: value}
        return self

    def inner(self, name: str) -> Fields:
        """Return the fields of a table inside of this one; there are none where it is missing.

        Raises:
            ValueError: it is not a table.
        """
        self.rest.discard(name)
        table = self.values.get(name) or {}
        if not isinstance(table, dict):
            raise ValueError(f"{self.where}: {name} is {table!r}; write a table of fields")
        return Fields(table, f"{self.where}: {name}")

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number; without a default the field must be there.

        Raises:
            ValueError: it is not there, or no whole number of at least `least`.
        """
        name = self.names.get(name, name)
        self.rest.discard(name)
        value = self.values.get(name)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]  # one number for each layer
        if value is None and default is not None:
            return default
        if name not in self.values:
            raise ValueError(f"{self.where}: {name} is missing; write a whole number of at least {least}")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{self.where}: {name} is {reprlib.repr(value)}; write a whole number of at least {least}")
        if value > MOST:
            raise ValueError(f"{self.where}: {name} is {shown(value)}; write at most {MOST:,}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a field that is true or false.

        Raises:
            ValueError: it is neither.
        """
        self.rest.discard(name)
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {name} is {value!r}; write true or false")
        return value

    def only(self, **modelled: object) -> Fields:
        """Refuse fields with a value that is not modelled; a tuple is several values, the first of them the default.

        Raises:
            ValueError: one has a different value.
        """
        for name, values in modelled.items():
            known = values if isinstance(values, tuple) else (values,)
            self.rest.discard(name)
            if (value := self.values.get(name, known[0])) not in known:
                words = [reprlib.repr(each) if isinstance(each, list) else json.dumps(each) for each in (value, *known)]
                what = f"{self.where}: {name} is {words[0]}; only {' or '.join(words[1:])} is modelled"
                raise ValueError(f"{what}: change it, or {COUNT_IT}")
        return self

    def finish(self) -> None:
        """Refuse fields that were not taken.

        Raises:
            ValueError: there are some.
        """
        if self.rest:
            one = len(self.rest) == 1
            fields, they, change = ("field", "it", "it changes") if one else ("fields", "them", "they change")
            raise ValueError(
                f"{self.where}: unknown {fields} {', '.join(map(repr, sorted(self.rest)))} in a "
                f"{self.values['model_type']} configuration; take {they} out if {change} neither sizes nor work"
            )


def windows(fields: Fields, *, pattern: int = 1, default: int | None = None) -> Windows:
    """Return each layer's window, None where it sees all before it; (): no layer has one.

    Args:
        fields: of the file.
        pattern: one layer in `pattern` has no window; 1: all have one.
        default: the family's window where the file does not say.

    Raises:
        ValueError: a window or a pattern is not a whole number, or layer_types do not fit the layers.
    """
    said = fields.values.get("layer_types")
    if fields.values.get("sliding_window", default) is None:
        return ()
    if said is None:
        pattern = fields.count("sliding_window_pattern", fields.count("_sliding_window_pattern", pattern))
        slides = [pattern == 1 or (layer + 1) % pattern > 0 for layer in range(fields.count("num_hidden_layers"))]
    else:
        slides = _types(fields, "layer_types", said)
    return _of_layers(slides, fields.count("sliding_window", default))


def windows_behind(fields: Fields) -> Windows:
    """Return the windows of Qwen's kind: of layers behind the first max_window_layers, where the file wants any."""
    if not fields.flag("use_sliding_window"):
        return ()
    if fields.values.get("layer_types") is not None:
        return windows(fields, default=4096)
    first, layers = fields.count("max_window_layers", 28, least=0), fields.count("num_hidden_layers")
    if fields.values.get("sliding_window", 4096) is None:
        return ()
    return _of_layers([layer >= first for layer in range(layers)], fields.count("sliding_window", 4096))


def windows_of_neo(fields: Fields) -> Windows:
    """Return the windows of GPT-Neo: `attention_types` says which layers are local, as [[["global", "local"], 12]]."""
    layers = fields.count("num_hidden_layers")
    groups: Any = fields.values.get("attention_types") or [[["global", "local"], layers // 2]]
    try:
        each = (kind for kinds, count in groups for _ in range(count) for kind in kinds)
        said = list(islice(each, layers + 1))  # a count may be huge
    except (TypeError, ValueError):
        raise ValueError(f"{fields.where}: attention_types is {groups!r}; write [[[types], count]]") from None
    return _of_layers(_types(fields, "attention_types", said), fields.count("window_size", 256))


def _types(fields: Fields, name: str, said: object) -> list[bool]:
    """Return which layers have a window, from the type of each."""
    layers = fields.count("num_hidden_layers")
    if not isinstance(said, list) or len(said) != layers:
        count = f"{len(said)} types" if isinstance(said, list) else repr(said)
        raise ValueError(f"{fields.where}: {name} has {count} for {layers} layers; write one for each")
    for each in said:
        if not isinstance(each, str) or each not in TYPES:
            raise ValueError(f"{fields.where}: {name} has {each!r}; only {', '.join(TYPES)} are modelled")
    return [TYPES[each] for each in said]


def _of_layers(slides: Sequence[bool], window: int) -> Windows:
    return tuple(window if each else None for each in slides) if any(slides) else ()
