"""Models by name: the published sizes of well-known language models, from `models.toml`."""

from __future__ import annotations

import tomllib
from importlib import resources
from types import MappingProxyType
from typing import Any

from distlab.plan import Workload
from simulator.models.attention_kernel import with_kernel
from simulator.models.gpt import as_released, gpt_workload
from simulator.models.llama import LatentSizes, LlamaSizes, llama_workload
from simulator.models.parts import Mixture

TRAINED_ON, OF_LLAMA_3 = 4096, 8192  # positions of a sequence
FLASH_FROM_THE_START = ("llama-3", "qwen", "mixtral", "deepseek")  # published with fused attention
ALIBI = 0  # positions without parameters
_TABLES = tomllib.loads(resources.files(__package__).joinpath("models.toml").read_text(encoding="utf-8"))


def _llama(name: str) -> LlamaSizes:
    own: dict[str, Any] = dict(_TABLES["own"].get(name, {}))
    if "latent" in own:
        own["latent"] = LatentSizes(*own["latent"])
    if "mixture" in own:
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in own["mixture"].items()
        }
        own["mixture"] = Mixture(**fields)
    return LlamaSizes(*_TABLES["llama"][name], **own)


LLAMA = MappingProxyType({name: _llama(name) for name in _TABLES["llama"]})
# hidden, layers, heads, sequence, vocabulary; learned positions as released, None: of the sequence, as in the source
GPT = MappingProxyType({name: (*row, None)[:6] for name, row in _TABLES["gpt"].items()})
MODELS = (*LLAMA, *GPT)


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

    `attention` is "plain" or "flash"; unless told flash for models that were published with it (from Llama 3 on).
    `document_length`: see `fuse_attention`.

    Raises:
        ValueError: no model has that name; the text lists those that exist. Or a size is less than 1, or attention is
            neither.
    """
    own: dict[str, Any] = {"microbatch_size": microbatch_size, "bytes_per_parameter": bytes_per_parameter}
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
        raise ValueError(f"no model {name!r}; choose one of {', '.join(MODELS)}")
    kernel = attention or ("flash" if name.startswith(FLASH_FROM_THE_START) else "plain")
    return with_kernel(plain, kernel, document_length)
