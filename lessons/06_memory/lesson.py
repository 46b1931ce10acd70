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
# # 6. Memory
#
# 90 minutes. Comes after lesson 3 (data parallel). You need no GPU: processes on this machine are the ranks.
#
# Afterwards you can
#
# - account for every byte of a model in training: 7B, 70B, 175B, and one that you measure here;
# - keep fewer activations: recompute blocks in backward, accumulate micro-batches;
# - train with 16-bit numbers (float32 masters, a loss scale) and 8-bit ones, whose scales all ranks share;
# - say before a run whether a plan fits a device, and which change makes it fit.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# A model of 7 billion parameters answers questions on your GPU of 80 GB. In 16-bit numbers its weights take 14 GB, so
# 66 GB are free. You rent a node of eight such GPUs, for some 25 dollars an hour, to fine-tune it on your own texts.
# It runs out of memory before the first update. You halve the batch, and it runs out of memory. You halve it again,
# down to one sample. It runs out of memory.
#
# How many GB do you need for what does not depend on the batch at all: weights, gradients and the optimizer's numbers?
# You train the whole model with Adam in the usual mixed precision. Before you go on: type a number into the box that
# the next cell shows, and press Commit.

# %%
guess_0 = predict("GB that no batch makes smaller, 7B, Adam, mixed precision?", unit="GB")
guess_0

# %%
from distlab.plan import Plan, Precision, Sharding
from simulator import memory_of
from simulator.memory.memory import KINDS
from simulator import model_by_name

MIXED = Precision("bfloat16", gradients="bfloat16")  # float32 masters beside it
MODEL = model_by_name("llama-2-7b")
memory = memory_of(MODEL, Plan(precision=MIXED))
states = sum(memory.of(kind) for kind in ("parameters", "gradients", "optimizer", "master weights"))
print(guess_0.compare(states / 1e9, how="counted"))

# %%
from simulator.viz import draw_memory

guess_0.lock()
show(draw_memory(memory, capacity_bytes=80e9))

# %% [markdown]
# This is what one rank holds in a training step. The dashed line is the memory of the GPU. Look at the left: the bar
# passes the line. Look at the right, from its start to its end. Before forward the rank holds 94.4 GB<!--out-->. The
# activations (green) come and go. The gradients (yellow) come during backward: with them the states are complete, and
# they are the number above, whatever the batch is. What are these parts, which of them can you make smaller, and what
# does that cost? This lesson answers it. Here is the most of each part:

# %% tags=["nbval-check-output"]
guess_0.lock()
for kind in KINDS:
    if memory.of(kind):
        print(f"{kind:15} {memory.of(kind) / 1e9:6.1f} GB")

# %% [markdown]
# The weights, 13.5 GB<!--out-->, are an eighth of the first four lines, and the batch has no part in these. That is why
# halving the batch did not help: **no batch is small enough.** The last three lines depend on the batch. Here, for
# one sequence of 4,096 tokens, they are half as much again. (The lines add up to more than the picture's peak: when the
# last gradients come, most activations have gone.)
#
# This lesson goes through the list. First what no batch makes smaller, then
# [activations](../GLOSSARY.md#activation), then what 16-bit numbers save and what they do not save. Each time you
# count before you measure, on real ranks, with a model small enough for a laptop. Lesson 7 then splits the first four
# lines over the ranks.

# %% [markdown]
# ## What no batch makes smaller
#
# Four kinds, and each has its own number of bytes per parameter. In the usual mixed precision with Adam:
#
# | kind | bytes | why |
# |---|---|---|
# | parameters | 2 | forward and backward compute with 16-bit numbers |
# | gradients | 2 or 4 | 16-bit as backward makes them, or float32 as Megatron-LM adds them up |
# | optimizer | 8 | Adam's two moments, in float32 |
# | master weights | 4 | a float32 copy, since small updates to 16-bit numbers vanish (you will see it) |
#
# Together **16 bytes per parameter**, or 18. In plain float32 there is no copy: 4 + 4 + 8 = 16. Read that again:
# *mixed precision saves nothing here*.
#
# ### Exercise: model states
#
# Write `state_bytes(num_parameters, plan, numbers)`. A `Plan` is data: `plan.precision` has the types, and
# `plan.sharding` says what the ranks split among them. Lesson 7 builds that. Counting it is simple: stage 1 splits
# optimizer state and masters; stage 2 also splits gradients; stage 3 also splits parameters.

# %% exercise="06.states"

# %% tags=["nbval-check-output"]
for name in ("llama-2-7b", "llama-2-70b", "gpt-3-175b"):
    count = model_by_name(name).num_parameters
    held = sum(state_bytes(count, Plan(precision=MIXED), 2).values())
    weights = f"weights {4 * count / 1e9:4.0f} GB in float32, {2 * count / 1e9:4.0f} GB in 16 bits"
    words = f"training {held / 1e9:5.0f} GB, {-(-held // 80e9):2.0f} GPUs of 80 GB"
    print(f"{name:11} {count / 1e9:5.1f}B: {weights}; {words}")

# %% [markdown]
# Guides say that 175B needs "700 GB in float32, 350 GB in 16 bits". That is right, for the **weights**: training takes
# eight times the second number. They say that 70B needs "140 GB of weights, 500 GB or more in all". The weights are
# right. Training takes 1,104 GB<!--out-->, more than twice the "500". Around 550 GB is what you get with 8 bytes per
# parameter: Adam's moments in bfloat16 as well, and no float32 copy. That runs, and learns somewhat worse, as you will
# see.
#
# **Six or seven H100s for 70B?** A guide counts so: it is the 500 GB again, divided by 80. The model itself, its
# weights, fits on two. Its training states fill 14<!--out-->, to the brim, and activations come on top: "Does it fit?"
# below says how many are enough.
#
# And they say that ZeRO-1 saves 8x and ZeRO-2 16x. The paper's own case has 7.5 billion parameters on 64 ranks:

# %% tags=["nbval-check-output"]
for stage in range(4):
    held = sum(state_bytes(7_500_000_000, Plan(64, precision=MIXED, sharding=Sharding(stage)), 2).values())
    print(f"stage {stage}: {held / 1e9:6.1f} GB a rank, {120e9 / held:4.1f}x less")

# %%
from simulator.viz import draw_bars


def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    show(draw_bars(numbers, unit=unit, title=title, subtitle=subtitle))


paper = {f"stage {stage}": Plan(64, precision=MIXED, sharding=Sharding(stage)) for stage in range(4)}
held_gb = {name: sum(state_bytes(7_500_000_000, plan, 2).values()) / 1e9 for name, plan in paper.items()}
show_bars(held_gb, "GB", "What 64 ranks split among them shrinks, and what they do not split stays")

# %% [markdown]
# Stages 1 and 2 never save more than 4x and 8x, however many ranks there are: 16 bytes become 4 + 12/n, then 2 +
# 14/n.

# %% [markdown]
# ## Measure it
#
# Now a model of your own: a small GPT that reads Python's documentation, on two ranks, data parallel as in lesson 3.
# It trains in float32 with AdamW. `track_memory` notes every storage that an operator touches, when it is freed, and
# what it was for. The first update is not tracked: in it the optimizer makes its moments.

# %%
import contextlib

from distlab.data import ByteCorpus, python_documentation
from distlab.data_parallel import DataParallel
from distlab.measure import track_memory
from distlab.models import GPT, GPTConfig
from distlab.precision import autocast
from distlab.recompute import recompute_blocks

CORPUS = ByteCorpus(python_documentation(), context=64)
CONFIG = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128)
ranks = Ranks(2)


# %%
def update(training, step, samples=16, parts=1, dtype="float32"):
    """Train on `parts` micro-batches of `samples` samples a rank; return the mean loss of this rank."""
    model, replicas, optimizer = training
    optimizer.zero_grad()
    total = 0.0
    for part in range(parts):
        place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
        inputs, targets = CORPUS.batch(step * parts + part, samples * dist.get_world_size(), **place)
        with replicas.no_sync() if part < parts - 1 else contextlib.nullcontext():
            with autocast(dtype):
                loss = model.loss(model(inputs), targets) / parts
            loss.backward()
        total += loss.item()
    (replicas.synchronize(), optimizer.step())
    return total


# %%
def prepare(recomputed=False):
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    if recomputed:
        recompute_blocks(model)
    return model, DataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-3)


def measured(recomputed=False, **how):
    """Return the bytes of each kind at the peak of one update, and over its time."""
    training = prepare(recomputed)
    update(training, 0, **how)
    with track_memory(training[0], training[2]) as memory:
        memory.restart()  # the history begins with all that is there already
        update(training, 1, **how)
    times, rows = memory.over_time()
    return memory.at_peak, (times - times[0], rows)


# %% [markdown]
# `workload_from_module` runs the model once and counts its layers, and `memory_of` counts what a plan holds. The model
# has 0.83 million parameters. What will the peak of an update be, with 16 samples of 64 bytes per rank? Its states are
# 16 bytes per parameter, 13 MB.

# %%
guess_1 = predict("Peak of an update of the small GPT, 16 samples a rank?", unit="MB")
guess_1

# %%
from distlab.measure import workload_from_module


def counted(samples=16, **plan):
    """Return what the simulator says of the same update."""
    model = GPT(CONFIG)
    inputs, targets = CORPUS.batch(0, samples, rank=0, world_size=1)
    optimizer = torch.optim.AdamW(model.parameters())
    work = workload_from_module(model, lambda: model.loss(model(inputs), targets), optimizer=optimizer, samples=samples)
    return memory_of(work, Plan(2, **plan))


at_peak, over_time = ranks.run(measured)[0]
print(guess_1.compare(sum(at_peak.values()) / 1e6))


# %%
def beside(at_peak, predicted):
    """Print measured and counted bytes of each kind at the peak."""
    said = dict(zip(KINDS, predicted.at_peak_bytes[0].tolist(), strict=True))
    for kind in KINDS:
        if at_peak[kind] or said[kind]:
            print(f"{kind:15} measured {at_peak[kind] / 1e6:6.2f} MB, counted {said[kind] / 1e6:6.2f} MB")
    total, want = sum(at_peak.values()), sum(said.values())
    print(f"{'together':15} measured {total / 1e6:6.2f} MB, counted {want / 1e6:6.2f} MB: {want / total - 1:+.1%}")


guess_1.lock()
plain = ranks.run(counted)[0]
beside(at_peak, plain)

# %% [markdown]
# Activations are two thirds of the peak, though the model is tiny. The count comes close, line by line: you can know
# without a run what is kept. "temporary" is what lives for a moment: gradients of activations on their way. It is the
# hardest to count, since it depends on when each operator frees its inputs.
#
# Over the time of an update it looks like this: above as measured, below as counted (a count has no times, so each
# layer takes equally long there).

# %%
from simulator.viz import draw_measured_memory


def draw_over_time(predicted, over_time):
    """Draw both on one clock: a count has none, so each layer's pass gets the same part of the measured time."""
    times, rows = predicted.over_time()
    both = (times * over_time[0][-1] // times[-1], rows), over_time
    show(draw_measured_memory(*both))


guess_1.lock()
draw_over_time(plain, over_time)

# %% [markdown]
# Read it from left to right. In forward each layer adds what its backward will need. At the end of forward come the
# logits: small here, with 256 different bytes, but a vocabulary of 128,000 makes them the largest tensor of all. Then
# backward frees the layers' activations, last layer first. At the right end only states are left; the gradients stay
# too, since `DataParallel` keeps its buckets. **The peak is where forward ends**, and you can avoid most of it.

# %% [markdown]
# ## Activations
#
# What does a layer keep? Backward of a matrix product, of a norm and of GELU needs its input. Backward of dropout needs
# only its mask, one byte per element. Korthikanti et al. went through a GPT layer tensor by tensor, in 16-bit numbers.
# With micro-batch $B$, sequence $s$, hidden size $h$ and $a$ heads it keeps
#
# $$ s B h \left(34 + 5\,\frac{a s}{h}\right) \text{ bytes.}$$
#
# The second term is the attention scores: for each head a matrix of $s \times s$, with its softmax and its dropout.
# It grows with the *square* of the sequence. Flash attention never stores it.
#
# Of the 34, tensor parallelism (lesson 8) over $t$ ranks splits 24 and the scores; sequence parallelism splits the
# other 10 too. And there is **[recompute](../GLOSSARY.md#recompute)**: "selective" drops the scores and makes them
# again in backward, "full" keeps nothing but the layer's input, 2 bytes per element.
#
# ### Exercise: activations of a layer
#
# Write `activation_bytes(hidden, heads, sequence=..., microbatch=..., ...)`. There is a trap, which public
# calculators fell into: what does a layer keep under *full* recompute?

# %% exercise="06.activations"

# %% [markdown]
# GPT-3 has 96 layers, $h$ = 12,288, 96 heads, and sequences of 2,048. One micro-batch of *one* sequence, on one rank:
# how many GB do its activations take, without recompute?

# %%
guess_2 = predict("Activations of the 175B model for one sequence, nothing recomputed?", unit="GB")
guess_2

# %%
one_layer = activation_bytes(12288, 96, sequence=2048, microbatch=1)
print(guess_2.compare(96 * one_layer / 1e9, how="the formula says"))

# %% tags=["nbval-check-output"]
guess_2.lock()
for words, how in {
    "one rank": {},
    "tensor parallel over 8": {"tensor": 8},
    "... and sequence parallel": {"tensor": 8, "sequence_parallel": True},
    "... and selective recompute": {"tensor": 8, "sequence_parallel": True, "recompute": "selective"},
    "tensor parallel over 8, full": {"tensor": 8, "recompute": "full"},
}.items():
    size = activation_bytes(12288, 96, sequence=2048, microbatch=1, **how)
    print(f"{words:29} {size / (2048 * 12288):6.2f} units a layer, {96 * size / 1e9:6.1f} GB")

# %%
guess_2.lock()
GPT3 = {"sequence": 2048, "microbatch": 1}
SPLIT = {"tensor": 8, "sequence_parallel": True}
ways = {"one rank": {}, "tensor 8": {"tensor": 8}, "and sequence": SPLIT}
ways |= {"and selective": SPLIT | {"recompute": "selective"}, "tensor 8, full": {"tensor": 8, "recompute": "full"}}
shown = {name: 96 * activation_bytes(12288, 96, **GPT3, **how) / 1e9 for name, how in ways.items()}
show_bars(shown, "GB", "A split sequence with selective recompute keeps little, and computes almost nothing twice")

# %% [markdown]
# Sequence parallelism with selective recompute keeps about twice as much as full recompute here, and less than a
# twentieth of what one rank keeps without either. And almost nothing is computed twice. That is how the authors train
# models of this size.

# %% [markdown]
# ## Recompute
#
# The idea fits on one screen. Forward runs the block and keeps its input, nothing else. When backward comes, the
# block runs again, now with everything recorded, and backward goes through that. Only one block's activations are
# alive at a time. The price is a second forward. Forward is a third of a step's work, so the step takes 4/3 of the
# time.
#
# ### Exercise: recompute
#
# Write `recompute(block, x)` with an `autograd.Function` inside. Two things go wrong in nearly every first version.
# Dropout: the second run must drop what the first dropped. And the first block of a model reads data, which needs no
# gradient, while the block's parameters do need one.

# %% exercise="06.recompute"

# %% [markdown]
# The library's `recompute_blocks(model)` does this with every block of a model, for any number of inputs. With it,
# how many of the 35 MB of activations of our small GPT will be left? It has 4 blocks, and each reads 16 x 64 vectors
# of 128 float32 numbers.

# %%
guess_3 = predict("Activations at the peak, with every block recomputed?", unit="MB")
guess_3

# %%
recomputed, recomputed_over_time = ranks.run(lambda: measured(recomputed=True))[0]
print(guess_3.compare(recomputed["activations"] / 1e6))
full = ranks.run(lambda: counted(recompute="full"))[0]
beside(recomputed, full)

# %% [markdown]
# Four inputs of 0.5 MB: 2.1 MB<!--out-->. But "temporary" has grown: it now holds the one block that runs again, with
# the gradients that flow through it. So here the count must guess more. The whole update needs about half as much
# memory as before; with 32 blocks instead of 4 the saving would be far greater.

# %%
guess_3.lock()
draw_over_time(full, recomputed_over_time)

# %% [markdown]
# A different way is **offload**: what a block keeps goes to the host's memory, and comes back before its backward,
# while other blocks compute (`torch.autograd.graph.save_on_cpu`). Nothing runs twice, but all of it crosses the wire to
# the host two times. What does a step of the 7B model on eight GPUs take?

# %% tags=["nbval-check-output"]
from simulator import cluster, simulate

WAYS = {"keep all": {}, "recompute": {"recompute": "full"}, "offload": {"offload_activations": True}}
WAYS["offload, and scores again"] = WAYS["offload"] | {"recompute": "selective"}
for name in ("dgx-h100", "gb200-nvl72"):
    where, took = cluster(name, 8), {}
    for way, how in WAYS.items():
        plan = Plan(8, precision=MIXED, sharding=Sharding(1), **how)
        took[way] = f"{simulate(MODEL, where, plan).duration_s * 1e3:.0f} ms"
    print(f"{name:11}", ", ".join(f"{way}: {step}" for way, step in took.items()))

# %% [markdown]
# An H100 reaches its host by PCIe, 25 GB/s: the wire is the step. A GB200 has NVLink-C2C, some seven times as fast:
# there offload beats full recompute, if the scores, most of what is kept here, are made again.

# %% [markdown]
# ## Accumulate
#
# A different way to fewer activations is a smaller micro-batch, with several of them per update. Gradients add up by
# themselves in `.grad`. Lesson 3 did this to communicate less. Does it also save memory?
#
# ### Spot the bug
#
# The following code accumulates, and its gradients are right to the last bit. It should save memory, and it saves
# none. Run the check as it is, read what it says, find the line, repair it.

# %% exercise="06.repair"

# %% [markdown]
# Guides say: "gradient accumulation costs no memory, only time." Take four micro-batches of 4 samples, in place of
# one of 16. How does their peak compare with that of a single micro-batch of 4 that has an update of its own?

# %%
single = ranks.run(lambda: measured(samples=4))[0][0]
accumulated = ranks.run(lambda: measured(samples=4, parts=4))[0][0]
for words, row in {"one of 16": at_peak, "one of 4": single, "four of 4, one update": accumulated}.items():
    print(f"{words:22} {sum(row.values()) / 1e6:5.1f} MB, of it activations {row['activations'] / 1e6:5.1f}, ", end="")
    print(f"gradients {row['gradients'] / 1e6:4.1f}")

# %%
kept = ("activations", "gradients", "temporary")
peaks = {"one of 16": at_peak, "one of 4": single, "four of 4, one update": accumulated}
shown = {name: {kind: row[kind] / 1e6 for kind in kept} for name, row in peaks.items()}
show_bars(shown, "MB", "Small micro-batches keep a quarter of the activations, and gradients twice")

# %% [markdown]
# Half of the memory of the whole batch. But it is not "no memory" compared with a single small one: gradients are
# there **twice**. While micro-batches are not averaged (`no_sync`), the sum so far waits in `.grad`, and the buckets
# for the exchange take as much memory again. In one process, where nothing is exchanged, the claim holds: the
# gradients of one micro-batch are added to those of the last, in the same memory. With several ranks it depends on
# the implementation: torch's DDP holds them twice as well, unless you pass `gradient_as_bucket_view=True`. Measure
# your own library with a tool like this one. And "only time" is right: small micro-batches use a GPU less well.

# %% [markdown]
# ## Fewer bits
#
# 16-bit numbers halve what is stored and what is sent, and tensor cores multiply them many times as fast. There are two
# kinds:

# %% tags=["nbval-check-output"]
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    info = torch.finfo(dtype)
    smallest = torch.tensor(info.smallest_normal, dtype=torch.float64) * info.eps  # the last one before 0
    print(f"{str(dtype):14} from {smallest:.0e} to {info.max:.0e}; next after 1: 1 + {info.eps:.4g}")

# %% [markdown]
# [`bfloat16`](../GLOSSARY.md#bf16-fp16) has float32's range and two to three decimal digits. `float16` has three to
# four digits and a small range: above 65,504 comes infinity, and below half of its smallest number comes zero.
#
# "Mixed precision halves memory", say guides. `autocast` is the plainest form: parameters stay float32, matrix
# products run in 16 bits. How many of our 52 MB will be left?

# %%
guess_4 = predict("Peak of the same update under bfloat16 autocast?", unit="MB")
guess_4

# %%
half, half_over_time = ranks.run(lambda: measured(dtype="bfloat16"))[0]
print(guess_4.compare(sum(half.values()) / 1e6))
for kind in ("parameters", "gradients", "optimizer", "activations", "logits"):
    print(f"{kind:12} float32 {at_peak[kind] / 1e6:5.1f} MB, bfloat16 autocast {half[kind] / 1e6:5.1f} MB")

# %% [markdown]
# **Refuted.** States are as before, to the byte: 16 bytes per parameter, whether as 4 + 4 + 8 or as 2 + 2 + 8 + 4.
# Nearly two fifths of the activations are gone, not half. Norms and the residual stream stay float32, and 16-bit
# copies of the weights are kept for backward. What you do save: half of the bytes that are sent, if gradients are
# 16-bit, and above all time on tensor cores.
#
# Fewer bits and recompute save different things, so you can use both. Here are all four updates:

# %%
guess_4.lock()
both_over_time = ranks.run(lambda: measured(recomputed=True, dtype="bfloat16"))[0][1]
curves = {"float32": over_time, "bfloat16 autocast": half_over_time}
curves |= {"float32, recomputed": recomputed_over_time, "bfloat16, recomputed": both_over_time}
peaks_mb = {name: rows.sum(axis=1).max() / 1e6 for name, (_, rows) in curves.items()}
for name, peak in peaks_mb.items():
    print(f"{name:21} peak {peak:4.1f} MB, {curves[name][1][-1].sum() / 1e6:4.1f} MB at the end")

# %%
guess_4.lock()
shown = {name: {"at the peak": peak, "at the end": curves[name][1][-1].sum() / 1e6} for name, peak in peaks_mb.items()}
show_bars(shown, "MB", "Held over one update: fewer bits make the hill lower, recompute cuts it off; the ground stays")

# %% [markdown]
# The ground is parameters and optimizer states. The hill on it is made of activations: you saw it above, over time.
# Autocast makes it lower. Recompute cuts it off and leaves teeth, one for each block that is computed again.
#
# ### Why the float32 copy?
#
# Why not keep everything in bfloat16, 8 bytes per parameter in all? Between 1 and 2, bfloat16 has only 128 numbers.
# Adam changes a weight by the learning rate at most, here 0.0001, and by less where gradients change their sign. How
# many of those updates would change a bfloat16 weight at all?

# %%
guess_5 = predict("Share of weights that one AdamW step of 0.0001 changes, in bfloat16?", unit="%")
guess_5


# %%
def ready_to_step(warm_up=10):
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(warm_up + 1):
        inputs, targets = CORPUS.batch(step, 16, rank=0, world_size=1)
        optimizer.zero_grad()
        model.loss(model(inputs), targets).backward()
        if step < warm_up:
            optimizer.step()
    return model, optimizer


# %%
def share_changed(lr=1e-4):
    model, optimizer = ready_to_step()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.step()
    change = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before
    rounded = before.bfloat16()
    return float((rounded != (rounded.float() + change).bfloat16()).float().mean()), float(change.abs().median())


# %%
share, middle = ranks.run(share_changed)[0]
print(guess_5.compare(100 * share))
print(f"half of the changes are below {1e6 * middle:.0f} millionths; lost is, near a weight of")
for weight in (0.002, 0.01, 0.05, 1.0):
    here = torch.tensor(weight).bfloat16()
    step = float(here.nextafter(torch.tensor(10.0).bfloat16()).float() - here.float())
    print(f"  {weight:5}: what is below {1e6 * step / 2:7.1f} millionths, half the distance to the next number")

# %% [markdown]
# All other changes are rounded away, again in every step. The larger a weight, the further apart are bfloat16's
# numbers, and the more is lost: near 0.01 more than half of the changes, and near 1, where a norm's weights are, all.
#
# The cure is a float32 copy, the *masters*. The optimizer updates the copy, where small steps add up, and the model
# computes with the copy rounded to 16 bits.
#
# ### Exercise: master weights
#
# Write `update_with_master(weights, masters, gradients, lr)`: one step of SGD.

# %% exercise="06.master"


# %% [markdown]
# Does it matter? Three trainings of the same small model, on the same batches: all in float32, all in bfloat16, and
# bfloat16 with masters (the library's `MasterWeights`, around any optimizer). The ranks exchange nothing here: they
# divide the three trainings between them.

# %%
from distlab.precision import MasterWeights

SMALL = GPTConfig(context=64, num_layers=2, num_heads=2, hidden_size=64)


def train(kind, num_steps=60, lr=3e-4):
    model, losses = GPT(SMALL, torch.Generator().manual_seed(0)), []
    if kind != "float32":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if kind == "bfloat16 with masters":
        optimizer = MasterWeights(model.parameters(), lambda masters: torch.optim.AdamW(masters, lr=lr))
    for step in range(num_steps):
        inputs, targets = CORPUS.batch(step, 8, rank=0, world_size=1)
        optimizer.zero_grad()
        loss = GPT.loss(model(inputs).float(), targets)
        (loss.backward(), optimizer.step(), losses.append(loss.item()))
    return sum(losses[-10:]) / 10


# %%
TRAININGS = ("float32", "bfloat16", "bfloat16 with masters")
ends = {}
for part in ranks.run(lambda: {kind: train(kind) for kind in TRAININGS[dist.get_rank() :: 2]}):
    ends |= part
for kind in TRAININGS:
    print(f"{kind:22} loss {ends[kind]:.3f} in the last ten updates")

# %% [markdown]
# With masters the loss is that of float32 to a few thousandths. Without them it stays higher. The lower the learning
# rate, the more updates are lost: late in a training, when rates are small, the loss no longer falls. (There is a
# different cure, stochastic rounding, that needs no copy.)

# %% [markdown]
# ### float16, and its scale
#
# float16 loses small gradients: below 3e-8 they become zero. How small are gradients? The loss is a *mean* over all
# tokens of a batch, so each token's share falls with the batch. Here are the gradients that flow into one block of our
# model, with 512 tokens, and as they would be in a batch of 4 million:


# %%
def flowing_gradients():
    model, caught = GPT(CONFIG, torch.Generator().manual_seed(0)), []
    model.blocks[2].register_full_backward_hook(lambda module, inputs, outputs: caught.append(outputs[0]))
    inputs, targets = CORPUS.batch(0, 8, rank=0, world_size=1)
    model.loss(model(inputs), targets).backward()
    return caught[0]


flowing = ranks.run(flowing_gradients)[0]
for tokens in (512, 65_536, 4_194_304):
    shares = [float((flowing * (512 / tokens) * scale).half().eq(0).float().mean()) for scale in (1, 2**16)]
    print(
        f"{tokens:9,} tokens: {shares[0]:6.1%} become zero in float16; {shares[1]:.1%} if the loss is scaled by 65,536"
    )


# %%
def zeros(tokens, scale):
    """Return the percentage of gradients that are zero in float16."""
    return 100 * float((flowing * (512 / tokens) * scale).half().eq(0).float().mean())


shown = {f"{n:,} tokens": {"as it is": zeros(n, 1), "scaled": zeros(n, 2**16)} for n in (512, 65_536, 4_194_304)}
show_bars(shown, "%", "The larger the batch, the more gradients float16 loses; a scale brings them back")

# %% [markdown]
# So multiply the loss by a large number before backward. By the chain rule all gradients grow by it. Divide them by
# it before the update, in float32. The best scale is the largest that does not overflow, and it changes during
# training. So it is *searched for*: an overflow shows as infinity or NaN in the gradients. Then skip the update and
# halve the scale. After many good steps in a row, double it.
#
# **And who decides?** With plain data parallelism all ranks hold the same averaged gradients: an infinity on one is
# soon an infinity on all. With sharded gradients, tensor or pipeline parallelism each rank holds *other pieces of the
# model*. One sees the overflow, the others do not. If each decides alone, one skips and the others update. From then on
# no rank's piece belongs to the others' model, and no error is raised. So the library's `LossScaler` asks all ranks:
# one number per step. bfloat16 needs none of this: its range is float32's.

# %% [markdown]
# ## Eight bits
#
# Newer GPUs multiply 8-bit numbers twice as fast as 16-bit ones, and 8 bits are half of the bytes on the wire. There is
# little room in 8 bits, so there are two types: one with more digits, for weights and inputs, and one with more range,
# for gradients.

# %% tags=["nbval-check-output"]
for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
    info = torch.finfo(dtype)
    words = f"up to {info.max:8.3g}, all digits down to {info.smallest_normal:.1e}; next after 1: {1 + info.eps:g}"
    print(f"{str(dtype):20} {words}")

# %% [markdown]
# bfloat16 takes any number of a model as it is. These types do not: what is smaller than their normal numbers loses
# digits, and the smallest become 0. So each tensor is multiplied by a **[scale](../GLOSSARY.md#float8)** before it is
# cast, which brings its largest magnitude to the type's largest, 448. And what if one number is an outlier? Then it
# alone sets the scale, and the others become small. [MX](../GLOSSARY.md#mx) formats give each 32 neighbours a scale of
# their own. Here are the gradients of above, that flow into a block, as e4m3fn has them:

# %%
from distlab.blocks.eight_bits import E4M3, block_scales, from_eight, largest_of, scale_of, to_eight


def lost(tensor, scale):
    """Return how far 8 bits are from a tensor, in percent of its length; the outlier's own sample does not count."""
    gap = from_eight(to_eight(tensor, E4M3, scale), scale) - tensor
    return 100 * float(gap[1:].norm() / tensor[1:].norm())


shown = {}
for name, factor in {"as they flow": 1, "an outlier of 1,000 times": 1e3, "of 10,000 times": 1e4}.items():
    tensor = flowing.clone()
    tensor[0, 3, 5] = factor * flowing.abs().max()
    one, blocks = scale_of(largest_of(tensor), E4M3), block_scales(tensor, E4M3)
    scales = {"no scale": torch.tensor(1.0), "one scale": one, "one for 32 numbers": blocks}
    shown[name] = {how: lost(tensor, scale) for how, scale in scales.items()}
    print(f"{name:26}", ", ".join(f"{how}: {percent:.1f} %" for how, percent in shown[name].items()))
show_bars(shown, "%", "What 8 bits lose: much without a scale, and little with one")

# %% [markdown]
# With a scale each number is wrong by up to 1/16, in the mean of squares by some 2.6 %<!--out-->: 8 bits have no more
# digits. (Scales of blocks are powers of two, so they lose a little more.) Without a scale most of a small tensor is
# gone. And an outlier must be *ten thousand* times as large as the rest before it takes digits from the others. In this
# floating-point type a factor of 28,672 lies between 448 and the smallest normal number. (With 8-bit *integers*, as in
# lesson 5, an outlier of a hundred times is enough.)
#
# Does a model learn with that? `to_eight_bits` replaces linear layers: inputs, weights and gradients of each of their
# three products are rounded to 8 bits, and the product is summed in float32, as tensor cores do it. (On this CPU
# the *values* are right, and the speed is not: 8-bit numbers are turned into float32 and multiplied.) Embeddings,
# norms and the head stay as they are, as in published recipes. Again the ranks divide the trainings between them. Say
# by how much the loss of one scale per tensor will be above that of bfloat16.

# %%
guess_8 = predict("Loss with 8-bit products above that with bfloat16's?", unit="%")
guess_8

# %%
from distlab.precision import to_eight_bits


def train_in_eight(scaling, num_steps=80):
    model, losses = GPT(SMALL, torch.Generator().manual_seed(0)), []
    if scaling != "bfloat16":
        to_eight_bits(model, scaling)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_steps):
        inputs, targets = CORPUS.batch(step, 8, rank=0, world_size=1)
        optimizer.zero_grad()
        with autocast("bfloat16" if scaling == "bfloat16" else "float32"):
            loss = GPT.loss(model(inputs).float(), targets)
        (loss.backward(), optimizer.step(), losses.append(loss.item()))
    return sum(losses[-10:]) / 10


# %%
SCALINGS = ("bfloat16", "tensor", "delayed", "block")
ends = {}
for part in ranks.run(lambda: {kind: train_in_eight(kind) for kind in SCALINGS[dist.get_rank() :: 2]}):
    ends |= part
for kind in SCALINGS:
    print(f"{kind:9} loss {ends[kind]:.3f} in the last ten updates")
print(guess_8.compare(100 * (ends["tensor"] / ends["bfloat16"] - 1)))

# %% [markdown]
# The losses differ in the fourth digit. That holds for a small model, early in its training. In long trainings of
# large models outliers grow, and recipes differ in how they meet them: blocks (MX, and DeepSeek-V3's 128 numbers), some
# layers kept in 16 bits, gradients too in e4m3fn. "delayed" takes the scale from the largest magnitude of the last 16
# steps: it is known before the tensor is, which saves a pass over it. What grows past it becomes 448.
#
# **And who knows the largest?** With FSDP (lesson 7) a weight lies in parts on the ranks, and is gathered for each use.
# In 8 bits that is a quarter of float32's bytes. But each rank sees its own part alone. If each takes the scale of its
# part, the parts of one weight mean different things.
#
# ### Exercise: a scale that all ranks agree on
#
# Write `gather_in_eight_bits(part)`. Budget: one number in an all-reduce, and one byte per element in an all-gather.

# %% exercise="06.eight"


# %%
def gathered():
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    part = model.blocks[0].attention.query_key_value.weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
    with recorded() as seen:
        whole = gather_in_eight_bits(part.contiguous())
    return seen.records.ring_equivalent_bytes(dist.get_rank()), part.nbytes, bool(whole.isfinite().all())


sent, in_full, fine = ranks.run(gathered)[0]
print(f"{sent:,} bytes sent, {in_full:,} in float32: {in_full / sent:.1f}x less; finite: {fine}")

# %% [markdown]
# The library's `ByTensor(model, eight_bits=True)` of lesson 7 gathers the weights of linear layers so, with one
# all-reduce for the scales of a unit. On a slow wire the bytes are the time. Predicted and measured, over 2 MB/s:

# %%
import time

from distlab.comm import throttled


def gather_times(repeats=5):
    """Return the middle of the times of gathers of a 512 x 512 weight: in float32, and in 8 bits."""
    part, times = torch.randn(512 // dist.get_world_size(), 512), []
    whole = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    with throttled(2e6):
        for gather in (lambda: dist.all_gather(whole, part), lambda: gather_in_eight_bits(part)):
            for _ in range(repeats):
                dist.barrier()
                start = time.perf_counter()
                gather()
                times.append(time.perf_counter() - start)
    return sorted(times[:repeats])[repeats // 2], sorted(times[repeats:])[repeats // 2]


# %%
from distlab.plan import Link, Protocol
from simulator import all_gather_s, all_reduce_s

WIRE = Link("throttled", (Protocol(0.0, 2e6),))
said = (all_gather_s(4 * 512 * 512, 2, WIRE), all_gather_s(512 * 512, 2, WIRE) + all_reduce_s(4, 2, WIRE))
took = map(max, zip(*ranks.run(gather_times), strict=True))
shown = {}
for name, predicted_s, measured_s in zip(("float32", "8 bits"), said, took, strict=True):
    shown[name] = {"predicted": 1e3 * predicted_s, "measured": 1e3 * measured_s}
    print(f"{name:8}", ", ".join(f"{how} {value:.1f} ms" for how, value in shown[name].items()))
show_bars(shown, "ms", "A gather in 8 bits takes a quarter of the time")

# %% [markdown]
# And the whole step, on GPUs that multiply 8 bits twice as fast? A plan says `float8`: "products" or also "gathers".
# How many times as fast is a step of the 70B model at stage 3 on 64 H100s?

# %%
guess_9 = predict("How many times as fast is a 70B step with products in 8 bits?", unit="x")
guess_9

# %% tags=["nbval-check-output"]
LARGE, WHERE = model_by_name("llama-2-70b"), cluster("dgx-h100", 64)
seconds = {}
for float8 in ("none", "products", "gathers"):
    plan = Plan(64, precision=MIXED, sharding=Sharding(3), recompute="full", float8=float8)
    seconds[float8] = simulate(LARGE, WHERE, plan).duration_s
    print(f"{float8:8} {seconds[float8]:.2f} s a step")

# %%
print(guess_9.compare(seconds["none"] / seconds["products"], how="the simulator says"))

# %% [markdown]
# Not twice: attention, norms, casts, the update and what is not hidden of the exchange stay. torchao reports up to
# 1.25x for an 8B model on 8 H100s, and up to 1.5x for 405B on 512. Its gather in 8 bits is the one that you wrote, with
# one all-reduce for the scales of all weights.

# %% [markdown]
# ## Does it fit?
#
# Back to the node of eight GPUs with 80 GB. `check_fit` counts the memory of a plan. If the plan does not fit, it
# says by how much, what fills the memory, and the smallest change that fits. "Smallest" is the one that costs the
# least time.

# %% tags=["nbval-check-output"]
from simulator import device
from simulator import check_fit

H100 = device("h100-sxm")
try:
    check_fit(MODEL, Plan(8, precision=MIXED), H100)
except ValueError as error:
    print("\n  ".join(str(error).split("; ")))

# %% [markdown]
# Which single change brings 7B on eight GPUs under 80 GB: full recompute, or sharding the optimizer state (stage 1)?
# Decide before you run the next cell.

# %%
from simulator.viz import draw_memory_of_plans

plans = {
    "as it is": Plan(8, precision=MIXED),
    "full recompute": Plan(8, precision=MIXED, recompute="full"),
    "stage 1": Plan(8, precision=MIXED, sharding=Sharding(1)),
    "stage 1, selective": Plan(8, precision=MIXED, sharding=Sharding(1), recompute="selective"),
    "stage 3, full": Plan(8, precision=MIXED, sharding=Sharding(3), recompute="full"),
}
compared = {name: memory_of(MODEL, plan) for name, plan in plans.items()}
show(draw_memory_of_plans(compared, capacity_bytes=H100.memory_bytes))

# %% [markdown]
# Recompute alone can never do it: 108 GB<!--out--> of states are not activations. Stage 1 alone is not enough either,
# with plain attention: it leaves 37 GB of states, and the activations need more than the rest. Together with flash
# attention, or selective recompute, it fits with room for a larger batch. The picture tells you which setting to
# change.
#
# Now choose yourself: model, device, ranks, precision, and what is split or made again. The text under the picture says
# whether it fits, and what to change if not. From how many ranks on can the 70B model be trained at stage 3, with full
# recompute?

# %%
from simulator.viz import memory_panel

fits = memory_panel(devices=("h100-sxm", "h200-sxm"))
fits

# %%
fits.controls["model"].value = "llama-2-70b"
fits.controls["stage"].value = 3
fits.controls["recompute"].value = "full"
for ranks_asked in (16, 32):
    fits.controls["data"].value = ranks_asked
    print(f"{ranks_asked} ranks: {fits.text}")

# %% [markdown]
# The states alone fill fourteen devices of 80 GB. What a rank needs for the layer that it works on comes on top, on
# every rank, and does not shrink with their number: that is why 16 are still too few. Leave room also for what the
# count leaves out: the allocator's gaps, the communication library, a different program on the GPU.

# %% [markdown]
# ## Production: torch's own
#
# `torch.autocast` you have used. `torch.amp.GradScaler` is the loss scale, `torch.utils.checkpoint` is recompute. Same
# model, same batches, turn by turn in one run: torch's with DDP, and the library's with `DataParallel`.

# %%
import time
from functools import partial

from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from distlab.precision import LossScaler


# %%
def theirs(recomputed, half):
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    for block in model.blocks if recomputed else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    replicas, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=half, init_scale=2.0**10)

    def step(inputs, targets):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=half):
            loss = model.loss(replicas(inputs), targets)
        (scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update())
        return loss.item()

    return step


# %%
def ours(recomputed, half):
    model, replicas, optimizer = prepare(recomputed)
    scaler = LossScaler(2.0**10) if half else None

    def step(inputs, targets):
        optimizer.zero_grad()
        with autocast("float16" if half else "float32"):
            loss = model.loss(model(inputs), targets)
        (loss if scaler is None else scaler.scale(loss)).backward()
        replicas.synchronize()
        if scaler is None:
            optimizer.step()
        else:
            (scaler.step(optimizer, model.parameters()), scaler.update())
        return loss.item()

    return step


# %%
def side_by_side(first, second, num_steps=7):
    programs, rows = (first(), second()), []
    for step in range(num_steps):
        batch = CORPUS.batch(step, 8, rank=dist.get_rank(), world_size=2)
        for program in programs:
            start = time.perf_counter()
            rows.append((program(*batch), time.perf_counter() - start))
    return rows[::2], rows[1::2]


# %%
from statistics import median, quantiles


def compare(words, first, second):
    """Print how far the losses of two programs are apart, and the ratio of their times, step by step."""
    rows = list(zip(*ranks.run(lambda: side_by_side(first, second))[0], strict=True))
    gap = max(abs(a[0] - b[0]) for a, b in rows)
    ratios = [a[1] / b[1] for a, b in rows[2:]]
    low, _, high = quantiles(ratios)
    print(f"{words}: losses differ by {gap:.0e} at most; {median(ratios):.2f} times the time", end="")
    print(f" (half of the steps: {low:.2f} to {high:.2f})")


# %%
compare("float32, ours beside torch's", lambda: ours(False, False), lambda: theirs(False, False))
compare("recompute, ours beside torch's", lambda: ours(True, False), lambda: theirs(True, False))
compare("float16, ours beside torch's", lambda: ours(False, True), lambda: theirs(False, True))
compare("recompute beside none", lambda: ours(True, False), lambda: ours(False, False))

# %% [markdown]
# The losses agree: it is the same arithmetic. The last line is the price of recompute. Counted in matrix products it
# is 4/3. A step here also contains the exchange and the optimizer, which are not done twice, and delays by other
# programs of this machine. So take your line as one sample.

# %% [markdown]
# The same settings under other names:
#
# | | 16-bit numbers | recompute | accumulation |
# |---|---|---|---|
# | torch | `torch.autocast`; FSDP2 `MixedPrecisionPolicy` | `torch.utils.checkpoint` | `no_sync()` |
# | torchtitan | `training.mixed_precision_param` | `activation_checkpoint.mode` | `training.global_batch_size` |
# | Megatron-LM | `--bf16`, `--fp16` | `--recompute-granularity` | `--micro-batch-size`, `--global-batch-size` |
# | DeepSpeed | `bf16`, `fp16` | `activation_checkpointing` | `gradient_accumulation_steps` |
# | Horovod | torch's own | torch's own | `backward_passes_per_step` |
#
# The first loss scale, and the good steps until it grows: `init_scale` and `growth_interval` in torch's `GradScaler`,
# `--initial-loss-scale` and `--loss-scale-window` in Megatron-LM, `initial_scale_power` and `loss_scale_window` in
# DeepSpeed's `fp16`. torchtitan has none: it trains in bfloat16. DeepSpeed's `activation_checkpointing` sets recompute
# up and does not switch it on: the model itself calls `deepspeed.checkpointing.checkpoint`.

# %% [markdown]
# ## Popular claims, tested
#
# - **"175B needs 700 GB in float32, 350 GB in 16 bits."** The weights do. Training needs 2.8 TB.
# - **"70B needs 140 GB of weights and 500 GB or more"**, and so six or seven H100s. 138 GB and 1,104 GB, with Adam in
#   mixed precision: 14 H100s for the states alone. 552 GB is right with everything in bfloat16.
# - **"ZeRO-1 saves 8x, ZeRO-2 16x."** Refuted: at most 4x and 8x of the states, 3.8x and 7.2x in the paper's case.
# - **"Mixed precision halves memory."** Refuted, by count and by measurement: states stay at 16 bytes per parameter,
#   activations shrink by nearly two fifths here.
# - **"Gradient accumulation costs no memory, only time."** In one process. On several ranks it cost a second set of
#   gradients above.
# - **"A 7B model fine-tunes on one 24 GB GPU with LoRA or QLoRA, so do not distribute."** Count it. LoRA freezes the
#   model: no gradients, no moments, no copy of it. What trains are thin matrices, here of rank 16 next to four
#   matrices of each layer. QLoRA stores the frozen weights in 4 bits. Each 64 weights share a constant of 8 bits, and
#   each 256 of these constants share one of 32 bits. So a weight takes 4 + 8/64 + 32/(64 x 256) = 4.13 bits.

# %% tags=["nbval-check-output"]
adapters = 32 * 4 * 2 * 4096 * 16
for recompute_kind in ("none", "selective", "full"):
    plan = memory_of(MODEL, Plan(precision=MIXED, recompute=recompute_kind))
    moving = sum(plan.of(kind) for kind in ("activations", "logits", "temporary"))
    lora = 2 * MODEL.num_parameters + 16 * adapters + moving
    qlora = 4.13 / 8 * MODEL.num_parameters + 16 * adapters + moving
    print(
        f"recompute {recompute_kind:9}: LoRA {lora / 1e9:4.0f} GB, QLoRA {qlora / 1e9:4.0f} GB, one sequence of 4,096"
    )

# %%
shown = {}
for recompute_kind in ("none", "selective", "full"):
    plan = memory_of(MODEL, Plan(precision=MIXED, recompute=recompute_kind))
    moving = sum(plan.of(kind) for kind in ("activations", "logits", "temporary"))
    weights = {"LoRA": 2 * MODEL.num_parameters, "QLoRA": 4.13 / 8 * MODEL.num_parameters}
    shown[f"recompute {recompute_kind}"] = {name: (w + 16 * adapters + moving) / 1e9 for name, w in weights.items()}
show_bars(shown, "GB", "Only full recompute keeps both below the 24 GB of a small GPU")

# %% [markdown]
# True **with full recompute**, for both. With flash attention alone (the line "selective" keeps no scores either) not
# even QLoRA fits at this length; at half of it, it does. It is a rough count. Frozen layers need not keep every
# input. On the other side it leaves out activations of the adapters, 4-bit weights unpacked for a product, and what
# an allocator loses.
#
# The claim holds because the 14 bytes per parameter of gradients, Adam and masters are gone. It says nothing about
# training *all* parameters.

# %% [markdown]
# ## Lab
#
# The same on your own hardware, as a plain script. In a terminal, on two CPU ranks, with the reference and with what
# you wrote in this notebook:
#
# ```
# distlab lab 06 --ranks 2 --impl reference
# distlab lab 06 --ranks 2 --impl mine --trace traces
# ```
#
# The same by torchrun, which is also how it runs on GPUs (`--nproc-per-node` is their number):
#
# ```
# torchrun --nproc-per-node 2 lessons/06_memory/lab.py --impl reference
# ```
#
# `lab_reference.md`, next to it, has the output to compare with. Try `--layers 12`, `--samples 32`.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. A 13B model, gradients added up in float32, masters, Adam. How many GB of states on one rank? With stage 1 over 16?
# 2. The same 13B model trained by SGD with momentum in place of Adam, on one rank?
# 3. A layer with h = 8192, 64 heads, s = 8192, B = 1. Which share of its activations are attention scores?
# 4. 32 layers of h = 4096, s = 4096, B = 1 with full recompute: how many GB of inputs are kept?
# 5. A vocabulary of 128,256 and one sequence of 8,192 tokens: how many GB are the logits, in float32?
# 6. A learning rate of 0.00003, weights of about 0.02. Does plain bfloat16 see the updates?

# %% tags=["nbval-check-output"]
WIDE = Precision("bfloat16")
whole = sum(state_bytes(13_000_000_000, Plan(precision=WIDE), 2).values())
split = sum(state_bytes(13_000_000_000, Plan(16, precision=WIDE, sharding=Sharding(1)), 2).values())
print(f"1. {whole / 1e9:.0f} GB, 18 bytes each; {split / 1e9:.1f} GB")
print(f"2. {sum(state_bytes(13_000_000_000, Plan(precision=WIDE), 1).values()) / 1e9:.0f} GB")
print(f"3. 5 x 64 x 8192 / 8192 = 320 units of {34 + 320}: {320 / 354:.0%}")
inputs_kept = 32 * activation_bytes(4096, 32, sequence=4096, microbatch=1, recompute="full")
print(f"4. {inputs_kept / 1e9:.2f} GB")
print(f"5. {4 * 128_256 * 8192 / 1e9:.1f} GB, and as much again for their gradient")
last_bit = float(torch.tensor(0.02).bfloat16().nextafter(torch.tensor(1.0).bfloat16())) - float(
    torch.tensor(0.02).bfloat16()
)
print(f"6. no: near 0.02 the numbers are {last_bit:.5f} apart; a step below half of that, {last_bit / 2:.6f}, vanishes")

# %%
ranks.close()

# %% [markdown]
# ## What to read next
#
# - Rajbhandari et al. 2020, *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*: section 3 and Table
#   1 count the 16 bytes as you did here, and say who holds them.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models*: section 4, where the 34
#   bytes come from, tensor by tensor.
# - Micikevicius et al. 2018, *Mixed Precision Training*: eleven pages on [master
#   weights](../GLOSSARY.md#master-weights) and [loss scaling](../GLOSSARY.md#loss-scaling).
#
# **Next: lesson 7.** You now know which four parts of the memory are the same on every rank. Lesson 7 divides them
# among the ranks.
#
# ## Sources
#
# - The three above. Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*: recompute.
# - Dao et al. 2022, *FlashAttention*: the scores need not be stored.
# - Micikevicius et al. 2022, *FP8 Formats for Deep Learning*; OCP 2023, *Microscaling Formats (MX) 1.0*; torchao's
#   documentation, "Quantized Training", for the times with float8 (looked up 2026-11).
# - Hu et al. 2021, *LoRA*; Dettmers et al. 2023, *QLoRA*, section 3 for the 4.13 bits.
# - Touvron et al. 2023, *Llama 2*; Brown et al. 2020, *Language Models are Few-Shot Learners*: sizes of the models.
# - torch 2.13: `torch.amp`, `torch.utils.checkpoint`. Names of settings: looked up 2026-11 in public copies of
#   Megatron-LM's `arguments.py`, torchtitan's `job_config.py` (later `configs.py`), Horovod's `DistributedOptimizer`
#   and DeepSpeed's JSON files and documentation; they change between versions.
# - In this repository: `distlab/recompute.py`, `distlab/precision/`, `distlab/measure/memory/measured.py`, and
#   `simulator/memory/memory.py`, in this order.
