"""A model in a few words: a name, a `config.json`, or sizes; what command lines and plan files say of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from distlab.plan import Workload
from distlab.plan.require import chosen
from simulator.hardware.presets import given
from simulator.models.adapters import LORA_MODULES, WEIGHTS, with_adapters
from simulator.models.attention_kernel import with_kernel
from simulator.models.by_name import known_model, model_by_name
from simulator.models.gpt import gpt_workload, mix_experts
from simulator.models.hugging_face.config import workload_from_config
from simulator.models.llama import LlamaSizes, llama_workload
from simulator.models.optimizers import check_optimizer, with_optimizer
from simulator.models.parts import Mixture, chunk_loss, load_experts, require_sizes

OF_TRAINING = ("optimizer", "lora_rank", "lora_modules", "weights")
LOADS = ("capacity_factor", "expert_load")
OF_ANY = ("sequence_length", "microbatch_size", "attention", "document_length", "loss_chunks", *OF_TRAINING, *LOADS)
MOST_RANK = 4096
# What makes sizes those of a Llama; without any of them they are a GPT's.
OF_LLAMA = (
    *("feed_forward_size", "num_key_value_heads", "head_size", "is_gated", "ties_embedding"),
    *("head_norms", "sliding_window"),
)
COUNTS = (
    *("num_experts", "top_k", "microbatch_size", "loss_chunks"),
    *("document_length", "sliding_window", "full_attention_every"),
)


@dataclass(frozen=True)
class ModelDescription:
    """A model in a few words, from which its workload is made.

    Either `model`, or `config`, or sizes. Sizes alone are a GPT's, of 24 layers with hidden size 2,048 unless told.
    With one of OF_LLAMA they are those of a decoder like Llama.

    Attributes:
        model: a published model, such as llama-2-7b, in place of sizes.
        config: a Hugging Face `config.json`, in place of sizes.
        hidden_size: hidden size h; None: the model's, or 2048.
        num_layers: blocks; None: the model's, or 24.
        num_heads: heads of attention; None: the model's, or 16.
        vocab_size: tokens of the vocabulary; None: the model's, or 51200.
        feed_forward_size: width of the feed-forward part of a model like Llama; None: 4 h.
        num_key_value_heads: heads of keys and values of a model like Llama; None: as many as heads.
        head_size: elements of a head of a model like Llama; None: h over heads.
        is_gated: the gate in the feed-forward part of a model like Llama (three products with it, two without).
        ties_embedding: the head of a model like Llama uses the embedding's parameters.
        head_norms: queries and keys of a model like Llama are normed head by head (QK norm).
        sliding_window: positions that a token of a model like Llama sees, itself and those before it; None: all.
        full_attention_every: with it, one layer in so many sees all positions, the last of each so many; None: none.
        num_experts: experts in each block; 1: no mixture.
        top_k: experts that a token goes to.
        expert_size: width of an expert of a model like Llama; None: as of the feed-forward part.
        capacity_factor: rows that an expert has room for, over an even load: what is beyond is dropped, and the rest of
            the room padded (Megatron-LM's moe_pad_expert_input_to_capacity); None: nothing is dropped.
        expert_load: rows of the fullest expert rank, over an even load, where nothing is dropped. Published steps of
            NVIDIA force 1 (moe_router_force_load_balancing).
        sequence_length: tokens in a sequence; None: the model's, or 2048.
        microbatch_size: samples in a micro-batch.
        attention: plain, or flash, which keeps no scores; None: as the model was published, or plain.
        document_length: of documents packed into a sequence, which attend to themselves alone: the mean of the squares
            over the mean; None: a document fills it.
        loss_chunks: parts of the positions of which the loss makes logits one after the other.
        optimizer: of what is trained: adamw, sgd, sgd-momentum or muon. With -32bit, -16bit or -8bit behind it states
            are so wide; else as wide as what is updated.
        lora_rank: rank of LoRA's adapters, which alone are trained; None: all parameters are.
        lora_modules: products of a block that have adapters; one of LORA_MODULES.
        weights: type of the frozen weights beside adapters; one of WEIGHTS. QLoRA's is nf4.
    """

    model: str | None = None
    config: str | None = None
    hidden_size: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    vocab_size: int | None = None
    feed_forward_size: int | None = None
    num_key_value_heads: int | None = None
    head_size: int | None = None
    is_gated: bool | None = None
    ties_embedding: bool | None = None
    head_norms: bool | None = None
    sliding_window: int | None = None
    full_attention_every: int | None = None
    num_experts: int = 1
    top_k: int = 1
    expert_size: int | None = None
    capacity_factor: float | None = None
    expert_load: float = 1.0
    sequence_length: int | None = None
    microbatch_size: int = 1
    attention: str | None = None
    document_length: int | None = None
    loss_chunks: int = 1
    optimizer: str = "adamw"
    lora_rank: int | None = None
    lora_modules: str = "all-linear"
    weights: str = "bfloat16"

    def __post_init__(self) -> None:
        require_sizes("sizes", **{name: getattr(self, name) for name in COUNTS})
        object.__setattr__(self, "model", self.model and known_model(self.model))
        if (every := self.full_attention_every) and not self.sliding_window:
            raise ValueError(f"full_attention_every is {every} and no layer has a window; add sliding_window")
        self._check_training()
        if self.capacity_factor is not None and self.expert_load != 1:
            raise ValueError("capacity_factor and expert_load are given, and a full room is the load; leave one out")
        if not (self.expert_load >= 1 and (self.capacity_factor is None or self.capacity_factor > 0)):
            name = "capacity_factor" if self.expert_load >= 1 else "expert_load"
            raise ValueError(f"{name} is {getattr(self, name)}; write 1 for an even load, or more, such as 1.25")
        for name in ("model", "config"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is empty; name one, or leave {name} out and give sizes")
        source = "model" if self.model else "config"
        if self.model and self.config:
            raise ValueError(f"model {self.model} and config {self.config} are two models; leave one out")
        if self.model or self.config:
            own = [name for name in given(self) if name not in (source, *OF_ANY)]
            if own:
                raise ValueError(f"{source} {getattr(self, source)} has its own sizes; leave out {', '.join(own)}")
        if self.expert_size is not None and not self._is_mixed:
            raise ValueError(f"expert_size is {self.expert_size} and there is no mixture of experts; add num_experts")
        if self.expert_size is not None and all(getattr(self, name) is None for name in OF_LLAMA):
            raise ValueError(
                f"expert_size is {self.expert_size} and a GPT's experts are as wide as its feed-forward part; leave it "
                "out, or make a Llama of it: add feed_forward_size"
            )

    def _check_training(self) -> None:
        check_optimizer(self.optimizer)
        chosen("lora_modules", self.lora_modules, LORA_MODULES)
        chosen("weights", self.weights, WEIGHTS)
        said = {name: value for name, value in given(self).items() if name in ("lora_modules", "weights")}
        for name, value in said.items() if self.lora_rank is None else ():
            why = f"{name} is {value!r} and there are no adapters beside frozen weights: all parameters are trained"
            raise ValueError(f"{why}, as the plan's precision says; add lora_rank, such as 16, or leave {name} out")
        if self.lora_rank is not None and not 1 <= self.lora_rank <= MOST_RANK:
            text = f"lora_rank is {self.lora_rank}; write a whole number from 1 to {MOST_RANK:,}"
            raise ValueError(f"{text}, or leave it out to train all parameters")

    def with_microbatch(self, samples: int) -> ModelDescription:
        """Return the same model with a different number of samples in a micro-batch."""
        return replace(self, microbatch_size=samples)

    def workload(self) -> Workload:
        """Return the workload.

        Raises:
            ValueError: the model does not exist, a configuration is wrong, or sizes make no sense together.
            OSError: the configuration cannot be read.
        """
        whole, load = self._model(), self.capacity_factor or self.expert_load
        whole = load_experts(whole, load) if load != 1 else whole
        whole = chunk_loss(whole, self.loss_chunks) if self.loss_chunks > 1 else whole
        if self.lora_rank is not None:
            whole = with_adapters(whole, self.lora_rank, modules=self.lora_modules, weights=self.weights)
        return whole if (self.optimizer, self.lora_rank) == ("adamw", None) else with_optimizer(whole, self.optimizer)

    def _model(self) -> Workload:
        own: dict[str, Any] = {name: getattr(self, name) for name in OF_ANY[1:4]}
        if self.model:
            return model_by_name(self.model, sequence_length=self.sequence_length, **own)
        if self.config:
            return workload_from_config(self.config, sequence_length=self.sequence_length, **own)
        return with_kernel(self._of_sizes(), self.attention or "plain", self.document_length)

    def gpt_sizes(self) -> dict[str, int]:
        """Return hidden size, layers, heads and vocabulary of a model that is described by its sizes."""
        sizes: dict[str, int] = {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 51200}
        return sizes | {name: value for name in sizes if (value := getattr(self, name)) is not None}

    def llama_sizes(self) -> LlamaSizes | None:
        """Return the sizes of a Llama that is described by its sizes; None where they are a GPT's."""
        if all(getattr(self, name) is None for name in OF_LLAMA):
            return None
        hidden, layers, heads, vocabulary = self.gpt_sizes().values()
        sizes = (hidden, layers, heads, self.num_key_value_heads or heads, self.feed_forward_size or 4 * hidden)
        mixture = Mixture(self.num_experts, self.top_k, expert_size=self.expert_size) if self._is_mixed else None
        own: dict[str, Any] = {"ties_embedding": bool(self.ties_embedding), "is_gated": self.is_gated is not False}
        own["head_norms"] = bool(self.head_norms)
        if self.sliding_window:
            every = self.full_attention_every or layers + 1
            own["windows"] = tuple(None if (at + 1) % every == 0 else self.sliding_window for at in range(layers))
        return LlamaSizes(*sizes, vocabulary, **own, head_size=self.head_size, mixture=mixture)

    @property
    def _is_mixed(self) -> bool:
        return self.num_experts > 1 or self.top_k > 1

    def _of_sizes(self) -> Workload:
        length = 2048 if self.sequence_length is None else self.sequence_length
        lengths: dict[str, Any] = {"sequence_length": length, "microbatch_size": self.microbatch_size}
        llama = self.llama_sizes()
        if llama is not None:
            return llama_workload(llama, **lengths)
        plain = gpt_workload(**self.gpt_sizes(), **lengths)
        return mix_experts(plain, self.num_experts, top_k=self.top_k) if self._is_mixed else plain
