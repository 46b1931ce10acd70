"""Windows of attention from a Hugging Face configuration: how many positions a token of each layer sees.

A file says what each layer is (`layer_types`), or its family has a pattern: all layers, all but each second (Gemma 2,
GPT-OSS), fourth (Cohere 2) or sixth (Gemma 3), or those behind `max_window_layers` (Qwen). Chunks of Llama 4 are not
modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any

from simulator.models.hugging_face.fields import Fields

Windows = tuple[int | None, ...]
TYPES = MappingProxyType(
    {"sliding_attention": True, "local": True, "full_attention": False, "global": False, "chunked_attention": False}
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
        return _of_layers(slides, fields.count("sliding_window", default))
    return _of_layers(_types(fields, "layer_types", said), fields.count("sliding_window", default))


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
