import heapq
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from distlab.plan import Contention
from simulator.engine import event_engine as engine
from simulator.engine.task_graph import COMMUNICATION, COMPUTE, NONE, Graph

SLOW = Contention(compute_slowdown=1.25, communication_slowdown=1.5)


def random_graph(seed, num_operations, num_ranks):
    generator = np.random.default_rng(seed)
    graph = Graph()
    for operation in range(num_operations):
        count = generator.integers(0, min(3, operation) + 1)
        needs = generator.choice(operation, count, replace=False).tolist() if operation else []
        rank, lane = int(generator.integers(num_ranks)), int(generator.integers(3))
        peer = int(generator.integers(num_ranks)) if lane else -1
        graph.add(
            rank,
            lane,
            int(generator.integers(0, 100)),
            needs=needs,
            peer=peer,
        )
    return graph


def plain_event_loop(graph):
    """Events in the order of time: an operation ends, and what then has all it needs starts."""
    lanes = {}
    for operation in range(len(graph)):
        lanes.setdefault((graph.rank[operation], graph.lane[operation]), []).append(operation)
    ready_at = {}
    end, start, events = {}, {}, [(0, -1)]
    while events:
        now, _ = heapq.heappop(events)
        for queue in lanes.values():
            while queue:
                operation = queue[0]
                needs = graph.needs(operation)
                if any(need not in end or end[need] > now for need in needs):
                    break
                ready = max((end[n] for n in needs), default=0)
                ready = max(ready, ready_at.get(id(queue), 0))
                queue.pop(0)
                start[operation], end[operation] = ready, ready + graph.duration_ns[operation]
                ready_at[id(queue)] = end[operation]
                heapq.heappush(events, (end[operation], operation))
    order = range(len(graph))
    return np.array([start[o] for o in order]), np.array([end[o] for o in order])


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 4))
def test_equals_a_plain_event_loop_bit_for_bit(seed, num_operations, num_ranks):
    graph = random_graph(seed, num_operations, num_ranks)
    times = engine.run(graph)
    start, end = plain_event_loop(graph)
    assert np.array_equal(times.start_ns, start)
    assert np.array_equal(times.end_ns, end)


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 4), st.floats(1, 4), st.floats(1, 4))
def test_lanes_needs_and_bounds_hold_under_contention(seed, num_operations, num_ranks, compute, communication):
    graph = random_graph(seed, num_operations, num_ranks)
    start, end = engine.run(graph, Contention(compute, communication))
    last, busiest = {}, Counter()
    for operation in range(len(graph)):
        lane = (graph.rank[operation], graph.lane[operation])
        assert start[operation] >= last.get(lane, 0)  # no overlap, first in first out
        last[lane] = end[operation]
        busiest[lane] += graph.duration_ns[operation]
        for need in graph.needs(operation):
            assert start[operation] >= end[need]
        taken, alone = end[operation] - start[operation], graph.duration_ns[operation]
        slowest = compute if graph.lane[operation] == COMPUTE else communication
        assert alone <= taken <= np.ceil(alone * (round(slowest * 1000) / 1000)) + 1
    assert end.max() >= max(busiest.values())


def test_contention_slows_both_sides_only_while_both_are_busy():
    graph = Graph()
    compute = graph.add(0, COMPUTE, 1000)
    communicate = graph.add(0, COMMUNICATION, 400)
    start, end = engine.run(graph, SLOW)
    assert end[communicate] == 600  # 400 at 1.5 times
    assert end[compute] == 600 + (1000 - 480)  # in 600 ns it did 600 / 1.25 = 480
    assert start.tolist() == [0, 0]


def test_contention_of_another_rank_matters_only_to_a_peer():
    graph = Graph()
    mine = graph.add(0, COMPUTE, 1000)
    theirs = graph.add(1, COMPUTE, 1000)
    other = graph.add(2, COMPUTE, 1000)
    graph.add(0, COMMUNICATION, 2000, peer=1)
    end = engine.run(graph, SLOW).end_ns
    assert (end[mine], end[theirs], end[other]) == (1250, 1250, 1000)


def test_an_end_inside_a_nanosecond_is_rounded_up():
    graph = Graph()
    compute = graph.add(0, COMPUTE, 10)
    graph.add(0, COMMUNICATION, 100)
    assert engine.run(graph, SLOW).end_ns[compute] == 13  # 12.5


def test_a_circle_is_named():
    graph = Graph()
    graph.add(0, COMPUTE, 1, needs=[1])
    graph.add(1, COMPUTE, 1, needs=[0])
    for contention in (None, SLOW):
        with pytest.raises(
            ValueError, match="deadlock: 2 operations .*rank 0 lane 0: operation 0 waits for 1 of rank 1"
        ):
            engine.run(graph, contention)


def test_what_was_never_added_cannot_be_needed():
    graph = Graph()
    graph.add(0, COMPUTE, 1, needs=[5])
    with pytest.raises(ValueError, match="needs operation 5; the graph has 1"):
        engine.run(graph)


def test_negative_times_are_refused():
    with pytest.raises(ValueError, match="pass times >= 0"):
        Graph().add(0, COMPUTE, -1)
    with pytest.raises(ValueError, match="a duration is -1 ns; pass times >= 0"):
        Graph().extend(0, [COMPUTE] * 2, [3, -1], [NONE, NONE])


def test_an_empty_graph_takes_no_time():
    graph = Graph()
    assert engine.run(graph).end_ns.size == 0
    assert engine.run(graph, SLOW).end_ns.size == 0
