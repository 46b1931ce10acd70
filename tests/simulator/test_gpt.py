import pytest

from simulator import gpt_num_parameters, gpt_step_flops, gpt_workload

SIZES = {"hidden_size": 96, "num_layers": 5, "sequence_length": 40, "vocab_size": 311}


def workload(**changes):
    return gpt_workload(**({**SIZES, "num_heads": 4, "microbatch_size": 3} | changes))


def test_parameters_are_the_formula():
    h, layers, s, v = 96, 5, 40, 311
    formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))
    assert workload().num_parameters == gpt_num_parameters(**SIZES) == pytest.approx(formula, rel=1e-12)


def test_gpt3_has_175_billion():
    # 2104.04473, section 3: 96 layers, hidden 12288, sequence 2048, vocabulary 51200.
    num = gpt_num_parameters(hidden_size=12288, num_layers=96, sequence_length=2048, vocab_size=51200)
    assert num / 1e9 == pytest.approx(174.6, abs=0.1)


def test_step_flops_are_the_formula():
    layers = workload().layers
    forward = sum(layer.forward.matmul_flops for layer in layers)
    backward = sum((layer.input_gradient + layer.weight_gradient).matmul_flops for layer in layers)
    assert backward == 2 * forward
    assert forward + backward == pytest.approx(gpt_step_flops(**SIZES, batch_size=3), rel=1e-12)


def test_a_layer_is_24bsh2_and_4bs2h():
    batch, s, h = 3, 40, 96
    assert workload().layers[1].forward.matmul_flops == 24 * batch * s * h * h + 4 * batch * s * s * h


def test_recomputing_adds_a_forward_of_the_layers_or_only_the_attention():
    whole = gpt_step_flops(**SIZES, batch_size=3, recompute="full")
    none = gpt_step_flops(**SIZES, batch_size=3)
    layer = workload().layers[1].forward.matmul_flops
    assert whole - none == pytest.approx(5 * layer)
    assert gpt_step_flops(**SIZES, batch_size=3, recompute="selective") - none == pytest.approx(5 * 4 * 3 * 40**2 * 96)


def test_activations_of_a_layer_are_those_of_the_memory_formula():
    sbh = 40 * 3 * 96
    assert workload().layers[1].activation_bytes == round(sbh * (34 + 5 * 4 * 40 / 96))


def test_the_head_has_flops_and_no_parameters_of_its_own():
    head = workload().layers[-1]
    assert head.num_parameters == 0
    assert head.forward.matmul_flops == 2 * 3 * 40 * 96 * 311


@pytest.mark.parametrize("changes", [{"hidden_size": 0}, {"num_layers": -1}, {"microbatch_size": 0}, {"num_heads": 5}])
def test_senseless_sizes_are_refused(changes):
    with pytest.raises(ValueError, match="GPT: "):
        workload(**changes)


def test_an_unknown_recompute_is_refused():
    with pytest.raises(ValueError, match="choose none, selective or full"):
        gpt_step_flops(**SIZES, batch_size=1, recompute="sometimes")
