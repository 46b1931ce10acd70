"""Values taken apart, described and put together; batches cut and joined; routes of a schedule."""

import pytest
import torch

from distlab.pipeline.agreement.batch import cut, cut_batch, join
from distlab.pipeline.agreement.shapes import ValueLayout, put_together, take_apart
from distlab.pipeline.faults import slots_of
from distlab.pipeline.route import forward_only, other_end, route_of
from distlab.plan import SCHEDULES, add_communication, make_schedule, parse_action

VALUES = [
    torch.arange(4.0),
    (torch.ones(2, 3, requires_grad=True), [torch.zeros(2, dtype=torch.bool), None, "text", 2.5]),
    {"a": torch.ones(2, 1), 3: (torch.arange(2), {"b": True})},
    (),
]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, tuple | list):
        return type(one) is type(other) and all(map(same, one, other)) and len(one) == len(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return one == other


def test_values_survive_being_taken_apart():
    for value in VALUES:
        tensors, layout = take_apart(value)
        assert same(put_together(layout, tensors), value)
        assert ValueLayout.from_json(layout.to_json()) == layout
        assert [kind.wants_gradient for kind in layout.kinds] == [tensor.requires_grad for tensor in tensors]
    assert str(take_apart(VALUES[1])[1]) == "([2, 3] float32 (grad), [[2] bool, None, 'text', 2.5])"
    assert str(take_apart(VALUES[2])[1]) == "{'a': [2, 1] float32, 3: ([2] int64, {'b': True})}"
    with pytest.raises(ValueError, match=r"tuples, lists and dicts .* got a set"):
        take_apart((torch.ones(1), {1, 2}))


def test_batches_are_cut_and_joined():
    value = {"x": torch.arange(12).reshape(6, 2), "n": 3}
    parts = cut(value, 3)
    assert [part["x"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert same(join(parts), value)
    assert join([torch.tensor(1.0), torch.tensor(2.0)]).tolist() == [1.0, 2.0]
    batch = cut_batch(None, torch.zeros(6), 3)
    assert (len(batch.inputs), len(batch.targets), batch.sizes) == (0, 3, {"targets": 6})


def test_batches_that_cannot_be_cut_are_refused_with_what_fits():
    for value, words in (
        (torch.zeros(10), r"4 micro-batches do not divide a batch of 10; plan 1, 2, 5, 10 .* batch of 8 or 12"),
        (torch.zeros(3), r"a batch of 3 cannot fill 4 micro-batches; pass a batch of 4 or more, .* at most 3"),
        ((torch.zeros(8), torch.zeros(4)), r"shapes \[\[8\], \[4\]\]"),
        (torch.tensor(1.0), r"cut along dimension 0, .* shapes \[\[\]\]"),
        ((1, 2), r"cut along dimension 0"),
    ):
        with pytest.raises(ValueError, match=words):
            cut(value, 4)


@pytest.mark.parametrize("name", [name for name, family in SCHEDULES.items() if family.placement != "copies"])
def test_routes_pair_messages_and_settle_only_what_was_used(name):
    schedule = make_schedule(name, 3, 6)
    complete = add_communication(schedule)
    routes = [route_of(schedule, rank) for rank in range(3)]
    slots = slots_of(schedule)
    assert len(slots) == len(schedule)
    for rank, route in enumerate(routes):
        assert list(route.actions) == complete.actions(rank)
        sends = [action for action in route.actions if action.kind.startswith("SEND")]
        for peer in range(3):
            to_peer = [other_end(send) for send in sends if route.peer(send) == peer]
            assert to_peer == list(routes[peer].incoming.get(rank, ())), "one order at both ends"
        settled = [send for group in route.settled.values() for send in group]
        assert len(settled) == len(set(settled))
        assert set(settled) <= set(sends)
        for receive, done in route.settled.items():
            maker = other_end(receive)
            theirs = list(routes[route.peer(receive)].actions)
            for send in done:
                used = other_end(send)
                kinds = ("F",) if used.kind == "RECV_F" else ("B", "I")
                uses = [theirs.index(used._replace(kind=kind)) for kind in kinds if used._replace(kind=kind) in theirs]
                assert uses[0] < theirs.index(maker), f"{receive} says that {send} was used"
    assert {str(parse_action(text)) for text in slots} == {str(schedule.action(row)) for row in range(len(schedule))}
    assert len(forward_only(schedule)) == 6 * schedule.num_stages
