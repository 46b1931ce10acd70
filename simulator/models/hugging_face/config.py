"""Workloads from a Hugging Face `config.json`, field by field.

Each family has its names for a few sizes. A field that neither says a size nor is known to leave sizes alone is
refused: what it changes would be missing in the prediction. Windows of attention are taken where a family has them.
`families` has the families that Llama's layers describe; those of GPT are here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from distlab.plan import Workload
from simulator.models.attention_kernel import with_kernel
from simulator.models.gpt import as_released, gpt_workload, with_own_head
from simulator.models.hugging_face.families import FAMILIES as LLAMAS
from simulator.models.hugging_face.fields import COUNT_IT, Fields
from simulator.models.llama import llama_workload

MOST_TOKENS = 4096  # of a sequence, where the caller does not say how long it is
FAMILIES = (*LLAMAS, "gpt2", "opt", "bloom", "gpt_neox")
LONG = ("hidden_size", "num_hidden_layers", "num_attention_heads")
SHORT = {"gpt2": ("n_embd", "n_layer", "n_head"), "bloom": ("n_embed", "n_layer", "n_head")}  # saved with either


def _gpt(fields: Fields, family: str) -> tuple[dict[str, int], int]:
    """Return the sizes of a GPT, and how many positions it learned."""
    names = zip(LONG, SHORT.get(family, LONG), strict=True)
    hidden, layers, heads = (fields.count(long if long in fields.values else short) for long, short in names)
    positions = 0
    if family == "gpt_neox":  # rotary positions, biases, and a head that is not tied
        fields.only(intermediate_size=4 * hidden, attention_bias=True, tie_word_embeddings=False)
    else:
        fields.only(**{"ffn_dim" if family == "opt" else "n_inner": (4 * hidden, None)}, tie_word_embeddings=True)
    if family == "gpt2":
        positions = fields.count("n_positions")
    if family == "opt":
        fields.only(word_embed_proj_dim=hidden, do_layer_norm_before=True, enable_bias=True)
        fields.only(_remove_final_layer_norm=False)
        positions = fields.count("max_position_embeddings") + 2  # two more, for padding
    sizes = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "vocab_size": fields.count("vocab_size")}
    return sizes, positions


def workload_from_config(
    config: Mapping[str, object] | Path | str,
    *,
    microbatch_size: int = 1,
    sequence_length: int | None = None,
    bytes_per_parameter: int = 2,
    attention: str | None = None,
    document_length: int | None = None,
) -> Workload:
    """Return the workload of a Hugging Face configuration: a mapping, or the path of a `config.json`.

    Args:
        config: what `transformers` saves beside a model.
        microbatch_size: samples in a micro-batch.
        sequence_length: tokens; None: the model's most positions, but at most MOST_TOKENS.
        bytes_per_parameter: of parameters.
        attention: "plain" or "flash"; None: plain for GPT-2, OPT, BLOOM and GPT-NeoX, else flash.
        document_length: see `fuse_attention`.

    Raises:
        ValueError: the file is not JSON object; the family or a field is not known, or a value makes no sense.
        OSError: the file cannot be read.
    """
    where = "config" if isinstance(config, Mapping) else str(config)
    values = config if isinstance(config, Mapping) else _read(Path(config))
    fields, family = Fields(values, where), values.get("model_type")
    if family not in FAMILIES:
        _refuse(where, values)
    name = values.get("_name_or_path") or None
    if not (name is None or (isinstance(name, str) and name.isprintable())):
        raise ValueError(f"{where}: _name_or_path is {name!r}; write a text of one line, or leave it out")
    learned, own = 0, {"microbatch_size": microbatch_size, "bytes_per_parameter": bytes_per_parameter}
    if family in LLAMAS:
        try:
            sizes = LLAMAS[family](fields)
        except ValueError as error:  # of one field, or of sizes that do not go together
            text = str(error)
            raise ValueError(text if text.startswith(fields.where) else f"{fields.where}: {text}") from None
    else:
        gpt, learned = _gpt(fields, str(family))
    most = learned or fields.count("max_position_embeddings", MOST_TOKENS)
    chunk = fields.count("attention_chunk_size", 0, least=0)
    fields.finish()
    length = min(most, MOST_TOKENS) if sequence_length is None else sequence_length
    if length > chunk > 0:
        raise ValueError(
            f"{where}: sequences of {length} positions are cut into chunks of attention_chunk_size {chunk}, which is "
            f"not modelled; use at most {chunk}"
        )
    if learned and length > learned:
        raise ValueError(f"{where}: the model has {learned} positions; sequences of {length} do not fit: use fewer")
    if family in LLAMAS:
        workload = llama_workload(sizes, sequence_length=length, **own, name=name)
        return with_kernel(workload, attention or "flash", document_length)
    plain = gpt_workload(**gpt, sequence_length=length, **own)
    released = with_own_head(plain) if family == "gpt_neox" else as_released(plain, learned)
    return with_kernel(released, attention or "plain", document_length)


def _refuse(where: str, values: Mapping[str, object]) -> NoReturn:
    if isinstance(values.get("text_config"), dict):
        raise ValueError(
            f"{where}: a {values.get('model_type')} model has its language model in text_config, next to parts that "
            "are not modelled; write text_config to a file of its own, and pass that"
        )
    raise ValueError(
        f"{where}: model_type is {values.get('model_type')!r}; known are {', '.join(FAMILIES)}; write one of these "
        f"only where the layers are the same, or {COUNT_IT}"
    )


def _read(path: Path) -> Mapping[str, object]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # no text, no JSON, or lists in lists without an end
        raise ValueError(f"{path}: not JSON ({error}); pass the config.json of a model") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object of fields, got {type(values).__name__}; pass a config.json")
    return values
