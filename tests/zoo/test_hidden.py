"""Models that show an optimizer only some of their parameters: the others begin alike on all ranks, or are refused."""

import re

import pytest
import torch.distributed as dist
import zoo_techniques as zoo
from torch.nn.parallel import DistributedDataParallel
from zoo_kinds import Kind, cut_before, of_logits
from zoo_odd import Odd

from distlab.checkpoint.parts import sums_of
from distlab.comm import run
from distlab.pipeline import find_tied
from distlab.sharding import FullyShard, draw_weights

MLP = {"blocks.*.0": "column", "blocks.*.2": "row"}


class HidesNames(Odd):
    """`named_parameters()`, and so `parameters()`, leaves the embedding out."""

    def named_parameters(self, *args, **options):
        return ((n, p) for n, p in super().named_parameters(*args, **options) if not n.startswith("embed"))


class HidesParameters(Odd):
    """`parameters()` alone leaves the embedding out."""

    def parameters(self, recurse=True):
        return (p for n, p in self.named_parameters(recurse=recurse) if not n.startswith("embed"))


class HidesModules(Odd):
    """`named_modules()`, on which torch's others stand, leaves the embedding out."""

    def named_modules(self, *args, **options):
        return ((n, m) for n, m in super().named_modules(*args, **options) if n != "embed")


class Frozen(HidesNames):
    """What is hidden does not train."""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)


class HiddenBlock(Odd):
    """A layer that is cut by tensor parallelism, and hidden."""

    def named_parameters(self, *args, **options):
        return ((n, p) for n, p in super().named_parameters(*args, **options) if not n.startswith("blocks.0"))


MODELS = {
    "names": HidesNames,
    "parameters": HidesParameters,
    "modules": HidesModules,
    "frozen": Frozen,
    "block": HiddenBlock,
}
KINDS = {name: Kind(make, "images", of_logits, stages=cut_before("head"), plan=MLP) for name, make in MODELS.items()}
REFUSED = r"leaves out \S+ and \d more, which would train in shards and not in one process"


def each_technique(num_ranks, expected):
    """Return what became of each model by each technique; 2 ranks cannot cut 9 features."""
    names = [name for name in zoo.OURS if not name.startswith("pipeline") and (num_ranks == 3 or "tensor" not in name)]
    return {name: zoo.outcomes(name, KINDS, expected) for name in names}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_hidden_values_are_rank_0s_everywhere_or_refused(num_ranks):
    expected = {name: zoo.one_process(kind) for name, kind in KINDS.items()}
    for each in run(each_technique, num_ranks, args=(num_ranks, expected), timeout_s=120):
        for technique, said in each.items():
            for name, text in said.items():
                refused = technique.startswith(("ZeRO", "FullyShard")) and name != "frozen"
                assert re.search(REFUSED if refused else "^equal$", text), (technique, name, text)


def hidden_everywhere():
    """Return the hidden embedding of this rank after each technique's start, and after torch's own."""
    found = {}
    for name, start in {"distlab": zoo.DataParallel, "torch": DistributedDataParallel}.items():
        model = KINDS["names"].build(dist.get_rank())
        start(model)
        found[name] = model.embed.weight.detach().clone()
    return found


def test_torch_ddp_leaves_hidden_values_as_they_are_on_each_rank():
    one, other = run(hidden_everywhere, 2, timeout_s=60)
    assert one["distlab"].equal(other["distlab"])
    assert not one["torch"].equal(other["torch"])


def test_a_hidden_weight_that_two_stages_share_is_tied():
    model = HidesNames()
    last = HidesNames()
    last.embed = model.embed
    assert {one.name for one in find_tied([model, last])} == {"embed.weight", "embed.bias"}


def test_a_checkpoint_compares_hidden_weights():
    parts = {"model": HidesNames()}
    assert "model: embed.weight" in sums_of(parts)


def drawn():
    """Weights that are drawn layer by layer: the hidden ones, too."""
    model = KINDS["frozen"].build()
    before = model.embed.weight.detach().clone()
    draw_weights(model, seed=3)
    assert not before.equal(model.embed.weight)
    FullyShard(model)


def test_hidden_weights_are_drawn():
    run(drawn, 2, timeout_s=30)
