import pytest
import torch
from refused import message

from distlab.blocks.models import GPT, GPTConfig
from distlab.rng import generator

SMALL = GPTConfig(vocab_size=61, context=12, num_layers=2, num_heads=3, hidden_size=24)


def test_logits_have_a_score_for_every_token_and_loss_starts_near_uniform():
    model = GPT(SMALL, generator(0, 0, "weights"))
    tokens = torch.randint(61, (5, 12), generator=generator(0, 0, "tokens"))
    logits = model(tokens)
    assert logits.shape == (5, 12, 61)
    others = torch.randint(61, (5, 12), generator=generator(0, 0, "others"))  # a tied model favours its own input
    assert GPT.loss(logits, others).item() == pytest.approx(torch.log(torch.tensor(61.0)).item(), abs=0.1)


def test_a_position_never_sees_what_comes_after_it():
    model = GPT(SMALL, generator(0, 0, "weights"))
    tokens = torch.zeros(1, 12, dtype=torch.long)
    later = tokens.clone()
    later[0, 7:] = 5
    assert torch.equal(model(tokens)[0, :7], model(later)[0, :7])
    assert not torch.equal(model(tokens)[0, 7:], model(later)[0, 7:])


def test_tied_models_have_one_weight_for_both_ends_and_a_generator_draws_the_same_again():
    tied, untied = GPT(SMALL), GPT(GPTConfig(61, 12, 2, 3, 24, tied=False))
    assert tied.output.weight is tied.token_embedding.weight
    assert untied.num_parameters - tied.num_parameters == 61 * 24
    first, second, other = (GPT(SMALL, generator(seed, 0, "weights")) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.output.weight, other.output.weight)


def test_dropout_acts_only_in_training():
    model = GPT(GPTConfig(61, 12, 2, 3, 24, dropout=0.5), generator(0, 0, "weights"))
    tokens = torch.zeros(1, 12, dtype=torch.long)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_sizes_that_make_no_model_are_refused():
    for words, call in (
        ("5 heads do not divide hidden_size 128", lambda: GPTConfig(num_heads=5)),
        ("num_layers is 0", lambda: GPTConfig(num_layers=0)),
        ("vocab_size is 2.5", lambda: GPTConfig(vocab_size=2.5)),
        ("dropout is 1.0", lambda: GPTConfig(dropout=1.0)),
        ("13 tokens do not fit a context of 12", lambda: GPT(SMALL)(torch.zeros(1, 13, dtype=torch.long))),
    ):
        assert words in message(call)
