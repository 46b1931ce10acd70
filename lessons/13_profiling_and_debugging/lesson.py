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
# - bring traces of several machines to one clock, and say how far it can be off;
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
def train(slow=(), load=(), overlap=True):
    rank, profiler = dist.get_rank(), Profiler(skip=2)
    layer_s, gradients = LAYER_S * dict(slow).get(rank, 1), [torch.zeros(50_000) for _ in range(NUM_LAYERS)]
    with throttled(WIRE):
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
# collective takes. So let us take the common clock away: each rank's times are moved by a number that you do not know.

# %%
from distlab.trace import Trace

rng = random.Random(5)
hidden_ns = [0] + [rng.randrange(-40_000_000, 40_000_000) for _ in range(3)]
step = sick.middle_step()
moved = Trace.concatenate(step.select(step.rank == rank).shifted(by) for rank, by in enumerate(hidden_ns))
show_step(moved, "With the clocks of four machines, a call is over on one rank before a different one has made it")

# %% [markdown]
# Ranks leave a collective at nearly the same time. That moment is in every trace, on every clock. Arrivals do not
# help: they cannot tell a late rank from a clock that is ahead.
#
# ### Exercise: clocks
#
# Find for each rank what to add to its times. Ends are sometimes seen late (a rank looks when it has time), so take
# the median over calls. And no rank leaves before a different one has come: that bounds every offset, from both sides.

# %% exercise="13.clocks"

# %%
calls = nth_calls(sick, NUM_LAYERS)  # the norm: every rank waits in it, so its end is seen at once
starts, ends = (
    [[call[side] + by for call in own] for own, by in zip(calls, hidden_ns, strict=True)] for side in (0, 1)
)
found_ns = clock_offsets(starts, ends)
for rank, (found, by) in enumerate(zip(found_ns, hidden_ns, strict=True)):
    text = f"rank {rank}: clock moved by {by / 1e6:+7.2f} ms, found {-found / 1e6:+7.2f} ms"
    print(f"{text}: off by {abs(found + by) / 1e3:.0f} us")

# %% [markdown]
# That is good enough to see who is late by milliseconds, and it took no protocol: only calls that were made anyway.
# What it cannot do: see lateness that is shorter than its own error. `distlab profile` aligns files like this, and
# says by how much it may be wrong.
#
# ## What costs most?
#
# A slow loader, a slow rank, a slow network: in a profile each of them is a longer step, and other ranks that wait. To
# tell them apart, ask of each: *how long would the step be without it?* The next picture cuts "sync" in two: blue while
# bytes travel, grey while the rank waits for others.

# %%
sections = {"well": well, "sick": sick, "apart": apart, "loader": ranks.run(train, (), {1: 0.03})[0]}


def rows_of(profile):
    """Of each rank the seconds of data, compute and sync; sync as the rank itself sees it, waiting included."""
    rows = []
    for row in profile.mean_s().values():
        compute = row["forward"] + row["backward"] + row["optimizer"]
        rows.append({"data": row["data"], "compute": compute, "sync": row["sync"] + row["idle"]})
    return rows


for number, row in enumerate(rows_of(sections["loader"])):
    print(f"rank {number}: " + ", ".join(f"{name} {1e3 * seconds:5.1f} ms" for name, seconds in row.items()))

# %%
from simulator.viz import draw_sections

words = "Rank 1 loads 30 ms longer: the three others wait for it at the end of the step"
show(draw_sections(sections["loader"].mean_s(), title=words))

# %% [markdown]
# ### Exercise: dearest
#
# From three numbers per rank, say which of three things costs most, and how much. Take care with "sync": it is waiting
# *and then* the network. Only the rank that comes last does not wait, so the shortest sync is the network's.

# %% exercise="13.dearest"

# %%
for name, profile in sections.items():
    cause, seconds = dearest(rows_of(profile))
    print(f"{name:8} a step of {1e3 * sorted(profile.step_s)[3]:4.0f} ms; dearest: {cause:13} {1e3 * seconds:5.1f} ms")

# %% [markdown]
# Every step has a dearest part, the healthy one too. What to do depends on which part it is. The loader: load ahead,
# with more workers or less work per sample. A slow rank: give that machine back, or give its rank less to do. The
# network: send during backward, send fewer bytes (lesson 5), or use a different wire (lesson 10).
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
guess_3 = predict("How many comparisons find the first wrong step among 64?", unit="comparisons")
guess_3

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
print(guess_3.compare(looks))

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
import tempfile


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
# 3. Rank 0 is in a call from 100 to 140, rank 1 in the same call from 730 to 741, each on its own clock. Between what
#    bounds is the offset of rank 1, and what do the ends say?
# 4. Checksums of 100,000 steps: how many comparisons find the first wrong one?
# 5. A hang of 64 GPUs at 2.50 dollars an hour, with nccl's timeout of 10 minutes: what does it cost before anyone is
#    told?

# %% tags=["nbval-check-output"]
waits = [30 - arrival for arrival in (10, 12, 30, 13)]
print(f"1. {30 - 13} ms earlier; together they wait {sum(waits)} ms")
print(f"2. {exposed_ns([(0, 50)], [(30, 60), (40, 55)])} ms")
print(f"3. from {100 - 741} to {140 - 730}; the ends say {140 - 741}")
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
# - Documentation of torch.profiler, of PyTorch's flight recorder, and of NCCL's environment variables; arguments of
#   Megatron-LM and DeepSpeed. Read 2026-11.
# - In this repository: `distlab/profile/` (its `__init__` says in which order), `distlab/comm/where/`,
#   `distlab/elastic/votes.py`.
