"""What a mesh sends, counted by the recorder: each axis what its technique says, and none sends for a different one."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from equal import Row, Task, calls_of, replicas, train
from hybrid_gpt import BATCH, CONFIG, LENGTH, OPTIMIZERS, UNTIED, batch_of, difference, make_hybrid, make_model
from torch import nn

from distlab.blocks.models import GPT
from distlab.comm import mesh_groups, recorded
from distlab.comm.nodes.wire import ring_bytes
from distlab.compression import make_hook
from distlab.expert_parallel import ExpertParallel
from distlab.hybrid import StageAverages
from distlab.pipeline import Pipeline
from distlab.pipeline.backward.two_parts import prepare_split
from distlab.plan import Mesh, Plan, Sharding, make_schedule
from distlab.plan.compression import Compression, exchanges
from distlab.tensor_parallel import parallelize

BYTES = 8  # of a number in float64
L, S, H, V = CONFIG.num_layers, LENGTH, CONFIG.hidden_size, CONFIG.vocab_size


def count(plan, **options):
    """Run on each rank: return what a step after the first sends, by ranks of the group and operation."""
    hybrid = make_hybrid(plan, **options)
    hybrid.train_step(*batch_of(0), max_norm=1.0)
    with recorded() as seen:
        hybrid.train_step(*batch_of(1), max_norm=1.0)
    sent = {}
    for call in seen.records.rank(dist.get_rank()):
        if call.op != "recv":
            place = call.group, call.op
            sent[place] = sent.get(place, 0) + call.num_bytes
    members = {axis: tuple(dist.get_process_group_ranks(group)) for axis, group in hybrid.groups.items()}
    own = [p for stage in hybrid.stages.values() for p in stage.parameters() if p.requires_grad]
    mixtures = [m for stage in hybrid.stages.values() for m in stage.modules() if isinstance(m, ExpertParallel)]
    sizes = sum(p.numel() for p in own), sum(p.numel() for mixture in mixtures for p in mixture.experts.parameters())
    coordinates, shards = dict(hybrid.coordinates), [p.numel() for p in hybrid.parameters()]
    hybrid.close()
    return sent, members, (*sizes, sum(shards)), coordinates


def bucket(num_elements, num_ranks):
    """Return the bytes of a bucket of gradients and a flag: whole cache lines a rank."""
    line = 64 * num_ranks
    return -(-BYTES * (num_elements + 1) // line) * line


def whole_mesh(num_ranks):
    """Is the batch the same (8 bytes a rank), what is its loss, did anybody fail (16); and the norm (8)."""
    return 8 * num_ranks + 16 + 8


@pytest.mark.on_ranks(8)
def test_tensor_pipeline_and_data_send_what_they_say():
    plan = Plan(data=2, tensor=2, pipeline=2, num_microbatches=2)
    b = BATCH // plan.data // plan.num_microbatches
    everyone = tuple(range(8))
    sent, members, sizes, place = count(plan)
    # 8 b S H (t-1)/t elements a layer and micro-batch: four all-reduces, which send 2 (t-1)/t of what they get.
    num_sums = plan.num_microbatches * (4 * L // 2 + 1)  # and one more of embedding (forward) or output (backward)
    loss = plan.num_microbatches * 3 * b * S * (place["pipeline"] == 1)
    assert sent.pop((members["tensor"], "all_reduce")) == BYTES * (num_sums * b * S * H + loss)
    # Activations or their gradients, a micro-batch at a time, and the own part of the tied weight's gradient.
    assert sent.pop((members["pipeline"], "send")) == BYTES * (plan.num_microbatches * b * S * H + math.ceil(V / 2) * H)
    assert sent.pop((members["pipeline"], "all_reduce")) == 2 * 8 * plan.pipeline  # shapes as before? a failure?
    assert sent.pop((members["data"], "all_reduce")) == BYTES * sizes[0]
    assert sent.pop((everyone, "all_reduce")) == whole_mesh(8)
    assert not sent


@pytest.mark.on_ranks(4)
def test_experts_and_context_send_what_they_say():
    plan = Plan(expert=2, context=2)
    b, s = BATCH // 2, S // 2
    num_experts, top_k = 4, 2
    sent, members, sizes, _ = count(plan, experts=num_experts)
    # A ring: keys and values once forward, and backward these and their gradients: 6 (n-1)/n B S H in all.
    assert sent.pop((members["context"], "send")) == BYTES * L * 6 * b * s * H
    dense, experts = sizes[0] - sizes[1], sizes[1]
    assert sent.pop((members["context"], "all_reduce")) == bucket(experts, 2)
    rows = sent.pop((members["expert"], "all_to_all")) - L * 8 * (num_experts + 4 * 2)  # how many rows will come
    loads = L * 8 * (2 * num_experts + 1)  # how even it was
    assert sent.pop((tuple(range(4)), "all_reduce")) == bucket(dense, 4) + loads + whole_mesh(4)
    assert not sent
    # Each choice of each token goes to its expert and comes back, and so do their gradients.
    rows = torch.tensor(rows)
    dist.all_reduce(rows)
    assert rows.item() == BYTES * L * 4 * BATCH * S * top_k * H


@pytest.mark.on_ranks(4)
def test_sharded_parameters_travel_along_their_copies_alone():
    plan = Plan(data=2, tensor=2, sharding=Sharding(stage=3))
    sent, members, (_, _, shards), _ = count(plan)
    gathered, scattered = 2 * shards + H, 2 * shards  # a bias is frozen
    # What tensor left here is gathered for forward and for backward, and its gradient scattered: half each time.
    same_units = 2 * 40  # do the copies run the same units, in forward and backward?
    if sent.get((members["data"], "send")) is None:  # in shared memory: the group's own calls
        assert sent.pop((members["data"], "reduce_scatter")) == BYTES * scattered
        assert sent.pop((members["data"], "all_gather")) == BYTES * 2 * gathered // 2 + same_units
    else:
        assert sent.pop((members["data"], "send")) == BYTES * (2 * gathered + scattered) // 2
        assert sent.pop((members["data"], "all_gather")) == same_units
    assert sent.pop((tuple(range(4)), "all_reduce")) == whole_mesh(4)
    assert {group for group, _ in sent} == {members["tensor"]}


@pytest.mark.on_ranks(2)
def test_sharded_states_scatter_gradients_and_gather_parameters_and_are_saved_without_a_call():
    hybrid = make_hybrid(Plan(data=2, sharding=Sharding(stage=1)))
    state = hybrid.full_state_dict()
    assert calls_of(hybrid.shard_state) == calls_of(lambda: hybrid.load_full_state_dict(state)) == []
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


TOP_K, POWER_SGD = Compression("top_k", ratio=0.1), Compression("powersgd", rank=1, min_saving=1.0)


def on_a_mesh(plan, **options):
    """Run on each rank: return losses, the whole state, and the bytes of all-gathers in the last step."""
    hybrid = make_hybrid(plan, **options)
    losses = []
    for step in range(3):
        with recorded() as seen:
            losses.append(hybrid.train_step(*batch_of(step)).item())
    gathered = sum(call.num_bytes for call in seen.records.rank(dist.get_rank()) if call.op == "all_gather")
    state = hybrid.full_state_dict()
    hybrid.close()
    return losses, state, gathered


def by_data_parallel(plan):
    """Run on each rank: the same steps with DataParallel; return the model's state, and shapes of what was averaged."""
    sizes = {"bucket_bytes": plan.bucket_bytes, "first_bucket_bytes": plan.first_bucket_bytes}
    technique = replicas(hook=make_hook(plan.compression), **sizes)
    way = train(Row(Task(make_model, batch_of, GPT.loss), OPTIMIZERS["sgd"], technique), range(3))
    return way.state(), [list(p.shape) for p in way.model.parameters() if p.requires_grad]


@pytest.mark.on_ranks(2)
def test_copies_compress_as_data_parallel_replicas_do():
    for compression in (TOP_K, POWER_SGD):
        plan = Plan(data=2, compression=compression)
        expected, shapes = by_data_parallel(plan)
        losses, state, gathered = on_a_mesh(plan)
        assert difference(state, expected) == 0.0
        assert all(map(math.isfinite, losses))
        calls = exchanges(compression, shapes, bytes_per_element=8)  # all of this model fits one bucket
        assert gathered == sum(call.num_bytes for call in calls if call.kind == "all_gather")


def one_backward_whole_and_one_in_parts(sequence_parallel, config):
    inputs, targets = batch_of(0)
    model = parallelize(make_model(0, config=config), sequence_parallel=sequence_parallel)
    alone, split = copy.deepcopy(model), prepare_split(model)
    losses, works = [one.loss(one(inputs), targets) for one in (alone, model)], []
    whole_sent = calls_of(losses[0].backward)
    assert calls_of(lambda: works.append(split.input_gradient(losses[1:], [None]))) == whole_sent != []
    for name, parameter in alone.named_parameters():
        waits = name.rpartition(".")[0] in split.report.deferred
        assert waits == (model.get_parameter(name).grad is None) or parameter.grad is None, name
    assert calls_of(lambda: split.weight_gradient(works[0])) == [], "W sends nothing"
    for mine, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert (mine.grad is None) == (wanted.grad is None)
        assert mine.grad is None or torch.allclose(mine.grad, wanted.grad, rtol=0, atol=1e-12)
    return split.report


@pytest.mark.on_ranks(2)
def test_the_weights_of_parallel_layers_wait_and_w_sends_nothing():
    for sequence_parallel, config in ((False, CONFIG), (True, UNTIED)):
        report = one_backward_whole_and_one_in_parts(sequence_parallel, config)
        assert report.deferred_elements / report.num_elements > (0.9 if sequence_parallel else 0.94)
        reasons = {name: why for name, why in report.kept if "norm" not in name}
        no_rule = {"position_embedding": "SequenceParallelPositions has no rule"}
        assert reasons == (no_rule if sequence_parallel else {})
