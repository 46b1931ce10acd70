"""Real models of Hugging Face, made small from their configurations: trained as by one process; `make test-zoo`.

Nothing is downloaded.
"""

import pytest

transformers = pytest.importorskip("transformers", reason="needs transformers: make test-zoo")

from test_zoo import check  # noqa: E402
from zoo_kinds import Kind  # noqa: E402
from zoo_techniques import OURS, one_process  # noqa: E402
from zoo_text import LENGTH, VOCAB  # noqa: E402

from distlab.tensor_parallel import PLANS  # noqa: E402

SMALL = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {"intermediate_size": 32, "num_key_value_heads": 2}
GPT2 = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MASKED = SMALL | {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # the fast kernels have no float64


def made(name, model, sizes):
    """Return a function that makes a model from its configuration."""
    return lambda: getattr(transformers, model)(getattr(transformers, f"{name}Config")(**sizes, **EAGER))


def own_loss(call, inputs, targets):
    """Return the loss that the model computes itself."""
    return call(input_ids=inputs, labels=targets.clone()).loss


LAYER = "bert.encoder.layer.*"
BERT = {f"{LAYER}.attention.self.{one}": "heads" for one in ("query", "key", "value")}
BERT |= {f"{LAYER}.attention.output.dense": "row", f"{LAYER}.intermediate.dense": "column"}
BERT |= {f"{LAYER}.output.dense": "row"}
ATTENTION = {name: style for name, style in PLANS["Llama"].items() if ".mlp." not in name}
MIXTRAL = SMALL | GROUPED | {"num_local_experts": 4}
KINDS = {
    "Llama": Kind(made("Llama", "LlamaForCausalLM", SMALL | GROUPED), "tokens", own_loss, plan=PLANS["Llama"]),
    "Mixtral": Kind(made("Mixtral", "MixtralForCausalLM", MIXTRAL), "tokens", own_loss, unused=True, plan=ATTENTION),
    "GPT-2": Kind(made("GPT2", "GPT2LMHeadModel", GPT2), "tokens", own_loss, plan=PLANS["GPT-2"]),
    "BERT": Kind(made("Bert", "BertForMaskedLM", MASKED), "tokens", own_loss, plan=BERT),
    "T5": Kind(made("T5", "T5ForConditionalGeneration", T5), "tokens", own_loss),  # its forward takes more than tokens
}


@pytest.fixture(scope="module")
def expected():
    return {name: one_process(kind) for name, kind in KINDS.items()}


@pytest.mark.parametrize("technique", [name for name in OURS if not name.startswith("pipeline")])
def test_each_model_is_trained_as_by_one_process(technique, expected, ranks):
    check(ranks, technique, 2, expected, KINDS)
