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
# # 15. Choose a plan, and defend it
#
# 90 minutes. Comes after lesson 6 (memory) and lesson 10 (all axes on one mesh). You need no GPU: you plan for some
# hundred of them, and measure on two processes of this machine.
#
# Afterwards you can
#
# - say on one page whether a plan fits, how long its step takes and what its run costs, and how large the error of
#   these numbers is;
# - search the degrees by rules, and choose the cheapest run that is in time, with failures;
# - say what DDP, DeepSpeed, FSDP, Megatron-LM and Horovod are for, and write one plan in the words of each;
# - judge popular claims by computing them.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You have 80,000 dollars and two weeks. A language model of 70 billion parameters is to learn from 100 billion tokens
# of your company's texts. You can rent H100s in machines of eight, at 2.50 dollars per GPU and hour. You take 128 of
# them. A step has 256 sequences of 4,096 tokens. Now you have to write four numbers into a file: how many data,
# tensor and pipeline ranks, and how many micro-batches. What do these four numbers decide?

# %%
from distlab.plan import Plan, Sharding
from simulator import Failures, ModelDescription, Run, bill, cluster, simulate

LLAMA = ModelDescription(model="llama-2-70b", attention="flash")
MODEL = LLAMA.workload()
LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH = 80, 8192, 64, 4096, 256
MACHINE = cluster("dgx-h100", 128)
RUN = Run(num_tokens=100e9, price=2.50, failures=Failures("llama-3"))
TENSOR_SLOW = ("tensor", "data", "expert", "context", "pipeline")


def plan_of(data, tensor, pipeline, recompute="none", stage=1):
    own = {"sequence_parallel": tensor > 1, "sharding": Sharding(stage), "recompute": recompute}
    return Plan(data, pipeline, BATCH // data, tensor=tensor, **own)


# %%
from simulator.viz import draw_bars


def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    words = {"unit": unit, "title": title}
    show(draw_bars(numbers, subtitle=subtitle, **words))


FOUR = {
    "data 8, tensor 4, pipeline 4": bill(simulate(MODEL, MACHINE, plan_of(8, 4, 4)), RUN),
    "data 16, tensor 8": bill(simulate(MODEL, MACHINE, plan_of(16, 8, 1, "full")), RUN),
    "data 16 as FSDP, tensor 8": bill(simulate(MODEL, MACHINE, plan_of(16, 8, 1, stage=3)), RUN),
    "as the first, tensor across": bill(simulate(MODEL, MACHINE, plan_of(8, 4, 4), order=TENSOR_SLOW), RUN),
}
paid = {name: one.dollars / 1000 for name, one in FOUR.items()}
show_bars(paid, "thousand $", "One model, 128 GPUs, four plans: what the run costs", "100 billion tokens")

# %% tags=["nbval-check-output"]
for name, one in FOUR.items():
    verdict = "too late" if one.days > 14 else "too dear" if one.dollars > 80_000 else "good"
    print(f"{name:29} {one.step.steady_s:5.1f} s a step, {one.days:4.1f} days, {one.dollars:8,.0f} dollars: {verdict}")

# %% [markdown]
# The model is the same, and so are the GPUs and the result. The worst plan costs nearly twice as much as the first, and
# ends after the deadline. A fifth one, data 16, tensor 2, pipeline 4, does not even start: it does not fit.
#
# A plan answers four questions, in this order: does it **fit**, how **long** is a step, **which** of those that fit is
# fastest, and what does the run **cost**? You will write a function for each. Each is a few lines, and you will see how
# near a few lines come to a simulation. At the end you plan this run and defend it.

# %% [markdown]
# ## When to use what
#
# Before any number, the order in which to ask. Each step costs more than the one before it, in bytes, in waiting, or in
# your time.
#
# 1. **Do not distribute.** One GPU holds a small model, and nothing is sent. A 7B model with LoRA or QLoRA fits too.
#    Colab lends one T4 of 16 GB, Kaggle two of them, for some hours at no price and with no promise. At 16 bytes per
#    parameter that is a model of less than a billion. This course needs no GPU, and was not tried there.
# 2. **Data parallel**, if the model fits and you want it sooner. It sends least, and backward hides it (lesson 3).
# 3. **Shard** (ZeRO, FSDP) if the states do not fit. ZeRO-1 sends what data parallelism sends (lesson 7).
# 4. **Tensor parallel inside a machine**, if activations or layers do not fit. Ranks wait for its calls (lesson 8).
# 5. **Pipeline across machines**, if the wire between them is slow. It sends least per GPU, and costs a bubble
#    (lesson 9).
#
# That is a rule of thumb. When does it hold? The **[advisor](../GLOSSARY.md#advisor)** is a search over all plans for a
# model, a cluster and a batch. Let it choose for four models on one to 128 GPUs. Guess before you look.

# %%
guess_0 = predict("Of the fields that have a plan, in how many is the fastest one FSDP alone?", unit="%")
guess_0

# %%
from simulator.viz import strategy_panel

guess_0.lock()
map_panel = strategy_panel(("gpt-2-1.5b", "llama-2-7b", "qwen-2.5-32b", "llama-2-70b"), (1, 8, 32, 128))
map_panel

# %%
map_panel.controls["batch_size"].value = 256
rows = [line for line in map_panel.text.splitlines()[1:] if "does not fit" not in line]
print(guess_0.compare(100 * sum("FSDP (ZeRO-3) (data" in row for row in rows) / len(rows), how="searched"))

# %% [markdown]
# Each field has the letter of the fastest plan, and its **[MFU](../GLOSSARY.md#mfu)**: the part of the data sheet's
# operations that train the model. Below it stand the degrees: d for data, t for tensor, p for pipeline. Read it from
# the lower left. A small model needs replicas, most with a shared optimizer, and no more. The larger it is, the more of
# it must be cut. An empty field has too little memory for any plan. "FSDP" is FSDP alone: a plan with tensor ranks is
# called tensor, and may shard its states as well.
#
# The map depends on the wire. Here are two of these models over 10 Gb/s between the machines.

# %%
from dataclasses import replace

from simulator import link, strategy_map
from simulator.viz import draw_strategy_map

SLOW = replace(MACHINE, inter_node=link("ethernet-10g"))
fields = strategy_map(("llama-2-7b", "llama-2-70b"), SLOW, (8, 32, 128), batch_size=256)
show(draw_strategy_map(fields))

# %% [markdown]
# Over 10 Gb/s it takes too long to gather all parameters in each pass: plans with few bytes between machines win. So
# there is no strategy that is always best. There is a best one for a given model, wire and batch.

# %% [markdown]
# ## Does it fit?
#
# You counted in lesson 6. Here is the whole account of a plan on one page. Divide the $P$ parameters by $t$ tensor
# and $p$ pipeline ranks. Each parameter takes 18 bytes, and `plan.sharding.stage` says which of them the data ranks
# split. Add the activations of the micro-batches that the first stage holds: $\min(p, m)$ of them in 1F1B (lesson 9).
#
# ### Exercise: the bytes of a GPU
#
# Write `bytes_per_gpu(parameters, layers, hidden, sequence, plan)`.

# %% exercise="15.fits"

# %% [markdown]
# How near does that come to a count of each tensor? The simulator's `memory_of` knows the embedding and the logits,
# buffers, what lives for a moment, and which rank is the fullest.

# %%
guess_1 = predict("How far is your formula from the full count, at most, on five plans?", unit="%")
guess_1

# %%
from simulator import memory_of

guess_1.lock()
SIZES = (MODEL.num_parameters, LAYERS, HIDDEN, SEQUENCE)
PLANS = {
    "data 8, tensor 4, pipeline 4": plan_of(8, 4, 4),
    "data 4, tensor 8, pipeline 4": plan_of(4, 8, 4),
    "data 16, tensor 2, pipeline 4": plan_of(16, 2, 4),
    "data 16, tensor 8, full": plan_of(16, 8, 1, "full"),
    "data 16 as FSDP, tensor 8": plan_of(16, 8, 1, stage=3),
}
held = {
    name: {"yours": bytes_per_gpu(*SIZES, plan) / 1e9, "counted": memory_of(MODEL, plan).max_bytes / 1e9}
    for name, plan in PLANS.items()
}
show_bars(held, "GB", "A formula of ten lines beside a count of every tensor", "an H100 has 80 GB")

# %%
errors = {name: one["yours"] / one["counted"] - 1 for name, one in held.items()}
print(guess_1.compare(100 * max(map(abs, errors.values()))))
print(", ".join(f"{error:+.0%}" for error in errors.values()))

# %% [markdown]
# The formula counts too little: it knows no buffers and nothing that lives for a moment, such as logits or a unit of
# FSDP that is gathered. So leave room. In this lesson a plan fits if your formula says at most 70 GB of the 80. Near
# the limit count properly (`memory_of`), and run one step before you rent a month.

# %% [markdown]
# ## How long is a step?
#
# Three things take time: computing, wires that nothing hides, and the bubble.
#
# - **Compute**: 6 operations per parameter and token, 2 forward and 4 backward. Full recompute adds 2.
# - **Tensor's calls**: 8 activations per layer, and nothing hides them.
# - **Bubble**: $p - 1$ micro-batches' time.
# - **Gradients**: an all-reduce per step, of which the last backward hides a part.
#
# ### Exercise: where the seconds go
#
# Write `step_parts(parameters, layers, hidden, sequence, plan, cluster)`. It has no term for the gathers of FSDP, so it
# is compared on the four other plans.

# %% exercise="15.step"

# %%
guess_2 = predict("How far is your formula from the simulated step, at most, on four plans?", unit="%")
guess_2

# %%
guess_2.lock()
first_order = {name: plan for name, plan in PLANS.items() if plan.sharding.stage < 3}
times = {
    name: {
        "yours": sum(step_parts(*SIZES, plan, MACHINE).values()),
        "simulated": simulate(MODEL, MACHINE, plan).duration_s,
    }
    for name, plan in first_order.items()
}
show_bars(times, "s", "Four terms beside a simulation of every layer and message")

# %%
gaps = [one["yours"] / one["simulated"] - 1 for one in times.values()]
print(guess_2.compare(100 * max(map(abs, gaps)), how="simulated"))
print(", ".join(f"{gap:+.0%}" for gap in gaps))

# %% [markdown]
# The formula is too short, everywhere. It leaves out attention's products, whose number grows with the sequence, and
# all that is not a product: norms, activations, sums, the update. It also leaves out the time to start kernels. So
# use it to compare plans, not to promise a date: most of what it forgets is the same in all plans.
#
# Where do the seconds of a plan go? Your function tells you.

# %% tags=["nbval-check-output"]
for name, plan in first_order.items():
    parts = step_parts(*SIZES, plan, MACHINE)
    print(f"{name:29}", ", ".join(f"{part} {seconds:5.2f} s" for part, seconds in parts.items()))

# %% [markdown]
# ## Which plan?
#
# Now search. The degrees are divisors: of the GPUs, of a machine, of the heads, of the layers, of the batch. Only few
# combinations are left, so try all of them.
#
# ### Exercise: the fastest degrees that fit
#
# Write `best_degrees(num_gpus, per_node, layers, heads, batch, fits, seconds)`. The last two arguments are functions,
# for example your formulas from above.

# %% exercise="15.choose"

# %%
ROOM = 70e9  # of 80: the formula counts too little


def fits(data, tensor, pipeline):
    return bytes_per_gpu(*SIZES, plan_of(data, tensor, pipeline)) <= ROOM


def seconds(data, tensor, pipeline):
    return sum(step_parts(*SIZES, plan_of(data, tensor, pipeline), MACHINE).values())


def simulated_seconds(data, tensor, pipeline):
    return simulate(MODEL, MACHINE, plan_of(data, tensor, pipeline)).duration_s


# %% tags=["nbval-check-output"]
for words, slow in (("by your formula", seconds), ("by simulation", simulated_seconds)):
    data, tensor, pipeline = best_degrees(128, 8, LAYERS, HEADS, BATCH, fits, slow)
    step = simulate(MODEL, MACHINE, plan_of(data, tensor, pipeline))
    print(f"{words:16} data {data}, tensor {tensor}, pipeline {pipeline}: {step.steady_s:.2f} s", end=", ")
    print(f"{step.memory.max_bytes / 1e9:.0f} GB, MFU {step.mfu:.0%}")

# %% [markdown]
# The second plan holds 52 GB<!--out--> here, where `memory_of` counted 60. The software of these machines makes
# gradients in the buffers that travel, and adds up micro-batches there. This library's own runs keep that sum outside
# the buffers.
#
# And the advisor, which also tries recompute, sharding, interleaved stages and larger micro-batches? For every plan
# it first computes a time that the plan cannot beat. Then it simulates plans in the order of these bounds, until no
# other plan can be better.

# %%
from simulator import Question, near_fit, reasons, search, words_of

asked = Question(LLAMA, MACHINE, BATCH, price=2.50)
searched = search(asked, lambda shape: shape.context == 1 and shape.microbatch <= 2)
best = searched.best(1)[0]
print(f"{len(searched.found):,} plans, {searched.num_simulated} simulated")
print(words_of(best.plan, best.microbatch))
print(f"{best.seconds:.2f} s, {best.step.memory.max_bytes / 1e9:.0f} GB, MFU {best.step.mfu:.0%}")

# %%
for reason in reasons(searched, best):
    print(f"{reason.part}: {reason.instead}")
print(f"nearly fits: {near_fit(searched)}")

# %% [markdown]
# The advisor is ahead: it shards parameters too, which your search never tried. FSDP was the third plan at the top, and
# a bad one. The difference is the number of micro-batches: each of them gathers all parameters again. With data 64
# there are 4, with data 16 there are 16. The map at the top has these degrees too, on 128 GPUs, with a lower MFU: its
# models have plain attention, as they were published, which computes scores and must recompute them.

# %% [markdown]
# In a terminal the same is one line, and finds the same plan; `--config` takes any model's `config.json`:
#
# ```
# distlab plan --model llama-2-70b --attention flash --cluster dgx-h100:2.50 --gpus 128 --batch 256 --tokens 1e11
# ```
#
# ### With the mouse
#
# All of it in one panel: model, cluster and degrees on one side, memory, a step over time and the price on the other.

# %%
from simulator.viz import planner_panel

MODELS = {"70B": MODEL, "7B": ModelDescription(model="llama-2-7b", attention="flash").workload()}
planner = planner_panel(MODELS, cluster("dgx-h100", 256), plan=plan_of(8, 4, 4), tokens=100e9)
planner

# %%
planner.controls["pipeline"].value = 8
planner.controls["data"].value = 4  # as many micro-batches: half the samples in a step
print(planner.text.splitlines()[0])

# %% [markdown]
# ## What does it cost?
#
# A bill is steps x seconds x GPUs x price. Two things are missing: GPUs fail, and more GPUs are less efficient.
# Failures first.
# On 16,384 H100s Llama 3 had 419 interruptions in 54 days: a GPU ran some 50,000 hours between two of them.
# Lesson 12 says how often to save.
#
# ### Exercise: days and dollars
#
# Write `run_bill(num_steps, step_s, num_gpus, price, mtbf_hours, save_s, restart_s)`.

# %% exercise="15.bill"

# %% tags=["nbval-check-output"]
for num_gpus, step_s in ((128, 9.0), (16_384, 9.0)):
    steps, plain = 100_000, 100_000 * step_s / 86_400
    days, dollars = run_bill(steps, step_s, num_gpus, 2.50, 50_000, 60, 600)
    print(f"{num_gpus:6,} GPUs: {days:5.1f} days, {days / plain - 1:5.1%} for failures, {dollars:11,.0f} dollars")

# %% [markdown]
# On 128 GPUs failures cost little. On 16,384 the run takes a fifth longer, and every GPU waits.
#
# **"Spot machines are 70 % cheaper."** Their owner may take them back at any time. That is a failure like any other:
# all stop, and go on from the checkpoint when a machine is there again, after ten minutes, say. So the same model of
# failures tells what is left of the 70 %, by how long a machine stays.

# %% tags=["nbval-check-output"]
full = bill(best.step, RUN)
print(f"on demand         {full.days:5.1f} days {full.dollars:9,.0f} dollars")
for hours in (72, 24, 8, 4, 2):
    lost = Failures(rate=1 / (8 * hours), restart_s=600)  # eight GPUs at once: one failure
    spot = bill(best.step, Run(100e9, 0.3 * 2.50, lost))
    when = f"a stop each {spot.goodput.mtbf_s / 60:4.0f} min, {spot.goodput.useful:4.0%} of the time counts"
    print(f"spot, {hours:2} h each   {spot.days:5.1f} days {spot.dollars:9,.0f} dollars   {when}")

# %% [markdown]
# Sixteen machines stop the job sixteen times as often as one. While a machine stays for a day, nearly all of the saving
# is left. At four hours the run is still cheap, and late. At two hours it is dear as well. A small job gains more from
# spot machines than a large one: ask first how long they stay, and save often (lesson 12).
#
# Now the number of GPUs. Twice as many should take half the time for the same price. But the batch stays the same, so
# each GPU has less to do between two messages. How much more does the run cost on 512 GPUs than on 64?

# %%
guess_3 = predict("512 GPUs in place of 64, the best plan for each: how much dearer is the run?", unit="%")
guess_3


# %%
def best_bill(num_gpus, model=LLAMA, run=RUN):
    question = Question(model, cluster("dgx-h100", num_gpus), BATCH)
    found = search(question, lambda shape: shape.context == 1 and shape.microbatch == 1)
    return bill(found.best(1)[0].step, run)


from simulator import curve
from simulator.viz import draw_cost_curve

guess_3.lock()
costs = curve([best_bill(num_gpus) for num_gpus in (32, 64, 128, 256, 512)])
show(draw_cost_curve(costs))

# %%
print(guess_3.compare(100 * (costs.bills[4].dollars / costs.bills[1].dollars - 1), how="simulated"))

# %% [markdown]
# The price hardly moves. Few GPUs must recompute, or cut the model more often; many GPUs have little work each. In
# between the price is flat, as long as the plan changes with the number of GPUs. (The picture's *sweet spot* has the
# least product of days and dollars.) So the deadline decides the number, and the plan decides the price: take **the
# cheapest that is in time**.
#
# ### Spot the bug
#
# A program picks among offers. It says that none is in time, although one is. Run the check as it is, read what it
# says, find the line, repair it.

# %% exercise="15.cheapest"

# %% tags=["nbval-check-output"]
offers = [(f"{one.num_devices} GPUs", one.num_devices, one.days, 2.50) for one in costs.bills]
for days in (60, 14, 7, 2):
    print(f"done in {days:2} days: {cheapest(offers, days)}")

# %% [markdown]
# ## The same plan in other tools
#
# You will rarely start these plans with this library. Five names are on every page about distributed training. What is
# each for?
#
# - **DDP** (torch): replicas, overlapped. One line around the model, and the right start while the model fits.
# - **FSDP** (torch, `fully_shard`): replicas that share states. Plain torch, composes with tensor parallelism.
# - **DeepSpeed**: the same three stages as ZeRO, offload to host and disk; a JSON file around an existing loop.
# - **Megatron-LM**: tensor, pipeline, context and expert parallelism for transformers; its own model and loop.
# - **Horovod**: replicas alone, for several frameworks; `hvd.DistributedOptimizer` where DDP wraps the model.
#
# How hard are they? Guides say easy, medium, hard. We put one loop of 16 lines, three linear layers and a DataLoader,
# into each (2026-11, torch 2.13, two CPU ranks), and counted the lines that differ:
#
# | tool | to the first run | new lines, gone | what goes wrong first |
# |---|---|---|---|
# | DDP | comes with torch | 11, 3 | no DistributedSampler: all ranks read the same |
# | FSDP2 | comes with torch | 14, 3 | the optimizer is made before `fully_shard`: it updates what is not used |
# | DeepSpeed 0.19 | seconds, and a compiler in it | 9, 7 | killed while it compiles: its lock stops later runs |
# | Horovod 0.28 | minutes of compiling | 10, 3 | built without torch in sight, it installs and has no `horovod.torch` |
# | Megatron Core 0.16 | seconds | its own model and loop | no CUDA: it ends as gradient buffers are made |
#
# Megatron Core needs a GPU, and did not run here. Horovod's last release (2023) compiles as C++14, which torch 2.13's
# headers refuse; with 17 in its two CMake files it ran. So "easy" has three parts: DeepSpeed changes fewer lines than
# FSDP2, and more can go wrong outside of them.
#
# `distlab export --to NAME` writes a plan in their words, and refuses what a tool cannot express. So the exports say
# who can do what. (DDP and Horovod have no file to write: they can do the first row alone.)

# %%
from simulator import ClusterDescription, PlanFile
from simulator.export import export

TOOLS = ("deepspeed", "megatron", "torchtitan")
TYPICAL = {
    "replicas": plan_of(128, 1, 1, stage=0),
    "ZeRO-1": plan_of(128, 1, 1, stage=1),
    "FSDP": plan_of(128, 1, 1, stage=3),
    "FSDP, tensor 2": plan_of(64, 2, 1, stage=3),
    "tensor, pipeline": plan_of(8, 4, 4),
}


# %%
def written(plan, tool):
    """Return a plan in a tool's words, or its refusal."""
    try:
        return export(PlanFile(LLAMA, ClusterDescription("dgx-h100", plan.world_size), plan), tool).text
    except ValueError as refusal:
        return f"no: {refusal}"


# %% tags=["nbval-check-output"]
print(f"{'':18}", *(f"{tool:11}" for tool in TOOLS))
for name, plan in TYPICAL.items():
    answers = [written(plan, tool) for tool in TOOLS]
    print(f"{name:18}", *(f"{'no' if text.startswith('no:') else 'yes':11}" for text in answers))
print(f"torchtitan: {written(TYPICAL['FSDP'], 'torchtitan')}")

# %% [markdown]
# A refusal names the part, as in the last line. A "yes" may come with notes, on standard error: DeepSpeed's file has no
# place for stages, which are written in code. And stage 3 with tensor ranks needs DeepSpeed 0.19.4: before that, a file
# that the parser takes is refused by the engine. Now this plan, FSDP with tensor 2, in both: settings that mean the
# same.

# %%
for tool in ("deepspeed", "megatron"):
    lines = written(TYPICAL["FSDP, tensor 2"], tool).splitlines()
    wanted = ("parallel", "batch", "accumulation", "shard", "stage", "autotp")
    chosen = [line.strip() for line in lines if any(word in line for word in wanted)]
    print(f"{tool}:", *(line[:90] for line in chosen[:9]), sep="\n  ")

# %% [markdown]
# | distlab `Plan` | torch | DeepSpeed | Megatron-LM | Horovod |
# |---|---|---|---|---|
# | `data` | `DistributedDataParallel` | the rest of the GPUs | the rest of the GPUs | `hvd.size()` |
# | `num_microbatches` | `no_sync` | `gradient_accumulation_steps` | `--global-batch-size` | the same, in `hvd` |
# | `sharding` | `fully_shard` | `zero_optimization.stage` | `--use-distributed-optimizer` | |
# | `tensor` | `parallelize_module` | `autotp_size` | `--tensor-model-parallel-size` | |
# | `pipeline` | `torch.distributed.pipelining` | `PipelineModule` | `--pipeline-model-parallel-size` | |
# | `recompute` | `torch.utils.checkpoint` | `activation_checkpointing` | `--recompute-granularity` | |
#
# Read a row before you carry a number from one tool to a different one. DeepSpeed counts micro-batches, Megatron-LM
# samples: 32 micro-batches of one sample on 8 replicas are `gradient_accumulation_steps` 32 there,
# `--global-batch-size` 256 here.
#
# ## Popular claims, tested
#
# Guides repeat numbers without the condition under which they hold. Most were tested in the lesson where they belong.
# Here is the whole page: what guides say, what comes out, and what to think of it.
#
# Memory first ([lesson 6](../06_memory/lesson.ipynb)). Guides count 16 bytes per parameter, 2 of them a gradient. This
# lesson's formula has 18: several micro-batches are added up in float32, so that a gradient has 4.


# %% tags=["nbval-check-output"]
def verdicts(*rows):
    """Print what guides say, what comes out, and what to think of it."""
    for claim, number, judged in rows:
        print(f"{claim:40} {number:28} {judged}")


zero = [16 / (whole + split / 64) for whole, split in ((4, 12), (2, 14))]  # bytes kept whole, and split by 64
lora, qlora = (bits / 8 * 6.74 for bits in (16, 4.13))
once, often = (memory_of(MODEL, Plan(2, 1, parts, tensor=8)).of("gradients") / 1e9 for parts in (1, 8))
verdicts(
    ("ZeRO-1 saves 8x, ZeRO-2 16x (64 GPUs)", "{:.1f}x and {:.1f}x".format(*zero), "no: at most 4x and 8x"),
    ("175B: 700 GB in fp32, 350 GB in fp16", f"{4 * 175} and {2 * 175} GB", "weights; training takes 2,800 GB"),
    ("70B: 500 GB and more, 6 or 7 H100s", f"{16 * 69:,} GB", f"no: {-(-16 * 69 // 80)} GPUs for states alone"),
    ("7B fine-tunes on 24 GB, LoRA or QLoRA", f"{lora:.1f} or {qlora:.1f} GB of weights", "yes: do not distribute"),
    ("accumulation costs no memory", f"gradients {once:.0f} or {often:.0f} GB", "no: sums are kept in float32"),
)

# %% [markdown]
# Speed needs a model, a wire and a batch: a GPT of 1.3 billion parameters on H100s ([lesson
# 3](../03_data_parallel/lesson.ipynb)).

# %%
from simulator import gpt_workload

SMALL = {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "sequence_length": 2048, "vocab_size": 51200}


def samples_per_s(plan, samples=4, wire=None):
    machine = cluster("dgx-h100", max(8, plan.world_size))
    machine = machine if wire is None else replace(machine, devices_per_node=1, inter_node=link(wire))
    return simulate(gpt_workload(**SMALL, microbatch_size=samples), machine, plan).samples_per_s


rates = {n: samples_per_s(Plan(n)) for n in (1, 8, 16, 64)}
few, many = (samples_per_s(Plan(n), 64 // n) for n in (32, 64))
grown = {"8,192 tokens per GPU": rates[64] / rates[1], "2,048 tokens per GPU": samples_per_s(Plan(64), 1) / rates[1]}
show_bars(grown, "x", "64 GPUs: near linear while each has enough to do", "1.3B, H100s, data parallel with overlap")

# %% tags=["nbval-check-output"]
naive, split = (samples_per_s(plan) / rates[1] / 4 for plan in (Plan(1, 4, 1), Plan(tensor=4)))
slow = samples_per_s(Plan(tensor=2), wire="ethernet-100g") / rates[1]
one, eight = (samples_per_s(Plan(n), 64 // n) for n in (8, 64))
far = f"{rates[16] / rates[1]:.1f}x on 16, {rates[64] / rates[1]:.0f}x on 64"
verdicts(
    ("8 GPUs give 6-7x", f"{rates[8] / rates[1]:.1f}x", "more: overlap, 8,192 tokens"),
    ("near linear to 8-16 GPUs", far, "yes, and further"),
    ("twice the GPUs give 1.7x", f"{many / few:.2f}x from 32 to 64", "where 64 samples are the batch"),
    ("naive 25 % of four, tensor parallel 85 %", f"{naive:.0%} and {split:.0%}", "the first always, the second less"),
    ("tensor is useless over Ethernet", f"{slow:.2f}x on two, 100 Gb/s", "yes: below 1x"),
    ("1B is best on 8 GPUs, no faster on 64", f"{eight / one:.1f}x as fast on 64", "no, on InfiniBand"),
)

# %% [markdown]
# Time: how long a run takes follows from its operations (6 per parameter and token) and a rate. Nobody says the rate.
# GPT-3 took 3.14e23 operations (Brown et al. 2020, appendix D). The 355 years come from 28 TFLOP/s on a V100, whose
# data sheet has 125; Narayanan et al. 2021 count 288 years, with a higher rate.
#
# A 7B model learns from 140 billion tokens here, 20 per parameter; Llama 2 had two trillion.

# %%
years = 3.14e23 / 28e12 / (365 * 86_400)
seven = best_bill(64, ModelDescription("llama-2-7b", attention="flash"), Run(140e9)).days
alone, more, rate = 64 * seven / 30, 2e12 / 140e9, best.step.mfu * 989e12  # a data sheet's H100: 989 TFLOP/s
verdicts(
    ("GPT-3 took 355 GPU-years", f"{years:.1f} at 28 TFLOP/s", f"{28 / 125:.0%} of a V100's peak"),
    ("... on an H100", f"{years * 28e12 / rate:.0f} at {rate / 1e12:.0f} TFLOP/s", "with the MFU of our 70B plan"),
    ("... weeks on thousands of GPUs", f"{365 * years / 4096 / 7:.1f} weeks on 4,096 V100s", "yes, if nothing is lost"),
    ("7B: months on one GPU, days on 64", f"{alone:.0f} months, {seven:.1f} days", "yes, for 140 billion tokens"),
    ("... as Llama 2 was", f"{more * alone / 12:.0f} years, {more * seven:.0f} days", "no: 14 times the tokens"),
)

# %% [markdown]
# One H100 does not even hold the 7B model in training, as the map above says: the months are 64 GPUs' days, added up.
# Last, money and wires (lessons [3](../03_data_parallel/lesson.ipynb) and
# [1](../01_ranks_and_messages/lesson.ipynb)).

# %% tags=["nbval-check-output"]
week, months = 64 * 24 * 7, 8 * 24 * 60
rates = [link(name, measured=False).protocols[-1].bytes_per_s for name in ("pcie4-x16", "nvlink4", "infiniband-hdr")]
pcie, nvlink, hdr = (f"{rate / 1e9:.0f} GB/s one way" for rate in rates)
verdicts(
    ("64 H100s for a week: 20,000-40,000 $", f"{2 * week:,} to {4 * week:,} $", "yes, at 2 to 4 $ an hour"),
    ("8 of them for two months: half of that", f"{months:,} and {week:,} GPU-hours", "no: the same work and bill"),
    ("PCIe 4.0 is 32 GB/s", pcie, "as the data sheet"),
    ("NVLink 4 is 900 GB/s", nvlink, "both directions together"),
    ("HDR InfiniBand is 200 Gb/s", hdr, "bits: divide by 8"),
)

# %% [markdown]
# The share of gradient traffic, "5-15 % over NVLink and 15-30 % over InfiniBand", has a formula without the model in
# it: $2F/3BT$ with nothing hidden (lesson 3). Put in the tokens $T$, and the claim holds in one range of them and
# nowhere else. That is the lesson of the whole page: ask for the condition.

# %% [markdown]
# ## Common mistakes, measured
#
# Six mistakes that you do not see in a loss curve. Each is one change of a plan; the bars say what the run then costs.

# %%
GOOD = plan_of(8, 4, 4)
LARGE = LLAMA.with_microbatch(8).workload()
mistakes = {
    "the plan": simulate(MODEL, MACHINE, GOOD),
    "tensor across machines": simulate(MODEL, MACHINE, GOOD, order=TENSOR_SLOW),
    "4 large micro-batches": simulate(LARGE, MACHINE, replace(GOOD, num_microbatches=4)),
    "recompute all, though it fits": simulate(MODEL, MACHINE, replace(GOOD, recompute="full")),
    "tensor 8 because there are 8": simulate(MODEL, MACHINE, plan_of(4, 8, 4)),
    "FSDP, gathered 16 times": FOUR["data 16 as FSDP, tensor 8"].step,
    "a call per gradient": simulate(MODEL, MACHINE, replace(GOOD, gradient_sync="per_parameter", sharding=Sharding())),
}
lost = {name: bill(step, RUN).dollars / 1000 for name, step in mistakes.items()}
show_bars(lost, "thousand $", "Each mistake is one line of a configuration", "70B, 100 billion tokens, 128 H100s")

# %% [markdown]
# And one on real ranks: a loop that synchronises gradients after every micro-batch, because `no_sync` was forgotten.
# Two ranks, a small GPT, four micro-batches, a wire of 30 MB/s (`throttled`). In shared memory the mistake would hardly
# be seen: there a sum costs less than the clock's noise, which is why it survives on one machine.

# %%
import contextlib
import time

from distlab.comm import throttled
from distlab.data_parallel import DataParallel
from distlab.models import GPT, GPTConfig

ranks = Ranks(2)


# %%
def updates(forgotten, count=3, parts=4):
    model = GPT(GPTConfig(context=64, num_layers=4, num_heads=4, hidden_size=128))
    replicas = DataParallel(model)
    start, tokens = time.perf_counter(), torch.randint(256, (4, 64))
    with throttled(30e6):
        for part in range(count * parts):
            last = forgotten or part % parts == parts - 1
            with contextlib.nullcontext() if last else replicas.no_sync():
                GPT.loss(model(tokens), tokens).backward()
            if last:
                replicas.synchronize()
    return (time.perf_counter() - start) / count


# %%
took, sent = [], []
for words, forgotten in (("once per update", False), ("after each micro-batch", True)):
    took.append(max(ranks.run(updates, forgotten)))
    calls = [call for call in ranks.records().calls(0) if call.op == "all_reduce"]
    sent.append(sum(call.num_bytes for call in calls) / 3)
    print(f"{words:23} {1e3 * took[-1]:5.0f} ms an update, {sent[-1] / 1e6:5.1f} MB in all-reduces")
print(f"the mistake sends {sent[1] / sent[0]:.1f} times as much, and takes {took[1] / took[0]:.1f} times as long")
ranks.close()

# %% [markdown]
# Four times the bytes, for the same gradients. The time grows less: computing takes its part, and hides some of them.

# %% [markdown]
# ## Capstone: plan a 70B run, and defend it
#
# Now the question from the top. The budget is in dollars and days; the number of GPUs is yours. Write
# `plan_70b(dollars, days)`. The check compares your plan with the advisor's. It says what you overlooked: memory, a
# wire, a bubble or the price.

# %% exercise="15.capstone"

# %%
from simulator.viz import draw_planner

chosen = plan_70b(80_000, 14)
mine = bill(simulate(MODEL, cluster("dgx-h100", chosen.world_size), chosen), RUN)
show(draw_planner(mine))

# %% [markdown]
# To defend it, answer four questions in a sentence each, with numbers from above. Why does it fit, and what is the
# fullest GPU full of? What does each axis cost in a step? Which plan nearly won? What if the price doubles, or a
# machine fails every day?

# %% [markdown]
# ## Lab
#
# Does a plan that is best on paper win on real ranks? The lab plans a small GPT for the ranks that you give it, with
# your functions, runs every plan, and compares the order.
#
# ```
# distlab lab 15 --ranks 4 --impl reference
# distlab lab 15 --ranks 4 --impl mine
# ```

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below.
#
# 1. A 13B model in mixed precision with Adam, 18 bytes per parameter. How many GPUs of 80 GB must share its states
#    under FSDP, if half of a GPU is for them?
# 2. Tensor 8, pipeline 4, 12 micro-batches: which part of the compute lanes' time is bubble?
# 3. 4,000 GPUs, 50,000 hours between failures of each, saves of 45 s: how often do you save?
# 4. Offers: 64 GPUs, 12 days at 2.50 dollars; 128 GPUs, 6.5 days at 2.20. Which is cheaper?
# 5. Data parallelism on 8 GPUs: a 7B model needs 16 GB more on each GPU than it has. What do you try first?

# %% tags=["nbval-check-output"]
import math

print(f"1. {math.ceil(18 * 13 / 40)} GPUs")
print(f"2. {3 / (12 + 3):.0%}")
between = 3600 * 50_000 / 4000
print(f"3. every {math.sqrt(2 * 45 * between) / 60:.0f} minutes; it fails every {between / 3600:.1f} hours")
print(f"4. {64 * 12 * 24 * 2.5:,.0f} and {128 * 6.5 * 24 * 2.2:,.0f} dollars: the second")
print("5. ZeRO-1: it sends what data parallelism sends, and splits 12 of the 18 bytes by 8")

# %% [markdown]
# ## What to read next
#
# - Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, 2021: section 3
#   derives rules for degrees, section 5 measures them.
# - Llama team, *The Llama 3 Herd of Models*, 2024: section 3.3, how 16,384 GPUs were used, and what failed.
# - `distlab plan --help`, `distlab cost --help`, `distlab validate`: how near all of this comes to published steps.
# - `distlab capstone --new plan.toml` is the end of the course. A plan of yours trains on two nodes of this machine,
#   through a kill, against a budget of seconds and bytes.
#
# ## Sources
#
# - Narayanan et al. 2021, *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*
#   (arXiv:2104.04473): section 3 chooses degrees.
# - Korthikanti et al. 2022 (arXiv:2205.05198): activations. Rajbhandari et al. 2020 (arXiv:1910.02054): ZeRO.
#   Brown et al. 2020 (arXiv:2005.14165): GPT-3's operations. Data sheets of T4, V100 and H100: memory and peak.
# - Llama team 2024, *The Llama 3 Herd of Models* (arXiv:2407.21783): Table 5, interruptions.
# - Young 1974, *A first order approximation to the optimum checkpoint interval*.
# - In this repository: `simulator/advisor/`, then `simulator/runs/money.py`.
