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
# # 3. Data parallel
#
# 120 minutes, in two sittings of 65 and 55 minutes. Comes after lessons 1 ([ranks](../GLOSSARY.md#rank) and messages)
# and 2 ([collectives](../GLOSSARY.md#collective)). You need no GPU: four processes on this machine are the four ranks.
#
# After **sitting one** you can
#
# - say why gradients are averaged and why all ranks must start equal, and prove it against one process;
# - build the ladder: one [all-reduce](../GLOSSARY.md#all-reduce) per parameter, one flat one,
#   [buckets](../GLOSSARY.md#bucket), buckets that travel during backward;
# - predict a step's time, and read on a timeline what communication is [hidden](../GLOSSARY.md#hidden) and what is
#   [exposed](../GLOSSARY.md#exposed).
#
# After **sitting two** you can
#
# - [accumulate](../GLOSSARY.md#accumulation) gradients over [micro-batches](../GLOSSARY.md#micro-batch), give out each
#   sample once, and weight what is uneven;
# - judge a claim such as "8 GPUs give 6 to 7x" by the conditions under which it holds.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You train a GPT of 1.3 billion parameters. One H100 does a step of 8,192 tokens. You rent 64 of them, in eight
# machines. Each has the whole model and 8,192 tokens of its own: this is **[data
# parallelism](../GLOSSARY.md#data-parallel)**. After each step all 64 must agree on one update, so they exchange
# gradients. This lesson has four ways to do that. They give the same numbers. What do they cost?
#
# The next cell asks the simulator. `stack="best-case"` in it stands for the fastest software that was measured.
#
# The picture below shows one step of one of the 64 GPUs, with the second of the four ways. The upper row is what the
# GPU does, the lower row what its wire carries. Grey means waiting. Look for the times when one of the two does
# nothing: first the wire, then the GPU. Why can the wire not begin earlier? At the end of sitting one, it will.

# %%
from distlab.plan import Plan
from simulator import cluster, gpt_workload, simulate

RUNGS = ("per_parameter", "flat", "bucketed", "overlapped")


def gpt(samples):
    return gpt_workload(
        hidden_size=2048, num_layers=24, num_heads=16, sequence_length=2048, vocab_size=51200, microbatch_size=samples
    )


def step_on(num_gpus, rung, samples=4):
    machines = cluster("dgx-h100", num_gpus, stack="best-case")
    return simulate(gpt(samples), machines, Plan(data=num_gpus, gradient_sync=rung))


# %%
from simulator.viz import draw_timeline

trace = step_on(64, "flat").trace
rank_0 = trace.select(trace.rank == 0)  # all ranks do the same
words = "One all-reduce after backward: first the wire waits for the GPU, then the GPU for the wire"
show(draw_timeline(rank_0, title=words))

# %% [markdown]
# Guides repeat that 64 H100s for a week cost 20,000 to 40,000 dollars. A week has 168 hours, so that is 64 x 168, or
# 10,752 GPU-hours, at 2 to 4 dollars each. Take 30,000.
# Speed-up is the work done in a second, compared with one GPU. What is missing to 64 was paid for and not used.
#
# The simplest way makes one all-reduce for each of the model's 290 parameter tensors. Before you look: what speed-up do
# you expect of it? Type a number into the box that the next cell shows, and press Commit.

# %%
guess_0 = predict("What speed-up do 64 GPUs give with one all-reduce per parameter?", unit="x")
guess_0

# %%
speedup = 64 * step_on(1, "flat").duration_s / step_on(64, "per_parameter").duration_s
print(guess_0.compare(speedup, how="the simulator says"))

# %% tags=["nbval-check-output"]
guess_0.lock()
alone_s = step_on(1, "flat").duration_s
print(f"one GPU: {alone_s * 1e3:.0f} ms per step; gradients: {gpt(4).gradient_bytes / 1e9:.1f} GB")
for rung in RUNGS:
    speedup = 64 * alone_s / step_on(64, rung).duration_s
    print(f"{rung:14} {speedup:5.1f}x on 64 GPUs, {30_000 * (1 - speedup / 64):6,.0f} dollars per week unused")

# %% [markdown]
# The third line looks like a mistake: more work for the programmer, and slower than the second. It is the step before
# the fourth. Between the first line and the last lie some forty lines of Python, and you will write them. But first
# comes what must not break: four ranks have to compute what one process computes.

# %% [markdown]
# ## One process is the judge
#
# A small GPT reads Python's own documentation, byte by byte. A batch is 16 samples of 32 bytes.

# %%
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig

CORPUS = ByteCorpus(python_documentation(), context=32)
CONFIG = GPTConfig(context=32, num_layers=2, num_heads=4, hidden_size=128)
inputs, targets = CORPUS.batch(0, 16)
print(bytes(inputs[0].tolist()))

# %% [markdown]
# **Is the gradient of a batch the mean of its slices' gradients?** The loss of a batch is the mean over its samples:
# $L = \frac{1}{16}\sum_i \ell_i$. Cut the batch into four slices of four. Each slice has its own mean loss $L_r$, and
# $L = \frac{1}{4}\sum_r L_r$. The gradient of a sum is the sum of the gradients, so $\nabla L = \frac{1}{4}\sum_r
# \nabla L_r$. That is all of data parallelism's mathematics. Try it, in one process:

# %% tags=["nbval-check-output"]
model = GPT(CONFIG, torch.Generator().manual_seed(0)).double()


def gradient(batch):
    model.zero_grad()
    model.loss(model(batch[0]), batch[1]).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


whole = gradient(CORPUS.batch(0, 16))
slices = torch.stack([gradient(CORPUS.batch(0, 16, rank=rank, world_size=4)) for rank in range(4)])
print("the mean of the slices is the whole, to 1e-14:", bool((slices.mean(0) - whole).abs().max() < 1e-14))
print(f"the sum of the slices is {float(slices.sum(0) @ whole / (whole @ whole)):.3f} times the whole")

# %% [markdown]
# So ranks *average*. A rank that adds and forgets to divide trains with four times the learning rate. With 64 ranks it
# is 64 times. This is the most common fault of all, and it can hide, because Adam divides a gradient by its own size.
# Try one step from a gradient, and one from four times that gradient (`run(f, 1)` calls `f` on one rank):


# %% tags=["nbval-check-output"]
def update(optimizer_class, scale):
    weight = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
    weight.grad = scale * whole[:1000]
    optimizer_class([weight], lr=0.1).step()
    return weight.detach()


def four_times():
    for optimizer_class in (torch.optim.SGD, torch.optim.Adam):
        ratio = update(optimizer_class, 4).norm() / update(optimizer_class, 1).norm()
        print(f"{optimizer_class.__name__}: the update of a 4x gradient is {ratio:.2f}x as long")


_ = run(four_times, 1)

# %%
from simulator.viz import draw_bars


def lengths():
    rules = (torch.optim.SGD, torch.optim.Adam)
    return {rule.__name__: float(update(rule, 4).norm() / update(rule, 1).norm()) for rule in rules}


ratios = run(lengths, 1)[0]
words = {"unit": "x", "title": "A gradient that is 4 times too large: SGD shows it, Adam hides it"}
show(draw_bars(ratios, subtitle="length of the update, compared with the right one", **words))

# %% [markdown]
# Keep this in mind whenever a distributed program is "proved" with a falling loss: **compare with one process, and
# with plain SGD.**
#
# Slices need not be equal. With 10 samples on 4 ranks the slices have 3, 3, 2 and 2 samples. Then the mean of the four
# means gives more weight to a sample of a small slice. The remedy is to weight each rank's loss by its share:
# `distlab.data_parallel.loss_weight`.

# %% tags=["nbval-check-output"]
from distlab.data_parallel import loss_weight

ten = gradient(CORPUS.batch(0, 10))
uneven = torch.stack([gradient(CORPUS.batch(0, 10, rank=rank, world_size=4)) for rank in range(4)])
weights = torch.tensor([loss_weight(num_local, 10, 4) for num_local in (3, 3, 2, 2)], dtype=torch.float64)
print("plain mean is right:", bool((uneven.mean(0) - ten).abs().max() < 1e-14))
print("weighted mean is right:", bool(((weights[:, None] * uneven).mean(0) - ten).abs().max() < 1e-14))

# %% [markdown]
# ## All ranks start equal
#
# Equal gradients make equal *updates*. They make equal *weights* only if the weights were equal before. Here each rank
# draws its own start, as happens when each seeds by its rank. All average their gradients, for five steps.
# `average_per_parameter` is the library's: the first rung, which you write yourself in a moment.

# %%
from distlab.data_parallel import average_per_parameter


def train_apart(start_equal=lambda model: None):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(CONFIG, torch.Generator().manual_seed(rank))
    start_equal(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        inputs, targets = CORPUS.batch(step, 16, rank=rank, world_size=world_size)
        optimizer.zero_grad()
        model.loss(model(inputs), targets).backward()
        average_per_parameter(model.parameters())
        optimizer.step()
    return model.output.weight.detach()


# %% [markdown]
# `Ranks(4)` starts four processes that stay until the end of sitting one. `ranks.run(f)` calls `f` in each and returns
# their four results. `backend="gloo"` lets them talk through sockets, as ranks of several machines do, on a wire that
# costs enough to be seen.

# %% tags=["nbval-check-output"]
ranks = Ranks(4, timeout_s=180, backend="gloo")
apart = ranks.run(train_apart)
for rank in range(1, 4):
    print(f"rank {rank}'s weights equal rank 0's: {torch.equal(apart[0], apart[rank])}")

# %%
far = {f"rank {rank}": float((apart[rank] - apart[0]).norm() / apart[0].norm()) * 100 for rank in range(4)}
words = {"unit": "%", "title": "Equal gradients, unequal starts: four different models after five steps"}
show(draw_bars(far, subtitle="distance from rank 0's weights, as a share of their length", **words))

# %% [markdown]
# No error was raised. Yet these are four different models, and the mean of their gradients fits none of them.
#
# ### Exercise: equal starts
#
# Write `broadcast_module(module)`: afterwards every rank has rank 0's parameters *and buffers* (running means, masks,
# counters: whatever forward reads). Write into the tensors that are there, since an optimizer may hold them already.
# Budget: one broadcast per tensor.

# %% exercise="03.broadcast"

# %% tags=["nbval-check-output"]
together = ranks.run(train_apart, broadcast_module)
print("all four equal after five steps:", all(torch.equal(together[0], weights) for weights in together))

# %% [markdown]
# ## Rung 1: one all-reduce per parameter
#
# The simplest way that is right. `dist.all_reduce(tensor)` puts the sum over ranks into the tensor, on every rank
# (lesson 2 built it). Divide each gradient by the number of ranks and all-reduce it.
#
# One thing is easily forgotten. A rank may not have used a parameter: a branch not taken, an
# [expert](../GLOSSARY.md#expert) not chosen. Its gradient is None there. If that rank skips it, it makes one call fewer
# than the others, and they wait forever. So a missing gradient **counts as zeros**, which is what it was.
#
# ### Exercise: average each gradient
#
# Write `average_gradients(module)`. Budget: one all-reduce for each parameter that wants a gradient, nothing for
# frozen ones.

# %% exercise="03.average"

# %% [markdown]
# ### Does it compute what one process computes?
#
# This is the whole training program of this lesson. It takes `prepare`, which is given the model and returns what to
# call between backward and the optimizer. Everything else stays the same on all rungs. `train_step` is the library's:
# forward, backward, synchronize, optimizer, each marked as a span of time. Losses are in [nats](../GLOSSARY.md#nat).

# %%
from distlab.data_parallel import train_step
from distlab.trace import SpanWriter


def train(prepare, num_steps=10, dtype=torch.float32):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = GPT(CONFIG, torch.Generator().manual_seed(rank)).to(dtype)
    broadcast_module(model)
    call = {"loss_fn": model.loss, "synchronize": prepare(model), "spans": SpanWriter(rank)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(num_steps):
        batch = CORPUS.batch(step, 16, rank=rank, world_size=world_size)
        losses.append(float(train_step(model, optimizer, batch=batch, **call)))
    return list(model.parameters()), losses, call["spans"].trace()


# %%
def one_by_one(model):
    return lambda: average_gradients(model)


judge = run(train, 1, args=(one_by_one, 6, torch.float64))[0]
reports = ranks.run(train, one_by_one, 6, torch.float64)
means = [sum(losses) / 4 for losses in zip(*(report[1] for report in reports), strict=True)]
print("mean loss of the four ranks:", [round(loss, 3) for loss in means])
print("loss of one process:        ", [round(loss, 3) for loss in judge[1]])

# %%
both = {
    f"update {number}": {"mean of four ranks": together, "one process": alone}
    for number, (together, alone) in enumerate(zip(means, judge[1], strict=True), 1)
}
words = {"unit": "nats", "title": "Four ranks and one process have the same loss at every update"}
show(draw_bars(both, **words))


# %% tags=["nbval-check-output"]
def largest_difference(some, others):
    return max(float((a - b).detach().abs().max()) for a, b in zip(some, others, strict=True))


for rank, report in enumerate(reports):
    same = largest_difference(report[0], judge[0]) < 1e-10
    print(f"after 6 updates rank {rank}'s weights are those of one process, to 1e-10: {same}")

# %% [markdown]
# Not "similar": the same, up to the order of additions. Everything after this is about time.

# %% [markdown]
# ## What does it cost? Predict first
#
# A message takes a [latency](../GLOSSARY.md#latency) and then its bytes over the [bandwidth](../GLOSSARY.md#bandwidth)
# (lesson 1). A [ring all-reduce](../GLOSSARY.md#ring-all-reduce) of $S$ bytes on $n$ ranks takes $2(n-1)$ rounds and
# sends $2\frac{n-1}{n}S$ bytes (lesson 2):
#
# $$t = 2(n-1)\,\alpha + 2\,\frac{n-1}{n}\,\frac{S}{\beta}$$
#
# The bytes are the same on every rung. The number of latencies is not. How many are there?

# %% tags=["nbval-check-output"]
sizes_bytes = [4 * parameter.numel() for parameter in GPT(CONFIG).parameters()]
print(f"{len(sizes_bytes)} parameters, {sum(sizes_bytes) / 1e6:.2f} MB of gradients in float32")
print(f"smallest {min(sizes_bytes)} bytes, largest {max(sizes_bytes):,} bytes")
print(f"a ring on 4 ranks: {2 * 3} rounds per all-reduce, {2 * 3 * len(sizes_bytes)} rounds per step")

# %%
sizes_kb = {name: 4 * parameter.numel() / 1e3 for name, parameter in GPT(CONFIG).named_parameters()}
words = {"unit": "kB", "title": "28 messages in each step: most are tiny, and each pays the same latency"}
show(draw_bars(sizes_kb, subtitle="gradients of each parameter, float32", **words))

# %% [markdown]
# Now measure this machine, with all four ranks at work at once: how fast it computes, the latency and bandwidth of its
# all-reduce, and how much the two slow each other down.

# %%
from distlab.measure import fit_cluster, measure_round

rounds = [ranks.run(measure_round, torch.device("cpu"))[0]]
MACHINE = fit_cluster(rounds[0], 4)
wire, device = MACHINE.intra_node.protocols[0], MACHINE.device
print(f"all-reduce: {wire.latency_s * 1e6:.0f} us a round, {wire.bytes_per_s / 1e6:,.0f} MB/s")
print(f"a rank computes {device.matmul_flops_per_s / 1e9:.0f} GFLOP/s in matrix products")
print(f"together: computing {MACHINE.contention.compute_slowdown:.2f}x slower, ", end="")
print(f"communicating {MACHINE.contention.communication_slowdown:.2f}x slower")

# %% [markdown]
# And count the model's work: floating-point operations and bytes of each layer, forward and backward, from one real
# step.

# %%
from distlab.measure import workload_from_module


def count_work():
    model = GPT(CONFIG)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = CORPUS.batch(0, 16, rank=0, world_size=4)
    step = lambda: model.loss(model(inputs), targets)  # noqa: E731
    return workload_from_module(model, step, optimizer=sgd, samples=4, name="small GPT")


WORK = ranks.run(count_work)[0]


def predicted(rung, bucket_bytes=500_000, machine=MACHINE):
    sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": bucket_bytes}
    return simulate(WORK, machine, Plan(4, gradient_sync=rung, **sizes))


# %% [markdown]
# Your turn. One step on four ranks, one all-reduce a parameter: how many milliseconds? You have the number of rounds a
# step (168<!--out-->) and the time of one (`us a round`, further up): multiply. The bytes add 2 to 3 ms at 1,000 MB/s,
# since a rank sends $2 \cdot \frac{3}{4} \cdot 1.73$ MB. Then add what you expect for forward, backward and optimizer:
# this small model takes some tens of milliseconds. Commit to a number before you run on.

# %%
guess_1 = predict("How long is a step with one all-reduce per parameter, on this machine?", unit="ms")
guess_1

# %%
guess_1.lock()
step = predicted("per_parameter")
exposed_ms = step.exposed_communication_s * 1e3
print(f"the simulator says {step.duration_s * 1e3:.0f} ms: {exposed_ms:.0f} ms of them communication, the rest compute")

# %% [markdown]
# **Run it.** A machine does not keep its speed. So `time_beside` calibrates, times a few steps, calibrates again, and
# so on, all on the same ranks.

# %%
from distlab.measure import overlay_of, time_beside


def timed(prepare):
    rank, counts = dist.get_rank(), {}
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    call = {"loss_fn": model.loss, "synchronize": prepare(model), "spans": SpanWriter(rank)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = CORPUS.batch(0, 16, rank=rank, world_size=4)
    step = lambda: train_step(model, optimizer, batch=batch, **call)  # noqa: E731
    return time_beside(step, lambda: measure_round(torch.device("cpu"), works=counts), call["spans"])


# %% [markdown]
# The recorder writes down every call that a rank makes to torch.distributed. Together with the marked spans it is the
# measured timeline. `overlay_of` takes the step of median length, predicts it from the calibrations around it, and
# leaves out steps for which the machine was not calm.

# %%
from distlab.measure import median_round


def measure(rung, prepare):
    reports = ranks.run(timed, prepare)
    calls = ranks.records().to_trace()
    calls = calls.select(calls.is_word("lane", "communication"))
    predict_step = lambda rounds: predicted(rung, machine=fit_cluster(median_round(rounds), 4)).trace  # noqa: E731
    return overlay_of(reports, predict_step, calls=calls)


# %%
overlay = measure("per_parameter", one_by_one)
overlays = {"per_parameter": overlay}
print(guess_1.compare(overlay.middle_s[0] * 1e3))
print(overlay)

# %% [markdown]
# Predicted and measured on one timeline: the upper row of each pair is what was measured, the pale one under it what
# the simulator said. A3 is an all-reduce, number 3; the measured numbers begin higher, since they count from the first
# step of the run. Zoom with the wheel or with + and -, move with the arrow keys; point at a box to read it. Half of the
# measured steps end in the grey band; the prediction lets them end between the dotted lines: a calibration is not
# exact, and the model is right to about 10 %. If the picture says that the machine was not calm, its boxes are pale.
# Close other programs and run the cell above again: it calibrates again, too.

# %%
from simulator.viz import Timeline

guess_1.lock()
timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, overlay.measured.duration_s / 2)  # the first half of the step

# %% [markdown]
# Forward and backward come first, with nothing on the wire. Then the wire is busy, one small message after the other,
# and no rank computes. All of that communication is **exposed**. Compare where ranks begin and end: the prediction lets
# all four run at the same time. On a machine with fewer cores than ranks they take turns, and every all-reduce waits
# for the rank whose turn comes last. That is most of the difference.

# %% [markdown]
# ## Rung 2: one all-reduce for everything
#
# 28 all-reduces are 27 too many. Copy all gradients into one flat tensor, all-reduce that, copy the mean back.
#
# ### Exercise: flat
#
# Write `average_flat(module)`. Budget: **one** all-reduce of the gradients' bytes. A weight that two layers share
# (here: the embedding and the output) is one parameter and travels once.

# %% exercise="03.flat"

# %%
guess_2 = predict("How long is a step with one flat all-reduce?", unit="ms")
guess_2

# %%
guess_2.lock()
print(f"the simulator says {predicted('flat').duration_s * 1e3:.0f} ms")


# %%
def flat(model):
    return lambda: average_flat(model)


overlays["flat"] = measure("flat", flat)
print(guess_2.compare(overlays["flat"].middle_s[0] * 1e3))
print(overlays["flat"])

# %% [markdown]
# The recorder counts calls and bytes. They are facts of the algorithm, so they are the same on any machine:


# %% tags=["nbval-check-output"]
def traffic(prepare):
    ranks.run(train, prepare, 1)
    records = ranks.records().rank(0)
    return records.num_calls("all_reduce"), records.payload_bytes(0, "all_reduce")


for name, prepare in (("one per parameter", one_by_one), ("flat", flat)):
    num_calls, num_bytes = traffic(prepare)
    print(f"{name:16} {num_calls:3} all-reduces, {num_bytes:,} bytes")

# %% [markdown]
# Same bytes, a fraction of the calls. What is left: the flat all-reduce cannot start before backward has made the very
# last gradient. The wire is idle during all of backward, and then all ranks wait for the wire.
#
# Here is the ladder so far, in milliseconds per step:


# %%
def show_ladder(title):
    """Draw each rung that was measured so far next to its prediction."""
    rungs = {
        rung: {"predicted": 1e3 * overlay.middle_s[1], "measured": 1e3 * overlay.middle_s[0]}
        for rung, overlay in overlays.items()
    }
    words = {"unit": "ms", "title": title}
    show(draw_bars(rungs, subtitle="one step on four ranks of this machine", **words))


guess_2.lock()
show_ladder("Two rungs: 28 all-reduces, and one")

# %% [markdown]
# ## Rung 3: buckets
#
# The middle way: some all-reduces of some megabytes. A bucket can leave when *its* gradients are there. Which
# gradients come first? Backward runs through the layers from last to first. So does bucket filling: **the last
# parameter first.**
#
# ### Exercise: fill the buckets
#
# Write `fill_buckets(sizes_bytes, bucket_bytes)`. No ranks are needed: a bucket assignment is a plan, plain data, the
# same on every rank. A bucket is closed as soon as it holds bucket_bytes or more.

# %% exercise="03.buckets"

# %% tags=["nbval-check-output"]
names = [name for name, _ in GPT(CONFIG).named_parameters()]
for number, bucket in enumerate(fill_buckets(sizes_bytes, 500_000)):
    num_bytes = sum(sizes_bytes[index] for index in bucket)
    first, last = names[bucket[0]], names[bucket[-1]]
    print(f"bucket {number}: {len(bucket):2} gradients, {num_bytes:7,} bytes\n    from {first} to {last}")

# %% [markdown]
# The embedding is the first parameter, so its gradient fills the last bucket, though it is shared with the output
# layer, whose backward runs first of all: a tied weight's gradient is complete only when *both* uses have been through
# backward.
#
# The library's `FlatBucket` holds parameters that travel together: `start(None)` packs, divides and begins the
# all-reduce without waiting; `finish()` waits and unpacks.

# %%
from distlab.data_parallel.steps import FlatBucket


def make_buckets(model, bucket_bytes=500_000):
    parameters = list(model.parameters())
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    return [FlatBucket([parameters[i] for i in bucket]) for bucket in fill_buckets(sizes, bucket_bytes)]


def bucketed(model):
    buckets = make_buckets(model)
    return lambda: [[bucket.start(None) for bucket in buckets], [bucket.finish() for bucket in buckets]]


# %% [markdown]
# All buckets are sent after backward, as flat was. More milliseconds than flat, or fewer?

# %%
guess_3 = predict("How long is a step with four buckets, sent after backward?", unit="ms")
guess_3

# %%
guess_3.lock()
print(f"the simulator says {predicted('bucketed').duration_s * 1e3:.0f} ms")
overlays["bucketed"] = measure("bucketed", bucketed)
print(guess_3.compare(overlays["bucketed"].middle_s[0] * 1e3))
print(overlays["bucketed"])

# %% [markdown]
# Buckets alone buy little: more latencies than flat, and still everything after backward. All that they hide is the
# packing of one bucket behind the flight of the one before. They are the preparation for the next rung.

# %%
guess_3.lock()
show_ladder("Three rungs: buckets alone change little")

# %% [markdown]
# ## Rung 4: send while backward computes
#
# `parameter.register_post_accumulate_grad_hook(f)` makes autograd call `f(parameter)` in the middle of backward, as
# soon as that parameter's gradient is there. Count what each bucket still misses, and start it at zero.
#
# Two things can go wrong, and both [hang](../GLOSSARY.md#deadlock-hang) or mix up gradients on some machine, some day:
#
# - **Order.** Two ranks may run their hooks in different orders. All-reduces are matched by order alone: the first of
#   one rank meets the first of a different one. So buckets are started in the order of the list, and a bucket that is
#   full too early waits.
# - **What never comes.** A parameter that was not used calls no hook. Its bucket is started after backward.
#
# ### Exercise: overlap
#
# Write `overlap(buckets)`: register the hooks, return the function to call after backward. The check runs it on layers
# that sleep in backward, and looks at the recorded order of events, not at speed.

# %% exercise="03.overlap"


# %%
def overlapped(model):
    return overlap(make_buckets(model))


guess_4 = predict("How long is a step with overlap?", unit="ms")
guess_4

# %%
guess_4.lock()
print(f"the simulator says {predicted('overlapped').duration_s * 1e3:.0f} ms")
overlay = measure("overlapped", overlapped)
overlays["overlapped"] = overlay
print(guess_4.compare(overlay.middle_s[0] * 1e3))
print(overlay)

# %%
guess_4.lock()
timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, overlay.measured.duration_s)  # the whole step

# %% [markdown]
# Now boxes stand on the wire *under* backward. Two things about the measured ones. A bucket begins when its own rank
# sends it, and it can arrive only when the last rank has sent it too: a rank that was early shows long boxes. And a
# box ends where a rank looked; a rank that computes does not look, so boxes may reach further right than the bytes
# did.
#
# ### What does every rank hold, at every moment?
#
# Move the slider through a step, and switch between the four rungs. Each column is one all-reduce: not there yet, the
# rank's own gradient, on its way, the mean. With [overlap](../GLOSSARY.md#overlap) the first columns are means while
# backward still makes the last ones; with flat there is one column, and in it no rank computes.

# %%
from simulator.viz import train_step_panel

prediction_panel = train_step_panel({rung: predicted(rung).trace for rung in reversed(RUNGS)})
prediction_panel

# %%
prediction_panel.controls["version"].value = "flat"
prediction_panel.controls["at_ms"].value = 0.8 * predicted("flat").duration_s * 1e3

# %% [markdown]
# The same, from what was measured a moment ago. Ranks are no longer in step: look for one that waits while a different
# one computes.

# %%
measured_panel = train_step_panel({rung: overlays[rung].measured for rung in reversed(RUNGS)})
measured_panel

# %%
measured_panel.controls["version"].value = "flat"
measured_panel.controls["at_ms"].value = 0.8 * overlays["flat"].measured.duration_s * 1e3

# %% [markdown]
# ### The ladder, predicted and measured
#
# All rungs together, each predicted from the calibrations around its own steps.

# %%
from simulator.viz import facts_of

print(f"{'':14} predicted  measured   error   of it exposed")
for rung in RUNGS:
    overlay = overlays[rung]
    measured_ms, said_ms = (1e3 * seconds for seconds in overlay.middle_s)
    exposed_ms = facts_of(overlay.measured).exposed_s * 1e3
    print(f"{rung:14} {said_ms:6.0f} ms {measured_ms:6.0f} ms {overlay.error:+7.0%} {exposed_ms:9.0f} ms")

# %% [markdown]
# Read the errors before the times. A dozen steps of each rung and four calibrations are a rough measurement, and the
# error says how rough. (`distlab bench` takes more: many windows, a calibration around each, noisy ones dropped;
# `benchmarks/RESULTS.md` has its last run.) What the simulator leaves out is what the timelines showed: ranks that are
# late.
#
# On a laptop, communication is done *by the same cores* that compute. Hiding it behind compute then hides little, and
# flat can win. A GPU sends with hardware of its own. The simulator knows the difference by two numbers only, the two
# slow-downs that you measured.
#
# ### When does overlap pay?
#
# Back to the 64 GPUs, now with 2,048 tokens each, where communication is hardest to hide. Predict before you move the
# slider: what does a very small bucket cost, what a very large one? And with 8 GPUs?

# %%
import ipywidgets

from simulator.viz import Panel, draw_timeline


def with_buckets(bucket_mb, num_gpus, samples=1):
    plan = Plan(num_gpus, bucket_bytes=bucket_mb * 1_000_000, first_bucket_bytes=1_000_000)
    return simulate(gpt(samples), cluster("dgx-h100", num_gpus, stack="best-case"), plan)


def draw_buckets(bucket_mb, num_gpus):
    step = with_buckets(bucket_mb, num_gpus)
    exposed_ms = step.exposed_communication_s * 1e3
    title = f"{bucket_mb} MB buckets: {step.duration_s * 1e3:.0f} ms per step, {exposed_ms:.0f} ms exposed"
    one = step.trace.select(step.trace.rank == 0)  # all ranks do the same
    return draw_timeline(one, title=title)


# %%
SIZES_MB = (1, 25, 100, 500, 2700)
buckets_panel = Panel(
    draw_buckets,
    bucket_mb=ipywidgets.SelectionSlider(options=SIZES_MB, value=25, description="bucket (MB)"),
    num_gpus=ipywidgets.SelectionSlider(options=[8, 16, 64], value=64, description="GPUs"),
)
buckets_panel

# %%
buckets_panel.controls["bucket_mb"].value = 100

# %% tags=["nbval-check-output"]
for num_gpus in (8, 64):
    times = [with_buckets(bucket_mb, num_gpus).duration_s * 1e3 for bucket_mb in SIZES_MB]
    print(f"{num_gpus:2} GPUs:", ", ".join(f"{mb} MB {ms:.0f} ms" for mb, ms in zip(SIZES_MB, times, strict=True)))

# %% [markdown]
# A huge bucket cannot start before backward has ended: it is flat again. A small one pays its latencies, and a ring's
# latency grows with the number of ranks: $2(n-1)\alpha$. So on 8 GPUs any bucket from 1 to 500 MB will do, and on 64
# the common default of 25 MB is too small. Megatron-LM's default grows with the number of ranks for this reason.

# %% [markdown]
# # The end of sitting one
#
# One check is left, and it is about all of your functions together. Each rung trains for six updates in float64. Are
# the weights on all four ranks those of one process?

# %% tags=["nbval-check-output"]
PREPARE = {"per_parameter": one_by_one, "flat": flat, "bucketed": bucketed, "overlapped": overlapped}
for rung, prepare in PREPARE.items():
    reports = ranks.run(train, prepare, 6, torch.float64)
    same = all(largest_difference(report[0], judge[0]) < 1e-10 for report in reports)
    print(f"{rung:14} after 6 updates all ranks have the weights of one process, to 1e-10: {same}")

# %% [markdown]
# Four times `True`: your four rungs compute the same numbers. They differ in time alone. This is what that is worth on
# the 64 GPUs of the beginning:

# %%
speedups = {rung: 64 * alone_s / step_on(64, rung).duration_s for rung in RUNGS}
words = {"unit": "x", "title": "What each of your four rungs gets out of 64 GPUs"}
subtitle = "work per second compared with one GPU; 64 would be perfect; simulated, 8,192 tokens per GPU"
show(draw_bars(speedups, subtitle=subtitle, **words))
ranks.close()

# %% [markdown]
# **You can now** turn a training loop for one process into one for many, prove that it is right, and say which part of
# its communication is hidden.
#
# **Try this before you go on.** Set `bucket_bytes` in `make_buckets` to 100,000, then to 5,000,000, and run the cells
# of rung 4 again. Say first which of the two will look like flat. Or run the lab on your own hardware:
# `distlab lab 03 --ranks 4 --impl mine --trace traces`.
#
# **How to come back.** Save the notebook and close it. When you open it again, run its first code cell
# (`%load_ext distlab.course.notebook`), and then go on at the next heading. You need not run anything of sitting one
# again.

# %% [markdown]
# # Sitting two: how often, and which data
#
# What you have from sitting one:
#
# 1. Gradients are averaged, and equal starts plus equal updates give equal weights.
# 2. Buckets that travel during backward hide communication behind compute.
# 3. What is not hidden is exposed: all ranks wait for it.
#
# The next cell brings back your own functions from the notebook that you saved, as far as their checks have passed.
# The reference takes the place of the others.

# %%
from distlab.course.notebook import saved_answers

average_gradients, fill_buckets, overlap = saved_answers("03.average", "03.buckets", "03.overlap")

# %% [markdown]
# The model, the text and the simulated GPUs are those of sitting one. Skim the next two cells: they define the same
# names again.

# %%
from distlab.data import ByteCorpus, python_documentation
from distlab.data_parallel import train_step
from distlab.data_parallel.steps import FlatBucket
from distlab.models import GPT, GPTConfig
from distlab.plan import Plan
from simulator import cluster, gpt_workload, simulate

CORPUS = ByteCorpus(python_documentation(), context=32)
CONFIG = GPTConfig(context=32, num_layers=2, num_heads=4, hidden_size=128)


def make_buckets(model, bucket_bytes=500_000):
    parameters = list(model.parameters())
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    return [FlatBucket([parameters[i] for i in bucket]) for bucket in fill_buckets(sizes, bucket_bytes)]


# %%
def gpt(samples):
    shape = {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "sequence_length": 2048, "vocab_size": 51200}
    return gpt_workload(**shape, microbatch_size=samples)


def step_on(num_gpus, rung, samples=4):
    machines = cluster("dgx-h100", num_gpus, stack="best-case")
    return simulate(gpt(samples), machines, Plan(data=num_gpus, gradient_sync=rung))


def largest_difference(some, others):
    return max(float((a - b).detach().abs().max()) for a, b in zip(some, others, strict=True))


# %% [markdown]
# Here is where sitting one ended: a step of one of 64 GPUs, with overlap, and with 2,048 tokens per GPU. Look at the
# right end of the picture. Backward is over, and the wire is still busy: the step is too short to hide all of it. What
# else can you change, if the wire stays as it is?

# %%
from simulator.viz import draw_bars, draw_timeline

trace = step_on(64, "overlapped", samples=1).trace
rank_0 = trace.select(trace.rank == 0)
words = "2,048 tokens per GPU: the wire is still busy when backward has ended"
show(draw_timeline(rank_0, title=words))

# %% [markdown]
# ## Send less often: accumulate
#
# More tokens per GPU may not fit into memory at once. But not every backward needs an update. Run several
# **micro-batches** one after the other: autograd adds up their gradients in `parameter.grad` by itself. Send the sum
# once, then make one update. This is **gradient accumulation**.
#
# The mathematics is the same as for ranks: $L = \frac{1}{M}\sum_m L_m$. So each loss is divided by the number of
# micro-batches $M$.
#
# In the simulator it is one field of the plan. With one micro-batch of 2,048 tokens for each update, 64 GPUs do
# 42.7 times<!--out--> the work of one. Predict: how many times with eight?


# %%
def accumulating_on(num_gpus, num_microbatches):
    machines = cluster("dgx-h100", num_gpus, stack="best-case")
    return simulate(gpt(1), machines, Plan(num_gpus, num_microbatches=num_microbatches))


guess_5 = predict("What speed-up do 64 GPUs give with 8 micro-batches an update?", unit="x")
guess_5

# %% tags=["nbval-check-output"]
gains = {}
for count in (1, 2, 4, 8, 16):
    alone, step = accumulating_on(1, count), accumulating_on(64, count)
    gains[count] = 64 * alone.duration_s / step.duration_s
    sent_mb = step.sent_bytes_per_rank[0] / 1e6 / count
    print(f"{count:2} micro-batches: {gains[count]:.1f}x, {sent_mb:5,.0f} MB sent per rank for every 2,048 tokens")
print(guess_5.compare(gains[8], how="with 8 it is"))

# %% [markdown]
# An update sends the same bytes as before, so the bytes for each token fall as $1/M$. There is a price: the batch is
# $M$ times larger and there are $M$ times fewer updates. What that does to learning is lesson 4.
#
# Look at one update. Where is the wire busy?

# %%
import ipywidgets

from simulator.viz import Panel


def draw_accumulating(num_microbatches):
    step = accumulating_on(64, num_microbatches)
    exposed_ms, each_ms = step.exposed_communication_s * 1e3, step.duration_s * 1e3 / num_microbatches
    title = f"Update of {num_microbatches}: {each_ms:.0f} ms per micro-batch, {exposed_ms:.0f} ms exposed in all"
    one = step.trace.select(step.trace.rank == 0)
    return draw_timeline(one, title=title)


accumulation_panel = Panel(
    draw_accumulating, num_microbatches=ipywidgets.IntSlider(4, min=1, max=8, description="micro-batches")
)
accumulation_panel

# %%
accumulation_panel.controls["num_microbatches"].value = 8

# %% [markdown]
# Under the last backward only. The others leave it idle, and the exposed rest is paid once, for all of them.
#
# Your `overlap` sends in every backward. So does torch's `DistributedDataParallel` (DDP), which is your fourth rung in
# C++; a section below has more on it. DDP can be told to be quiet: `with model.no_sync():`. *What* has to happen inside
# is part of the exercise.
#
# ### Exercise: accumulate
#
# Write `accumulate(...)`, a small training loop. Budget: for each bucket **one all-reduce an update**, however many
# micro-batches the update has. And memory for one micro-batch at a time: each has a forward and a backward of its own.

# %% exercise="03.accumulate"

# %% [markdown]
# Four of the wrong versions that this check knows come from public code. All four train, and their losses fall.
#
# One process is the judge again: updates of 64 samples. The four ranks cut each of these batches into four
# micro-batches, so that a rank has four samples at a time. Next to it, what you would do without accumulation: an
# update for every micro-batch. `Ranks(4)` starts four processes again, for the rest of the lesson.

# %%
import time

from torch.nn.parallel import DistributedDataParallel

from distlab.comm import recorded


def train_accumulating(num_accumulated):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(GPT(CONFIG, torch.Generator().manual_seed(0)), bucket_cap_mb=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [CORPUS.batch(step, 16, rank=rank, world_size=world_size) for step in range(4)]
    call = {"microbatches": data, "num_accumulated": num_accumulated, "loss_fn": GPT.loss}
    with recorded() as seen:
        accumulate(model, optimizer, **call)
    start = time.perf_counter()
    accumulate(model, optimizer, **call)  # once more, now warm, for the time
    return list(model.parameters()), seen.records, time.perf_counter() - start


# %%
def train_at_once():
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train_step(model, optimizer, batch=CORPUS.batch(0, 64), loss_fn=GPT.loss)
    return list(model.parameters())


ranks = Ranks(4, timeout_s=180, backend="gloo")
at_once = run(train_at_once, 1)[0]
accumulated = {count: ranks.run(train_accumulating, count)[0] for count in (1, 4)}

# %% [markdown]
# Equal? And how many times fewer bytes does an update every 4 send than one every 1? Say a number before you run on.
# (A ring on four ranks sends 1.5 times the payload.) For the prediction, measure this machine and count the model's
# work, as in sitting one.

# %%
from distlab.measure import fit_cluster, measure_round, workload_from_module


def count_work():
    model = GPT(CONFIG)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs, targets = CORPUS.batch(0, 16, rank=0, world_size=4)
    step = lambda: model.loss(model(inputs), targets)  # noqa: E731
    return workload_from_module(model, step, optimizer=sgd, samples=4, name="small GPT")


MACHINE = fit_cluster(ranks.run(measure_round, torch.device("cpu"))[0], 4)
WORK = ranks.run(count_work)[0]


# %% tags=["nbval-check-output"]
def update_of(num_accumulated):
    half_mb = {"bucket_bytes": 500_000, "first_bucket_bytes": 500_000}
    return simulate(WORK, MACHINE, Plan(4, num_microbatches=num_accumulated, **half_mb))


same = largest_difference(accumulated[4][0], at_once) < 1e-5
print("two updates of 4 x 4 micro-batches are two updates of one process, to 1e-5:", same)
for count, (_, records, _) in accumulated.items():
    said_mb = 4 / count * update_of(count).sent_bytes_per_rank[0] / 1e6
    sent_mb = 1.5 * records.payload_bytes(0, "all_reduce") / 1e6
    print(f"4 micro-batches, an update every {count}: predicted {said_mb:.2f} MB a rank, measured {sent_mb:.2f} MB")

# %% [markdown]
# A quarter of the bytes. And the time?

# %%
times_ms = {}
for count, (_, _, seconds) in accumulated.items():
    said_ms = 4 / count * update_of(count).duration_s * 1e3
    times_ms[f"an update every {count}"] = {"predicted": said_ms, "measured": 1e3 * seconds}
    print(f"4 micro-batches, an update every {count}: predicted {said_ms:.0f} ms, measured {seconds * 1e3:.0f} ms")
words = {"unit": "ms", "title": "Four micro-batches, with four updates and with one"}
show(draw_bars(times_ms, **words))

# %% [markdown]
# ## Every sample once
#
# So far `CORPUS.batch(step, ...)` dealt the samples. Most programs use torch's `DistributedSampler`. Look at what it
# hands out: ten samples, four ranks.

# %% tags=["nbval-check-output"]
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def handed_out(epoch=None, **options):
    samplers = [DistributedSampler(range(10), 4, rank, seed=0, **options) for rank in range(4)]
    for sampler in samplers:
        if epoch is not None:
            sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


print("first epoch, four ranks:         ", handed_out())
print("second epoch, set_epoch forgotten:", handed_out())
print("second epoch, set_epoch(1):       ", handed_out(epoch=1))
print("with drop_last=True:             ", handed_out(drop_last=True))


# %%
def times_seen(dealt):
    return {f"sample {i}": float(sum(samples.count(i) for samples in dealt)) for i in range(10)}


words = {"unit": "x", "title": "torch's sampler: in one epoch two of ten samples are seen twice"}
show(draw_bars(times_seen(handed_out()), **words))

# %% [markdown]
# Four things to know about it:
#
# - **It repeats.** Ten samples became twelve, so that all ranks have equally many: two are seen twice an epoch. In
#   training that is a small harm. In an evaluation it is a wrong number: those two count double. `drop_last=True` loses
#   two samples instead.
# - **The epoch must be told.** Without `set_epoch` every epoch has the same order, and nothing complains.
# - **It has no position.** A run that is stopped in the middle of an epoch and resumed starts the epoch again: its
#   first samples are seen twice.
# - **It depends on the number of ranks.** Resume on two ranks instead of four, and "step 1" means other samples.
#
# In a program it stands in a `DataLoader`. Guides print the loop below, and often lose one of three lines: the sampler,
# `set_epoch`, `zero_grad`. No error says so. Eight samples, four ranks, two epochs of two updates each: every gradient
# is 1 and so is the rate, so that the weight should move by 4.


# %%
def two_epochs(left_out):
    data, seen = TensorDataset(torch.arange(8)), []
    sampler = None if left_out == "sampler" else DistributedSampler(data, seed=0)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    optimizer, start = torch.optim.SGD(model.parameters(), lr=1.0), model.module.weight.item()
    for epoch in range(2):
        if left_out not in ("sampler", "set_epoch"):
            sampler.set_epoch(epoch)
        for (samples,) in DataLoader(data, batch_size=1, sampler=sampler):
            if left_out != "zero_grad":
                optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            seen.append(samples.item())
    return seen, start - model.module.weight.item()


# %% tags=["nbval-check-output"]
for left_out in ("nothing", "sampler", "set_epoch", "zero_grad"):
    seen, moved = ranks.run(two_epochs, left_out)[0]
    print(f"left out: {left_out}; the weight moves by {moved:.0f}; rank 0 sees {seen}")

# %% [markdown]
# Without the sampler each rank reads everything, in one order: four ranks do the work of one, four times. Without
# `set_epoch` the second epoch is the first. Without `zero_grad` an update has the gradients of all updates before it,
# and the weight moves by 10<!--out--> in place of 4<!--out-->.
#
# The four points of the list go away if a batch is a *function* of how many samples the job has used so far, the
# **position**. Then there is nothing to remember but one number, and a checkpoint keeps it.
#
# ### Exercise: a sampler without memory
#
# Write `samples_at(position, batch_size, ...)`. No ranks are needed: every rank can work out its own samples, and those
# of all others. Nothing has to be sent.

# %% exercise="03.sampler"


# %% tags=["nbval-check-output"]
def used(positions, world_size):
    call = {"num_samples": 10, "seed": 0, "world_size": world_size}
    return [[samples_at(position, 4, rank=rank, **call) for rank in range(world_size)] for position in positions]


before, after = used([0, 4], 4), used([8], 2)
print("on four ranks, stopped in the middle of an epoch:", before)
print("resumed on two ranks:", after)
seen = [index for batch in before + after for samples in batch for index in samples]
print("each sample once:", sorted(seen) == list(range(10)))

# %% [markdown]
# The library's `distlab.data_parallel.DistributedSampler` is this with the interface of torch's, and a `state_dict`.
#
# ## Not all batches are equal
#
# Your [sampler](../GLOSSARY.md#sampler) neither repeats nor drops, so the last batch of an epoch is smaller: with four
# ranks and ten samples, two of them get nothing at all. Text makes this worse. Sentences have different lengths, and
# the padding after them does not count, so every micro-batch has a different number of tokens, even where samples are
# equally many.
#
# Then **a mean of means is not the mean**. Three tokens in a short micro-batch count for as much as three hundred in a
# long one. This fault sat in a widely used trainer until 2024, and it showed only when users compared accumulation
# with one large batch. `loss_weight` above was the remedy for ranks with unequal numbers of samples. The general one
# counts tokens, over all micro-batches *and* all ranks. For a micro-batch of $n$ tokens, of $N$ on all ranks together:
#
# $$\nabla L = \sum_\text{all} \frac{n}{N} \nabla L_\text{micro-batch}$$
#
# No rank knows $N$ by itself.
#
# ### Exercise: every token counts the same
#
# Write `token_weights(num_tokens)`. After it, ranks *average*: `average_gradients`, DDP and your own `overlap` divide
# the sum by the number of ranks. Budget: one all-reduce of one number.

# %% exercise="03.uneven"

# %% [markdown]
# Four ranks, micro-batches of several lengths, and rank 2 without data:


# %%
LENGTHS = ([32, 4], [8], [], [16, 2])  # tokens of a sample, one number per micro-batch


def cut(rank):
    batches = [CORPUS.batch(4 * rank + number, 2) for number in range(len(LENGTHS[rank]))]
    return [tuple(t[:, :n] for t in batch) for batch, n in zip(batches, LENGTHS[rank], strict=True)]


def uneven_gradient(weights_of):
    model = GPT(CONFIG, torch.Generator().manual_seed(0)).double()
    data = cut(dist.get_rank())
    for (inputs, targets), weight in zip(data, weights_of([t.numel() for _, t in data]), strict=True):
        (weight * model.loss(model(inputs), targets)).backward()
    average_gradients(model)
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# %% tags=["nbval-check-output"]
def mean_of_means(num_tokens):
    return [1 / len(num_tokens) for _ in num_tokens]


model, num_all = GPT(CONFIG, torch.Generator().manual_seed(0)).double(), 2 * sum(map(sum, LENGTHS))
for inputs, targets in [batch for rank in range(4) for batch in cut(rank)]:
    (targets.numel() / num_all * model.loss(model(inputs), targets)).backward()
one = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
for weights_of in (mean_of_means, token_weights):
    error = float((ranks.run(uneven_gradient, weights_of)[0] - one).norm() / one.norm())
    shown = "less than 1e-12" if error < 1e-12 else "more than half" if error > 0.5 else f"{error:.0%}"
    print(f"{weights_of.__name__:14} differs from one process by {shown}")

# %%
fair, counts = sum(map(sum, LENGTHS)), {}
for rank, lengths in enumerate(LENGTHS):
    for length in lengths:  # a token has a share of 1 / (ranks x micro-batches x length); 1 / fair would be right
        counts[f"rank {rank}, {length} tokens"] = fair / (4 * len(lengths) * length)
words = {"unit": "x", "title": "Mean of means: a token of the shortest text counts 16 times one of the longest"}
show(draw_bars(counts, subtitle="what a token counts, where 1 is right", **words))

# %% [markdown]
# Part of the first error is rank 2: it had no gradient, and was counted as zero. In the second run rank 2 took part as
# well: it all-reduced its 0, and `average_gradients` counted its missing gradients as zeros. DDP needs more help: a
# rank that runs no backward starts no bucket, and the others wait forever. Let it run any micro-batch with weight 0, or
# use `torch.distributed.algorithms.Join`, which answers in its place.

# %% [markdown]
# ## Popular claims, tested
#
# Guides repeat numbers about data parallelism. Derive the one that decides them all. A model has $P$ parameters, and a
# GPU gets $T$ tokens. A step computes about $6PT$ floating-point operations, at $F$ a second: 2 for each parameter and
# token in forward, 4 in backward. An all-reduce of 16-bit gradients sends about $2 \cdot 2P$ bytes, at $B$ a second:
#
# $$\frac{t_\text{communication}}{t_\text{compute}} \approx \frac{4P/B}{6PT/F} = \frac{2F}{3BT}$$
#
# $P$ is gone. **The share of communication does not depend on the size of the model, nor on the number of GPUs, but on
# the tokens that each GPU has in a step.** $F$ is what the GPU reaches with this model, not its data sheet.

# %% tags=["nbval-check-output"]
model = gpt(4)
reached = 6 * model.num_parameters * 8192 / step_on(1, "flat").duration_s
print(f"this model reaches {reached / 1e12:.0f} TFLOP/s on an H100, by the simulator")
print("communication takes, with 2,048, 8,192 and 32,768 tokens a GPU:")
wires = {"NVLink 4, 367 GB/s": 367e9, "eight InfiniBand NDR cards a machine": 8 * 50e9, "one card a machine": 50e9}
for name, bytes_per_s in wires.items():
    ratios = [2 * reached / (3 * bytes_per_s * tokens) for tokens in (2048, 8192, 32768)]
    print(f"{name:35}", ", ".join(f"{ratio / (1 + ratio):4.0%}" for ratio in ratios), end=" of a step; ")
    print(f"can be hidden from {reached / bytes_per_s:,.0f} tokens on")

# %% [markdown]
# Those are shares with nothing hidden. All of it *can* be hidden while it is shorter than backward, two thirds of
# compute: as long as the ratio is below 2/3, which is $T > F/B$. (367 GB/s: nccl-tests on 8 H200, 2025, see
# `simulator/hardware/presets.toml`; 50 GB/s: ConnectX-7 data sheet, 2022. With one card a machine the eight GPUs share
# it.)
#
# Where do the claims hold? Solve for $T$:

# %% tags=["nbval-check-output"]
claimed = {"5-15 % over NVLink": (367e9, 0.05, 0.15), "15-30 % over InfiniBand, one card": (50e9, 0.15, 0.30)}
for claim, (bytes_per_s, low, high) in claimed.items():
    fewest, most = (2 * reached / (3 * bytes_per_s) * (1 - share) / share for share in (high, low))
    print(f"{claim}: holds from {fewest:,.0f} to {most:,.0f} tokens a GPU, with nothing hidden")

# %% [markdown]
# - **Gradient traffic costs 5-15 % over NVLink.** Only in that range of tokens. With 2,048 it is 26 %<!--out-->, with
#   32,768 it is 2 %<!--out-->. Without the number of tokens the claim says nothing, and with overlap nearly nothing of
#   it is seen.
# - **And 15-30 % over InfiniBand.** With one card a machine, in its range. With eight cards InfiniBand costs what
#   NVLink costs.
#
# Now the claims about speed-up. "8 GPUs give 6 to 7x", "near linear to 8-16 GPUs", "twice the GPUs, 1.7x":

# %%
from simulator.viz import draw_scaling

claims = {"8 GPUs give 6-7x": (8, 6, 7)}
lines = {
    "overlapped, 8,192 tokens a GPU": lambda n: step_on(n, "overlapped", 4),
    "per parameter, 8,192 tokens": lambda n: step_on(n, "per_parameter", 4),
    "per parameter, 2,048 tokens": lambda n: step_on(n, "per_parameter", 1),
}
show(draw_scaling(lines, claims=claims))

# %% tags=["nbval-check-output"]
for samples in (1, 4):
    for rung in ("per_parameter", "flat", "overlapped"):
        times = {n: step_on(n, rung, samples).duration_s for n in (1, 2, 8, 16, 64)}
        speedups = {n: n * times[1] / times[n] for n in times}
        line = ", ".join(f"{n} GPUs {speedups[n]:.1f}x" for n in (2, 8, 16, 64))
        print(f"{2048 * samples:5} tokens, {rung:13}: {line}")

# %% [markdown]
# - **8 GPUs give 6-7x.** That is what a loop *without* overlap gives at 8,192 tokens a GPU: 6.7x<!--out-->. With
#   overlap it is 7.8x<!--out-->; with 2,048 tokens and a loop, 4.9x<!--out-->.
# - **Near linear to 8-16 GPUs.** With overlap and 8,192 tokens it goes on: 61.9x<!--out--> on 64. With 2,048 tokens it
#   is 13.1x<!--out--> on 16 and 42.7x<!--out--> on 64, in buckets of 25 MB; larger buckets help, as the panel above
#   shows.
# - **Twice the GPUs, 1.7x.** From one GPU to two, 1.6x<!--out--> to 2.0x<!--out-->, by tokens and by rung. The claim
#   comes nearer when the *total* batch stays, so that twice the GPUs means half the tokens for each:

# %% tags=["nbval-check-output"]
before_s = None
for num_gpus, samples in ((8, 8), (16, 4), (32, 2), (64, 1)):
    now_s = step_on(num_gpus, "overlapped", samples).duration_s
    gain = "" if before_s is None else f", {before_s / now_s:.2f}x by twice the GPUs"
    print(f"{num_gpus:2} GPUs, {2048 * samples:5} tokens each: {now_s * 1e3:5.1f} ms{gain}")
    before_s = now_s

# %% [markdown]
# ### "Gradient accumulation costs no memory, only time"
#
# Both halves can be measured. First memory. What is held at the end of forward, when a step holds most, is the
# [activations](../GLOSSARY.md#activation) that backward will need, and the gradients that are there already. Count
# both, for 16 samples at once, for four micro-batches of four, and for four samples that are a whole batch.


# %%
def held(samples, num_microbatches):
    model, kept = GPT(CONFIG), {}

    def note(tensor):  # autograd calls this for each tensor that it keeps for backward
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for number in range(num_microbatches):
        kept.clear()
        inputs, targets = CORPUS.batch(number, samples)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model.loss(model(inputs), targets)
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        loss.backward()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for place, size in kept.items() if place not in weights), gradients


# %%
held_mb = {}
for samples, count in ((16, 1), (4, 4), (4, 1)):
    activation_bytes, gradient_bytes = held(samples, count)
    kinds = {"activations": activation_bytes / 1e6, "gradients": gradient_bytes / 1e6}
    held_mb[f"{count} x {samples} samples"] = kinds
    print(f"{count} x {samples:2} samples: {activation_bytes / 1e6:.2f} MB of activations,", end=" ")
    print(f"{gradient_bytes / 1e6:.2f} MB of gradients: {(activation_bytes + gradient_bytes) / 1e6:.2f} MB")
words = {"unit": "MB", "title": "Accumulation keeps few activations, and one set of gradients"}
show(draw_bars(held_mb, subtitle="held at the end of the last forward", **words))

# %% [markdown]
# - **Against the large batch** accumulation saves: a quarter of the activations. That is what it is for.
# - **Against the small batch** it does cost memory: one whole set of gradients. Without accumulation no gradient exists
#   during forward, since the last update has thrown them away. With it they have to stay. For 1.3 billion parameters in
#   16 bits that is 2.6 GB, and 5.2 GB where sums are kept in float32, as they should be: many small numbers are added.
#   It is free only where gradients *are* views of the buckets, which are held all the time anyway.
#
# Now time, by the simulator, for the same eight samples of 2,048 tokens a GPU:

# %% tags=["nbval-check-output"]
for num_gpus in (1, 64):
    large = simulate(gpt(8), cluster("dgx-h100", num_gpus, stack="best-case"), Plan(num_gpus)).duration_s
    one_update, eight = accumulating_on(num_gpus, 8).duration_s, 8 * accumulating_on(num_gpus, 1).duration_s
    print(f"{num_gpus:2} GPUs: {large * 1e3:.0f} ms at once, {one_update * 1e3:.0f} ms in 8 micro-batches,", end=" ")
    print(f"{eight * 1e3:.0f} ms as 8 small batches with an update each")

# %% [markdown]
# - **Against a large batch that fits** it costs little: nothing on one GPU, 6 % on 64, since the exchange can hide
#   behind the last micro-batch's backward only. (The simulator lets small kernels run as fast as large ones. Real ones
#   do not, once a micro-batch is too small to fill a GPU.)
# - **Against small batches** it saves time: one exchange and one optimizer step instead of eight.
#
# So both halves depend on what you compare with. True is: it lets you take a batch that does not fit, for the memory of
# one set of gradients.

# %% [markdown]
# ## Spot the bug
#
# The loss falls, the recorder shows an all-reduce for each parameter, nothing hangs. Found in a public repository:
# this code averages in hooks, and replicas drift apart. Run the check as it is, read what it says, find the line,
# repair it.

# %% exercise="03.repair"

# %% [markdown]
# ## Production: torch's own
#
# `torch.nn.parallel.DistributedDataParallel` is the fourth rung in C++. Same model, same batches, turn by turn in one
# run: equal losses, and how long a step takes.


# %%
def side_by_side(num_steps=10):
    rank, world_size, rows = dist.get_rank(), dist.get_world_size(), []
    ours, theirs = (GPT(CONFIG, torch.Generator().manual_seed(0)) for _ in range(2))
    programs = [(ours, overlap(make_buckets(ours))), (DistributedDataParallel(theirs, bucket_cap_mb=0.5), None)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module, _ in programs]
    for step in range(num_steps):
        batch = CORPUS.batch(step, 16, rank=rank, world_size=world_size)
        for (module, synchronize), optimizer in zip(programs, optimizers, strict=True):
            start = time.perf_counter()
            loss = train_step(module, optimizer, batch=batch, loss_fn=GPT.loss, synchronize=synchronize)
            rows.append((float(loss), time.perf_counter() - start))
    return rows[::2], rows[1::2]


# %%
from statistics import median, quantiles

ours, theirs = ranks.run(side_by_side)[0]
gap = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
ratios = [a[1] / b[1] for a, b in zip(ours[2:], theirs[2:], strict=True)]
low, _, high = quantiles(ratios)
print(f"largest difference of the losses in {len(ours)} steps: {gap:.1e}")
print(f"a step of yours takes {median(ratios):.2f} times a step of DDP; half of the pairs: {low:.2f} to {high:.2f}")
step_ms = {who: 1e3 * median(s for _, s in rows[2:]) for who, rows in (("your overlap", ours), ("torch's DDP", theirs))}
words = {"unit": "ms", "title": "The fourth rung in your Python, and in torch's C++"}
show(draw_bars(step_ms, subtitle="one step, turn by turn in one run", **words))

# %% [markdown]
# **Horovod puts the average elsewhere: into the optimizer.** The model knows nothing. Hooks on the optimizer's
# parameters fill buffers during backward, and `step()` waits for all of them. So the loop is that of one process.

# %% tags=["nbval-check-output"]
from distlab.data_parallel import HorovodOptimizer


def by_horovod(num_steps):
    model, losses = GPT(CONFIG, torch.Generator().manual_seed(0)), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = HorovodOptimizer(sgd, model.named_parameters(), fusion_bytes=500_000)
    for step in range(num_steps):
        batch = CORPUS.batch(step, 16, rank=dist.get_rank(), world_size=4)
        losses.append(float(train_step(model, optimizer, batch=batch, loss_fn=GPT.loss)))
    return losses


same = max(abs(loss - ddp[0]) for loss, ddp in zip(ranks.run(by_horovod, len(theirs))[0], theirs, strict=True)) < 1e-5
print(f"the losses with Horovod's design are those of DDP, to 1e-5: {same}")

# %% [markdown]
# **A fault that DDP cannot catch.** DDP averages in what its own `forward` sets up. Code that takes the loss from
# `model.module`, to save typing or to reach a method, goes around it. Is anything averaged?


# %% tags=["nbval-check-output"]
def around_ddp():
    model = DistributedDataParallel(GPT(CONFIG))
    inputs, targets = CORPUS.batch(0, 16, rank=dist.get_rank(), world_size=4)
    counts = []
    for forward in (model, model.module):
        with recorded() as seen:
            GPT.loss(forward(inputs), targets).backward()
        counts.append(seen.records.num_calls("all_reduce"))
    return counts


through, around = ranks.run(around_ddp)[0]
print(f"loss of model(inputs): all-reduces made: {through > 0}; loss of model.module(inputs): {around > 0}")

# %% [markdown]
# The same settings under other names:
#
# | | capacity of a bucket | send during backward | equal starts |
# |---|---|---|---|
# | torch DDP | `bucket_cap_mb`: 25 MiB, the first 1 MiB | always | when it is built |
# | torchtitan | 100 MiB, fixed in its `apply_ddp` | as DDP | as DDP |
# | Megatron-LM | `--ddp-bucket-size`: max(40e6, 1e6 x ranks) parameters | `--overlap-grad-reduce` | from a seed |
# | DeepSpeed | `reduce_bucket_size`: 5e8 elements | `overlap_comm` | when it is built |
# | Horovod | `HOROVOD_FUSION_THRESHOLD`: 128 MB | always | `broadcast_parameters` |
#
# Horovod has no fixed buckets: every `HOROVOD_CYCLE_TIME` (1 ms) the ranks agree on what is ready everywhere and send
# that together. DDP rebuilds its buckets once, in the order in which the first backward made gradients;
# `find_unused_parameters=True` is its answer to parameters that never come, `gradient_as_bucket_view=True` saves one
# copy.
#
# Sources are at the end. In the library, `distlab.data_parallel.DataParallel` is your `overlap` made fit for real
# models: gradients that *are* views of the buckets, agreement between ranks at the start, unused parameters named,
# and a `no_sync` that only backward needs to be inside of.
#
# Accumulation, samplers and uneven batches have names too:
#
# | | micro-batches of an update | position of the data | uneven batches |
# |---|---|---|---|
# | torch DDP | `no_sync()`; the loop is yours | `DistributedSampler`: `set_epoch`, no position | `model.join()` |
# | torchtitan | from `training.global_batch_size` | data loader with a state | divides by all ranks' tokens |
# | Megatron-LM | from `--global-batch-size` | `consumed_samples` | `--calculate-per-token-loss` |
# | DeepSpeed | `gradient_accumulation_steps`; `backward` divides | torch's sampler | own, `scale_wrt_gas=False` |
# | Horovod | `backward_passes_per_step` | `ElasticSampler`: `record_batch`, `state_dict` | `hvd.join()` |

# %% [markdown]
# ## Lab
#
# The same on your own hardware, as a plain script. In a terminal, on four CPU ranks, with the reference and with what
# you wrote in this notebook:
#
# ```
# distlab lab 03 --ranks 4 --impl reference
# distlab lab 03 --ranks 4 --impl mine --trace traces
# ```
#
# The same by [torchrun](../GLOSSARY.md#torchrun), which is also how it runs on GPUs (`--nproc-per-node` is their
# number):
#
# ```
# torchrun --nproc-per-node 4 lessons/03_data_parallel/lab.py --impl reference
# ```
#
# `lab_reference.md` next to it has the output to compare with. `--trace` leaves a timeline that Chrome and Perfetto
# open.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. Your 7B model (16-bit gradients) trains on 8 H100 with 2,048 tokens a GPU, nothing overlapped. You double the
#    tokens. What happens to the share of communication, and what if you doubled the model instead?
# 2. Ethernet of 10 Gb/s between machines with one GPU each: how many tokens must a GPU have so that overlap can hide
#    everything (ratio 2/3), at 400 TFLOP/s?
# 3. A colleague divides the loss by world_size *and* averages the gradients. SGD or Adam: which run looks healthy?
# 4. Gradients are synchronised in `optimizer.step()`, says a guide. Which line of `train_step` proves it wrong?
# 5. Two GPUs take 135 ms per step where one takes 120 ms for its half of the work. Which share is exposed, and what is
#    the speed-up in work done a second?
# 6. A paper trains with batches of 1,024 samples. You have 64 GPUs, and four samples fit on each. How many
#    micro-batches has an update? Your 7B model's gradients take 14 GB: how many bytes does a rank send for each of its
#    samples, with `no_sync` and without?
# 7. An evaluation set has 1,000 samples, and torch's sampler deals them to 64 ranks. How many are counted twice?


# %% tags=["nbval-check-output"]
def share(tokens, flops_per_s=400e12, bytes_per_s=367e9):
    ratio = 2 * flops_per_s / (3 * bytes_per_s * tokens)
    return ratio / (1 + ratio)


print(f"1. {share(2048):.0%} with 2,048 tokens, {share(4096):.0%} with 4,096; the size of the model does not matter")
print(
    f"2. 2F / 3BT = 2/3 gives T = F / B = {400e12 / (10e9 / 8):,.0f} tokens: hopeless, unless you send less (lesson 5)"
)
print("3. Adam: its update hardly depends on the gradient's scale. Plain SGD learns world_size times too slowly")
print("4. synchronize() stands between backward() and optimizer.step(), which sends nothing")
print(f"5. {1 - 120 / 135:.0%} exposed, {2 * 120 / 135:.2f}x")
ring_gb = 2 * 63 / 64 * 14
print(f"6. {1024 // (64 * 4)} micro-batches; {ring_gb / 16:.1f} GB a sample with no_sync, {ring_gb / 4:.1f} GB without")
print(f"7. {-(-1000 // 64) * 64 - 1000}, since each rank gets {-(-1000 // 64)}")

# %%
ranks.close()

# %% [markdown]
# ## What to read next
#
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, 2020: your ladder as its
#   builders tell it, with buckets, order and unused parameters.
# - Sergeev and Del Balso, *Horovod: fast and easy distributed deep learning in TensorFlow*, 2018: rings and fusion.
# - PyTorch documentation, *Distributed Data Parallel* (design note), 2026: what DDP does in each step.
#
# **Next: lesson 4.** More GPUs, or more micro-batches, mean a larger batch and fewer updates. Lesson 4 shows what that
# does to learning.
#
# ## Sources
#
# - Li et al. 2020, *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*: buckets, reverse order,
#   hooks.
# - Sergeev and Del Balso 2018, *Horovod*; its tensor fusion page and release notes 0.21 (128 MB, 1 ms), 2020.
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD*, section 3: pitfalls of loss scaling and averaging.
# - Hugging Face transformers, pull requests 34191 and 34242, 2024: means of means in accumulation, and across ranks.
# - PyTorch documentation, DistributedDataParallel and its design note; read for torch 2.13. torchtitan, `apply_ddp` in
#   its Llama 3 model, read 2026.
# - Megatron Core documentation, DistributedDataParallelConfig (bucket_size, overlap_grad_reduce), read 2026.
# - DeepSpeed documentation, configuration JSON, ZeRO section, read 2026.
# - Figures of devices and wires: `simulator/hardware/presets.toml`, each with its source and date.
