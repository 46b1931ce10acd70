"""Models of every kind that people bring: each technique trains them as one process does, or refuses them in words."""

import re

import pytest
import zoo_techniques
from zoo_kinds import KINDS
from zoo_techniques import OURS, one_process, outcomes

from distlab.comm import run

REFUSED = {
    ("FullyShard", "complex parameters"): "view_as_real",
    ("FullyShard", "parameter in a plain list"): "nn.ParameterList",
    ("FullyShard", "blocks under vmap"): r"unit 'blocks.0' is called inside a transform of torch.func",
    ("FullyShard", "branches in threads"): "is called in another thread than its model",
    ("FullyShard", "block of torch.jit"): "compiled by torch.jit.*shard the Python module",
    ("FullyShard", "weights clamped in forward"): "a change of it would be lost",
}


UNEVEN = {  # heads that so many ranks do not divide, cut by tensor parallel
    **dict.fromkeys([(3, "nanoGPT"), (3, "GPT-2"), (3, "Llama"), (3, "ViT, fused qkv")], "which 3 ranks do not divide"),
    (4, "Llama"): "makes 2 heads of 2 features, which 4 ranks do not divide",
}


def refusal(technique, name, num_ranks):
    if technique == "tensor parallel" and (num_ranks, name) in UNEVEN:
        return UNEVEN[num_ranks, name]
    return REFUSED.get((technique.removesuffix(", offload"), name))


@pytest.fixture(scope="module")
def expected():
    return {name: one_process(kind) for name, kind in KINDS.items()}


def check(technique, num_ranks, expected, kinds=KINDS):
    said = run(outcomes, num_ranks, args=(technique, kinds, expected), timeout_s=120)
    wrong = []
    for name in kinds:
        wanted = refusal(technique, name, num_ranks)
        for rank, each in enumerate(said):
            right = re.search(wanted, each[name]) if wanted else re.match("equal|not tried", each[name])
            if not right:
                wrong.append(f"{name} on rank {rank}: {each[name]}")
    assert not wrong, "\n".join(wrong)


def test_a_part_that_gets_no_gradient_in_a_unit_of_others_is_left_alone(expected):
    kinds = {"BERT": KINDS["BERT"]._replace(units=None)}
    for each in run(outcomes, 2, args=("FullyShard", kinds, expected), timeout_s=60):
        assert each["BERT"] == "equal"


def without_the_head(kind):
    got = OURS["DataParallel"](kind)
    return {name: value for name, value in got.items() if name != "head.weight"}


def a_part_is_missing(expected):
    zoo_techniques.OURS["loses a part"] = without_the_head
    return outcomes("loses a part", {"ViT": KINDS["ViT"]}, expected)["ViT"]


def test_a_technique_that_loses_a_parameter_is_not_equal(expected):
    assert run(a_part_is_missing, 2, args=(expected,), timeout_s=60) == ["misses head.weight"] * 2


SOME = (  # tied, two halves, experts, buffers, a recurrent one, parts that share, that are left out, that compute anew
    *("nanoGPT", "T5", "Mixtral", "ViT, fused qkv", "ResNet", "LSTM", "block under two names", "0-dim parameter"),
    *("blocks left out at times", "checkpointed blocks", "gradient penalty", "complex parameters"),
)


@pytest.mark.timeout(180)
@pytest.mark.soak_where(technique=[name for name in OURS if name != "FullyShard"])  # which refuses most
@pytest.mark.parametrize("technique", OURS)
def test_each_model_is_trained_as_by_one_process_or_refused_in_words(technique, expected):
    check(technique, 2, expected)


@pytest.mark.parametrize("technique", ["DataParallel", "ZeRO-2", "pipeline ZB-H1", "tensor parallel"])
def test_some_models_are_trained_as_by_one_process(technique, expected):
    check(technique, 2, expected, {name: KINDS[name] for name in SOME})


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize("technique", [name for name in OURS if not name.startswith("pipeline")])
def test_on_more_ranks(technique, num_ranks, expected):
    check(technique, num_ranks, expected)
