"""A round of DiLoCo: its meetings cost what their wire takes, and what steps hide costs nothing."""

import pytest

from distlab.plan import Cluster, Plan
from simulator import all_reduce_s, device, gpt_workload, link, local_sgd_round, simulate

MODEL = gpt_workload(
    hidden_size=1024, num_layers=8, num_heads=16, sequence_length=1024, vocab_size=51200, microbatch_size=4
)
MACHINES = Cluster("machines", device("h100-sxm"), 4, 1, link("nvlink4"), link("ethernet-10g"))
STEP_S = simulate(MODEL, MACHINES, Plan(1)).duration_s
SENT_S = all_reduce_s(MODEL.gradient_bytes, 4, MACHINES.inter_node)


def round_of(**options):
    return local_sgd_round(MODEL, MACHINES, 4, **options)


def test_a_round_is_its_steps_and_one_exchange():
    for every in (1, 10, 100):
        one = round_of(every=every)
        assert one.exposed_s == pytest.approx(SENT_S, rel=1e-3)
        assert one.step_s == pytest.approx(STEP_S + SENT_S / every, rel=0.02)
        assert one.trace.duration_s == pytest.approx(every * one.step_s, abs=2e-9 * every)


def test_fragments_cut_the_exchange_and_a_delay_hides_it():
    assert round_of(every=40, fragments=4).exposed_s == pytest.approx(SENT_S, rel=0.01)
    steps = -(-SENT_S / 4 // STEP_S)
    hidden = round_of(every=400, fragments=4, delay=int(steps))
    assert hidden.exposed_s == 0
    assert hidden.step_s == pytest.approx(STEP_S, rel=0.01)
    sent = hidden.trace.select(hidden.trace.is_word("lane", "communication"))
    assert sorted({span.name for span in sent}) == [f"changes of fragment {number}" for number in range(4)]
    assert int(sent.num_bytes[sent.rank == 0].sum()) >= MODEL.gradient_bytes
    late = round_of(every=400, fragments=4, delay=int(steps) // 2)
    assert 0 < late.exposed_s < SENT_S


def test_a_wire_that_is_never_free_is_the_limit():
    one = round_of(every=4, fragments=4, delay=3)
    assert one.step_s == pytest.approx(SENT_S / 4, rel=0.02)


def test_replicas_of_several_ranks_meet_across_nodes():
    nodes = Cluster("nodes", device("h100-sxm"), 16, 8, link("nvlink4"), link("ethernet-10g"))
    inner = Plan(8)
    one = local_sgd_round(MODEL, nodes, 2, every=10, inner=inner)
    assert one.inner_s == simulate(MODEL, nodes, inner).duration_s
    assert one.exposed_s == pytest.approx(all_reduce_s(MODEL.gradient_bytes, 2, nodes.inter_node), rel=1e-3)
    assert one.trace.ranks == tuple(range(16))
    with pytest.raises(ValueError, match="3 replicas of 8 ranks do not fit into nodes, which has 16"):
        local_sgd_round(MODEL, nodes, 3, every=10, inner=inner)


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 4, "fragments": 5}, {"every": 4, "delay": 4}])
def test_what_does_not_fit_is_refused(options):
    with pytest.raises(ValueError, match="every"):
        round_of(**options)
