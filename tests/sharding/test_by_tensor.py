"""ByTensor: rows as FSDP2's, one gather for all tensors of a unit, no gradient of frozen ones; what is refused."""

import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from equal import calls_of, square
from refused import message
from torch import nn
from torch.distributed.fsdp import fully_shard

from distlab.large_batch import LAMB
from distlab.sharding import ByTensor, WholeTensorOptimizer
from distlab.tensor_parallel import parallelize_module

WIDTHS = (5, 7, 2)  # nothing here is even on 3 ranks, and the last rank has no row of what has 2


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]
    layers[0].bias.requires_grad_(False)
    return nn.Sequential(*layers)


@pytest.mark.on_ranks(3)
def test_a_unit_sends_all_tensors_in_one_call_and_no_gradient_of_what_is_frozen():
    made, x = ByTensor(model()), torch.randn(4, 5)
    padded = [4 * (9 * 5 + 9), 4 * (3 * 7 + 3)]  # of 7 and 2 rows: 9 and 3
    trained = [4 * 9 * 5, padded[1]]
    calls = calls_of(lambda: made(x).sum().backward())
    gathers = [("all_gather", one // 3) for one in padded]
    assert calls == [*gathers, gathers[1], ("reduce_scatter", trained[1]), ("reduce_scatter", trained[0])], (
        "the first unit's inputs want no gradient, so its backward needs no weight"
    )
    assert calls_of(lambda: made.full_state()) == gathers
    assert calls_of(lambda: made.clip_gradients_(1.0)) == [("all_reduce", 8)]
    assert made.module[0].bias.grad is None
    assert [tuple(p.shape) for p in made.parameters() if p.ndim == 2] == [(3, 5) if dist.get_rank() < 2 else (1, 5)] + [
        (1, 7) if dist.get_rank() < 2 else (0, 7)
    ]
    other = model()
    fully_shard(other)
    assert [p.shape for p in made.parameters()] == [p.to_local().shape for p in other.parameters()]


@pytest.mark.on_ranks(4)
def test_layers_that_tensor_ranks_cut_count_once_in_a_norm_and_are_updated_by_element():
    (tensor, data), x = square(), torch.ones(3, 5).double()
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)).double()
    cut = parallelize_module(copy.deepcopy(alone), {"0": "column", "1": "row"}, tensor, example=(x,))
    made = ByTensor(cut, data)
    for one in (alone, made):
        one(x).sum().backward()
    torch.testing.assert_close(made.clip_gradients_(1.0), nn.utils.clip_grad_norm_(alone.parameters(), 1.0))
    said = message(WholeTensorOptimizer, made, partial(LAMB, lr=0.1))
    assert "LAMB looks at whole tensors, and tensor parallelism has cut 0.weight" in said


class OfUnitLength(torch.optim.SGD):
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            one.data.div_(one.data.norm())  # of a part, and no gradient's


def refusals():
    made, x = ByTensor(model()), torch.randn(4, 5, requires_grad=True)
    renormalizes = ByTensor(nn.Sequential(OrderedDict(table=nn.Embedding(4, 3, max_norm=0.1))))
    made(x).sum().backward()
    named = {
        "torch's clipping": message(nn.utils.clip_grad_norm_, made.parameters(), 1.0),
        "an optimizer that takes norms": message(OfUnitLength(made.parameters()).step),
        "without dims": message(ByTensor, nn.ParameterDict({"scale": torch.tensor(1.0)})),
        "changed in forward": message(renormalizes, torch.tensor([1, 2])),
    }
    loss = made(x).sum()
    with torch.no_grad():
        made.module[1].weight.add_(1.0)
    return named | {"changed before backward": message(loss.backward)}


SAID = {
    "torch's clipping": "a norm of a shard or of its gradient is of this rank's part alone",
    "an optimizer that takes norms": "OfUnitLength updates a part of a tensor in a different way than the whole",
    "without dims": "ValueError: scale has no dims, so it has no rows to cut; give it the shape [1]",
    "changed in forward": "table.weight was changed in its unit's forward",
    "changed before backward": "was changed between forward and backward",
}


def test_what_would_be_wrong_is_refused_on_every_rank(ranks):
    for found in ranks(3).run(refusals):
        for name, said in SAID.items():
            assert said in found[name], f"{name}: {found[name]}"
