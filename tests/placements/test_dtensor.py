"""Random programs on placements give what torch's DTensor gives: values, local parts, gradients."""

from typing import NamedTuple

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from distlab.comm import Ranks, mesh_groups
from distlab.placements import (
    Partial,
    Replicate,
    Shard,
    cut,
    gradient_layout,
    layout_of,
    local_shape,
    placement_of,
    redistribute,
    words,
)
from distlab.plan import Mesh

MESHES = ((4,), (2, 2))


class Program(NamedTuple):
    """What a mesh computes from tensors of small whole numbers, in which all sums are exact."""

    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    layout: str
    steps: tuple[tuple[str, str, int], ...]  # what, a layout, a length or a dim

    def tensors(self):
        """Return x, what else each step takes, and what the result is weighed with."""
        made = torch.Generator().manual_seed(len(self.steps) + sum(self.shape))
        draw = lambda *shape: torch.randint(-3, 4, shape, generator=made).double()  # noqa: E731
        x, shape, others = draw(*self.shape), self.shape, []
        for what, _, number in self.steps:
            if what == "matmul":
                others.append(draw(shape[1], number))
                shape = (shape[0], number)
            else:
                others.append(draw(*shape) if what in ("add", "multiply") else None)
                shape = shape[1:] if what == "sum_rows" else shape[:1] if what == "sum_columns" else shape
                shape = shape[::-1] if what == "transpose" else shape
        return x, others, draw(*shape)


@st.composite
def programs(draw):
    """Draw a mesh, a tensor that may have one row, none, or more than ranks divide, and some steps."""
    mesh = draw(st.sampled_from(MESHES))

    def layout(dims):
        words = [*(f"S({dim})" for dim in range(dims)), "R", "P"]
        return ", ".join(draw(st.sampled_from(words)) for _ in mesh)

    shape = first = tuple(draw(st.sampled_from((1, 2, 3, 4, 5, 8, 0))) for _ in range(draw(st.integers(1, 3))))
    begin, steps = layout(len(shape)), []
    for _ in range(draw(st.integers(1, 4))):
        two = ("matmul", "transpose", "sum_rows", "sum_columns") if len(shape) == 2 else ()
        what = draw(st.sampled_from(("redistribute", "redistribute", "add", "multiply", "relu", *two)))
        number = draw(st.integers(1, 6)) if what == "matmul" else 0
        shape = (shape[0], number) if what == "matmul" else shape[::-1] if what == "transpose" else shape
        steps.append((what, layout(len(shape)), number))
        shape = shape[1:] if what == "sum_rows" else shape[:1] if what == "sum_columns" else shape
    return Program(mesh, first, begin, tuple(steps))


def drawn(count):
    found = {}

    @settings(max_examples=count * 21 // 20)
    @given(programs())
    def collect(program):
        found[program] = None

    collect()
    return list(found)


OPERATIONS = {
    "add": torch.add,
    "multiply": torch.mul,
    "matmul": torch.matmul,
    "relu": torch.relu,
    "transpose": lambda x: x.T,
    "sum_rows": lambda x: x.sum(0),
    "sum_columns": lambda x: x.sum(1),
}


def ours(program, groups):
    """Return the result's layout and local part, and all gradients whole."""
    x, others, weights = program.tensors()
    mesh, rank = program.mesh, dist.get_rank()
    all_whole = layout_of(", ".join("R" for _ in mesh))
    local, layout, shape, leaves = cut(x, layout_of(program.layout), mesh, rank), layout_of(program.layout), x.shape, []
    leaves.append((local.requires_grad_(), shape, layout))
    for (what, text, _), other in zip(program.steps, others, strict=True):
        wanted = layout_of(text)
        if what == "redistribute":
            local, layout = redistribute(local, shape, layout, wanted, groups), wanted
            continue
        operands = [(local, shape, layout)]
        if other is not None:
            leaves.append((cut(other, wanted, mesh, rank).requires_grad_(), other.shape, wanted))
            operands.append(leaves[-1])
        try:
            layout = placement_of(what, *(its for *_, its in operands))
        except ValueError:  # as its text says
            operands = [(redistribute(*one, all_whole, groups), one[1], all_whole) for one in operands]
            layout = all_whole
        local = OPERATIONS[what](*(one for one, *_ in operands))
        shape = OPERATIONS[what](*(torch.empty(its) for _, its, _ in operands)).shape
        assert local.shape == local_shape(shape, layout, mesh, rank), program
    whole = redistribute(local, shape, layout, all_whole, groups)
    ((whole * weights).sum() / dist.get_world_size()).backward()  # which counts once, not once for each rank
    gradients = [
        redistribute(one.grad, its, gradient_layout(its_layout), all_whole, groups) for one, its, its_layout in leaves
    ]
    return layout, local.detach(), whole.detach(), gradients


def theirs(program, mesh):
    """Return the same of DTensor, which cannot be asked for a Partial, and brings operands together by itself."""
    from torch.distributed import tensor as dtensor

    kinds = {Replicate: lambda _: dtensor.Replicate(), Partial: lambda _: dtensor.Partial()}
    placements = lambda layout: [kinds.get(type(one), lambda s: dtensor.Shard(s.dim))(one) for one in layout]  # noqa: E731
    x, others, weights = program.tensors()

    def leaf(whole, layout):
        local = cut(whole, layout, program.mesh, dist.get_rank())
        given = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        return dtensor.DTensor.from_local(local, mesh, placements(layout), **given).detach().requires_grad_()

    leaves = [leaf(x, layout_of(program.layout))]
    made = leaves[0]
    for (what, text, _), other in zip(program.steps, others, strict=True):
        if what == "redistribute":
            if "P" not in text:
                made = made.redistribute(mesh, placements(layout_of(text)))
            continue
        if other is not None:
            leaves.append(leaf(other, layout_of(text)))
        made = OPERATIONS[what](made, *leaves[-1:] if other is not None else ())
    whole = made.full_tensor()
    (whole * weights).sum().backward()
    backs = {dtensor.Replicate: lambda _: Replicate(), dtensor.Shard: lambda s: Shard(s.dim)}
    layout = tuple(backs.get(type(one), lambda _: Partial())(one) for one in made.placements)
    return layout, made.to_local().detach(), whole.detach(), [one.grad.full_tensor() for one in leaves]


def compare(found):
    """Run all programs both ways on this rank; return how many results had one layout, and so one local part."""
    from torch.distributed.device_mesh import DeviceMesh

    groups = {
        mesh: list(mesh_groups(Mesh({f"axis {at}": size for at, size in enumerate(mesh)})).values()) for mesh in MESHES
    }
    meshes = {mesh: DeviceMesh("cpu", torch.arange(4).reshape(mesh)) for mesh in MESHES}
    same = 0
    for program in found:
        layout, local, whole, gradients = ours(program, groups[program.mesh])
        their_layout, their_local, their_whole, their_gradients = theirs(program, meshes[program.mesh])
        assert torch.equal(whole, their_whole), f"{program}: {whole} is not {their_whole}"
        for mine, other in zip(gradients, their_gradients, strict=True):
            assert torch.equal(mine, other), f"{program}: gradient {mine} is not {other}"
        if layout == their_layout and Partial() not in layout:
            assert torch.equal(local, their_local), f"{program}: ({words(layout)}) {local} is not {their_local}"
            same += 1
    return same


@pytest.mark.soak_where(count=(500,))
@pytest.mark.parametrize("count", [100, 500])
def test_random_programs_give_what_dtensor_gives(count):
    found = drawn(count)
    assert len(found) >= count
    with Ranks(4, timeout_s=600, record=False) as ranks:  # a busy machine stays far below it
        same = ranks.run(compare, found)[0]
    assert same >= count // 5, "few results had DTensor's layout, so few local parts were compared"
