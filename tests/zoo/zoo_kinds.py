"""The zoo: models of every kind that people bring, each with its batches, its loss and how it can be cut in stages."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import zoo_gpt as gpt
import zoo_images as images
import zoo_odd as odd
import zoo_text as text
from torch import nn

from distlab.rng import generator
from distlab.tensor_parallel import PLANS

BATCH = 12  # for 1, 2, 3 and 4 ranks
TIED = "its head is tied to its embedding, in a different stage"
OWN_LOSS = "its loss runs backward"
SHOWS = "a stage of it shows what it hides"
EACH_FORWARD = "it changes at each forward, and each micro-batch is one"
BATCH_NORM = "BatchNorm sees micro-batches"


class Kind(NamedTuple):
    """A model and its task.

    Attributes:
        make: builds the module; called after torch.manual_seed.
        reads: "tokens" or "images".
        loss: of the callable model, inputs and targets; the mean over samples.
        apart: whether samples do not see each other: then every rank takes its part of the batch, else all take all.
        stages: cuts a model in two stages for a pipeline; None where it cannot be, and `alone` says why.
        unused: whether some parameters get no gradient.
        alone: why there is no pipeline of it that equals one process.
        plan: how tensor parallelism cuts it; None where it has no layers of kinds that can be cut.
        units: of FullyShard; None takes its own. A module that gets no gradient needs a unit.
        close: by how much its values may differ from one process'.
    """

    make: Callable[[], nn.Module]
    reads: str
    loss: Callable[..., torch.Tensor]
    apart: bool = True
    stages: Callable[[nn.Module], list[nn.Module]] | None = None
    unused: bool = False
    alone: str = ""
    plan: dict[str, str] | None = None
    units: tuple[str, ...] | None = None
    close: float = 1e-9

    def batch(self, step, rank=0, num_ranks=1):
        """Return a rank's part of a step's batch, or all of it where samples see each other."""
        draw = generator(step, 0, "zoo")
        if self.reads == "tokens":
            tokens = torch.randint(text.VOCAB, (BATCH, text.LENGTH + 1), generator=draw)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
        else:
            inputs = torch.randn(BATCH, 3, images.SIDE, images.SIDE, dtype=torch.float64, generator=draw)
            targets = torch.randint(images.CLASSES, (BATCH,), generator=draw)
        if not self.apart:
            return inputs, targets
        return inputs.chunk(num_ranks)[rank], targets.chunk(num_ranks)[rank]

    def build(self, seed=0):
        """Return the model in float64 with values drawn from a seed."""
        torch.manual_seed(seed)
        return self.make().double()


def of_logits(call, inputs, targets):
    return F.cross_entropy(call(inputs).flatten(0, -2), targets.flatten())


def own_loss_second(call, inputs, targets):
    return call(inputs, targets)[1]


def own_loss_by_name(call, inputs, targets):
    return call(input_ids=inputs, labels=targets).loss


class Front(nn.Module):
    """All of a model but its head: the first stage of a pipeline of two."""

    def __init__(self, model, head, logits):
        super().__init__()
        setattr(model, head, nn.Identity())
        self.model, self.logits = model, logits

    def forward(self, inputs):
        return self.logits(self.model(inputs))


def cut_before(head, logits=lambda output: output):
    """Return a function that cuts a model in two stages: all of it but the head, and the head."""

    def cut(model):
        last = getattr(model, head)
        return [Front(model, head, logits), last]

    return cut


LLAMA = {
    "embed_tokens": "vocabulary",
    "layers.*.[qkv]": "heads",
    "layers.*.o": "row",
    "layers.*.gate": "column",
    "layers.*.up": "column",
    "layers.*.down": "row",
    "lm_head": "vocabulary",
}
BERT = {"words": "vocabulary", "decoder": "vocabulary", "layer.*.linear1": "column", "layer.*.linear2": "row"}
T5 = {f"{part}.*.{one}": how for part in ("encoder", "decoder") for one, how in (("wi", "column"), ("wo", "row"))}
MIXTRAL = {"embed": "vocabulary", "head": "vocabulary"}
POOLER = {"unused": True, "units": ("layer.0", "layer.1", "pooler")}
EXPERTS = {"unused": True, "units": ("gates.0", "gates.1")}  # which experts run, each rank's tokens say
FUSED = PLANS["ViT"] | {"blocks.*.attn.[qk]_norm": "inside", "blocks.*.attn": "inside"}

KINDS = {
    "nanoGPT": Kind(gpt.TiedGPT, "tokens", own_loss_second, alone=TIED, plan=PLANS["nanoGPT"]),
    "GPT-2": Kind(gpt.conv1d_gpt, "tokens", own_loss_second, alone=TIED, plan=PLANS["GPT-2"]),
    "Llama": Kind(
        text.Llama, "tokens", own_loss_by_name, stages=cut_before("lm_head", lambda output: output.logits), plan=LLAMA
    ),
    "BERT": Kind(text.Bert, "tokens", of_logits, stages=cut_before("decoder"), plan=BERT, **POOLER),
    "T5": Kind(text.T5, "tokens", of_logits, alone=TIED, plan=T5),
    "Mixtral": Kind(text.Mixture, "tokens", of_logits, stages=cut_before("head"), plan=MIXTRAL, **EXPERTS),
    "ViT, fused qkv": Kind(images.ViT, "images", of_logits, stages=cut_before("head"), plan=FUSED),
    "Swin": Kind(images.Swin, "images", of_logits, stages=cut_before("head")),
    "ResNet": Kind(images.ResNet, "images", of_logits, apart=False, alone=BATCH_NORM),
    "LSTM": Kind(images.Recurrent, "images", of_logits, stages=cut_before("fc")),
    "LoRA": Kind(odd.Lora, "images", of_logits, stages=cut_before("head")),
}
OUTSIDE = {  # what some technique refuses, and the first words in which it does so: below it is for FullyShard alone
    "complex parameters": Kind(odd.Complex, "images", of_logits, stages=cut_before("head")),
    "hook on a parameter's gradient": Kind(odd.ParameterHooks, "images", of_logits, stages=cut_before("head")),
    "block under vmap": Kind(odd.Mapped, "images", of_logits, stages=cut_before("head")),
    "two parameters in one memory": Kind(odd.Overlap, "images", of_logits, stages=cut_before("head")),
    "layer made in forward": Kind(odd.MadeInForward, "images", of_logits, alone=EACH_FORWARD),
    "two backward passes": Kind(odd.Odd, "images", odd.two_backwards, alone=OWN_LOSS),
    "parameters that the model hides": Kind(odd.Hides, "images", of_logits, alone=SHOWS),
}
