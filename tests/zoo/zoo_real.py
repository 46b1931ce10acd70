"""Real models, made small from their configurations: nothing is downloaded. They need `make test-zoo`'s environment."""

import torch
import transformers
from zoo_kinds import Kind, of_logits
from zoo_text import LENGTH, VOCAB

from distlab.tensor_parallel import PLANS, SEQUENCE

SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {"intermediate_size": 32, "num_key_value_heads": 2}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the fast kernels have no float64


def causal(name, **sizes):
    """Return a function that makes `nameForCausalLM` from its configuration."""

    def make():
        config = getattr(transformers, f"{name}Config")(**{**SMALL, **sizes}, **EAGER)
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def gpt2():
    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **quiet, **EAGER))


def bert():
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=32, **quiet, **EAGER))


def t5():
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def opt():
    sizes = {"ffn_dim": 32, "word_embed_proj_dim": 16, "max_position_embeddings": 2 * LENGTH}
    return causal("OPT", **sizes, dropout=0.0, attention_dropout=0.0)()


def bloom():
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "n_layer": 2, "n_head": 4}
    config = transformers.BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0, **EAGER)
    return transformers.BloomForCausalLM(config)


def bart():
    sizes = {"vocab_size": VOCAB, "d_model": 16, "max_position_embeddings": 2 * LENGTH}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 32}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes, **ends, dropout=0.0))


def albert():
    """Three layers, which share their parameters."""
    sizes = {**SMALL, "num_hidden_layers": 3, "embedding_size": 8, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**sizes, **quiet, **EAGER))


def own_loss(call, inputs, targets):
    """Return the loss that the model computes itself."""
    return call(input_ids=inputs, labels=targets.clone()).loss


def vision(name, **options):
    """Return a function that makes a model of timm for images of 8 x 8."""

    def make():
        import timm

        return timm.create_model(name, num_classes=5, **options)

    return make


BERT = {
    "bert.encoder.layer.*.attention.self.query": "heads",
    "bert.encoder.layer.*.attention.self.key": "heads",
    "bert.encoder.layer.*.attention.self.value": "heads",
    "bert.encoder.layer.*.attention.output.dense": "row",
    "bert.encoder.layer.*.intermediate.dense": "column",
    "bert.encoder.layer.*.output.dense": "row",
}
T5 = {
    "*.block.*.layer.*.DenseReluDense.wi": "column",
    "*.block.*.layer.*.DenseReluDense.wo": "row",
}
OPT = {
    "model.decoder.layers.*.self_attn.[qkv]_proj": "heads",
    "model.decoder.layers.*.self_attn.out_proj": "row",
    "model.decoder.layers.*.fc1": "column",
    "model.decoder.layers.*.fc2": "row",
}
BLOOM = {"transformer.h.*.mlp.dense_h_to_4h": "column", "transformer.h.*.mlp.dense_4h_to_h": "row"}
KINDS = {
    "transformers Llama": Kind(causal("Llama", **GROUPED), "tokens", own_loss, plan=PLANS["Llama"]),
    "transformers Mixtral": Kind(
        causal("Mixtral", **GROUPED, num_local_experts=4),
        "tokens",
        own_loss,
        unused=True,
        plan={name: style for name, style in PLANS["Llama"].items() if ".mlp." not in name},
    ),
    "transformers GPT-2": Kind(gpt2, "tokens", own_loss, plan=PLANS["GPT-2"]),
    "transformers BERT": Kind(bert, "tokens", own_loss, plan=BERT),
    "transformers T5": Kind(t5, "tokens", own_loss, plan=T5),
    "transformers Qwen3": Kind(
        causal("Qwen3", **GROUPED, head_dim=8),
        "tokens",
        own_loss,
        plan=PLANS["Llama"] | SEQUENCE["Llama"] | {"model.layers.*.self_attn.[qk]_norm": "inside"},
    ),
    "transformers OPT": Kind(opt, "tokens", own_loss, plan=OPT),
    "transformers BLOOM": Kind(bloom, "tokens", own_loss, plan=BLOOM),
    "transformers BART": Kind(bart, "tokens", own_loss),
    "transformers ALBERT": Kind(albert, "tokens", own_loss, unused=True),
}
try:
    import timm  # noqa: F401 (it needs torchvision, which is not built for each torch)
except (ImportError, RuntimeError) as error:
    WITHOUT_TIMM = f"timm cannot be loaded: {error}"
else:
    WITHOUT_TIMM = ""
    VIT = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    KINDS |= {"timm ViT": Kind(vision("vit_tiny_patch16_224", **VIT), "images", of_logits, plan=PLANS["ViT"])}
torch.set_num_threads(1)
