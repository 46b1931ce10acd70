"""Mesh: coordinates and ranks are inverses, groups partition the ranks, errors show the whole product."""

import pytest
from hypothesis import given, strategies as st

from distlab.plan import Mesh

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: Mesh(zip(("pipeline", "data", "context", "tensor"), sizes, strict=False))
)


@given(MESHES)
def test_coordinates_and_ranks_are_inverses(mesh):
    for rank in range(mesh.size):
        assert mesh.rank(**mesh.coordinates(rank)) == rank
        assert tuple(mesh.coordinates(rank)) == mesh.names


@given(MESHES, st.integers(1, 9))
def test_an_axis_crosses_nodes_where_a_group_has_ranks_in_two(mesh, per_node):
    for axis in mesh.names:
        apart = [len({rank // per_node for rank in group}) > 1 for group in mesh.groups(axis)]
        assert mesh.crosses_nodes(axis, per_node) == any(apart)


@given(MESHES)
def test_groups_partition_the_ranks(mesh):
    for axis in mesh.names:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            assert len(group) == mesh.axis_size(axis)
            assert [mesh.coordinates(rank)[axis] for rank in group] == list(range(len(group)))
            others = [{k: v for k, v in mesh.coordinates(rank).items() if k != axis} for rank in group]
            assert all(other == others[0] for other in others)
            assert all(mesh.group_of(rank, axis) == group for rank in group)


def test_the_last_axis_varies_fastest():
    mesh = Mesh({"pipeline": 2, "data": 2, "tensor": 2})
    assert mesh.groups("tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert mesh.groups("data") == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert mesh.groups("pipeline") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert mesh.coordinates(5) == {"pipeline": 1, "data": 0, "tensor": 1}
    assert str(mesh) == "pipeline (2) x data (2) x tensor (2) = 8"


def test_meshes_are_values():
    assert Mesh({"data": 2, "tensor": 3}) == Mesh([("data", 2), ("tensor", 3)])
    assert Mesh({"data": 2, "tensor": 3}) != Mesh({"tensor": 3, "data": 2})
    assert len({Mesh({"data": 2}), Mesh({"data": 2})}) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh({}), "needs at least one axis"),
        (lambda: Mesh([("a", 2), ("a", 3)]), r"a \(2\) x a \(3\) has two axes named 'a'"),
        (lambda: Mesh({"data": 2, "tensor": 0}), r"data \(2\) x tensor \(0\) has tensor = 0; pass a whole number"),
        (lambda: Mesh({"data": 2.0}), "has data = 2.0; pass a whole number"),
        (lambda: Mesh({"data": True}), "has data = True"),
        (
            lambda: Mesh({"data": 2, "tensor": 3}, world_size=8),
            r"the mesh data \(2\) x tensor \(3\) = 6 does not fill 8 ranks; change an axis, or run 6 ranks",
        ),
        (lambda: Mesh({"data": 2}).coordinates(2), r"rank 2 is outside the mesh data \(2\) = 2; pass a rank in 0..1"),
        (lambda: Mesh({"data": 2}).coordinates(-1), "rank -1 is outside"),
        (lambda: Mesh({"data": 2}).rank(data=2), r"data=2 is outside the mesh data \(2\) = 2; pass a number in 0..1"),
        (lambda: Mesh({"data": 2, "tensor": 2}).rank(data=1), "got coordinates on data; .* each of data, tensor"),
        (lambda: Mesh({"data": 2}).groups("tensor"), r"data \(2\) = 2 has no axis 'tensor'; its axes are data"),
        (lambda: Mesh({"data": 2}).group_of(5, "data"), "rank 5 is outside"),
    ],
)
def test_errors_show_the_whole_product(make, message):
    with pytest.raises(ValueError, match=message):
        make()
