"""The picture of experts drops what the real router drops, and its all-to-all has as many rows as are kept."""

import numpy as np
import pytest
from pen_facts import clashes, shapes, words

from simulator.viz import describe_routing, routing_figure
from simulator.viz.expert_parallel.routes import routes_of


def choices(num_ranks=3, tokens=7, num_experts=6, top_k=2, seed=3):
    generator = np.random.default_rng(seed)
    liked = np.linspace(1.5, 0, num_experts)
    return [
        np.argsort(-(liked + generator.gumbel(size=(tokens, num_experts))), axis=1)[:, :top_k] for _ in range(num_ranks)
    ]


@pytest.mark.parametrize(("top_k", "factor"), [(1, 1.0), (2, 1.0), (2, 0.5), (3, 1.25)])
def test_capacity_keeps_what_the_runner_keeps(top_k, factor):
    torch = pytest.importorskip("torch")
    from distlab.expert_parallel import Routing, assign, capacity_of

    asked = choices(num_ranks=2, top_k=top_k)
    capacity = capacity_of(7, 6, top_k=top_k, factor=factor)
    routes = routes_of(asked, num_experts=6, capacity=capacity)
    for rank, experts in enumerate(asked):
        routing = Routing(torch.tensor(experts), torch.ones(experts.shape), torch.ones(7, 6) / 6)
        found = assign(routing, factor)
        kept = np.zeros(experts.size, bool)
        kept[found.slots.numpy()] = True
        assert (routes.kept[rank] == kept.reshape(experts.T.shape).T).all()
        assert routes.rows[rank].tolist() == list(found.counts)
        assert len(routes.lost[rank]) == found.dropped_tokens


def test_rows_between_ranks_are_the_kept_choices():
    routes = routes_of(choices(), num_experts=6, capacity=2)
    assert routes.between.sum() + routes.dropped == 3 * 7 * 2
    assert routes.rows.max() <= 2
    assert routes.asked.sum() == 42
    assert routes.between[1, 0] == routes.rows[1, :2].sum()
    everything = routes_of(choices(), num_experts=6)
    assert everything.dropped == 0
    assert (everything.rows.sum(axis=0) == everything.asked).all()


@pytest.mark.parametrize(
    ("capacity", "num_ranks", "tokens", "top_k"),
    [(2, 3, 7, 2), (None, 3, 7, 2), (1, 6, 8, 3), (0, 1, 4, 1), (None, 1, 1, 1)],
)
def test_a_line_leads_from_every_kept_choice_and_words_lie_apart(capacity, num_ranks, tokens, top_k):
    asked = choices(num_ranks, tokens, 6, top_k)
    routes = routes_of(asked, num_experts=6, capacity=capacity)
    figure = routing_figure(asked, num_experts=6, capacity=capacity)
    assert shapes(figure, "lines") == routes.between.sum() + routes.dropped  # and a stroke through each dropped one
    assert clashes(figure) == []
    shown = words(figure)
    assert all(str(total) in shown for total in routes.between.sum(axis=0).tolist())


def test_the_text_tells_load_and_losses():
    asked = [np.array([[0], [0], [0], [1]]), np.array([[0], [0], [1], [1]])]
    text = describe_routing(asked, num_experts=2, capacity=2)
    assert text.startswith("Expert 0 is asked 5 times where 4 is even; 1 of 8 choices are dropped; rank 0 works 1.14x")
    assert "Rank 0: expert 0 asked 5 times, 4 kept; works on 4 rows, 2 of them from other ranks." in text
    assert "Rank 0: no choice of token 2 was kept." in text
    assert "3 rows go to another rank" in text


def test_what_a_run_kept_is_drawn_as_it_was():
    asked = [np.array([[0], [0]])]
    routes = routes_of(asked, num_experts=2, kept=[np.array([[False], [True]])])
    assert routes.taken(0, 0) == [1]
    with pytest.raises(ValueError, match="kept has other shapes"):
        routes_of(asked, num_experts=2, kept=[np.array([True])])


@pytest.mark.parametrize(
    ("experts", "options", "message"),
    [
        ([[[0]], [[1]]], {"num_experts": 3}, "3 experts on 2 ranks"),
        ([], {"num_experts": 3}, "3 experts on 0 ranks"),
        ([[[0]], [[1, 0]]], {"num_experts": 2}, r"rank 1: experts has shape \[1, 2\]"),
        ([[[0], [4]]], {"num_experts": 4}, "experts are 0 to 4; expected 0 to 3"),
        ([[[0]]], {"num_experts": 2, "capacity": -1}, "capacity is -1"),
        ([[[0]] * 49], {"num_experts": 2}, "49 tokens, 2 experts and 1 ranks cannot be drawn apart"),
    ],
)
def test_what_cannot_be_drawn_is_refused(experts, options, message):
    with pytest.raises(ValueError, match=message):
        routing_figure(experts, **options)
