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
# # 9. Pipelines
#
# 90 minutes. Comes after lesson 1 (messages), lesson 3 (data parallel) and lesson 6 (memory). You need no GPU: four
# processes on this machine are the four ranks.
#
# Afterwards you can
#
# - write the order in which a rank runs its micro-batches: GPipe, 1F1B, zero-bubble, and your own;
# - run a model that is cut into stages, on real ranks, equal to one process, with gradients scaled and no hang;
# - say where each bubble comes from, what removes it, and what that costs;
# - choose schedule, stages and micro-batches by simulation, and check the choice against measured timelines.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You want to train a GPT of 13 billion parameters. Its states (parameters, gradients, Adam: 16 bytes per parameter,
# lesson 6) do not fit one H100 of 80 GB. You rent four, for some 3 dollars an hour each. The model has 40 layers, so
# you do what is simplest: layers 0 to 9 on the first GPU, 10 to 19 on the second, and so on. The output of one is the
# input of the next: this is [pipeline parallel](../GLOSSARY.md#pipeline-parallel). Together the four have 320 GB: the
# model fits, and it trains.
#
# How busy are the GPUs? Say what part of the time a GPU computes, on average. Type a number into the box that the next
# cell shows, and press Commit.
#
# The cell behind it describes this model and these four GPUs to the simulator. `stack="best-case"` stands for the
# fastest software that was measured. `recompute="selective"` means that attention's activations are computed a second
# time instead of being kept (lesson 6). `bubble_fraction` is the part of the time in which a GPU waits.

# %%
guess_0 = predict("What part of the time does a GPU compute?", unit="%")
guess_0

# %%
from distlab.plan import Plan
from simulator import adam_state_bytes, cluster, gpt_workload, simulate
from simulator.viz import draw_schedule, schedule_builder

SIZES = {"hidden_size": 5120, "num_layers": 40, "num_heads": 40, "sequence_length": 2048, "vocab_size": 51200}
MACHINE = cluster("dgx-h100", 4, stack="best-case")


def step_of_model(schedule, num_microbatches, *, batch=64, stages_per_rank=1, cluster=MACHINE):
    workload = gpt_workload(**SIZES, microbatch_size=batch // num_microbatches)
    sizes = {"pipeline": 4, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    plan = Plan(1, schedule=schedule, recompute="selective", **sizes)
    return simulate(workload, cluster, plan)


# %%
naive_step = step_of_model("naive", 1, batch=8)
print(guess_0.compare(100 * (1 - naive_step.bubble_fraction), how="simulated"))
show(draw_schedule(naive_step.trace))

# %% [markdown]
# Each row is a GPU, and time runs to the right. Coloured boxes are work, and the empty part is waiting. (Messages are
# left out: they are too short to be seen.) While one GPU works, three wait. In what order must the GPUs work so that
# the empty part gets small? This lesson answers it.

# %% tags=["nbval-check-output"]
MODEL = gpt_workload(**SIZES)
states = adam_state_bytes(MODEL.num_parameters)
print(f"{MODEL.num_parameters / 1e9:.1f} billion parameters: {states / 1e9:.0f} GB of states; four GPUs have 320 GB")

# %% tags=["nbval-check-output"]
guess_0.lock()
busy = 1 - naive_step.bubble_fraction
month = 4 * 3 * 24 * 30
print(f"four GPUs cost {month:,} dollars a month; {month * (1 - busy):,.0f} of them pay for waiting")

# %% [markdown]
# **"Naive model parallel uses 25 % of four GPUs."** True, and no accident: while one works, three wait. You have bought
# memory, and no speed at all. This lesson gets the other 75 % back, step by step, and counts what each step costs.

# %% [markdown]
# ## Naive: one batch goes through
#
# Four real ranks. Four processes that compute would share the few cores of this machine, and we would see the cores,
# not the pipeline. So these stages *sleep*: a layer that does almost nothing and takes as long as we say. A sleeping
# process needs no core, so four ranks run as if each had a GPU of its own. (Real computing comes later.)
#
# The work of a stage on one sample has three parts of equal length: **F**, the forward pass; **I**, the gradient of its
# input; **W**, the gradients of its weights. A backward pass **B** is I and W in one: twice as long as F, as in most
# models.

# %%
import time

UNIT_S = 0.004  # F of one sample; I and W the same


class Slow(torch.autograd.Function):
    """Hand things on as they are; sleep in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds * len(grad))  # I
        return grad, None


# %%
class Stage(torch.nn.Module):
    """A small layer that takes UNIT_S a sample in F, in I and in W; `share` is for stages that are smaller."""

    def __init__(self, share=1.0):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.seconds = self.samples = 0.0
        self.unit_s = UNIT_S * share
        self.layer.weight.register_post_accumulate_grad_hook(lambda _: time.sleep(self.unit_s * self.samples))  # W

    def forward(self, x):
        self.samples = len(x)
        time.sleep(self.unit_s * len(x))  # F
        return Slow.apply(self.layer(x), self.unit_s)


# %% [markdown]
# The naive step: receive, forward, hand on; wait for the gradient, backward, hand it back. Two things are easy to
# forget. A tensor that came by message has no history, so autograd stops there: `requires_grad_()` makes it keep the
# gradient that goes back. And `detach()` hands over numbers, not the graph. (There is no loss here: on the last rank a
# gradient of ones stands for it.)


# %%
def naive_train(stage, batch):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x, grad = batch.clone(), torch.ones_like(batch)
    if rank > 0:
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stage(x)
    if rank < last:
        dist.send(y.detach(), rank + 1)
        dist.recv(grad, rank + 1)
    y.backward(grad)
    if rank > 0:
        dist.send(x.grad, rank - 1)
    dist.barrier()


# %%
BATCH = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
ranks = Ranks(4, timeout_s=180)


def timed_naive():
    stage = Stage()
    naive_train(stage, BATCH)  # the first step warms up
    start = time.perf_counter()
    naive_train(stage, BATCH)
    return time.perf_counter() - start


seconds = max(ranks.run(timed_naive))
print(f"a step of 8 samples takes {seconds * 1e3:.0f} ms; a rank works {3 * 8 * UNIT_S * 1e3:.0f} ms of them", end="")
print(f": busy {3 * 8 * UNIT_S / seconds:.0%}")

# %% [markdown]
# Four ranks, and not faster than one. (One rank with all four stages would take as long.)

# %%
from distlab.plan import ActionTimes, make_schedule
from simulator import simulate_schedule

naive_paper = simulate_schedule(make_schedule("naive", 4, 1), ActionTimes(1, 1, 1))
show(draw_schedule(naive_paper.trace))

# %% [markdown]
# ## GPipe: cut the batch
#
# Rank 1 waits because it gets *all eight samples at once*. Give it the first as soon as it is there. Cut the batch into
# $m$ **micro-batches**; while rank 1 works on the first, rank 0 works on the second. No parameter changes before all
# are through, so the sum of their gradients is that of the whole batch: the numbers stay the same.
#
# What a rank does is then a list of actions. An action is a stage, a kind and a
# [micro-batch](../GLOSSARY.md#micro-batch): `2F0` is stage 2's forward pass of micro-batch 0. An order like this is all
# of a *schedule*, so we write schedules as data first and run them afterwards.
#
# ### Exercise: GPipe
#
# The oldest [schedule](../GLOSSARY.md#schedule) (Huang et al. 2019): all forward passes, then all backward passes.
# Write the order of a rank. No ranks are needed.

# %% exercise="09.gpipe"

# %% [markdown]
# Build it by hand too: click the dashed boxes until every box stands. Where do ranks idle, whatever you do?

# %%
schedule_builder(level=2)

# %% [markdown]
# The library has schedules as data: `distlab.plan.schedules`. It parses text, one line per rank, and `validate` says
# what is wrong with an order before any rank hangs on it.

# %% tags=["nbval-check-output"]
from distlab.plan import ActionTimes, make_schedule, parse_schedule
from distlab.plan import ScheduleError, validate


def schedule_of(orders):
    return parse_schedule("\n".join(",".join(order) for order in orders))


print(schedule_of([gpipe_order(rank, 3) for rank in range(2)]))
try:
    validate(schedule_of([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B1"]]))
except ScheduleError as error:
    print(f"\n{error}")

# %% [markdown]
# `simulate_schedule` runs an order on paper: each action starts when its rank is free and what it needs has arrived.
# Before you look: four ranks, eight micro-batches. What part of the ranks' time is idle?

# %%
guess_1 = predict("What part of the ranks' time is idle in GPipe?", unit="%")
guess_1

# %%
from simulator import simulate_schedule

THREE = ActionTimes(1, 1, 1)  # F, I and W, in milliseconds unless told
gpipe_8 = schedule_of([gpipe_order(rank, 8) for rank in range(4)])
on_paper = simulate_schedule(gpipe_8, THREE)
print(guess_1.compare(100 * on_paper.bubble_fraction, how="simulated"))
show(draw_schedule(on_paper.trace))

# %% [markdown]
# That idle time is called the **[bubble](../GLOSSARY.md#bubble)**. Look where it is. At the start rank 3 waits until
# the first micro-batch has come through three stages; at the end it has nothing left to do. Rank 0 waits in the middle,
# while the last micro-batch goes down and the first gradient comes back. With $p$ ranks, each rank is idle for $p - 1$
# forward passes and $p - 1$ backward passes in all.
#
# ### Exercise: the bubble
#
# Write it in closed form: idle time over *total* time. Several stages per rank ($v$ of them) come later in the lesson.
# A stage is then $v$ times smaller, and so is what one waits for.

# %% exercise="09.bubble"

# %% tags=["nbval-check-output"]
print("bubble of GPipe:   m =" + "".join(f"{m:7}" for m in (1, 2, 4, 8, 16, 32, 64)))
for p in (2, 4, 8, 16):
    print(f"  {p:2} ranks            " + "".join(f"{bubble_fraction(p, m, 1):7.1%}" for m in (1, 2, 4, 8, 16, 32, 64)))

# %%
from simulator.viz import draw_bars


def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    show(draw_bars(numbers, unit=unit, title=title, subtitle=subtitle))


shown = {f"{m} micro-batches": 100 * bubble_fraction(4, m, 1) for m in (1, 2, 4, 8, 16, 32, 64)}
show_bars(shown, "%", "More micro-batches, less bubble: idle time over total time, 4 ranks")

# %% [markdown]
# **"The bubble is $(p-1)/m$."** That is what papers write, and it is idle time over *ideal* time: how much longer a
# step takes than without any bubble. With 4 ranks and 4 micro-batches it says 75 %, while the ranks idle 43 %<!--out-->
# of their time. Both are right; only never compare one with the other. This lesson means idle over total, everywhere.
#
# **"Four times as many micro-batches as stages, and the bubble is negligible."** A rule of the
# [GPipe](../GLOSSARY.md#gpipe) paper. Read it off the table: with 16 micro-batches on 4 ranks it is 16 %<!--out-->. The
# question's GPUs cost 8,640 dollars a month, and 16 % of that are 1,400 dollars.

# %% [markdown]
# ### On real ranks
#
# `distlab.pipeline.Pipeline` runs any schedule on real stages. It posts receives early, sends without waiting, and
# writes down when each action ran. `bench` runs two steps of a schedule and compares the shorter one with what the
# simulator says.


# %%
from distlab.pipeline import Pipeline
from distlab.trace import SpanWriter, Trace


def squares(output, target):
    return (output - target).square().mean()


# %%
def some_steps(schedule, num_steps=2, batch=BATCH, longer=1):
    rank, share = dist.get_rank(), schedule.num_ranks / schedule.num_stages
    own = {stage: Stage(longer * share) for stage, home in enumerate(schedule.home) if home == rank}
    spans, traces = SpanWriter(rank), []
    pipeline = Pipeline(own, schedule, loss=squares, spans=spans)
    for _ in range(num_steps):
        spans.clear()
        dist.barrier()
        pipeline.step(batch, torch.zeros_like(batch))
        traces.append(spans.trace())
    pipeline.close()
    return traces, pipeline.peak_in_flight


# %%
def work_of(trace):
    return trace.select(trace.is_word("kind", "F", "B", "I", "W"))


def seconds_of(trace):
    work = work_of(trace)
    return (work.end_ns.max() - work.start_ns.min()) / 1e9


# %%
seen = {}


def bench(name, schedule):
    results = ranks.run(some_steps, schedule)
    steps = [Trace.concatenate(step) for step in zip(*(traces for traces, _ in results), strict=True)]
    best = min(steps, key=seconds_of)
    share = schedule.num_ranks / schedule.num_stages
    paper = simulate_schedule(schedule, ActionTimes(share, share, share), unit_s=UNIT_S)
    seen[name] = work_of(best).from_zero(), paper
    took, busy = seconds_of(best), (work_of(best).end_ns - work_of(best).start_ns).sum() / 4e9
    peaks = ", ".join(str(peak) for _, peak in results)
    print(f"{name:12} {took * 1e3:4.0f} ms ({paper.duration_s * 1e3:.0f} on paper), busy {busy / took:.0%}", end="")
    print(f" ({1 - paper.bubble_fraction:.0%}), in flight {peaks}")


bench("naive", make_schedule("naive", 4, 8))
bench("GPipe", gpipe_8)

# %%
trace, paper = seen["GPipe"]
show(draw_schedule(trace, paper.trace))

# %% [markdown]
# On paper GPipe takes the ranks from 25 % to 73 %, with the same work and the same numbers. Measured times are longer
# than on paper: a sleep lasts longer than asked, messages take time, and more so where other programs run.
#
# ### One process, a loop over devices
#
# Guides also write the pipeline as a loop in *one* process. `stages` is a list, each stage on a device of its own, and
# `.to(device)` stands for the messages. (Here all four are on the CPU.) Same stages, same eight micro-batches:


# %%
def loop_over_devices(stages, batch, num_microbatches=8):
    parts = batch.chunk(num_microbatches)
    for stage in stages:  # on GPUs: part.to(device of the stage)
        parts = [stage(part) for part in parts]
    for part in parts:
        (part.square().mean() / num_microbatches).backward()


stages = [Stage() for _ in range(4)]
start = time.perf_counter()
loop_over_devices(stages, BATCH)
seconds = time.perf_counter() - start
print(f"{seconds * 1e3:.0f} ms, busy {3 * 8 * UNIT_S / seconds:.0%}: as naive, though the batch was cut")

# %% [markdown]
# A call on the CPU returns when it is done, so nothing overlaps. On GPUs a call returns when it is *queued*: GPU 1 can
# work on the first part while Python queues the next ones. But one Python starts the work of all devices. If it falls
# behind, or waits for a number (`loss.item()`), all of them wait. And it ends at one machine. Ranks change just that:
# each has its own Python, its own order of actions, and messages in place of `.to`.

# %% [markdown]
# ## When more micro-batches stop helping
#
# The formula says: the more, the better. It leaves something out: half a micro-batch takes more than half the time.
# Each call of a layer has a price of its own, whatever its size, and small matrix products use a processor badly. So
# measure what two blocks of a small GPT take on this machine, forward and backward, for micro-batches of different
# sizes, and put these times into the schedule. The batch is 64 samples, there are four ranks. How many micro-batches
# make the shortest step?

# %%
guess_2 = predict("How many micro-batches are fastest, of 1, 2, 4, 8, 16, 32 or 64?", unit="micro-batches")
guess_2

# %%
from distlab.models import GPT, GPTConfig

CONFIG = GPTConfig(context=32, num_layers=4, num_heads=2, hidden_size=64, tied=False)


def cost_of(part, samples):
    x = torch.randn(samples, 32, 64, requires_grad=True)
    start = time.perf_counter()
    part(x).sum().backward()
    return time.perf_counter() - start


def costs_on_rank_0():
    if dist.get_rank() > 0:
        return None
    part, counts = torch.nn.Sequential(*GPT(CONFIG).blocks[:2]), (1, 2, 4, 8, 16, 32, 64)
    rounds = [[cost_of(part, 64 // m) for m in counts] for _ in range(8)]  # in turns: a busy moment is fair to all
    return {m: min(times) for m, times in zip(counts, zip(*rounds, strict=True), strict=True)}


# %%
step_ms = {}
for m, cost in ranks.run(costs_on_rank_0)[0].items():
    paper = simulate_schedule(make_schedule("gpipe", 4, m), ActionTimes(cost / 3, cost / 3, cost / 3), unit_s=1.0)
    step_ms[m] = paper.duration_s * 1e3
    print(
        f"{m:2} micro-batches of {64 // m:2}: {cost * 1e3:5.1f} ms each, {m * cost * 1e3:4.0f} ms of work a rank",
        end="",
    )
    print(f", bubble {paper.bubble_fraction:.0%}: a step of {step_ms[m]:.0f} ms")
print(guess_2.compare(min(step_ms, key=step_ms.get), how="simulated"))

# %%
guess_2.lock()
shown = {f"{m} micro-batches": milliseconds for m, milliseconds in step_ms.items()}
show_bars(shown, "ms", "A step gets shorter, and then longer again", "batch of 64, four ranks, costs as measured here")

# %% [markdown]
# The bubble gets smaller all the way, and the step does not. Where the two meet depends on the model and the machine:
# on a large model a single sample of 2,048 tokens keeps a GPU busy, and you run out of samples first. What you need is
# the time of one micro-batch (the "ms each" above), measured on *your* machine.

# %% [markdown]
# ## 1F1B: the same bubble, less memory
#
# Why wait with backward? Rank 3 could run `3B0` right behind `3F0`. Then rank 2 could run `2B0` one slot later, and the
# activations of micro-batch 0 would be free again. [1F1B](../GLOSSARY.md#1f1b) ("one forward, one backward") does that:
# a rank warms up with just as many forward passes as it takes until the first gradient can come back, and then
# alternates.
#
# A micro-batch is **in flight** on a rank from its forward to its backward pass: for that long its activations are
# kept. How much shorter does 1F1B make the step?

# %%
guess_3 = predict("How much shorter is a step with 1F1B, 4 ranks, 8 micro-batches?", unit="%", signed=True)
guess_3

# %% [markdown]
# ### Exercise: 1F1B
#
# Write the order of a rank. Budget: as long as GPipe, and at most $p - r$ micro-batches in flight on rank $r$. There
# may be fewer micro-batches than ranks.

# %% exercise="09.one_f_one_b"

# %%
bench("1F1B", schedule_of([one_f_one_b_order(rank, 4, 8) for rank in range(4)]))
shorter = 1 - seen["1F1B"][1].duration_s / seen["GPipe"][1].duration_s
print(guess_3.compare(100 * shorter, how="simulated"))

# %% [markdown]
# **"1F1B has a smaller bubble than GPipe."** Refuted. On paper the bubble is the same, to the nanosecond. What is
# smaller is *memory*: 4, 3, 2, 1 in flight instead of 8 everywhere. And however many micro-batches you take, it stays
# 4, 3, 2, 1. That is how 1F1B helps: it lets you have many. Reach par here, where a rank may hold 4 activations:

# %%
schedule_builder(level=3)

# %% [markdown]
# Below are both on one time axis. Change the schedule, the number of micro-batches, or the time of a hand-over.

# %%
from simulator.viz import schedule_panel

guess_3.lock()
both = schedule_panel("gpipe", "one_f_one_b", ranks=4, microbatches=8)
both

# %%
guess_3.lock()
both.controls["microbatches"].value = 16
print(both.text)

# %% tags=["nbval-check-output"]
for m in (8, 16, 32, 64):
    first, second = (step_of_model(name, m) for name in ("gpipe", "one_f_one_b"))
    held = (
        f"GPipe {first.memory.max_bytes / 1e9:.0f} GB, 1F1B {second.memory.max_bytes / 1e9:3.0f} GB on the fullest GPU"
    )
    print(f"{m:2} micro-batches of {64 // m}: both {second.duration_s:.1f} s; {held}")

# %% [markdown]
# That is the model of the question with a batch of 64 samples (attention's own activations are recomputed, lesson 6).
# GPipe keeps the whole batch, however it is cut, and never fits into 80 GB. 1F1B keeps four micro-batches: cut them
# small and it fits. (Here ranks idle a little more than the closed form says. The last stage has the output layer on
# top of its ten layers, and the others wait for it.)

# %% [markdown]
# ## Run it yourself
#
# ### Exercise: one rank of a pipeline
#
# Now the program that follows an order. Write `run_rank(stage, actions, inputs, targets, loss_fn, like)`. `actions` is
# the order of this rank; each has a `.kind` ("F" or "B") and a `.microbatch`. Rank 0 has inputs, the last rank targets.
# Four things go wrong in public code again and again: the loss is not divided by the number of micro-batches; the
# received activation does not require grad; micro-batches get mixed up; and two neighbours wait in `send` for each
# other. The check names each of them.
#
# Budget: each activation forward once, each gradient back once.

# %% exercise="09.run_rank"

# %% [markdown]
# A real model through it: a small GPT that reads Python's documentation, cut into four stages. One process runs the
# same batch, and the gradients are compared.

# %%
from distlab.data import ByteCorpus, python_documentation
from distlab.pipeline import split_gpt
from distlab.plan import one_f_one_b

CORPUS = ByteCorpus(python_documentation(), context=32)


def new_gpt():
    return GPT(CONFIG, torch.Generator().manual_seed(0))


# %%
def compare_with_one_process():
    rank, n = dist.get_rank(), dist.get_world_size()
    stage = split_gpt(new_gpt(), n)[rank]
    inputs, targets = CORPUS.batch(0, 16)
    like = torch.empty(2, CONFIG.context, CONFIG.hidden_size)
    order = one_f_one_b(n, 8).actions(rank)
    loss = run_rank(stage, order, list(inputs.chunk(8)), list(targets.chunk(8)), GPT.loss, like)
    whole = new_gpt()
    GPT.loss(whole(inputs), targets).backward()
    truth = [parameter.grad for parameter in split_gpt(whole, n)[rank].parameters()]
    pairs = zip(stage.parameters(), truth, strict=True)
    return loss, max(float((mine.grad - other).abs().max() / other.abs().max()) for mine, other in pairs)


losses, gaps = zip(*ranks.run(compare_with_one_process), strict=True)
print(f"loss {losses[-1]:.4f}; gradients differ by at most {max(gaps):.0e} of the largest, the rounding of float32")

# %% [markdown]
# GPipe needs no list of actions. The library's `plain_step` is GPipe by hand on one screen: all micro-batches forward,
# then all of them backward. Look for the four things that go wrong, and for the line that prevents each. Where in this
# code do ranks wait? The picture below it is what its two loops do in time.

# %%
import inspect

from distlab.pipeline.plain import plain_step

print(inspect.getsource(plain_step).rpartition('"""\n')[2])
show(draw_schedule(simulate_schedule(make_schedule("gpipe", 4, 4), THREE).trace))


# %%
def on_one_screen():
    rank, n = dist.get_rank(), dist.get_world_size()
    stage, between = split_gpt(new_gpt(), n)[rank], (CONFIG.context, CONFIG.hidden_size)
    return plain_step(stage, CORPUS.batch(0, 16), loss_fn=GPT.loss, num_microbatches=8, between=between).item()


print(f"loss {ranks.run(on_one_screen)[-1]:.4f} on one screen")

# %% [markdown]
# ### Measured over predicted
#
# Above, the prediction took the sleeps that we asked for. A real sleep is longer, messages take time, and autograd has
# work of its own. So measure what F, I and W really take here, on a different and shorter step: GPipe with four
# micro-batches. It is as long as $m + p - 1 = 7$ forward passes and 7 backward passes. F takes one unit and B takes
# two, so these are 21 units. This is a calibration. A machine does not keep its speed, so take one before each few
# steps and one after.

# %%
GPIPE_4, ONE_F_ONE_B = make_schedule("gpipe", 4, 4), schedule_of([one_f_one_b_order(rank, 4, 8) for rank in range(4)])


def time_unit(pipeline, repeats=4):
    """Return the seconds of one F, read off a step of GPipe: the middle one of the repeats, on the slowest rank."""
    times = torch.zeros(repeats)
    for repeat in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        pipeline.step(BATCH[:4], torch.zeros(4, 8))
        times[repeat] = time.perf_counter() - start
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.median().item() / 21


# %%
from distlab.measure import overlay_of, time_beside


def timed():
    rank, spans = dist.get_rank(), SpanWriter(dist.get_rank())
    reference = Pipeline({rank: Stage()}, GPIPE_4, loss=squares)
    pipeline = Pipeline({rank: Stage()}, ONE_F_ONE_B, loss=squares, spans=spans)
    step = lambda: pipeline.step(BATCH, torch.zeros_like(BATCH))  # noqa: E731
    report = time_beside(step, lambda: time_unit(reference), spans)
    pipeline.close()
    reference.close()
    return report


# %%
def simulated(units):
    return simulate_schedule(ONE_F_ONE_B, THREE, unit_s=sum(units) / len(units)).trace


overlay = overlay_of(ranks.run(timed), simulated)
print(overlay)

# %% [markdown]
# The timeline of the 1F1B step of median length. The upper row of each pair is what was measured, the pale one under it
# what the simulator said. Half of the measured steps end in the grey band; the prediction lets them end between the
# dotted lines. The two lines are the medians. The clock of a step starts a little before the first box and stops a
# little after the last one. If the picture says that the machine was not calm, its boxes are pale. Close other
# programs and run the cell above again: it calibrates again, too.

# %%
from simulator.viz import Timeline

timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, overlay.predicted.duration_s / 2)  # the first half, larger

# %% [markdown]
# The order is the predicted one, action for action. The largest difference is mostly called communication: a measured
# receive begins when its rank begins to wait, so the bubble lies in it, and this prediction has no messages at all.
# Where a box is longer than predicted, the difference goes along the chain on which everything waits: from `0F0` down
# to rank 3 and back. A pipeline passes on every delay. That is why a slow rank hurts more here than its own share: one
# that takes 1.3 times as long makes all others wait.

# %% tags=["nbval-check-output"]
plain = simulate_schedule(one_f_one_b(4, 32), THREE)
for rank in range(4):
    slow = simulate_schedule(one_f_one_b(4, 32), THREE, slow_ranks={rank: 1.3})
    print(f"rank {rank} takes 1.3 times as long: the step takes {slow.duration_s / plain.duration_s:.2f} times as long")

# %% [markdown]
# One of four ranks does 30 % worse, and so does the whole step, nearly. The same holds for a stage that simply has more
# to do, such as the one with the embedding or the one with the output layer: cut by *time*, not by number of layers
# (`split_gpt(model, 4, costs=...)`).

# %% [markdown]
# ## Interleaved: smaller stages
#
# The bubble is $p - 1$ times what a stage takes. Make stages smaller! Give each rank two, of half the size: rank 0 has
# stages 0 and 4, rank 1 has 1 and 5, and so on. A micro-batch goes round twice. To fill the pipe takes as many
# hand-overs as before, each after half the time.

# %%
INTERLEAVED = make_schedule("interleaved", 4, 8, stages_per_rank=2)
bench("interleaved", INTERLEAVED)
print(
    f"closed form: bubble {bubble_fraction(4, 8, 1):.1%} with one stage a rank, {bubble_fraction(4, 8, 2):.1%} with two"
)

# %%
trace, paper = seen["interleaved"]
show(draw_schedule(trace, paper.trace))

# %% [markdown]
# Here "in flight" counts every stage of a rank by itself. Two of these are as large as one was before, so 11 on rank 0
# are 5.5<!--out--> micro-batches. The next cell counts that way, and the messages too.

# %% tags=["nbval-check-output"]
from distlab.plan import KINDS, add_communication


def num_messages(plan):
    kinds = [KINDS[code] for code in add_communication(plan).kind]
    return kinds.count("SEND_F") + kinds.count("SEND_B")


for v in (1, 2, 4):
    plan = make_schedule("one_f_one_b" if v == 1 else "interleaved", 4, 8, stages_per_rank=v)
    paper = simulate_schedule(plan, ActionTimes(1 / v, 1 / v, 1 / v))
    held = max(paper.peak_in_flight) / v
    print(f"{v} stage{'s' * (v > 1)} a rank: bubble {paper.bubble_fraction:.1%}, {num_messages(plan)} messages", end="")
    print(f", {held:g} micro-batches held on the fullest rank")

# %% [markdown]
# **"Interleaving halves the bubble, for free."** It does not quite halve it (the total gets shorter too), and it is not
# free. With $v$ stages per rank there are $vp - 1$ hand-overs instead of $p - 1$: at $v = 2$ and 4 ranks 7 instead of
# 3. And the fullest rank keeps more: $p + (p - 1)/v$ micro-batches instead of $p$. Inside one machine that is cheap.
# What if the four GPUs were in four machines, with 10 Gb/s between them?

# %% tags=["nbval-check-output"]
from dataclasses import replace

from simulator import link

SLOW = replace(MACHINE, name="ethernet", intra_node=link("ethernet-10g"), inter_node=link("ethernet-10g"))
for words, machine in (("one machine", MACHINE), ("10 Gb/s", SLOW)):
    for v in (1, 2, 5):
        name = "one_f_one_b" if v == 1 else "interleaved"
        step = step_of_model(name, 16, stages_per_rank=v, cluster=machine)
        print(
            f"{words:12} {v} stage{'s' * (v > 1):1} a rank: {step.duration_s:5.2f} s, idle {step.bubble_fraction:.1%}"
        )

# %% [markdown]
# Two stages per rank still help on the slow wire; with five the ranks wait for it more than they gain.

# %% [markdown]
# ### By the clock: two nodes
#
# The same on real ranks (nodes need Linux; elsewhere do not run these cells: below them stands what a Linux machine
# showed). Your machine becomes two nodes of two ranks, with a wire of your choice between them. Ranks 0 and 1 are in
# one node, ranks 2 and 3 in the other. So 1F1B crosses the wire once on the way forward, from stage 1 to stage 2. With
# two stages per rank a micro-batch goes round twice and crosses three times: from stage 1 to 2, from 3 to 4 and from 5
# to 6.
#
# A stage works five times as long now: 20 ms forward. A micro-batch is one sample of 1,600 x 8 numbers, each of 4
# bytes: 51 kB. That takes 1.3 ms on a wire of 40 MB/s, and 51 ms on one of 1 MB/s.

# %%
guess_4 = predict("On 1 MB/s, how many times longer is the interleaved step than the step of 1F1B?", unit="x")
guess_4

# %% [markdown]
# The simulator needs no calibration here, since ranks sleep: a device that does one operation per second, and layers of
# 0.01 operations each.

# %%
from distlab.comm import Nodes
from distlab.plan import Cluster, Device, Layer, Link, Protocol, Work, Workload

WIDE_BATCH = torch.randn(8, 1_600, 8, generator=torch.Generator().manual_seed(0))
HALF = Work(matmul_flops=5 * UNIT_S / 2)
SLEEPERS = Workload(
    "sleepers", tuple(Layer(f"layer {i}", (72,), HALF, HALF, HALF, output_bytes=51_200) for i in range(8))
)
INSIDE = Link("memory", (Protocol(50e-6, 1e9),))


def foretold(plan, wire):
    between = Link("wire", (Protocol(wire.latency_s, wire.bytes_per_s),))
    sleeper = Device("one operation per second", 1.0, 1e18, 1e9, 0.0, "this lesson")
    return simulate(SLEEPERS, Cluster("two nodes", sleeper, 4, 2, INSIDE, between), plan).duration_s


# %%
PLANS = {
    "1F1B": Plan(pipeline=4, num_microbatches=8, schedule="one_f_one_b"),
    "interleaved": Plan(pipeline=4, num_microbatches=8, schedule="interleaved", stages_per_rank=2),
}


def shortest_step(ranks, plan):
    schedule = make_schedule(plan.schedule, 4, 8, stages_per_rank=plan.stages_per_rank)
    results = ranks.run(some_steps, schedule, 2, WIDE_BATCH, 5)
    return min(seconds_of(Trace.concatenate(step)) for step in zip(*(traces for traces, _ in results), strict=True))


# %%
guess_4.lock()
SPEEDS, on_nodes = ("40MB/s", "1MB/s"), {}
for speed in SPEEDS:
    nodes = Nodes(2, between=f"{speed},200us")
    with Ranks(4, timeout_s=120, nodes=nodes) as four:
        for name, plan in PLANS.items():
            measured_s, said_s = shortest_step(four, plan), foretold(plan, nodes.between)
            on_nodes[f"{name}, {speed}"] = {"measured": 1e3 * measured_s, "on paper": 1e3 * said_s}
for words, row in on_nodes.items():
    print(f"{words:20} measured {row['measured']:4.0f} ms, on paper {row['on paper']:4.0f} ms")

# %%
late, early = (on_nodes[f"{name}, {SPEEDS[-1]}"]["measured"] for name in ("interleaved", "1F1B"))
print(guess_4.compare(late / early))
show_bars(on_nodes, "ms", "A fast wire pays for the smaller bubble, a slow one does not", "a step of 8 micro-batches")

# %% [markdown]
# Interleaving pays for a smaller bubble with messages. On 40 MB/s that is a good trade. On 1 MB/s it is not: ranks wait
# for the wire longer than they save. Where is the border? Change "1MB/s" in `SPEEDS` to "4MB/s", and run the two cells
# again. Measured steps are longer than those on paper in all rows: a sleep lasts longer than asked, and a message wakes
# a process.

# %% [markdown]
# ## Zero-bubble: split the backward pass
#
# So far a backward pass was one piece, and the rank before had to wait until it was over. But what does it wait *for*?
# Only the gradient of the input, I. The gradients of the weights, W, are not needed before the update. So: hand on I at
# once, and put W where the rank would idle (Qi et al. 2023). Their papers write "B" for what is I here.
#
# ### Exercise: a backward pass in two halves
#
# Write `split_backward(weights, activations, grad)` for a stage of `tanh(x @ weight)` layers. It returns the gradient
# of the input now, and a function that computes the gradients of the weights when it is called. Budget: one product of
# matrices a layer now, and one later. (Calling `torch.autograd.grad` twice goes through the chain twice.)

# %% exercise="09.split"

# %% [markdown]
# For real models the library does that layer by layer: each `Linear`, `Embedding` and convolution leaves a note in I,
# and W computes from the notes. It says which layers qualify; the rest is little and stays in I.

# %%
from distlab.pipeline.backward import prepare_split

split = prepare_split(split_gpt(new_gpt(), 4)[1])
print(split.report)
split.close()

# %% [markdown]
# ### Exercise: zero-bubble
#
# Write the order of a rank in a schedule like ZB-H1: 1F1B with B split, and each W late enough to fill a bubble. How
# late? In 1F1B rank $r$ has $p - r$ micro-batches in flight: rank 0 has most, the others have room. Now a micro-batch
# is in flight until its *W*. Budget: at most $p$ in flight on every rank, what rank 0 has in 1F1B anyway.

# %% exercise="09.zero_bubble"

# %%
bench("ZB, yours", schedule_of([zero_bubble_order(rank, 4, 8) for rank in range(4)]))
bench("ZB-H1", make_schedule("zb_h1", 4, 8))
bench("ZB-V", make_schedule("zb_v", 4, 8))
trace, paper = seen["ZB, yours"]
show(draw_schedule(trace, paper.trace))

# %% [markdown]
# Where did each bubble go? All in units of F, with I and W as long. Every rank but the first waits at the start for the
# first micro-batch, and every rank but the last at the end (or in the middle) for the last gradient.
#
# | | idle a rank | why |
# |---|---|---|
# | naive | $m (p-1)(F + I + W)$ | one rank works |
# | GPipe, 1F1B | $(p-1)(F + I + W)$ | the first way down, the last way back |
# | interleaved | $(p-1)(F + I + W) / v$ | the same with smaller stages |
# | ZB-H1 | $(p-1)(F + I - W)$ | the way back is I alone, and W's fill the rest |
# | ZB-H2 | $(p-1)(F + I - 2W)$ | more forward passes at the start, for twice the memory |
#
# Find ZB-H1's places for W by hand:

# %%
schedule_builder(level=6)

# %% [markdown]
# With F = I = W the last line of the table says 0. Before you believe it, look at a step from its start to its end:

# %% tags=["nbval-check-output"]
from distlab.plan import SCHEDULES

print(f"{'':24}{'units':>6}{'bubble':>8}{'held':>6}{'messages':>10}")
for name, family in SCHEDULES.items():
    if family.placement == "copies" or name in ("zb_1p", "zb_2p"):
        continue
    plan = make_schedule(name, 4, 8)
    v = plan.num_stages // 4
    paper = simulate_schedule(plan, ActionTimes(1 / v, 1 / v, 1 / v), unit_s=1.0)
    held, sent = max(paper.peak_in_flight) / v, num_messages(plan)
    print(f"{family.title:24}{paper.duration_s:6.1f}{paper.bubble_fraction:8.1%}{held:6.2g}{sent:10}")

# %% [markdown]
# `held` counts micro-batches through all stages of a rank, on the fullest rank. Read it line by line.
#
# - **"[Zero bubble](../GLOSSARY.md#zero-bubble)"** is not zero in a step by itself. Rank 3 cannot start before the
#   first micro-batch has come through three stages: $p - 1$ units with one stage per rank, whatever the order. ZB-H1
#   reaches exactly that; ZB-H2 cannot do better here and keeps almost twice as much. Zero remains if ranks *do not wait
#   for each other between steps*: rank 0 starts the next step while rank 3 ends this one. The papers count each rank
#   from its own start to its own end. A global norm of gradients would make all ranks meet, so they update first and
#   check afterwards.
# - **Looped BFS** (breadth-first) has the smaller stages of interleaving, in GPipe's order: a rank runs all
#   micro-batches through one of its stages, then through the next. So it holds all of them.
# - The **V** shapes put the first and the last stage on one rank. ZB-V has the smaller stages of interleaving and the
#   memory of 1F1B. **DualPipeV** lays a forward pass beside a backward pass, so that on GPUs each hides the messages of
#   the other.
# - **V-Half** and **V-Min** go the other way: about half of 1F1B's memory and a third of it if there are many ranks,
#   for a larger bubble than ZB-V's. Four ranks are few: V-Half has not come near a half yet, and V-Min beats it. Memory
#   can be traded for time, and here is the rate.
# - I and W are not equally long in a real model. Attention has no weights, so its W is nothing, and a long context
#   makes W small compared with F and I. Then bubbles remain. **Automatic** schedules are made for measured times and a
#   limit of memory.

# %%
zero = schedule_panel("zb_h1", "one_f_one_b", ranks=4, microbatches=8)
zero

# %%
zero.controls["schedule"].value = "zb_v"
zero.controls["weight_gradient"].value = 0.5
print(zero.text)

# %% [markdown]
# ### The question, answered
#
# The 13B model on four H100s, 64 samples in 64 micro-batches, by every step of this lesson:

# %% tags=["nbval-check-output"]
for name in ("naive", "gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "zb_v"):
    v = SCHEDULES[name].stages_per_rank(None)
    step = step_of_model(name, 64, stages_per_rank=v)
    held, idle = step.memory.max_bytes / 1e9, step.bubble_fraction
    words = f"{step.duration_s:5.2f} s a step, busy {1 - idle:4.0%}, {month * idle:5,.0f} dollars a month lost"
    print(f"{SCHEDULES[name].title:24}{words}, {held:3.0f} GB{', does not fit' if held > 80 else ''}")

# %% [markdown]
# From 25 %<!--out--> to 95 %<!--out--> busy. Most of the way was to cut the batch; 1F1B made that fit; the rest is the
# last few per cent, for more messages or more memory.

# %% [markdown]
# ### Your own schedule
#
# Here stands ZB-H1. Undo some of it, or start over, and build; **Run on real ranks** measures what you built.


# %%
def measured(schedule):
    bench("built", schedule)
    return draw_schedule(seen["built"][0], seen["built"][1].trace)


mine = schedule_builder(str(make_schedule("zb_h1", 4, 8)), on_ranks=measured)
mine

# %%
show(mine.run())

# %% [markdown]
# ## Real computing
#
# The ranks slept so far. Now they compute: a GPT of four stages, in one process and then on four ranks. This machine
# has few cores, and four processes that compute share them. The most to be had is the number of cores, whatever the
# schedule.

# %%
import os

WIDE = GPTConfig(context=32, num_layers=8, num_heads=4, hidden_size=96, tied=False)
inputs, targets = CORPUS.batch(0, 8)


def own_stages(schedule):
    modules = split_gpt(GPT(WIDE, torch.Generator().manual_seed(0)), schedule.num_stages)
    return {stage: modules[stage] for stage, home in enumerate(schedule.home) if home == dist.get_rank()}


def shortest(step, num_steps=2):
    times = []
    for _ in range(num_steps):
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return min(times)


# %%
def in_one_process():
    model = GPT(WIDE, torch.Generator().manual_seed(0))

    def step():
        for x, target in zip(inputs.chunk(8), targets.chunk(8), strict=True):
            (GPT.loss(model(x), target) / 8).backward()

    return shortest(step if dist.get_rank() == 0 else lambda: None)


def on_four_ranks(schedule):
    pipeline = Pipeline(own_stages(schedule), schedule, loss=GPT.loss)
    took = shortest(lambda: pipeline.step(inputs, targets))
    pipeline.close()
    return took


# %%
alone = max(ranks.run(in_one_process))
bound = min(4, len(os.sched_getaffinity(0)))
for name in ("naive", "one_f_one_b", "zb_h1"):
    plan = make_schedule(name, 4, 8)
    paper = simulate_schedule(plan, THREE)
    print(f"{name:12} {alone / max(ranks.run(on_four_ranks, plan)):.2f}x one process", end="")
    print(f"; on four devices the schedule allows {paper.speedup:.2f}x, this machine's cores {bound}x")

# %% [markdown]
# So times on this machine say nothing of schedules once the cores are full; order, memory and messages say it all the
# same. The lab below calibrates this machine before and after, predicts a step from that, and says how far off the
# prediction was; `benchmarks/predicted.py` holds that error against a bar.

# %% [markdown]
# ## No faster than one: spot the bug
#
# The following function runs micro-batches forward through all stages (to evaluate a model) and gives every rank the
# outputs. All numbers are right. A measurement says: four GPUs, 1.06 times as fast as one. Run the check as it is, read
# what it says, find the line, repair it.

# %% exercise="09.repair"

# %% [markdown]
# ## Production: torch's own
#
# `torch.distributed.pipelining` has most of these schedules, a class each. Here are three of them. Same model, same
# batch, four micro-batches, turn by turn in one run. (The ranks import it, not this notebook: it takes long to load.)

# %%
THEIRS = {
    "one_f_one_b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zb_v": "ScheduleZBVZeroBubble",
}


# %%
def torchs(name, schedule, modules):
    from torch.distributed import pipelining

    cpu, kind = torch.device("cpu"), getattr(pipelining, THEIRS[name])
    stages = [pipelining.PipelineStage(one, stage, schedule.num_stages, cpu) for stage, one in modules.items()]
    several = schedule.num_stages > schedule.num_ranks
    runner = kind(stages if several else stages[0], schedule.num_microbatches, loss_fn=GPT.loss)

    def step():
        losses, last = [], schedule.num_stages - 1 in modules
        arguments = (inputs,) if 0 in modules else ()
        runner.step(*arguments, **({"target": targets, "losses": losses} if last else {}), return_outputs=False)
        return torch.stack(losses).mean() if last else None

    return step


# %%
def turn_by_turn(name, num_steps=3):
    schedule = make_schedule(name, 4, 4)
    pipeline, rows = Pipeline(own_stages(schedule), schedule, loss=GPT.loss), []
    for step in (lambda: pipeline.step(inputs, targets), torchs(name, schedule, own_stages(schedule))) * num_steps:
        dist.barrier()
        start = time.perf_counter()
        loss = step()
        dist.barrier()
        rows.append((None if loss is None else float(loss.detach()), time.perf_counter() - start))
    pipeline.close()
    return rows[::2], rows[1::2]


# %%
from statistics import median

slower = {}
for name in THEIRS:
    results = ranks.run(turn_by_turn, name)
    ours, others = next(pair for pair in results if pair[0][0][0] is not None)
    gap = max(abs(a[0] - b[0]) for a, b in zip(ours, others, strict=True))
    ratio = median(a[1] / b[1] for a, b in zip(ours[1:], others[1:], strict=True))
    print(f"{THEIRS[name]:24} losses differ by {gap:.0e}; ours takes {ratio:.2f} times as long")
    slower[THEIRS[name]] = ratio

# %%
show_bars(slower, "x", "Time of our step over the time of torch's")

# %% [markdown]
# A number below 1 means that ours is faster. A few steps of a tiny model on shared cores are little: `benchmarks/` has
# the figures with repeats. The same settings under other names:
#
# | | stages | micro-batches | schedule |
# |---|---|---|---|
# | distlab | `Plan(pipeline=...)` | `num_microbatches` | `schedule` |
# | torch | `PipelineStage(..., num_stages)` | `n_microbatches` | a class, such as `Schedule1F1B` |
# | torchtitan | `pipeline_parallel_degree` | `num_pp_microbatches` | `pipeline_parallel_schedule` |
# | Megatron-LM | `--pipeline-model-parallel-size` | `--micro-batch-size` | 1F1B, interleaved |
# | DeepSpeed | `PipelineModule(..., num_stages)` | `gradient_accumulation_steps` | 1F1B |
#
# Megatron-LM is told the size of a micro-batch; the number follows from the batch's. So were earlier versions of
# torchtitan, by `pipeline_parallel_microbatch_size`. Several stages per rank are
# `--num-layers-per-virtual-pipeline-stage` or `--num-virtual-stages-per-pipeline-rank` in Megatron-LM. In torchtitan
# they follow from `pipeline_parallel_layers_per_stage` or, without it, from the schedule. DeepSpeed cuts by
# `partition_method`: `"parameters"` (the default), `"uniform"` or `"type:..."`. torchtitan runs any order from a file,
# `pipeline_parallel_schedule_csv`; `parse_schedule` reads the same files.

# %% [markdown]
# ## Popular claims, tested
#
# - **"Naive model parallel uses 25 % of four GPUs."** Holds: $1/p$, measured above.
# - **"The bubble is $(p-1)/m$."** Over *ideal* time. Over total time it is $(p-1)/(m+p-1)$, which is never above 100 %.
# - **"Four times as many micro-batches as stages make it negligible."** 16 % on 4 ranks and 20 % on 64. It depends on
#   what you call negligible.
# - **"1F1B has a smaller bubble than GPipe."** Refuted: the same, with less memory.
# - **"Interleaving halves the bubble for free."** Nearly half, for $(vp - 1)/(p - 1)$ times the messages and more
#   memory.
# - **"Zero bubble."** $p - 1$ units in a step by itself; zero where ranks need not meet between steps, and F = I = W.
# - **"Pipelines need little communication."** Holds: an activation for each micro-batch and stage border, not all
#   gradients. Question 4 has the numbers.

# %% [markdown]
# ## Lab
#
# The same on your own hardware, as a plain script. In a terminal, on four CPU ranks, with the reference and with what
# you wrote in this notebook:
#
# ```
# distlab lab 09 --ranks 4 --impl reference
# distlab lab 09 --ranks 4 --impl mine --trace traces
# ```
#
# The lab also trains by an order of your own, such as the one that you built above. Write it into a file, one line per
# rank:
#
# ```
# printf '0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1F1 1I1 1W0 1W1\n' > my_order.txt
# distlab lab 09 --ranks 2 --schedule my_order.txt
# ```
#
# The same by torchrun, which is also how it runs on GPUs (`--nproc-per-node` is their number):
#
# ```
# torchrun --nproc-per-node 4 lessons/09_pipeline/lab.py --impl reference
# ```
#
# `lab_reference.md` next to it has the output to compare with.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. How many micro-batches does 1F1B on 8 ranks need for a bubble of at most 5 %? And interleaved with 4 stages per
#    rank?
# 2. 16 ranks, 32 micro-batches: GPipe keeps how many micro-batches on a rank, and 1F1B on rank 0 and on rank 15?
# 3. A stage's output is 2,048 tokens x 5,120 numbers of 2 bytes. A link brings 50 GB/s, F of a stage takes 25 ms. What
#    part of F is a hand-over?
# 4. The model of the question, 64 micro-batches of one sample, 4 ranks: how much does a rank in the middle send in a
#    step? And a rank of data parallel on 4 GPUs, with 16-bit gradients?
# 5. ZB-H1 on 4 ranks with 8 micro-batches, if W takes half as long as F and I: idle units a rank, by the table above?

# %% tags=["nbval-check-output"]
for v in (1, 4):
    enough = next(m for m in range(1, 10**4) if bubble_fraction(8, m, v) <= 0.05)
    print(f"1. {v} stage{'s' * (v > 1)} a rank: {enough} micro-batches")
print(f"2. GPipe 32 everywhere; 1F1B {', '.join(str(min(32, 16 - rank)) for rank in (0, 15))}")
activation = 2048 * 5120 * 2
print(f"3. {activation / 50e9 * 1e3:.2f} ms, {activation / 50e9 / 25e-3:.1%} of F")
sent, reduced = 2 * 64 * activation, 2 * 3 / 4 * 2 * MODEL.num_parameters
print(f"4. {sent / 1e9:.1f} GB forward and back; data parallel {reduced / 1e9:.1f} GB")
print(f"5. {(4 - 1) * (1 + 1 - 0.5):.1f} units of F")

# %%
ranks.close()

# %% [markdown]
# ## What to read next
#
# - Huang et al. 2019, *GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism*
#   (arXiv:1811.06965): the first schedule, and the rule of four times as many (section 2.3).
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*
#   (arXiv:2104.04473): section 2.2 has 1F1B and interleaved stages, with their bubbles as idle over ideal.
# - Qi et al. 2023, *Zero Bubble Pipeline Parallelism* (arXiv:2401.10241): read it with your own schedule next to it.
#   Its "B" is I here.
#
# **Next: lesson 10.** You have now cut the batch, the layers' numbers and the model's depth. Lesson 10 does all three
# at the same time, and asks which of them goes on which wire.
#
# ## Sources
#
# - The three above. Qi et al. 2024 (arXiv:2405.15362): V-Half and V-Min.
# - DeepSeek-AI 2024, *DeepSeek-V3 Technical Report* (arXiv:2412.19437), section 3.2.1: DualPipe, with two copies of
#   the model. DualPipeV is one half of it, folded to a V.
# - Lamy-Poirier 2022, *Breadth-First Pipeline Parallelism* (arXiv:2211.05953): looped schedules.
# - Documentation of `torch.distributed.pipelining`; source of torchtitan (`config`), Megatron-LM (its arguments) and
#   DeepSpeed (`runtime/pipe`). Read 2026-11.
# - In this repository: `distlab/plan/schedules/`, then `distlab/pipeline/`; both `__init__` say in which order.
