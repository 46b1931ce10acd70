# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10. All axes on one mesh
#
# 90 minutes. Comes after lesson 3 (data parallel), lesson 7 (sharding), lesson 8 (tensor parallel) and lesson 9
# (pipelines). You need no GPU: eight processes on this machine are the eight ranks.
#
# Afterwards you can
#
# - say where a rank stands on a mesh, who its neighbours are on each axis, and what it works on;
# - say for every parameter over which axes its gradient is summed and by what it is divided, and clip by the true norm;
# - train a GPT on a mesh of data, tensor and pipeline, equal to one process, and check the predicted step;
# - choose degrees and the order of axes for a cluster by simulation, and say what decides;
# - say how a tensor lies on each axis, move it with the fewest bytes, and find a missing sum before anything runs.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You rent 64 H100s, eight machines of eight, at 3 dollars an hour for each GPU, to train a GPT of 65 billion
# parameters. Its states are a terabyte (16 bytes per parameter, lesson 6), so no GPU holds them. You have three ways to
# split: *tensor* cuts each layer (lesson 8), *pipeline* cuts between layers (lesson 9), *data* cuts the batch (lesson
# 3). They can be combined, as long as
#
# $$\text{data} \times \text{tensor} \times \text{pipeline} = 64.$$
#
# Say tensor 8, pipeline 4, data 2. A colleague sets up the job. It starts, the loss falls. The launcher has numbered
# the ranks machine by machine, and the program says "rank 0, 8, 16, ... share a layer". Every layer is then cut over
# eight *machines*, and the eight GPUs of one machine hardly talk to each other. Nothing is wrong with the numbers.

# %%
from distlab.plan import Mesh
from distlab.plan import Plan
from simulator import adam_state_bytes, cluster, gpt_workload, simulate

SIZES = {"hidden_size": 8192, "num_layers": 80, "num_heads": 64, "sequence_length": 2048, "vocab_size": 51200}
MODEL = gpt_workload(**SIZES)
MACHINE = cluster("dgx-h100", 64, stack="best-case")
MONTH = 64 * 3 * 24 * 30  # dollars
GOOD = ("pipeline", "data", "expert", "context", "tensor")  # slowest to fastest: tensor ranks are neighbours
BAD = ("tensor", "data", "expert", "context", "pipeline")

# %%
from simulator.viz import draw_mesh

for axes in ({"pipeline": 4, "data": 2, "tensor": 8}, {"tensor": 8, "data": 2, "pipeline": 4}):
    asked = {"devices_per_node": 8, "rank": 0}
    show(draw_mesh(Mesh(axes), **asked))

# %% tags=["nbval-check-output"]
states = adam_state_bytes(MODEL.num_parameters)
print(f"{MODEL.num_parameters / 1e9:.1f} billion parameters: {states / 1e12:.2f} TB of states, 0.08 TB a GPU")
print(f"64 GPUs: {MONTH:,} dollars a month")

# %% [markdown]
# Each of the two pictures shows the 64 ranks three times, once for each axis. A row is a machine. The pictures and
# the settings call a machine a **[node](../GLOSSARY.md#node)**. The coloured ranks with the letter A are the group of
# rank 0 on this axis: those that it talks to. In the upper picture its tensor group is one machine. In the lower one,
# which is the colleague's order, it is spread over all machines. The numbers that the ranks compute are the same.
# What does it cost, and how do you find the order that costs least? This lesson answers it.

# %%
guess_0 = predict("How many times longer does a step take with tensor across the machines?", unit="x")
guess_0

# %%
QUESTION = Plan(data=2, tensor=8, pipeline=4, num_microbatches=32, recompute="selective")
good, bad = (simulate(MODEL, MACHINE, QUESTION, order=order) for order in (GOOD, BAD))
print(guess_0.compare(bad.duration_s / good.duration_s, how="simulated"))

# %% tags=["nbval-check-output"]
guess_0.lock()
for words, step in (("tensor inside a machine", good), ("tensor across machines", bad)):
    lost = MONTH * (1 - good.duration_s / step.duration_s)
    print(f"{words:24} {step.duration_s:6.2f} s a step, {step.utilization:4.0%} of peak; ", end="")
    print(f"{lost:7,.0f} dollars a month for the wire")

# %%
from simulator.viz import draw_bars


def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    show(draw_bars(numbers, unit=unit, title=title, subtitle=subtitle))


guess_0.lock()
shown = {"tensor inside a machine": good.duration_s, "tensor across machines": bad.duration_s}
show_bars(shown, "s", "The same GPUs and the same degrees: a step by the order of the axes")

# %% [markdown]
# The same GPUs, the same degrees, the same numbers; one line decides. This lesson is about that line, and about the
# others that go wrong when axes meet: whose samples, which gradients over which group, which norm.

# %% [markdown]
# ## The mesh
#
# A **[mesh](../GLOSSARY.md#mesh)** gives each rank a place on every axis. Ranks count as a digital clock does: its last
# place, the seconds, changes with every count, and the place before it moves on by one when the last is full. So the
# last axis varies fastest. On pipeline 2 x data 2 x tensor 2, rank 5 is stage 1, replica 0, tensor part 1.
#
# A **group** of an axis holds the ranks that differ on that axis alone. They are who a rank talks to there: tensor
# parts add up a layer's output in it, replicas average gradients in it, stages hand activations on in it.

# %%
guess_4 = predict("With which rank does rank 5 average its gradients on this mesh?", unit="rank")
guess_4

# %%
AXES_222 = {"pipeline": 2, "data": 2, "tensor": 2}
print(guess_4.compare(Mesh(AXES_222).group_of(5, "data")[1], how="counted"))

# %% tags=["nbval-check-output"]
guess_4.lock()
for rank in range(8):
    print(rank, Mesh(AXES_222).coordinates(rank))
for axis in AXES_222:
    print(f"{axis:8} groups: {Mesh(AXES_222).groups(axis)}")

# %% [markdown]
# Read two lines of it again. The tensor groups are neighbours: they share a machine as long as there are at most as
# many as a machine has GPUs. The pipeline groups are as far apart as can be. That is what "slowest" and "fastest"
# mean, and why the order of the axes is the order of the wires.

# %%
show(
    draw_mesh(Mesh(AXES_222), devices_per_node=4),
    "eight ranks on pipeline 2 x data 2 x tensor 2; tensor groups are neighbours",
)

# %% [markdown]
# `mesh_groups(mesh)` makes the groups. `dist.new_group` is a collective: every rank makes every group, also those that
# it is not in. A rank that makes fewer waits forever, or makes the others wait. Each rank sums its number over each of
# its groups, to see whom it meets:

# %%
from distlab.comm.launch.fork_client import preload
from distlab.comm import mesh_groups

preload("distlab.measure.runs.run")  # loads nearly all of the package once, and not in each of eight ranks
ranks = Ranks(8, timeout_s=120)


def meet():
    total = {}
    for axis, group in mesh_groups(Mesh(AXES_222)).items():
        number = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(number, group=group)
        total[axis] = int(number)
    return total


met = ranks.run(meet)
for axis in AXES_222:
    assert all(met[rank][axis] == sum(group) for group in Mesh(AXES_222).groups(axis) for rank in group)
print(f"eight real ranks met the groups above; rank 5's sums: {met[5]}")

# %% [markdown]
# ## What a rank works on
#
# Two kinds of axes. Along **tensor** and **pipeline** ranks hold different parts of *one* model, so they must work on
# the *same* samples. Along **data** they hold copies and must work on *different* ones. Lesson 11 adds two axes, and
# here is all you need of them: along **context** ranks share the positions of the same samples, along **expert** they
# take different samples, as along data.
#
# $$\text{global batch} = \text{samples a micro-batch} \times \text{micro-batches} \times \text{data} \times
# \text{expert}$$
#
# The most common fault of all: a sampler that was right in data parallel, `rank=dist.get_rank()`, brought along to a
# mesh. Tensor ranks then add up halves of *different* samples. Nothing fails. The loss even falls.
#
# ### Exercise: my part of the batch
#
# Write `my_part(batch, rank, mesh, num_microbatches)`. `mesh.coordinates(rank)` says where the rank stands,
# `dict(mesh.axes)` how long the axes are; the mesh has all five.

# %% exercise="10.my_batch"

# %% tags=["nbval-check-output"]
FIVE = Mesh({"pipeline": 2, "data": 2, "expert": 1, "context": 1, "tensor": 2})
tokens = torch.arange(8).view(8, 1)
for rank in range(8):
    print(f"rank {rank}: {[part.flatten().tolist() for part in my_part(tokens, rank, FIVE, 2)]}")

# %% [markdown]
# (Ring attention places positions in a zigzag and not in one piece, so that no rank has all the late and expensive
# ones: lesson 11.)

# %% [markdown]
# ## Two axes by hand
#
# Before the whole mesh, two axes: data 4 x tensor 2. `parallelize` cuts a GPT over the tensor group (lesson 8). Then
# each gradient is averaged over the data group, and only there. That is all.

# %%
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig
from distlab.tensor_parallel import parallelize

CORPUS = ByteCorpus(python_documentation(), context=32)
CONFIG = GPTConfig(context=32, num_layers=2, num_heads=4, hidden_size=64, tied=False)
TWO = Mesh({"pipeline": 1, "data": 4, "expert": 1, "context": 1, "tensor": 2})


def new_gpt():
    return GPT(CONFIG, torch.Generator().manual_seed(0)).double()


# %%
pair_of_axes = Mesh({"data": 4, "tensor": 2})
show(draw_mesh(pair_of_axes, devices_per_node=4))


# %%
def train_2d(part_of, num_steps=2):
    groups, losses = mesh_groups(TWO), []
    model = parallelize(new_gpt(), groups["tensor"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        inputs, targets = (part_of(tokens, dist.get_rank(), TWO, 1)[0] for tokens in CORPUS.batch(step, 16))
        loss = model.loss(model(inputs), targets)
        loss.backward()
        for value in (loss.detach_(), *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(value, group=groups["data"])
            value /= groups["data"].size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


# %%
def train_alone(num_steps=2):
    model, losses = new_gpt(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        inputs, targets = CORPUS.batch(step, 16)
        loss = GPT.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# %%
alone = train_alone()
together = ranks.run(train_2d, my_part)[0]
print("one process:", " ".join(f"{loss:.6f}" for loss in alone))
print("data 4 x tensor 2:", " ".join(f"{loss:.6f}" for loss in together))
print(f"they differ by {max(abs(a - b) for a, b in zip(alone, together, strict=True)):.0e}")

# %% [markdown]
# Equal to one process, in eight. Now the fault from above: samples by rank. The library's tensor-parallel GPT compares
# its tokens when their shape is new, and says so on every rank. (Most libraries do not look.)


# %%
def by_rank(tokens, rank, mesh, num_microbatches):
    return tokens.chunk(mesh.size)[rank : rank + 1]


def refused():
    try:
        return f"trained: {train_2d(by_rank)}"
    except ValueError as error:
        return str(error)


print(ranks.run(refused)[0].partition(":")[0])

# %% [markdown]
# ## Which gradient is summed over which axis
#
# Data ranks average, tensor ranks do not: easy. It is less easy for some parameters.
#
# - A **norm** is whole on every tensor rank. Without sequence parallelism all of them go over the same positions and
#   find the same gradient: nothing to do. *With* it (lesson 8) each goes over its own part of the positions: a sum is
#   missing.
# - A **tied** embedding is used in the first stage as embedding and in the last as output layer. The two copies find
#   different parts of one gradient.
# - An **expert** is on one rank of the expert axis, and that rank has already got the tokens of all others.
#
# And the divisor? Each rank's loss is the mean over its own positions. The batch was cut into data x expert x context
# parts of equal size, so that many means make up the mean of all, *whatever the parameter*.
#
# ### Exercise: the axes of a gradient
#
# Write `gradient_axes(kind, axes, sequence_parallel)`: over which axes, divided by what.

# %% exercise="10.gradient_axes"

# %% tags=["nbval-check-output"]
EXAMPLE = {"pipeline": 2, "data": 2, "expert": 4, "context": 2, "tensor": 8}
for kind in ("matrix", "norm", "tied", "expert"):
    summed, number = gradient_axes(kind, EXAMPLE, True)
    print(f"{kind:7} sum over {', '.join(summed):32} divide by {number}")

# %% [markdown]
# All parameters of one kind can be summed in one message over all its axes: make one group of data x expert x context,
# as the library does, and the sum needs one all-reduce instead of three.

# %% [markdown]
# ## Clip by the norm of a model that no rank holds
#
# Clipping needs the norm of *all* gradients, and no rank has them all. Each stage has its own, each tensor rank its
# part, and some are on several ranks. Two faults are in public code, one each way. The norm over the own stage is too
# small, and each stage clips by a different factor. And what is whole on $t$ tensor ranks, summed over them, counts $t$
# times. Before you write it, guess: the norms of a GPT are few. Of all elements of the model above, what part is whole
# on every tensor rank?

# %%
guess_1 = predict("What part of the parameters is whole on every tensor rank?", unit="%")
guess_1

# %%
whole = {
    name
    for name, _ in new_gpt().named_parameters()
    if "norm" in name or "position" in name or name.endswith("output.bias") and "blocks" in name
}
count = sum(parameter.numel() for name, parameter in new_gpt().named_parameters() if name in whole)
print(guess_1.compare(100 * count / new_gpt().num_parameters, how="counted"))

# %%
guess_1.lock()
all_of_it = new_gpt().num_parameters
shown = {"whole on every tensor rank": count / 1e3, "split over tensor ranks": (all_of_it - count) / 1e3}
show_bars(
    shown, "thousand", "Few parameters are whole on every rank, and they count too often", "parameters of the GPT"
)

# %% [markdown]
# Little, and little is what makes it hard to see: the norm is wrong by a few per cent, or by one. It stays unnoticed
# until a run on 8 ranks behaves unlike the run on 4.
#
# ### Exercise: the norm, each element once
#
# Write `global_norm(gradients, split_over, groups)`. `split_over[name]` are the axes along which ranks hold different
# parts of this gradient; along all other axes there are copies. Stages hold different gradients, and different
# *numbers* of gradients: one all-reduce per tensor would hang. Budget: one number per axis.

# %% exercise="10.global_norm"


# %%
def norms_on_mesh():
    groups = mesh_groups(TWO)
    model = parallelize(new_gpt(), groups["tensor"])
    inputs, targets = CORPUS.batch(0, 16)
    model.loss(model(inputs), targets).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    split_over = {name: ["pipeline"] if name in whole else ["pipeline", "tensor"] for name in gradients}
    local = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    return float(global_norm(gradients, split_over, groups)), float(local)


# %%
one = new_gpt()
GPT.loss(one(CORPUS.batch(0, 16)[0]), CORPUS.batch(0, 16)[1]).backward()
true = float(torch.cat([parameter.grad.flatten() for parameter in one.parameters()]).norm())
yours, local = ranks.run(norms_on_mesh)[0]
print(f"one process {true:.9f}, yours on data 4 x tensor 2 {yours:.9f}, rank 0's own parts {local:.9f}")

# %%
shown = {"one process": true, "yours, on eight ranks": yours, "rank 0's own parts": local}
show_bars(shown, "", "The norm of all gradients, and what one rank would take for it")

# %% [markdown]
# ## Three axes by hand
#
# Each axis has one question, and one call for it. Tensor ranks add up the parts of a layer's output. Stages hand
# activations on, and gradients back. Replicas average. The library's `plain_mesh_step` is one step of that, where a
# stage is two matrices, the first cut by columns and the second by rows:

# %%
import inspect

from distlab.hybrid import plain_mesh_step

print(inspect.getsource(plain_mesh_step).rpartition('"""\n')[2])


# %%
def stages_and_batch():
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, 8, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(4)]
    return weights, *torch.randn(2, 12, 8, generator=draw, dtype=torch.float64)


def one_process():
    (a, b, c, d), x, target = stages_and_batch()
    loss = (torch.tanh(torch.tanh(x @ a) @ b @ c) @ d - target).square().mean()
    loss.backward()
    return loss.item(), [a.grad, b.grad, c.grad, d.grad]


# %%
def by_hand():
    mesh = Mesh(AXES_222)
    groups, place = mesh_groups(mesh), mesh.coordinates(dist.get_rank())
    stage, tensor, replica = place["pipeline"], place["tensor"], place["data"]

    def my_parts(four):
        return four[2 * stage].chunk(2, 1)[tensor], four[2 * stage + 1].chunk(2)[tensor]

    weights, x, target = stages_and_batch()
    mine = [part.detach().clone().requires_grad_() for part in my_parts(weights)]
    loss = plain_mesh_step(*mine, x.chunk(2)[replica], target.chunk(2)[replica], groups)
    theirs = my_parts(one_process()[1])
    return float(loss), max(float((a.grad - b).abs().max()) for a, b in zip(mine, theirs, strict=True))


# %%
losses, gaps = zip(*ranks.run(by_hand), strict=True)
print(f"loss on data 2 x tensor 2 x pipeline 2: {losses[0]:.6f}; one process: {one_process()[0]:.6f}")
print(f"gradients on eight ranks and on one differ by {max(gaps):.0e}")

# %% [markdown]
# ## The whole mesh: 2 x 2 x 2
#
# `distlab.hybrid.Hybrid` does it for a GPT: tensor-parallel layers inside pipeline stages inside replicas. Every
# rank gives it the whole batch, and it takes its own part. A plan says the degrees.

# %%
from distlab.hybrid import Hybrid

CUBE = Plan(data=2, tensor=2, pipeline=2, num_microbatches=4)


def train_mesh(plan, num_steps=2, dtype=torch.float64):
    hybrid = Hybrid(new_gpt().to(dtype), plan, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    try:
        steps = [hybrid.train_step(*CORPUS.batch(step, 16)) for step in range(num_steps)]
        return [float(loss) for loss in steps], hybrid.full_state_dict()
    finally:
        hybrid.close()


# %%
def compare_losses(name, plan):
    losses, _ = ranks.run(train_mesh, plan)[0]
    gap = max(abs(a - b) for a, b in zip(alone, losses, strict=True))
    print(f"{name:44} loss {losses[0]:.4f} to {losses[-1]:.4f}; one process differs by {gap:.0e}")


compare_losses("data 2 x tensor 2 x pipeline 2", CUBE)

# %% [markdown]
# Eight ranks, three axes, the losses of one process up to rounding, in float64. Are they **equal in every bit**? Now in
# float32, all parameters after ten steps on one layout, on the same one again, and on a different one:

# %%
states = (ranks.run(train_mesh, plan, 10, torch.float32)[0][1] for plan in (Plan(data=8), Plan(data=8), CUBE))
first, again, cube = (torch.cat([one.flatten() for one in state.values()]) for state in states)
for words, other in (("data 8, twice", again), ("data 8 and all three axes", cube)):
    equal, gap = (first == other).double().mean(), (first - other).abs().max()
    print(f"{words:26} {equal:4.0%} of parameters are equal in every bit; the largest gap is {gap:.0e}")

# %% [markdown]
# A sum in floating point depends on its order, and a layout is an order: data 8 adds eight gradients of two samples
# each, tensor 2 makes every product of a row-cut layer from two halves. For equal bits ranks would have to send all
# terms in place of sums. So compare a changed program with itself, on one layout, bit for bit; two layouts by a
# tolerance. On GPUs even the first must be asked for: some kernels add in the order in which threads come.
# `torch.use_deterministic_algorithms(True)`, with `CUBLAS_WORKSPACE_CONFIG=:4096:8`, takes others or refuses.
# Megatron-LM's `--deterministic-mode` sets both and `NCCL_ALGO=Ring`, and refuses `--tp-comm-overlap`. Both promise
# equal runs on the same layout, hardware and versions; neither promises them over layouts.
#
# What did each axis send? The recorder knows which group each call was in.


# %%
from distlab.comm.record.operations import ring_bytes


def axis_of(call, mesh):
    if call.op in ("send", "recv"):
        return "pipeline"
    rank = dist.get_rank()
    return next((axis for axis in mesh.names if mesh.group_of(rank, axis) == call.group), "all ranks")


# %%
def traffic(plan):
    hybrid = Hybrid(new_gpt().float(), plan, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    hybrid.train_step(*CORPUS.batch(0, 16))  # in the first step ranks also compare shapes
    with recorded() as seen:
        hybrid.train_step(*CORPUS.batch(1, 16))
    rows, (rank, mesh) = {}, (dist.get_rank(), hybrid.mesh)
    for call in seen.records.calls(rank):
        sent = call.num_bytes if call.op == "send" else ring_bytes(call.op, call.num_bytes, len(call.group))
        calls, total = rows.get(axis := axis_of(call, mesh), (0, 0))
        rows[axis] = calls + 1, total + sent
    hybrid.close()
    return rows


# %%
by_axis = dict(sorted(ranks.run(traffic, CUBE)[0].items()))
for axis, (calls, sent) in by_axis.items():
    print(f"rank 0, {axis:10} {calls:3} calls, {sent / 1e3:7.1f} kB sent in a step")
shown = {axis: sent / 1e3 for axis, (_, sent) in by_axis.items()}
show_bars(shown, "kB", "The tensor axis sends most", "rank 0, one step, as recorded")

# %% [markdown]
# The tensor axis has most of the calls and most of the bytes, and each of its calls is waited for. That alone says
# which axis wants the best wire. (The first row: the batch is compared and the loss averaged over all ranks.)
#
# ### Measured over predicted
#
# One replica of it, tensor 2 x pipeline 2 on four ranks, with two micro-batches, between calibrations of this machine:
# the simulator takes measured speeds and predicts the step.

# %%
from distlab.measure import RunResult, TrainingRun, overlay_of_run, time_training

ranks.close()
ranks = Ranks(4, timeout_s=120)
SQUARE = Plan(tensor=2, pipeline=2, num_microbatches=2)
TRAINING = TrainingRun(CONFIG, SQUARE, num_updates=1, num_windows=4, budget_s=7.0)

# %%
overlay = overlay_of_run(RunResult(TRAINING, ranks.run(time_training, TRAINING)))
print(overlay)

# %%
from simulator.viz import Timeline

timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, overlay.predicted.duration_s)  # the predicted step's length

# %% [markdown]
# The upper row of each pair is measured, the pale one under it predicted. The order of boxes is the same, and tensor
# pairs (ranks 0 and 1, 2 and 3) move in step. The simulator draws tensor's sums as blue boxes of their own; in the
# measured step they lie inside the forward and backward boxes. A measured receive begins when its rank begins to wait,
# so the bubble lies in it.
#
# Half of the measured steps end in the grey band; the prediction lets them end between the dotted lines. The two lines
# are the medians. Where four ranks share fewer cores, a rank that waits lends its core to the others, and their boxes
# get shorter; the prediction does so too. So on few cores a bubble costs little. If the picture says that the machine
# was not calm, close other programs and run the cell above again: it calibrates again, too.

# %% [markdown]
# ## Which axis on which wire
#
# The order of the axes decides which groups lie inside a machine. On the question's cluster a GPU brings 370 GB/s to
# its neighbours over NVLink and 50 GB/s at most to a different machine. What does each axis send, and may it wait?
#
# | axis | sends | when |
# |---|---|---|
# | tensor | $8 \frac{t-1}{t}$ activations a layer and micro-batch | in every layer; all of it is waited for |
# | pipeline | 2 activations per stage border and micro-batch | during other micro-batches |
# | data | 2 x gradients of a rank's part, once per step | during backward |

# %% tags=["nbval-check-output"]
print(f"{'axis':10}{'GB a rank':>10}{'waited for':>12}   in a step, tensor inside")
for axis in ("tensor", "pipeline", "data"):
    print(f"{axis:10}{good.sent_bytes_by_axis[axis] / 1e9:10.1f}{good.exposed_by_axis[axis]:10.2f} s")

# %% [markdown]
# ### Exercise: place the axes
#
# Write `place_axes(axes, traffic, devices_per_node)`: the order, slowest to fastest, in which the fewest bytes cross
# between machines. Beware of the rule "the busiest axis innermost": one that does not fit a machine crosses anyway, and
# takes the room from one that would fit.

# %% exercise="10.place"

# %% tags=["nbval-check-output"]
SENT = {axis: good.sent_bytes_by_axis[axis] for axis in ("data", "pipeline", "tensor")}
print("yours, slowest to fastest:", ", ".join(place_axes({"data": 2, "pipeline": 4, "tensor": 8}, SENT, 8)))

# %% [markdown]
# Bytes are a guess at time. The simulator has the time: all orders, fastest first.

# %% tags=["nbval-check-output"]
from simulator import rank_orders

orders = rank_orders(MODEL, MACHINE, QUESTION)
for order, step in orders:
    long = [axis for axis in order if getattr(QUESTION, axis) > 1]  # axes of size 1 may stand anywhere
    print(f"{', '.join(long):24} {step.duration_s:6.2f} s, {step.utilization:.0%} of peak")

# %%
from simulator.viz import draw_placement

show(draw_placement(orders), "time of a step by order of axes; tensor across machines is the slowest")

# %% [markdown]
# **Tensor inside a machine** decides nearly everything. Between the others there is little: the pipeline's messages are
# few, and data's are large but hide behind backward. That is why "tensor within the machine, then data, pipeline
# outermost" is the common recipe. It is a result, though, and not a law: a different wire or a different model, a
# different order.

# %% [markdown]
# ### By the clock
#
# The same choice on real ranks (nodes need Linux; elsewhere do not run these cells: below them stands what a Linux
# machine showed). Your machine becomes two nodes of two ranks: memory inside a node, and between nodes a wire of 40
# MB/s and 200 us for each rank. On data 2 x tensor 2 one axis must cross. Which one? First what each sends, and what
# your `place_axes` says.

# %%
from distlab.comm import Nodes

MIDDLE = GPTConfig(context=32, num_layers=4, num_heads=4, hidden_size=128, tied=False)
PLACED = Plan(data=2, tensor=2)
ORDERS = {"tensor inside a node": GOOD, "tensor across nodes": BAD}
two_nodes = Ranks(4, timeout_s=120, nodes=Nodes(2, between="40MB/s,200us"), record=False)
sent = {"tensor": 16 * 16 * 32 * 128 * 4, "data": GPT(MIDDLE).num_parameters / 2 * 4}  # 16 sums; half the gradients
print("bytes:", {axis: f"{number / 1e6:.1f} MB" for axis, number in sent.items()}, end="; ")
print("yours, slowest to fastest:", ", ".join(place_axes({"data": 2, "tensor": 2}, sent, 2)))

# %%
guess_3 = predict("How many times longer is the step with tensor across the two nodes?", unit="x")
guess_3

# %% [markdown]
# Then the simulator's word. A calibration measures both wires, inside the nodes and between them, and how fast the
# ranks compute. It sees neither this model nor this plan.

# %%
from distlab.comm import node_groups
from distlab.measure import fit_cluster, measure_round, median_round


def calibrate_nodes():
    groups = node_groups()
    return [measure_round(torch.device("cpu"), nodes=groups) for _ in range(3)]


machine = fit_cluster(median_round(two_nodes.run(calibrate_nodes)[0]), 4, num_nodes=2)
for words, wire in (("inside", machine.intra_node), ("between", machine.inter_node)):
    line = wire.protocols[-1]
    print(f"{words:8} {line.latency_s * 1e6:6.0f} us {line.bytes_per_s / 1e6:8.1f} MB/s")


# %%
def step_seconds(order, num_steps=6):
    import time

    generator = torch.Generator().manual_seed(0)
    hybrid = Hybrid(GPT(MIDDLE, generator), PLACED, lambda own: torch.optim.SGD(own, lr=0.1), order=order)
    times = []
    for step in range(num_steps):
        dist.barrier()
        start = time.perf_counter()
        hybrid.train_step(*CORPUS.batch(step, 32))
        times.append(time.perf_counter() - start)
    hybrid.close()
    return sorted(times[1:])[num_steps // 2 - 1]  # the middle one, without the first, which compares shapes


# %%
counted = TrainingRun(model=MIDDLE, plan=PLACED, batch_size=32).count()
measured = {words: max(two_nodes.run(step_seconds, order)) for words, order in ORDERS.items()}
foretold = {words: simulate(counted, machine, PLACED, order=order).duration_s for words, order in ORDERS.items()}
two_nodes.close()
print(guess_3.compare(measured["tensor across nodes"] / measured["tensor inside a node"]))
for words in ORDERS:
    print(f"{words:22} measured {measured[words] * 1e3:4.0f} ms, predicted {foretold[words] * 1e3:4.0f} ms")

# %%
guess_3.lock()
shown = {words: {"measured": 1e3 * measured[words], "predicted": 1e3 * foretold[words]} for words in ORDERS}
show_bars(shown, "ms", "The axis that may not wait belongs inside the node", "a step on 2 x 2 ranks, 40 MB/s between")

# %% [markdown]
# The clock agrees on who wins. Both orders compute the same, and both send over the slow wire. Tensor's sums are more
# bytes here, and each of them is waited for; data's gradients travel once a step, while backward goes on.
#
# How near are the predictions? Look at the calibration: a message between nodes has more latency than the 200 us on the
# wire's label. The rest is most likely the time that ranks which share cores need to wake up, and the prediction
# charges every message with it. On a busy machine that is several ms, and predictions are much too long.

# %% [markdown]
# ## Which degrees?
#
# 64 is a product of three numbers in 28 ways. The batch is fixed: 64 samples of 2,048 tokens. More data ranks have
# fewer micro-batches each, so a larger bubble; more tensor ranks send more; few of both do not fit. Let Adam's states
# be shared among data ranks (ZeRO-1), and let tensor ranks be sequence parallel. Which is fastest?

# %%
guess_2 = predict("Which tensor degree is fastest: 1, 2, 4, 8 or 16?", unit="ranks")
guess_2


# %%
from itertools import product

from distlab.plan import Sharding


def all_plans(num_ranks, batch):
    for tensor, pipeline in product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        data = num_ranks // (tensor * pipeline)
        if data * tensor * pipeline != num_ranks or batch % data:
            continue
        options = {"recompute": "selective", "sequence_parallel": tensor > 1, "sharding": Sharding(min(data - 1, 1))}
        yield Plan(data=data, tensor=tensor, pipeline=pipeline, num_microbatches=batch // data, **options)


# %%
steps = sorted((simulate(MODEL, MACHINE, plan) for plan in all_plans(64, 64)), key=lambda step: step.duration_s)
fitting = [step for step in steps if step.memory.max_bytes < 80e9]
print(guess_2.compare(fitting[0].plan.tensor, how="simulated"))

# %% tags=["nbval-check-output"]
guess_2.lock()
print(f"{len(steps)} plans, {len(fitting)} of them fit 80 GB; waited for, in seconds:")
for step in fitting:
    plan, waited = step.plan, step.exposed_by_axis
    words = f"data {plan.data:2} tensor {plan.tensor:2} pipeline {plan.pipeline}: {step.duration_s:5.2f} s"
    exposed = ", ".join(f"{axis} {waited[axis]:4.2f}" for axis in ("tensor", "data", "pipeline"))
    print(f"{words}, bubble {step.bubble_fraction:3.0%}, {exposed}; {step.memory.max_bytes / 1e9:2.0f} GB")

# %% [markdown]
# Now with the mouse. Change one degree, then a second one until they make 64 again. What does each axis expose, and
# what does a GPU hold? (Without ZeRO-1, the question's plan with tensor 4 does not fit; choose a sharding.)

# %%
from simulator.viz import degrees_panel

degrees = degrees_panel(MODEL, MACHINE, plan=QUESTION)
degrees

# %%
degrees.controls["tensor"].value = 4
print(degrees.text)

# %% [markdown]
# Read the table by its columns; each axis has a price of its own.
#
# - **Tensor**: what it exposes grows with the degree, and jumps where it leaves the machine (16). So: as small as the
#   other two allow, never across machines.
# - **Pipeline**: it exposes next to nothing and pays in its bubble, $(p-1)/(m+p-1)$. With tensor 2 the model fits only
#   on 8 stages, and with 16 micro-batches that bubble costs more than tensor 4 exposes.
# - **Data**: cheap on this wire, but more replicas have fewer micro-batches each, and hold more of the model.
#
# That is why the *global batch* is part of the plan: twice the samples are twice the micro-batches, and the balance
# shifts from tensor to pipeline. The winner takes a tenth less time than the best plan by the recipe "tensor 8, as many
# as a machine has": a rule of thumb brings you near, and a search of a few seconds brings the rest.

# %% [markdown]
# ## Two axes that many use: sharding and tensor
#
# "2D parallel" is tensor inside a machine and FSDP (lesson 7) across machines: no pipeline, no bubble. Along data,
# ranks hold shards of what tensor left them. The two fit together because FSDP does not look into a layer: it gathers
# the rank's own rows, whatever they are a part of.

# %%
compare_losses("FSDP over 2, tensor 2", Plan(data=2, tensor=2, sharding=Sharding(3)))

# %% tags=["nbval-check-output"]
shown = {}
for name, plan in (
    ("FSDP over 64", Plan(data=64, recompute="selective", sharding=Sharding(3))),
    (
        "FSDP over 8, tensor 8",
        Plan(data=8, tensor=8, sequence_parallel=True, recompute="selective", sharding=Sharding(3)),
    ),
    ("data 2, tensor 8, pipeline 4", QUESTION),
):
    workload = gpt_workload(**SIZES, microbatch_size=64 // (plan.data * plan.num_microbatches))
    step = simulate(workload, MACHINE, plan)
    shown[name] = step.duration_s
    print(f"{name:30} {step.duration_s:5.2f} s, {step.memory.max_bytes / 1e9:3.0f} GB, {step.utilization:.0%} of peak")

# %%
show_bars(shown, "s", "No pipeline, no bubble: FSDP, and FSDP with tensor", "a step of the 65B model on 64 GPUs")

# %% [markdown]
# No pipeline, no bubble: both are ahead of the question's plan here, and of the best one in the table above. The
# condition is one micro-batch. With several, FSDP gathers all parameters again for each (lesson 7), while a pipeline
# gets better. Tensor inside the machine leaves FSDP an eighth to gather over the slow wire. On this wire that is not
# needed: the gathers hide, and tensor's sums do not.
#
# ## Five axes
#
# Lesson 11 brings two more, for sequences too long for one GPU and for models of experts. On the mesh they are axes as
# any other, and you have met their rules above:
#
# | axis | ranks hold | ranks work on | gradients | speaks |
# |---|---|---|---|---|
# | data | copies | other samples | averaged | once a step |
# | expert | copies, but for the experts | other samples | averaged; experts': divided | all-to-all, twice a layer |
# | context | copies | other positions | averaged | during attention, in each layer |
# | tensor | parts of layers | the same | not summed | in each layer, waited for |
# | pipeline | layers | the same | not summed | at stage borders |
#
# The world is the product of all five. Here with context, on the same four ranks:

# %%
compare_losses("context 2 x tensor 2", Plan(context=2, tensor=2))

# %% [markdown]
# ## Your own model
#
# None of this needs the package's GPT. Here is a small Llama, written as people write theirs: rotary positions, 8 heads
# of queries that share 4 of keys and values, a gated feed-forward. Hugging Face's `LlamaForCausalLM` has the same
# shape. This course does not need it. Where it is installed, `PLANS["Llama"]` of `distlab.tensor_parallel` is its plan.

# %%
from torch import nn
from torch.nn import functional as F


def turn(x):
    """Rotate pairs of features by an angle that grows with the position: [B, A, S, d] -> the same."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] / 100 ** (torch.arange(half) / half)
    cosine, sine = angles.cos().to(x), angles.sin().to(x)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


# %%
class LlamaAttention(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(width, width // 2, bias=False) for _ in range(2))

    def forward(self, x):
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in projections)
        mixed = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


# %%
class LlamaLayer(nn.Module):
    def __init__(self, width=32, inner=88):
        super().__init__()
        self.input_norm, self.post_norm, self.self_attn = nn.RMSNorm(width), nn.RMSNorm(width), LlamaAttention()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        x = x + self.self_attn(self.input_norm(x))
        y = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


# %%
def llama(seed=0):
    torch.manual_seed(seed)
    ends = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    return nn.Sequential(ends[0], *(LlamaLayer() for _ in range(4)), nn.RMSNorm(32), ends[1]).double()


def llama_batch(step, part=0, parts=1):
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].chunk(parts)[part], tokens[:, 1:].chunk(parts)[part]


def llama_loss(scores, targets):
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


# %% [markdown]
# Four ways over four ranks. `DataParallel`, `FullyShard` and `ByTensor` (see below) take the model as it is, and each
# rank has a quarter of the batch. Tensor parallelism needs to know which layers are cut, and how. A *plan* gives a
# style to names, and a * stands for any name. `column` cuts outputs, `row` inputs, `heads` outputs by whole heads, and
# `vocabulary` the tokens (lesson 8). Every other layer stays whole on each rank.

# %%
from distlab.data_parallel import DataParallel
from distlab.sharding import ByTensor, FullyShard
from distlab.tensor_parallel import parallelize_module

LLAMA_PLAN = {
    "0": "vocabulary",
    "*.self_attn.[qkv]_proj": "heads",
    "*.self_attn.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "6": "vocabulary",
}


# %%
def set_up(way):
    if way == "one process":
        return llama(), lambda: None
    model = llama(seed=dist.get_rank())  # rank 0's weights count
    if way == "DataParallel":
        return model, DataParallel(model).synchronize
    if way == "FullyShard":
        sharded = FullyShard(model)
        return sharded, sharded.synchronize
    if way == "ByTensor":
        return ByTensor(model), lambda: None
    return parallelize_module(model, LLAMA_PLAN, example=llama_batch(0)[:1]), lambda: None


# %%
def train_llama(way):
    (model, finish), losses = set_up(way), []
    part, parts = (0, 1) if way in ("one process", "tensor parallel") else (dist.get_rank(), 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(6):
        model.zero_grad()
        inputs, targets = llama_batch(step, part, parts)
        loss = llama_loss(model(inputs), targets)
        loss.backward()
        finish()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, sum(p.numel() for p in model.parameters())


# %% tags=["nbval-check-output"]
llama_alone, total = train_llama("one process")
held = {"one process": total}
for way in ("DataParallel", "FullyShard", "ByTensor", "tensor parallel"):
    said = ranks.run(train_llama, way)
    held[way] = max(numbers for _, numbers in said)
    means = [sum(each) / len(each) for each in zip(*(losses for losses, _ in said), strict=True)]
    gap = max(abs(mean - expected) for mean, expected in zip(means, llama_alone, strict=True))
    print(f"{way:16} losses as one process: {gap < 1e-9}; a rank updates at most {held[way]:6,} of {total:,} numbers")

# %%
show_bars(held, "numbers", "A small Llama: the most that one rank keeps and updates")

# %% [markdown]
# One model, four ways, the same losses. The bars tell them apart: data parallelism keeps everything, the others a
# quarter. A pipeline takes such a model by its layers: lesson 9.
#
# A plan can be wrong: a name that matches nothing, heads that the ranks do not divide, a `column` without its `row`.
# `parallelize_module` refuses these on every rank. What a plan does not show, `example=` finds: it compares the output
# with that of the whole model. `SUPPORTED.md` in the repository says which models were trained in which ways.

# %% [markdown]
# ## Placements
#
# Most faults of this lesson have one form: a sum that is missing, or made once too often. Shapes fit all the same. So
# give every tensor a note of what a rank of an axis holds of it, its **[placement](../GLOSSARY.md#placement)**:
#
# | placement | a rank of the axis holds | for example |
# |---|---|---|
# | `Shard(d)`, S(d) | its part of dim d | a rank's samples; columns of a weight |
# | `Replicate()`, R | all of it | a norm's weight on tensor ranks |
# | `Partial()`, P | a summand; the tensor is the sum over the ranks, and no rank has it | a gradient not yet averaged |
#
# On a mesh a tensor has a placement for each axis, slowest first: its *layout*. `gradient_axes` above told the axes on
# which a gradient is P. What does each of four ranks, 2 x 2, hold of a weight [8, 6]?

# %% tags=["nbval-check-output"]
from distlab.placements import Replicate, Shard, layout_of, local_shape, placement_of, route

for words in ("R, R", "S(0), R", "R, S(1)", "S(0), S(1)", "S(0), S(0)", "P, R"):
    print(f"({words:10}) {[local_shape((8, 6), layout_of(words), (2, 2), rank) for rank in range(4)]}")

# %% [markdown]
# ### From one placement to a different one
#
# To **[redistribute](../GLOSSARY.md#redistribute)** is to change a placement and keep the tensor. With S bytes of the
# whole tensor on n ranks:
#
# | change | call | sent per rank |
# |---|---|---|
# | R to S(d) | none: keep a part | 0 |
# | S(d) to R | all-gather | $\frac{n-1}{n} S$ |
# | P to S(d) | reduce-scatter | $\frac{n-1}{n} S$ |
# | P to R | all-reduce | $2 \frac{n-1}{n} S$ |
# | S(d) to S(e) | all-to-all | $\frac{n-1}{n}$ of $\frac{S}{n}$ |
#
# Two calls may be new. `dist.reduce_scatter(own, pieces)` takes a list: piece i, summed over the ranks, goes to rank i.
# `dist.all_to_all_single(arrived, leaving)` takes n pieces in one tensor, one under the other in dim 0: piece i goes to
# rank i, and piece i of what arrived came from there. torch sends contiguous tensors only.
#
# ### Exercise: the cheapest redistribution
#
# Write `redistribute_axis(local, before, after, group)`. Placements compare with `==`; a Shard's dim is `before.dim`.

# %% exercise="10.redistribute"

# %% [markdown]
# ### Two axes: the order of steps counts
#
# A gradient is (P, P) on 2 x 2 ranks, and is wanted whole on all. An all-reduce on one axis, then one on the other,
# send $S + S$. A route through other layouts may be cheaper: a step on one axis sends less while the other one has the
# tensor cut.

# %%
guess_5 = predict("What part of the two all-reduces' bytes does the cheapest route send?", unit="%")
guess_5

# %%
SQUARE_OF = (1024, 1024)
moves = route(SQUARE_OF, layout_of("P, P"), layout_of("R, R"), (2, 2))
print(guess_5.compare(100 * sum(move.bytes_sent for move in moves) / (2 * 4 * 1024**2), how="counted"))

# %% tags=["nbval-check-output"]
guess_5.lock()
for before, after in (("P, P", "R, R"), ("P, S(0)", "S(0), R")):
    print(f"from ({before}) to ({after}), 4 MiB:")
    for move in route(SQUARE_OF, layout_of(before), layout_of(after), (2, 2)):
        now, then = (f"({', '.join(map(str, layout))})" for layout in (move.before, move.after))
        print(f"  {move.collective:14} on axis {move.axis}: {now:12} to {then:12} {move.bytes_sent / 2**20:.0f} MiB")

# %%
guess_5.lock()
shown = {"two all-reduces": 2 * 4, "the cheapest route": sum(move.bytes_sent for move in moves) / 2**20}
show_bars(
    shown, "MiB", "Through parts: fewer bytes than two all-reduces", "from (P, P) to (R, R), 4 MiB on 2 x 2 ranks"
)

# %% [markdown]
# The first route is lesson 2's hierarchical all-reduce, which nobody had to think of: `route` searches the few layouts
# for the shortest path. The second: shrink first, grow last. Where both axes cut one dim, (S(0), S(0)), the second
# axis cuts each part of the first: so it is gathered first. Your function takes the steps, on real ranks:


# %%
def along_the_route(before, after):
    groups = list(mesh_groups(Mesh({"data": 2, "tensor": 2})).values())
    local = torch.full((8, 8), 1.0 + dist.get_rank())
    for move in route((8, 8), layout_of(before), layout_of(after), (2, 2)):
        local = redistribute_axis(local, move.before[move.axis], move.after[move.axis], groups[move.axis])
    return local


assert all((local == 1 + 2 + 3 + 4).all() for local in ranks.run(along_the_route, "P, P", "R, R"))
print("(P, P) to (R, R) by your steps: every rank has the sum of all four")

# %% [markdown]
# ### By the clock: 16 MiB
#
# Four nodes of one rank each (on Linux, as above), with a wire of 20 MB/s: one axis, four changes of a float32 tensor
# of 16 MiB. The simulator knows the wire from a calibration alone.

# %%
import time

from distlab.placements import cut, redistribute

MATRIX = (2048, 2048)
CHANGES = {f"{before} to {after}": (before, after) for before, after in (("S(0)", "R"), ("P", "R"), ("P", "S(0)"))}
CHANGES["S(0) to S(1)"] = ("S(0)", "S(1)")


def change_seconds(before, after, repeats=3):
    before, after, times = layout_of(before), layout_of(after), []
    local = cut(torch.ones(MATRIX), before, (4,), dist.get_rank())
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        redistribute(local, MATRIX, before, after, [dist.group.WORLD])
        times.append(time.perf_counter() - start)
    return min(times)


# %%
from simulator import redistribution_s

four_nodes = Ranks(4, timeout_s=120, nodes=Nodes(4, between="20MB/s,200us"), record=False)
machine = fit_cluster(median_round(four_nodes.run(calibrate_nodes)[0]), 4, num_nodes=4)
measured = {words: max(four_nodes.run(change_seconds, *change)) for words, change in CHANGES.items()}
routes = {words: route(MATRIX, *map(layout_of, change), (4,)) for words, change in CHANGES.items()}
foretold = {words: redistribution_s(moves, (4,), machine) for words, moves in routes.items()}
four_nodes.close()
for words in CHANGES:
    print(f"{words:12} measured {measured[words] * 1e3:4.0f} ms, predicted {foretold[words] * 1e3:4.0f} ms")

# %%
shown = {words: {"measured": 1e3 * measured[words], "predicted": 1e3 * foretold[words]} for words in CHANGES}
show_bars(shown, "ms", "An all-reduce takes twice a gather, an all-to-all a quarter", "16 MiB, 4 ranks, 20 MB/s")

# %% [markdown]
# The wire decides. What the prediction leaves out is copying: before an all-to-all the pieces of each rank are put end
# to end, and behind it what arrived is put together.
#
# ### Which operation gives which placement
#
# An operation runs on each rank's own part as if that were the whole. What does its result mean?

# %% tags=["nbval-check-output"]
ASKED = ("matmul R S(1)", "matmul S(0) R", "matmul S(1) S(0)", "matmul P R", "add P P", "sum S(0)", "add R P", "relu P")
for operation, *placed in map(str.split, ASKED):
    try:
        said = f"gives {placement_of(operation, *map(layout_of, placed))[0]}"
    except ValueError as error:
        said = str(error).partition(": ")[2].partition("; ")[0]
    print(f"{operation:6} of {', '.join(placed):12} {said}")

# %% [markdown]
# A P passes through whatever is linear, and the sum may come later: $Aw + Bw = (A + B)w$. relu is not linear. And R + P
# is no P: the summands' sum would have the whole once for each rank. torch's DTensor carries such notes along and
# inserts a redistribution where one is needed. Here they find the fault before anything runs.
#
# ### Exercise: the missing all-reduce
#
# Write `missing_sum(program, layouts)` for one axis. A line is `("y", "matmul", "x", "w")`: its result, the operation,
# its operands.

# %% exercise="10.missing_sum"

# %% tags=["nbval-check-output"]
LAYER = [("h", "matmul", "x", "w1"), ("a", "relu", "h"), ("y", "matmul", "a", "w2"), ("z", "add", "x", "y")]
WAYS = {
    "columns, then rows": {"x": Replicate(), "w1": Shard(1), "w2": Shard(0)},
    "x in parts": {"x": Shard(1), "w1": Shard(0), "w2": Replicate()},
    "data parallel": {"x": Shard(0), "w1": Replicate(), "w2": Replicate()},
}
for words, layouts in WAYS.items():
    print(f"{words:19} {missing_sum(LAYER, layouts)}")
print("repaired           ", missing_sum([*LAYER[:3], ("y", "all_reduce", "y"), LAYER[3]], WAYS["columns, then rows"]))

# %% [markdown]
# Columns, then rows is Megatron's layer (lesson 8): its one all-reduce stands before the residual is added.
# `check_program` of `distlab.placements` does the same for any mesh and more operations.
#
# ### A model cut tensor by tensor
#
# FSDP2 gives each parameter the placement S(0). torch's first FSDP, and `FullyShard`, put a unit's parameters end to
# end in one flat row and cut the row, through the middle of tensors. Both gather a unit at a time (lesson 7, where a
# [table](../07_sharding/lesson.ipynb#production-torchs-own) has FSDP1's names in today's). `ByTensor` is the first way:
#
# | | flat rows | tensor by tensor |
# |---|---|---|
# | frozen parameters | rows of their own: one more gather for each unit | in the same gather; no gradient is sent |
# | weight decay for matrices alone | rows have one dim: `FullyShard` refuses such groups | by `p.ndim` and names |
# | padding | at most n - 1 numbers per row | up to n - 1 *rows* per tensor: 5 rows on 4 ranks are 2, 2, 1, 0 |
# | a collective for each unit | sends the row as it lies | copies all tensors in before, and out behind |
#
# The plainest form has a collective for each tensor. It is on one screen, and so is a step with it:

# %%
from distlab.placements import call_plainly, cut_plainly

for part in (cut_plainly, call_plainly):
    print(inspect.getsource(part).rpartition('"""\n')[2])


def step_plainly():
    model = llama()
    parts = cut_plainly(model)
    inputs, targets = llama_batch(0, dist.get_rank(), 4)
    llama_loss(call_plainly(model, parts, inputs, group=None), targets).backward()
    return [part.grad for part in parts.values()]


# %% tags=["nbval-check-output"]
whole_model = llama()
llama_loss(whole_model(llama_batch(0)[0]), llama_batch(0)[1]).backward()
found = [torch.cat(rows) for rows in zip(*ranks.run(step_plainly), strict=True)]
pairs = zip(found, whole_model.parameters(), strict=True)
same = all(torch.allclose(rows, parameter.grad) for rows, parameter in pairs)
print(f"four ranks' rows, end to end, are the gradients of one process: {same}")

# %% [markdown]
# Now a fine-tuning: of the Llama only norms, and the queries' and values' projections, are trained.


# %%
def a_step(kind, trained):
    model, rank = llama(), dist.get_rank()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in trained))
    sharded = kind(model)
    for step in range(2):  # in the first one ranks also compare shapes
        inputs, targets = llama_batch(step, rank, 4)
        with recorded() as seen:
            llama_loss(sharded(inputs), targets).backward()
            if kind is FullyShard:
                sharded.synchronize()
    calls = [call for call in seen.records.calls(rank) if call.num_bytes > 40]  # 40: do all run the same units?
    return len(calls), sum(ring_bytes(call.op, call.num_bytes, 4) for call in calls)


# %% tags=["nbval-check-output"]
KINDS = {"flat rows": FullyShard, "tensor by tensor": ByTensor}
TRAINED = {"all is trained": ("",), "norms, q and v are trained": ("norm", "q_proj", "v_proj")}
made = {words: {} for words in TRAINED}
for words, name in product(TRAINED, KINDS):
    made[words][name], sent = ranks.run(a_step, KINDS[name], TRAINED[words])[0]
    print(f"{words:27}{name:17} {made[words][name]:3} collectives, {sent / 1e3:5.1f} kB sent")

# %%
show_bars(made, "calls", "Frozen parameters: more calls by flat rows, fewer by tensor", "a rank's calls in a step")

# %% [markdown]
# Frozen parameters are gathered either way. By tensor they travel along in the same call, and only the gradients of the
# others travel. Flat rows need a second row for them in each unit that has both. In return nothing is copied in or out,
# and a gather is under way while the unit before computes, which `ByTensor` leaves out.

# %% [markdown]
# ## The loss falls, and it is wrong: spot the bug
#
# A step on data x tensor for a model of two layers, all in plain tensors. The loss falls, on any number of ranks, and
# no error is raised. It is not the loss of one process. Run the check as it is, read what it says, find the line,
# repair it.

# %% exercise="10.find_the_bug"

# %% [markdown]
# ## Production: torch's own
#
# Placements have the same names in `torch.distributed.tensor`: `distribute_tensor(x, mesh, [Shard(0), Replicate()])`
# makes a `DTensor`, and `.redistribute(placements=...)` goes axis by axis, without a search.
#
# torch names the axes of a `DeviceMesh`, and takes one axis for each technique: `parallelize_module(model,
# mesh["tensor"], ...)`, then `fully_shard(model, mesh=mesh["data"])`. The feed-forward layers of a GPT by both, on data
# 2 x tensor 2, turn by turn in one run. (The ranks import it, not this notebook: it takes seconds to load.)

# %%
from distlab.models import FeedForward
from distlab.tensor_parallel import ColumnParallelLinear, RowParallelLinear

WIDE = GPTConfig(num_layers=4, num_heads=4, hidden_size=256)


class Residual(FeedForward):
    def forward(self, x):
        return x + super().forward(x)


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Residual(WIDE) for _ in range(4)))


# %%
def ours():
    model, groups = layers(), mesh_groups(Mesh({"data": 2, "tensor": 2}))
    for layer in model:
        layer.widen = ColumnParallelLinear.from_full(layer.widen, groups["tensor"])
        layer.output = RowParallelLinear.from_full(layer.output, groups["tensor"])
    sharded = FullyShard(model, group=groups["data"])
    return sharded, sharded.parameters(), sharded.synchronize


# %%
def torchs():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    model, mesh = layers(), dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    styles = {"widen": parallel.ColwiseParallel(), "output": parallel.RowwiseParallel()}
    for layer in model:
        fully_shard(parallel.parallelize_module(layer, mesh["tensor"], styles), mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model, model.parameters(), lambda: None


# %%
def turn_by_turn(num_steps=6):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(dist.get_rank() // 2))
    programs = [(*one, torch.optim.SGD(one[1], lr=0.1)) for one in (ours(), torchs())]
    rows = []
    for model, _, finish, optimizer in programs * num_steps:
        dist.barrier()
        start = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        (finish(), optimizer.step(), optimizer.zero_grad())
        rows.append((float(loss.detach()), time.perf_counter() - start))
    return rows[::2], rows[1::2]


# %%
from statistics import median

mine, theirs = ranks.run(turn_by_turn)[0]
gap = max(abs(a[0] - b[0]) for a, b in zip(mine, theirs, strict=True))
ratio = median(a[1] / b[1] for a, b in zip(mine[1:], theirs[1:], strict=True))
shown = {name: 1e3 * median(s for _, s in rows[1:]) for name, rows in (("ours", mine), ("torch", theirs))}
show_bars(shown, "ms", "A step on data 2 x tensor 2, with the library and with torch's own")
print(f"losses {mine[0][0]:.4f} to {mine[-1][0]:.4f}, they differ by {gap:.0e}; ours takes {ratio:.2f} times as long")

# %% [markdown]
# A number below 1 means that ours is faster. Four ranks on few cores and a few steps are little: `benchmarks/` has
# figures with repeats. The same degrees under other names:
#
# | distlab `Plan` | torch | torchtitan `..._degree` | Megatron-LM | DeepSpeed |
# |---|---|---|---|---|
# | `data` | `DistributedDataParallel` | `data_parallel_replicate` | the rest | the rest |
# | `sharding` | `fully_shard` | `data_parallel_shard` | `--use-distributed-optimizer` | `zero_optimization.stage` |
# | `tensor` | `parallelize_module` | `tensor_parallel` | `--tensor-model-parallel-size` | `autotp_size` |
# | `pipeline` | `pipelining` | `pipeline_parallel` | `--pipeline-model-parallel-size` | `PipelineModule` |
# | `context` | `context_parallel` | `context_parallel` | `--context-parallel-size` | `sequence_parallel_size` |
# | `expert` | | `expert_parallel` | `--expert-model-parallel-size` | `ep_size` |
#
# Megatron-LM orders axes as the recipe says, tensor fastest and pipeline slowest, or swaps data and pipeline with
# `--use-tp-pp-dp-mapping`. There, as in DeepSpeed, expert ranks are taken out of the data ranks: what they call data
# parallel is data x expert here. torchtitan takes them out of the sharding ranks, and of the tensor ranks too.
# DeepSpeed makes groups for `sequence_parallel_size` only together with `data_parallel_size`. Horovod has data alone.

# %% [markdown]
# ## Lab
#
# The same on your own hardware, as a plain script. In a terminal, on 2, 4 or 8 CPU ranks, with the reference and with
# what you wrote in this notebook:
#
# ```
# distlab lab 10 --ranks 8 --impl reference
# distlab lab 10 --ranks 8 --tensor 4 --pipeline 1 --impl mine --trace traces
# distlab lab 10 --ranks 4 --tensor 2 --pipeline 2 --order tensor,data,expert,context,pipeline
# ```
#
# The same by torchrun, which is also how it runs on GPUs (`--nproc-per-node` is their number):
#
# ```
# torchrun --nproc-per-node 8 lessons/10_hybrid/lab.py --impl reference
# ```
#
# `lab_reference.md` next to it has the output to compare with.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. 512 ranks: pipeline 8, tensor 8, expert 4, context 1. How many data ranks are there? Over how many ranks is the
#    gradient of a norm summed (no sequence parallelism), and that of an expert? By what is each divided?
# 2. On the mesh pipeline 8 x data 2 x expert 4 x tensor 8, which rank is stage 3, data 1, expert 2, tensor 5? Which
#    ranks are in its tensor group?
# 3. The norm of all gradients is 5; a tenth of its square is in parameters that are whole on 8 tensor ranks. What does
#    a sum over tensor ranks that counts every copy give?
# 4. Global batch 1,024 samples, micro-batches of 2, data 16, expert 4: how many micro-batches? The bubble of 1F1B on
#    pipeline 8?
# 5. Micro-batches of one sample, 2,048 tokens x 8,192 numbers of 2 bytes; 20 layers on a stage, tensor 8. How much
#    does a rank send along tensor for a micro-batch, and along pipeline?

# %% tags=["nbval-check-output"]
big = Mesh({"pipeline": 8, "data": 2, "expert": 4, "tensor": 8})
print(f"1. data {512 // (8 * 8 * 4)}; a norm's over {2 * 4} ranks, an expert's over 2; both are divided by {2 * 4}")
rank = big.rank(pipeline=3, data=1, expert=2, tensor=5)
print(f"2. rank {rank}; {big.group_of(rank, 'tensor')}")
print(f"3. {(25 + 7 * 2.5) ** 0.5:.2f}")
count = 1024 // (2 * 16 * 4)
print(f"4. {count} micro-batches; bubble {7 / (count + 7):.0%}")
activation = 2048 * 8192 * 2
print(f"5. {8 * 7 / 8 * activation * 20 / 1e9:.1f} GB along tensor, {2 * activation / 1e9:.3f} GB along pipeline")

# %%
ranks.close()

# %% [markdown]
# ## What to read next
#
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*
#   (arXiv:2104.04473): section 3 chooses degrees as you did here; tensor inside a machine, pipeline across.
# - Smith et al. 2022, *Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B* (arXiv:2201.11990): three axes
#   on one real cluster, placed by their traffic.
# - Zhao et al. 2023, *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel* (arXiv:2304.11277): what
#   sharding needs from the other axes.
#
# **Next: lesson 11.** Two axes were only named here. Lesson 11 builds them: context, for sequences that no GPU can
# hold, and experts, for more parameters without more work per token.
#
# ## Sources
#
# - The three above. Rajbhandari et al. 2020, *ZeRO* (arXiv:1910.02054).
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models* (arXiv:2205.05198):
#   sequence parallelism, and what it does to norms' gradients.
# - Documentation of torch (`DeviceMesh`, `parallelize_module`, `fully_shard`; Reproducibility), torchtitan, Megatron-LM
#   (Deterministic Training), DeepSpeed. Read 2026-11.
# - In this repository: `distlab/plan/mesh.py`, then `distlab/hybrid/`; its `__init__` says in which order.
