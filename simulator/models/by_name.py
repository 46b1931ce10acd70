"""Models by name: the published sizes of well-known language models, from `models.toml`."""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from importlib import resources
from types import MappingProxyType
from typing import Any

from distlab.plan import Workload
from simulator.models.attention_kernel import with_kernel
from simulator.models.gpt import as_released, gpt_workload
from simulator.models.llama import LatentSizes, LlamaSizes, llama_workload
from simulator.models.parts import Mixture

TRAINED_ON, OF_LLAMA_3 = 4096, 8192  # positions of a sequence
ALIBI = 0  # positions without parameters
_TABLES = tomllib.loads(resources.files(__package__).joinpath("models.toml").read_text(encoding="utf-8"))


def _llama(name: str) -> LlamaSizes:
    row, own = _TABLES["llama"][name], dict(_TABLES["own"].get(name, {}))
    if "latent" in own:
        own["latent"] = LatentSizes(*own["latent"])
    if mixture := own.get("mixture"):
        own["mixture"] = Mixture(**mixture | {"most_groups": tuple(mixture.get("most_groups", ())) or None})
    if pattern := own.get("windows"):  # of the first layers, which repeat
        own["windows"] = tuple(width or None for width in pattern * (row[1] // len(pattern)))
    return LlamaSizes(*row, **own)


LLAMA = MappingProxyType({name: _llama(name) for name in _TABLES["llama"]})
# hidden, layers, heads, sequence, vocabulary; learned positions as released, None: of the sequence, as in the source
GPT = MappingProxyType({name: (*row, None)[:6] for name, row in _TABLES["gpt"].items()})
MODELS = (*LLAMA, *GPT)


def _letters(name: str) -> str:
    """Return what tells names apart: letters and digits, without who made a model and for what it was tuned."""
    return re.sub(r"^meta|instruct|chat|base|hf|v0\.\d|[^a-z0-9]", "", name.rpartition("/")[2].lower())


_KNOWN = {_letters(name): name for name in MODELS} | {_letters(name): same for name, same in _TABLES["same"].items()}


def known_model(name: str) -> str:
    """Return the name here of a model that others write differently, such as meta-llama/Llama-3.1-8B; else the same."""
    return name if name in MODELS else _KNOWN.get(_letters(name), name)


def model_by_name(
    name: str,
    *,
    microbatch_size: int = 1,
    sequence_length: int | None = None,
    bytes_per_parameter: int = 2,
    attention: str | None = None,
    document_length: int | None = None,
) -> Workload:
    """Return the workload of a published model, at its own sequence length unless told.

    `attention` is "plain" or "flash"; unless told plain for GPTs and Llama 2, and flash for what came later.
    `document_length`: see `fuse_attention`.

    Raises:
        ValueError: no model has that name; the text lists those that exist. Or a size is less than 1, or attention is
            neither.
    """
    own: dict[str, Any] = {"microbatch_size": microbatch_size, "bytes_per_parameter": bytes_per_parameter}
    name = known_model(name)
    if name in LLAMA:
        sequence = OF_LLAMA_3 if name.startswith("llama-3") else TRAINED_ON
        length = sequence if sequence_length is None else sequence_length
        plain = llama_workload(LLAMA[name], sequence_length=length, **own, name=name)
    elif name in GPT:
        hidden, layers, heads, sequence, vocabulary, learned = GPT[name]
        length = sequence if sequence_length is None else sequence_length
        sizes_of_gpt = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "vocab_size": vocabulary}
        plain = gpt_workload(**sizes_of_gpt, sequence_length=length, **own)
        plain = plain if learned is None else as_released(plain, learned)
    else:
        near = "".join(f"; did you mean {like}?" for like in get_close_matches(name, MODELS, 1))
        raise ValueError(f"no model {name!r}; choose one of {', '.join(MODELS)}, or pass its config.json{near}")
    kernel = attention or ("plain" if name in GPT or name.startswith("llama-2") else "flash")
    return with_kernel(plain, kernel, document_length)
