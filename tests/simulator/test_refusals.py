"""What makes no sense is refused in one line that says what is wrong: a row for each refusal of the simulator."""

import math
from dataclasses import replace

import pytest
from refused import message
from sharding_cases import plan_of as sharded
from step_cases import LINK, WORKLOAD, cluster_of

import simulator as sim
from distlab.plan import ActionTimes, Contention, Plan, Sharding, Software, one_f_one_b, parse_schedule
from distlab.plan.compression import Compression
from simulator import units
from simulator.engine import event_engine
from simulator.engine.task_graph import COMPUTE, NONE, Graph
from simulator.export import Options
from simulator.hardware import cost, fit
from simulator.memory.advice import split_samples

SIZES = {"hidden_size": 32, "num_heads": 4, "sequence_length": 64, "vocab_size": 96}
GPT = sim.gpt_workload(num_layers=5, **SIZES)  # seven layers, with its ends
SMALL, MACHINE = sim.ModelDescription(**SIZES), sim.cluster("dgx-a100", 8)
SCHEDULE, ONE = one_f_one_b(4, 4), ActionTimes(1.0, 1.0, 1.0)
CODEC = sim.MeasuredCodec(Compression("sign"), 4, 0.0, 0.0, 0.0, 0.0)


def model(**said):
    return sim.ModelDescription(**said).workload()


def step(plan, machine=None, **options):
    return sim.simulate(GPT, machine or cluster_of(64), plan, **options)


def run(times=ONE, text=None, **options):
    return sim.simulate_schedule(parse_schedule(text) if text else SCHEDULE, times, **options)


def graph(*needs, contention=None):
    """Run a graph of operations, of which each needs one."""
    made = Graph()
    for rank, need in enumerate(needs):
        made.add(rank, COMPUTE, 1, needs=[need])
    return event_engine.run(made, contention)


def soft(**options):
    return replace(MACHINE, software=Software(**options))


ROWS = [
    ("are two models", lambda: model(model="llama-3-8b", config="c.json")),
    ("has its own sizes; leave out num_heads", lambda: model(model="llama-3-8b", num_heads=4)),
    ("top_k is 3 of 2 experts", lambda: model(num_experts=2, top_k=3)),
    ("attention is 'fast'", lambda: model(attention="fast")),
    ("GPT: num_layers is 1,000,000,000; pass at most 10,000", lambda: model(num_layers=10**9)),
    ("num_experts is 1,000,000,000; pass at most 10,000", lambda: model(num_experts=10**9)),
    ("microbatch_size is a number of 309 digits; pass at", lambda: model(microbatch_size=10**308)),
    ("GPT: num_layers is -1", lambda: sim.gpt_workload(num_layers=-1, **SIZES)),
    ("GPT: 5 heads do not divide", lambda: sim.gpt_workload(num_layers=1, **SIZES | {"num_heads": 5})),
    ("no attention that keeps scores", lambda: sim.fuse_attention(sim.fuse_attention(GPT))),
    ("1 convolutions for 2 layers; pass one for each",
     lambda: sim.LlamaSizes(64, 2, 4, 2, 96, 100, convolutions=(3,))),
    ("choose a stage of 0 to 3", lambda: sim.adam_state_bytes(1, zero_stage=4)),
    ("at least 1", lambda: sim.activation_bytes_per_layer(0, 1, 1, 1)),
    ("has moe, which recompute names; choose among layernorm, core_attn, mlp", lambda: step(Plan(recompute="mlp,moe"))),
    ("choose none, selective or full", lambda: sim.activation_bytes_per_layer(8, 1, 1, 1, recompute="maybe")),
    ("choose one of llama-2-7b", lambda: sim.model_by_name("llama-9")),
    *(("groups must divide 8 experts, and those of a token hold 3", lambda g=g: sim.Mixture(8, 3, most_groups=g))
      for g in ((4, 5), (3, 1))),
    *(("pass a", lambda size=size: cost.all_reduce_s(size, 4, LINK)) for size in (-1, math.nan, math.inf)),
    *(("pass a", lambda ranks=ranks: cost.all_reduce_s(1, ranks, LINK)) for ranks in (0, 2.5, True)),
    ("ring, halving_doubling, tree, in_network", lambda: cost.all_reduce_s(1, 2, LINK, "pigeon")),
    ("idle_steps is -1", lambda: replace(LINK, idle_steps=-1)),
    ("no preset 'abacus' among the clusters; choose one of ", lambda: sim.cluster("abacus")),
    ("no preset 'abacus' among the stacks", lambda: sim.cluster("dgx-a100", stack="abacus")),
    ("devices, links, clusters", lambda: sim.names("planets")),
    ("do not fill nodes of 8", lambda: sim.cluster("dgx-h100", 12)),
    ("tensor_overlap is 2", lambda: soft(tensor_overlap=2)),
    *(("a duration is", lambda seconds=seconds: units.to_ns(seconds)) for seconds in (-1e-9, math.nan, 1e12)),
    *(("size", lambda given=given: fit.fit_link(*given, 2)) for given in (
        ([1, 2], [1.0]), ([8, 8], [1.0, 1.1]), ([1, 2], [1.0, math.nan]), ([0, 2], [1.0, 2.0]))),
    ("rank", lambda: fit.fit_link([1, 2], [1.0, 2.0], 1)),
    ("2 numbers of forward; pass one, or one for each", lambda: run(ActionTimes((1, 2), 1, 1))),
    ("input_gradient of -1; pass times >= 0", lambda: run(ActionTimes(1, -1, 1))),
    ("slow_ranks has 4: 2; pass a rank of 0..3", lambda: run(slow_ranks={4: 2})),
    ("slow_ranks has 1: 0; pass a rank of 0..3 and a factor above 0", lambda: run(slow_ranks={1: 0})),
    ("deadlock: rank 0 at 0B0 waits for 1B0; rank 1 at 1F1 waits for 0F1",
     lambda: run(text="0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")),
    ("0F0 is in the schedule twice", lambda: run(text="0F0,0F0,0B0")),
    ("what 0B0 needs is in no rank's order", lambda: run(text="0F0,0B0\n1F0")),
    ("0B0 comes before its own forward", lambda: run(text="0B0,0F0")),
    ("what 0W0 needs", lambda: run(text="0F0,0W0")),
    *(("deadlock: 2 operations can never start: rank 0 lane 0: operation 0 waits for 1 of rank 1",
       lambda how=how: graph(1, 0, contention=how)) for how in (None, Contention(1.25, 1.5))),
    ("needs operation 5; the graph has 1", lambda: graph(5)),
    ("pass times >= 0", lambda: Graph().add(0, COMPUTE, -1)),
    ("a duration is -1 ns; pass times >= 0", lambda: Graph().extend(0, [COMPUTE] * 2, [3, -1], [NONE, NONE])),
    ("rank 1 has no action in the schedule; give it a stage's passes, or leave it out",
     lambda: step(Plan(1, 3), schedule=parse_schedule("1F0,1B0\n,\n0F0,0B0"))),
    ("4 ranks and 4 micro-batches; the plan has", lambda: step(Plan(1, 4, 5), schedule=SCHEDULE)),
    ("4 (pipeline) x 2 (a rank) = 8 stages; workload 'GPT",
     lambda: step(Plan(1, 4, 8, schedule="zb_v", stages_per_rank=2))),
    ("3 (tensor) ranks cannot divide 4 heads", lambda: step(Plan(tensor=3))),
    ("2 (tensor) x 4 (context, all-to-all)", lambda: step(Plan(tensor=2, context=4, context_kind="all_to_all"))),
    ("multiple of 6 positions; got 64", lambda: step(Plan(context=3))),
    ("cannot divide 2 positions", lambda: step(Plan(tensor=4, context=32, sequence_parallel=True))),
    ("32 (data) x 1 (pipeline) x 4 (tensor) = 128 ranks", lambda: step(Plan(tensor=4, data=32))),
    ("5 blocks do not divide into 3 equal stages", lambda: step(Plan(pipeline=3, cut="blocks"))),
    (f"{MACHINE.device.name} has no products of 8 bits; use a device that has",
     lambda: step(Plan(float8="products"), MACHINE)),
    *((f"stage {stage} is timed with whole backwards; schedule 'zb_h1' splits",
       lambda stage=stage: step(Plan(2, 2, 4, schedule="zb_h1", sharding=Sharding(stage)))) for stage in (2, 3)),
    ("simulate times offload with pipeline=1", lambda: step(Plan(4, 2, sharding=Sharding(3, offload="all")))),
    ("stage is 1; pass a plan of stage 3", lambda: sim.sweep_units(GPT, cluster_of(4), sharded(1))),
    ("use at most 7 stages", lambda: sim.memory_of(GPT, Plan(pipeline=8))),
    ("choose one of parameters, gradients", lambda: sim.memory_of(GPT, Plan()).of("cache")),
    ("3 parts do not divide 1 samples", lambda: split_samples(GPT, 3)),
    ("among 4 ranks; the plan has",
     lambda: sim.simulate(WORKLOAD, cluster_of(4), Plan(data=4), measured=sim.Measured(CODEC))),
    ("encode_s is -1", lambda: replace(CODEC, encode_s=-1)),
    ("bandwidth above zero", lambda: sim.with_bandwidth(cluster_of(2), Plan(data=2), 0)),
    ("at least one compression", lambda: sim.sweep_compression(WORKLOAD, cluster_of(2), Plan(data=2), compressions=())),
    ("two replicas",
     lambda: sim.sweep_compression(WORKLOAD, cluster_of(2), Plan(), compressions=[Compression("sign")])),
    ("write a number, or one of llama-3", lambda: sim.Failures("weekly")),
    ("rate is -1.0", lambda: sim.Failures(-1.0)),
    ("storage_bytes_per_s is 'tape'; write a number, or one of meg", lambda: sim.Failures(storage_bytes_per_s="tape")),
    ("restart_s is -1.0; write a number of at least 0", lambda: sim.Failures(restart_s=-1.0)),
    ("save_s is 0.0; write a number above 0", lambda: sim.Failures(save_s=0.0)),
    ("the run has 0 tokens", lambda: sim.Run(0)),
    ("the price is -1.0", lambda: sim.Run(1e9, -1.0)),
    ("cost curve needs", lambda: sim.curve([])),
    ("mtbf_s is -5.0", lambda: sim.goodput(1.0, -5.0)),
    ("does not get on", lambda: sim.goodput(5000.0, 100.0)),
    ("does not get on", lambda: sim.bill(step(Plan(2)), sim.Run(1e9, None, sim.Failures(100.0, save_s=60)))),
    ("the batch has 0 samples", lambda: sim.Question(SMALL, MACHINE, 0)),
    ("headroom is 1.0", lambda: sim.Question(SMALL, MACHINE, 8, headroom=1.0)),
    ("the price is -1.0", lambda: sim.Question(SMALL, MACHINE, 8, price=-1.0)),
    ("the script is ' '", lambda: Options(script=" ")),
    ("the script is", lambda: Options(script="train.py 'open")),
    ("the image is ''", lambda: Options(image="")),
    *((f"max_norm is {norm}", lambda norm=norm: Options(max_norm=norm)) for norm in (-1.0, math.nan)),
    ("share cores", lambda: sim.Question(SMALL, replace(MACHINE, num_cores=2), 8)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), ROWS, ids=[words[:40] for words, _ in ROWS])
def test_what_makes_no_sense_is_refused_in_one_line(words, call):
    said = message(call)
    assert said.startswith("ValueError: ")
    assert words in said
    assert "\n" not in said
