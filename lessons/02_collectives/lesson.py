# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # 2. Collectives
#
# **90 minutes.** Needs lesson 01 ([ranks](../GLOSSARY.md#rank), send and receive, [latency](../GLOSSARY.md#latency) and
# [bandwidth](../GLOSSARY.md#bandwidth)). Afterwards you can
#
# - build [ring](../GLOSSARY.md#ring-all-reduce), tree, [halving-doubling](../GLOSSARY.md#halving-doubling) and
#   [hierarchical all-reduce](../GLOSSARY.md#hierarchical-all-reduce) from send and receive;
# - derive the bytes and the steps of each, and measure them;
# - predict which one wins on PCIe, NVLink, InfiniBand and Ethernet.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You train a model with 250 million parameters on 64 GPUs. Each GPU has its own wire: HDR InfiniBand, 25 GB/s each way.
# Forward and backward take 300 ms. Then every GPU holds 1 GB of gradients (4 bytes each) of its own samples, and before
# the update all 64 need the sum. That is an **[all-reduce](../GLOSSARY.md#all-reduce)**: every rank gives a tensor,
# every rank gets the sum. A call that all ranks make together, like this one, is a
# **[collective](../GLOSSARY.md#collective)**.
#
# The first version that comes to mind sends everything to rank 0. Rank 0 adds up and sends the sum to all others. The
# next picture shows this for 4 ranks. Each row is one rank's wire, and a box is a message of 1 GB. Look at rank 0: its
# wire is busy all the time, while the wires of the others mostly do nothing. How can all wires share this work? That
# is the question of this lesson.

# %%
from distlab.trace import Span, Trace
from simulator.viz import draw_timeline


def through_rank_0(n, message_ns=40_000_000):  # 1 GB at 25 GB/s
    messages = [(other, 0) for other in range(1, n)] + [(0, other) for other in range(1, n)]
    for number, (source, to) in enumerate(messages):
        start_ns, end_ns = number * message_ns, (number + 1) * message_ns
        yield Span(source, "communication", f"to rank {to}", "send", start_ns, end_ns, 10**9)
        yield Span(to, "communication", f"from rank {source}", "recv", start_ns, end_ns, 10**9)


naive = Trace.from_spans(through_rank_0(4))
words = "A sum through rank 0: its wire carries every message, one after another"
show(draw_timeline(naive, title=words))

# %% [markdown]
# With 64 ranks it is the same picture with 126 messages. What does that cost in each step?

# %% tags=["nbval-check-output"]
num_ranks, num_bytes, wire_bytes_per_s = 64, 1e9, 25e9
in_and_out_s = 2 * (num_ranks - 1) * num_bytes / wire_bytes_per_s
print(f"rank 0 takes in 63 GB and sends out 63 GB: {in_and_out_s:.2f} s for each step of 0.30 s of work")
print(f"the GPUs compute {0.3 / (0.3 + in_and_out_s):.0%} of the time")

# %% [markdown]
# Sixty-four GPUs that work 6 %<!--out--> of the time do the work of four. More GPUs make it worse: rank 0's wire
# carries more with each one. In part 2 you build a ring by which the same sum takes 79 ms.

# %% [markdown]
# ## 1. Pass whole tensors around a ring
#
# No rank should be the bottleneck. So let all ranks do the same thing: put the n ranks in a ring, and let each send
# only to the next one. In the first step every rank sends its own tensor to the right. In each later step it sends on
# what has just come from the left. After n-1 steps every tensor has passed every rank, and a rank that adds up all
# that passes has the sum.
#
# How much does each rank send? Answer before you read on: type a number, or press Show me.

# %%
guess = predict("4 ranks, a tensor of 1 MB: how many MB does each rank send?", unit="MB")
guess

# %% [markdown]
# ### Exercise 02.repair: spot the bug
#
# A colleague wrote this relay. It was tested on 2 ranks, where it is right. On 3 ranks the sum is wrong. A fault of
# this kind stood in a widely copied tutorial
# ([pytorch issue 31572](https://github.com/pytorch/pytorch/issues/31572)). Find it and repair it. Run first the cell,
# then the check below it, as often as you like; the check tells you whose tensor is missing.
#
# `exchange(Receive(a, left), Send(b, right))` starts both at once and waits for both: a is filled, b is sent. In a
# ring every rank sends and receives in the same step. If every rank began with a plain send, all would wait for a
# rank that receives.
#
# *Budget:* n-1 steps, (n-1) S bytes sent by each rank, for a tensor of S bytes. A group may be smaller than all ranks:
# take rank and size from the group, as the code does.

# %% exercise="02.repair"

# %% [markdown]
# ### What does the relay send?
#
# The recorder counts what each rank hands to the network. `record` runs a function on n ranks and returns what they
# did.


# %%
def record(fn, n, length=12_000):
    """Run fn(tensor) on n ranks, each with its own float32 tensor, and return the calls of the second run."""
    with Ranks(n) as ranks:
        for _ in range(2):  # the first run opens the connections
            ranks.run(lambda: fn(torch.full((length,), 1.0 + dist.get_rank())).numel())
        return ranks.records()


def sent_of(records, length=12_000):
    """Return what the busiest rank sent: times the tensor, and in how many messages."""
    most = max(records.sent_bytes(rank) for rank in records.ranks)
    messages = max(records.rank(rank).num_calls("send") for rank in records.ranks)
    return most / (4 * length), messages


# %% tags=["nbval-check-output"]
guess.lock()
for n in (2, 3, 4):
    relayed = record(relay_all_reduce, n)
    times, messages = sent_of(relayed)
    print(f"{n} ranks: each sends {times:.2f} times the tensor; messages: {messages}")

# %% [markdown]
# The relay as it was recorded, on 4 ranks. Count the arrows that leave one rank: each of them is a whole tensor.

# %%
from simulator.viz import draw_message_diagram

guess.lock()
words = "The relay: each rank sends a whole tensor to the next one, three times"
show(draw_message_diagram(relayed, title=words))

# %%
print(guess.compare(times * 1.0))  # of the last line: 4 ranks, 1 MB

# %% [markdown]
# So each rank sends (n-1) S bytes. Everything flows in and out at the same time, which halves the time of the sum at
# rank 0. But it still grows with every rank: on the 64 GPUs of the question each wire would carry 63 GB, which takes
# 2.5 s. And since the sums are right, no test of values finds this waste. Only counting bytes does.
#
# This mistake is not invented. Gloo, the library behind torch's CPU ranks, lists it among its algorithms as
# [`allreduce_ring`](https://github.com/pytorch/gloo/blob/main/docs/algorithms.md) (P-1 steps, P x S bytes), next to the
# better one that you build now.

# %% [markdown]
# ## 2. How little can a rank send?
#
# **The waste.** In the relay every rank adds up the whole sum. The same additions are done n times.
#
# **The idea.** Cut the tensor into n chunks, and let each rank be responsible for one of them. Then
#
# 1. **[reduce-scatter](../GLOSSARY.md#reduce-scatter):** chunk c of all ranks is added up at rank c. Afterwards each
#    rank holds one finished chunk.
# 2. **[all-gather](../GLOSSARY.md#all-gather):** every rank gets the finished chunks of all others.
#
# **The bytes.** A chunk has S/n bytes. In the first half each rank sends every chunk except its own, once: n-1
# chunks. In the second half it passes on n-1 finished chunks. Together
#
# $$2\,(n-1)\,\frac{S}{n} \;=\; 2\,\frac{n-1}{n}\,S \;<\; 2\,S$$
#
# whatever n is. It cannot be less without help from the network's switches. Take one element. To become one sum, n
# values need n-1 messages; then n-1 ranks still lack the sum, and each needs one more message. So every byte of the
# tensor is sent 2 (n-1) times, by n ranks together: 2 (n-1)/n S for each, if they share the work evenly.
#
# **The route.** Chunk c starts at rank c+1, goes round the ring, and each rank adds its own part, until it ends at rank
# c. All n chunks travel at the same time, each one rank behind the other, so every wire is busy in every step:
#
# ```
# 4 ranks, the first half: who sends which chunk to the next rank
#            rank 0   rank 1   rank 2   rank 3
# step 0     chunk 3  chunk 0  chunk 1  chunk 2
# step 1     chunk 2  chunk 3  chunk 0  chunk 1
# step 2     chunk 1  chunk 2  chunk 3  chunk 0      rank 3 sends chunk 0 to rank 0, which completes it
# ```
#
# Follow chunk 0: rank 1 sends its own part to rank 2, rank 2 adds and sends to rank 3, rank 3 adds and sends to rank 0.

# %% [markdown]
# ### Exercise 02.ring_reduce_scatter
#
# Write the first half. The tensor is one row of L elements; `tensor.tensor_split(n)` cuts it into n chunks, which are
# views: changing a chunk changes the tensor. Where n does not divide L the first chunks are one element longer. With
# fewer elements than ranks some are empty: `exchange` sends nothing for an empty tensor, so you need no special case.
#
# Receive into a tensor of its own, then add that to the chunk in place (`chunk += received`). `chunk = chunk +
# received` would make a new tensor, which no other code sees.
#
# *Budget:* n-1 messages from each rank, all of them to the next rank; (n-1)/n S bytes.

# %% exercise="02.ring_reduce_scatter"

# %% [markdown]
# ### Exercise 02.ring_all_gather
#
# Now the second half. Each rank comes with its own chunk filled; the rest of its tensor is whatever stood there. In
# step 0 a rank can only send its own chunk, since it has no other. Afterwards it sends on what has just come.
#
# *Budget:* as before. Fill the tensor that you were given, and return it.

# %% exercise="02.ring_all_gather"

# %% [markdown]
# ### Your ring, whole


# %%
def ring_all_reduce(tensor, group=None):
    """Sum over all ranks in place: reduce-scatter, then all-gather."""
    ring_reduce_scatter(tensor, group)
    return ring_all_gather(tensor, group)


# %% tags=["nbval-check-output"]
for n in (2, 3, 4):
    times, messages = sent_of(record(ring_all_reduce, n))
    print(f"{n} ranks: {times:.4f} times the tensor; 2(n-1)/n = {2 * (n - 1) / n:.4f}; {messages} messages")

import inspect

from distlab.collectives import plain_ring_all_reduce

print("the library's plain ring: {:.4f} times; {} messages".format(*sent_of(record(plain_ring_all_reduce, 4))))
print(inspect.getsource(plain_ring_all_reduce).rpartition('"""\n')[2])

# %% [markdown]
# The formula, measured. The library's `plain_ring_all_reduce` is the same ring in one function: compare its loops with
# yours. A chunk's sum ends one rank earlier there.
#
# Here is your ring, step by step, from what the recorder saw. Each rank has a column for every chunk and a row for
# every rank: a filled cell says that this rank's part is already in that chunk. A chunk with all four parts turns dark.
# Press play, or move the slider.
#
# The recorder sees messages, not chunk numbers. So a chunk's letter is that of the rank that sends it first: A, which
# rank 0 sends first, is your chunk 3.

# %%
from simulator.viz import ring_panel

my_ring = record(ring_all_reduce, 4)
frames = ring_panel(my_ring)
frames

# %%
frames.controls["step"].value = 3  # the last step that adds: now each rank finishes its own chunk
print(frames.text)

# %% [markdown]
# ### Do all ranks have the same sum?
#
# Both rings are right up to rounding. But floating point sums depend on the order, and here the two differ in a way
# that matters: replicas that add different bits drift apart, step by step.


# %%
def distinct_results(fn, n=4):
    """Return how many different sums the n ranks end with, bit for bit."""

    def body():
        values = torch.randn(10_000, generator=torch.Generator().manual_seed(dist.get_rank()))
        return fn(values).numpy().tobytes()

    return len(set(run(body, n)))


# %% tags=["nbval-check-output"]
print("relay:", distinct_results(relay_all_reduce), "different sums on 4 ranks")
print("ring: ", distinct_results(ring_all_reduce), "sum on 4 ranks")

# %% [markdown]
# In the relay each rank adds in a different order. In the ring one rank finishes a chunk and the others copy its bits.
#
# ## Is it true that all-reduce does not get slower with more GPUs?
#
# One reads: "a ring all-reduce takes the same time on any number of GPUs". The bytes say so: 2 (n-1)/n S is never more
# than 2 S. But each of the 2 (n-1) steps also waits for one message's latency. With the two numbers of lesson 01, a
# latency and a bandwidth for every message, the ring takes
#
# $$T_\text{ring} = 2\,(n-1)\,\alpha + 2\,\frac{n-1}{n}\,\frac{S}{\beta}$$
#
# with α = 5 µs (assumed: a few µs is usual) and β = 25 GB/s for HDR InfiniBand (data sheet, ConnectX-6, 2020).

# %% tags=["nbval-check-output"]
alpha, beta = 5e-6, 25e9
print("  ranks    1 GB: wire + latencies      1 MB: wire + latencies")
for n in (2, 8, 64, 512, 4096):
    wire, waits = 2 * (n - 1) / n / beta * 1e3, 2 * (n - 1) * alpha * 1e3  # ms for each GB, and ms
    print(f"{n:7}  {1e9 * wire:8.1f} + {waits:6.2f} ms        {1e6 * wire:8.3f} + {waits:6.2f} ms")

# %% [markdown]
# **True for large tensors, false for small ones.** For 1 GB the wire takes 40 ms<!--out--> on 2 ranks and never more
# than 80 ms<!--out-->. The latencies show only on thousands of ranks (on 4096 they add half as much again). For 1 MB on
# 64 ranks the wire takes 0.08 ms<!--out--> and the latencies 0.63 ms<!--out-->: eight times as long. The two are equal
# where S/n, one chunk, has α β = 5 µs x 25 GB/s = 125 kB. **A ring is good as long as its chunks are large.** That is
# why gradients are joined into [buckets](../GLOSSARY.md#bucket) before they are sent (lesson 03), and why there are
# other algorithms.
#
# And the 64 GPUs of the question: 2 x 63/64 x 1 GB / 25 GB/s = 79 ms<!--out-->, instead of five seconds.

# %% [markdown]
# ## 3. Few steps, with a tree
#
# In a ring a message goes from rank to rank, and the last rank gets it after n-1 steps. If every rank that has it sends
# it to one more, the number of ranks that have it doubles in each step:
#
# ```
# step 0   0 -> 1                        2 ranks have it
# step 1   0 -> 2   1 -> 3               4
# step 2   0 -> 4   1 -> 5   2 -> 6  ... 8
# ```

# %%
steps_guess = predict("How many steps until 1,000 ranks have it?", unit="steps")
steps_guess

# %% [markdown]
# ### Exercise 02.tree_broadcast
#
# Write it for any root and any number of ranks, 3 and 5 too. The trick for the root: renumber the ranks so that the
# root stands at place 0, and turn places back into ranks when you send.
#
# *Budget:* ceil(log2 n) steps; the root sends at most ceil(log2 n) messages. Ranks and root are counted within the
# group.

# %% exercise="02.tree_broadcast"

# %% [markdown]
# ### Who tells whom, and when?
#
# Your broadcast on 8 ranks, as the recorder saw it: a line for each rank, an arrow for each message, time to the right.

# %%
my_tree = record(tree_broadcast, 8)
title = "A tree reaches 8 ranks in 3 steps: whoever has the tensor sends it on"
show(draw_message_diagram(my_tree, title=title))

# %% [markdown]
# Seven messages, as in a chain; but at most three follow one another. How does that grow?

# %% tags=["nbval-check-output"]
import math

steps_guess.lock()
for n in (2, 8, 64, 1000):
    print(f"{n:5} ranks: ring {n - 1:3} steps, tree {math.ceil(math.log2(n)):2}")

# %%
print(steps_guess.compare(math.ceil(math.log2(1000)), how="counted"))

# %% [markdown]
# Run the film backwards and you have a **tree reduce**: in each step half of the ranks that are left hand their tensor
# to the other half, who add it. Reduce to rank 0, then broadcast, and you have an all-reduce in 2 ceil(log2 n) steps.
# The library has it. What does it cost in bytes? Rank 0 takes in and sends out the whole tensor in every step.

# %% tags=["nbval-check-output"]
from distlab.collectives import tree_all_reduce

for name, fn in (("ring", ring_all_reduce), ("tree", tree_all_reduce)):
    times, messages = sent_of(record(fn, 8))
    print(f"{name}: on 8 ranks the busiest rank sends {times:.2f} times the tensor, in {messages} messages")

# %% [markdown]
# The tree's rank 0 sends 3 tensors<!--out--> down, and before that it takes in 3 on the way up: 6 steps, each of a
# whole tensor. The ring needs 14 steps<!--out-->, each of an eighth. Few latencies or few bytes?

# %% [markdown]
# ## 4. Few bytes *and* few steps
#
# Put the ranks' numbers in binary. In the step of distance d a rank's partner is the rank whose number differs in one
# binary digit, the one that counts d: `rank ^ d`. For 4 ranks the distances are 2, then 1:
#
# 1. **Halving.** Each pair cuts what it has in two. The lower rank keeps the first half, the other the second; each
#    sends away the half that it does not keep, and adds what comes. After one step a rank is responsible for S/2, then
#    S/4, and after log2(n) steps for S/n, finished.
# 2. **Doubling.** The same pairs in reverse order give each other what is finished: S/n, then 2S/n, ... S/2.
#
# The halves add up: S/2 + S/4 + ... + S/n = (n-1)/n S on the way down, and the same on the way out. As few bytes as the
# ring, and 2 log2(n) steps like the tree.

# %% [markdown]
# ### Exercise 02.halving_doubling
#
# Write it for a power of two: 1, 2, 4, ... ranks. Halves are `block.tensor_split(2)`, so they may differ by an element.
#
# *Budget:* 2 log2(n) steps, 2 (n-1)/n S bytes sent by each rank.

# %% exercise="02.halving_doubling"

# %% tags=["nbval-check-output"]
sent = {}
for name, fn in (("ring", ring_all_reduce), ("tree", tree_all_reduce), ("halving-doubling", halving_doubling)):
    times, messages = sent_of(record(fn, 8))
    sent[f"{name}, {messages} messages"] = times
    print(f"{name:17} {times:.2f} times the tensor in {messages:2} messages")

# %%
from simulator.viz import draw_bars

words = {"unit": "S", "title": "Halving-doubling sends as little as the ring, in fewer messages"}
show(draw_bars(sent, subtitle="what the busiest of 8 ranks sent, as recorded", **words))

# %% [markdown]
# *Bonus.* Any other number of ranks? `distlab/collectives/halving.py` folds it: with 6 ranks, two pairs act as one
# rank each, so 4 are left. That costs one more whole tensor before, and one after.

# %% [markdown]
# ## 5. Predict: which one wins?
#
# Every algorithm is now two numbers: how many latencies follow one another, and how many bytes go over the busiest
# wire.
#
# ### Exercise 02.times
#
# Write the prediction: seconds for `num_bytes` on n ranks, for `"ring"`, `"tree"` (reduce, then broadcast, whole
# tensors, any n) and `"halving_doubling"` (n a power of two).

# %% exercise="02.times"

# %% [markdown]
# ### On which wire does which one win?
#
# The links are presets of the simulator: bandwidths from data sheets and standards or, for NVLink 3, fitted to
# published measurements; most latencies are assumptions. The source of each stands in
# `simulator/hardware/presets.toml`.

# %% tags=["nbval-check-output"]
from simulator.hardware import presets as hardware

print(f"{'8 ranks':16} {'latency':>8} {'GB/s':>6}   {'4 kB: ring, tree':>20}   {'100 MB: ring, tree':>20}")
for name in ("ethernet-10g", "pcie4-x16", "infiniband-hdr", "nvlink3"):
    wire = hardware.link(name).protocols[-1]  # the one for large messages
    small, large = (all_reduce_times(size, 8, wire.latency_s, wire.bytes_per_s) for size in (4e3, 1e8))
    print(f"{name:16} {wire.latency_s * 1e6:5.1f} us {wire.bytes_per_s / 1e9:6.1f}", end="   ")
    print(f"{small['ring'] * 1e6:7.0f}, {small['tree'] * 1e6:7.0f} us", end="   ")
    print(f"{large['ring'] * 1e3:8.2f}, {large['tree'] * 1e3:6.2f} ms")

# %% [markdown]
# The wires differ by a factor of almost 200 in bandwidth, and the pattern is the same on all of them: the tree for
# small tensors, the ring for large. Only the size at which they change places moves.
#
# Now all three. Choose a link and a number of ranks; the bar below the lines says who wins at which size. Both axes are
# logarithmic. Your tree is the *binomial tree* there.

# %%
from simulator.viz import race_panel

panel = race_panel(num_ranks=8, algorithms=("ring", "binomial_tree", "halving_doubling"))
panel

# %%
panel.controls["link"].value = "infiniband-hdr"
print(panel.text, end="\n\n")
panel.controls["num_ranks"].value = 6  # no power of two
print(panel.text)

# %% [markdown]
# On paper halving-doubling is never slower than the ring, where n is a power of two. Then why does NCCL use rings and
# trees? Three things that this model leaves out:
#
# - **Not a power of two.** With 6 or 12 ranks the fold adds 2 S bytes and two steps, and the ring wins for large
#   tensors: read the second line above.
# - **Whom it talks to.** A ring's neighbours can be put side by side. In the largest step of halving-doubling, half of
#   the machines exchange S/2 with the other half at once, through the narrowest part of a network.
# - **Pieces.** A ring or a tree can be cut into pieces that follow each other, so that adding up hides behind sending,
#   and latencies behind bytes. NCCL's *double* tree sends half of the tensor through each of two trees, in pieces. It
#   has the tree's few steps and, for large tensors, nearly the ring's bytes. That is `"tree"` in the simulator.

# %% [markdown]
# ## 6. Run: the race on this machine
#
# Four ranks on your machine, connected by loopback (`backend="gloo"`): memory copies, shared by all ranks. Commit to a
# guess first.

# %%
race_guess = predict("4 ranks here, 4 kB: ring time divided by halving-doubling time?", unit="x")
race_guess


# %% [markdown]
# One block times each program once, in turn, so that a slow moment hits all of them; a call takes as long as its
# slowest rank. Nothing else should run now, and the numbers still jump: a laptop is a noisy place.


# %%
def time_all(programs, sizes, blocks):
    """Run on each rank: seconds of each program at each size, [size, program, block]."""
    import time
    from functools import partial

    from distlab.measure import interleave

    def seconds(fn, tensor):
        dist.barrier()
        start = time.perf_counter()
        fn(tensor)
        return time.perf_counter() - start

    tensors = [torch.zeros(size // 4) for size in sizes]
    return [interleave([partial(seconds, fn, tensor) for fn in programs], blocks) for tensor in tensors]


# %%
import numpy as np

race_guess.lock()
sizes = [4_096, 65_536, 524_288, 2_097_152, 8_388_608]
names = ["ring", "binomial_tree", "halving_doubling", "torch"]
programs = [ring_all_reduce, tree_all_reduce, halving_doubling, dist.all_reduce]
with Ranks(4, backend="gloo", record=False) as ranks:
    per_rank = np.array(ranks.run(time_all, programs, sizes, 15))
measured_s = np.median(per_rank.max(axis=0), axis=-1)  # slowest rank, then the middle one of the blocks
for size, row in zip(sizes, measured_s, strict=True):
    print(f"{size:8} bytes  " + "  ".join(f"{name} {s * 1e3:.2f} ms" for name, s in zip(names, row, strict=True)))

# %%
print(race_guess.compare(measured_s[0, 0] / measured_s[0, 2]))

# %% [markdown]
# ## 7. Compare: measured over predicted
#
# Fit a latency and a bandwidth to the **ring's** times alone. Then predict the other two, whose times the fit has
# never seen, and compare with what was measured.

# %%
from simulator import fit_link
from simulator.viz import draw_race

here = fit_link(sizes, measured_s[:, 0], 4, "ring", name="this machine")
wire = here.protocols[-1]
print(f"fitted to the ring: {wire.latency_s * 1e6:.0f} us per message, {wire.bytes_per_s / 1e9:.2f} GB/s")
shown = ("ring", "binomial_tree", "halving_doubling")
points = {name: (sizes, measured_s[:, i]) for i, name in enumerate(shown)}
title = "Lines: predicted from the ring's times alone. Points: measured here"
show(draw_race(here, 4, shown, measured=points, title=title))

# %% [markdown]
# The bar tells who wins by the prediction; the lowest point tells who won here. Where the points leave the lines, the
# model is wrong about this machine. It gives each rank a wire of its own, as GPUs and machines have. Here all ranks
# share the memory and the cores. What counts then is what **all** ranks send together:
#
# | 4 ranks | messages of all ranks | bytes of all ranks |
# |---|---|---|
# | ring | 4 x 6 = 24 | 4 x 1.5 S = 6 S |
# | tree | 3 up + 3 down = 6 | 6 S |
# | halving-doubling | 4 x 4 = 16 | 4 x 1.5 S = 6 S |
#
# The same bytes, and a quarter of the messages: on a shared machine the tree should win at small sizes, and neither
# should win at large ones. Fit that second model to the ring too, and compare the two. `Steps(6, 1.5)` means 6
# latencies and 1.5 S bytes, one after the other.

# %%
from simulator.hardware.cost import Steps, all_reduce_steps, steps_s
from simulator import fit_steps

own = {"ring": Steps(6, 1.5), "tree": Steps(4, 4), "halving_doubling": Steps(4, 1.5)}  # a wire for each rank
shared = {"ring": Steps(24, 6), "tree": Steps(6, 6), "halving_doubling": Steps(16, 6)}  # one wire for all
for what, table in (("a wire for each rank", own), ("one wire for all", shared)):
    fitted = fit_steps(sizes, measured_s[:, 0], table["ring"])
    off = {
        name: [abs(steps_s(size, steps, fitted) / row[i] - 1) for size, row in zip(sizes, measured_s, strict=True)]
        for i, (name, steps) in enumerate(table.items())
    }
    print(f"{what}: the tree is off by {np.median(off['tree']):.0%}", end=", ")
    print(f"halving-doubling by {np.median(off['halving_doubling']):.0%} (median of the five sizes)")

# %% [markdown]
# Halving-doubling is off by the same in both: its messages and bytes are multiplied by four, and so are those of the
# ring that was fitted. So look at the tree. A wire for each rank predicts far too long a time for it; one wire for all
# comes much closer. **The model that is right for a cluster is the wrong one for a laptop.** Neither counts the time to
# add up, nor that a rank waits for a core before it can answer. Part 9 has a wire of the first kind.

# %% [markdown]
# ## 8. Two kinds of wire
#
# Eight GPUs of a DGX A100 talk over NVLink at 240 GB/s (fitted to published nccl-tests, 2025); machines talk over
# InfiniBand at 25 GB/s for each GPU (HDR). One ring through all 64 GPUs moves at the pace of its slowest wire. Better:
#
# 1. reduce-scatter **inside** each machine, over the fast wire: each GPU holds 1/8 of the machine's sum;
# 2. all-reduce that eighth **across** machines: GPU i of each machine with GPU i of all others;
# 3. all-gather **inside**.
#
# With g ranks in a machine and m machines a rank sends 2 (g-1)/g S inside, and across only 2 (m-1)/m S/g.
#
# ### Exercise 02.hierarchical
#
# You have all the parts; from here on use the library's, which are your ring cut into pieces:
# `collectives.ring_reduce_scatter(tensor, group)`, `collectives.ring_all_reduce` and `collectives.ring_all_gather`. The
# first one returns this rank's chunk, a view into the tensor.
#
# *Budget:* 2 (m-1)/m S/g bytes between machines for each rank.

# %% exercise="02.hierarchical"

# %% [markdown]
# ### What does it save?

# %% tags=["nbval-check-output"]
from simulator import all_reduce_s, hierarchical_all_reduce_s

inside, across = hardware.link("nvlink3"), hardware.link("infiniband-hdr")
for size in (1e9, 1e6):
    flat = all_reduce_s(size, 64, across)  # a ring at the pace of its slowest wire
    cards = all_reduce_s(size / 8, 64, across)  # eight rings at the same time, each with an eighth
    levels = hierarchical_all_reduce_s(size, 8, 8, intra_node=inside, inter_node=across)
    print(f"{size / 1e6:5.0f} MB on 8 machines of 8: flat ring {flat * 1e3:.2f} ms,", end=" ")
    print(f"eight flat rings {cards * 1e3:.2f} ms, two levels {levels * 1e3:.2f} ms")

# %%
show(draw_race("nvlink3", 64, inter_node="infiniband-hdr"))

# %% [markdown]
# Across machines each wire now sums an eighth. The question's 79 ms<!--out--> become 16 ms<!--out-->. For 1 MB the gain
# is in the steps: 14 inside and 14 across, instead of 126.
#
# **The flat ring is better than its name where a machine has several cards.** One ring leaves a machine by one of its
# eight InfiniBand cards. NCCL lays a ring for each card, and each carries an eighth. So at 1 GB its flat all-reduce
# beats two levels that run one after the other. Two levels win where steps count, and where eight GPUs share one card.
#
# For tensors left of the border in the picture, flat halving-doubling with
# its 12 steps still wins. Two levels of trees would be the next idea. (The small kink in the hierarchical line: there
# NVLink changes from its protocol for small messages, with a short latency, to the one for large messages.)

# %% [markdown]
# ## 9. Run: three wires of one machine
#
# The race of part 6 went over **loopback**: sockets that never leave the machine. Two more wires are at hand.
#
# - **Memory.** `backend="shared"`: ranks copy straight through memory that all of them map. Ranks of one Linux
#   machine do so if you name no backend.
# - **Throttled.** `nodes=4` puts each rank into a **[node](../GLOSSARY.md#node)** of its own, as if it were a
#   machine. `between="10MB/s,1ms"` is the speed of its wire to the other nodes: a rank's message waits
#   until those before it are through its wire.
#
# Both need Linux: on macOS do not run these cells, read what stands below them, and go on at "Production".
#
# The last one does what its label says, so you need no fit to predict it. Here the fastest of several turns counts:
# other programs can only add time. Commit to a number first.

# %%
slow_guess = predict("4 ranks, 64 kB, 10 MB/s and 1 ms: tree time divided by ring time?", unit="x")
slow_guess

# %%
from distlab.comm import Nodes

WIRES = {
    "memory": {"backend": "shared"},
    "loopback": {"backend": "gloo"},
    "throttled": {"nodes": Nodes(4, between="10MB/s,1ms")},
}
TRIED = {"memory": sizes[::2], "loopback": sizes[::2], "throttled": sizes[:3]}  # bytes: large ones for fast wires
on_wire = {}
for name, options in WIRES.items():
    with Ranks(4, record=False, **options) as ranks:
        times = np.array(ranks.run(time_all, programs[:3], TRIED[name], 15))
    on_wire[name] = times.max(axis=0).min(axis=-1)  # [size, program]: the slowest rank in the calmest turn

# %%
print(slow_guess.compare(on_wire["throttled"][1, 1] / on_wire["throttled"][1, 0]))

# %% [markdown]
# Print the latency and the bandwidth of each wire, fitted to the ring's times, and the fastest program at each size:

# %%
SHORT = ("ring", "tree", "halving")
for name, measured in on_wire.items():
    wire = fit_link(TRIED[name], measured[:, 0], 4, "ring").protocols[-1]
    best = [f"{size // 1024} kB {SHORT[row.argmin()]}" for size, row in zip(TRIED[name], measured, strict=True)]
    print(f"{name:10} {wire.latency_s * 1e6:5.0f} us {wire.bytes_per_s / 1e6:8.1f} MB/s   {', '.join(best)}")

# %% [markdown]
# And draw the throttled wire against its label: the lines know 1 ms and 10 MB/s, and no measurement at all.

# %%
from distlab.plan import Link, Protocol

label = Link("10 MB/s, 1 ms", (Protocol(1e-3, 10e6),))
points = {name: (TRIED["throttled"], on_wire["throttled"][:, i]) for i, name in enumerate(shown)}
title = "Lines: from the wire's label alone. Points: measured here"
show(draw_race(label, 4, shown, measured=points, title=title))

# %% [markdown]
# On the throttled wire each rank has a wire of its own and sleeps while its bytes travel. So the first model,
# `all_reduce_times`, is nearly right here: the points lie near the lines. What is left over is the time to copy and to
# wake up. On the other two wires what counts is the work of the cores, which all ranks share.
#
# ### Where does the time of one ring go?
#
# The model says: six equal steps, each a latency and a chunk. For 480 kB on this wire a step takes 1 ms and 120 kB /
# 10 MB/s = 12 ms. `time_beside` times some all-reduces on four ranks. It could calibrate between them; here nothing is
# to be measured before, since the label says all.

# %%
from distlab.measure import overlay_of, time_beside
from distlab.trace import Span, SpanWriter, Trace


def timed(num_windows=5, steps_per_window=4):
    tensor, spans = torch.zeros(120_000), SpanWriter(dist.get_rank())
    counts = {"num_windows": num_windows, "steps_per_window": steps_per_window}
    return time_beside(lambda: ring_all_reduce(tensor), lambda: None, spans, **counts)


def six_steps(_):
    ends_ns = [step * 13_000_000 for step in range(7)]
    steps = [(f"step {step + 1}", "send", ends_ns[step], ends_ns[step + 1], 120_000) for step in range(6)]
    return Trace.from_spans(Span(rank, "communication", *step) for rank in range(4) for step in steps)


# %%
def measure():
    with Ranks(4, **WIRES["throttled"]) as ranks:
        reports, calls = ranks.run(timed), ranks.records().to_trace()
    return overlay_of(reports, six_steps, calls=calls.select(calls.is_word("kind", "send")))


overlay = measure()
print(overlay)

# %% [markdown]
# The upper row of each pair has the sends of the all-reduce of median length, the pale row the six steps. Half of the
# measured all-reduces end in the grey band; the prediction lets them end between the dotted lines.

# %%
from simulator.viz import Timeline

timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, overlay.predicted.duration_s / 2)  # the first three predicted steps

# %% [markdown]
# A rank starts when its process gets a core; the model starts all at 0. Once a rank is late, its right neighbour waits,
# and the lateness travels around the ring: one slow rank slows all. A send ends when the other side has taken it, so a
# long box is often a wait for a different rank.
#
# Now the two levels of part 8, by the clock: four ranks in two nodes, memory inside, 10 MB/s between. Your
# `hierarchical_all_reduce` takes the two groups of `node_groups()`: "local" has the ranks of one's own node, "node" one
# rank of each node, those with the same place in theirs.

# %%
from distlab.comm import node_groups


def time_levels(num_bytes, blocks):
    """Run on each rank: seconds of a flat ring and of two levels, by block."""
    groups = node_groups()

    def two_levels(tensor):
        hierarchical_all_reduce(tensor, groups["local"], groups["node"])

    return time_all([ring_all_reduce, two_levels], [num_bytes], blocks)[0]


# %%
with Ranks(4, nodes=Nodes(2, between="10MB/s,1ms"), record=False) as ranks:
    flat_s, two_s = np.array(ranks.run(time_levels, 2_097_152, 9)).max(axis=0).min(axis=-1)
memory = fit_link(TRIED["memory"], on_wire["memory"][:, 0], 4, "ring")
said_s = hierarchical_all_reduce_s(2_097_152, 2, 2, intra_node=memory, inter_node=label)
bars = {
    "flat ring": {"predicted": all_reduce_s(2_097_152, 4, label) * 1e3, "measured": flat_s * 1e3},
    "two levels": {"predicted": said_s * 1e3, "measured": two_s * 1e3},
}
words = {"unit": "ms", "title": f"Two levels take {two_s / flat_s:.2f} of the flat ring's time"}
show(draw_bars(bars, subtitle="2 MiB, four ranks in two nodes, 10 MB/s between", **words))

# %% [markdown]
# A rank of the flat ring sends 1.5 S. Where its neighbour sits in the other node, all of it crosses the slow wire. With
# two levels each rank sends S/2 across. So the *busiest wire* carries a third of the bytes, and the all-reduce takes
# about a third of the time, since memory takes little. In all less is saved: 3 S crosses in the flat ring, from two of
# the four ranks, and 2 S in two levels, from all four. With ONE wire between the nodes the gain would be 1.5x, not 3x.
# On the 8 machines of 8 GPUs above the busiest wire carries a ninth, and nearly as much crosses in all.

# %% [markdown]
# ## Production
#
# In a program you call `dist.all_reduce`. Is its sum the same? And how far apart are the two in time? (From the race
# above, where they took turns, on 8 MB.)


# %%
def against_torch(length=2_097_152):
    values = torch.randn(length, generator=torch.Generator().manual_seed(dist.get_rank()))
    ours, theirs = values.clone(), values.clone()
    ring_all_reduce(ours)
    dist.all_reduce(theirs)
    return float((ours - theirs).abs().max() / theirs.abs().max())


worst = max(run(against_torch, 4))
print(f"largest relative difference to dist.all_reduce: {worst:.1e} (float32 rounds at 6e-8)")
ratios = per_rank.max(axis=0)[-1][0] / per_rank.max(axis=0)[-1][3]
print(f"your ring takes {np.median(ratios):.2f} times as long as torch's ({ratios.min():.2f} to {ratios.max():.2f})")

# %% [markdown]
# The library's `ring_all_reduce` is your ring in pieces; `python benchmarks/collectives.py` times it against torch's.
#
# On GPUs `dist.all_reduce` calls NCCL, which picks the algorithm for each call by size, ranks and wires. You can
# overrule it, mostly to find out whether its choice was right:
#
# | what | where it is set |
# |---|---|
# | ring, tree, or in the switch | `NCCL_ALGO=Ring`, `Tree`, `CollnetDirect`, `CollnetChain`, `NVLS`, `NVLSTree` |
# | low latency or full bandwidth | `NCCL_PROTO=LL`, `LL128`, `Simple` |
# | which algorithm, on MPI | Open MPI: `coll_tuned_use_dynamic_rules=1`, `coll_tuned_allreduce_algorithm=N` |
# | two levels | Horovod: `HOROVOD_HIERARCHICAL_ALLREDUCE=1` (`horovodrun --hierarchical-allreduce`) |
# | join small tensors first | Horovod `HOROVOD_FUSION_THRESHOLD`, DDP `bucket_cap_mb`, Megatron `--ddp-bucket-size` |
# | reduce-scatter alone | DeepSpeed: `reduce_scatter` of ZeRO; Megatron-LM: `--use-distributed-optimizer` |
# | scatter inside, reduce across | torchtitan: `data_parallel_shard_degree`, `data_parallel_replicate_degree` |
#
# `nccl-tests` prints two bandwidths. *algbw* is S / time. *busbw* is 2 (n-1)/n S / time: what each wire carries, which
# you may compare with the wire's data sheet at any n. You know now where the factor comes from.

# %% [markdown]
# ## Lab
#
# The race as a script, for the CPU or for GPUs, with your functions or the library's:
#
# ```
# distlab lab 02 --ranks 4
# distlab lab 02 --ranks 4 --impl mine --trace traces/
# torchrun --nproc-per-node 8 lessons/02_collectives/lab.py --impl reference
# ```
#
# `lab_reference.md` in this lesson's folder shows what it printed elsewhere.

# %% [markdown]
# ## Questions
#
# **1.** The question's 1 GB on 64 GPUs, with 10 Gb/s Ethernet instead of InfiniBand: how long is the ring?

# %% tags=["nbval-check-output"]
slow = hardware.link("ethernet-10g")
print(f"{all_reduce_s(1e9, 64, slow):.2f} s: five times the 0.3 s of work; now compress, or sum less often")

# %% [markdown]
# **2.** From which size on does a ring beat a binomial tree, on 64 ranks and HDR InfiniBand?

# %% tags=["nbval-check-output"]
size = 1.0
while (t := all_reduce_times(size, 64, 5e-6, 25e9))["ring"] > t["tree"]:
    size *= 1.01
print(f"from {size / 1e3:.0f} kB on: {1e6 * t['ring']:.0f} us each")

# %% [markdown]
# **3.** `nccl-tests` on 8 H200 reached a bus bandwidth of 367.2 GB/s (ml-engineering, 2025). How long was 16 GiB?

# %% tags=["nbval-check-output"]
print(f"{2 * 7 / 8 * 2**34 / 367.2e9 * 1e3:.1f} ms")

# %% [markdown]
# **4.** A switch that adds up (NVLink SHARP) takes chunk c from all ranks and gives the sum to rank c. Rank c sends it
# once more, and the switch copies it to all. How much does a rank send, compared with a ring on 8 ranks?

# %% tags=["nbval-check-output"]
ring, switch = all_reduce_steps(8, "ring"), all_reduce_steps(8, "in_network")
print(f"ring {ring.bytes_factor:.3f} S; switch S for n chunks and S/n for the sum: {switch.bytes_factor:.3f} S")
print(f"{ring.bytes_factor / switch.bytes_factor:.2f} times less")

# %% [markdown]
# **5.** Your colleague's all-reduce gives the right sums, and eight GPUs are no faster than four. What do you look at
# first?
#
# <details><summary>Answer</summary>
#
# The bytes that each rank sends, divided by S. About 2 is a ring; n-1 is the relay of part 1; n-1 on rank 0 and 1 on
# all others is a sum at rank 0. `recorded()` tells you in one run.
#
# </details>

# %% [markdown]
# ## What to read next
#
# - P. Patarasuk and X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009: the proof
#   that no all-reduce can send fewer bytes than your ring.
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of collective communication operations in MPICH*, 2005: how a
#   library chooses between a tree, a ring and halving-doubling.
# - NVIDIA, *NCCL user guide*, 2025: the collectives of GPUs, and the variables that choose among them.
#
# **Next: lesson 3.** It puts an all-reduce into a training step, and hides it behind the backward pass. There the
# seconds that you computed here are weighed against the seconds of the work itself.
#
# ## Sources
#
# - P. Patarasuk and X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, 2009: the ring,
#   and why it cannot send less.
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of collective communication operations in MPICH*, 2005: tree,
#   halving-doubling, and the fold.
# - P. Sanders, J. Speck, J. L. Träff, *Two-tree algorithms for full bandwidth broadcast, reduction and scan*, 2009.
# - X. Jia et al., *Highly scalable deep learning training system with mixed-precision*, 2018: two levels.
# - NVIDIA, *NCCL user guide: environment variables*; Gloo, *docs/algorithms.md*; Horovod, *docs/tensor-fusion.rst*.
# - In this repository: `distlab/collectives/ring.py`, `tree.py`, `halving.py`, `hierarchical.py`, in this order.
