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
# # 8. Tensor parallel
#
# 120 minutes, in two sittings of 70 and 50 minutes. Comes after lesson 3 (data parallel) and lesson 7 (sharding). You
# need no GPU: four processes on this machine are the four ranks.
#
# After **sitting one** you can
#
# - cut linear layers, attention and the vocabulary over ranks, equal to one process, with one sum each way;
# - say what a layer sends, $8 B s h (t-1)/t$ numbers, and on which wires you can afford it;
# - tell the field's silent faults from a right run: a missing f, a bias that counts t times, heads cut as one piece.
#
# After **sitting two** you can
#
# - split the sequence between the layers: the same bytes, a fraction of the activations;
# - clip gradients and drop activations that lie on the ranks in different ways;
# - say what part of a step's sums the products can hide, and how many GPUs a model should be cut over.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You train a GPT of 13 billion parameters. Its states (16 bytes per parameter with Adam, lesson 6) do not fit one
# H100 of 80 GB, so you need four. There are two offers. One machine with four H100s and NVLink between them costs 12
# dollars per hour. Four machines with one H100 each and 100 Gb/s Ethernet cost 8 dollars per hour. The same GPUs, a
# third cheaper. Which offer trains more for a dollar?
#
# A guide says: **"naive model parallel uses 25 % of four GPUs, [tensor parallel](../GLOSSARY.md#tensor-parallel) 85
# %."** It does not say on which wire.

# %%
from distlab.plan import Plan
from simulator import activation_bytes_per_layer, adam_state_bytes, cluster, gpt_workload, link, simulate

SIZES = {"hidden_size": 5120, "num_layers": 40, "num_heads": 40, "sequence_length": 2048, "vocab_size": 51200}
MODEL = gpt_workload(**SIZES)

# %% tags=["nbval-check-output"]
states = adam_state_bytes(MODEL.num_parameters)
print(f"{MODEL.num_parameters / 1e9:.1f} billion parameters: {states / 1e9:.0f} GB of states; a GPU has 80 GB")

# %%
from simulator.viz import draw_bars


def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    show(draw_bars(numbers, unit=unit, title=title, subtitle=subtitle))


from distlab.plan import ActionTimes, make_schedule
from simulator import simulate_schedule
from simulator.viz import draw_schedule

naive_trace = simulate_schedule(make_schedule("naive", 4, 1), ActionTimes(1, 1, 1)).trace
show(draw_schedule(naive_trace))

# %% [markdown]
# The picture shows the first idea. Each row is a GPU, F is its forward pass, B its backward pass, and the empty part is
# waiting. The question of this lesson: how can all four work at the same time, on the same samples?
#
# The first idea is naive model parallel: layers 0 to 9 on the first GPU, 10 to 19 on the second, and so on. Each waits
# for the one before. The second idea is this lesson: *cut every layer*, and let all four GPUs work on the same samples
# at the same time.
#
# Before anything runs: how busy are four GPUs that cut every layer, on NVLink? And on Ethernet? Busy is the part of the
# time in which a GPU computes. Type a number into each box, and press Commit.

# %%
guess_0 = predict("How busy are four GPUs with tensor parallel, on NVLink?", unit="%")
guess_0

# %%
guess_1 = predict("And with 100 Gb/s Ethernet between them?", unit="%")
guess_1

# %% [markdown]
# ## Naive: one after the other
#
# Four real ranks. Processes that compute would share the few cores of this machine, and we would measure the cores,
# not the method. So these layers *sleep*: they do almost nothing and take as long as we say. A sleeping process needs
# no core, so four ranks run as if each had a GPU of its own. What they send is real. (Real computing comes later.)

# %%
import time
from statistics import median

LAYER_S = 0.04  # forward of a layer; backward takes twice as long, as in most models
NUM_LAYERS = 4
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


# %%
class Slow(torch.autograd.Function):
    """Hand things on as they are; sleep forward and backward."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


# %%
def naive_step():
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x, gradient = X.clone(), torch.ones_like(X)
    if rank > 0:
        dist.recv(x, rank - 1)
    x.requires_grad_()
    y = Slow.apply(x, LAYER_S, 2 * LAYER_S)  # this rank's one layer of four
    if rank < last:
        dist.send(y.detach(), rank + 1)
        dist.recv(gradient, rank + 1)
    y.backward(gradient)
    if rank > 0:
        dist.send(x.grad, rank - 1)
    dist.barrier()


# %%
WORK_S = NUM_LAYERS * 3 * LAYER_S / 4  # of a rank in a step: a quarter of all layers, or all layers' quarters
ranks = Ranks(4)


def shortest(step, *args):
    times = []
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        step(*args)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return min(times)


naive_s = max(ranks.run(shortest, naive_step))
print(f"naive: a step takes {naive_s * 1e3:.0f} ms, a rank works {WORK_S * 1e3:.0f} ms: busy {WORK_S / naive_s:.0%}")

# %% [markdown]
# **"Naive model parallel uses 25 % of four GPUs"** holds, on any wire: one works, three wait. (In lesson 9
# micro-batches make the others work too.)
#
# ### One process, several devices
#
# Guides often show naive model parallel without ranks: *one* process puts some layers on `cuda:0` and the rest on
# `cuda:1`. Here the two devices are two names for the CPU. How busy are they?

# %%
DEVICES = ("cpu:0", "cpu:1")  # with two GPUs: ("cuda:0", "cuda:1")
halves = [torch.nn.Linear(64, 64).to(device) for device in DEVICES]
x, start = X, time.perf_counter()
for half, device in zip(halves, DEVICES, strict=True):
    x = half(x.to(device))  # a copy is all the communication; autograd copies the gradient back
    x = Slow.apply(x, 2 * LAYER_S, 4 * LAYER_S)  # two of the four layers
x.sum().backward()
seconds = time.perf_counter() - start
print(f"{seconds * 1e3:.0f} ms, each device works {6 * LAYER_S * 1e3:.0f} ms: busy {6 * LAYER_S / seconds:.0%}")

# %% [markdown]
# One half: each layer needs what the one before it made, so only one device works at a time. Real GPUs do not help. A
# call returns there as soon as its work is queued, but the queue of the second GPU waits for the first one's result.
#
# What do ranks change? Not this. `x.to("cuda:1")` becomes a send and a receive, backward too, as in `naive_step`. In
# return every rank can have work of its own while others have theirs. This lesson and lesson 9 give it to them.

# %% [markdown]
# ## Two ways to cut a matrix
#
# A layer computes $Y = X A$. Cut $A$ into *columns*, $A = [A_1, A_2]$: then $Y = [X A_1, X A_2]$. Each rank needs all
# of $X$ and makes some features of $Y$. Or cut $A$ into *rows*: then $X$ is cut too, and $Y = X_1 A_1 + X_2 A_2$. Each
# rank needs some features of $X$ and makes a part of a sum.

# %% tags=["nbval-check-output"]
import torch.nn.functional as F

x, a = torch.randn(5, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
columns = torch.cat([x @ part for part in a.chunk(2, 1)], 1)
rows = sum(one @ part for one, part in zip(x.chunk(2, 1), a.chunk(2, 0), strict=True))
print("columns side by side are Y:", torch.allclose(columns, x @ a), "; parts of rows add up to Y:", end=" ")
print(torch.allclose(rows, x @ a))
first, second = (one @ part for one, part in zip(x.chunk(2, 1), a.chunk(2, 0), strict=True))
print("gelu of the sum is the sum of gelus:", torch.allclose(F.gelu(first + second), F.gelu(first) + F.gelu(second)))

# %%
from distlab.tensor_parallel import Split
from simulator.viz import draw_shards

weights = [{"layers.first.weight": one.T, "layers.second.weight": one} for one in a.chunk(2, 1)]
cuts = {"layers.first.weight": Split(0, (8,)), "layers.second.weight": Split(1, (8,))}
show(draw_shards(weights, cuts, num_heads=1))

# %% [markdown]
# Two layers, the first cut by columns and the second by rows. Each rank holds half of both. Why in this order? The last
# line that was printed decides it. A transformer's feed-forward part is a layer that widens, GeLU, and a layer that
# goes back to the old width. If the *first* layer is cut by rows, its results must be added up before GeLU, since GeLU
# of a sum is not the sum of GeLUs. If it is cut by columns, each rank has whole features, and GeLU works on each
# feature alone. The second layer, cut by rows, takes just these features. So: **columns first, then rows**, and a
# single sum at the end (Shoeybi et al. 2019). In the picture it is the box g; the next section has f. The library's two
# layers are called [ColumnParallelLinear](../GLOSSARY.md#columnparallellinear) and
# [RowParallelLinear](../GLOSSARY.md#rowparallellinear).
#
# ### Exercise: cut a layer
#
# Write `cut_linear(weight, bias, kind, num_ranks, rank)`. Mind two things: torch keeps $A$ transposed; and a bias
# that every rank adds before a sum counts $t$ times.

# %% exercise="08.cut"

# %% [markdown]
# ## f and g
#
# Forward, there is one sum. And backward? All ranks read the same $x$. From its own features each rank computes *a
# part* of $x$'s gradient, and the gradient is the sum of these parts. So backward needs a sum too, at the other end.
# The paper calls the two ends of such a region f and g:
#
# | | forward | backward |
# |---|---|---|
# | f, where a region begins | nothing | sum over ranks |
# | g, where it ends | sum over ranks | nothing |
#
# Backward of g is nothing, because behind the sum every rank has all of the gradient already. Public code has
# forgotten f, and g. Then nothing fails: the loss still falls, a little worse.
#
# ### Exercise: f and g
#
# Write `f_and_g()`, which returns the two. Budget: one all-reduce in f's backward, one in g's forward.

# %% exercise="08.f_and_g"

# %% [markdown]
# ### Exercise: two layers
#
# Now the feed-forward part itself. The library's f and g are called `copy_to_ranks` and `reduce_from_ranks`. Budget:
# one all-reduce of $x$'s size forward, one backward.

# %% exercise="08.mlp"

# %% [markdown]
# ### What that costs
#
# Attention is such a region too (next section), so a layer has two: two all-reduces of $B s h$ numbers forward and two
# backward. A ring sends $2 (t-1)/t$ of a tensor (lesson 2), so a rank sends
#
# $$8\,B\,s\,h\,\frac{t-1}{t} \text{ numbers per layer.}$$
#
# Nothing hides these sums: the next layer needs them. Compare them with the work of a layer, $72 B s h^2 (1 + s/6h)$
# operations, of which a rank has $1/t$. With $F$ operations and $W$ bytes per second, and numbers of 2 bytes, all
# sizes of the batch cancel:
#
# $$\frac{\text{sending}}{\text{computing}} = \frac{2}{9} \cdot \frac{(t-1)\,F}{h\,(1 + s/6h)\,W}$$

# %% tags=["nbval-check-output"]
GPU = cluster("dgx-h100", 4, stack="best-case").device
WIRES = {
    "NVLink": link("nvlink4"),
    "InfiniBand 400 Gb/s": link("infiniband-ndr"),
    "Ethernet 100 Gb/s": link("ethernet-100g"),
}


def ratio_of(t, wire, h=5120, s=2048, flops_per_s=GPU.matmul_flops_per_s):
    bytes_per_s = wire.protocols[-1].bytes_per_s
    return 2 / 9 * (t - 1) * flops_per_s / (h * (1 + s / (6 * h)) * bytes_per_s)


guess_0.lock()
guess_1.lock()
for name, wire in WIRES.items():
    row = "  ".join(f"t={t}: {1 / (1 + ratio_of(t, wire)):4.0%}" for t in (2, 4, 8))
    print(f"{name:20} busy  {row}")

# %%
print(guess_0.compare(100 / (1 + ratio_of(4, WIRES["NVLink"])), how="calculated"))
print(guess_1.compare(100 / (1 + ratio_of(4, WIRES["Ethernet 100 Gb/s"])), how="calculated"))

# %%
guess_0.lock()
guess_1.lock()
shown = {name: {f"t={t}": 100 / (1 + ratio_of(t, wire)) for t in (2, 4, 8)} for name, wire in WIRES.items()}
show_bars(shown, "%", "The wire decides how busy GPUs are that cut every layer", "by the formula, 13B model")

# %% [markdown]
# ### Measured on real ranks
#
# The formula is a claim. Run it: the same four layers as in the naive step, each cut over four ranks. A rank sleeps a
# quarter as long, twice per layer, and *your* f and g really sum. This machine has one wire of its own. To imitate
# a different wire, a sum also sleeps for the time that the other wire would take.


# %%
def tensor_step(wire_ratio):
    f, g = f_and_g()
    work_s = LAYER_S / 2 / dist.get_world_size()  # forward of half a layer
    wire_s = 3 * work_s * wire_ratio / 2  # one sum each way for this work
    x = X.clone().requires_grad_()
    y = x
    for _ in range(2 * NUM_LAYERS):
        y = f(Slow.apply(y, 0.0, wire_s))
        y = Slow.apply(y, work_s, 2 * work_s)
        y = Slow.apply(g(y), wire_s, 0.0) / dist.get_world_size()
    y.backward(torch.ones_like(y))


# %%
busy = {"naive": WORK_S / naive_s}
own_s = max(ranks.run(shortest, tensor_step, 0.0))
print(f"{'this machine, no wire added':28} {own_s * 1e3:4.0f} ms, busy {WORK_S / own_s:.0%}, naive {busy['naive']:.0%}")
for name, wire in WIRES.items():
    ratio = ratio_of(4, wire)
    seconds = max(ranks.run(shortest, tensor_step, ratio))
    busy[name] = WORK_S / seconds
    print(f"{name:28} {seconds * 1e3:4.0f} ms, busy {busy[name]:.0%} (formula {1 / (1 + ratio):.0%}); ", end="")
    print(f"{naive_s / seconds:.1f} times as fast as naive")

# %% [markdown]
# Measured ranks are less busy than the formula says: a sleep lasts longer than asked, and this machine's own sums
# take time as well, and more when other programs run. But the order is clear. On NVLink cutting every layer is much
# faster than naive model parallel. On Ethernet it is *slower than naive model parallel*, which means slower than a
# single GPU would be if the model fitted one.
#
# **"Tensor parallel is useless over Ethernet."** At 100 Gb/s it holds, by the ratio: sending takes several times as
# long as computing. It is not a law of nature. The ratio has $h$ in the denominator: the wider the model, the better.
# How wide would it have to be?

# %% tags=["nbval-check-output"]
for name, wire in WIRES.items():
    for share in (0.5, 0.85):
        width = next(h for h in range(128, 2**20, 128) if 1 / (1 + ratio_of(4, wire, h=h)) >= share)
        print(f"{name:20} t=4 is busy {share:.0%} from h = {width:,} on")

# %% [markdown]
# On NVLink real models are this wide. On Ethernet no existing model comes near 85 %.
#
# **"Tensor parallel uses 85 %."** On four H100s with NVLink that is about right for this model. The formula says 79
# %, and it leaves out two things that help. A layer also does work that is not a product, and part of the sums can
# travel during products. The simulator counts both; below it says 87 %. On other wires, or on eight GPUs, the number
# is a different one, and the claim does not say for which case it holds.
#
# So the cheaper machines cost several times as much for the same training. If you have only those, cut the model into
# stages (lesson 9) that send one activation each, or shard it (lesson 7): the same bytes for any number of samples.

# %% [markdown]
# ## Attention: by heads
#
# Heads are independent of each other, so give each rank some of them. The layer that makes query, key and value is
# cut by columns, and the output layer by rows. So this is a different region of f and g, and attention inside it sends
# nothing.
#
# One trap. Query, key and value usually come out of *one fused* layer, whose features are all queries, then all keys,
# then all values. Cut it like any other and rank 0 of two gets all queries and half of the keys. The shapes fit,
# training runs, and the loss ends a bit higher: 3.48 instead of 3.26 in PaddleFleetX (its pull request 492).
#
# ### Exercise: heads
#
# Write `heads_of(weight, num_heads, num_shared, num_ranks, rank)`: the rows of the fused layer that a rank needs.
# There may be fewer heads of keys and values than of queries (grouped-query attention). Where heads do not divide,
# raise a ValueError: a rank whose heads do not match the columns of its output layer computes wrong values without an
# error.

# %% exercise="08.heads"

# %% [markdown]
# The picture shows which rank holds which heads, drawn from the weights of four real ranks.

# %%
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig
from distlab.tensor_parallel import parallelize, splits_of

CONFIG = GPTConfig(context=32, num_layers=4, num_heads=4, hidden_size=64)
CORPUS = ByteCorpus(python_documentation(), context=32)


def new_gpt():
    return GPT(CONFIG, torch.Generator().manual_seed(0))


def held_parts():
    model = parallelize(new_gpt())
    return {name: one.detach() for name, one in model.named_parameters()}, splits_of(model)


# %%
from functools import partial

from simulator.viz import draw_shards

held = ranks.run(held_parts)
parts, splits = [one for one, _ in held], held[0][1]
show(draw_shards(parts, splits, num_heads=CONFIG.num_heads))

# %% [markdown]
# ## The vocabulary
#
# The last layer makes a score for every token of the vocabulary. With 51,200 tokens these scores are the largest
# activation of all:

# %% tags=["nbval-check-output"]
scores = 8 * 2048 * 51200
print(
    f"8 samples of 2,048 tokens: {4 * scores / 1e9:.1f} GB of scores in float32; a rank of four {scores / 1e9:.2f} GB"
)
print(f"what cross-entropy needs from the others: {3 * 4 * 8 * 2048 / 1e6:.2f} MB")

# %% [markdown]
# Cut that layer by columns and each rank scores its own tokens. Gather them? No: cross-entropy of a position is
# $\log \sum_v e^{x_v - m} + m - x_{target}$ with the largest score $m$. Three numbers per position: the largest, the
# sum and the target's score. The scores stay where they are.
#
# ### Exercise: cross-entropy
#
# Write `cross_entropy(logits, targets, vocab_size)`. A vocabulary that the ranks do not divide is filled up:
# rank $r$ has tokens $rP$ to $(r+1)P$ with $P = \lceil V/t \rceil$. What stands in columns beyond $V$ must not count.
# Budget: three numbers per position.

# %% exercise="08.cross_entropy"

# %% [markdown]
# ### Spot the bug
#
# The embedding at the other end is cut by tokens as well. A rank looks up its own tokens, has zeros for the others, and
# the sum is right. The function below was right for years, with a vocabulary of 50,304. With 50,257 training diverged.
# Run the check as it is, read what it says, find the line, repair it.

# %% exercise="08.repair"

# %% [markdown]
# ## A whole GPT
#
# `parallelize(model)` does all of this to the package's GPT. We train it on four ranks, with the same batches on
# each, and in one process, by plain gradient descent. Why not Adam? Adam divides by the gradient's own size, so a
# gradient that is $t$ times too large would not show.

# %%
BATCH = 8


def descend(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.3 * parameter.grad
            parameter.grad = None


def trained_alone(num_steps=3):
    model, losses = new_gpt(), []
    for step in range(num_steps):
        inputs, targets = CORPUS.batch(step, BATCH)
        loss = model.loss(model(inputs), targets)
        loss.backward()
        descend(model)
        losses.append(loss.item())
    return losses


# %%
def trained(num_steps=3, **options):
    model, losses = parallelize(new_gpt(), **options), []
    for step in range(num_steps):
        inputs, targets = CORPUS.batch(step, BATCH)
        with recorded() as seen:
            loss = model.loss(model(inputs), targets)
            loss.backward()
        descend(model)
        losses.append(loss.item())
    sent = seen.records.ring_equivalent_bytes(dist.get_rank()) + seen.records.sent_bytes(dist.get_rank())
    return losses, sent, sum(p.numel() for p in model.parameters())


# %%
alone = trained_alone()
losses, sent, numbers = zip(*ranks.run(trained), strict=True)
gap = max(abs(one - other) for one, other in zip(alone, losses[0], strict=True))
print(f"losses {alone[0]:.3f} to {alone[-1]:.3f}; differ from four ranks' by at most {gap:.0e}, float32's rounding")

# %% tags=["nbval-check-output"]
t, B, s, h, L = 4, BATCH, CONFIG.context, CONFIG.hidden_size, CONFIG.num_layers
formula = 4 * (t - 1) / t * ((8 * L + 4) * B * s * h + 6 * B * s)  # float32; embedding and output: 4, loss: 6
print(f"a rank sends {sent[0]:,} bytes in a step; the formula says {formula:,.0f}")
print(f"a rank holds {numbers[0]:,} of {new_gpt().num_parameters:,} parameters")

# %%
part = 4 * (t - 1) / t / 1e3
shown = {"layers": 8 * L * B * s * h * part, "embedding and output": 4 * B * s * h * part, "loss": 6 * B * s * part}
show_bars(shown, "kB", "Nine tenths of what a rank sends is sent by the layers")

# %% [markdown]
# Equal to the byte. A rank holds a bit more than a quarter, because norms, positions and the biases behind a sum are
# whole on every rank.

# %% [markdown]
# # The end of sitting one
#
# You can answer the question of the beginning on paper now. Busy is $1/(1 + ratio)$. Four times that share, divided
# by the price of an hour, is what a dollar buys:

# %%
prices = {"NVLink": 12, "Ethernet 100 Gb/s": 8}
bought = {name: 4 / (1 + ratio_of(4, WIRES[name])) / dollars for name, dollars in prices.items()}
show_bars(bought, "GPU-hours", "What a dollar buys: four GPUs in one machine, or four machines", "by the formula, 13B")
ranks.close()

# %% [markdown]
# **You can now** cut a GPT over ranks, prove that it is right, and say on which wire that pays.
#
# **Try this before you go on.** In "Measured on real ranks", take f out of `tensor_step`: delete the line that has
# `f(...)` in it. First guess: does a step get faster, and does anything fail? Then run the two cells again. Or run
# the lab on your own hardware: `distlab lab 08 --ranks 4 --impl mine --trace traces`.
#
# **How to come back.** Save the notebook and close it. When you open it again, run its first code cell
# (`%load_ext distlab.course.notebook`), and then go on at the next heading. You need not run anything of sitting one
# again.

# %% [markdown]
# # Sitting two: the sequence too, and whole steps
#
# What you have from sitting one:
#
# 1. Columns first, then rows: one sum forward (g), one backward (f), for each of a layer's two regions.
# 2. A rank sends $8 B s h (t-1)/t$ numbers per layer, and nothing hides them so far. The wire decides.
# 3. Heads and vocabulary are cut as well. Norms and the residual stream are not: every rank does all of them.
#
# The model, the wires and the small GPT are those of sitting one. Skim the next five cells: they define the same names
# again, and train the small GPT once, for sitting two to compare with.

# %%
import time
from functools import partial
from statistics import median

import torch.nn.functional as F

from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig
from distlab.plan import Plan
from distlab.tensor_parallel import parallelize
from simulator import activation_bytes_per_layer, cluster, gpt_workload, link, simulate
from simulator.viz import draw_bars

ranks = Ranks(4)

# %%
SIZES = {"hidden_size": 5120, "num_layers": 40, "num_heads": 40, "sequence_length": 2048, "vocab_size": 51200}
MODEL = gpt_workload(**SIZES)
WIRES = {
    "NVLink": link("nvlink4"),
    "InfiniBand 400 Gb/s": link("infiniband-ndr"),
    "Ethernet 100 Gb/s": link("ethernet-100g"),
}


def ratio_of(t, wire, h=5120, s=2048):
    flops_per_s = cluster("dgx-h100", 4, stack="best-case").device.matmul_flops_per_s
    return 2 / 9 * (t - 1) * flops_per_s / (h * (1 + s / (6 * h)) * wire.protocols[-1].bytes_per_s)


# %%
CONFIG = GPTConfig(context=32, num_layers=4, num_heads=4, hidden_size=64)
CORPUS = ByteCorpus(python_documentation(), context=32)


def show_bars(numbers, unit, title, subtitle=""):
    show(draw_bars(numbers, unit=unit, title=title, subtitle=subtitle))


def new_gpt():
    return GPT(CONFIG, torch.Generator().manual_seed(0))


# %%
def losses_of(model, num_steps=3):
    for step in range(num_steps):
        inputs, targets = CORPUS.batch(step, 8)
        loss = model.loss(model(inputs), targets)
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= 0.3 * parameter.grad
            parameter.grad = None
        yield loss.item()


# %%
def trained(**options):
    losses, rank = losses_of(parallelize(new_gpt(), **options)), dist.get_rank()
    first = [next(losses), next(losses)]
    with recorded() as seen:  # one step, without what the ranks agree on in the first
        last = next(losses)
    return [*first, last], seen.records.ring_equivalent_bytes(rank) + seen.records.sent_bytes(rank)


alone = list(losses_of(new_gpt()))
_, sent = zip(*ranks.run(trained), strict=True)

# %% [markdown]
# ## Sequence parallel
#
# Between the regions lie norms, dropout and the residual stream. They work on each position alone, and so far all ranks
# do *the same* there, and all keep the same activations. Of the $34\,B s h$ bytes that a layer keeps in addition to
# attention's scores, 10 are kept $t$ times.
#
# Let each rank have a part of the positions there: this is [sequence parallel](../GLOSSARY.md#sequence-parallel). Then
# f becomes an all-gather of the sequence, and g a reduce-scatter; backward the other way round. An all-reduce *is* a
# reduce-scatter and an all-gather (lesson 2), so nothing more is sent. How much smaller do the activations of a layer
# get, with four ranks?

# %%
guess_2 = predict("Four ranks: how many times less does a layer keep with the sequence split too?", unit="x")
guess_2

# %% [markdown]
# ### Exercise: the pair
#
# Write `sequence_pair()`: what takes the places of f and g. The sequence is the first dimension. Budget: the bytes of f
# and g.

# %% exercise="08.sequence"

# %% tags=["nbval-check-output"]
guess_2.lock()
ONE = {"hidden_size": 5120, "num_heads": 40, "sequence_length": 2048, "microbatch_size": 1, "recompute": "selective"}
whole = activation_bytes_per_layer(**ONE)
print(f"a layer of the 13B model, one sample, without attention's scores: {whole / 1e6:.0f} MB on one GPU")
for t in (2, 4, 8):
    plain, split = (activation_bytes_per_layer(**ONE, tensor=t, sequence_parallel=on) for on in (False, True))
    words = f"{split / 1e6:3.0f} MB with the sequence split ({whole / split:.0f}x less)"
    print(f"  t={t}: {plain / 1e6:3.0f} MB a rank ({whole / plain:.1f}x less), {words}")

# %%
guess_2.lock()
shown = {"one GPU": {"sequence whole": whole / 1e6}}
for t in (2, 4, 8):
    kept = {on: activation_bytes_per_layer(**ONE, tensor=t, sequence_parallel=on) / 1e6 for on in (False, True)}
    shown[f"t={t}"] = {"sequence whole": kept[False], "sequence split": kept[True]}
show_bars(shown, "MB", "Without the split, a part of the activations stays whole on every rank")

# %%
print(guess_2.compare(whole / activation_bytes_per_layer(**ONE, tensor=4, sequence_parallel=True), how="counted"))
split_losses, split_sent = ranks.run(partial(trained, sequence_parallel=True))[0]
gap = max(abs(one - other) for one, other in zip(alone, split_losses, strict=True))
print(f"sent, four ranks: {sent[0]:,} bytes before, {split_sent:,} with the sequence split; losses differ by {gap:.0e}")

# %% [markdown]
# Slightly more is sent, for gradients of norms. A norm that sees only a part of the positions gets only a part of its
# gradient, and these parts must be summed over ranks. Programs often forget this sum; then every rank trains its own
# norm.
#
# **"Sequence parallelism costs extra communication."** Refuted, except for those few numbers.
#
# ### Exercise: clip
#
# Now gradients lie on the ranks in three ways: in parts (split weights), the same on each (a bias behind a sum), and
# as parts of a sum (norms). Write `clip_gradients(split, whole, partial, max_norm)`. Two faults from public code:
# taking the norm of the own part only, so that each rank scales by a different factor; and counting $t$ times what
# every rank holds.

# %% exercise="08.clip"

# %% [markdown]
# ### Exercise: dropout
#
# Where all ranks hold the same activation, they must drop the same numbers, or their copies drift apart. Where each
# holds a different part, the same mask would repeat along the tensor. Write `drop(x, p, seed, is_split)`. `seed + rank`
# does not help: seed 8 on rank 0 is the same as seed 7 on rank 1. And no rank's own mask may equal the common one, or
# a layer after the sum drops the same places as a layer before it.

# %% exercise="08.dropout"

# %% [markdown]
# ### Measured over predicted
#
# Does the simulator get a real step right? Two ranks on this machine, which really compute now. A machine does not keep
# its speed. So it is calibrated (how fast it multiplies and sends), some steps are timed, it is calibrated again, and
# so on. The ranks talk over gloo's sockets, whose times the simulator predicts best.

# %%
guess_3 = predict("Two ranks here, tensor parallel: how many times as fast as one process?", unit="x")
guess_3

# %%
from distlab.trace import Trace


def with_gaps(trace):
    """Put the calls on the row "tensor"; a rank computes nothing while it waits for one."""
    cut, calls = [], [span for span in trace if span.lane == "communication"]
    for span in (span for span in trace if span.lane == "compute"):
        start_ns = span.start_ns
        for call in calls:
            if call.rank == span.rank and span.start_ns <= call.start_ns < span.end_ns:
                cut.append(span._replace(start_ns=start_ns, end_ns=max(start_ns, call.start_ns)))
                start_ns = call.end_ns
        cut.append(span._replace(start_ns=start_ns, end_ns=max(start_ns, span.end_ns)))
    return Trace.from_spans(cut + [call._replace(lane="tensor") for call in calls])


# %%
from dataclasses import replace

from distlab.measure import RunResult, TrainingRun, overlay_of_run, time_training

WIDE = GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128, tied=False)
TRAINING = TrainingRun(model=WIDE, plan=Plan(tensor=2), num_updates=1, num_windows=4, budget_s=5.0)
ranks.close()
ranks = Ranks(2, timeout_s=180, backend="gloo")
result = RunResult(TRAINING, ranks.run(time_training, TRAINING))
calls = ranks.records().to_trace()
overlay = overlay_of_run(result, calls=calls.select(calls.is_word("lane", "communication")))
overlay = replace(overlay, measured=with_gaps(overlay.measured), predicted=result.predicted.layer_trace)
print(overlay)

# %% [markdown]
# And one process, with the same model and the same batches. (Rank 0 alone, while rank 1 waits.)

# %%
WIDE_CORPUS = ByteCorpus(python_documentation(), context=64)


def seconds_alone(num_steps=8):
    model, times = GPT(WIDE), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for step in range(num_steps * (dist.get_rank() == 0)):
        inputs, targets = WIDE_CORPUS.batch(step, 16)
        start = time.perf_counter()
        model.loss(model(inputs), targets).backward()
        (optimizer.step(), optimizer.zero_grad())
        times.append(time.perf_counter() - start)
    return times[2:]


# %%
one_s = median(ranks.run(seconds_alone)[0])
two_s = overlay.middle_s[0]
print(f"one process: {one_s * 1e3:.0f} ms, two ranks: {two_s * 1e3:.0f} ms; {guess_3.compare(one_s / two_s)}")
shown = {
    "two ranks, predicted": 1e3 * overlay.middle_s[1],
    "two ranks, measured": 1e3 * two_s,
    "one process": 1e3 * one_s,
}
show_bars(shown, "ms", "A step of the small GPT on this machine")

# %% [markdown]
# Now the step of median length, next to the predicted one. The upper row of each pair was measured; the pale one
# under it was predicted. The row "tensor" has the sums: per block two forward and two backward, and a few for the
# vocabulary. Where a measured box of compute ends and the next has not begun, the rank waits for a sum. Forward,
# these gaps are as long as the sums: they are fully exposed. Half of the measured steps end in the grey band; the
# prediction lets them end between the dotted lines. If the picture says that the machine was not calm, its boxes are
# pale. Close other programs and run the cell again that printed the first line above: it calibrates again, too.

# %%
from simulator.viz import Timeline

timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, result.predicted.duration_s / 2)  # the first half, larger

# %% [markdown]
# The order is the predicted one: nothing in it is left to chance. Where lengths differ, look at the sums first. A
# measured sum begins when its rank starts it and ends when the *slower* rank has come: it contains every delay of the
# other rank. There are four sums per layer and step, and in each all ranks meet. So tensor parallelism suffers from
# uneven ranks more than any other technique: in data parallelism ranks meet once per step. `benchmarks/predicted.py`
# holds the error against a bar, over more windows in which nothing changed.
#
# And the speed? Two ranks halve the products. They do not halve norms and the residual stream, nor the fixed cost of
# each call of a layer. With $h = 128$ that is much; with $h = 5120$ the products are nearly everything.

# %% [markdown]
# ## The simulator at full size
#
# The 13B model on real machines. The step counts everything: products, the rest of the layers (norms, softmax, GeLU),
# sums, the update. To save memory, attention's inner part is recomputed and the sequence is split. Each row also says
# how many times as fast the step is as on one GPU that could hold everything.

# %%
from distlab.plan import Software

FOUR = gpt_workload(**SIZES, microbatch_size=4)


def step_on(t, wire, hidden=0.0):
    wires = {"name": wire.name, "intra_node": wire, "inter_node": wire}
    machine = replace(cluster("dgx-h100", t, stack="best-case"), **wires, software=Software(tensor_overlap=hidden))
    return simulate(FOUR, machine, Plan(tensor=t, sequence_parallel=True, recompute="selective"))


# %% tags=["nbval-check-output"]
one_s = step_on(1, WIRES["NVLink"]).duration_s
for name, wire in WIRES.items():
    for t in (2, 4, 8):
        step = step_on(t, wire)
        times, held = one_s / step.duration_s, step.memory.max_bytes / 1e9
        print(f"{name:20} t={t}: {step.duration_s * 1e3:5.0f} ms, {times:4.2f}x one GPU: busy {times / t:3.0%}", end="")
        print(f", {step.utilization:3.0%} of the GPUs' peak, {held:.0f} GB")

# %% [markdown]
# Read it column by column.
#
# - **Busy** is your speed-up divided by $t$. Eight GPUs are faster than four, and less busy: work is halved, sums are
#   not.
# - **Of the peak** is a different share: the products that a GPU does, out of those that it could do. One GPU alone is
#   at 66 % here, because norms and softmax move memory and multiply nothing. If you compare "85 %" with a different
#   report's "57 %<!--out-->", you should ask which of the two it is.
# - On Ethernet two GPUs are already slower than one, and every further one makes it worse.
# - Two GPUs do not hold the model, whatever the wire.
#
# Try it: drag the degrees, and see memory, exposed communication and utilisation.

# %%
from simulator.viz import degrees_panel

start = Plan(tensor=4, data=2, sequence_parallel=True, recompute="selective")
degrees = degrees_panel(FOUR, cluster("dgx-h100", 8, stack="best-case"), plan=start)
degrees

# %%
degrees.controls["data"].value = 1
degrees.controls["tensor"].value = 8
print(degrees.text)

# %% [markdown]
# ### Beside the products
#
# Part of the sums can hide. Backward of a column layer makes two products: the gradient of its input, which ranks
# must sum, and that of its weight, which stays. So compute the first, send it, and compute the second while it
# travels. The library does that (`distlab/tensor_parallel/overlap.py`). Forward there is only one product, and it
# needs all that is gathered. [Asynchronous tensor parallelism](../GLOSSARY.md#asynchronous-tensor-parallelism) cuts
# both: a part of the sequence is multiplied while the next arrives, or before a reduce-scatter while the last is sent.


# %%
def gather_and_multiply(part, weight):
    rank, size = dist.get_rank(), dist.get_world_size()
    products = [None] * size
    for step in range(size):
        arriving, calls = torch.empty_like(part), []
        if step < size - 1:
            calls = [dist.isend(part, (rank + 1) % size), dist.irecv(arriving, (rank - 1) % size)]
        products[(rank - step) % size] = part @ weight  # while the next part travels
        for call in calls:
            call.wait()
        part = arriving
    return torch.cat(products)


# %%
def gap_to_one_product():
    x, weight = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    part = x.chunk(dist.get_world_size())[dist.get_rank()]  # of the sequence
    return float((gather_and_multiply(part, weight) - x @ weight).abs().max())


print(f"part by part and all at once differ by {max(ranks.run(gap_to_one_product)):.0e}")

# %%
guess_4 = predict("If 75 % of each sum hides: how much shorter is a step on 8 GPUs with NVLink?", unit="%")
guess_4

# %%
guess_4.lock()
times = {t: {part: step_on(t, WIRES["NVLink"], part).duration_s for part in (0, 0.5, 0.75)} for t in (4, 8)}
print(guess_4.compare(100 * (1 - times[8][0.75] / times[8][0]), how="simulated"))
shown = {f"t={t}": {f"{part:.0%} hidden": 1e3 * s for part, s in row.items()} for t, row in times.items()}
show_bars(shown, "ms", "Eight GPUs gain more from hidden sums than four", "a step of the 13B model on NVLink")

# %% [markdown]
# What part hides you must say; for NVIDIA's NeMo the simulator takes `Software(tensor_overlap=0.75)`. PyTorch measured
# Llama 3 only some 8 % faster with it: smaller products are slower, and copies take memory bandwidth. Megatron-LM has
# `--tp-comm-overlap`. In torchtitan's async TP torch.compile finds the pairs (`_micro_pipeline_tp` in
# `torch._inductor.config`), and GPUs copy from each other's symmetric memory.

# %% [markdown]
# ## Production: torch's own
#
# torch keeps cut tensors as `DTensor`s: `parallelize_module` takes the names of layers with `ColwiseParallel` or
# `RowwiseParallel` for each. Same model, same batches, turn by turn in one run. (The ranks import it, not this
# notebook: it takes seconds to load.)

# %%
WIDTH, DEPTH = 256, 4


class Layers(torch.nn.Module):
    """Feed-forward parts with residual connections."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.widen = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 4 * WIDTH) for _ in range(DEPTH))
        self.output = torch.nn.ModuleList(torch.nn.Linear(4 * WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x):
        for widen, output in zip(self.widen, self.output, strict=True):
            x = x + output(F.gelu(widen(x)))
        return x


# %%
def ours():
    from distlab.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    model = Layers()
    for index in range(DEPTH):
        model.widen[index] = ColumnParallelLinear.from_full(model.widen[index])
        model.output[index] = RowParallelLinear.from_full(model.output[index])
    return model


def torchs():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"widen.*": ColwiseParallel(), "output.*": RowwiseParallel()}
    return parallelize_module(Layers(), dist.init_device_mesh("cpu", (dist.get_world_size(),)), plan)


# %%
def turn_by_turn(num_steps=12):
    generator, rows = torch.Generator().manual_seed(0), []
    programs = [(model, torch.optim.SGD(model.parameters(), lr=0.01)) for model in (ours(), torchs())]
    for _ in range(num_steps):
        x = torch.randn(64, WIDTH, generator=generator)
        for model, optimizer in programs:
            dist.barrier()
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            rows.append((loss.item(), time.perf_counter() - start))
    return rows[::2], rows[1::2]


# %%
from statistics import quantiles

mine, theirs = ranks.run(turn_by_turn)[0]
gap = max(abs(one[0] - two[0]) for one, two in zip(mine, theirs, strict=True))
ratios = [one[1] / two[1] for one, two in zip(mine[2:], theirs[2:], strict=True)]
low, _, high = quantiles(ratios)
print(f"losses differ by {gap:.0e} at most; ours takes {median(ratios):.2f} times as long as DTensor's", end=" ")
print(f"(half of the pairs: {low:.2f} to {high:.2f})")

# %% [markdown]
# A number below 1 means that ours is faster. A dozen steps of a small model prove little, and nothing about GPUs:
# `benchmarks/tensor_parallel.py` has the figures with repeats. The same settings under other names:
#
# | | ranks | sequence split | sums during products |
# |---|---|---|---|
# | distlab | `Plan(tensor=...)` | `sequence_parallel=True` | always in backward; `num_parts` |
# | torch | `parallelize_module(..., mesh, plan)` | `SequenceParallel()` for norms | |
# | torchtitan | `tensor_parallel_degree` | `enable_sequence_parallel` | async tensor parallel |
# | Megatron-LM | `--tensor-model-parallel-size` | `--sequence-parallel` | `--tp-comm-overlap` |
# | DeepSpeed | `"tensor_parallel": {"autotp_size": ...}` | | |
# | Horovod | has none | | |
#
# Megatron-LM fills an odd vocabulary up (`--make-vocab-size-divisible-by`), as this package does; DTensor has uneven
# parts. torchtitan splits the sequence unless told otherwise. DeepSpeed cuts a Hugging Face model by the names of its
# layers, together with ZeRO stages 0 to 2; its engine takes stage 3 with it from version 0.19.4 on. What DeepSpeed
# calls sequence parallelism (Ulysses) is a different thing: lesson 11.

# %% [markdown]
# ## Popular claims, tested
#
# - **"Naive model parallel uses 25 % of four GPUs."** Holds: $1/t$, measured above on sleeping ranks.
# - **"Tensor parallel uses 85 %."** About right for the 13B model on four H100s with NVLink: 79 % by products alone,
#   87 % by the simulator. On eight it is 71 %, on 400 Gb/s between four machines less than half. Of the four GPUs'
#   peak it is 57 %.
# - **"Tensor parallel is useless over Ethernet."** At 10 or 100 Gb/s it holds: slower than naive. It is the ratio
#   $(t-1) F / (h W)$ that decides, not the name of the wire.
# - **"Use tensor parallelism up to 8."** The number 8 comes from machines with 8 GPUs: beyond them the wire changes.
#   And inside a machine each doubling more than doubles the ratio.
# - **"Sequence parallelism costs extra communication."** Refuted: the same bytes, except for the norms' gradients.
# - **"Tensor parallelism divides activations by $t$."** Only if the sequence is split too. Without that, 10 of 34
#   parts stay.
# - **"It needs less memory than data parallelism."** For states: $1/t$ each. ZeRO-3 does that too (lesson 7), without
#   cutting products: it gathers weights where this sums activations. Question 2 has the numbers.

# %% [markdown]
# ## Lab
#
# The same on your own hardware, as a plain script. In a terminal, on four CPU ranks, with the reference and with what
# you wrote in this notebook:
#
# ```
# distlab lab 08 --ranks 4 --impl reference
# distlab lab 08 --ranks 4 --impl mine --trace traces
# ```
#
# The same by torchrun, which is also how it runs on GPUs (`--nproc-per-node` is their number: 2, 4 or 8):
#
# ```
# torchrun --nproc-per-node 4 lessons/08_tensor_parallel/lab.py --impl reference
# ```
#
# `lab_reference.md` next to it has the output to compare with.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. What does a rank send for one layer of the 13B model, one sample, four ranks, 16-bit numbers? How long does NVLink
#    take for that, at 367 GB/s, and 100 Gb/s Ethernet?
# 2. From how many samples per step does tensor parallelism on four ranks send more than data parallelism on four,
#    which sends all gradients once, in 16 bits?
# 3. A model has 40 heads of queries and 8 of keys and values. Over how many ranks can its attention be cut?
# 4. A vocabulary of 50,257: how many rows has a rank of 4, and of 8? How many are filled up in all?
# 5. How wide must a model be for eight H100s on NVLink to be busy 85 %, with 2,048 tokens in a sample? And with 32,768?

# %% tags=["nbval-check-output"]
layer = 8 * 2048 * 5120 * 3 / 4 * 2
print(f"1. {layer / 1e6:.0f} MB; NVLink {layer / 367.2e9 * 1e3:.2f} ms, Ethernet {layer / 12.5e9 * 1e3:.0f} ms")
once = 2 * 3 / 4 * 2 * MODEL.num_parameters
print(f"2. {40 * layer / 1e9:.1f} GB a sample, {once / 1e9:.1f} GB a step: from {once / (40 * layer):.1f} samples on")
print(f"3. {[t for t in range(1, 41) if 40 % t == 0 and 8 % t == 0]}")
for t in (4, 8):
    print(f"4. {t} ranks: {-(-50257 // t):,} rows, {-(-50257 // t) * t - 50257} filled up")
for s in (2048, 32768):
    width = next(h for h in range(128, 2**20, 128) if 1 / (1 + ratio_of(8, WIRES["NVLink"], h=h, s=s)) >= 0.85)
    print(f"5. {s:,} tokens: h = {width:,}")

# %%
ranks.close()

# %% [markdown]
# ## What to read next
#
# - Shoeybi et al. 2019, *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism*
#   (arXiv:1909.08053): section 3 is this lesson in two pages.
# - Korthikanti et al. 2022, *Reducing Activation Recomputation in Large Transformer Models* (arXiv:2205.05198): why the
#   sequence is split too, and what a layer keeps (equations 1 to 4).
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*
#   (arXiv:2104.04473): where tensor parallelism ends and pipelines begin; operations of a layer (equation 3).
#
# **Next: lesson 9.** Tensor parallelism needs a fast wire. Lesson 9 cuts the model between its layers, which a slow
# wire can carry, and fights the waiting that you saw in the first picture.
#
# ## Sources
#
# - The three above.
# - Bandwidths and speeds: `simulator/hardware/presets.toml`, each with its source. Prices: the example's own.
# - Documentation of `torch.distributed.tensor.parallel`, of Megatron Core and of DeepSpeed's AutoTP; source of
#   torchtitan (`config/parallelism.py`); discuss.pytorch.org, topic 209487, 2024: async TP. Read 2026-11.
# - In this repository: `distlab/tensor_parallel/`, whose `__init__` says in which order.
