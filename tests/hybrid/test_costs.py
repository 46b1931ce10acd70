"""What a mesh sends to begin, to shard states, to average stages and to save, counted by the recorder."""

import pytest
import torch
from equal import calls_of
from hybrid_gpt import batch_of, make_hybrid, make_model
from torch import nn

from distlab.comm import mesh_groups
from distlab.comm.nodes.wire import ring_bytes
from distlab.hybrid import StageAverages
from distlab.pipeline import Pipeline
from distlab.plan import Mesh, Plan, Sharding, make_schedule


@pytest.mark.on_ranks(2)
def test_a_shard_is_saved_and_a_whole_state_is_loaded_without_a_call():
    hybrid = make_hybrid(Plan(data=2))
    state = hybrid.full_state_dict()
    assert calls_of(hybrid.shard_state) == []
    assert calls_of(lambda: hybrid.load_full_state_dict(state)) == []
    hybrid.close()


@pytest.mark.on_ranks(2)
def test_sharded_states_scatter_gradients_and_gather_parameters():
    hybrid = make_hybrid(Plan(data=2, sharding=Sharding(stage=1)))
    hybrid.train_step(*batch_of(0), max_norm=1.0)
    calls = calls_of(lambda: hybrid.train_step(*batch_of(1), max_norm=1.0))
    size = sum(parameter.nbytes for parameter in make_model(0).parameters() if parameter.requires_grad)
    hybrid.close()
    halves = [(op, b) for op, b in calls if op in ("send", "all_gather", "reduce_scatter") and b > 100]
    sent = sum(b if op == "send" else ring_bytes(op, b, 2) for op, b in halves)
    assert 0 <= sent - 2 * size // 2 < 0.01 * size  # padding apart


@pytest.mark.on_ranks(2)
def test_each_element_of_a_whole_state_comes_from_one_rank():
    for plan, experts in (
        (Plan(tensor=2), 0),
        (Plan(expert=2), 3),
        (Plan(data=2, sharding=Sharding(stage=3)), 0),
        (Plan(pipeline=2, num_microbatches=2), 0),
    ):
        hybrid = make_hybrid(plan, experts=experts)
        calls = calls_of(hybrid.full_state_dict)
        hybrid.close()
        whole = sum(parameter.nbytes for parameter in make_model(0, experts=experts).parameters())
        assert [op for op, _ in calls] == ["all_gather"] * 3, "how long names are, names, and bytes"
        assert whole / 2 <= calls[-1][1] < whole * 1.01, "as many as the rank has that holds the most"


@pytest.mark.on_ranks(2)
def test_a_stage_is_averaged_in_one_sum():
    groups = mesh_groups(Mesh([("pipeline", 1), ("data", 2)]))
    stage = nn.Linear(4, 4)
    pipeline = Pipeline({0: stage}, make_schedule("gpipe", 1, 2), groups["pipeline"], loss=nn.functional.mse_loss)
    averages = StageAverages(pipeline, {0: stage}, groups["data"])

    def step():
        pipeline.step(torch.ones(4, 4), torch.zeros(4, 4))
        averages.finish()

    step()
    calls = calls_of(step)
    pipeline.close()
    assert [num_bytes for op, num_bytes in calls if op == "all_reduce" and num_bytes >= 80] == [4 * 20]
