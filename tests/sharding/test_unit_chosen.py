"""Units of FullyShard chosen by name, class, pattern or function."""

import pytest
from refused import message
from torch import nn

from distlab.sharding import FullyShard


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "act": nn.ReLU(), "up": nn.Linear(4, 4)}) for _ in range(2)
        )
        self.head = nn.Linear(4, 3)


CHOICES = {
    "class": (nn.LayerNorm, ["stages.0.norm", "stages.1.norm"]),
    "pattern": ("stages.*.up", ["stages.0.up", "stages.1.up"]),
    "pattern over what owns nothing": ("stages.0.*", ["stages.0.norm", "stages.0.up"]),
    "function": (lambda name, module: name.endswith("1.up"), ["stages.1.up"]),
    "one name": ("head", ["head"]),
    "any of these": (["head", nn.Linear, "stages.1.*"], ["head", "stages.0.up", "stages.1.up", "stages.1.norm"]),
}
WRONG = {
    "class": (nn.GELU, "no part that GELU chooses; its lists are stages.0.*, stages.1.*"),
    "pattern": (["head", "layers.*"], "no part that 'layers.*' chooses"),
    "name": (["heads"], "'heads' is not a submodule"),
    "owns nothing": (nn.ReLU, "'stages.0.act' (ReLU) owns no parameters"),
    "never called": (["stages.1"], "'stages.1' (ModuleDict) is never called"),
    "a list": (["stages"], "name its items: 'stages.*'"),
    "no choice": (3, "are chosen by 3"),
}


@pytest.mark.parametrize("kind", CHOICES)
def test_units_are_what_the_choice_names(ranks, kind):
    choice, wanted = CHOICES[kind]
    for names in ranks(2).run(lambda: [unit.name for unit in FullyShard(Stages(), units=choice).units]):
        assert sorted(set(names) - {""}) == sorted(wanted)


@pytest.mark.parametrize("kind", WRONG)
def test_a_choice_of_nothing_is_named_on_every_rank(ranks, kind):
    choice, text = WRONG[kind]
    for said in ranks(2).run(lambda: message(lambda: FullyShard(Stages(), units=choice))):
        assert text in said
