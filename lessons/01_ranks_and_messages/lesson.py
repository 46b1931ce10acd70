# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Ranks and messages
#
# **60 minutes.** You need PyTorch on one device; nothing else, and no GPU.
#
# Afterwards you can
# - start several [ranks](../GLOSSARY.md#rank) and tell what each of them owns,
# - send and receive tensors, in the right order, without waiting forever,
# - cause a [hang](../GLOSSARY.md#deadlock-hang), read what it says, and repair it,
# - measure [latency](../GLOSSARY.md#latency) and [bandwidth](../GLOSSARY.md#bandwidth), and predict how long a message
#   will take.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You train a model of 94 million parameters. On one GPU a step takes **120 ms**. You rent a second GPU in a second
# machine and give each GPU a batch of its own. Now a step takes **135 ms**. The program is right. *Where did 15 ms go?*
#
# The next picture shows this step. The two GPUs are called rank 0 and rank 1 in it; what a rank is, the lesson tells
# soon. Each GPU has two rows: what it computes, and what it sends. Time runs to the right.
# Look at the end, after 120 ms: both GPUs stand still, and only the wire between them works. What decides how long
# that last box is? This lesson answers it, for any wire.

# %%
from distlab.trace import Span, Trace
from simulator.viz import draw_timeline

PARTS_MS = (("compute", "forward", "F", 0, 40), ("compute", "backward", "B", 40, 120))
PARTS_MS += (("communication", "gradients to the other GPU", "send", 120, 135),)
step = Trace.from_spans(
    Span(gpu, lane, name, kind, start * 10**6, end * 10**6)
    for gpu in range(2)
    for lane, name, kind, start, end in PARTS_MS
)
words = "One step on two GPUs: 120 ms of work, then 15 ms in which neither GPU works"
show(draw_timeline(step, title=words))

# %% [markdown]
# Both GPUs compute what they computed before. One thing is new: once per step they must agree on what they learned. So
# each sends its gradients to the other. That is one number of 4 bytes for each parameter, in one **message**.

# %% tags=["nbval-check-output"]
num_parameters = 93_750_000
message_bytes = num_parameters * 4
alone_s, together_s = 0.120, 0.135
waits_s = together_s - alone_s
print(f"the message has {message_bytes / 1e6:.0f} MB")
print(f"it took {waits_s * 1e3:.0f} ms, so {message_bytes / waits_s / 1e9:.0f} GB travelled per second")
share = waits_s / together_s
print(f"{share:.1%} of the GPU hours that you pay for are spent waiting: {30 * share:.1f} days of a month")

# %% [markdown]
# Three days of every month. And that is the good case: these two machines are joined by InfiniBand, a network made for
# this. What if they were joined by the Ethernet of an office, with 10 gigabits per second?
#
# In this course you **predict** first. Type a number and commit to it; the cells that answer stay closed until then.
# You remember a guess that was wrong longer than a number that you only read.

# %%
guess = predict("How long does the message of 375 MB take over Ethernet of 10 gigabits a second?", unit="ms")
guess

# %%
from simulator import link, message_s

ethernet_s = message_s(message_bytes, link("ethernet-10g"))
print(guess.compare(ethernet_s * 1e3, how="the simulator says"))
print(f"two batches: {2 * alone_s * 1e3:.0f} ms on one GPU, {(alone_s + ethernet_s) * 1e3:.0f} ms on two")

# %% [markdown]
# Over that wire the second GPU makes training *slower*. (10 gigabits are 1.25 gigabytes. If you were 8 times off,
# you made the most common mistake of this field: bits taken for bytes.)
#
# The picture shows the same message on other wires. Move the slider from gradients of hundreds of megabytes down to a
# message of a kilobyte. Something changes on the way: what?

# %%
from ipywidgets import SelectionSlider

from simulator.viz import Panel, draw_link_times

WIRES = ("nvlink4", "pcie4-x16", "infiniband-hdr", "ethernet-100g", "ethernet-10g")


def wires(megabytes):
    size = megabytes * 1e6
    return draw_link_times(size, WIRES, compute_s=alone_s)


panel = Panel(wires, megabytes=SelectionSlider(options=(0.001, 0.002, 0.1, 1, 10, 100, 375, 1000, 10000), value=375))
panel

# %%
panel.controls["megabytes"].value = 0.002
print(panel.text)

# %% [markdown]
# At 2 kB the number of gigabytes a second hardly matters. Each wire has a time that even the smallest message pays: its
# **latency**. From here on every message has two prices, and at the end of this lesson you will have measured both on
# your own machine. First you need a different rank to send messages to. (Why does NVLink show 24 GB/s<!--out--> here,
# and 367 GB/s<!--out--> above? Its library, NCCL, sends small messages in a different way, which starts sooner but
# moves fewer bytes per second.)

# %% [markdown]
# ## Ranks
#
# A **rank** is a [process](../GLOSSARY.md#process) with a number. Ranks that work together form a
# [group](../GLOSSARY.md#group); its size is called the **[world size](../GLOSSARY.md#world-size)**. `run(fn, 4)` starts
# four processes, calls `fn` in each of them, and returns the four results.

# %%
import os


def introduce():
    return f"I am rank {dist.get_rank()} of {dist.get_world_size()}, process {os.getpid()}"


run(introduce, 4)

# %% [markdown]
# Four process numbers: these are real processes, as on a real cluster. There each of them would have a GPU; here they
# share the cores of your machine. All run the *same function*, and the rank is all that tells them apart.
#
# What do they share? In the next cell each rank appends to a list of the notebook. What does the notebook's list hold
# afterwards? Decide before you look.

# %% tags=["nbval-check-output"]
numbers = [100]


def append_rank():
    numbers.append(dist.get_rank())
    return numbers


print("on the ranks:   ", run(append_rank, 3))
print("in the notebook:", numbers)

# %% [markdown]
# Nothing is shared. Each rank got a copy of the list and changed its own. **What a different rank should know must be
# sent to it.** That is why this course begins with messages.
#
# For trying things out there is `%%ranks 4`: the cell runs on four ranks that stay alive, so that the next cell finds
# their variables. `rank`, `world_size`, `torch` and `dist` are there already.

# %%
# %%ranks 4
x = torch.full((3,), float(rank))
print("x is", x.tolist())

# %% [markdown]
# `%%ranks [1,3]` runs a cell on ranks 1 and 3 alone. They still have their `x`. (The lines of different ranks come in
# any order: they were not told to wait for each other.)

# %%
# %%ranks [1,3]
x * 10

# %% [markdown]
# ## A message
#
# Rank 0 sends, rank 1 receives. Look at what the receiver has to do first: make room.

# %%
# %%ranks [0,1]
if rank == 0:
    dist.send(torch.tensor([3.0, 1.0, 4.0]), 1)
else:
    box = torch.empty(3)
    dist.recv(box, 0)
    print("got", box.tolist())

# %% [markdown]
# Every message of a run is recorded, so it can be drawn. In this picture a line is a rank and an arrow is a message. A
# bar is a rank that waits. `last_records()` has the calls of the last cell that ran on ranks.

# %%
from distlab.course.notebook import last_records
from simulator.viz import draw_message_diagram

words = "One message: rank 0 sends, rank 1 receives"
show(draw_message_diagram(last_records(), title=words))

# %% [markdown]
# A message is bytes and nothing else: no shape, no type, no name. Both sides must know what is coming.
#
# When is `send` over? Rank 0 sends at once; rank 1 sleeps for 200 ms before it receives. How long is rank 0 in `send`?

# %%
guess = predict("The receiver comes 200 ms late. How long does the sender spend in send?", unit="ms")
guess

# %%
import time


def late_receiver():
    message = torch.ones(1000)
    start = time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(message, 1)
    else:
        time.sleep(0.2)
        dist.recv(message, 0)
    return time.perf_counter() - start


send_s, receive_s = run(late_receiver, 2)
print(guess.compare(send_s * 1e3))

# %% [markdown]
# The sender waits too. `send` is over when the other side receives: a message is a **meeting**, not a letter in a box.
# (Some libraries put small messages in a box and return at once. A program that relies on it works until its tensors
# grow, and then hangs. Never rely on it.)
#
# Messages from one rank to a different one arrive in the order in which they were sent. A `tag` lets the receiver
# choose; the sender below starts both with `isend`, which returns at once, and waits afterwards.


# %% tags=["nbval-check-output"]
def two_messages():
    first, second = torch.empty(1), torch.empty(1)
    if dist.get_rank() == 0:
        leaving = [dist.isend(torch.tensor([1.0]), 1, tag=7), dist.isend(torch.tensor([2.0]), 1, tag=9)]
        for message in leaving:
            message.wait()
    else:
        dist.recv(second, 0, tag=9)
        dist.recv(first, 0, tag=7)
        return f"tag 9 brought {second.item()}, tag 7 brought {first.item()}"
    return None


run(two_messages, 2)

# %% [markdown]
# On GPUs do not count on tags: nccl, the library that moves tensors between NVIDIA GPUs, has none. There, order is all.
#
# Here a **token** goes around: rank 0 starts it, each rank adds its number and passes it on. `Ranks(4)` is what `run`
# uses inside: it keeps four ranks, and their records, for as long as you want them.


# %%
def pass_token():
    rank, world_size, token = dist.get_rank(), dist.get_world_size(), torch.zeros(1)
    if rank > 0:
        dist.recv(token, rank - 1)
    token += rank
    dist.send(token, (rank + 1) % world_size)
    if rank == 0:
        dist.recv(token, world_size - 1)
    return token.item()


# %%
with Ranks(4) as ranks:
    print("the token on each rank:", ranks.run(pass_token))
    records = ranks.records()
words = "A token: four messages, one after another"
show(draw_message_diagram(records, title=words))

# %% [markdown]
# A line is a rank, time runs to the right, an arrow is a message. The bars are waiting: rank 3 does nothing but wait
# until two other messages are over and its own has come. This is what a chain costs. Keep the picture in mind. (The
# milliseconds above it are mostly not the messages': the first message between two ranks opens their connection. Later
# ones are far quicker.)

# %% [markdown]
# ## A hang, on purpose
#
# Two ranks want to swap tensors. Both are polite: each receives first and sends afterwards.


# %%
def polite_swap():
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(4), torch.empty(4)
    dist.recv(theirs, other)
    dist.send(mine, other)


# %% [markdown]
# What will happen? Decide, then run. (Nothing can break. A run that can never end is ended for you after two seconds;
# the square *stop* button of the notebook ends any run at once.)

# %%
from distlab.comm import RankError
from distlab.course.notebook import in_cells

swap = Ranks(2)
try:
    swap.run(polite_swap)
except RankError as error:
    print(in_cells(error).split("\n\n")[0])

# %%
show(draw_message_diagram(swap.records()))
swap.close()

# %% [markdown]
# That is a **deadlock**, and this is how to read any hang: *who* waits, *in which call*, *for whom*? (`In[7], line 4`
# is line 4 of the cell that has `[7]` on its left.) Follow the last question from rank to rank. If you come back to
# where you began, no rank will ever move.
#
# Here you are told after two seconds, because each rank's calls are recorded. On a cluster you are not told. All GPUs
# show 100 % use, since they wait busily, and no line is printed. PyTorch gives up after 10 minutes with nccl. With
# gloo, torch's own library for CPU tensors, it gives up after 30:

# %% tags=["nbval-check-output"]
num_gpus, nccl_timeout_min = 64, 10
print(f"one hang on {num_gpus} GPUs costs {num_gpus * nccl_timeout_min / 60:.1f} GPU hours before you are told")

# %% [markdown]
# If both are bold and *send* first, is it better? No: each `send` waits for a `recv` that stands behind the other's
# `send`.
#
# ## Exercise 1: shift
#
# Write `shift`: every rank hands its tensor to the next one and returns what it got from the one before. The ranks
# stand in a circle. It is the step from which rings are built, in lesson 2 and on every cluster.
#
# | what | budget |
# |---|---|
# | values | on each rank the tensor of rank - 1; rank 0 gets the last rank's |
# | messages | one per rank, all at the same time, not one after another |
# | any number of ranks | also 1 |
#
# `dist.isend` and `dist.irecv` start a message and return a request at once; `request.wait()` waits for it.
# The check below your function runs it on 1, 2, 3 and 4 ranks and tells what is wrong. If you want to read on first,
# just do: cells after the check use the reference until yours is right.

# %% exercise="01.shift"

# %% [markdown]
# Four ranks, four arrows, and all of them at once. A dot is an `isend`, which returned at once; a bar is a `wait()`.
# Compare the token's picture: as many messages, but there one behind the other, in four steps; here in one step.
# (Count steps. The milliseconds of a first message are spent on opening connections.)


# %%
def shift_once():
    return shift(torch.full((2,), float(dist.get_rank()))).tolist()


with Ranks(4) as ranks:
    print(ranks.run(shift_once))
    records = ranks.records()
words = "A shift: four messages at the same time"
show(draw_message_diagram(records, title=words))

# %% tags=["nbval-check-output"]
with Ranks(3, echo=False) as ranks:
    print(ranks.run(shift_once))
    print("bytes sent by each rank:", [ranks.records().sent_bytes(rank) for rank in range(3)])

# %% [markdown]
# ## What does a message cost?
#
# The simplest model that works has two numbers:
#
# $$\text{time} = \alpha + \frac{\text{size}}{\beta}$$
#
# $\alpha$ is the **latency**: what a message costs however small it is. $\beta$ is the **bandwidth**: bytes per second
# once bytes flow. (The course calls them [alpha and beta](../GLOSSARY.md#alpha-beta).) The whole simulator of this
# course stands on this line, so measure it.
#
# ## Exercise 2: ping-pong
#
# One clock cannot time a message that starts on one rank and ends on a different one: their clocks differ. So play the
# tensor there *and back*, and read one clock before and after. The lower rank begins and the higher one answers; repeat
# it `rounds` times and return the seconds of **one message, one way**.
#
# | what | budget |
# |---|---|
# | messages | `rounds` each way, each answered before the next one starts |
# | time | of one message, in seconds |
# | partners | any two ranks, not only 0 and 1 |

# %% exercise="01.ping_pong"

# %% [markdown]
# Before you measure: how long does one megabyte take between two processes of *this* machine? With `backend="gloo"` it
# goes through a socket, as between machines. (Where nobody names a backend, ranks of one Linux machine meet in memory
# that they share; lesson 2 compares the two.)

# %%
guess = predict("One message of 1 MB between two processes of this machine?", unit="ms")
guess


# %%
def measure(ping_pong, sizes, repeats=25):
    partner, best_s = 1 - dist.get_rank(), [1e9] * len(sizes)
    for _ in range(repeats):
        for place, size in enumerate(sizes):
            message = torch.zeros(size, dtype=torch.uint8)
            ping_pong(message, partner, 1)  # warms up: the message before may have emptied the caches
            best_s[place] = min(best_s[place], ping_pong(message, partner, 2))
    return best_s


# %%
sizes = [10, 100, 1_000, 4_000, 16_000, 64_000, 128_000, 256_000, 512_000, 1_000_000]
held_back = [300, 30_000, 200_000, 700_000, 10_000_000]
both_s = run(measure, 2, args=(ping_pong, sizes + held_back), backend="gloo", record=False)[0]
times_s, held_back_s = both_s[: len(sizes)], both_s[len(sizes) :]
for size, seconds in zip(sizes, times_s, strict=True):
    print(f"{size:>10,} bytes {seconds * 1e6:>8,.0f} us {size / seconds / 1e6:>8,.1f} MB/s")
print(guess.compare(times_s[-1] * 1e3))

# %% [markdown]
# (We keep the smallest of 25: what disturbs a measurement makes it longer, never shorter. A few sizes were measured
# too but are held back; you will see why.)
#
# Compare the first three lines: a hundred times as many bytes take hardly longer. Then the last three: there the time
# grows with the bytes. In between lies the size at which a message stops being mostly latency.

# %% [markdown]
# ## Exercise 3: fit
#
# Find $\alpha$ and $\beta$ from the measured pairs. The obvious way, least squares of the times, is decided by the
# largest message alone: an error of 1 % of 10 ms outweighs all of the smallest. So make the *relative* errors small:
#
# $$\sum_i \left(\frac{\alpha + \text{size}_i / \beta}{\text{time}_i} - 1\right)^2 \to \min$$
#
# | what | budget |
# |---|---|
# | result | `(alpha in seconds, beta in bytes per second)` |
# | exact times | exact numbers, to six digits |
# | noisy times | the least squares of relative errors |

# %% exercise="01.fit"

# %%
from simulator.viz import draw_fit

alpha_s, beta = fit(sizes, times_s)
show(draw_fit(sizes, times_s, alpha_s, beta))

# %% [markdown]
# ## Does the line predict?
#
# A line drawn through points that it has seen proves little. So here are the sizes that were held back, which it has
# *not* seen. The last one is ten times as long as anything that it has seen.

# %%
for size, seconds in zip(held_back, held_back_s, strict=True):
    predicted_s = alpha_s + size / beta
    words = f"predicted {predicted_s * 1e6:>7,.0f} us, measured {seconds * 1e6:>7,.0f} us"
    print(f"{size:>10,} bytes: {words}, {predicted_s / seconds - 1:+.0%}")

# %% [markdown]
# The first four lie between points that the fit has seen, and should be some per cent off (tens of per cent if your
# machine is busy: run the measurement again and see). Look at the last line by itself, because it lies where the fit
# has seen nothing. It may be right. It may also be far off. A message of 1 MB can stay in the processor's cache on its
# way to the other process. One of 10 MB may not fit, and then memory sets a different bandwidth. **Trust a fit where it
# was fitted.** (The simulator fits two lines where one will not do.)

# %% [markdown]
# And a whole exchange, drawn: three rounds of 1 MB as they were recorded (of sixty the three least disturbed), and
# under each row, pale, what the line predicted.

# %%
from distlab.trace import Span, Trace


def predicted_trace(size, rounds):
    one_ns, spans = round((alpha_s + size / beta) * 1e9), []
    for number in range(2 * rounds):
        for rank, kind in ((number % 2, "send"), (1 - number % 2, "recv")):
            name, start_ns = f"{kind} #{number // 2 + 1}", number * one_ns
            spans.append(Span(rank, "communication", name, kind, start_ns, start_ns + one_ns, size))
    return Trace.from_spans(spans)


# %%
import numpy as np

from simulator.viz import Timeline


def play(ping_pong, rounds):
    ping_pong(torch.zeros(10**6, dtype=torch.uint8), 1 - dist.get_rank(), rounds)


with Ranks(2, backend="gloo") as ranks:
    ranks.run(play, ping_pong, 60)
    calls = ranks.records().to_trace()
calls = calls.select(calls.is_word("lane", "communication"))
number = np.zeros(len(calls))
for rank in (0, 1):
    number[calls.rank == rank] = np.arange(120) // 2  # two calls in each round
threes = [calls.select((first <= number) & (number < first + 3)) for first in range(58)]
shortest = min(threes, key=lambda three: three.duration_s)

# %%
timeline = Timeline(shortest, predicted_trace(10**6, 3), title="Three rounds of 1 MB: recorded, and predicted in pale")
timeline

# %%
timeline.view = (0.0, 2 * min(shortest.duration_s, predicted_trace(10**6, 3).duration_s))

# %% [markdown]
# Where they differ, ask what the line leaves out. It knows nothing of the operating system, which takes a core away now
# and then. Nor does it know the recorder, which adds some tens of microseconds to every call. (The tables above ran
# without it.) And a `recv` that is started early shows as a long bar: it waits for the other side, which still has to
# copy.
#
# Such a difference is a finding, not a failure: the model says what *must* be paid, the measurement what *is* paid. On
# a machine that does other work at the same time it can be more than half: close other programs, and measure again.

# %% [markdown]
# ## What the numbers on the box mean
#
# Now you can read data sheets. Three sentences that you will meet in every guide:
# "PCIe 4.0 has 32 GB/s", "NVLink 4 has 900 GB/s", "HDR InfiniBand has 200 Gb/s". How long does 1 GB take, one way?
# And two more: "NVSwitch has 3.6 TB/s", and "8 A100 with NVLink at 900 GB/s". What do they count?

# %% tags=["nbval-check-output"]
gigabyte = 1e9
pcie = 16 * 16e9 * 128 / 130 / 8  # 16 lanes of 16 billion bits a second, 128 of 130 bits carry data
nvlink = 18 * 25e9  # 18 links of 25 GB/s one way
hdr = 200e9 / 8  # bits to bytes
for name, claimed, one_way in (("PCIe 4.0 x16", 32e9, pcie), ("NVLink 4", 900e9, nvlink), ("HDR", 200e9, hdr)):
    naive_ms, true_ms = gigabyte / claimed * 1e3, gigabyte / one_way * 1e3
    print(f"{name:<13} {one_way / 1e9:6.1f} GB/s one way; 1 GB: {true_ms:5.1f} ms, not {naive_ms:4.1f} ms")
halves, a100 = 4 * nvlink, 12 * 25e9  # 4 of 8 H100 send to the other 4; an A100 has 12 links, of NVLink 3
print(f"NVSwitch, one half of 8 H100 to the other: {halves / 1e12:.1f} TB/s one way, {2 * halves / 1e12:.1f} both ways")
print(f"A100: {a100 / 1e9:.0f} GB/s one way, {2 * a100 / 1e9:.0f} GB/s both ways")

# %%
from simulator.viz import draw_bars

claims = {"PCIe 4.0 x16": (32e9, pcie), "NVLink 4": (900e9, nvlink), "HDR": (200e9, hdr)}
times_ms = {
    name: {"number on the box, taken as bytes one way": 1e3 * gigabyte / claimed, "one way": 1e3 * gigabyte / one_way}
    for name, (claimed, one_way) in claims.items()
}
words = {"unit": "ms", "title": "1 GB one way: HDR takes eight times what its number seems to say"}
show(draw_bars(times_ms, **words))

# %% [markdown]
# | claim | what it counts | verdict |
# |---|---|---|
# | PCIe 4.0 is 32 GB/s | 16 lanes, one way; 2 bits of 130 and packets' headers are lost | an upper limit, 2 % high |
# | NVLink 4 is 900 GB/s | both directions added up | a message travels one way: halve it |
# | HDR is 200 Gb/s | gigabits, one way | divide by 8: 25 GB/s<!--out-->, *less* than PCIe 4.0 |
# | NVSwitch is 3.6 TB/s | 4 GPUs with the other 4, both ways: 8 x 900 / 2 | a GPU has 450 GB/s<!--out--> one way |
# | 8 A100, NVLink at 900 GB/s | 900 is an H100's NVLink 4 | two generations mixed: an A100 has 600 GB/s<!--out--> |
#
# None of them names a latency, and none is what a program reaches. In a published test of 8 H200 GPUs an
# [all-reduce](../GLOSSARY.md#all-reduce) moved 367 GB/s<!--out--> of NVLink's 450 GB/s<!--out-->. Here are the wires of
# the first picture with their two numbers, and yours. (Only NVLink's latency comes from a measurement. No data sheet
# names one, so the others are assumptions.)

# %%
import textwrap

from simulator.units import format_bytes_per_s, format_s

rows = [(name, link(name)) for name in WIRES]
for name, wire in rows:
    best = max(wire.protocols, key=lambda protocol: protocol.bytes_per_s)
    print(
        f"{name:<15} {format_s(best.latency_s):>8} {format_bytes_per_s(best.bytes_per_s):>10}  ",
        textwrap.shorten(wire.source, 64, placeholder=" ..."),
    )
print(f"{'this machine':<15} {format_s(alpha_s):>8} {format_bytes_per_s(beta):>10}   gloo, as measured above")

# %% [markdown]
# And the 15 ms<!--out--> of the beginning? 375 MB at HDR's 25 GB/s<!--out-->. With `message_s` you could have known
# before you rented the second GPU:

# %% tags=["nbval-check-output"]
for name in ("infiniband-hdr", "ethernet-10g"):
    seconds = message_s(message_bytes, link(name))
    print(f"{name}: {seconds * 1e3:.0f} ms, a step of {(alone_s + seconds) * 1e3:.0f} ms")

# %% [markdown]
# ## Exercise 4: gather
#
# One rank often wants to see the tensors of all ranks: to log, to save, to compare. Write `gather` with messages:
# `root` returns the list of all tensors in the order of ranks, every other rank returns `None`.
#
# | what | budget |
# |---|---|
# | result | on `root` a list, rank 0's tensor first; its own included |
# | messages | one from each rank that is not `root`, none from `root` |
# | order | right whoever is fast: slow ranks must not end up in the wrong place |

# %% exercise="01.gather"


# %% tags=["nbval-check-output"]
def gather_ranks():
    tensors = gather(torch.full((2,), float(dist.get_rank())), 1)
    return None if tensors is None else torch.stack(tensors).tolist()


run(gather_ranks, 3)

# %% [markdown]
# What does it cost? First look at who sends to whom:

# %%
with Ranks(4) as ranks:
    ranks.run(gather_ranks)
    records = ranks.records()
words = "A gather: every message ends at one rank"
show(draw_message_diagram(records, title=words))

# %% [markdown]
# All messages end at one rank, and its wire carries their bytes one after another. They start together, so their
# latencies pass at the same time: $\alpha$ counts once. With your $\alpha$ and $\beta$, for 1 MB from each rank:

# %%
for num_ranks in (2, 8, 64, 512):
    print(f"{num_ranks:>4} ranks: {format_s(alpha_s + (num_ranks - 1) * 1e6 / beta)}")

# %% [markdown]
# It grows with the number of ranks. A shift does not: there every wire carries one message. That difference is why
# lesson 2 builds everything from shifts.

# %% [markdown]
# ## Exercise 5: spot the bug
#
# Training should stop as soon as the *mean* loss of all ranks is low enough. The function below was tested: rank 0
# printed the right mean, on every step. With two ranks training hangs at the end all the same.
#
# It uses one of torch's **[collectives](../GLOSSARY.md#collective)**, calls that all ranks of a group make together:
# `dist.reduce(t, dst=0)` adds up the `t` of all ranks. There is also `dist.all_reduce(t)`. Read about both
# (`help(dist.reduce)`), find the fault, repair it.
#
# | what | budget |
# |---|---|
# | values | the same answer on every rank, in every step |
# | messages | one collective of one number |
# | the argument | `loss` stays as it is |

# %% exercise="01.repair"

# %% [markdown]
# What makes this bug so common is that nothing in the function can hang. It hangs later, somewhere else: a rank leaves
# the loop, and the others wait for it in the next step's messages. **Every decision that changes which messages come
# next must be the same on every rank.**


# %% tags=["nbval-check-output"]
def train(should_stop):
    for step in range(20):
        loss = torch.tensor(4 / (1 + step) + 0.1 * dist.get_rank())
        if should_stop(loss, 0.8):
            return f"stopped after step {step + 1}"
        dist.barrier()  # the next step's messages
    return "never stopped"


run(train, 3, args=(should_stop,))

# %% [markdown]
# ## In production
#
# A training program has no `isend` and `irecv` pairs written by hand, but every pipeline and every ring attention does
# what `shift` does. torch's own form is `batch_isend_irecv`: a list of messages that start together. With nccl it is
# the only safe form. There each send and each receive is a kernel on the same stream, and a GPU runs the kernels of a
# stream one after another. So two that start apart can block each other. (On gloo it has been seen to hang where a rank
# sent several messages; that is why `distlab/comm/p2p.py` chooses by [backend](../GLOSSARY.md#backend), and why all
# lessons send through it.)


# %%
def torch_shift(tensor):
    rank, world_size, received = dist.get_rank(), dist.get_world_size(), torch.empty_like(tensor)
    leaving = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    arriving = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for request in dist.batch_isend_irecv([leaving, arriving]):
        request.wait()
    return received


# %%
def race(mine, theirs, blocks=40):
    tensor, rows = torch.randn(1 << 18, dtype=torch.float32), []
    equal = torch.equal(mine(tensor), theirs(tensor))
    for _ in range(blocks):
        seconds = []
        for fn in (mine, theirs):  # by turns, so that whatever disturbs, disturbs both
            dist.barrier()
            start = time.perf_counter()
            fn(tensor)
            seconds.append(time.perf_counter() - start)
        rows.append(seconds)
    return equal, rows


# %%
from statistics import median

shown = {}
for rank, (equal, rows) in enumerate(run(race, 2, args=(shift, torch_shift), record=False)):
    ratio = median(mine / theirs for mine, theirs in rows)
    print(f"rank {rank}: equal {equal}; shift takes {ratio:.2f}x the time of batch_isend_irecv, 1 MiB")
    names = ("your shift", "batch_isend_irecv")
    shown[f"rank {rank}"] = {name: 1e3 * median(s) for name, s in zip(names, zip(*rows, strict=True), strict=True)}
words = {"unit": "ms", "title": "1 MiB to the next rank: your shift, and torch's own"}
show(draw_bars(shown, **words))

# %% [markdown]
# Small things that are not tensors (a file name, a dictionary of settings) travel by `broadcast_object_list`, which
# pickles them. Convenient and slow; fine once at the start, wrong in a training loop. It unpickles what it gets, so use
# it among your own ranks only.


# %% tags=["nbval-check-output"]
def same_settings():
    settings = [{"learning_rate": 0.1, "seed": 7}] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(settings, src=0)
    return settings[0]


run(same_settings, 3)

# %% [markdown]
# On a cluster [`torchrun`](../GLOSSARY.md#torchrun) starts the ranks and tells each who it is by environment variables.
# The same things have other names elsewhere:
#
# | what | torchrun and torch | DeepSpeed | Horovod |
# |---|---|---|---|
# | ranks on a machine | `--nproc-per-node` | `--num_gpus` | `-np` |
# | machines | `--nnodes`, `--node-rank` | `--hostfile` | `-H host:slots` |
# | where they meet | `--rdzv-endpoint`, `MASTER_ADDR`, `MASTER_PORT` | `--master_addr`, `--master_port` | automatic |
# | who am I | `RANK`, `LOCAL_RANK`, `WORLD_SIZE` | the same | `hvd.rank()`, `hvd.size()` |
# | backend | `init_process_group(backend=)` | `init_distributed(dist_backend=)` | chosen when built |
# | give up a hang | `init_process_group(timeout=)` | the same name | `--stall-check-shutdown-time-seconds` |
# | explain a hang | `TORCH_FR_BUFFER_SIZE` | torch's | `--stall-check-warning-time-seconds` |
# | network card | `NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME` | the same | `--network-interfaces` |
# | what nccl does | `NCCL_DEBUG=INFO` | the same | the same |
#
# Megatron-LM and torchtitan are started by torchrun and add names of their own for two rows: Megatron-LM has
# `--distributed-backend` and `--distributed-timeout-minutes`; torchtitan `comm.init_timeout_seconds`,
# `comm.train_timeout_seconds` and, to explain a hang, `comm.trace_buf_size`.

# %% [markdown]
# ## Lab
#
# The same measurement as a program, between *all pairs* of ranks, with your own functions:
#
# ```
# distlab lab 01 --ranks 4
# distlab lab 01 --ranks 4 --impl mine --trace traces
# torchrun --nproc-per-node 8 lessons/01_ranks_and_messages/lab.py
# ```
#
# On a machine with GPUs it uses them, and the matrix shows which pairs share a faster wire.
# `lab_reference.md`, next to the lab, holds a run to compare with.

# %% [markdown]
# ## Questions
#
# Answer before you run the cell below each.
#
# **1.** A thousand parameters, each with a gradient of 1 kB: a thousand messages, or one of 1 MB?

# %%
many_s, one_s = 1000 * (alpha_s + 1e3 / beta), alpha_s + 1e6 / beta
print(f"a thousand messages {format_s(many_s)}, one message {format_s(one_s)}: {many_s / one_s:.0f}x")

# %% [markdown]
# **2.** At which size is half of the time latency, on your machine and on HDR InfiniBand?

# %%
hdr_wire = link("infiniband-hdr").protocols[0]
print(
    f"alpha x beta: here {alpha_s * beta / 1e3:,.0f} kB, HDR {hdr_wire.latency_s * hdr_wire.bytes_per_s / 1e3:,.0f} kB"
)

# %% [markdown]
# **3.** Gradients in 2 bytes instead of 4: what becomes of the step of 135 ms? And over 10 Gb/s Ethernet?

# %% tags=["nbval-check-output"]
for name in ("infiniband-hdr", "ethernet-10g"):
    step_s = alone_s + message_s(message_bytes / 2, link(name))
    print(f"{name}: {step_s * 1e3:.1f} ms per step, {2 * alone_s / step_s:.2f}x one GPU")

# %% [markdown]
# **4.** How large must the batch's compute be, so that over that Ethernet two GPUs reach 1.8x, still with 4 bytes?

# %% tags=["nbval-check-output"]
wait_s = message_s(message_bytes, link("ethernet-10g"))
compute_s = 1.8 * wait_s / (2 - 1.8)  # 2 c / (c + wait) = 1.8
print(f"{compute_s:.1f} s of compute a step: {compute_s / alone_s:.1f} times as large a batch")

# %% [markdown]
# **5.** `pass_token` around 64 ranks of HDR InfiniBand with a tensor of 25 MB, or `shift`: how long until all is done?

# %% tags=["nbval-check-output"]
hop_s = message_s(25e6, link("infiniband-hdr"))
print(f"token {64 * hop_s * 1e3:.1f} ms, one after another; shift {hop_s * 1e3:.2f} ms, all at once")

# %% [markdown]
# **6.** Four ranks hang. Rank 0 waits in `all_reduce`, rank 1 in `send to 0`, rank 2 in `recv from 1`, rank 3 in
# `all_reduce`. Two of them are innocent. Which lines of code do you read first? (The cell makes this very hang.)


# %%
def four_ranks_hang():
    rank, number = dist.get_rank(), torch.zeros(1)
    if rank == 1:
        dist.send(number, 0)
        dist.send(number, 2)
    if rank == 2:
        dist.recv(number, 1)
    dist.all_reduce(number)


with Ranks(4) as ranks:
    try:
        ranks.run(four_ranks_hang)
    except RankError as error:
        print(in_cells(error).split("\n\n")[0])
    records = ranks.records()
show(draw_message_diagram(records))

# %% [markdown]
# Ranks 2 and 3 do what they should and wait. The circle is between 0 and 1: rank 1 sends something that rank 0 never
# receives before its `all_reduce`. One of those two lines is wrong: a `recv` is missing on rank 0, or there is one
# `send` too many on rank 1.
#
# ## What to read next
#
# - PyTorch documentation, *Distributed communication package* (torch.distributed), 2026: the same calls, with every
#   argument and what each backend can do. Read "Point-to-point communication" first.
# - R. Hockney, *The communication challenge for MPP*, 1994: where the line of latency and bandwidth comes from.
# - S. Bekman, *Machine Learning Engineering*, chapter on the network, 2025: measured wires, and how to test your own.
#
# **Next: lesson 2.** It makes an all-reduce of shifts: the sum of a tensor over all ranks. Every lesson after it needs
# that sum.
#
# ## Sources
#
# - PyTorch documentation, *Distributed communication package*: `send`, `isend`, `batch_isend_irecv`, timeouts
#   (10 minutes for nccl, 30 for other backends), read 2026-11 for torch 2.13.
# - R. Hockney, *The communication challenge for MPP*, Parallel Computing 20, 1994: latency and bandwidth as a line,
#   and the size at which half of the bandwidth is reached.
# - PCI Express Base Specification 4.0, 2017; NVIDIA H100 data sheet, 2023; NVIDIA ConnectX-6 data sheet, 2020: the
#   figures of the table, each with its source in `simulator/hardware/presets.toml`. NVIDIA A100 data sheet, 2020: 600
#   GB/s. NVIDIA, *H100 Tensor Core GPU Architecture*, 2022: 3.6 TB/s between the halves of 8 GPUs.
# - S. Bekman, *Machine Learning Engineering*, network chapter, 2025: the measured figures of NVLink.
# - PyTorch issues #77562 and tutorials #1926: `reduce` where `all_reduce` was needed, and the hang that follows.
