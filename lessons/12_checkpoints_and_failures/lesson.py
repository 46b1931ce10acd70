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
# # 12. Checkpoints and failures
#
# 90 minutes. Comes after lesson 3 (data parallel) and lesson 7 (sharding). You need no GPU: processes on this machine
# are the ranks, and you will kill some of them.
#
# Afterwards you can
#
# - save a sharded checkpoint so that a kill at any moment does no harm;
# - resume a run so that it equals the one that did not fail, bit for bit;
# - go on with more or fewer ranks, with no sample twice or lost;
# - choose how often to save, and check it by trial.

# %%
# %load_ext distlab.notebook

# %% [markdown]
# ## The question
#
# Llama 3 was trained on 16,384 H100 GPUs. In 54 days the job was interrupted 466 times. 47 of these were planned; 419
# were not. A rank holds a part of the model that no other rank holds, so when one GPU fails, all 16,384 stop. Its
# report lists the causes.

# %%
from simulator.viz import describe_bars, draw_bars


def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    words = {"unit": unit, "title": title}
    show(draw_bars(numbers, subtitle=subtitle, **words), describe_bars(numbers, **words))


causes = {"GPU": 148, "GPU memory": 72, "software bug": 54, "network switch or cable": 35, "host maintenance": 32}
causes |= {"the other 13 causes": 419 - sum(causes.values())}
show_bars(causes, "times", "More than half of the interruptions came from GPUs", "419 unplanned ones in 54 days")

# %% [markdown]
# Look at the first two bars: hardware breaks, and no care in your own code prevents that. A GPU alone does not break
# often. How often does a job stop that has fewer of them? Say you train on 1,024 such GPUs. Type a number into the box
# that the next cell shows, and press Commit.

# %%
guess_0 = predict("Hours between two failures, on 1,024 such GPUs?", unit="hours")
guess_0

# %%
from simulator import RATES

PER_HOUR = RATES["llama-3"].per_device_hour  # of one GPU: 419 in 54 days on 16,384
guess_0.default(24)  # assumed if you gave no number above
print(guess_0.compare(1 / (1024 * PER_HOUR), how="counted"))

# %% tags=["nbval-check-output"]
import math

print("GPUs      hours between failures    a day of training, begun anew after each failure, takes")
for gpus in (8, 1024, 4096, 16384):
    mean = 1 / (gpus * PER_HOUR)  # hours
    print(f"{gpus:6,} {mean:16,.1f}               {mean * math.expm1(24 / mean) / 24:12,.1f} days")

# %% [markdown]
# One GPU fails once in six years. 16,384 of them fail every three hours. The last column is what happens without
# [checkpoints](../GLOSSARY.md#checkpoint): a run that needs a day without a failure waits for such a day. The mean
# time between failures is $M$; failures come at random, so a stretch of $T$ without one takes $M (e^{T/M} - 1)$ on
# average. On eight GPUs nobody notices. On 16,384 a single day takes most of a year.
#
# So a run saves, and goes on from there. This lesson asks four things about it. Is what was saved whole, whenever the
# kill comes? Is the run that goes on the same run? What if some machines do not come back? And how often is often
# enough?

# %% [markdown]
# ## Killed while saving
#
# The simplest save is `torch.save(state, "step-40.pt")`. Is it all right to be killed in the middle of it? The library
# has a tool that tries all moments: `crash_points(action, folder)` runs the action once, and notes what lies in the
# folder after each call into the system. A kill (SIGKILL) leaves exactly that: a killed process does nothing more, not
# even flush its buffers.
#
# First what loads: of all files `step-N.pt` the one with the highest N.

# %%
import re
import tempfile
from pathlib import Path

from distlab.checkpoint.crashes import crash_points


def load_newest(folder):
    names = [re.fullmatch(r"step-(\d+)\.pt", path.name) for path in folder.iterdir()]
    newest = max(int(name[1]) for name in names if name)
    return torch.load(folder / f"step-{newest}.pt")["step"]


# %%
def loads_after_a_kill(crash):
    with tempfile.TemporaryDirectory() as name:
        crash.restore(Path(name))
        try:
            return f"step {load_newest(Path(name))}"
        except Exception:  # torch has many words for a broken file
            return "nothing"


def killed_while(save):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save({"weight": torch.randn(64, 64), "step": 30}, folder / "step-30.pt")
        crashes = crash_points(lambda: save(folder, 40, {"weight": torch.randn(64, 64), "step": 40}), folder)
        return [loads_after_a_kill(crash) for crash in crashes]


# %% [markdown]
# A checkpoint of step 30 is there, and step 40 is being saved. What can a kill leave: step 30, step 40, or nothing
# that loads? Predict: of all moments at which the folder changes, after how many does nothing load?

# %%
guess_1 = predict("Of 10 moments in torch.save, after how many does nothing load?", unit="of 10")
guess_1


# %%
def save_in_place(folder, step, state):
    torch.save(state, folder / f"step-{step}.pt")


found = {"torch.save in place": killed_while(save_in_place)}
moments = found["torch.save in place"]
guess_1.default(1)  # assumed if you gave no number above
print(guess_1.compare(10 * moments.count("nothing") / len(moments), how="tried"))


# %%
from matplotlib import figure, rc_context

LOOK = {"step 30": ("#009E73", "30"), "step 40": ("#0072B2", "40"), "nothing": ("#D55E00", "x")}


@rc_context({"font.size": 12})
def draw_moments(found, title):
    picture = figure.Figure(figsize=(12.8, 1.5 + 0.7 * len(found)), layout="constrained")
    axes = picture.subplots()
    for row, moments in enumerate(found.values()):
        for place, what in enumerate(moments):
            axes.barh(row, 1, left=place, height=0.7, color=LOOK[what][0], edgecolor="white")
            axes.text(place + 0.5, row, LOOK[what][1], color="white", ha="center", va="center", weight="bold")
    axes.set(yticks=range(len(found)), yticklabels=list(found), xlabel="moments, in their order", ylim=(len(found), -1))
    axes.spines[["top", "right"]].set_visible(False)
    picture.suptitle(title, x=0.01, ha="left", fontsize=16, weight="bold")
    return picture


# %%
def show_moments(title):
    words = "; ".join(f"{name}: {', '.join(moments)}" for name, moments in found.items())
    show(draw_moments(found, title), f"{title}. What loads after a kill at each moment: {words}.")


show_moments("From its first moment to its last but one, torch.save leaves a file that does not load")

# %% [markdown]
# Read the picture from left to right. Green: step 30 is still the newest. Red: `step-40.pt` is there, and is not
# whole; whoever loads the newest file fails. Blue: step 40 is whole.
#
# **"`torch.save` is atomic" is refuted.** It creates the file first and fills it piece by piece. How bad is that? If a
# save takes one hundredth of the time, one failure in a hundred comes while saving. Llama 3 had 419.
#
# ### Exercise: whole at every moment
#
# Write `save(folder, step, state)`. The name `step-40.pt` may never stand for anything but the whole file. There are
# two enemies. A *kill* leaves what you handed to the system. A *power cut* leaves only what was flushed to the disk:
# `os.fsync(file.fileno())` flushes the bytes of a file, and
# `flush_directory(folder)` the names of a folder's files.

# %% exercise="12.save"

# %%
found["your save"] = killed_while(save)
show_moments("With a name of its own until it is whole, a file is never half there")

# %% [markdown]
# More moments, and no red one. What does a save cost that waits for the disk? On a laptop a few milliseconds. It is the
# first number that we need later on:

# %%
import time


def save_time(save, num_floats=1_000_000):
    with tempfile.TemporaryDirectory() as name:
        start = time.perf_counter()
        save(Path(name), 40, {"weight": torch.zeros(num_floats), "step": 40})
        return time.perf_counter() - start


for name, one in (("torch.save in place", save_in_place), ("your save", save)):
    print(f"{name:20} 4 MB in {1e3 * sorted(save_time(one) for _ in range(5))[2]:.1f} ms")

# %% [markdown]
# ## The same run
#
# The newest checkpoint loads. Is the run that goes on from it the same run? A small GPT reads Python's documentation.
# It has dropout, a learning rate that falls, and noise: some letters of the text are covered, by a generator of its
# own.

# %%
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig

CORPUS = ByteCorpus(python_documentation(), context=32)
CONFIG = GPTConfig(context=32, num_layers=2, num_heads=2, hidden_size=64, dropout=0.1)


def new_run(seed):
    torch.manual_seed(seed)
    model = GPT(CONFIG, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
    return model, optimizer, schedule, torch.Generator().manual_seed(seed)


# %%
def train(run, first, last):
    model, optimizer, schedule, noise = run
    losses = []
    for step in range(first, last):
        inputs, targets = CORPUS.batch(step, 16)
        covered = torch.rand(inputs.shape, generator=noise) < 0.05
        loss = GPT.loss(model(inputs.masked_fill(covered, 0)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


# %% [markdown]
# Train 40 steps without a failure. Then once more: save after step 20, and go on in a run that was built anew, with
# only some of the state restored. Predict: after 20 more steps, by how much does the loss differ if the weights alone
# were saved?

# %%
guess_2 = predict("Weights alone restored: the loss differs after 20 more steps by?", unit="nats")
guess_2

# %%
import copy

without_failure = train(new_run(0), 0, 40)


def go_on_with(*names):
    run = new_run(0)
    train(run, 0, 20)
    saved = copy.deepcopy([part.state_dict() for part in run[:3]]), run[3].get_state(), torch.get_rng_state()
    again = new_run(1)
    for name, part, state in zip(("weights", "optimizer", "schedule"), again, saved[0], strict=False):
        if name in names:
            part.load_state_dict(state)
    if "random" in names:
        again[3].set_state(saved[1])
        torch.set_rng_state(saved[2])
    return train(again, 20, 40)


# %%
SAVED = ("weights", "optimizer", "schedule", "random")
after = {" + ".join(SAVED[:count]): go_on_with(*SAVED[:count]) for count in (1, 2, 3, 4)}
gaps = {name: [abs(a - b) for a, b in zip(losses, without_failure[20:], strict=True)] for name, losses in after.items()}
guess_2.default(0.01)  # assumed if you gave no number above
print(guess_2.compare(gaps["weights"][-1]))


# %%
@rc_context({"font.size": 12})
def draw_gaps(gaps, title):
    picture = figure.Figure(figsize=(12.8, 4.4), layout="constrained")
    axes = picture.subplots()
    colours, styles = ("#D55E00", "#0072B2", "#009E73", "#1A1A1A"), ("-", "--", ":", "-")
    for (name, gap), colour, style in zip(gaps.items(), colours, styles, strict=True):
        axes.plot(range(21, 41), gap, style, color=colour, linewidth=2.4, label=name)
    axes.set(xlabel="step", ylabel="loss differs by (nats)", xticks=range(21, 41, 3))
    axes.spines[["top", "right"]].set_visible(False)
    picture.legend(loc="outside right upper", frameon=False, title="restored")
    picture.suptitle(title, x=0.01, ha="left", fontsize=16, weight="bold")
    return picture


worst = ", ".join(f"{name}: {max(gap):.3f}" for name, gap in gaps.items())
show(draw_gaps(gaps, "Only with everything restored is it the same run"), f"Largest difference of the loss. {worst}.")

# %% [markdown]
# With the weights alone Adam begins anew: its moments are zero, and its first steps are too large. With the moments,
# but without the schedule, the learning rate jumps back to its start. With both the run is as good as the other, and it
# is *another* run: dropout and noise draw other numbers. With the random numbers too, all losses are equal to the last
# bit.
#
# Why want the last bit? Because then a test can prove that nothing was forgotten, and because a strange loss at step
# 41,000 can be looked at again.
#
# ### Exercise: all that the rest of a run depends on
#
# Write `resumable(model, optimizer, schedule, generator)`. It returns two functions, `capture(position)` and
# `restore(state)`.

# %% exercise="12.resume"

# %%
run = new_run(0)
train(run, 0, 20)
capture, _ = resumable(*run)
state = capture(20 * 16)
again = new_run(1)
position = resumable(*again)[1](state)
print("losses equal to the last bit:", train(again, position // 16, 40) == without_failure[20:])

# %% [markdown]
# ## One checkpoint of all ranks
#
# With sharding (lesson 7) each rank holds a part, and each rank saves its own: 16,384 files, all at the same time. A
# checkpoint is then a *folder*, and it must come to exist all at once, with all of its files. The trick is the same:
# write into a folder of another name, and rename the folder. What is new is that rank 0 must know that the others are
# done.
#
# The following code was seen in many places. It is right on one rank. Run the check as it is, read what it says, find
# the line, repair it. (Flushing is left out here; a real save flushes every file and both folders.)

# %% exercise="12.shards"

# %% [markdown]
# `distlab.checkpoint.save` does all of this, on all ranks: a name that no reader looks at, flushes, one rename.

# %% [markdown]
# ## Wrong bits
#
# A disk, a cable or a copy can change a bit. Does `torch.load` notice? Save a small state, flip one bit of the file,
# load it, and do this 60 times with different bits. Predict how often it notices.

# %%
guess_3 = predict("Of 60 flipped bits, how many does torch.load notice?", unit="of 60")
guess_3

# %%
import hashlib
import io
import random


def flipped(data, chance):
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def notices(data):
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # whatever it says
        return True
    return False


# %%
file = io.BytesIO()
torch.save({"weight": torch.randn(64, 64), "bias": torch.randn(64)}, file)
good, chance = file.getvalue(), random.Random(0)
damaged = [flipped(good, chance) for _ in range(60)]
seen = {"torch.load": sum(map(notices, damaged))}
seen["SHA-256"] = sum(hashlib.sha256(data).digest() != hashlib.sha256(good).digest() for data in damaged)
guess_3.default(60)  # assumed if you gave no number above
print(guess_3.compare(seen["torch.load"], how="tried"))
show_bars(seen, "of 60", "torch.load takes a flipped bit for a number; a checksum sees every one")

# %% [markdown]
# A flipped bit in a tensor is another number, and most of a file is tensors. Nothing fails; the loss is a little
# strange, or not a number, some steps later. So a good checkpoint has a [manifest](../GLOSSARY.md#manifest): a list
# of its files, each with a checksum, written last. A file that is cut off, missing, or exchanged for another is found
# by it as well.
#
# ### Exercise: the newest that is whole
#
# Write `newest_good(folder)`. It says what is damaged by name, and takes the newest checkpoint in which nothing is.

# %% exercise="12.newest"

# %%
import json


def write_checkpoint(folder, step, num_ranks=2):
    path = folder / f"step-{step}"
    path.mkdir()
    files = {f"rank-{rank}.pt": os.urandom(50_000) for rank in range(num_ranks)}
    for name, data in files.items():
        (path / name).write_bytes(data)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    (path / "manifest.json").write_text(json.dumps({"step": step, "files": sums}))


# %% tags=["nbval-check-output"]
import os

with tempfile.TemporaryDirectory() as name:
    for step in (80, 90, 100):
        write_checkpoint(Path(name), step)
    shard = Path(name) / "step-100" / "rank-1.pt"
    shard.write_bytes(flipped(shard.read_bytes(), random.Random(1)))
    os.truncate(Path(name) / "step-90" / "rank-0.pt", 49_999)
    path, wrong = newest_good(Path(name))
    print(f"takes {path.name}; damaged: {', '.join(wrong)}")

# %% [markdown]
# ## More or fewer ranks
#
# A machine of eight GPUs is broken. You have a checkpoint of 1,024 ranks, and 1,016 GPUs. Waiting for a repair costs
# hours; going on with what is there is called [elastic](../GLOSSARY.md#elastic) training. Three things change: shards,
# samples, and the batch.
#
# *Shards.* A row of parameters was cut into 1,024 pieces and is now needed in 1,016. The simple way is to put the whole
# row together on each rank, and cut it again. A 405B model's states are 5.7 TB. But a new shard overlaps only one or
# two of the old ones. Here with 4 and 3 ranks: the colour says who saved it.


# %%
@rc_context({"font.size": 12})
def draw_cuts(size, num_saved, num_now, title):
    picture = figure.Figure(figsize=(12.8, 3.0), layout="constrained")
    axes = picture.subplots()
    old, new = -(-size // num_saved), -(-size // num_now)
    for saved, colour in enumerate(("#44AA99", "#CC6677", "#DDCC77", "#AA4499")):
        axes.barh([0, 1], old, left=saved * old, color=colour, height=0.6)
        axes.text((saved + 0.5) * old, 0, f"saved by rank {saved}", ha="center", va="center")
    for rank in range(num_now):
        axes.barh(1, new, left=rank * new, color="none", edgecolor="#1A1A1A", linewidth=2.4, height=0.6)
        axes.text((rank + 0.5) * new, 1.5, f"needed by rank {rank}", ha="center", va="center")
    axes.set(ylim=(1.8, -0.5), yticks=[], xlabel="element of the row")
    picture.suptitle(title, x=0.01, ha="left", fontsize=16, weight="bold")
    return picture


# %%
title = "Each new shard lies in at most two of the old ones"
words = "Rank 0 needs shard 0 and a third of 1, rank 1 two thirds of 1 and of 2, rank 2 a third of 2 and shard 3"
show(draw_cuts(24, 4, 3, title), f"{title}. {words}.")

# %% [markdown]
# ### Exercise: load a shard
#
# Write `load_shard(shard, size, num_saved, rank, read)`. `read(saved, start, stop)` reads a part of a saved shard from
# the disk. Budget: each element that is needed, once.

# %% exercise="12.load"


# %%
def elements_read(size, num_saved, num_now, rank=0):
    counts = []

    def read(saved, start, stop):
        counts.append(stop - start)
        return torch.zeros(stop - start)

    load_shard(torch.empty(-(-size // num_now)), size, num_saved, rank, read)
    return sum(counts)


bytes_read = {"whole row on each rank": 14 * 405e9 / 1e9, "the parts that are needed": 14 * 405e9 / 1016 / 1e9}
part = elements_read(405_000, 1024, 1016) / 405_000
print(f"a rank reads {part:.4%} of the row, one part in {1 / part:,.0f}")
show_bars(bytes_read, "GB", "Read what overlaps: a thousandth", "405B parameters, 14 bytes each, 1,024 to 1,016 ranks")

# %% [markdown]
# *Samples.* If every rank counted its own, a new number of ranks would take some twice and others never. So count the
# samples that **all** ranks have used together, the *position*. It is one number in the checkpoint. What lies behind it
# is dealt out anew.
#
# *Batch and rate.* Either the batch stays, and each rank takes a larger part of it: then the run is the same, and
# slower. Or each rank's part stays, and the batch shrinks: then the learning rate follows it, by lesson 4's rules.
#
# ### Exercise: the samples of a step
#
# Write `step_on(rule, lr, position, end, rank, world_size)`: which samples this rank takes in the step that begins at a
# position, the weight of its loss, and the learning rate.

# %% exercise="12.samples"

# %% tags=["nbval-check-output"]
from distlab.elastic import BatchRule

position, taken = 0, []
for world_size in (4, 4, 3, 3, 5):  # a rank is lost, and two come back
    parts = [step_on(BatchRule(12), 0.1, position, 100, rank, world_size)[0] for rank in range(world_size)]
    print(f"{world_size} ranks: {', '.join(f'{part.start} to {part.stop - 1}' for part in parts)}")
    taken += [sample for part in parts for sample in part]
    position += sum(len(part) for part in parts)
print("each sample once, none left out:", taken == list(range(position)))

# %% [markdown]
# ## How often?
#
# "Save every 1,000 steps" is a habit. Save too often, and the run waits for the disk. Save too seldom, and each failure
# undoes a lot. Between them is an interval that loses least.
#
# Say a save takes $C$, failures come every $M$ on average, and you save after every $t$ of training. Saving costs the
# share $C/t$. A failure undoes half an interval on average, so it costs $t/2$ each $M$: the share $t/(2M)$. The sum
# $C/t + t/(2M)$ is least where both are equal: $t = \sqrt{2CM}$ (Young 1974).
#
# Llama 3 on 16,384 GPUs: $M$ is three hours. Say that a checkpoint of its 405 billion parameters holds training up for
# 3 seconds. How many minutes between two saves lose least?

# %%
guess_4 = predict("Minutes between two saves, for C = 3 s and M = 3 hours?", unit="min")
guess_4

# %%
from simulator import Failures, young_s

LLAMA = Failures("llama-3", restart_s=600)
mtbf = LLAMA.mtbf_s(16384)
guess_4.default(60)  # assumed if you gave no number above
print(guess_4.compare(young_s(3.0, mtbf) / 60, how="by the formula"))

# %% [markdown]
# ### Exercise: what part of the time counts
#
# Do not believe the formula: try it. Write `useful_share(uptimes_s, interval_s, save_s, restart_s)`. It gets times
# between failures, and returns which share of all the time was training that counts. Whole rounds of training and
# saving count; what a failure undoes does not.

# %% exercise="12.share"

# %%
chance = random.Random(0)
uptimes = [chance.expovariate(1 / mtbf) for _ in range(20_000)]
for minutes in (0.5, 2, 4, 8, 30, 120):
    print(f"save every {minutes:5.1f} min: {useful_share(uptimes, 60 * minutes, 3.0, 600.0):.1%} of the time counts")

# %% [markdown]
# The best is where the formula says, and it is flat there: half or twice as often costs next to nothing. What is left
# to gain is not in the interval. It is in the time of a restart: ten minutes every three hours are 5 %.

# %%
from simulator.viz import describe_goodput, draw_goodput

show(draw_goodput(LLAMA, 16384, 3.0), describe_goodput(LLAMA, 16384, 3.0))

# %% [markdown]
# ## What to read next
#
# - Llama team 2024, *The Llama 3 Herd of Models* (arXiv:2407.21783), section 3.3.4: the causes above, and how they were
#   found.
#
# **Next: lesson 13**, which finds out why a run is slow or stands still, from a trace.
#
# ## Sources
#
# - Llama team 2024, *The Llama 3 Herd of Models*, table 5: 419 unplanned interruptions in 54 days.
# - Young 1974, *A first order approximation to the optimum checkpoint interval*; Daly 2006, *A higher order estimate of
#   the optimum checkpoint interval for restart dumps*.
# - In this repository: `distlab/checkpoint/`, `distlab/elastic/` and `simulator/runs/`; each `__init__` says in which
#   order.
