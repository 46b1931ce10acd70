"""Models of every kind that people bring: each technique trains them as one process does, or refuses them in words."""

import re

import pytest
from zoo_kinds import KINDS, OUTSIDE
from zoo_supported import FILE, row
from zoo_techniques import OURS, one_process, outcomes

OVERLAP = "lie in the same memory, and are two parameters"
TWICE = r"got a second gradient before synchronize\(\).*no_sync"
LATE = "late.weight was added after"
HIDDEN = "leaves out embed.weight and 1 more, which would train in shards and not in one process"
REFUSED = {
    ("FullyShard", "complex parameters"): "view_as_real",
    ("FullyShard", "hook on a parameter's gradient"): "has a hook on its gradient, and a flat shard has the gradients",
    ("FullyShard", "block under vmap"): "unit 'blocks.0' is called in a transform of torch.func",
    **{(technique, "two parameters in one memory"): OVERLAP for technique in ("ZeRO-1", "ZeRO-2", "FullyShard")},
    **{(technique, "layer made in forward"): LATE for technique in ("DataParallel", "ZeRO-1", "ZeRO-2", "FullyShard")},
    **{(technique, "two backward passes"): TWICE for technique in ("DataParallel", "ZeRO-1", "ZeRO-2")},
    **{(technique, "parameters that the model hides"): HIDDEN for technique in ("ZeRO-1", "ZeRO-2", "FullyShard")},
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
    return {name: one_process(kind) for name, kind in (KINDS | OUTSIDE).items()}


def check(ranks, technique, num_ranks, expected, kinds):
    """Compare with one process; return what the first rank said."""
    said = ranks(num_ranks).run(outcomes, technique, kinds, expected)
    wrong = []
    for name in kinds:
        wanted = refusal(technique, name, num_ranks)
        for rank, each in enumerate(said):
            right = re.search(wanted, each[name]) if wanted else re.match("equal|not tried", each[name])
            if not right:
                wrong.append(f"{name} on rank {rank}: {each[name]}")
    assert not wrong, "\n".join(wrong)
    return said[0]


@pytest.mark.soak_where(technique=("ZeRO-1", "FullyShard, offload", "pipeline 1F1B"))
@pytest.mark.parametrize("technique", OURS)
def test_each_model_is_trained_as_by_one_process_or_refused_and_the_page_says_so(technique, expected, ranks):
    said = check(ranks, technique, 2, expected, KINDS | OUTSIDE)
    lines, column = FILE.read_text().splitlines(), list(OURS).index(technique)
    for name, outcome in said.items():
        (line,) = [one for one in lines if one.startswith(f"| {name} |")]
        assert line.split(" | ")[column + 1].removesuffix(" |") == row(name, [outcome]).split(" | ")[1].removesuffix(
            " |"
        )


def test_a_part_that_gets_no_gradient_in_a_unit_of_others_is_left_alone(expected, ranks):
    check(ranks, "FullyShard", 2, expected, {"BERT": KINDS["BERT"]._replace(units=None)})


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize("technique", [name for name in OURS if not name.startswith("pipeline")])
def test_on_more_ranks(technique, num_ranks, expected, ranks):
    check(ranks, technique, num_ranks, expected, KINDS)
