"""Models by name: the published sizes of well-known language models, each with its source."""

from __future__ import annotations

from types import MappingProxyType

from distlab.plan import Workload
from simulator.models.attention_kernel import ATTENTION_KERNELS, fuse_attention
from simulator.models.gpt import gpt_workload
from simulator.models.llama import LlamaSizes, llama_workload

# hidden, layers, heads, key-value heads, feed-forward, vocabulary; sequence in training
LLAMA = MappingProxyType(
    {
        # Touvron et al. 2023 (2307.09288), Table 1 and section 2.2; widths as in the released configurations
        "llama-2-7b": (LlamaSizes(4096, 32, 32, 32, 11008, 32000), 4096),
        "llama-2-13b": (LlamaSizes(5120, 40, 40, 40, 13824, 32000), 4096),
        "llama-2-70b": (LlamaSizes(8192, 80, 64, 8, 28672, 32000), 4096),
        # Llama team 2024 (2407.21783), Table 3
        "llama-3-8b": (LlamaSizes(4096, 32, 32, 8, 14336, 128256), 8192),
        "llama-3-70b": (LlamaSizes(8192, 80, 64, 8, 28672, 128256), 8192),
        "llama-3-405b": (LlamaSizes(16384, 126, 128, 8, 53248, 128256), 8192),
        # Qwen team 2024 (2412.15115), Table 1; widths as in the released configurations. Biases are left out.
        "qwen-2.5-7b": (LlamaSizes(3584, 28, 28, 4, 18944, 152064), 4096),
        "qwen-2.5-32b": (LlamaSizes(5120, 64, 40, 8, 27648, 152064), 4096),
        "qwen-2.5-72b": (LlamaSizes(8192, 80, 64, 8, 29568, 152064), 4096),
    }
)
FLASH_FROM_THE_START = ("llama-3", "qwen")  # published with fused attention
# hidden, layers, heads, sequence, vocabulary
GPT = MappingProxyType(
    {
        # Radford et al. 2019; the smallest as its released configuration
        "gpt-2-124m": (768, 12, 12, 1024, 50257),
        "gpt-2-1.5b": (1600, 48, 25, 1024, 50257),
        # Zhang et al. 2022 (2205.01068), Table 1
        "opt-6.7b": (4096, 32, 32, 2048, 50272),
        "opt-30b": (7168, 48, 56, 2048, 50272),
        "opt-175b": (12288, 96, 96, 2048, 50272),
        # BigScience 2022 (2211.05100), Table 3; positions are ALiBi's, which have no parameters: 0.02 % are too many
        "bloom-176b": (14336, 70, 112, 2048, 250880),
        # Korthikanti et al. 2022 (2205.05198), Table 3
        "gpt-22b": (6144, 48, 64, 2048, 51200),
        # Brown et al. 2020 (2005.14165), Table 2.1; vocabulary padded as in 2104.04473
        "gpt-3-175b": (12288, 96, 96, 2048, 51200),
        # Korthikanti et al. 2022 (2205.05198), Table 3
        "gpt-530b": (20480, 105, 128, 2048, 51200),
        "gpt-1t": (25600, 128, 160, 2048, 51200),
    }
)
MODELS = (*LLAMA, *GPT)


def model_by_name(
    name: str,
    *,
    microbatch_size: int = 1,
    sequence_length: int | None = None,
    bytes_per_parameter: int = 2,
    attention: str | None = None,
) -> Workload:
    """Return the workload of a published model, at its own sequence length unless told.

    `attention` is "plain" or "flash"; unless told flash for models that were published with it (Llama 3, Qwen).

    Raises:
        ValueError: no model has that name; the text lists those that exist. Or a size is less than 1, or attention is
            neither.
    """
    kernel = attention or ("flash" if name.startswith(FLASH_FROM_THE_START) else "plain")
    if kernel not in ATTENTION_KERNELS:
        raise ValueError(f"attention is {kernel!r}; choose one of {', '.join(ATTENTION_KERNELS)}")
    plain = _plain(name, microbatch_size, sequence_length, bytes_per_parameter)
    return fuse_attention(plain) if kernel == "flash" else plain


def _plain(name: str, microbatch_size: int, sequence_length: int | None, bytes_per_parameter: int) -> Workload:
    if name in LLAMA:
        sizes, sequence = LLAMA[name]
        return llama_workload(
            sizes,
            sequence_length=sequence if sequence_length is None else sequence_length,
            microbatch_size=microbatch_size,
            bytes_per_parameter=bytes_per_parameter,
            name=name,
        )
    if name not in GPT:
        raise ValueError(f"no model {name!r}; choose one of {', '.join(MODELS)}")
    hidden, layers, heads, sequence, vocabulary = GPT[name]
    return gpt_workload(
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        sequence_length=sequence if sequence_length is None else sequence_length,
        vocab_size=vocabulary,
        microbatch_size=microbatch_size,
        bytes_per_parameter=bytes_per_parameter,
    )
