"""Models by name: the published sizes of well-known language models, each with its source."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import Any

from distlab.plan import Workload
from simulator.models.attention_kernel import with_kernel
from simulator.models.gpt import as_released, gpt_workload
from simulator.models.llama import LatentSizes, LlamaSizes, llama_workload
from simulator.models.mixture_of_experts import Mixture

_qwen_2_5 = partial(LlamaSizes, attention_biases=True)
_qwen_3 = partial(LlamaSizes, head_size=128, head_norms=True)
_V3 = Mixture(256, 8, expert_size=2048, shared_size=2048, dense_layers=3, router_bias=True, most_groups=(8, 4))
# hidden, layers, heads, key-value heads, feed-forward, vocabulary
LLAMA = MappingProxyType(
    {
        # Touvron et al. 2023 (2307.09288), Table 1 and section 2.2; widths as in the released configurations
        "llama-2-7b": LlamaSizes(4096, 32, 32, 32, 11008, 32000),
        "llama-2-13b": LlamaSizes(5120, 40, 40, 40, 13824, 32000),
        "llama-2-70b": LlamaSizes(8192, 80, 64, 8, 28672, 32000),
        # Llama team 2024 (2407.21783), Table 3
        "llama-3-8b": LlamaSizes(4096, 32, 32, 8, 14336, 128256),
        "llama-3-70b": LlamaSizes(8192, 80, 64, 8, 28672, 128256),
        "llama-3-405b": LlamaSizes(16384, 126, 128, 8, 53248, 128256),
        # Qwen team 2024 (2412.15115), Table 1; widths as in the released configurations
        "qwen-2.5-0.5b": _qwen_2_5(896, 24, 14, 2, 4864, 151936, ties_embedding=True),
        "qwen-2.5-1.5b": _qwen_2_5(1536, 28, 12, 2, 8960, 151936, ties_embedding=True),
        "qwen-2.5-3b": _qwen_2_5(2048, 36, 16, 2, 11008, 151936, ties_embedding=True),
        "qwen-2.5-7b": _qwen_2_5(3584, 28, 28, 4, 18944, 152064),
        "qwen-2.5-14b": _qwen_2_5(5120, 48, 40, 8, 13824, 152064),
        "qwen-2.5-32b": _qwen_2_5(5120, 64, 40, 8, 27648, 152064),
        "qwen-2.5-72b": _qwen_2_5(8192, 80, 64, 8, 29568, 152064),
        # Qwen team 2025 (2505.09388), Tables 1 and 2; widths as in the released configurations
        "qwen-3-8b": _qwen_3(4096, 36, 32, 8, 12288, 151936),
        "qwen-3-32b": _qwen_3(5120, 64, 64, 8, 25600, 151936),
        "qwen-3-30b-a3b": _qwen_3(2048, 48, 32, 4, 6144, 151936, mixture=Mixture(128, 8, expert_size=768)),
        "qwen-3-235b-a22b": _qwen_3(4096, 94, 64, 4, 12288, 151936, mixture=Mixture(128, 8, expert_size=1536)),
        # Jiang et al. 2024 (2401.04088), Table 1; the larger one as in its released configuration
        "mixtral-8x7b": LlamaSizes(4096, 32, 32, 8, 14336, 32000, mixture=Mixture(8, 2)),
        "mixtral-8x22b": LlamaSizes(6144, 56, 48, 8, 16384, 32000, mixture=Mixture(8, 2)),
        # DeepSeek-AI 2024 (2412.19437), section 4.2, without the layer that predicts a second token
        "deepseek-v3": LlamaSizes(
            7168, 61, 128, 128, 18432, 129280, latent=LatentSizes(512, 1536, 128, 64, 128), mixture=_V3
        ),
    }
)
TRAINED_ON, OF_LLAMA_3 = 4096, 8192  # positions of a sequence
FLASH_FROM_THE_START = ("llama-3", "qwen", "mixtral", "deepseek")  # published with fused attention
ALIBI = 0  # positions without parameters
# hidden, layers, heads, sequence, vocabulary; learned positions as released, None: of the sequence, as in the source
GPT = MappingProxyType(
    {
        # Radford et al. 2019; the smallest as its released configuration
        "gpt-2-124m": (768, 12, 12, 1024, 50257, 1024),
        "gpt-2-1.5b": (1600, 48, 25, 1024, 50257, 1024),
        # Zhang et al. 2022 (2205.01068), Table 1; two positions more for padding, as released
        "opt-125m": (768, 12, 12, 2048, 50272, 2050),
        "opt-1.3b": (2048, 24, 32, 2048, 50272, 2050),
        "opt-6.7b": (4096, 32, 32, 2048, 50272, 2050),
        "opt-13b": (5120, 40, 40, 2048, 50272, 2050),
        "opt-30b": (7168, 48, 56, 2048, 50272, 2050),
        "opt-66b": (9216, 64, 72, 2048, 50272, 2050),
        "opt-175b": (12288, 96, 96, 2048, 50272, 2050),
        # BigScience 2022 (2211.05100), Table 3
        "bloom-560m": (1024, 24, 16, 2048, 250880, ALIBI),
        "bloom-7.1b": (4096, 30, 32, 2048, 250880, ALIBI),
        "bloom-176b": (14336, 70, 112, 2048, 250880, ALIBI),
        # Korthikanti et al. 2022 (2205.05198), Table 3
        "gpt-22b": (6144, 48, 64, 2048, 51200, None),
        # Brown et al. 2020 (2005.14165), Table 2.1; vocabulary padded as in 2104.04473
        "gpt-3-175b": (12288, 96, 96, 2048, 51200, None),
        # Korthikanti et al. 2022 (2205.05198), Table 3
        "gpt-530b": (20480, 105, 128, 2048, 51200, None),
        "gpt-1t": (25600, 128, 160, 2048, 51200, None),
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

    `attention` is "plain" or "flash"; unless told flash for models that were published with it (from Llama 3 on).

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
    return with_kernel(plain, attention or ("flash" if name.startswith(FLASH_FROM_THE_START) else "plain"))
