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
# # 11. Long context and experts
#
# 90 minutes. Comes after lesson 2 (collectives), lesson 3 (data parallel) and lesson 6 (memory). You need no GPU: four
# processes on this machine are the four ranks.
#
# Two ways to grow a model that nothing so far has covered: a *sequence* too long for one GPU, and *more parameters*
# without more work for a token. Each has its own way to split, and both come down to who sends what to whom in the
# middle of a layer.
#
# Afterwards you can
#
# - merge attention over some keys with attention over others, exactly, and run it round a ring of ranks;
# - say from how many tokens per rank on a ring hides its messages, and when an all-to-all sends less;
# - route tokens to experts with a capacity, send them there and back by all-to-all, and count who was dropped;
# - keep experts evenly loaded, reduce the right gradients over the right ranks, and say what imbalance costs.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# A GPT of 7 billion parameters (32 layers of 4,096 numbers, 32 heads) is to read whole code bases. That is 131,072
# tokens in one sequence, 16 times what it was trained on. You have a machine with eight H100s, 640 GB together. Its
# states are sharded over the eight (lesson 7), 14 GB on each. What about activations? Begin with the scores:
# attention compares each position with each other one, in every head. How much do the scores of *one layer* take, for
# one sequence? (In 16 bits, with softmax's and dropout's outputs and a mask, as plain PyTorch keeps them: 5 bytes per
# score.)

# %%
guess_0 = predict("How much memory do the scores of one layer take?", unit="GB")
guess_0

# %% tags=["nbval-check-output"]
from simulator import activation_bytes_per_layer, adam_state_bytes, cluster, gpt_num_parameters

guess_0.lock()
H, LAYERS, HEADS, LONG = 4096, 32, 32, 131_072
states = adam_state_bytes(gpt_num_parameters(H, LAYERS, LONG, 51200), zero_stage=3, num_ranks=8)
rest = activation_bytes_per_layer(H, HEADS, LONG, 1, recompute="selective")
SCORES = activation_bytes_per_layer(H, HEADS, LONG, 1) - rest
print(f"states: {states / 1e9:.0f} GB on each of 8 GPUs; for one sequence of {LONG:,} tokens, on each GPU:")
print(f"  scores of a layer           {SCORES / 1e9:6,.0f} GB")
print(f"  all else that a layer keeps {rest / 1e9:6,.0f} GB, in {LAYERS} layers {LAYERS * rest / 1e9:.0f} GB")
full = LAYERS * 2 * LONG * H + rest  # inputs of all layers, and all of the one that is recomputed
print(f"  with full recomputation     {full / 1e9:6,.0f} GB, one layer's {rest / 1e9:.0f} GB in it")

# %%
from simulator.viz import draw_bars


def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    words = {"unit": unit, "title": title}
    show(draw_bars(numbers, subtitle=subtitle, **words))


print(guess_0.compare(SCORES / 1e9, how="counted"))
needs = {"scores of one layer": SCORES, "all else, all layers": LAYERS * rest, "states": states, "a GPU has": 80e9}
needs_gb = {name: size / 1e9 for name, size in needs.items()}
show_bars(needs_gb, "GB", "One sequence of 131,072 tokens: what it needs, and what a GPU has")

# %% [markdown]
# Compare the bars with the last one. Two things are in the way, and they need two answers. How can ranks share one
# sequence, when every position looks at all positions before it?
#
# - **Scores grow with the square.** Of the 2,749 GB<!--out--> per layer a computation needs only a small block at a
#   time. So never hold all of them: attend block by block. This works on one GPU, and is what FlashAttention does.
# - **Everything else grows with the length**: 584 GB<!--out--> here. It cannot be cut by samples, since there is only
#   one. Recomputing everything brings it down to 53 GB<!--out-->, for a third more work. But then one GPU works through
#   the sequence alone, and a million tokens do not fit either. So cut the *sequence*: each rank holds some positions.
#   That is [context parallel](../GLOSSARY.md#context-parallel).
#
# For most of a transformer that changes nothing. Norms, linear layers, the loss: each works on one position alone.
# Only attention looks at others.

# %% [markdown]
# ## Attention, block by block
#
# For one query, attention is a weighted mean of values. The weight of key $j$ is $e^{s_j}$, divided by the sum of
# all. A rank that has seen only some of the keys keeps two things: the mean over *those*, and the logarithm of their
# total weight, $\ell = \log \sum_j e^{s_j}$. Why the logarithm? Because $e^{s}$ of a score of 100 is too large for 32
# bits.


# %%
def attend(query, key, value, visible=None):
    """Return the mean over the visible keys, and the log_sum of their scores."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


# %% tags=["nbval-check-output"]
draw = torch.Generator().manual_seed(0)
query, key, value = (torch.randn(2, 8, 4, generator=draw, dtype=torch.float64) for _ in range(3))
whole, whole_log = attend(query, key, value)
(left, left_log), (right, right_log) = (attend(query, key[:, part], value[:, part]) for part in (slice(5), slice(5, 8)))
print(f"mean of both means: wrong by {((left + right) / 2 - whole).abs().max():.2f}")

# %% [markdown]
# ### Exercise: merge
#
# The left part has five keys and the right one three, and some keys weigh more than others: a plain mean is wrong.
# Write `merge(mean, log_sum, new, new_log_sum)`. Scores may be in the hundreds, and a query may see no key of one of
# the parts: its log_sum is $-\infty$ then.

# %% exercise="11.merge"

# %% tags=["nbval-check-output"]
merged, merged_log = merge(left, left_log, right, right_log)
print(f"merged: wrong by less than 1e-12: {bool((merged - whole).abs().max() < 1e-12)}")

# %% [markdown]
# So the whole of attention can be done one block of keys after the other, with two results that are carried along.
# The square of all scores is never held.


# %%
def attend_in_blocks(query, key, value, size):
    mean, log_sum = attend(query, key[:, :size], value[:, :size])
    for start in range(size, key.shape[1], size):
        block = slice(start, start + size)
        mean, log_sum = merge(mean, log_sum, *attend(query, key[:, block], value[:, block]))
    return mean


# %% tags=["nbval-check-output"]
for size in (1, 2, 3):
    same = torch.allclose(attend_in_blocks(query, key, value, size), whole, atol=1e-12)
    print(f"blocks of {size}: equal to the whole: {same}; scores held at a time: {8 * size} of 64")

# %%
shown = {f"blocks of {size}": 8 * size for size in (1, 2, 3)} | {"all at once": 64}
show_bars(shown, "scores", "Attention block by block holds few scores at a time, with the same result")

# %% [markdown]
# ## Who holds which positions?
#
# The blocks may also lie on different ranks. Four ranks, and each holds a quarter of the positions: queries, keys and
# values. A causal model lets a query see its own position and those before. In a straight cut rank 0 has the first
# quarter, and rank 3 the last. How much more work has rank 3 than rank 0?

# %%
guess_1 = predict("How many times as many pairs does rank 3 compute as rank 0?", unit="times")
guess_1

# %% tags=["nbval-check-output"]
guess_1.lock()
pairs = [sum(position + 1 for position in range(rank * 1024, (rank + 1) * 1024)) for rank in range(4)]
print("pairs of query and key, straight:", ", ".join(f"{count:,}" for count in pairs))
print(f"all wait for rank 3, which has {4 * pairs[3] / sum(pairs):.2f} times an even share")

# %%
print(guess_1.compare(pairs[3] / pairs[0], how="counted"))

# %% [markdown]
# With many ranks the last one has nearly *twice* an even share, so straight pieces waste half of the machine.
#
# ### Exercise: zig-zag
#
# Cut into $2n$ chunks, and give each rank an early one and a late one. Write `zigzag(length, num_ranks, rank)`: the
# positions of a rank, ascending.

# %% exercise="11.zigzag"

# %% tags=["nbval-check-output"]
for rank in range(4):
    mine = zigzag(16, 4, rank)
    print(f"rank {rank} holds {mine.tolist()}: {int((mine + 1).sum())} pairs")

# %%
from simulator.viz import draw_context

show(draw_context(4))

# %% [markdown]
# Follow one colour through the mask. At hop 0 a rank works on its own keys, under the ordinary mask. Of each later
# block it needs exactly half. Of an earlier rank's keys, all its queries see the early chunk. Of a later rank's keys,
# its late queries see both chunks. Every rank has the same to do *at every hop*, which is what counts when all wait for
# each other. (Dealing out positions one by one is nearly even too, but then the mask cuts through each block, and a
# kernel that skips what is hidden cannot skip much.)
#
# Two parts of the model use a token's true position: the causal mask, and the position embedding. Each rank must look
# up its *own* positions. Code that counts from 0 on each rank runs, trains, and reads a shuffled text.

# %% [markdown]
# ## The ring
#
# Each rank keeps its queries. Keys and values go round: at each of $n - 1$ hops a rank hands on what it holds to the
# next one. It attends to whatever is there, and merges.
#
# ### Exercise: ring attention
#
# Write `ring_attend(query, key, value, positions)` for real ranks, forward alone. `positions[r]` are those of rank
# $r$. The budget: $2(n-1)$ tensors of a rank's keys or values sent, and never the whole sequence in one place. An
# all-gather sends as many bytes, and fails the check: it holds the whole sequence, which did not fit.
#
# Two traps. All ranks send at the same time: if each waits in `send`, the receiver of each waits in `send` too. And
# some queries see *none* of a block's keys.

# %% exercise="11.ring"

# %% [markdown]
# It is exact: not an approximation of attention, the same numbers in a different order. The library's
# `plain_ring_attention` is the same on one screen. It can be trained too: `PassOn` hands a tensor to the next rank, and
# in backward hands its gradient to the rank before.

# %%
import inspect

from distlab.context_parallel import plain_ring_attention

print(inspect.getsource(plain_ring_attention).rpartition('"""\n')[2])

# %% [markdown]
# Next the library's fast version. It differs in three ways. Keys travel *while* a block is computed. Halves of blocks
# that the mask hides are not computed. And it keeps no block of scores: its own backward pass sends keys and values
# round once more, with their gradients behind them.


# %%
from distlab.context_parallel import all_to_all_attention, ring_attention, scatter_sequence

SIZE = (1, 8, 1024, 32)  # samples, heads, positions, size of a head
BLOCK = 4 * SIZE[0] * SIZE[1] * SIZE[2] * SIZE[3]  # bytes of the keys of the whole sequence, in float32


def inputs_of(size=SIZE):
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draw) for _ in range(4)]


def gathered_gap(got, want):
    pairs = zip(got, want, strict=True)
    return max(float((one - scatter_sequence(other, dim=2)).detach().abs().max()) for one, other in pairs)


# %%
def spread(attention):
    """Attend forward and backward; return the bytes sent and the gap to one process."""
    *inputs, weight = inputs_of()
    mine = [scatter_sequence(tensor, dim=2).requires_grad_() for tensor in inputs]
    probe = scatter_sequence(weight, dim=2)
    with recorded() as seen:
        output = attention(*mine)
        gradients = torch.autograd.grad(output, mine, probe)
    alone = [tensor.requires_grad_() for tensor in inputs]
    want = torch.nn.functional.scaled_dot_product_attention(*alone, is_causal=True)
    gap = gathered_gap([output, *gradients], [want, *torch.autograd.grad(want, alone, weight)])
    rank, records = dist.get_rank(), seen.records
    return records.sent_bytes(rank) + records.ring_equivalent_bytes(rank), gap


# %%
ranks, sent_mb = Ranks(4), {}
ATTENTIONS = {"ring": ring_attention, "all-to-all": all_to_all_attention, "plain ring": plain_ring_attention}
for name, attention in ATTENTIONS.items():
    sent, gaps = zip(*ranks.run(spread, attention), strict=True)
    print(f"{name:10} sent {sent[0] / 1e6:.2f} MB a rank, {sent[0] / BLOCK:.2f} times the keys of the whole sequence")
    print(f"{'':10} output and gradients differ from one process by {max(gaps):.0e}")
    sent_mb[name] = sent[0] / 1e6

# %%
show_bars(sent_mb, "MB", "Sent per rank, forward and backward", "four ranks, as recorded")

# %% [markdown]
# Read the first number. With $K$ the bytes of the keys of the whole sequence, a rank's part is $K/n$. Forward sends
# keys and values $n-1$ times: $2\frac{n-1}{n}K$. Backward sends them again, and their gradients: $4\frac{n-1}{n}K$.
# Together $6\frac{n-1}{n}K = 4.5\,K$ for four ranks. The all-to-all is explained below. The plain ring sends only
# gradients in backward, $3\,K$ in all, and pays with memory: it keeps all $n$ blocks of scores.

# %% [markdown]
# ## When is the ring free?
#
# A hop is free if it takes no longer than the block that is computed meanwhile. Each rank has $s$ positions of $h$
# numbers, in 16 bits. A hop moves keys and values: $4sh$ bytes. A causal block takes $2s^2h$ operations in forward,
# half of $4s^2h$ (scores, and their product with values). At $F$ operations and $\beta$ bytes per second the hop hides
# if
#
# $$\frac{2 s^2 h}{F} \ge \frac{4 s h}{\beta} \quad\Longleftrightarrow\quad s \ge \frac{2F}{\beta}.$$
#
# The width of the model is gone, and so is the length of the whole sequence. What counts is **positions per rank**.
# How many does an H100 need if the ring goes over InfiniBand with 50 GB/s per GPU?

# %%
guess_2 = predict("How many positions must a rank have, on InfiniBand?", unit="positions")
guess_2

# %% tags=["nbval-check-output"]
from simulator import device, link

guess_2.lock()
flops = device("h100-sxm").matmul_flops_per_s
WIRES = ("nvlink4", "infiniband-ndr", "ethernet-100g")
print(f"an H100 with {flops / 1e12:.0f} TFLOP/s hides hops from so many positions a rank:")
for wire in WIRES:
    per_s = max(protocol.bytes_per_s for protocol in link(wire).protocols)
    alone, shared = (f"{2 * flops / per_s / heads:,.0f}" for heads in (1, 8))
    print(f"  {wire:15} {per_s / 1e9:5.0f} GB/s: {alone}; {shared} with 8 query heads per key head")

# %%
infiniband = max(protocol.bytes_per_s for protocol in link("infiniband-ndr").protocols)
print(guess_2.compare(2 * flops / infiniband, how="calculated"))

# %% [markdown]
# **"[Ring attention](../GLOSSARY.md#ring-attention) overlaps communication, so it is free."** True from some length
# on. Inside a machine 131,072 tokens on 8 GPUs are 16,384 each, and the ring is hidden. On 64 GPUs over InfiniBand
# they are 2,048 each, far too few. Models with grouped-query heads send less: with 8 query heads per key head an
# eighth of the positions is enough.
#
# (Backward computes 2.5 times as much and sends at least twice as much, so its threshold is about as high.)

# %% [markdown]
# ## The other way: all-to-all
#
# Heads do not depend on each other. So instead of moving keys to queries, trade *positions for heads*: before
# attention each rank gives away most heads of its positions, and gets all positions of a few heads. Then attention is
# quite ordinary: whole sequence, no merge, no zig-zag needed. After it the ranks trade back. (DeepSpeed calls it
# Ulysses.)
#
# A rank trades $q$, $k$, $v$ and the output: four all-to-alls in forward, four in backward. Each moves $\frac{n-1}{n}$
# of a rank's part, $K/n$. Together $8\frac{n-1}{n}\cdot\frac{K}{n}$: on four ranks $1.5\,K$, as the second line above
# says. The ring's $6\frac{n-1}{n}K$ hardly depends on the number of ranks.
#
# Where $g$ query heads share a key head, the ring still sends keys and values alone.
# [All-to-all](../GLOSSARY.md#all-to-all) moves queries and outputs too, and each is $g$ times as large: $4(g + 1)$
# takes the place of 8.

# %% tags=["nbval-check-output"]
shown = {}
print("sent by a rank, in units of the keys of the whole sequence:")
for n in (2, 4, 8, 16, 64):
    factors = {"ring": 6, "all-to-all": 8 / n, "all-to-all, 8 query heads a key head": 36 / n}
    shown[f"{n} ranks"] = {name: factor * (n - 1) / n for name, factor in factors.items()}
    print(f"{n:3} ranks:", ", ".join(f"{name} {sent:.2f}" for name, sent in shown[f"{n} ranks"].items()))

# %%
show_bars(shown, "K", "A ring sends up to 6 K; all-to-all sends less and less", "K: bytes of the keys of all ranks")

# %% [markdown]
# **"All-to-all sends less, so it is always better."** With shared key heads and few ranks it sends more. And it has
# two limits. Nothing hides it: attention cannot start before the heads are there. And there are never more ranks than
# heads, or *key* heads where these are shared: with 8 key heads it stops at 8 ranks, or copies them, which sends
# more. What happens beyond?

# %%
from distlab.models import GPT, GPTConfig


def refused():
    from distlab.context_parallel import context_parallel

    try:
        context_parallel(GPT(GPTConfig(num_heads=2, hidden_size=64)), kind="all_to_all")
    except ValueError as error:
        return str(error)


print(ranks.run(refused)[0])

# %% [markdown]
# So large runs use both: all-to-all inside a machine, up to the number of key heads, and a ring between machines.
#
# ### A whole model
#
# `context_parallel` changes a GPT in place: attention, and the position embedding. All ranks hold the same parameters
# and different tokens, so gradients are averaged, as in data parallelism. A batch of one long sequence of Python's
# documentation, on one process and on four ranks:

# %%
from distlab.context_parallel import average_gradients_, context_parallel
from distlab.data import ByteCorpus, python_documentation

CONFIG = GPTConfig(context=256, num_layers=2, num_heads=4, hidden_size=64)
CORPUS = ByteCorpus(python_documentation(), context=256)


def parted(kind):
    """Return a model, what cuts a batch into this rank's part, and what makes gradients whole."""
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    if kind == "alone":
        return model, lambda x: x, lambda: None
    model = context_parallel(model, kind=kind)
    return model, scatter_sequence, lambda: average_gradients_(model)


# %%
def train(kind, num_steps=3):
    (model, part, average), losses = parted(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        inputs, targets = map(part, CORPUS.batch(step, 1))
        optimizer.zero_grad()
        loss = GPT.loss(model(inputs), targets)
        (loss.backward(), average())
        optimizer.step()
        dist.all_reduce(loss.detach_())  # alone, all ranks do the same
        losses.append(float(loss) / dist.get_world_size())
    return losses


# %%
def in_all_ways():
    return {kind: train(kind) for kind in ("alone", "ring", "all_to_all")}


losses = ranks.run(in_all_ways)[0]
for kind, values in losses.items():
    gap = max(abs(one - other) for one, other in zip(values, losses["alone"], strict=True))
    print(f"{kind:10} {', '.join(f'{value:.4f}' for value in values)}; differ from one process by {gap:.0e}")

# %% [markdown]
# The state dict is that of an ordinary GPT: parameters keep their names.
#
# ### Measured over predicted
#
# What does the simulator predict for a step of such a model? First it must know this machine: how fast two ranks
# compute, and what a hop costs. A machine does not keep its speed. So `time_training` calibrates, times a few steps,
# calibrates again, and so on; `overlay_of_run` predicts the steps from the calibrations around them. Two ranks on a
# ring, 512 positions, two samples.

# %%
from distlab.measure import RunResult, TrainingRun, overlay_of_run, time_training
from distlab.plan import Plan

LONGER = GPTConfig(context=512, num_layers=2, num_heads=4, hidden_size=128, tied=False)
SHORT = {"num_windows": 4, "num_updates": 1, "budget_s": 5.0}
TRAINING = TrainingRun(model=LONGER, plan=Plan(context=2), batch_size=2, **SHORT)

# %%
with Ranks(2, timeout_s=110) as pair:
    overlay = overlay_of_run(RunResult(TRAINING, pair.run(time_training, TRAINING)))

# %%
guess_ring = predict("How long is this step, in milliseconds?", unit="ms")
guess_ring

# %%
print(guess_ring.compare(overlay.middle_s[0] * 1e3))
print(overlay)

# %%
from simulator.viz import Timeline

guess_ring.lock()
timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, overlay.measured.duration_s)  # the whole step

# %% [markdown]
# The upper row of each pair was measured; the pale one under it was predicted. Green is the ring: keys and values on
# their way during attention. (The ranks mark a whole pass, the simulator each hop.) Memory is a fast wire beside such
# slow cores, so computation hardly waits for the ring. Half of the measured steps end in the grey band; the prediction
# lets them end between the dotted lines. If the picture says that the machine was not calm, close other programs and
# run the cell again that calibrates. `benchmarks/predicted.py` repeats this, and holds the error against a bar.

# %% [markdown]
# ### The question, answered
#
# The model of the question: one sequence of 131,072 tokens, on one machine with eight H100s and on more, InfiniBand
# between. Its attention is a fused kernel that holds no scores (FlashAttention). What a rank holds by the formulas from
# above, and how long it waits for other positions by the simulator.

# %% tags=["nbval-check-output"]
from simulator import ModelDescription, simulate

SIZES = {"hidden_size": H, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": 51200, "sequence_length": LONG}
GPT7 = ModelDescription(**SIZES, attention="flash").workload()
for n in (8, 16, 32):
    plans = {kind: Plan(context=n, context_kind=kind) for kind in ("ring", "all_to_all")}
    waits = {
        kind: simulate(GPT7, cluster("dgx-h100", n, stack="best-case"), plan).exposed_by_axis
        for kind, plan in plans.items()
    }
    print(f"{n:2} GPUs: {(8 * states + LAYERS * rest) / n / 1e9:3.0f} GB a GPU; waits in a step:", end=" ")
    print(", ".join(f"{kind} {1e3 * wait['context']:,.0f} ms" for kind, wait in waits.items()))

# %% [markdown]
# Look at the first two blocks of forward on one rank. Change the number of GPUs: eight share a machine, more do not.

# %%
import ipywidgets

from simulator.viz import Panel, draw_timeline


def draw_blocks(num_gpus, kind):
    plan = Plan(context=num_gpus, context_kind=kind)
    trace = simulate(GPT7, cluster("dgx-h100", num_gpus, stack="best-case"), plan).layer_trace
    trace = trace.select(trace.rank == 0)
    trace = trace.select(trace.end_ns <= trace.end_ns[trace.is_word("name", "forward block 1")].max())
    title = f"{kind}, {LONG // num_gpus:,} positions on each of {num_gpus} GPUs"
    return draw_timeline(trace, title=title)


# %%
blocks = Panel(
    draw_blocks,
    num_gpus=ipywidgets.SelectionSlider(options=[8, 16, 32], value=8, description="GPUs"),
    kind=ipywidgets.Dropdown(options=["ring", "all_to_all"], description="attention"),
)
blocks

# %%
blocks.controls["num_gpus"].value = 32
print(blocks.text)

# %% [markdown]
# Eight GPUs hold it only if some of it is recomputed; sixteen hold it as it is. Inside the machine ranks hardly wait in
# either way. Between machines the ring needs the 31,780 positions per rank that were derived above. On 16 GPUs it has a
# quarter of them, on 32 an eighth: the panel shows how ranks wait through most of a block. So all-to-all is the better
# way here, up to 32 ranks: one head each. With a sequence of a million tokens the ring would hide on 32 GPUs.

# %% [markdown]
# ## Experts: more parameters, the same work
#
# Now the other way to grow. Two thirds of a transformer's parameters are in its feed-forward layers. Make eight of
# them in place of one, the **experts**, and let each token pass through two. A small linear layer, the **router**,
# chooses. The layer has eight times the parameters. How many times the work of one feed-forward layer does a token
# cause?

# %%
guess_3 = predict("How many times the work of one feed-forward layer?", unit="times")
guess_3

# %% tags=["nbval-check-output"]
guess_3.lock()
h, e, k = 4096, 8, 2
one = 8 * h * h  # parameters of a feed-forward layer, without biases
print(f"parameters: {e * one / 1e6:.0f} million for {one / 1e6:.0f}; router {h * e / 1e3:.0f} thousand")
print(f"operations a token, forward: {k * 2 * one / 1e6:.0f} million for {2 * one / 1e6:.0f}")

# %%
print(guess_3.compare(k, how="counted"))

# %% [markdown]
# **"An 8x7B model has 56 billion parameters."** Only the feed-forward layers exist eight times; attention and
# embeddings are shared. Mixtral 8x7B has 47 billion, and a token uses 13 billion of them (Jiang et al. 2024). It
# computes like a 13B model, and it must be *held* like one of 47B: memory is the reason to split experts over ranks.
#
# Each rank holds some experts and brings its own tokens. A token goes to the ranks of its experts. That is an
# all-to-all. But unlike in all collectives so far, no rank knows beforehand how much goes where: **the data
# decides**.

# %% [markdown]
# ### Exercise: route
#
# Memory is finite. An [expert](../GLOSSARY.md#expert) gets memory for `capacity` choices, a factor times an even
# share; what is beyond is **dropped**: the token goes on by its residual connection alone. Who is dropped must be a
# rule, the same in every run. Write `route(probabilities, top_k, capacity)`: experts, weights, which choices are
# kept, and how many were dropped.

# %% exercise="11.route"

# %%
from simulator.viz import draw_routing

draw = torch.Generator().manual_seed(3)
scores = [torch.randn(6, 4, generator=draw) + torch.tensor([1.0, 0, 0, 0]) for _ in range(2)]
experts, _, kept, _ = zip(*(route(one.softmax(-1), 2, 4) for one in scores), strict=True)
chosen = {"num_experts": 4, "capacity": 4, "kept": kept}
show(draw_routing(experts, **chosen))

# %% [markdown]
# Twelve tokens on two ranks, two experts each. The first expert is popular. How large must
# [capacity](../GLOSSARY.md#capacity) be?

# %% tags=["nbval-check-output"]
draw, factors, shown = torch.Generator().manual_seed(0), (1.0, 1.25, 2.0, 4.0), {}
tilts = {"even router": 0.0, "leaning router": 1.0, "collapsing router": 3.0}
print(f"{'choices dropped, with capacity of':34}" + "".join(f"{factor:>7}x" for factor in factors))
for name, tilt in tilts.items():
    probabilities = (torch.randn(4096, 8, generator=draw) + tilt * torch.linspace(1, 0, 8)).softmax(-1)
    lost = [route(probabilities, 2, int(factor * 2 * 4096 / 8))[3] / (2 * 4096) for factor in factors]
    shown[name] = {f"capacity {factor}x": 100 * part for factor, part in zip(factors, lost, strict=True)}
    print(f"  {name:32}" + "".join(f"{part:8.1%}" for part in lost))

# %%
show_bars(shown, "%", "A router that leans drops choices, and nothing says so", "choices dropped")

# %% [markdown]
# **"A capacity factor of 1.25 is enough."** For an even router it is. For an uneven one it drops many of the choices,
# silently: nothing fails, the loss is a little worse. So count dropped choices, and print them. And a larger capacity
# does not help: all ranks wait for the fullest expert.

# %% [markdown]
# ### Exercise: there and back
#
# Write `ask_experts(tokens, experts, weights, expert)`. Rank $r$ holds expert $r$, and each token asks one. Sort the
# tokens by rank, tell each rank how many will come, send, let the expert work, send back, and put each answer where its
# token was. `exchange_rows(rows, give, take)` is an all-to-all whose gradients travel back; a bare call of
# `torch.distributed` is not in autograd's graph. A rank that no token asked must still take part all the
# same.

# %% exercise="11.ask"

# %% [markdown]
# The library's `ExpertParallel` does that with several experts per rank, several choices per token, and capacity.
# Here it is compared with the same layer in one process, with different tokens on each rank:

# %%
from distlab.expert_parallel import ExpertParallel, MixtureOfExperts, Router
from distlab.models import FeedForward


def mixture(capacity_factor=None):
    torch.manual_seed(0)
    experts = [FeedForward(GPTConfig(hidden_size=64)) for _ in range(8)]
    return MixtureOfExperts(Router(64, 8, top_k=2, capacity_factor=capacity_factor), experts)


# %%
def there_and_back(num_tokens=512):
    rank, layer = dist.get_rank(), ExpertParallel.from_full(mixture())
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    with recorded() as seen:
        output = layer(x)
        (gradient,) = torch.autograd.grad(output.sum(), x)
    want = mixture()(x)
    (other,) = torch.autograd.grad(want.sum(), x)
    gap = max(float((output - want).detach().abs().max()), float((gradient - other).abs().max()))
    return seen.records.payload_bytes(rank, "all_to_all"), gap, layer.total_load().choices


# %%
sent, gaps, loads = zip(*ranks.run(there_and_back), strict=True)
rows = 512 * 2 * 64 * 4  # tokens x choices x hidden x bytes
print(f"output and gradients differ from one process by {max(gaps):.0e}")
print(f"all-to-alls carry {sum(sent) / 4 / rows:.2f} times a rank's rows, counts included; asked: {loads[0]}")

# %% [markdown]
# Four times: rows there, answers back, and in backward both again for gradients. A quarter of each stays on its own
# rank, so $4 \cdot \frac{n-1}{n} \cdot kTH$ numbers travel, in every mixture layer, every micro-batch. None of
# them can start before the router has chosen.
#
# ### Over machines: two levels
#
# DeepSeek-V3 has 256 experts, and a token asks 8. On two machines about four of them stand in the other one, and
# InfiniBand carries the same row four times. A two-level dispatch (DeepEP's kernels) sends it there once, and NVLink
# hands it on, once to a GPU: `Software(dispatches_once=True)` in the simulator. On more machines fewer of a token's
# experts share one, so DeepSeek-V3 lets a token ask experts of four machines at most.

# %%
guess_nodes = predict("Two machines: how many times less does a step wait for rows then?", unit="x")
guess_nodes

# %%
from dataclasses import replace

from distlab.plan import Software

guess_nodes.lock()
SIZES = {"hidden_size": 7168, "num_layers": 1, "num_heads": 128, "vocab_size": 51200, "sequence_length": 4096}
MIXED, shown = ModelDescription(**SIZES, num_experts=256, top_k=8, attention="flash").workload(), {}
for name, once in (("to each expert", False), ("once", True)):
    for n in (1, 2, 4, 8):
        machine = replace(cluster("dgx-h100", 8 * n, stack="best-case"), software=Software(dispatches_once=once))
        wait_s = simulate(MIXED, machine, Plan(expert=8 * n)).exposed_by_axis["expert"]
        shown.setdefault(f"{n} x 8 GPUs", {})[name] = 1e3 * wait_s
each_ms, once_ms = shown["2 x 8 GPUs"].values()
print(guess_nodes.compare(each_ms / once_ms, how="simulated"))
show_bars(shown, "ms", "A row that crosses the slow wire once saves most on two machines", "a layer waits in a step")

# %% [markdown]
# ## Balance
#
# A router left alone collapses: an expert that is asked more learns more, gets better, and is asked still more. So a
# second loss is added, some 0.01 times $E \sum_e f_e P_e$. Here $f_e$ is the part of choices that fell on expert $e$,
# and $P_e$ the mean probability that the router gave it. Why is an even load 1? There all $f_e = P_e = 1/E$, so the sum
# is $E \cdot E \cdot \frac1E \cdot \frac1E = 1$. If one expert gets everything it is $E$.
#
# Counts have no gradient. It flows through $P$, and pushes down the probability of those who were asked too often.
#
# ### Exercise: balance loss

# %% exercise="11.balance"

# %% tags=["nbval-check-output"]
even = torch.full((8, 4), 0.25)
all_to_0 = torch.tensor([[1.0, 0, 0, 0]]).repeat(8, 1), torch.zeros(8, 1, dtype=torch.int64)
print(f"even {balance_loss(even, torch.arange(8)[:, None] % 4):.2f}, collapsed {balance_loss(*all_to_0):.2f}")

# %% [markdown]
# On several ranks: whose tokens? Two ranks, each with text of its own kind. One asks only experts 0 and 1, the other
# only 2 and 3. Together that is even. The mean of the ranks' own losses says it is not, and pushes both ranks towards
# experts that do not suit their text. The loss of the *summed* counts is a different number:

# %% tags=["nbval-check-output"]
kinds = [torch.tensor([[5.0, 5, -5, -5]]), torch.tensor([[-5.0, -5, 5, 5]])]
probabilities = [kind.repeat(4, 1).softmax(-1) for kind in kinds]
experts = [torch.tensor([[0], [1], [0], [1]]), torch.tensor([[2], [3], [2], [3]])]
apart = sum(balance_loss(p, e) for p, e in zip(probabilities, experts, strict=True)) / 2
print(f"mean of the ranks' losses {apart:.2f}, loss over all their tokens", end=" ")
print(f"{balance_loss(torch.cat(probabilities), torch.cat(experts)):.2f}")

# %% [markdown]
# The second loss has gradients of its own, which pull at the task. A **bias** for each expert does without: it is added
# where the router chooses, not in the weights. After each step it rises by $u$ where an expert was asked less than the
# mean, and falls by $u$ where more (DeepSeek-V3: $u = 0.001$, beside sigmoids and a very small balance loss).


# %%
def choose_with(bias, router, _, routing):
    experts = (routing.probabilities + bias).topk(router.top_k).indices
    weights = routing.probabilities.gather(1, experts)
    return routing._replace(experts=experts, weights=weights / weights.sum(1, keepdim=True))


# %% [markdown]
# Now watch them work. A GPT of one layer with 8 experts, on four ranks, with neither, with the balance loss, and with
# the bias. With top 2 of 8 the fullest expert can have at most 4 times an even share.

# %%
from distlab.expert_parallel import balance_loss as balance_of_model
from distlab.expert_parallel import expert_parallel, mix_experts, reduce_gradients


SHORTER = GPTConfig(context=32, num_layers=1, num_heads=4, hidden_size=64)
TEXT = ByteCorpus(python_documentation(), context=32)


def fullest_share(load):
    return max(load.choices) / (sum(load.choices) / len(load.choices))


# %%
def with_experts(weight, u, num_steps=40):
    draw, history, bias = torch.Generator().manual_seed(0), [], torch.zeros(8)
    model = expert_parallel(mix_experts(GPT(SHORTER, draw), 8, draw, top_k=2, capacity_factor=1.25))
    optimizer, layer = torch.optim.AdamW(model.parameters(), lr=1e-3), model.blocks[0].feed_forward
    layer.router.register_forward_hook(lambda *seen: choose_with(bias, *seen))
    for step in range(num_steps):
        inputs, targets = TEXT.batch(step, 16, rank=dist.get_rank(), world_size=4)
        loss = GPT.loss(model(inputs), targets)
        (loss + weight * balance_of_model(model)).backward()
        reduce_gradients(model)
        (optimizer.step(), optimizer.zero_grad())
        load = layer.total_load()
        bias += u * (sum(load.choices) / 8 - torch.tensor(load.choices)).sign()  # in place: the hook has it
        history.append((float(loss.detach()), fullest_share(load), load.dropped_choices / sum(load.choices)))
    return history


# %%
rules = {"neither": (0, 0), "balance loss": (0.05, 0), "bias, 0.003": (0, 0.003), "bias, 0.05": (0, 0.05)}
fullest_at = {name: {} for name in rules}
for name, rule in rules.items():
    history = torch.tensor(ranks.run(with_experts, *rule)[0])
    for first in (0, 15, 30):
        loss, fullest, dropped = history[first : first + 10].mean(0).tolist()
        fullest_at[name][when := f"steps {first} to {first + 9}"] = fullest
        print(f"{name:12} {when:14}: loss {loss:.2f}, fullest expert {fullest:.2f}", end=" ")
        print(f"times an even share, {dropped:.0%} dropped")

# %%
show_bars(fullest_at, "x", "Left alone, the router collapses", "the fullest expert, over an even share")

# %% [markdown]
# Left alone the router starts nearly even. Within some steps nearly all tokens ask the same two experts, and most
# choices are dropped. The balance loss keeps the load even, and the training loss does not suffer from it. The small
# bias stops the collapse too, less evenly so early, when a router changes fast. The large one overshoots in every step.
#
# With even loads capacity can go: `capacity_factor=None` is [dropless](../GLOSSARY.md#dropless), as DeepSeek-V3 is. A
# rank then needs memory for whatever comes, and one product over groups of unequal size (MegaBlocks).

# %% [markdown]
# ### What imbalance costs
#
# All ranks wait for the rank whose experts are asked most. So a layer takes as long as its *fullest* rank, not the
# mean. We show it with experts that sleep for every row instead of computing, so that they need no cores. There is one
# expert per rank, and 100 tokens on each; a row takes 0.5 ms. In an even load each rank works on 100 rows, 50
# ms<!--out-->. Now 40 % of all tokens want expert 0. How long does the layer take?

# %%
guess_4 = predict("How long does the layer take when 40 % of all tokens want expert 0?", unit="ms")
guess_4

# %%
import time

ROW_S = 5e-4


class Sleeping(torch.nn.Linear):
    def forward(self, x):
        time.sleep(ROW_S * len(x))
        return super().forward(x)


# %%
def layer_time(shares):
    rank = dist.get_rank()
    counts = torch.tensor([round(100 * share) for share in shares])
    wanted = torch.arange(4).repeat_interleave(counts)
    expert, times = Sleeping(8, 8), []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        ask_experts(torch.ones(len(wanted), 8), wanted, torch.ones(len(wanted)), expert)
        times.append(time.perf_counter() - start)
    return min(times), int(counts[rank]) * 4


# %%
guess_4.lock()
shown = {}
for shares in ((0.25, 0.25, 0.25, 0.25), (0.4, 0.2, 0.2, 0.2), (0.7, 0.1, 0.1, 0.1)):
    times, rows = zip(*ranks.run(layer_time, shares), strict=True)
    fullest = max(rows)
    shown[f"{shares[0]:.0%} to expert 0"] = {"measured": max(times) * 1e3, "predicted": fullest * ROW_S * 1e3}
    print(f"rows a rank {rows}: {max(times) * 1e3:.1f} ms measured, {fullest * ROW_S * 1e3:.0f} ms predicted;", end=" ")
    print(f"ranks busy {sum(rows) / 4 / fullest:.0%} of it on average")
print(guess_4.compare(160 * ROW_S * 1e3, how="predicted"))
show_bars(shown, "ms", "A layer takes as long as its fullest rank")

# %% [markdown]
# ## Whose gradients? Spot the bug
#
# The step's loss is the mean over ranks of each rank's loss. What every rank holds (attention, router) has the gradient
# of its own rank's loss: average it. The following code does that with *all* parameters, "as in data parallelism". It
# runs, the loss falls, a little slower than it should. Run the check as it is, read what it says, find the line,
# repair it.

# %% exercise="11.repair"

# %% [markdown]
# ## Production: torch's own
#
# `torch.distributed.tensor.experimental.context_parallel` spreads buffers along the sequence in the same zig-zag order
# and runs a ring. Its dispatcher has no rule for the CPU's kernel (torch 2.13), so on the CPU we call the ring inside
# it. Same inputs, turn by turn in one run.


# %%
def torchs_ring(query, key, value):
    import torch.distributed.tensor.experimental._context_parallel._attention as inner

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, *_ = inner._templated_ring_attention(dist.group.WORLD, 2, kernel, query, key, value, is_causal=True)
    return output


# %%
def side_by_side(num_steps=5):
    mine = [scatter_sequence(tensor, dim=2) for tensor in inputs_of()[:3]]
    programs, rows = (ring_attention, all_to_all_attention, torchs_ring), []
    for _ in range(num_steps):
        row = []
        for program in programs:
            dist.barrier()
            start = time.perf_counter()
            output = program(*mine)
            row.append((output, time.perf_counter() - start))
        rows.append([seconds for _, seconds in row])
        gap = max(float((output - row[2][0]).abs().max()) for output, _ in row[:2])
    return rows[1:], gap


# %%
from statistics import median

rows, gap = ranks.run(side_by_side)[0]
ratios = [median(row[index] / row[2] for row in rows) for index in (0, 1)]
print(f"outputs differ from torch's by {gap:.0e}; forward takes {ratios[0]:.2f} times as long by our ring,", end=" ")
print(f"{ratios[1]:.2f} by all-to-all")

# %%
names = ("our ring", "our all-to-all", "torch's ring")
shown = {name: 1e3 * median(row[index] for row in rows) for index, name in enumerate(names)}
show_bars(shown, "ms", "Forward of one attention on four ranks")

# %% [markdown]
# A number below 1 means that ours is faster. A few rounds on shared cores prove little;
# `benchmarks/context_parallel.py` and `benchmarks/expert_parallel.py` have the figures with repeats, forward and
# backward. torch has no mixture of experts layer of its own; torchtitan and Megatron-LM do. The same settings under
# other names:
#
# | | context | experts |
# |---|---|---|
# | distlab | `Plan(context=..., context_kind=...)` | `Plan(expert=...)`, `mix_experts(top_k=, capacity_factor=)` |
# | torch | `context_parallel(mesh, buffers=...)`, `set_rotate_method` | |
# | torchtitan | `context_parallel_degree`, `context_parallel_load_balancer` | `expert_parallel_degree` |
# | Megatron-LM | `--context-parallel-size`, `--cp-comm-type` | `--expert-model-parallel-size`, `--moe-router-topk` |
# | DeepSpeed | `sequence_parallel_size`, `data_parallel_size` | `MoE(ep_size=, k=, capacity_factor=)` |
#
# Megatron-LM's kinds are `p2p` (the ring), `a2a`, `all_gather` and `a2a+p2p`, which is both; capacity is
# `--moe-expert-capacity-factor`, the weight of the balance loss `--moe-aux-loss-coeff`, and the bias
# `--moe-router-enable-expert-bias`. DeepSpeed's context axis is all-to-all, which it calls Ulysses; its experts are in
# `deepspeed.moe.layer`. Horovod has neither, only an `alltoall` with uneven splits to build on.

# %% [markdown]
# ## Popular claims, tested
#
# - **"Ring attention is an approximation."** Refuted: equal to one process up to rounding, measured above.
# - **"FlashAttention makes memory linear, so long contexts fit."** The scores' part, yes. The rest is linear, and at
#   131,072 tokens it is 584 GB in the model of the question.
# - **"Communication of a ring is free."** From $2F/\beta$ positions per rank on: some thousands on NVLink, some tens
#   of thousands on InfiniBand, fewer with grouped-query heads.
# - **"All-to-all sends less than a ring."** With a key head for each query head: $\frac{8}{n}$ against 6. With 8
#   query heads per key head it does from 7 ranks on: $\frac{36}{n}$ against 6. Nothing hides it, and key heads limit
#   the ranks.
# - **"Splitting a sequence into equal pieces splits the work equally."** Not under a causal mask: nearly twice an even
#   share for the last rank.
# - **"Mixtures of experts are free parameters."** The work per token stays the same. But they need memory, four
#   all-to-alls per layer, and time to wait for the fullest expert.
# - **"Load balance is a matter of quality."** It is a matter of time first: the layer takes as long as its fullest
#   rank.

# %% [markdown]
# ## Lab
#
# The same on your own hardware, as a plain script. In a terminal, on four CPU ranks, with the reference and with what
# you wrote in this notebook:
#
# ```
# distlab lab 11 --ranks 4 --impl reference
# distlab lab 11 --ranks 4 --impl mine --trace traces
# ```
#
# The same by torchrun, which is also how it runs on GPUs (`--nproc-per-node` is their number; 2, 4 or 8):
#
# ```
# torchrun --nproc-per-node 4 lessons/11_long_context_and_experts/lab.py --impl reference
# ```
#
# `lab_reference.md` next to it has the output to compare with.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. Take one million tokens ($2^{20}$) and the 7B model of the question, with only the scores recomputed. On how many
#    GPUs do its activations fit, if 40 GB of each GPU's 80 are for them?
# 2. A ring of 16 GPUs over InfiniBand (50 GB/s), 794 TFLOP/s each, 32 query and 8 key heads. How long must the whole
#    sequence be for the ring to hide?
# 3. Straight pieces on 32 ranks: how many times an even share has the last rank?
# 4. A layer of width 4,096 in 16 bits, 8,192 tokens per rank, top 2, 8 ranks: how much does a rank send in a forward
#    and a backward pass? How long does that take at 50 GB/s?
# 5. Eight experts on eight ranks, one of them asked twice as often as each of the others. How much of the time is an
#    average rank busy?

# %% tags=["nbval-check-output"]
kept = LAYERS * activation_bytes_per_layer(H, HEADS, 2**20, 1, recompute="selective")
print(f"1. {kept / 1e9:,.0f} GB: {-(-kept // 40e9):.0f} GPUs")
print(f"2. {2 * flops / infiniband / 4:,.0f} positions a rank, {16 * 2 * flops / infiniband / 4:,.0f} in all")
print(f"3. {(2 * 32 - 1) / 32:.2f} times: (2n - 1) / n")
moved = 4 * 7 / 8 * 2 * 8192 * 4096 * 2
print(f"4. {moved / 1e6:.0f} MB in four all-to-alls: {moved / 50e9 * 1e3:.1f} ms")
print(f"5. the fullest has 2 of 9 parts, the mean is 9/8: busy {9 / 8 / 2:.0%}")

# %%
ranks.close()

# %% [markdown]
# ## What to read next
#
# - Liu, Zaharia, Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite Context*, 2023: the ring, and
#   when it hides its messages.
# - Jacobs et al., *DeepSpeed Ulysses*, 2023: the other way, with all-to-all.
# - Fedus et al., *Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity*, 2021:
#   one expert per token, capacity and the balance loss.
#
# **Next: lesson 12.** A run on many ranks must survive the loss of one: checkpoints that are whole at every moment, and
# a run that goes on as if nothing had happened.
#
# ## Sources
#
# - Dao et al. 2022, *FlashAttention* (arXiv:2205.14135): attention in blocks, and its backward pass from two numbers a
#   query. Milakov, Gimelshein 2018 (arXiv:1805.02867): the running softmax.
# - Liu, Zaharia, Abbeel 2023, *Ring Attention with Blockwise Transformers* (arXiv:2310.01889): the ring, and when it
#   hides. Zhu 2024 (ring-flash-attention) and Llama 3 (arXiv:2407.21783, section 3.3.2): two chunks per rank.
# - Jacobs et al. 2023, *DeepSpeed Ulysses* (arXiv:2309.14509): all-to-all.
# - Korthikanti et al. 2022 (arXiv:2205.05198): activations of a layer.
# - Shazeer et al. 2017 (arXiv:1701.06538): mixtures of experts. Lepikhin et al. 2020, *GShard* (arXiv:2006.16668):
#   capacity and who is dropped. Fedus et al. 2021, *Switch Transformers* (arXiv:2101.03961): one choice, and the
#   balance loss (equations 4 to 6). Jiang et al. 2024, *Mixtral of Experts* (arXiv:2401.04088).
# - Wang et al. 2024 (arXiv:2408.15664): the bias. DeepSeek-AI 2024, *DeepSeek-V3* (arXiv:2412.19437, sections 2.1.2
#   and 4.2). DeepEP's README: two levels. Gale et al. 2022, *MegaBlocks* (arXiv:2211.15841): dropless.
# - Source of torch 2.13 (`distributed/tensor/experimental`), Megatron-LM (its arguments), torchtitan
#   (`config/parallelism.py`) and DeepSpeed (`moe/layer.py`). Read 2026-11.
# - In this repository: `distlab/context_parallel/` and `distlab/expert_parallel/`; both `__init__` say in which order.
