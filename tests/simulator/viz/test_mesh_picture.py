"""The picture of a mesh has a line through every group of every axis, and knows which axes leave a node."""

import pytest
from pen_facts import clashes, shapes, words

from distlab.plan import Mesh
from simulator.viz import describe_mesh, mesh_figure, to_png

CUBE = Mesh({"pipeline": 2, "data": 2, "tensor": 2})
LARGE = Mesh({"pipeline": 2, "data": 2, "context": 2, "tensor": 8})
MESHES = [
    (CUBE, 4),
    (CUBE, None),
    (LARGE, 8),
    (Mesh({"data": 3, "expert": 4, "tensor": 1}), 4),
    (Mesh({"pipeline": 3, "data": 5}), None),
    (Mesh({"data": 1}), None),
    (Mesh({"pipeline": 6, "data": 2, "tensor": 8}), 8),
    (Mesh({"own name": 2, "data": 2, "expert": 2, "context": 2, "tensor": 2}), 16),
]


@pytest.mark.parametrize(("mesh", "node"), MESHES)
def test_every_group_has_a_line_and_every_rank_a_box_on_each_axis(mesh, node):
    figure = mesh_figure(mesh, devices_per_node=node)
    axes = [name for name, size in mesh.axes if size > 1] or ["data"]
    lines = sum(len(group) - 1 for axis in axes for group in mesh.groups(axis))
    assert shapes(figure, "lines") == lines
    assert shapes(figure, "boxes") == len(axes) * (mesh.size + 1)  # and a box with the axis' letter
    assert all(words(figure).count(str(mesh.size - 1)) >= 1 for _ in axes)
    assert clashes(figure) == []


def test_an_axis_leaves_the_node_when_a_group_has_ranks_in_two():
    assert [CUBE.crosses_nodes(axis, 4) for axis in CUBE.names] == [True, False, False]
    assert [CUBE.crosses_nodes(axis, 2) for axis in CUBE.names] == [True, True, False]
    assert not any(CUBE.crosses_nodes(axis, 8) for axis in CUBE.names)
    assert Mesh({"data": 2, "tensor": 3}).crosses_nodes("tensor", 4)  # ranks 3, 4 and 5: the second node begins at 4


def test_the_text_tells_groups_and_wires():
    text = describe_mesh(CUBE, devices_per_node=4)
    assert text.startswith(
        "8 ranks = pipeline (2) x data (2) x tensor (2): data and tensor stay inside a node, pipeline"
    )
    assert "data: 4 groups of 2, inside a node: (0 2), (1 3), (4 6), (5 7)." in text
    assert "pipeline: 4 groups of 2, between nodes: (0 4), (1 5), (2 6), (3 7)." in text
    assert "node" not in describe_mesh(CUBE).splitlines()[1]
    assert "every axis leaves the node" in describe_mesh(CUBE, devices_per_node=1)


def test_one_rank_has_its_own_groups_coloured_alone():
    figure = mesh_figure(CUBE, devices_per_node=4, rank=5)
    assert shapes(figure, "lines") == 3
    text = describe_mesh(CUBE, rank=5)
    assert "Rank 5 stands at pipeline 1, data 0, tensor 1." in text
    assert [line.split(": ")[-1] for line in text.splitlines()[2:]] == ["(4 5).", "(5 7).", "(1 5)."]
    assert to_png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        (Mesh({"data": 257}), {}, "more than 256 ranks to draw"),
        (CUBE, {"rank": 8}, "rank 8 is outside the mesh"),
        (CUBE, {"devices_per_node": 0}, "devices_per_node is 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(mesh, options, message):
    for draw in (mesh_figure, describe_mesh):
        with pytest.raises(ValueError, match=message):
            draw(mesh, **options)
