"""The mesh on one screen: data x tensor x pipeline trains as one process, and each axis sends what it says."""

import math

import pytest
import torch
import torch.distributed as dist
from equal import OPTIMIZERS, Row, Task, train as one_process

from distlab.comm import mesh_groups, recorded
from distlab.hybrid import plain_mesh_step
from distlab.plan import Mesh

H, F, B, STEPS = 6, 8, 12, 4


def weights_of(num_stages):
    torch.manual_seed(0)
    return [tuple(torch.randn(shape, dtype=torch.float64) for shape in ((H, F), (F, H))) for _ in range(num_stages)]


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(B, H, dtype=torch.float64), torch.randn(B, H, dtype=torch.float64)


def train(axes, name):
    """Return this rank's place, its two weights, the losses, and the bytes of the last step by group's size."""
    mesh = Mesh(tuple(axes.items()))
    groups, place = mesh_groups(mesh), mesh.coordinates(dist.get_rank())
    first, second = weights_of(axes["pipeline"])[place["pipeline"]]
    first = first.chunk(axes["tensor"], 1)[place["tensor"]].clone().requires_grad_()
    second = second.chunk(axes["tensor"])[place["tensor"]].clone().requires_grad_()
    optimizer, losses = OPTIMIZERS[name]([first, second]), []
    for step in range(STEPS):
        x, target = (part.chunk(axes["data"])[place["data"]] for part in batch(step))
        optimizer.zero_grad()
        with recorded() as record:
            losses.append(plain_mesh_step(first, second, x, target, groups).item())
        optimizer.step()
    calls = [(call.op, call.num_bytes) for call in record.records.rank(dist.get_rank()) if call.op != "recv"]
    return place, first.detach(), second.detach(), losses, calls


class Whole(torch.nn.Module):
    """All stages in one process."""

    def __init__(self, num_stages):
        super().__init__()
        self.weights = torch.nn.ParameterList([weight for pair in weights_of(num_stages) for weight in pair])

    def forward(self, x):
        for first, second in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = torch.tanh(x @ first) @ second
        return x


@pytest.mark.parametrize("axes", [(3, 1, 1), (1, 2, 2), (2, 2, 2)], ids=str)
def test_a_mesh_trains_as_one_process_and_each_axis_sends_what_it_says(ranks, axes):
    axes = dict(zip(("pipeline", "data", "tensor"), axes, strict=True))
    activation, weights = 8 * B // axes["data"] * H, [8 * H * F // axes["tensor"]] * 2
    for name in ("sgd", "adam"):
        alone = one_process(Row(Task(lambda _: Whole(axes["pipeline"]), batch), name), range(STEPS))
        whole = [weight.detach() for weight in alone.model.weights]
        for place, first, second, losses, calls in ranks(math.prod(axes.values())).run(train, axes, name):
            want, tensor = whole[2 * place["pipeline"] :], place["tensor"]
            torch.testing.assert_close(losses, alone.losses, rtol=1e-9, atol=0)
            torch.testing.assert_close(first, want[0].chunk(axes["tensor"], 1)[tensor])
            torch.testing.assert_close(second, want[1].chunk(axes["tensor"])[tensor])
            if 1 not in axes.values():
                assert sorted(b for op, b in calls if op == "all_reduce") == sorted([8, *[activation] * 2, *weights])
                assert [b for op, b in calls if op == "send"] == [activation]
