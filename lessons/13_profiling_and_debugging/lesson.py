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
# # 13. Profiling and debugging
#
# 90 minutes. Comes after lesson 1 (messages and hangs), lesson 3 (data parallel) and lesson 12 (checkpoints and
# failures). You need no GPU: four processes on this machine are the four ranks.
#
# Afterwards you can
#
# - read a [trace](../GLOSSARY.md#trace) of several ranks: what is exposed, who is late, and what each of them costs;
# - say whether a step waits for its loader, for computing or for the wire, and feed it data that arrives in time;
# - read a hang: who waits for whom, and the first call in which a rank does what the others do not;
# - find a flipped bit in replicas that should be equal, with few comparisons.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You train on 64 H100s, for some 2.50 dollars an hour each: 115,200 dollars a month. You have predicted the step
# (lesson 3): so much computing, so much communication. The measured step is **1.3 times** as long. Nothing is broken:
# losses fall, no line is red. But 0.3 of every 1.3 hours buy nothing: 23 %, or 26,600 dollars a month. Whose fault is
# it?
#
# Below are four ranks in the same situation. Their layers *sleep* where a GPU would compute, so that four processes do
# not fight for the few cores of this machine. Their gradients are real and really travel, over a wire that is slowed
# down to 30 MB/s (`throttled`). Backward takes twice as long as forward, and the all-reduce of a layer's gradient
# starts as soon as that layer's backward is over. Before the update all ranks add up one more number, the norm of the
# gradients. `Profiler` marks the sections of a step and records every call.
#
# One thing is wrong in this run. The picture at the end of the next cells is one step, as it was measured. The upper
# row of a rank is what it does, blue with an S where it waits; the lower row is what its wire carries.

# %%
import random
import time

from distlab.comm import throttled
from distlab.profile import Profiler

LAYER_S, NUM_LAYERS, WIRE = 0.005, 4, 30e6  # forward of one layer, in seconds; bytes per second


def batches(load_s):
    for _ in range(8):
        time.sleep(load_s)  # the loader reads a batch
        yield None


def backward(gradients, layer_s, overlap):
    for gradient in gradients:
        time.sleep(2 * layer_s)
        yield from [gradient] if overlap else []  # this layer is done: its gradient may travel
    yield from [] if overlap else gradients


# %%
def train(slow=(), load=(), overlap=True, wire=WIRE):
    rank, profiler = dist.get_rank(), Profiler(skip=2)
    layer_s, gradients = LAYER_S * dict(slow).get(rank, 1), [torch.zeros(50_000) for _ in range(NUM_LAYERS)]
    with throttled(wire):
        for _ in profiler.steps(batches(dict(load).get(rank, 0.001))):
            with profiler.section("forward"):
                time.sleep(NUM_LAYERS * layer_s)
            with profiler.section("backward"):
                works = [dist.all_reduce(one, async_op=True) for one in backward(gradients, layer_s, overlap)]
            with profiler.section("sync"):
                [work.wait() for work in works]
                dist.all_reduce(torch.zeros(1))  # the norm of all gradients
            with profiler.section("optimizer"):
                time.sleep(layer_s)
    return profiler.profile()


# %%
from simulator.viz import draw_bars, draw_timeline


def show_step(step, words):
    """Draw what ranks did and sent, and say the same in words."""
    shown = step.select(~step.is_word("lane", "wait"))
    show(draw_timeline(shown, title=words))


ranks = Ranks(4, timeout_s=120)
sick = ranks.run(train, {random.Random(13).randrange(4): 1.4})[0]
show_step(sick.middle_step(), "One step of four ranks, as measured: three of them wait long for their gradients")

# %% [markdown]
# Predict first. Computing takes 4 layers of 5 ms forward and of 10 ms backward, and 5 ms in the optimizer; the loader
# takes 1 ms. An all-reduce of 200 kB sends 300 kB per rank: 10 ms on this wire, as long as the backward of a layer.
# Which of the four can backward not hide? How long should a step take? Type a number into the box that the next cell
# shows, and press Commit.

# %%
guess_0 = predict("How long should a step take without any fault?", unit="ms")
guess_0

# %%
well = ranks.run(train)[0]
well_ms, sick_ms = (1e3 * sorted(profile.step_s)[3] for profile in (well, sick))
print(guess_0.compare(well_ms))
print(f"with the fault {sick_ms:.0f} ms: {sick_ms / well_ms:.2f} times as long")

# %% [markdown]
# On paper: 1 ms of loading, 20 ms forward, 40 ms backward and 5 ms in the optimizer are 66 ms. Three of the four
# all-reduces travel while the next layer's backward computes. The last one cannot: its layer is the last of backward.
# That adds 10 ms: 76 ms. Measured, it is some ms more: a sleep lasts longer than asked, and the norm is a message too.
#
# ## What each rank says of itself
#
# Most people look at the profile of rank 0 and stop there. So let each rank say how long it was in its section "sync",
# where it waits for gradients.


# %%
def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    words = {"unit": unit, "title": title}
    show(draw_bars(numbers, subtitle=subtitle, **words))


def length_ms(profile, rank, name):
    """Mean length of a rank's spans of a name."""
    spans = profile.trace.select(profile.trace.is_word("name", name) & (profile.trace.rank == rank))
    return float((spans.end_ns - spans.start_ns).mean()) / 1e6


sync_ms = {f"rank {rank}": length_ms(sick, rank, "sync") for rank in range(4)}
show_bars(sync_ms, "ms", "How long each rank waits for its gradients, in a step")

# %% [markdown]
# Three of four profiles say the same: *the network is slow*. Someone will now buy a faster one. The fourth rank has
# the best profile of all. Which rank would you take out of this run?

# %%
guess_1 = predict("Which rank is to blame?", unit="")
guess_1

# %% [markdown]
# Keep your answer; you can soon compute it. First the question that comes before: how much of the communication costs
# anything at all?
#
# ## Exposed communication
#
# Bytes that travel while a rank computes cost nothing. What counts is the time in which calls are under way *and the
# rank computes nothing*: [exposed](../GLOSSARY.md#exposed) communication. A trace gives it by interval arithmetic: a
# list of pairs (start, end) for what was computed, and a second one for calls.
#
# ### Exercise: exposed
#
# Write it for one rank. Spans come in any order and overlap each other: buckets travel two at a time, sections lie in
# other sections. Time in which two calls are under way counts once.

# %% exercise="13.exposed"


# %%
def spans_of(profile, rank):
    """What a rank computed and what it sent in the middle step, as pairs of start and end."""
    step = profile.middle_step()
    own = step.select(step.rank == rank)
    lanes = (
        own.select(own.is_word("kind", "data", "F", "B", "optimizer")),
        own.select(own.is_word("kind", "all_reduce")),
    )
    return [list(zip(lane.start_ns.tolist(), lane.end_ns.tolist(), strict=True)) for lane in lanes]


def exposed_ms(profile, rank):
    return exposed_ns(*spans_of(profile, rank)) / 1e6


# %% [markdown]
# Now two healthy runs: one as above, one that starts all of its all-reduces after backward (`overlap=False`). How much
# longer will its step be?

# %%
guess_2 = predict("How much longer is a step whose gradients travel after backward?", unit="ms")
guess_2

# %%
apart = ranks.run(train, (), (), False)[0]
apart_ms = 1e3 * sorted(apart.step_s)[3]
print(guess_2.compare(apart_ms - well_ms))
print(f"exposed on rank 0: {exposed_ms(well, 0):.1f} ms with overlap, {exposed_ms(apart, 0):.1f} ms without")

# %%
show_step(apart.middle_step(), "Without overlap the wire is idle while ranks compute, and ranks while it is not")

# %%
shown = {f"rank {rank}": {"healthy": exposed_ms(well, rank), "sick": exposed_ms(sick, rank)} for rank in range(4)}
show_bars(shown, "ms", "Exposed communication of the middle step, by rank")

# %% [markdown]
# Three all-reduces that were hidden are not hidden any more: 3 x 10 ms. That is about the difference between the two
# healthy runs. In the sick run most of what is exposed is *waiting* for a rank that has not come yet. On each rank a
# call is under way from the moment that this rank makes it. On a GPU that looks even worse: a kernel that waits for
# other ranks keeps its GPU "100 % busy". **Waiting is not working**, and one rank's profile cannot tell them apart.
# Several ranks' can.
#
# ## Who is late?
#
# A collective begins when its last rank has come. So look at arrivals: for each call, when did each rank come? All
# others wait for the last one. Without it the call could begin when the last but one has come: so its lateness costs
# the time between these two.
#
# ### Exercise: late
#
# Return what each rank's lateness costs in seconds, added up over all calls.

# %% exercise="13.late"

# %% [markdown]
# Which arrival counts? Starting a call blocks no rank. The wait at the end does, once per step. So take the start of
# the last gradient's all-reduce: then a rank has computed all it can.


# %%
def nth_calls(profile, number):
    """Of each rank, start and end of all-reduce number 0, 1, ... of every step, in nanoseconds."""
    found = []
    for rank in profile.ranks:
        rows = profile.trace.select(profile.trace.is_word("kind", "all_reduce") & (profile.trace.rank == rank))
        rows = rows.take(rows.start_ns.argsort(kind="stable"))
        found.append([(span.start_ns, span.end_ns) for span in list(rows)[number :: NUM_LAYERS + 1]])
    return found


def lateness_ms(profile):
    arrivals = [[start / 1e6 for start, _ in calls] for calls in nth_calls(profile, NUM_LAYERS - 1)]
    return [cost / len(arrivals[0]) for cost in cost_of_lateness(arrivals)]


# %%
costs_ms = lateness_ms(sick)
worst = costs_ms.index(max(costs_ms))
show_bars({f"rank {rank}": cost for rank, cost in enumerate(costs_ms)}, "ms", "What each rank's lateness costs a step")
print(guess_1.compare(worst, how="computed"))
print(f"without its lateness a step would take {sick_ms - max(costs_ms):.0f} ms; a healthy one took {well_ms:.0f} ms")

# %% [markdown]
# Exposed and late together say where a step goes. The library's `plain_profile` does it on one screen
# (`distlab/profile/plain.py`). It cuts the step wherever anything begins or ends, and asks of each piece: does the rank
# compute? If not, is it waiting for a rank, are bytes on the way (exposed), or neither (idle)?

# %%
from distlab.profile import plain_profile


def four_parts(profile):
    """Where each rank's time goes in the middle step, in milliseconds."""
    lanes = dict.fromkeys(("data", "F", "B", "optimizer"), "compute") | {"all_reduce": "communication"}
    step = [span._replace(lane=lanes[span.kind]) for span in profile.middle_step() if span.kind in lanes]
    return [{part: time_ns / 1e6 for part, time_ns in parts.items()} for parts in plain_profile(step)]


guess_1.lock()
shown = {f"rank {rank}": parts for rank, parts in enumerate(four_parts(sick))}
show_bars(shown, "ms", "The straggler computes, and the others wait for it")

# %% [markdown]
# The rank with the *shortest* all-reduce is the slow one, the [straggler](../GLOSSARY.md#straggler). The others wait
# in theirs for it. The library says the same of the same trace (`distlab profile` does it for files), and it knows the
# sections. In its table `sync` is the time in which a rank waits for bytes, and `idle` the time in which it waits for a
# rank that has not come yet. `sent` is how long bytes travelled, and `hidden` the part of it under computing. The line
# *Critical path* goes from the end of the step back to its start, and takes at each place what was waited for last.
# These spans decide how long the step is: what is not among them may be shorter, and nothing is won.

# %%
from distlab.profile import report

guess_1.lock()
print(report(sick))

# %% [markdown]
# ## Machines have clocks of their own
#
# Here all ranks read one clock. On several machines each has its own, and clocks are milliseconds apart: more than a
# collective takes. But ranks leave a collective at nearly the same time. So what a rank must add to its times is the
# median difference of ends. (Starts do not help: they cannot tell a late rank from a clock that is ahead.) And no rank
# leaves before a different one has come: that bounds each offset from both sides. `distlab profile` does this with
# files of several machines. Here each rank's times are moved by a number that it does not know.

# %%
from distlab.profile.read import align
from distlab.trace import Trace

rng, whole = random.Random(5), sick.trace
hidden_ns = [0] + [rng.randrange(-40_000_000, 40_000_000) for _ in range(3)]
moved = Trace.concatenate(whole.select(whole.rank == rank).shifted(by) for rank, by in enumerate(hidden_ns))
for rank, found in align(moved)[1].items():
    text = f"rank {rank}: clock moved by {hidden_ns[rank] / 1e6:+7.2f} ms, found {-found.add_ns / 1e6:+7.2f} ms"
    print(f"{text}; off by {abs(found.add_ns + hidden_ns[rank]) / 1e3:.0f} us, at most {found.error_ns / 1e3:.0f}")

# %% [markdown]
# Good enough to see who is late by milliseconds, and it took no protocol: only calls that were made anyway. Lateness
# that is shorter than its error it cannot see. In lesson 14 ranks ask each other's clock directly.
#
# ## What costs most?
#
# A slow loader, a slow rank, a slow wire: in a profile each of them is a longer step, and other ranks that wait. To
# tell them apart, look at the rank that comes last. All others wait for that one, whatever they do meanwhile. The next
# picture cuts "sync" in two: blue while bytes travel, grey while the rank waits for others.

# %%
from simulator.viz import draw_sections

runs = {"well": well, "sick": sick, "loader": ranks.run(train, (), {1: 0.1})[0]}
runs["wire"] = ranks.run(train, (), (), True, WIRE / 4)[0]
words = "Rank 1 loads 100 ms longer: the three others wait for it at the end of the step"
show(draw_sections(runs["loader"].mean_s(), title=words))

# %% [markdown]
# ### Exercise: limit
#
# From the spans of all ranks, say which of three a step waits for: its loader, its own computing ("step"), or the wire.
# Two traps. A loader may read *while* the rank computes: that costs nothing. And who comes early waits long in its
# sync: that is not the wire.

# %% exercise="13.limit"


# %%
def step_spans(profile):
    """Of each rank the spans of the middle step: loads, computing, sync; in nanoseconds."""
    kinds = {"data": "load", "forward": "compute", "backward": "compute", "optimizer": "compute", "sync": "sync"}
    found = [{"load": [], "compute": [], "sync": []} for _ in profile.ranks]
    for span in profile.middle_step():
        if span.name in kinds:
            found[span.rank][kinds[span.name]].append((span.start_ns, span.end_ns))
    return found


found = {name: limit_of_step(step_spans(profile)) for name, profile in runs.items()}
shown = {f"{name}: {what}": 100 * share for name, (what, share) in found.items()}
show_bars(shown, "%", "The sick run waits for a rank that computes, not for the wire", "share of the step")

# %% [markdown]
# Begin with what it names: to make the rest faster wins little. The *step*: give a slow machine back, or compute less.
# The *wire*: send during backward, send fewer bytes (lesson 5), or use a different one (lesson 10). The *loader*: the
# next part. (`limit_of` of `distlab.profile` judges a whole trace.)
#
# ## Data that arrives in time
#
# A rank takes b samples a step from a loader that makes r a second. Then no step is shorter than b / r, however fast
# its GPU. Text is cheap to *read*: a token has 2 bytes, and 64 GPUs, each at 10,000 a second, read 1.3 MB/s. *Making*
# samples is what costs: a tokenizer, a decoder of images, a disk behind a network. So make tokens once, before
# training. The next cell writes Python's documentation as *shards*: files of tokens, and an index with their sizes and
# checksums. (A token is a byte here, a document a paragraph of at most 1,025 bytes.)

# %%
import tempfile
from pathlib import Path

import numpy as np

from distlab.data import python_documentation
from distlab.loading import TokenFiles, write_tokens

CONTEXT, folder = 256, tempfile.TemporaryDirectory()
tokens = Path(folder.name, "tokens")
parts = [np.frombuffer(part[:1025], np.uint8) for part in python_documentation().split(b"\n\n") if len(part) > 1]
write_tokens(tokens, parts, vocab_size=256, shard_tokens=2**17)
files = TokenFiles(tokens, CONTEXT)
shards = [path.stat().st_size // 2 for path in sorted(tokens.glob("tokens-*.bin"))]
print(f"{len(parts)} documents, {sum(shards):,} tokens in shards of {shards}: {len(files)} samples of {CONTEXT}")

# %% [markdown]
# Files are *mapped* into memory: the system reads a page when it is touched, and all ranks of a node share it. A sample
# is found by its number. So a checkpoint needs one number, the **position**: the samples that all ranks together have
# used up. `distlab/loading/plain.py` is such a loader on one screen. (The exercise leaves the shuffle out.)
#
# ### Exercise: resume
#
# A run of some ranks was killed in the middle of a shard, and goes on with more of them, or fewer. Where does each rank
# read its next samples? Each sample once, none lost.

# %% exercise="13.resume"

# %%
from distlab.loading import PlainLoader

plain = PlainLoader(tokens / "tokens-00000.bin", CONTEXT, 8, rank=1, world_size=4)  # of the first shard
plain.position = 120  # where a checkpoint stood
print(f"rank 1 of 4 reads a batch {tuple(next(plain).shape)}; then the position is {plain.position}")
reads = next_reads([130] * 4, shards, CONTEXT, 7, 3)
for rank, own in enumerate(reads):
    print(f"rank {rank} of 3 reads", ", ".join(f"shard {shard} from token {start:,}" for shard, start in own))
for sample, (shard, start) in enumerate(sum(reads, []), 4 * 130):
    raw = np.fromfile(tokens / f"tokens-{shard:05}.bin", np.uint16)[start : start + CONTEXT + 1]
    assert (raw == files[sample][: len(raw)].numpy()).all()

# %% [markdown]
# The library's [loader](../GLOSSARY.md#loader) is torch's DataLoader with a position. Its workers read ahead: what they
# have read and nobody trained on is not counted, so it is read again after a kill. Four ranks take 5 steps; three go on
# for 5 more. A resume on files that were changed meanwhile is refused.

# %%
from itertools import islice

from distlab.loading import Loader, open_tokens


def some_steps(state):
    loader = Loader(open_tokens(tokens, CONTEXT), 24, num_workers=1)
    loader.load_state_dict(state or loader.state_dict())
    batches = list(islice(loader, 5))
    return loader.state_dict(), batches


before, three = ranks.run(some_steps, None), Ranks(3, echo=False)
after = three.run(some_steps, before[0][0])
three.close()
got = [torch.cat([own[step] for _, own in life]) for life in (before, after) for step in range(5)]
alone = list(islice(Loader(files, 24), 10))
assert all(map(torch.equal, got, alone))
print(f"position {before[0][0]['position']}, then {after[0][0]['position']}: ten batches, those of one process")

# %% [markdown]
# ### Measure the loader alone
#
# Before anyone blames a GPU: how many samples does the loader make when nobody computes? torch's DataLoader has two
# means: processes that make samples (`num_workers`), and [prefetch](../GLOSSARY.md#prefetch): batches that each of them
# makes ahead (`prefetch_factor`).

# %%
from torch.utils.data import DataLoader, DistributedSampler


class FarAway(TokenFiles):
    def __getitem__(self, sample):
        time.sleep(0.01)  # a disk behind a network
        return super().__getitem__(sample)


far = FarAway(tokens, CONTEXT)
mine = DistributedSampler(far, num_replicas=4, rank=0)  # without it each rank has all samples
theirs = DataLoader(far, batch_size=8, sampler=mine, num_workers=2, prefetch_factor=2)
print(f"{len(theirs)} batches for rank 0; the first: {tuple(next(iter(theirs)).shape)}")

# %%
from distlab.loading import loader_rate

rates = {count: loader_rate(Loader(far, 8, num_workers=count), seconds=0.5) for count in (0, 1, 2)}
for count, rate in rates.items():
    print(f"num_workers={count}: {rate.samples_per_s:4.0f} samples/s ({rate.low:.0f} to {rate.high:.0f})")

# %% [markdown]
# (Two workers' batches come in pairs: hence the wide range.) One worker makes no more than none, but it works *while*
# the rank computes. A step takes 8 samples and computes for 50 ms. How long is it, once what was made ahead is used up?

# %%
guess_3 = predict("How long is a step with one worker?", unit="ms")
guess_3


# %%
def measured_ms(count):
    times = []
    for _ in islice(Loader(far, 8, num_workers=count), 16):
        time.sleep(0.05)  # computes
        times.append(time.perf_counter())
    return 1e3 * np.median(np.diff(times[5:]))  # the first batches were made ahead


batch_ms = {count: 8e3 / rate.samples_per_s for count, rate in rates.items()}
foretold = {count: max(50, batch_ms[count]) if count else 50 + batch_ms[0] for count in rates}
measured = {count: measured_ms(count) for count in rates}
print(guess_3.compare(measured[1]))

# %%
guess_3.lock()
shown = {f"num_workers={count}": {"predicted": foretold[count], "measured": measured[count]} for count in rates}
show_bars(shown, "ms", "Enough workers hide the loader", "8 samples of 10 ms and 50 ms of computing a step")

# %% [markdown]
# Without workers the two add up. With workers the longer one counts: $\max(\text{computing}, b / r)$. (A cluster file
# gives r to the simulator, as `loader_samples_per_s`.) With two, b / r is below 50 ms: more of them would win nothing.
# And workers share a node's cores: where samples cost computing and not waiting, r stops growing when cores run out.
#
# ### Unequal lengths
#
# Documents have unequal lengths, and a batch is a rectangle. *Padding* fills each row up to the longest: computed, and
# thrown away. [Packing](../GLOSSARY.md#packing) lays several documents in a row, until nothing more fits. How much of a
# batch is padding?

# %%
from distlab.loading import PackedDocuments

ROW, texts = 1024, TokenFiles(tokens)  # without a context its items are the documents
inputs = texts.lengths - 1  # the last token of a document is a target alone
drawn = np.random.default_rng(0).permutation(inputs)[: len(inputs) // 8 * 8].reshape(-1, 8)
waste = {"padded to the longest of 8": 1 - inputs.mean() / drawn.max(1).mean()}
waste |= {"packed in order": PackedDocuments(texts, ROW, in_order=True).waste}
waste |= {"packed, longest first": PackedDocuments(texts, ROW).waste}
show_bars({name: 100 * one for name, one in waste.items()}, "%", "Packed, a batch has next to no padding")

# %% [markdown]
# But now a token could attend to a different document. A mask forbids that: each token sees its own document up to
# itself. With positions that begin at 0 in each document, each of them gets what it would get alone.

# %% tags=["nbval-check-output"]
from torch.nn.functional import scaled_dot_product_attention as attention

from distlab.loading import document_mask, join

row = join([torch.arange(4), torch.arange(3), torch.arange(4)], 9)  # three documents, and one place left
mask = document_mask(row.documents)
for line, place in zip(mask[0].int().tolist(), row.positions.tolist(), strict=True):
    print(f"position {place} sees", " ".join("#" if seen else "." for seen in line))
x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(0))
packed = attention(x, x, x, attn_mask=mask)
for own in (slice(0, 3), slice(3, 5), slice(5, 8)):
    torch.testing.assert_close(packed[:, own], attention(x[:, own], x[:, own], x[:, own], is_causal=True))

# %% [markdown]
# Where nothing is packed, ranks have unequal numbers of tokens, and the slowest decides. Four ranks share 16 documents
# and need 50 us per token.

# %%
guess_4 = predict("How many times the mean rank's tokens has the slowest of four, each with 4 documents?", unit="times")
guess_4

# %% [markdown]
# ### Exercise: balance
#
# Which samples are in the batch is the order's business. Who takes which is free: the gradient is a sum. So share them
# out such that no rank is late. With `same_count` ranks also take equally many, as where rows must fill a tensor.

# %% exercise="13.balance"


# %%
def work_on(shares):
    dist.barrier()
    start = time.perf_counter()
    time.sleep(5e-5 * sum(lengths[sample] for sample in shares[dist.get_rank()]))
    dist.barrier()
    return 1e3 * (time.perf_counter() - start)


lengths = drawn[26:28].flatten().tolist()
ways = {"slices": [list(range(4 * rank, 4 * rank + 4)) for rank in range(4)]}
ways |= {"equal counts": share_by_length(lengths, 4, True), "balanced": share_by_length(lengths, 4, False)}
most = {name: max(sum(lengths[sample] for sample in own) for own in shares) for name, shares in ways.items()}
steps_ms = {name: min(max(ranks.run(work_on, shares)) for _ in range(3)) for name, shares in ways.items()}
print(guess_4.compare(4 * most["slices"] / sum(lengths), how="counted"))

# %%
guess_4.lock()
shown = {name: {"predicted": 5e-2 * most[name], "measured": steps_ms[name]} for name in ways}
show_bars(shown, "ms", "Who takes which decides how long all four wait", "16 documents on 4 ranks, 50 us per token")

# %% [markdown]
# Tokens are still not equal, so mean losses do not count alike: weigh each rank's by its share of the tokens (lesson 3;
# `Loader(lengths=...)` shares out and has the `weight`). And a token of a long document costs attention more: then
# work, not length, is what to balance. `attention_work` of `distlab.loading` counts both.
#
# ## A profiler that lies: spot the bug
#
# The next function times the four sections of a step. Its numbers say that communication takes no time at all, and
# that the optimizer is slow. Run the check as it is, read what it says, find the line, repair it. (The same happens on
# a GPU to everyone who reads the clock without waiting for the device: a kernel that was *launched* is not *over*.)

# %% exercise="13.repair"


# %%
def nap(seconds):
    return lambda: time.sleep(seconds)


def timed_step():
    gradients = [torch.ones(50_000) for _ in range(4)]
    with throttled(WIRE):
        return time_sections(nap(0.02), nap(0.04), gradients, nap(0.005), time.monotonic_ns)


names = ("forward", "backward", "sync", "optimizer")
show_bars(
    {name: one / 1e6 for name, one in zip(names, ranks.run(timed_step)[0], strict=True)}, "ms", "Sections, repaired"
)

# %% [markdown]
# ## A hang
#
# A slow step costs 23 %. A hang costs everything. In the next run rank 2 takes a branch in step 1 that does not use
# layer 1: no gradient, no all-reduce.

# %%
from distlab.comm import RankError
from distlab.course.notebook import in_cells


def steps_with_a_branch():
    gradients = [torch.ones(1000 * (layer + 1)) for layer in range(4)]
    for step in range(3):
        used = [layer for layer in range(4) if (dist.get_rank(), step, layer) != (2, 1, 1)]
        works = [dist.all_reduce(gradients[layer], async_op=True) for layer in used]
        [work.wait() for work in works]


four = Ranks(4, backend="shared")  # gloo would end rank 1 in C++, in the middle of a message
try:
    four.run(steps_with_a_branch)
except RankError as error:
    print(in_cells(error).split("\n\n")[0])

# %% [markdown]
# The message comes at once, since every call is recorded with dtype, shape and line. Without a record you have a job
# that stands still, and 64 stacks that all end in `wait`. `distlab where` collects them from any torchrun job on this
# machine, and torch's flight recorder (`TORCH_FR_BUFFER_SIZE=2000`) keeps each rank's last calls. Then you have to
# read them.
#
# ### Exercise: divergence
#
# Given every rank's calls, find the first in which one rank does not do what most do, and say what it did.

# %% exercise="13.divergence"


# %%
def calls_made(ranks):
    """What ranks recorded in their last run, also one that failed."""
    return [[(call.op, call.what) for call in ranks.records().calls(rank)] for rank in range(4)]


made = calls_made(four)
for rank, own in enumerate(made):
    print(f"rank {rank}: " + ", ".join(what.removeprefix("float32") for _, what in own))
print("first divergence: call {}, rank {}: {}".format(*first_divergence(made)))

# %% [markdown]
# All other differences follow from that one. And a hang is not the worst case. Here rank 2 *swaps* two calls of equal
# shape:


# %% tags=["nbval-check-output"]
def swapped():
    rank = dist.get_rank()
    weights, biases = torch.full((3,), 1.0), torch.full((3,), 100.0)
    for tensor in (biases, weights) if rank == 2 else (weights, biases):
        dist.all_reduce(tensor)
    return weights.tolist(), biases.tolist()


for rank, (weights, biases) in enumerate(ranks.run(swapped)):
    print(f"rank {rank}: weights {weights[0]:.0f}, biases {biases[0]:.0f}; expected 4 and 400")

# %% tags=["nbval-check-output"]
print("by operation and shape:", first_divergence(calls_made(ranks)))

# %% [markdown]
# No error, no hang, wrong numbers. Both calls come from one line, the same on every rank, and in operation and shape
# they *are* equal. No record can see that, and torch's `TORCH_DISTRIBUTED_DEBUG=DETAIL` cannot either. Had they been
# made by two lines in exchanged order, `run` would have named these lines. What sees it here: comparing replicas, as in
# the next part. What prevents it: one order that all ranks derive from the same list, never from a dict that each fills
# by itself.
#
# ## The flipped bit
#
# Of 16,384 GPUs in a run of 54 days, six interruptions were silent data corruption (Llama 3's report): a GPU computes
# a wrong number and raises no error. Here are four replicas of a small model. After one step of 64, one bit of one
# weight on one rank is not what it was.

# %%
from distlab.elastic.votes import bit_sum


def new_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train_step(model, optimizer, seed):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True).sin()).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()


# %% [markdown]
# After each step every replica adds up the bits of each tensor as whole numbers (`bit_sum`), a
# [checksum](../GLOSSARY.md#checksum): one flipped bit always changes that sum. The sums stay on the rank. Nothing is
# sent while it trains.


# %%
def train_replicas(flip=None):
    model, rank, sums = new_model(), dist.get_rank(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(64):
        train_step(model, optimizer, 4 * step + rank)
        if flip == (step, rank):
            model[2].weight.data.view(torch.int32)[0, 3] ^= 1 << 22  # one bit of one weight
        sums.append(torch.stack([bit_sum(parameter) for parameter in model.parameters()]))
    return torch.stack(sums), torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


flip = rng.randrange(64), rng.randrange(4)
weights = [found for _, found in ranks.run(train_replicas, flip)]
far = {f"rank {rank}": float(100 * (own - weights[0]).norm() / weights[0].norm()) for rank, own in enumerate(weights)}
show_bars(far, "%", "After 64 steps one replica is a different model", "distance from rank 0's weights, relative")

# %% [markdown]
# Gradients are averaged, so the others learn from the wrong one's gradients all the while: all four are spoilt from
# the flip on. You need the step, to know which checkpoint (lesson 12) is still good, and the rank, to send that
# machine back. How many comparisons does it take to find the step among 64?

# %%
guess_5 = predict("How many comparisons find the first wrong step among 64?", unit="comparisons")
guess_5

# %% [markdown]
# ### Exercise: flip
#
# Every rank has its own table of checksums, a row per step and a column per tensor. Find step, tensor and rank of the
# first difference. Ranks can only talk through collectives, so all must take the same decisions. Budget: one number
# per rank for each look at a step, and as few looks as a search needs.

# %% exercise="13.flip"


# %%
def search(flip):
    sums, _ = train_replicas(flip)
    return find_flip(sums)


found = ranks.run(search, flip)
names = [name for name, _ in new_model().named_parameters()]
step, tensor, rank = found[0]
print(f"flipped: step {flip[0]}, rank {flip[1]}; found: step {step}, rank {rank}, in {names[tensor]}")
looks = ranks.records().rank(0).num_calls("all_gather") - 1
print(guess_5.compare(looks))

# %% [markdown]
# `distlab.elastic.votes.ReplicaVotes` does it in training: a vote every k steps, less than 1 % of a step. Its limit is
# worth
# knowing: what is wrong *before* the average is averaged, and then equal on all ranks. No vote sees that.
# `distlab.profile.anomalies.AnomalyWatch` looks there: it says in which layer of which rank the first NaN appeared.

# %% [markdown]
# ## Production: torch's own profiler
#
# `torch.profiler` writes one file per rank, every kernel in it, each with that machine's own clock. `distlab profile`
# reads such files (also gzipped, also from GPUs), aligns them on their collectives and says the same as above. Nsight
# Systems (`nsys profile`) writes a report of its own, `.nsys-rep` or `.sqlite`: it is refused in words. Look at one
# rank with Nsight, and record all ranks with `torch.profiler`, each in a run of its own. Here is a small model that
# really computes; rank 1 gets a batch three times as large.


# %%
def with_torch_profiler(folder):
    from torch.profiler import ProfilerActivity, profile

    model, rank = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))), dist.get_rank()
    x, sgd = torch.randn(2000 if rank == 1 else 600, 256), torch.optim.SGD(model.parameters(), lr=0.01)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(4):
            model(x).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            sgd.step()
            recorded.step()
    recorded.export_chrome_trace(f"{folder}/rank{rank}.json")


# %%
from distlab.profile import read_files

pair = Ranks(2, echo=False, backend="gloo")  # torch.profiler sees no calls in shared memory
with tempfile.TemporaryDirectory() as folder:
    pair.run(with_torch_profiler, folder)
    print(report(read_files([folder]).measured))
pair.close()

# %% [markdown]
# The same questions with other tools:
#
# | | where does the time go? | who hangs, and where? | are numbers right? |
# |---|---|---|---|
# | distlab | `distlab profile`, `Profiler` | `distlab where` | `ReplicaVotes`, `AnomalyWatch` |
# | torch | `torch.profiler` | flight recorder: `TORCH_FR_BUFFER_SIZE` | `torch.autograd.detect_anomaly` |
# | NVIDIA | `nsys profile` | `NCCL_DEBUG=INFO` | `dcgmi diag` |
# | Megatron-LM | `--log-straggler`, `--timing-log-level` | torch's | `--rerun-mode validate_results` |
# | torchtitan | `profiling.enable_profiling` | `comm.trace_buf_size` | |
# | DeepSpeed | `wall_clock_breakdown`, `flops_profiler` | torch's | |
# | any Python | `py-spy record` | `py-spy dump --pid` | |

# %% [markdown]
# ## Popular claims, tested
#
# The first one with the run of the question. What would a monitor show that counts a GPU as busy while *any* kernel
# runs, one that waits for other ranks as well?


# %%
def busy_shares(profile, rank):
    compute, sent = spans_of(profile, rank)
    step_ns = max(end for _, end in compute + sent) - min(begin for begin, _ in compute + sent)
    works = exposed_ns([], compute)  # the time that spans of computing cover
    return {
        "any kernel runs": 100 * (works + exposed_ns(compute, sent)) / step_ns,
        "it computes": 100 * works / step_ns,
    }


shown = {f"rank {rank}": busy_shares(sick, rank) for rank in range(4)}
show_bars(shown, "%", "A monitor sees four busy ranks; three of them wait", "share of the step of the sick run")

# %% [markdown]
# - **"Utilization is near 100 %, so the GPUs are busy."** Refuted, above: it counts waiting. Compare FLOPs per second
#   with the peak (lesson 3), or compare the ranks.
# - **"Communication takes longest on rank 0, so the network is slow."** Refuted: the healthy ranks have the longest
#   calls. The shortest call of all ranks is the network.
# - **"Gradient traffic costs 5-15 % of a step."** True for a step without stragglers. In the sick run ranks are in
#   "sync" for far more than that, and the network is the same. Lesson 3 has the conditions of that claim.
# - **"Profiling slows training down."** A mark costs microseconds, a recorded call some 30 us; torch.profiler, which
#   writes down every operator, costs more the smaller they are. Profile ten steps, not all: that costs nothing.
# - **"A larger timeout cures a hang."** Refuted: the call that rank 2 left out never comes. A timeout only says how
#   long 64 GPUs wait before you are told.


# %%
def cost_of_a_mark(number=2000):
    profiler, start = Profiler(), time.perf_counter()
    for _ in range(number):
        with profiler.section("forward"):
            pass
    return (time.perf_counter() - start) / number


print(f"a section that is marked takes {1e6 * min(ranks.run(cost_of_a_mark)):.1f} us")

# %% [markdown]
# ## Lab
#
# The lab trains a small GPT with a fault that it draws from a seed: you do not know which. It prints the sections of
# each rank and writes a trace. Name the fault and the rank; the lab says whether that is right, and what it cost.
#
# ```
# distlab lab 13 --ranks 4 --seed 7 --trace traces
# distlab lab 13 --ranks 4 --seed 7 --answer "slow rank 2"
# distlab lab 13 --ranks 4 --fault "flipped bit" --impl mine
# ```
#
# The same by torchrun, which is also how it runs on GPUs (`--nproc-per-node` is their number):
#
# ```
# torchrun --nproc-per-node 4 lessons/13_profiling_and_debugging/lab.py --seed 7
# ```
#
# `lab_reference.md` next to it has the output to compare with.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. Four ranks come to a call at 10, 12, 30 and 13 ms. How much earlier would it begin without the last, and how long
#    do all four wait together?
# 2. A rank computes from 0 to 50 ms. Calls of it are under way from 30 to 60 and from 40 to 55 ms. What is exposed?
# 3. A step computes for 120 ms. 16 samples go into it, and a worker needs 30 ms to make one. How long is a step with
#    no worker, with two and with four, and how many are enough?
# 4. Checksums of 100,000 steps: how many comparisons find the first wrong one?
# 5. A hang of 64 GPUs at 2.50 dollars an hour, with nccl's timeout of 10 minutes: what does it cost before anyone is
#    told?

# %% tags=["nbval-check-output"]
waits = [30 - arrival for arrival in (10, 12, 30, 13)]
print(f"1. {30 - 13} ms earlier; together they wait {sum(waits)} ms")
print(f"2. {exposed_ns([(0, 50)], [(30, 60), (40, 55)])} ms")
print(f"3. {120 + 16 * 30}, {max(120, 16 * 30 // 2)} and {max(120, 16 * 30 // 4)} ms: four are enough")
print(f"4. {1 + (100_000 - 1).bit_length()}: one look at the last step, and one for each halving")
print(f"5. {64 * 2.5 * 10 / 60:.0f} dollars, each time")

# %%
ranks.close()

# %% [markdown]
# ## What to read next
#
# - Dubey et al., *The Llama 3 Herd of Models*, 2024, section 3.3.4: 419 interruptions in 54 days, and how a slow rank
#   was found among 16,384.
# - The documentation of PyTorch's flight recorder: what it keeps, and how its dumps are read.
#
# **Next: lesson 14.** Everything so far ran on one machine. Lesson 14 starts the same ranks on several: torchrun,
# rendezvous, Slurm and Kubernetes.
#
# ## Sources
#
# - Dubey et al. 2024, *The Llama 3 Herd of Models* (arXiv:2407.21783), section 3.3.4: interruptions, among them six by
#   silent data corruption; slow ranks found by comparing groups.
# - Jiang et al. 2024, *MegaScale* (arXiv:2402.15627), section 5: stragglers, hangs and their diagnosis on 10,000 GPUs.
# - Dixit et al. 2021, *Silent Data Corruptions at Scale* (arXiv:2102.11245).
# - Graham 1969, *Bounds on Multiprocessing Timing Anomalies*: the longest first is within 4/3 of the best share.
# - Documentation of torch.profiler, DataLoader, the flight recorder and NCCL's environment variables; arguments of
#   Megatron-LM and DeepSpeed. Read 2026-11.
# - In this repository: `distlab/profile/`, `distlab/loading/`, `distlab/comm/where/`, `distlab/elastic/votes.py`.
