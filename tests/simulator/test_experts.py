"""Mixtures of experts over nodes: equal products side by side, a token's nodes, what crosses."""

from dataclasses import replace
from itertools import combinations
from statistics import mean

import pytest

from distlab.plan import Plan
from simulator import LlamaSizes, Mixture, cluster, fuse_attention, hierarchical_all_to_all_s, llama_workload, simulate
from simulator.stage.products import slowdown

S, H, F, E, K = 512, 256, 384, 4, 2


def mixed(**changes):
    mixture = Mixture(E, K, **changes)
    return fuse_attention(llama_workload(LlamaSizes(H, 1, 4, 4, F, 128, mixture=mixture), sequence_length=S))


LLAMA = mixed()


def test_many_equal_products_fill_the_device_that_one_leaves_idle():
    """One tile of eight multiprocessors' makes a product eight times as long; eight products fill all eight."""
    assert slowdown(128, 256, 10**9, 8) == pytest.approx(8 * 0.95)
    assert slowdown(128, 256, 10**9, 8, count=8) == pytest.approx(1.0)
    assert slowdown(128, 256, 10**9, 8, count=9) == pytest.approx(16 / 9 * 0.95)


def nodes_by_counting(experts, top_k, nodes, groups=1, most=1):
    """Return the mean number of nodes over all choices of groups, and of experts in them."""
    place, size = experts // nodes, experts // groups
    pools = [
        [group * size + number for group in chosen for number in range(size)]
        for chosen in combinations(range(groups), most)
    ]
    return mean(len({one // place for one in chosen}) for pool in pools for chosen in combinations(pool, top_k))


@pytest.mark.parametrize(
    ("experts", "top_k", "nodes", "groups"),
    [(8, 2, 4, None), (8, 2, 2, None), (12, 5, 3, None), (4, 1, 4, None), (8, 2, 4, (4, 2)), (16, 3, 8, (4, 2))],
)
def test_on_how_many_nodes_a_tokens_experts_are(experts, top_k, nodes, groups):
    mixture = Mixture(experts, top_k, most_groups=groups)
    sizes = LlamaSizes(H, 1, 4, 4, F, 128, mixture=mixture)
    found = llama_workload(sizes, sequence_length=S).layers[1].experts.nodes_of_a_token(nodes)
    assert found == pytest.approx(nodes_by_counting(experts, top_k, nodes, *(groups or ())))


def test_a_token_crosses_to_a_node_once():
    """Four ranks on two nodes: of two experts both are in the other node one time in six, and one is four times."""
    machine = replace(cluster("dgx-h100", 16, stack="best-case"), devices_per_node=2)
    plan = Plan(expert=4)
    twice, once = (
        simulate(LLAMA, replace(machine, software=replace(machine.software, dispatches_once=on)), plan)
        .stages[0]
        .calls[0][1]
        for on in (False, True)
    )
    rows = 2 * K * S * H
    nodes = 2 * (1 - 1 / 6)
    links = {"intra_node": machine.intra_node, "inter_node": machine.inter_node}
    for calls, crossing in ((twice, 1.0), (once, nodes / K)):
        there, back = calls[-2:]
        assert there.num_bytes == back.num_bytes == rows
        assert there.end_ns - there.start_ns == pytest.approx(
            hierarchical_all_to_all_s(rows, 2, 2, **links, crossing=crossing) * 1e9, abs=1
        )
        assert there.sent_bytes == pytest.approx(rows * (1 / 4 + 2 / 4 * crossing))


@pytest.mark.parametrize("groups", [(0, 0), (4, 5), (3, 1), (4, 1)])
def test_groups_that_cannot_hold_a_tokens_experts_are_refused(groups):
    with pytest.raises(ValueError, match=r"groups must divide 8 experts, and those of a token hold 3"):
        Mixture(8, 3, most_groups=groups)
