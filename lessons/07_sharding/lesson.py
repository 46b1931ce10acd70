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
# # 7. Sharding
#
# 90 minutes. Comes after lesson 3 (data parallel) and lesson 6 (memory). You need no GPU: four processes on this
# machine are the four ranks.
#
# Afterwards you can
#
# - shard optimizer state, gradients and parameters (ZeRO-1, 2, 3) by hand, and count what a rank holds and sends;
# - run a model by units that are gathered, used and freed, the next one gathered ahead (FSDP);
# - choose the size of a unit, prefetch, replicas and offload for a model and a cluster;
# - write the DeepSpeed and FSDP2 settings that mean the same;
# - run an optimizer that needs whole matrices (Muon) on shards, by owners whose work is balanced.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You have 64 H100s of 80 GB and want to train a GPT of 7.5 billion parameters with Adam. Lesson 6 counted 16 bytes a
# parameter: 2 for the parameter and 2 for its gradient in 16 bits, 12 for Adam's two moments and the float32 copy.

# %%
from distlab.plan import Sharding
from distlab.plan import Plan
from simulator import adam_state_bytes, cluster, gpt_workload, simulate

MODEL = gpt_workload(hidden_size=4096, num_layers=36, num_heads=32, sequence_length=2048, vocab_size=51200)

# %% tags=["nbval-check-output"]
one = adam_state_bytes(7.5e9)
print(f"states of 7.5 billion parameters: {one / 1e9:.0f} GB; a GPU has 80 GB; 64 GPUs have {64 * 80:,} GB")
print(f"data parallel on 64 GPUs holds {64 * one / 1e9:,.0f} GB, to keep {one / 1e9:.0f} GB of facts")

# %%
from simulator.viz import draw_bars


def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    show(draw_bars(numbers, unit=unit, title=title, subtitle=subtitle))


sizes_gb = {"states, on every rank": one / 1e9, "memory of a GPU": 80, "states, divided by 64": one / 64 / 1e9}
show_bars(
    sizes_gb, "GB", "Each GPU would hold the same 120 GB; a 64th of them is little", "7.5 billion parameters, 64 GPUs"
)

# %% [markdown]
# Compare the first bar with the second: data parallel does not start here, on 64 GPUs as little as on one. Each would
# hold the same 120 GB<!--out-->. Then look at the third bar. Can a GPU work with so little, and what does it have to
# ask the others for? This lesson answers it. Memory is not what is missing. The cluster has 40 times as much as the
# states need. It is the same bytes, 64 times.
#
# So let each GPU keep a 64th. The largest part, Adam's 12 bytes, is used only in the update, once a step. Say that the
# ranks share out these 12 bytes and nothing else. How much smaller do the states of a GPU get? A popular guide says:
# "[ZeRO](../GLOSSARY.md#zero)-1 saves 8x". Type a number into the box that the next cell shows, and press Commit.

# %%
guess_0 = predict("How many times smaller are the states if the optimizer's are shared among 64 GPUs?", unit="x")
guess_0

# %%
print(guess_0.compare(one / adam_state_bytes(7.5e9, zero_stage=1, num_ranks=64), how="counted"))

# %% tags=["nbval-check-output"]
guess_0.lock()
print("GB a GPU      4 GPUs  16 GPUs  64 GPUs  1024 GPUs saves at most")
for stage, shared in enumerate(("nothing", "optimizer", "+ gradients", "+ parameters")):
    sizes = [adam_state_bytes(7.5e9, zero_stage=stage, num_ranks=n) / 1e9 for n in (4, 16, 64, 1024)]
    row = " ".join(f"{size:8.1f}" for size in sizes)
    end = adam_state_bytes(7.5e9) / adam_state_bytes(7.5e9, zero_stage=stage, num_ranks=10**9)
    print(f"{stage} {shared:13}{row} {f'{end:.0f}x less' if end < 100 else 'n times less':>13}")

# %% [markdown]
# **"ZeRO-1 saves 8x and ZeRO-2 16x" is wrong by a factor of two.** The 4 bytes that ZeRO-1 leaves whole are a quarter
# of 16, so it can never save more than 4x; the 2 bytes of ZeRO-2 are an eighth. The table is the paper's own
# (Rajbhandari et al. 2020, table 1). The names: ZeRO-1 shares out the optimizer's state, ZeRO-2 gradients too, ZeRO-3
# parameters too. [FSDP](../GLOSSARY.md#fsdp) is ZeRO-3, unit by unit.
#
# What does it cost? A rank that needs what it does not hold must ask for it, so there will be communication. This
# lesson builds the three stages on real ranks, counts what they send and hold, and then asks when you notice.

# %% [markdown]
# ## Each rank owns some tensors
#
# A small GPT reads Python's own documentation. `Ranks(4)` starts four processes that stay until the end of the
# lesson. `bench(name, prepare)` trains for three steps on each of them; `prepare(model)` returns three things: what to
# call for the forward pass, what to call after backward, and the optimizer. `bench` notes the losses, the bytes that a
# rank sends in the last step, and the bytes of its optimizer state.

# %%
from distlab.data import ByteCorpus, python_documentation
from distlab.data_parallel import DataParallel
from distlab.models import GPT, GPTConfig

CORPUS = ByteCorpus(python_documentation(), context=32)
CONFIG = GPTConfig(context=32, num_layers=4, num_heads=2, hidden_size=64)
PSI = 4 * GPT(CONFIG).num_parameters  # bytes of all parameters, float32


def batch_of(step):
    return CORPUS.batch(step, 16, rank=dist.get_rank(), world_size=dist.get_world_size())


# %%
def measured(prepare, num_steps=3):
    model, losses = GPT(CONFIG, torch.Generator().manual_seed(0)), []
    forward, update, optimizer = prepare(model)
    for step in range(num_steps):
        inputs, targets = batch_of(step)
        with recorded() as seen:
            loss = GPT.loss(forward(inputs), targets)
            loss.backward()
            update()
        dist.all_reduce(loss.detach_())
        losses.append(float(loss) / dist.get_world_size())
    rank, records = dist.get_rank(), seen.records
    sent = records.sent_bytes(rank) + records.ring_equivalent_bytes(rank)
    moments = [tensor.nbytes for state in optimizer.state.values() for tensor in state.values() if tensor.numel() > 1]
    return losses, sent, sum(moments)


# %%
ranks = Ranks(4)


def bench(name, prepare):
    losses, sent, state = zip(*ranks.run(measured, prepare), strict=True)
    table[name] = losses[0]
    gap = max(abs(one - other) for one, other in zip(losses[0], table["data parallel"], strict=True))
    mean = sum(sent) / len(sent)
    sent_psi[name] = mean / PSI * 4 / 3
    state_mb[name] = {"smallest": min(state) / 1e6, "largest": max(state) / 1e6}
    print(f"{name:24} sent {mean / 1e6:.2f} MB, {sent_psi[name]:.2f} Psi (n-1)/n; ", end="")
    print(f"state {min(state) / 1e6:.2f} to {max(state) / 1e6:.2f} MB; losses differ by {gap:.0e}")


# %% [markdown]
# Data parallel first, the bar for all others. $\Psi$ is the size of all parameters in bytes, and of all gradients: 0.87
# MB here. A ring all-reduce sends $2\Psi\frac{n-1}{n}$ (lesson 2), so the table counts in units of
# $\Psi\frac{n-1}{n}$. One unit is what a rank sends in a reduce-scatter of all gradients, or in an all-gather of all
# parameters.


# %%
def data_parallel(model):
    replicas = DataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update():
        replicas.synchronize()
        optimizer.step()
        optimizer.zero_grad()

    return model, update, optimizer


table, sent_psi, state_mb = {}, {}, {}
bench("data parallel", data_parallel)

# %% [markdown]
# Now the simplest ZeRO-1. Deal the tensors out: tensor $i$ belongs to rank $i \bmod n$. A rank's optimizer gets only
# the tensors that it owns, so it keeps state for those alone. An all-reduce would bring every rank the mean of *all*
# gradients, and a rank uses those of its own tensors. So only *reduce* each gradient to its owner: half of an
# all-reduce. After the update each owner broadcasts what it has changed.


# %%
def reduced_to_owners(model):
    n, rank, parameters = dist.get_world_size(), dist.get_rank(), list(model.parameters())
    optimizer = torch.optim.AdamW(parameters[rank::n], lr=1e-3)

    def update():
        for index, parameter in enumerate(parameters):
            dist.reduce(parameter.grad.div_(n), index % n)
        optimizer.step()
        for index, parameter in enumerate(parameters):
            dist.broadcast(parameter.data, index % n)
        model.zero_grad()

    return model, update, optimizer


bench("reduced to owners", reduced_to_owners)
show_bars(sent_psi, "Psi (n-1)/n", "Reducing to the owner sends no more than data parallel", "sent per rank")

# %% [markdown]
# **2 $\Psi$: ZeRO-1 sends exactly what data parallel sends.** That is not luck. An all-reduce *is* a reduce-scatter
# (everybody gets the sum of a part) and an all-gather (everybody gets all parts). Between the two there is room for
# an update. Data parallel gathers gradients and updates everything everywhere; ZeRO-1 updates first and gathers
# parameters.
#
# It works with any optimizer, also those that need whole tensors, such as LAMB (lesson 4). Two flaws are left. The
# shares are uneven, since tensors are: see the smallest and the largest state above, and the fullest rank decides what
# fits. And there is a message for each tensor. Both go away if one cuts without regard to tensors.

# %% [markdown]
# ### Exercise: pieces
#
# Put all tensors end to end into one row, fill it up at its end to a multiple of $n$, and cut it into $n$ equal
# shards. A cut may go through the middle of a tensor. Write `pieces_of(sizes, num_shards, shard)`: which parts of
# which tensors lie in a [shard](../GLOSSARY.md#shard). No ranks are needed.

# %% exercise="07.pieces"

# %% tags=["nbval-check-output"]
for shard in range(3):
    words = [f"tensor {tensor} [{start}:{stop}]" for tensor, start, stop in pieces_of([6, 1, 4, 2], 3, shard)]
    print(f"shard {shard} of tensors with 6, 1, 4 and 2 elements: {', '.join(words)}")

# %% [markdown]
# For Adam a shard may be cut anywhere: it treats each element by itself. LAMB and LARS take the norm of a tensor, and
# would take that of a piece.
#
# ### Exercise: a step on shards
#
# Write `step_on_shard(parameters, gradient, update)`: a ZeRO-1 step. `parameters` is the row, the same on all ranks;
# `gradient` is this rank's own; `update(shard, mean_gradient)` changes a shard in place. Two calls of the library do
# the sending: `scatter_sum(row, shard)` sums the ranks' rows and leaves each rank with its own part, and
# `gather_into(row, shard)` fills a row with the ranks' shards.
#
# Budget: $2\Psi\frac{n-1}{n}$ bytes, and state for a shard.

# %% exercise="07.step"


# %%
def as_row(model, n):
    """Make all parameters views of one row, filled up to a multiple of n; return the row."""
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    row = torch.zeros(-(-sum(sizes) // n) * n)
    for parameter, place in zip(parameters, row[: sum(sizes)].split(sizes), strict=True):
        place.copy_(parameter.data.flatten())
        parameter.data = place.view_as(parameter)
    return row


# %%
def shards_of_a_row(model):
    row = as_row(model, dist.get_world_size())
    own = torch.nn.Parameter(row.chunk(dist.get_world_size())[dist.get_rank()])
    optimizer = torch.optim.AdamW([own], lr=1e-3)

    def adam(shard, mean):
        own.grad = mean  # `shard` and `own` are the same memory
        optimizer.step()

    def update():
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        step_on_shard(row, torch.cat([gradient, gradient.new_zeros(len(row) - len(gradient))]), adam)
        model.zero_grad()

    return model, update, optimizer


bench("equal shards", shards_of_a_row)

# %%
show_bars(state_mb, "MB", "A cut without regard to tensors gives each rank the same share", "optimizer state of a rank")

# %% [markdown]
# Two calls instead of one for each tensor, 2 $\Psi$, and every rank holds the same share.

# %% [markdown]
# ## ZeRO-2: gradients too
#
# With reduce-scatter a rank needs the mean of its own shard of gradients, and of the others' shards nothing. So once a
# bucket (lesson 3) has been reduced, it can be thrown away, while backward is still running. No more is sent; only the
# order changes. That is all of ZeRO-2. The library's `ShardedOptimizer` does both, in buckets that travel during
# backward.


# %%
from distlab.sharding import ShardedOptimizer


def zero(stage):
    def prepare(model):
        sharded = ShardedOptimizer(
            model, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), stage=stage, bucket_bytes=200_000
        )

        def update():
            sharded.synchronize()
            sharded.step()
            sharded.zero_grad()

        return model, update, sharded.optimizer

    return prepare


bench("ZeRO-1", zero(1))
bench("ZeRO-2", zero(2))

# %% [markdown]
# Is ZeRO-2 then always better than ZeRO-1? For one backward a step, yes. When you *accumulate* gradients over
# micro-batches (lesson 3), ZeRO-1 keeps the whole sum on each rank and sends once. ZeRO-2 has no room for whole
# gradients: it must reduce-scatter after each micro-batch.

# %% [markdown]
# ## ZeRO-3: parameters too
#
# The last 2 bytes. A rank needs *all* parameters, but not all at once: in forward it needs layer 1, then layer 2,
# then layer 3. So cut the model into **units**, such as its blocks. Each unit is a row of its own, and each rank
# keeps a shard of each row. To run a unit, gather its row; when it has computed, let the row go.
#
# What will that send? Count: parameters come in for forward. They come in again for backward, since they were freed.
# Gradients go out. Data parallel sends 2 $\Psi$.

# %%
guess_1 = predict("How much does ZeRO-3 send in a step, in units of Psi (n-1)/n?", unit="Psi")
guess_1

# %% [markdown]
# ### Exercise: gather, use, free
#
# Write `forward_units(shards, x, compute)`. `compute(index, whole, x)` runs unit `index` on `x` with its whole row.
# Budget: each unit is gathered once, and one whole unit is held at a time. When is memory free in Python? When the last
# name for it is gone.

# %% exercise="07.forward"

# %% [markdown]
# ### Exercise: gather ahead
#
# In that loop the processor waits while a unit is gathered, and the wire waits while it computes. Write
# `forward_ahead(shards, x, compute)`: the gather of unit 1 is on its way while unit 0 computes. The price is a second
# whole unit in memory. `gather_into(whole, shard, async_op=True)` starts and returns a handle with `.wait()`.

# %%
from simulator.viz import draw_timeline

SHALLOW = gpt_workload(hidden_size=4096, num_layers=3, num_heads=32, sequence_length=2048, vocab_size=51200)
for units_ahead in (0, 1):
    plan = Plan(64, sharding=Sharding(stage=3, prefetch=units_ahead))
    trace = simulate(SHALLOW, cluster("dgx-h100", 64, stack="best-case"), plan).layer_trace
    rank_0 = trace.select(trace.rank == 0)
    words = "Each unit waits for its gather" if units_ahead == 0 else "Gathers run while units compute"
    show(draw_timeline(rank_0, title=words))

# %% exercise="07.ahead"

# %% [markdown]
# ### Exercise: backward
#
# Write `backward_units(shards, inputs, grad, compute)`. The last unit comes first. Gather it again; `compute(index,
# whole, x, grad)` returns the gradients of its row and of its input; let the row go; reduce-scatter the gradient; let
# that go too. Autograd does not appear here, so that you see each step; the library hangs the same steps on autograd's
# hooks.

# %% exercise="07.backward"

# %% [markdown]
# The library's `plain_step` is your loops on one screen, with autograd inside: gather, compute, free; gather, backward,
# reduce-scatter. It takes a list of modules, each fed with what the one before it made, and a shard for each. The next
# cell prints it, and trains a list of four with Adam, on four ranks and on one.
#
# Then comes the library's `FullyShard`, which takes any module: each item of a `ModuleList` is a unit, and the rest
# (embeddings, the last norm) is the root unit. `model.parameters()` are the shards, so the optimizer needs no change.


# %%
import inspect

from distlab.sharding import FullyShard, plain


def train_plainly():
    torch.manual_seed(0)
    modules = [torch.nn.Sequential(torch.nn.Linear(31, 31), torch.nn.Tanh()) for _ in range(4)]
    shards, losses = [plain.cut_shard(module) for module in modules], []
    optimizer = torch.optim.AdamW(shards, lr=1e-2)
    x, target = torch.randn(2, 16, 31).chunk(dist.get_world_size(), 1)[dist.get_rank()]
    for _ in range(5):
        losses.append(plain.plain_step(modules, shards, x, lambda made: (made - target).square().mean()))
        optimizer.step()
    return torch.stack(losses)


on_four, on_one = sum(ranks.run(train_plainly)) / 4, run(train_plainly, 1)[0]
print(inspect.getsource(plain.plain_step).rpartition('"""\n')[2])
print(f"losses on four ranks and on one differ by {float((on_four - on_one).abs().max()):.0e}")


# %%


def fully_sharded(**options):
    def prepare(model):
        sharded = FullyShard(model, **options)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)

        def update():
            sharded.synchronize()
            optimizer.step()
            sharded.zero_grad()

        return sharded, update, optimizer

    return prepare


guess_1.lock()
bench("FSDP", fully_sharded())
bench("FSDP, kept after forward", fully_sharded(reshard_after_forward=False))

# %%
print(guess_1.compare(sent_psi["FSDP"]))

# %% [markdown]
# **3 $\Psi$, half as much again as data parallel**, and the same losses. With `reshard_after_forward=False` whole units
# stay from forward to backward: 2 $\Psi$, for the memory of all parameters during a step. Each row is filled up to a
# multiple of 4, so the exact numbers are a hair above 3 and 2.

# %% [markdown]
# ## What a rank holds
#
# The formula says for float32 Adam: 4 bytes per parameter, 4 for its gradient, 8 for two moments. Measure it: the
# tracker of lesson 6 enters every storage that a rank makes, by kind. On 2 ranks and on 4:


# %%
from distlab.measure import KINDS, track_memory

STATES = ("parameters", "gradients", "optimizer", "buffers")
PREPARE = (data_parallel, zero(1), zero(2), fully_sharded(prefetch=0))
NAMES = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def held(prepare):
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    forward, update, optimizer = prepare(model)
    with track_memory(forward, optimizer) as memory:
        inputs, targets = batch_of(0)
        GPT.loss(forward(inputs), targets).backward()
        update()
    most = memory.over_time()[1].max(axis=0)
    return {kind: int(most[KINDS.index(kind)]) for kind in STATES}


# %%
def held_in_all():
    return [held(prepare) for prepare in PREPARE]


def formula(stage, n):
    whole = [4 / n if stage == 3 else 4, 4 / n if stage >= 2 else 4, 8 / n if stage >= 1 else 8]
    return [size * PSI / 4 for size in whole]


pair = Ranks(2, timeout_s=180)
for n, members in ((2, pair), (4, ranks)):
    print(f"MB on {n} ranks: parameters, gradients, optimizer (formula); whole units")
    for stage, got in enumerate(in_all := members.run(held_in_all)[0]):
        pairs = zip(STATES, formula(stage, n), strict=False)
        words = [f"{got[kind] / 1e6:5.2f} ({size / 1e6:.2f})" for kind, size in pairs]
        print(f"  stage {stage}: {', '.join(words)}; {got['buffers'] / 1e6:.2f}")

# %%
shown = {name: {kind: got[kind] / 1e6 for kind in STATES[:3]} for name, got in zip(NAMES, in_all, strict=True)}
show_bars(shown, "MB", "Stage by stage, one more of the three is divided by 4", "measured on one of four ranks")

# %% [markdown]
# Measured and formula agree to the digit: stage by stage one more of the three shrinks with $n$. The last number is
# the whole units that stage 3 holds at work, here the root unit and one block. It does not shrink with $n$: that is
# the part of ZeRO-3 that the paper's table does not have, and that the size of a unit decides. Stages 0 to 2 gather no
# units, so there it is 0. What they send lies elsewhere: stage 1 sends from the gradients' own memory, and a bucket of
# stage 2 is lent for a moment, which the tracker enters as temporary. The table leaves temporary memory out.
#
# ### What did not fit now does
#
# Give every rank an artificial limit of 40 MB, and a model of 3.2 million parameters: 13 MB<!--out--> of parameters, as
# much of gradients, and twice that of moments. The tracker refuses what goes beyond, as a GPU would.

# %%
from distlab.measure import MemoryLimitError

LARGE = GPTConfig(context=32, num_layers=4, num_heads=4, hidden_size=256)
LIMIT = 40_000_000


def try_to_train(prepare, num_steps=2):
    forward, update, optimizer = prepare(GPT(LARGE, torch.Generator().manual_seed(0)))
    losses = []
    try:
        with track_memory(forward, optimizer, limit_bytes=LIMIT) as memory:
            for step in range(num_steps):
                inputs, targets = batch_of(step)
                loss = GPT.loss(forward(inputs), targets)
                (loss.backward(), update(), losses.append(f"{loss:.2f}"))
    except MemoryLimitError as error:
        return str(error)
    return f"trains: losses {', '.join(losses)}, at most {memory.peak_bytes / 1e6:.0f} MB of {LIMIT / 1e6:.0f} MB"


# %%
for name, prepare in (("data parallel", data_parallel), ("FSDP", fully_sharded())):
    print(f"{name}: {ranks.run(try_to_train, prepare)[0]}")

# %% [markdown]
# ## When do you notice what is sent?
#
# ZeRO-3 sends 3 $\Psi$ where data parallel sends 2 $\Psi$. On the 64 H100s of the question, eight to a machine,
# InfiniBand between: how does the step change? Suppose for a moment that the states fitted everywhere, so that all
# can be compared. Which way, and by how much?

# %%
guess_2 = predict("A step of ZeRO-3 takes how many times one of data parallel?", unit="x")
guess_2

# %%
MACHINES = cluster("dgx-h100", 64, stack="best-case")


def step_with(machines=MACHINES, **sharding):
    return simulate(MODEL, machines, Plan(machines.num_devices, sharding=Sharding(**sharding)))


print(guess_2.compare(step_with(stage=3).duration_s / step_with(stage=0).duration_s, how="simulated"))

# %% tags=["nbval-check-output"]
guess_2.lock()
for stage in range(4):
    step = step_with(stage=stage)
    memory = step.memory
    waiting = f"{step.exposed_communication_s * 1e3:3.0f} of them waiting for the wire"
    print(f"stage {stage}: {step.duration_s * 1e3:.0f} ms a step, {waiting}; {memory.max_bytes / 1e9:.0f} GB a GPU")

# %% [markdown]
# **It is faster.** Two reasons, and neither is in "3 is more than 2". First, the update: every rank of plain data
# parallel reads and writes Adam's state of all 7.5 billion parameters, a fifth of its step; a shard takes a 64th of
# that. Second, when bytes can travel: an all-gather of stage 3 hides behind the forward and backward of the unit
# before. Stages 1 and 2 gather new parameters after the update, when nothing is left to hide behind. Their step is even
# longer than plain data parallel's: over machines a gather is one ring of all 64 ranks, so each bucket pays for 63
# hops, where an all-reduce goes by two levels with few. Larger buckets pay less often.
#
# So **"FSDP costs 50 % more communication"** is true in bytes. What you notice is what cannot be hidden. A unit's
# forward takes $2PT/F$ seconds for its $P$ parameters and $T$ tokens at $F$ operations a second. Its gather takes
# $2P/B$ at $B$ bytes per second. So it is hidden while $T > F/B$, whatever the size of the model and of the unit. It is
# the rule of lesson 3 with other factors, and it says that small batches on slow wires show it.
#
# Which $B$? Not that of one network card. The ranks of a machine take part in the same gather, and its eight cards
# share what comes in. Question 3 below puts numbers in.

# %% [markdown]
# ## How large is a unit?
#
# The whole model as one unit would be gathered at once: no memory saved, nothing to hide behind. A unit for each small
# tensor would send thousands of short messages, and a message has a delay (lesson 1). Between them you choose. Take the
# GPT of 1.3 billion parameters from lesson 5, on all 64 GPUs, with one sample of 2,048 tokens each. Before you look:
# how many of its 24 layers in a unit make the shortest step?

# %%
guess_units = predict("How many layers a unit are fastest?", unit="layers")
guess_units

# %%
from simulator.viz import sharding_panel

guess_units.lock()
SMALLER = gpt_workload(hidden_size=2048, num_layers=24, num_heads=16, sequence_length=2048, vocab_size=51200)
units = sharding_panel(SMALLER, MACHINES, Plan(64, sharding=Sharding(stage=3)), num_devices=(64, 8, 16, 32))
units

# %%
units.controls["unit_layers"].value = 2
print(guess_units.compare(2, how="simulated"))
print(units.text)

# %% [markdown]
# Move the sliders. One layer per unit holds least. But a ring around 64 GPUs has 63 hops, and a gather of 100 MB spends
# a good part of its time on their delays: two layers a unit make half as many gathers. From three on it gets worse
# again: the first gather and the last reduce-scatter have nothing to hide behind, and they get longer. On 8 GPUs
# nothing beats one layer, and with the 7.5B model a second one gains nothing. So one is the usual wrapping: a
# block of a transformer. The FSDP paper found that gathers of fewer than 33 million elements are slow on its cluster,
# for the same reason: *small* models want several blocks a unit.
#
# Look at the step under the two curves. Reduce-scatters begin when the first block's backward has ended, gathers run
# ahead of them, and both leave gaps: compute is what takes the time. Root unit 0 (embedding and head) is gathered
# before anything can start, again before backward, and reduced when nothing is left to hide behind.
#
# Now prefetch, with the 7.5B model again. How much is it worth to gather one unit ahead?

# %% tags=["nbval-check-output"]
for prefetch in (0, 1, 2):
    step = step_with(stage=3, prefetch=prefetch)
    print(f"{prefetch} units ahead: {step.duration_s * 1e3:.0f} ms, {step.memory.max_bytes / 1e9:.1f} GB")
step = step_with(stage=3, reshard_after_forward=False)
print(f"kept after forward: {step.duration_s * 1e3:.0f} ms, {step.memory.max_bytes / 1e9:.1f} GB")

# %% [markdown]
# One unit ahead is worth nearly half the step, and costs one gathered unit of memory. The second is worth nothing. (The
# FSDP paper measured 18 % for prefetch in backward alone, on a different model and other GPUs.) Keeping units after
# forward saves a third of the traffic for the memory of all parameters. It gains little here, where gathers hide. On
# slower wires it gains more: take it there, if it fits.

# %% [markdown]
# ### Measured over predicted
#
# Does the simulator get a real step right? Two ranks on this machine, the `pair` of above, train a small GPT with the
# `FullyShard` of above and SGD. A machine does not keep its speed. So `time_training` calibrates, times a few steps,
# calibrates again, and so on. A calibration measures how fast the two ranks compute, what gathers and reduce-scatters
# cost alone, and what they add to the steps of two other models.

# %%
guess_3 = predict("How long is a step of FSDP on two ranks?", unit="ms")
guess_3

# %%
from distlab.measure import RunResult, TrainingRun, overlay_of_run, time_training

WIDE = GPTConfig(context=32, num_layers=4, num_heads=4, hidden_size=128)
TRAINING = TrainingRun(WIDE, Plan(2, sharding=Sharding(stage=3)), num_updates=1, num_windows=4, budget_s=5.0)

# %%
overlay = overlay_of_run(RunResult(TRAINING, pair.run(time_training, TRAINING)))
print(guess_3.compare(overlay.middle_s[0] * 1e3))
print(overlay)

# %% [markdown]
# The upper row of each pair is what was measured, the pale one under it what the simulator said: gathers, compute, and
# reduce-scatters each on a row of their own. Half of the measured steps end in the grey band; the prediction lets them
# end between the dotted lines. If the picture says that the machine was not calm, its boxes are pale. Close other
# programs and run the cell above again: it calibrates again, too.

# %%
from simulator.viz import Timeline

guess_3.lock()
timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, overlay.measured.duration_s)  # the whole step

# %% [markdown]
# Look at the order first. Each gather runs during the compute of the unit before it. In backward the units come the
# other way round, and reduce-scatters follow. The simulator says the same. Then look at the lengths. A measured gather
# begins when its rank starts it and ends when the *slowest* rank has taken part: it is longer than the predicted one
# wherever ranks wait for each other. `benchmarks/predicted.py` takes more windows of more kinds of steps, and holds the
# error against a bar.

# %% [markdown]
# ## Two levels: hybrid sharding
#
# Eight GPUs of a machine have NVLink, machines among each other a slower wire. *Hybrid* sharding shards inside a group
# of ranks, and keeps a full set of shards in each group. Gathers then stay inside. Between groups each rank all-reduces
# its shard of the gradients only: $\Psi / 8$ bytes instead of gathers of $\Psi$. The price is memory: 8 sets of shards
# on 64 GPUs, so states are an 8th, not a 64th.

# %% tags=["nbval-check-output"]
from dataclasses import replace

from simulator import link

SLOW = replace(MACHINES, name="ethernet", inter_node=link("ethernet-100g"))
for name, machines in (("InfiniBand, 400 Gb/s", MACHINES), ("Ethernet, 100 Gb/s", SLOW)):
    for replicas in (1, 8):
        step = step_with(machines, stage=3, replicas=replicas)
        words = "one set of shards " if replicas == 1 else "a set each machine"
        print(f"{name:20} {words}: {step.duration_s * 1e3:.0f} ms, {step.memory.max_bytes / 1e9:.0f} GB a GPU")

# %% [markdown]
# On fast wires between machines it costs: gathers were hidden already, all-reduces come on top, and each rank updates
# an 8th of the states, not a 64th. On slow ones it saves a seventh of the step. On real ranks: four, in two groups of
# two, as a mesh. Who sends how much?


# %%
def hybrid(model):
    rank = dist.get_rank()
    pairs = [dist.new_group(members) for members in ((0, 1), (2, 3))]  # every rank makes all groups, in one order
    across = [dist.new_group(members) for members in ((0, 2), (1, 3))]
    return fully_sharded(group=pairs[rank // 2], replicas=across[rank % 2])(model)


bench("hybrid, 2 sets of 2", hybrid)

# %% [markdown]
# Derive it. Inside a pair: $3\Psi \cdot \frac12$. Between pairs an all-reduce, over two ranks, of half of the
# gradients: $2 \cdot \frac12 \cdot \frac\Psi2$. Together 2 $\Psi$, which is $\frac83$ in units of $\frac34\Psi$,
# where one set of shards has 3. The sum is hardly less. What counts is where it travels: only a quarter of it crosses
# the slow wire.

# %% [markdown]
# ## Offload: the host's memory
#
# A machine has 1 or 2 TB of ordinary memory, unused. [Offload](../GLOSSARY.md#offload) keeps the optimizer's state
# there and lets the CPU do the update, or keeps the shards of parameters there too. The wire is PCIe, about 25 GB/s a
# GPU in practice.

# %% tags=["nbval-check-output"]
few = cluster("dgx-h100", 8, stack="best-case")
for offload in ("none", "optimizer", "all"):
    step = step_with(few, stage=3, offload=offload)
    memory = step.memory
    print(
        f"offload {offload:9} on 8 GPUs: {step.duration_s * 1e3:4.0f} ms, {memory.max_bytes / 1e9:.0f} GB on the GPU",
        end="",
    )
    print(f", {memory.host_bytes / 1e9:.0f} GB on the host for each")

# %% [markdown]
# The step takes more than twenty times as long. Is it the wire? Look at what the host does during a step, and what the
# copies take:

# %%
shown = {}
for offload in ("none", "optimizer", "all"):
    step = step_with(few, stage=3, offload=offload)
    host = step.trace.select((step.trace.rank == 0) & step.trace.is_word("lane", "host"))
    shown[offload] = {"the whole step": 1e3 * step.duration_s}
    for words, kind in (("the CPU's update", "optimizer"), ("copies over PCIe", "copy")):
        part = host.select(host.is_word("kind", kind))
        shown[offload][words] = float((part.end_ns - part.start_ns).sum()) / 1e6
show_bars(shown, "ms", "The CPU's update takes most of what offload adds, not PCIe", "by what is offloaded, 8 GPUs")

# %% [markdown]
# Adam reads and writes 28 bytes per parameter. For the whole model that is 209 GB. The machine's CPUs stream some
# 50 GB/s of it, for all eight GPUs together; one GPU's own memory is more than 60 times as fast. Offloading the
# parameters too copies more, and still the step is a little shorter: new parameters need not come back at once after
# the update. They come unit by unit, while the GPU computes.
#
# Offload is the last resort, for a model that fits no other way. It gets cheaper with every machine, whose CPUs update
# a smaller part, and with every micro-batch that is accumulated before an update. On a CPU "device" and host are the
# same memory, so this machine shows that nothing else changes:

# %%
bench("FSDP, offloaded", fully_sharded(offload=True))

# %% [markdown]
# ### Cards from a shop
#
# Guides say that sharding brings models of 100B to commodity hardware. An RTX 4090 has 24 GB, PCIe 4.0 and no NVLink.
# With offload and all activations recomputed, eight to a machine and 25 Gb/s Ethernet between machines:

# %% tags=["nbval-check-output"]
from distlab.plan import Precision
from simulator import model_by_name


def on_cards(name, data, sharding, sequence=2048):
    how = {"precision": Precision("bfloat16", gradients="bfloat16"), "recompute": "full"}
    plan = Plan(data, sharding=sharding, num_microbatches=16, **how)
    step = simulate(model_by_name(name), cluster("rtx-4090-server", data), plan)
    held, per_hour = step.memory.max_bytes / 1e9, 3600 * data * 16 * sequence / step.duration_s
    words = f"300 billion tokens in {3e11 / per_hour / 24:.0f} days"
    print(f"{name} on {data:4} cards: {held:.1f} GB a card; {words if held < 24 else 'does not fit 24 GB'}")


on_cards("llama-2-7b", 4, Sharding(3, offload="optimizer"), sequence=4096)
on_cards("gpt-3-175b", 1024, Sharding(3, offload="all"))

# %% [markdown]
# **7B on four 4090s: yes, with offload, to fine-tune.** A training from scratch is not for these cards. **100B on
# commodity hardware: not by sharding.** A rank gathers whole layers into buffers and computes with them, and these do
# not shrink with $n$: 175B fits no card of 24 GB, however many there are. Layers must be cut, too (lessons 8 to 10).

# %% [markdown]
# ## What needs the whole
#
# Clipping (lesson 4) scales all gradients by one factor, from the norm of all of them. No rank holds all of them now.
# Code that was right for data parallel, `clip_grad_norm_(model.parameters(), 1.0)`, takes the norm of the *own
# shards*: too small, and a different one on each rank. Nothing fails, and training gets a little worse. Norms do not
# add up over ranks, but squares do: all-reduce the sum of the own squares, one number, and take the root. LARS and LAMB
# (lesson 4) ask for two such numbers of every tensor, the lengths of the weight and of its update. Four ranks hold 16
# rows each of a matrix whose later rows are longer:


# %% tags=["nbval-check-output"]
from distlab.sharding.whole import plain as whole


def trust_ratios():
    weight, update = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    weight *= torch.linspace(0.1, 1.9, 64)[:, None]
    own = [one.chunk(dist.get_world_size())[dist.get_rank()] for one in (weight, update)]
    lengths = whole.whole_norms(own)  # squares, one all-reduce, roots
    return f"{own[0].norm() / own[1].norm():.3f}", f"{lengths[0] / lengths[1]:.3f}"


print("LAMB's ratio of own rows, and with one all-reduce:", *ranks.run(trust_ratios))
print("in one process:", *run(trust_ratios, 1))

# %% [markdown]
# By the ratio of its own rows each rank has a different optimizer.
#
# ### A matrix instead of a number
#
# **[Muon](../GLOSSARY.md#muon)** (2024; `torch.optim.Muon`) updates the matrices of hidden layers. The momentum of one
# is $USV^T$: a few large singular values $S$, and many small ones. SGD moves along the few; Muon steps along $UV^T$, as
# far in rare directions as in frequent ones. [Newton-Schulz](../GLOSSARY.md#newton-schulz) iterations find that by
# products alone: five times $X \leftarrow aX + bAX + cA^2X$ with $A = XX^T$ bring all singular values near 1.
#
# Adam treats each element by itself, so its update of a half is half of its update. And Muon's? Take the gradient of a
# matrix [64, 256] of the GPT, and make its upper and its lower half orthogonal, each by itself.

# %%
guess_4 = predict("By how much of its length is Muon's update of two halves a different one?", unit="%")
guess_4

# %%
from distlab.large_batch import newton_schulz

model = GPT(CONFIG, torch.Generator().manual_seed(0))
GPT.loss(model(CORPUS.batch(0, 16)[0]), CORPUS.batch(0, 16)[1]).backward()
GRADIENT = model.blocks[1].feed_forward.output.weight.grad
RULES = {"Adam": lambda part: part / (part.square().sqrt() + 1e-8)}  # its first step
RULES["Muon"] = lambda part: newton_schulz(part, compute="float32")


def apart(rule, parts):
    update, of_parts = RULES[rule](GRADIENT), torch.cat([RULES[rule](part) for part in GRADIENT.chunk(parts)])
    return float(100 * (of_parts - update).norm() / update.norm())


print(guess_4.compare(apart("Muon", 2)))

# %%
guess_4.lock()
shown = {f"{parts} parts": {rule: apart(rule, parts) for rule in RULES} for parts in (2, 4, 8)}
title = "Adam does not mind the cut; Muon's update of parts is a different one, for each number of parts"
show_bars(shown, "%", title, "distance from the update of the whole [64, 256], by its length")

# %% [markdown]
# ### Everywhere, or by an owner
#
# Either every rank gathers and computes every matrix, and keeps its rows. Or a matrix has an
# [owner](../GLOSSARY.md#owner): rows of momentum go there, rows of the update come back. All momentum is $S$ bytes:
#
# | way | a rank sends | a rank computes |
# |---|---|---|
# | everywhere | $\frac{n-1}{n} S$ | all matrices |
# | by owners | $2 \frac{n-1}{n} \frac{S}{n}$ | those it owns |
#
# An iteration takes $4m^2k + 2m^3$ operations: $m$ is the matrix's shorter side, $k$ the longer one. Take the 64 H100s
# of the question at 400 TFLOP/s, with a sample of 2,048 tokens on each.

# %%
guess_5 = predict("If each GPU computes all matrices: how many times forward and backward does that take?", unit="x")
guess_5

# %%
from distlab.plan import least_busiest, newton_schulz_flops

HIDDEN = [shape for layer in MODEL.layers if layer.input_bytes for shape in layer.shapes if len(shape) == 2]
WORK = [newton_schulz_flops(shape) for shape in HIDDEN]  # five iterations
print(guess_5.compare(sum(WORK) / (6 * 7.5e9 * 2048), how="counted"))

# %% [markdown]
# ### Exercise: owners
#
# By owners it is a 64th, if the work is dealt out evenly: all wait for the busiest rank. Write `assign_owners(shapes,
# num_ranks)`. The best assignment of many matrices takes very long to find; a simple rule comes near it, and will do.

# %% exercise="07.owners"

# %%
guess_5.lock()
shown = {"everywhere": {"busiest rank": sum(WORK) / 4e11}}
for n in (4, 16, 64, 256):
    owners, busy = assign_owners(HIDDEN, n), [0.0] * n
    for owner, work in zip(owners, WORK, strict=True):
        busy[owner] += work
    shown[f"{n} GPUs"] = {"busiest rank": max(busy) / 4e11, "at least": least_busiest(WORK, n) / 4e11}
show_bars(shown, "ms", "With owners the busiest rank has its share of the work", f"{len(HIDDEN)} matrices, 400 TFLOP/s")

# %% [markdown]
# Owners make 31 ms<!--out--> of it on 64 GPUs. With many more nothing gets shorter: the largest matrix has one owner.
#
# ### Exercise: an update by owners
#
# Write `update_by_owners(pieces, owners, orthogonalize)`. `pieces[i]` are this rank's rows of matrix i. Two calls may
# be new: `dist.gather(piece, rows, dst=owner)` collects a piece from each rank, and `dist.scatter(mine, rows,
# src=owner)` deals a list out; `rows` is None on all but the owner. Budget: a piece goes to the owner and comes back
# once, and owners compute at the same time.

# %% exercise="07.by_owners"

# %% [markdown]
# Twelve matrices of 256 x 256 on four ranks, with a wire of 20 MB/s each (nodes, as in lesson 5; they need Linux): both
# ways as the library's `plain` has them, and yours. How much shorter are owners?

# %%
guess_6 = predict("By owners takes how many times everywhere's time?", unit="x")
guess_6

# %%
import time
from functools import partial

from distlab.comm import Nodes

SQUARES, MUON = [(256, 256)] * 12, partial(newton_schulz, compute="float32")


def update_seconds(rounds=5):
    rows, owners, took = [torch.randn(64, 256) for _ in SQUARES], assign_owners(SQUARES, 4), []
    ways = [lambda: MUON(torch.cat(rows[:4])), lambda: whole.by_everyone(rows, MUON)]
    ways += [partial(by_owners, rows, owners, MUON) for by_owners in (whole.by_owners, update_by_owners)]
    for update in ways * rounds:
        dist.barrier()
        start = time.perf_counter()
        update()
        took.append(time.perf_counter() - start)
    return [sorted(took[way :: len(ways)])[rounds // 2] for way in range(len(ways))]


# %%
with Ranks(4, timeout_s=120, nodes=Nodes(4, between="20MB/s,200us"), record=False) as on_wires:
    one, *took = map(max, zip(*on_wires.run(update_seconds), strict=True))
print(guess_6.compare(took[1] / took[0]))

# %%
from simulator import whole_update

guess_6.lock()
S, shown = 4 * 12 * 256 * 256, {}  # bytes
for by, sent, measured_s in (("everywhere", 3 / 4 * S, took[0]), ("owners", 2 * 3 / 4 * S / 4, took[1])):
    predicted_s = whole_update(SQUARES, 4, by=by).flops * one / newton_schulz_flops((256, 256)) + sent / 20e6
    shown[by] = {"predicted": 1e3 * predicted_s, "measured": 1e3 * measured_s}
show_bars(shown, "ms", "Owners send half as much and compute a quarter", "12 matrices of 256 x 256, 4 ranks, 20 MB/s")
print(f"owners, yours: {1e3 * took[2]:.0f} ms")

# %% [markdown]
# Yours calls once for each matrix, and each scatter waits for the one before. All rows for all owners fit in a single
# all-to-all, and so do all updates: that is what `plain.by_owners` sends.
#
# ### For a whole model
#
# `WholeTensorOptimizer` takes Muon, LAMB or LARS to the shards of a `FullyShard`. While a rank computes a matrix of
# its own, the next one arrives and the last leaves. Embeddings and biases, which Muon leaves to AdamW, do not travel.

# %%
from distlab.large_batch import Muon
from distlab.sharding import WholeTensorOptimizer


def make_muon(named):
    hidden = {name: one for name, one in named if one.ndim == 2 and "blocks" in name}
    others = [one for name, one in named if name not in hidden]
    groups = [{"params": [*hidden.values()]}, {"params": others, "use_muon": False, "lr": 1e-3}]
    return Muon(groups, lr=0.02, compute="float32")


# %%
def muon(by):
    def prepare(model):
        if by == "one process":
            optimizer = make_muon([*model.named_parameters()])
            return model, lambda: (optimizer.step(), optimizer.zero_grad()), optimizer
        sharded = FullyShard(model)
        optimizer = WholeTensorOptimizer(sharded, make_muon, by=by)
        return sharded, lambda: (sharded.synchronize(), optimizer.step(), optimizer.zero_grad()), optimizer.optimizer

    return prepare


# %% tags=["nbval-check-output"]
expected, _, whole_state = run(measured, 1, args=(muon("one process"),))[0]
print(f"one process   state {whole_state / 1e6:.2f} MB")
for by in ("everywhere", "owners"):
    losses, sent, state = zip(*ranks.run(measured, muon(by)), strict=True)
    gap = max(abs(one - other) for one, other in zip(losses[0], expected, strict=True))
    print(f"{by:13} state {max(state) / 1e6:.2f} MB, sent {sum(sent) / 4e6:.2f} MB; as one process: {gap < 1e-5}")

# %% [markdown]
# Losses are those of one process; owners keep a quarter of the state each. The question's GPT, now at 795 TFLOP/s:

# %%
from simulator.models.optimizers import with_optimizer

shown = {}
for words, optimizer, stage in (("AdamW", "adamw", 3), ("Muon by owners", "muon", 3), ("Muon everywhere", "muon", 0)):
    step = simulate(with_optimizer(MODEL, optimizer), MACHINES, Plan(64, sharding=Sharding(stage=stage)))
    shown[words] = 1e3 * step.duration_s
show_bars(shown, "ms", "Owners add little to a step; everywhere it takes many times as long", "a step, predicted")

# %% [markdown]
# ## Save it: spot the bug
#
# "Only rank 0 saves the checkpoint" is right for data parallel. The following code does that with shards. It was seen
# in issue after issue, and it works on one GPU. Run the check as it is, read what it says, find the line, repair it.

# %% exercise="07.repair"

# %% [markdown]
# A whole state dict is what you publish; a 70B model's takes minutes to put together and needs one rank with memory for
# it. To go on training, save shards: each rank its own, all at the same time. The library does both, and
# `ShardedState` cuts saved shards anew when the number of ranks has changed.


# %%
from distlab.sharding import full_state_dict


def saved_and_loaded():
    sharded = FullyShard(GPT(CONFIG, torch.Generator().manual_seed(0)))
    state = full_state_dict(sharded, to_rank=0)
    if dist.get_rank() == 0:
        model = GPT(CONFIG)
        model.load_state_dict(state)
        return torch.equal(
            model(CORPUS.batch(0, 2)[0]), GPT(CONFIG, torch.Generator().manual_seed(0))(CORPUS.batch(0, 2)[0])
        )
    return len(state)


print("rank 0 rebuilds the model bit for bit:", (got := ranks.run(saved_and_loaded))[0], "; the others hold", got[1:])

# %% [markdown]
# ## Production: torch's own
#
# `torch.distributed.optim.ZeroRedundancyOptimizer` is ZeRO-1 by whole tensors, as your first version.
# `torch.distributed.fsdp.fully_shard` (FSDP2) shards each tensor by its first dimension. Same model, same batches,
# turn by turn in one run, on two ranks. They talk over gloo, which is what torch's users have on CPUs.

# %%
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def torch_zero(model):
    ddp = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return ddp, lambda: (optimizer.step(), optimizer.zero_grad()), optimizer


def torch_fsdp(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, lambda: (optimizer.step(), optimizer.zero_grad()), optimizer


# %%
def side_by_side(prepare, theirs, num_steps=10):
    rows = []
    programs = [one(GPT(CONFIG, torch.Generator().manual_seed(0))) for one in (prepare, theirs)]
    for step in range(num_steps):
        inputs, targets = batch_of(step)
        for forward, update, _ in programs:
            start = time.perf_counter()
            loss = GPT.loss(forward(inputs), targets)
            (loss.backward(), update())
            rows.append((float(loss.detach()), time.perf_counter() - start))
    return rows[::2], rows[1::2]


# %%
from statistics import median, quantiles

step_ms, sockets = {}, Ranks(2, timeout_s=180, backend="gloo")
for name, prepare, theirs in (
    ("ZeRO-1 and ZeroRedundancyOptimizer", zero(1), torch_zero),
    ("FullyShard and fully_shard", fully_sharded(), torch_fsdp),
):
    ours, other = sockets.run(side_by_side, prepare, theirs)[0]
    gap = max(abs(a[0] - b[0]) for a, b in zip(ours, other, strict=True))
    ratios = [a[1] / b[1] for a, b in zip(ours[2:], other[2:], strict=True)]
    low, _, high = quantiles(ratios)
    print(f"{name}: losses differ by {gap:.0e} at most; a step takes {median(ratios):.2f} times", end=" ")
    print(f"(half of the pairs: {low:.2f} to {high:.2f})")
    step_ms[name] = {who: 1e3 * median(s for _, s in rows[2:]) for who, rows in (("ours", ours), ("torch", other))}
sockets.close()
show_bars(step_ms, "ms", "A step with the library, and with torch's own")

# %% [markdown]
# A number below 1 means that ours is faster. Neither says anything of GPUs. FSDP2 runs on gloo, but it is made for
# NCCL: gloo has no reduce-scatter of its own and makes whole all-reduces instead, where `FullyShard` sends by the ring
# of lesson 2. DDP's hooks are C++ and ours are Python, which counts in a step this small. A few pairs of steps are
# little: `benchmarks/sharding.py` has the figures with repeats.
#
# The same plan, for two programs in use. Both texts are generated from a `Plan`, and what a program cannot be told is
# listed:

# %%
import json

from simulator.export import deepspeed_config, deepspeed_notes

PLAN = Plan(64, sharding=Sharding(stage=3, offload="optimizer"), num_microbatches=4)
print(json.dumps(deepspeed_config(PLAN), indent=1))
for note in deepspeed_notes(PLAN):
    print("-", note)

# %% [markdown]
# A file starts nothing. DeepSpeed's launcher starts the script, a process per GPU, with the variables that torchrun
# sets too (lesson 14). What stands behind the script's name is for the script, which hands the file to
# `deepspeed.initialize`:
#
# ```
# deepspeed --num_gpus=8 train.py --deepspeed --deepspeed_config ds_config.json
# ```
#
# For several machines take `--hostfile=hosts`, with a line such as `node1 slots=8` for each. Scripts with Hugging
# Face's `Trainer` take `--deepspeed ds_config.json`. If you give `train_batch_size`, it must be micro-batch x
# accumulation x GPUs, here 1 x 4 x 64 = 256.

# %%
from simulator.export import fsdp2_code

print(fsdp2_code(Plan(64, sharding=Sharding(stage=3, replicas=8))))

# %% [markdown]
# The same settings under other names:
#
# | | stages | hybrid | offload |
# |---|---|---|---|
# | DeepSpeed | `"stage": 1`, `2`, `3` | nearest: `zero_hpz_partition_size` | `offload_optimizer`, `offload_param` |
# | FSDP2 | `fully_shard` on each block, then the model: 3 | a mesh of two axes | `CPUOffloadPolicy()` |
# | torchtitan | `data_parallel_shard_degree`: 3 | `data_parallel_replicate_degree` | `enable_cpu_offload` |
# | Megatron | `--use-distributed-optimizer`: 1 | `--num-distributed-optimizer-instances` | `--optimizer-cpu-offload` |
# | Megatron-FSDP | `--data-parallel-sharding-strategy optim`, `optim_grads`, `optim_grads_params` | the same | |
# | torch | `ZeroRedundancyOptimizer`: 1 | as FSDP2 | as FSDP2 |
#
# Older code uses torch's first FSDP, the class `FullyShardedDataParallel`. Its names in today's:
#
# | FSDP1 | `fully_shard` (FSDP2) | distlab |
# |---|---|---|
# | `FullyShardedDataParallel(model, ...)` | `fully_shard(block)`, then `fully_shard(model)` | `FullyShard(model)` |
# | `ShardingStrategy.FULL_SHARD` | `reshard_after_forward=True` | the default: stage 3 |
# | `SHARD_GRAD_OP` | `reshard_after_forward=False` | `reshard_after_forward=False` |
# | `HYBRID_SHARD` | a mesh of two axes | `group=`, `replicas=` |
# | `NO_SHARD` | leave it out: DDP | `DataParallel(model)` |
# | `auto_wrap_policy=...` | the modules you call it on | `units=...`; items of a `ModuleList` |
# | `cpu_offload=...`, `mixed_precision=...` | `offload_policy=...`, `mp_policy=...` | `offload=`, `precision=` |
#
# Beware of `size_based_auto_wrap_policy`: without `min_num_params` a unit has at least 100 million numbers. A smaller
# model is then *one* unit, gathered at once: no memory saved while it works, and nothing to hide behind.
#
# Keeping units after forward is `reshard_after_forward=False` in FSDP2, and `fsdp_reshard_after_forward = "never"` in
# torchtitan. Prefetch is `stage3_prefetch_bucket_size` in DeepSpeed, and FSDP2 does it unasked.
#
# DeepSpeed's hpZ is not quite the same: it keeps a second, 16-bit set of parameters in each machine, and shards
# optimizer state over all ranks. That takes less memory than hybrid sharding here.
#
# DeepSpeed does not cut by modules: it prefetches parameters one by one, up to a number of elements. Megatron-LM rather
# splits layers (lessons 8 to 10) and shards the optimizer; `--use-megatron-fsdp` is its way to stages 2 and 3.

# %% [markdown]
# ### With torch.compile
#
# `torch.compile` makes a graph of a module's operations, and waiting for a gather cannot be part of a graph. So compile
# what lies between two gathers: `block.compile()` for each block. Losses stay what they were. The same holds for data
# parallel (lesson 3): one graph of the whole model hands out all gradients at its end, with nothing to hide behind.

# %% [markdown]
# ## Popular claims, tested
#
# - **"ZeRO-1 saves 8x, ZeRO-2 16x."** Refuted: 4x and 8x at most, by the first table. (The optimizer's part alone is 8
#   times smaller on 8 ranks, and 16 times on 16. But it is only a part.)
# - **"FSDP costs 50 % more communication."** In bytes: 3 $\Psi$ against 2 $\Psi$, measured. In time: on the cluster of
#   the question its step is the shortest of all. On one with slow wires, or with few tokens a GPU, it shows.
# - **"ZeRO-2 is always better than data parallel, it is free."** Same bytes, for one backward a step. But new
#   parameters are gathered after the update, where nothing hides them, and with accumulation every micro-batch is
#   reduced.
# - **"FSDP sends 1.5 times as much."** For one micro-batch per step. Each further one gathers everything twice more and
#   reduces once more, while data parallel and ZeRO-1 send only once, in the end: with 8 micro-batches $3 \cdot 8 \Psi$
#   against $2 \Psi$. Who has room for whole gradients keeps them and reduces once (`no_sync`): $(2 \cdot 8 + 1) \Psi$.
#   The simulator counts that for stage 3, and a reduce-scatter each micro-batch for stage 2.

# %% tags=["nbval-check-output"]
for stage in range(4):
    step = simulate(MODEL, MACHINES, Plan(64, num_microbatches=8, sharding=Sharding(stage=stage)))
    sent_gb = max(step.sent_bytes_per_rank) / 1e9
    print(f"8 micro-batches, stage {stage}: {step.duration_s * 1e3:.0f} ms a step, {sent_gb:.0f} GB sent a GPU")

# %% [markdown]
# On these wires stage 3 sends many times as much in about the same time: gathers hide. On slow ones they would not.
#
# - **"Offload makes any model trainable on one GPU."** It fits. One GPU, 7.5 billion parameters: count bytes over PCIe.
#   Question 4 below.
# - **"Sharding replaces tensor parallelism."** Up to a point: ZeRO-3 gathers whole layers, so a layer and its
#   activations must still fit, and each rank must have tokens of its own. Megatron's paper compared the two for 175B on
#   384 A100s: 144 TFLOP/s a GPU for ZeRO-3, 153 for tensor and pipeline parallelism (Narayanan et al. 2021, table 2).
#   With twice the GPUs for the same batch it was 88 against 149: $T$ halves and $F/B$ does not.

# %% [markdown]
# ## Lab
#
# The same on your own hardware, as a plain script. In a terminal, on four CPU ranks, with the reference and with what
# you wrote in this notebook:
#
# ```
# distlab lab 07 --ranks 4 --impl reference
# distlab lab 07 --ranks 4 --impl mine --trace traces
# ```
#
# The same by torchrun, which is also how it runs on GPUs (`--nproc-per-node` is their number):
#
# ```
# torchrun --nproc-per-node 4 lessons/07_sharding/lab.py --impl reference
# ```
#
# `lab_reference.md` next to it has the output to compare with.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. How many 80 GB GPUs does the 7.5B model need at least with ZeRO-1, 2, 3, if 40 GB of each are for activations?
# 2. A model of 70 billion parameters with ZeRO-3 on 64 GPUs: states a GPU? And a unit of one of its 80 layers, whole?
# 3. Gathers hide while $T > F/B$. An H100 reaches 400 TFLOP/s, a network card brings 50 GB/s. How many tokens must a
#    GPU have if it is alone in its machine? And if there are eight, with a card each, that share what comes in?
# 4. Offload of everything on one GPU, 7.5B parameters, 16 bits, 25 GB/s: how long do copies take in a step?
# 5. Sixteen ranks, hybrid with 4 sets of 4. What does a rank send in a step, in units of $\Psi$?

# %% tags=["nbval-check-output"]
for stage in (1, 2, 3):
    fits = (n for n in range(1, 10**4) if adam_state_bytes(7.5e9, zero_stage=stage, num_ranks=n) <= 40e9)
    print(f"1. ZeRO-{stage}: {next(fits)} GPUs")
states = adam_state_bytes(70e9, zero_stage=3, num_ranks=64)
print(f"2. {states / 1e9:.1f} GB; a unit: {2 * 70e9 / 80 / 1e9:.2f} GB in 16 bits")
print(f"3. alone {400e12 / 50e9:,.0f} tokens a GPU; eight together {400e12 / (8 * 50e9):,.0f}")
print(f"4. parameters in twice, gradients out once: {3 * 2 * 7.5e9 / 25e9:.1f} s, and the CPU updates 90 GB of state")
inside, across = 3 * 3 / 4, 2 * 3 / 4 / 4
print(f"5. inside 3 x 3/4, across 2 x 3/4 x 1/4: {inside + across:.3f} Psi, {across:.3f} of it on the slow wire")

# %%
ranks.close()
pair.close()

# %% [markdown]
# ## What to read next
#
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*: the stages, table
#   1; section 7 derives what each one sends.
# - Zhao et al. 2023, *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*: units, prefetch, hybrid
#   sharding, and what went wrong on real clusters; section 3.2.1 has the size below which gathers get slow.
# - Ren et al. 2021, *ZeRO-Offload: Democratizing Billion-Scale Model Training*: what to keep on the host, and why.
#
# **Next: lesson 8.** Sharding still gathers each layer whole before it computes. Lesson 8 cuts the layer itself, so
# that no rank ever has it whole.
#
# ## Sources
#
# - The three above. Wang et al. 2023, *ZeRO++* (hpZ is hybrid sharding of parameters). Jordan et al. 2024, *Muon*.
#   Graham 1969, *Bounds on Multiprocessing Timing Anomalies* (most work first, to the least busy).
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, table 2.
# - Source of DeepSpeed (`runtime/zero/config.py`), torchtitan (`config/parallelism.py`, `config/training.py`) and
#   Megatron-LM (its arguments, and the guide to Megatron-FSDP); documentation of `fully_shard` and
#   `ZeroRedundancyOptimizer`, torch 2.13. Read 2026-11.
# - In this repository: `distlab/plan/sharding.py`, then `distlab/sharding/`, whose `__init__` says in which order.
