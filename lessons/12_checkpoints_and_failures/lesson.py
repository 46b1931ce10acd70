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
# - go on with more or fewer ranks, with no sample twice or lost, also without a restart;
# - choose how often to save, and check it by trial.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# Llama 3 was trained on 16,384 H100 GPUs. In 54 days the job was interrupted 466 times. 47 of these were planned; 419
# were not. A rank holds a part of the model that no other rank holds, so when one GPU fails, all 16,384 stop. Its
# report lists the causes.

# %%
from simulator.viz import draw_bars


def show_bars(numbers, unit, title, subtitle=""):
    """Draw numbers as bars, and say the same in words."""
    words = {"unit": unit, "title": title}
    show(draw_bars(numbers, subtitle=subtitle, **words))


causes = {"GPU": 148, "GPU memory": 72, "software bug": 54, "network switch or cable": 35, "host maintenance": 32}
causes |= {"the other 13 causes": 419 - sum(causes.values())}
show_bars(causes, "times", "More than half of the interruptions came from GPUs", "419 unplanned ones in 54 days")

# %% [markdown]
# Look at the first two bars: hardware breaks, and no care in your own code prevents that. A single GPU does not break
# often. How often does a job on fewer GPUs stop? Say you train on 1,024 such GPUs. Type a number into the box that
# the next cell shows, and press Commit.

# %%
guess_0 = predict("Hours between two failures, on 1,024 such GPUs?", unit="hours")
guess_0

# %%
from simulator import RATES

PER_HOUR = RATES["llama-3"].per_device_hour  # of one GPU: 419 in 54 days on 16,384
print(guess_0.compare(1 / (1024 * PER_HOUR), how="counted"))

# %% tags=["nbval-check-output"]
import math

guess_0.lock()
print("GPUs      hours between failures    a day of training, begun anew after each failure, takes")
for gpus in (8, 1024, 4096, 16384):
    mean = 1 / (gpus * PER_HOUR)  # hours
    print(f"{gpus:6,} {mean:16,.1f}               {mean * math.expm1(24 / mean) / 24:12,.1f} days")

# %% [markdown]
# Where do the hours come from? 54 days are 1,296 hours, and 1,296 / 419 = 3.1 hours<!--out--> between two failures of
# 16,384 GPUs. 1,024 GPUs are a sixteenth of them, so they fail a sixteenth as often: every 49.5 hours<!--out-->. One
# GPU fails once in six years.
#
# The last column is what happens without [checkpoints](../GLOSSARY.md#checkpoint): a run that needs a day without a
# failure waits for such a day. The mean time between failures is $M$; failures come at random, so a stretch of $T$ has
# none with the chance $e^{-T/M}$. On average it takes $e^{T/M}$ tries, all but the last cut short: together
# $M (e^{T/M} - 1)$ of time. On eight GPUs nobody notices. On 16,384 a single day takes most of a year.
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
# First a rule for loading: of all files `step-N.pt`, take the one with the highest N.

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
# that loads? Predict: of all moments at which the folder changes, after which part does nothing load?

# %%
guess_1 = predict("After which part of the moments in torch.save does nothing load?", unit="%")
guess_1


# %%
def save_in_place(folder, step, state):
    torch.save(state, folder / f"step-{step}.pt")


found = {"torch.save in place": killed_while(save_in_place)}
moments = found["torch.save in place"]
print(guess_1.compare(100 * moments.count("nothing") / len(moments), how="tried"))


# %%
from matplotlib import figure, rc_context


@rc_context({"font.size": 12})
def draw_boxes(rows, title, below):
    picture = figure.Figure(figsize=(12.8, 1.5 + 0.7 * len(rows)), layout="constrained")
    axes = picture.subplots()
    for row, boxes in enumerate(rows.values()):
        left = 0
        for width, colour, text in boxes:
            axes.barh(row, width, left=left, height=0.7, color=colour, edgecolor="white")
            axes.text(left + width / 2, row, text, color="white", ha="center", va="center", weight="bold")
            left += width
    axes.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel=below, ylim=(len(rows), -1))
    picture.suptitle(title, x=0.01, ha="left", fontsize=16, weight="bold")
    return picture


# %%
GREEN, BLUE, ORANGE, VIOLET = "#00735A", "#0072B2", "#A84300", "#7A3E9D"
LOOK = {"step 30": (GREEN, "30"), "step 40": (BLUE, "40"), "nothing": (ORANGE, "x")}


def show_moments(title):
    rows = {name: [(1, *LOOK[what]) for what in moments] for name, moments in found.items()}
    words = "; ".join(f"{name}: {', '.join(moments)}" for name, moments in found.items())
    loads = f"{title}. What loads after a kill at each moment: {words}."
    show(draw_boxes(rows, title, "moments, in their order"), loads)


guess_1.lock()
show_moments("Between its first moment and its last, torch.save leaves a file that does not load")

# %% [markdown]
# Read the picture from left to right. Green: step 30 is still the newest. Orange: `step-40.pt` is there, and is not
# whole; whoever loads the newest file fails. Blue: step 40 is whole.
#
# **"`torch.save` is atomic" is refuted.** It creates the file first and fills it piece by piece. How bad is that? If
# a save takes one hundredth of the time, one failure in a hundred comes while saving: about four of Llama 3's 419.
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
# Now there are more moments, and none is orange. How long does a save take that waits for the disk? On a laptop a few
# milliseconds. It is the first number that we need later on:

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
# were saved? (Its unit is the *nat*: cross-entropy takes the natural logarithm.)

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
print(guess_2.compare(gaps["weights"][-1]))


# %%
@rc_context({"font.size": 12})
def draw_lines(lines, title, below, beside, look=("-", "--", ":", "-"), **own):
    picture = figure.Figure(figsize=(12.8, 4.4), layout="constrained")
    axes = picture.subplots()
    colours = ("#D55E00", "#0072B2", "#009E73", "#1A1A1A")
    for (name, (xs, ys)), style, colour in zip(lines.items(), look, colours, strict=False):
        axes.plot(xs, ys, style, color=colour, linewidth=2.4, label=name)
    axes.set(xlabel=below, ylabel=beside, **own)
    axes.spines[["top", "right"]].set_visible(False)
    picture.legend(loc="outside right upper", frameon=False)
    picture.suptitle(title, x=0.01, ha="left", fontsize=16, weight="bold")
    return picture


# %%
guess_2.lock()
worst = ", ".join(f"{name}: {max(gap):.3f}" for name, gap in gaps.items())
lines = {name: (range(21, 41), gap) for name, gap in gaps.items()}
title = "Only with everything restored is it the same run"
picture = draw_lines(lines, title, "step", "loss differs by (nats)", xticks=range(21, 41, 3))
show(picture, f"{title}. Largest difference of the loss, by what was restored. {worst}.")

# %% [markdown]
# With the weights alone Adam begins anew: its moments are zero, and its first steps are too large. With the moments,
# but without the schedule, the learning rate jumps back to its start. With both the run is as good as the other, and it
# is a *different* run: dropout and noise draw other numbers. With the random numbers too, all losses are equal to the
# last bit.
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
# ### A kill that is real
#
# Now two ranks train together, with the library's `ElasticRun`. It saves every 3 steps, and rank 1 is killed (SIGKILL)
# in step 7. `run_elastic` starts both ranks anew, as `torchrun --max-restarts` does, and they go on from step 6. The
# same without a kill: are the weights equal to the last bit? In the code `BatchRule(12)` is a batch of 12 samples, and
# the 120 are all samples of the run. `Saves(3)` is a save every 3 steps, and `Fault("kill", 7, 1)` kills rank 1 in step
# 7.

# %%
from distlab.data_parallel import DataParallel
from distlab.elastic import BatchRule, ElasticRun, Fault, Faults, Saves, Work, run_elastic
from distlab.rng import seed_rank


def train_elastic(folder, kills=()):
    seed_rank(12, dist.get_rank())
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    replicas, optimizer = DataParallel(model), torch.optim.AdamW(model.parameters(), lr=3e-3)
    parts, losses, faults = {"model": model, "optimizer": optimizer}, {}, Faults(kills, Path(folder) / "marks")
    with ElasticRun(folder, parts, work=Work(BatchRule(12), 120), saves=Saves(3), faults=faults) as run:
        for step in run:
            losses[step.number] = one_step(model, replicas, optimizer, step)
    return torch.cat([one.detach().flatten() for one in model.parameters()]), losses


# %%
def one_step(model, replicas, optimizer, step):
    inputs, targets = (torch.cat(each) for each in zip(*(CORPUS.batch(int(at), 1) for at in step.samples), strict=True))
    loss = GPT.loss(model(inputs), targets) * step.weight
    loss.backward()
    replicas.synchronize()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach_())
    return float(loss) / dist.get_world_size()


# %%
import warnings

warnings.simplefilter("ignore")  # run_elastic warns of each restart
with tempfile.TemporaryDirectory() as name:
    quiet, _ = run_elastic(train_elastic, 2, args=(f"{name}/quiet",))[0]
    killed, made = run_elastic(train_elastic, 2, args=(f"{name}/killed", (Fault("kill", 7, 1),)), echo=False)[0]
print(
    f"the second start made steps {min(made)} to {max(made)}; weights equal to the last bit:",
    torch.equal(quiet, killed),
)

# %%
begun = {
    "first start": [(1, GREEN if n < min(made) else ORANGE, f"{n}") for n in range(8)],
    "second start": [(min(made), "white", ""), *((1, GREEN, f"{n}") for n in made)],
}
title = "Of ten steps two were made twice: what was not saved is lost (orange)"
words = f"First start: steps 0 to 7; {min(made)} to 7 are lost. Second start: steps {min(made)} to {max(made)}."
show(draw_boxes(begun, title, "steps that each start began, two ranks"), f"{title}. {words}")

# %% [markdown]
# Steps 6 and 7 were run twice, and the weights show no trace of that. Each depends on three things alone: on what the
# checkpoint holds, on the step's number, and on the rank.
#
# The idea needs no more than a loop. The library's `plain_train` has it on one screen: take the newest checkpoint, make
# the steps that are left, save now and then. The same kill, with the loop:

# %%
import inspect

from distlab.elastic import plain_train

print(inspect.getsource(plain_train).rpartition('"""\n')[2])


# %%
def train_plainly(folder, kills=()):
    model, faults = GPT(CONFIG, torch.Generator().manual_seed(0)), Faults(kills, Path(folder) / "marks")
    replicas, optimizer = DataParallel(model), torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train_step(number):
        faults.before_step(number, dist.get_rank(), 2)
        seed_rank(number, dist.get_rank())  # dropout: of the step's number and of the rank
        inputs, targets = CORPUS.batch(number, 12, rank=dist.get_rank(), world_size=2)
        GPT.loss(model(inputs), targets).backward()
        (replicas.synchronize(), optimizer.step(), optimizer.zero_grad())

    parts = {"model": model, "optimizer": optimizer}
    first = plain_train(train_step, 10, directory=folder, parts=parts, save_every=3)
    return torch.cat([one.detach().flatten() for one in model.parameters()]), first


# %%
with tempfile.TemporaryDirectory() as name:
    quiet, _ = run_elastic(train_plainly, 2, args=(f"{name}/quiet",))[0]
    killed, first = run_elastic(train_plainly, 2, args=(f"{name}/killed", (Fault("kill", 7, 1),)), echo=False)[0]
print(f"the second start began with step {first}; weights equal to the last bit:", torch.equal(quiet, killed))

# %% [markdown]
# ## One checkpoint of all ranks
#
# With sharding (lesson 7) each rank holds a part, and each rank saves its own: 16,384 files, all at the same time. A
# checkpoint is then a *folder*, and it must come to exist all at once, with all of its files. The trick is the same:
# write into a folder of a different name, and rename the folder. One thing is new: rank 0 must know that the others are
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
print(guess_3.compare(seen["torch.load"], how="tried"))
show_bars(seen, "of 60", "torch.load takes a flipped bit for a number; a checksum sees every one")

# %% [markdown]
# A flipped bit in a tensor is a different number, and most of a file is tensors. Nothing fails; the loss is a little
# strange, or not a number, some steps later. So a good checkpoint has a [manifest](../GLOSSARY.md#manifest): a list
# of its files, each with a checksum, written last. A file that is cut off, missing, or exchanged for a different one is
# found by it as well.
#
# ### Exercise: the newest that is whole
#
# Write `newest_good(folder)`. It says what is damaged by name, and takes the newest checkpoint in which nothing is
# damaged.

# %% exercise="12.newest"

# %%
import json
import os


def write_checkpoint(folder, step, num_ranks=2):
    path = folder / f"step-{step}"
    path.mkdir()
    files = {f"rank-{rank}.pt": os.urandom(50_000) for rank in range(num_ranks)}
    for name, data in files.items():
        (path / name).write_bytes(data)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    (path / "manifest.json").write_text(json.dumps({"step": step, "files": sums}))


# %% tags=["nbval-check-output"]
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
# Guides' elastic loops ask `dist.get_world_size()` in each step. It never changes by itself: a group has the ranks with
# which it was made. A lost rank shows as a collective that fails; then all start anew, as under torchrun.
#
# *Shards.* A row of parameters was cut into 1,024 pieces and is now needed in 1,016. The simple way is to put the whole
# row together on each rank, and cut it again. A 405B model's states are 5.7 TB: 14 bytes per parameter, which
# are lesson 6's 16 without the gradients, since nobody saves these. But a new shard overlaps only two of the old ones,
# rarely three. Here with 4 and 3 ranks: the colour says who saved an element, the number who needs it.


# %%
shades = [(GREEN, BLUE, ORANGE, VIOLET)[at // 6] for at in range(24)]
cuts = {
    "saved by rank": [(1, shade, f"{at // 6}") for at, shade in enumerate(shades)],
    "needed by rank": [(1, shade, f"{at // 8}") for at, shade in enumerate(shades)],
}
title = "Each new shard lies in at most two of the old ones"
words = "Rank 0 needs shard 0 and a third of 1, rank 1 two thirds of 1 and of 2, rank 2 a third of 2 and shard 3"
show(draw_boxes(cuts, title, "elements of the row"), f"{title}. {words}.")

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
# samples that **all** ranks have used together, the *position*. It is one number in the checkpoint. The samples after
# it are dealt out again.
#
# *Batch and rate.* Either the batch stays, and each rank takes a larger part of it: then the run is the same, and
# slower. Or each rank's part stays, and the batch shrinks: then the learning rate follows it, by lesson 4's rules.

# %% tags=["nbval-check-output"]
from distlab.plan import split_evenly

position, taken = 0, []
for world_size in (4, 4, 3, 3, 5):  # a rank is lost, and two come back
    parts = [range(position + start, position + stop) for start, stop in split_evenly(12, world_size)]
    print(f"{world_size} ranks: {', '.join(f'{part.start} to {part.stop - 1}' for part in parts)}")
    taken += [sample for part in parts for sample in part]
    position += 12
print("each sample once, none left out:", taken == list(range(position)))

# %% [markdown]
# ## Without a restart
#
# A death has cost a start of all ranks so far, and the steps since the last save. Could the others just go on? Not in
# their group: a group never changes. After the death `dist.get_world_size()` still says 3, and each call fails. But
# the processes are alive, and each holds weights, moments and the gradient of its own samples. So those that are left
#
# 1. leave the group, which ends the calls of those who still wait in it;
# 2. settle who goes on: the [quorum](../GLOSSARY.md#quorum). A store that outlives them all holds what each says;
# 3. make a new group, in the same process, and repeat the all-reduce: the mean over the samples that are left;
# 4. vote whether all have the mean, and only then make the update. So no replica is ever two updates ahead.
#
# A new process in the place of the dead one takes weights and moments from a peer, between two steps.
#
# ### Exercise: who is in the quorum
#
# Write `who_goes_on(arrived, alive, last, min_replicas)`. It gets what stands in the store, and says who makes the next
# steps. All replicas read the same, so all come to the same answer.

# %% exercise="12.quorum"

# %% [markdown]
# The library's `Replicas` does all four. Three [replicas](../GLOSSARY.md#replica) train with a batch of 12, and replica
# 1 is killed in step 5. Compared with a step without a death, how much longer does step 5 take for the other two?

# %%
guess_4 = predict("The step in which one dies takes how much longer?", unit="ms")
guess_4

# %%
from distlab.elastic import Replicas, run_replicas


def train_replica(seat, folder, steps, kills):
    model, faults, ends = GPT(CONFIG, torch.Generator().manual_seed(0)), Faults(kills, folder), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with Replicas(seat, {"model": model, "optimizer": optimizer}, work=Work(BatchRule(12), 12 * steps)) as replicas:
        for step in replicas:
            faults.before_step(step.number, seat.number, 3)
            optimizer.zero_grad()
            loss_on(model, step.samples).backward()
            replicas.commit(optimizer.step)
            ends.append(1e3 * time.perf_counter())
    return torch.cat([one.detach().flatten() for one in model.parameters()]), replicas.history, ends


# %%
def loss_on(model, samples):
    pairs = [CORPUS.batch(int(at), 1) for at in samples]
    inputs, targets = (torch.cat(each) for each in zip(*pairs, strict=True))
    return GPT.loss(model(inputs), targets)


def costs_of(history, ends):
    """Return how long each step but the first took, and how long those in which nothing changed, in ms."""
    took = {step: end - ends[step - 1] for step, end in enumerate(ends) if step}
    changed = {step for step, *_ in history}
    usual = [one for step, one in took.items() if step not in changed]
    return took, sum(usual) / len(usual)


# %%
with tempfile.TemporaryDirectory() as name:
    replicas = run_replicas(train_replica, 3, args=(name, 40, [Fault("kill", 5, 1)]), echo=False)
_, history, ends = replicas[0]
took, usual_ms = costs_of(history, ends)
died, *came = [step for step, *_ in history if step > 4 and step != 6]
lost_ms = took[died] - usual_ms
print(guess_4.compare(lost_ms))

# %%
guess_4.lock()
for step, dealt, done in history:
    print(f"from step {step:2} on: samples dealt among {dealt}, finished by {done}")
print("weights equal to the last bit:", all(torch.equal(replicas[0][0], one) for one, *_ in replicas.values()))

# %%
at = {step: len(done) for step, _, done in history}
boxes, now = [], 3
for step, took_ms in list(took.items())[: max([20, *came])]:
    now = at.get(step, now)
    boxes.append((took_ms, ORANGE if step == died else BLUE if now == 2 else GREEN, f"{step}" if step % 5 == 0 else ""))
title = f"One dies in step {died}: two finish it, {lost_ms:.0f} ms later (orange)"
words = ", ".join(f"{took_ms:.0f}" for took_ms, *_ in boxes)
show(draw_boxes({"replica 0": boxes}, title, "ms of training"), f"{title}. ms for each step from 1 on: {words}.")

# %% [markdown]
# Green: three replicas. Blue: two. The samples of the dead one are not used in the orange step: its batch is
# smaller. From the next step on the two share all 12. The first green box after the blue ones is longer than its
# neighbours: in it a new process got weights and moments.
#
# torchft, a library beside PyTorch, has the same parts: a server, the *lighthouse*, settles the quorum; replicas vote
# whether a step counts; who is behind takes a peer's state.
#
# Does what one death costs predict a run with three? Each death stops all for the orange and the long green box, and
# nothing is made twice.

# %%
from simulator import Failures, goodput, regroup_goodput

kills = [Fault("kill", 5, 1), Fault("kill", 30, 2), Fault("kill", 55, 1)]
with tempfile.TemporaryDirectory() as name:
    _, changes, ends = run_replicas(train_replica, 3, args=(name, 80, kills), echo=False)[0]
each_s = sum(took[step] - usual_ms for step in (died, *came)) / 1e3
total_s, (_, undisturbed_ms) = (ends[-1] - ends[0]) / 1e3, costs_of(changes, ends)
predicted = regroup_goodput(total_s / 3, 3, regroup_s=each_s, replace_s=0.0).useful  # the batch stays: all is trained
measured = undisturbed_ms / 1e3 * (len(ends) - 1) / total_s

# %%
hours = Failures("llama-3").mtbf_s(16384)
shares = {"here, predicted": predicted, "here, measured": measured}
shares["16,384 GPUs, all restart"] = goodput(3.0, hours, restart_s=600).useful
shares["16,384 GPUs, 1 of 128 replicas leaves"] = regroup_goodput(hours, 128, regroup_s=2.0, replace_s=600.0).useful
title = "Predicted and measured: where one leaves, the others lose a moment"
below = f"part of the time that counts; here a death each {total_s / 3:.1f} s, there every 3 hours, 10 minutes each"
show_bars({name: 100 * share for name, share in shares.items()}, "%", title, below)

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
# Llama 3 on 16,384 GPUs: $M$ is three hours. Say that a checkpoint of its 405 billion parameters stops training for 3
# seconds. How many minutes between two saves lose the least time?

# %%
guess_5 = predict("Minutes between two saves, for C = 3 s and M = 3 hours?", unit="min")
guess_5

# %%
from simulator import young_s

LLAMA = Failures("llama-3", restart_s=600)
mtbf = LLAMA.mtbf_s(16384)
print(guess_5.compare(young_s(3.0, mtbf) / 60, how="by the formula"))

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
# The best is where the formula says, and it is flat there: half or twice as often costs next to nothing. You gain
# more by a faster restart: ten minutes every three hours are 5 %<!--out-->.
#
# ### Formula, trial and a run, in one picture
#
# The last step is a run that really fails. A model trains on this machine, your `save` writes real files, and failures
# come at random: one in the time of 30 saves, on average, since this run is short. Each throws the run back to the last
# file that was saved in time.


# %%
def real_run(interval_s, mtbf_s, seconds, step, chance):
    """Train, save and fail for some seconds; return the share of time that counts."""
    now, kept = time.perf_counter(), 0.0
    begin = now
    while now < begin + seconds:
        fails, saved = now + chance.expovariate(1 / mtbf_s), now
        while now < fails:
            while now < min(saved + interval_s, fails):
                now = step()
            if now < fails:
                save(FOLDER, 1, STATE)
                trained, now = now - saved, time.perf_counter()
                kept, saved = kept + trained * (now < fails), now
    return kept / (now - begin)


# %%
held_folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
FOLDER, STATE = Path(held_folder.name), {"weight": torch.zeros(300_000)}
weight, chance = torch.randn(64, 64), random.Random(1)


def one_step_of_training():
    torch.mm(weight, weight)
    return time.perf_counter()


times = [-time.perf_counter() + (save(FOLDER, 1, STATE), time.perf_counter())[1] for _ in range(9)]
save_s, tried = sorted(times)[4], [sorted(times)[4] * times_a_save for times_a_save in (0.5, 2, 8, 20, 40)]
mtbf_s = 30 * save_s
shares = [real_run(interval, mtbf_s, 1.2, one_step_of_training, chance) for interval in tried]
print(f"a save takes {1e3 * save_s:.1f} ms; by the formula every {1e3 * young_s(save_s, mtbf_s):.0f} ms is best")

# %%
import numpy as np

intervals = np.geomspace(tried[0], tried[-1], 40)
formula = [goodput(save_s, mtbf_s, interval_s=float(interval)).useful for interval in intervals]
draws = random.Random(2)
uptimes = [draws.expovariate(1 / mtbf_s) for _ in range(5000)]
by_trial = [useful_share(uptimes, float(interval), save_s, 0.0) for interval in intervals[::3]]


# %%
best_s = young_s(save_s, mtbf_s)
lines = {
    "formula": (1e3 * intervals, formula),
    "drawn failures, your useful_share": (1e3 * intervals[::3], by_trial),
    "Young's interval": ([1e3 * best_s, 1e3 * best_s], [0, 1]),
    "a real run that fails": ([1e3 * one for one in tried], shares),
}
title, looks = "How often to save: a formula, a trial and a real run", ("-", "o", ":", "s")
names = ("ms of training between two saves", "share of the time")
pairs = ", ".join(f"{1e3 * at:.0f} ms: {share:.0%}" for at, share in zip(tried, shares, strict=True))
show(draw_lines(lines, title, *names, looks, xscale="log", ylim=(0, 1)), f"{title}. Share of the real run. {pairs}.")

# %% [markdown]
# Formula and trial give the same curve. The black squares are a few failures each, so they scatter. Where they lie
# far below the curve, the machine was busy: saves took longer than the one that was measured before, so the best
# interval is longer too. Close other programs and run the three cells again.
#
# Now with the numbers of Llama 3, and sliders. Where does the time go if you take more devices, or restart faster?

# %%
from simulator.viz import goodput_panel

panel = goodput_panel()
panel

# %%
panel.controls["restart_minutes"].value = 2  # from ten
print(panel.text)

# %% [markdown]
# ## Saving beside training
#
# A save makes training wait. Does it have to? Copy the state in memory, which is quick, and let a thread write the
# copy while training goes on: an *asynchronous* save. Guides say: "Asynchronous checkpoints are free." Measure it:

# %%
from distlab.checkpoint import AsyncSaves
from distlab.checkpoint import save as library_save

large = torch.nn.Linear(1000, 4000)
parts = {"model": large, "optimizer": torch.optim.AdamW(large.parameters())}


def seconds(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


with tempfile.TemporaryDirectory() as name:
    waits = sorted(seconds(lambda step=step: library_save(f"{name}/a", step, parts=parts)) for step in range(5))[2]
    with AsyncSaves(f"{name}/b") as saves:
        for step in range(5):
            saves.save(step, parts=parts)
            saves.wait()
        beside = saves.held_s / 5

# %%
held = {"save": 1e3 * waits, "asynchronous save": 1e3 * beside}
show_bars(held, "ms", "A save beside training holds it up for a moment", "16 MB, one rank, training waits")

# %% [markdown]
# **"Asynchronous checkpoints are free" is nearly true for time**. It is not true for the rest: there is a second copy
# in host memory, and a wire and a disk are busy. And until the thread is done, the newest checkpoint is the one
# before. A failure in the meantime costs one more interval.
#
# ## Production: torch's own
#
# `torch.distributed.checkpoint` (DCP) writes a file per rank and `.metadata` last, without checksums. Does it survive a
# kill? Saved twice into *one* directory, as many scripts do, and looked at after each call:

# %%
import contextlib
import logging

import torch.distributed.checkpoint as dcp

logging.disable()


def dcp_loads(crash):
    with tempfile.TemporaryDirectory() as name:
        crash.restore(Path(name))
        state = {"weight": torch.zeros(64, 64), "step": torch.zeros(1)}
        with contextlib.suppress(BaseException), contextlib.redirect_stderr(io.StringIO()):  # it has many words
            dcp.load(state, checkpoint_id=name)
            return f"step {int(state['step'])}" if float(state["weight"].std()) == 0 else "nothing"
    return "nothing"


def dcp_save(folder, step):
    dcp.save({"weight": torch.full((64, 64), float(step)), "step": torch.tensor([float(step)])}, checkpoint_id=folder)


# %%
with tempfile.TemporaryDirectory() as name:
    dcp_save(Path(name), 30)
    crashes = crash_points(lambda: dcp_save(Path(name), 40), Path(name))
    found["DCP, one directory"] = [dcp_loads(crash) for crash in crashes]
show_moments("Into one directory, DCP overwrites the checkpoint that it replaces")

# %% [markdown]
# So give each step a directory of its own, and delete older ones when the new one is whole. That is what the settings
# below do. DCP has no checksums: a flipped bit loads.
#
# | | how often | beside training | which to keep |
# |---|---|---|---|
# | distlab | `Saves(every=...)` | `Saves(beside=True)` | `keep=` |
# | torch | call `dcp.save` | `dcp.async_save` | by hand |
# | torchtitan | `checkpoint.interval` | `checkpoint.async_mode = "async"` | `checkpoint.keep_latest_k` |
# | Megatron-LM | `--save-interval` | `--async-save` | |
# | DeepSpeed | call `save_checkpoint` | | by hand |
#
# ## Popular claims, tested
#
# - **"torch.save is atomic."** Refuted: four of six moments leave a file that does not load.
# - **"A damaged checkpoint does not load."** Refuted for flipped bits: about one of 60 was noticed. A file that was
#   cut off is noticed.
# - **"Save every 1,000 steps."** A habit. $\sqrt{2CM}$ depends on your save and your failures: four minutes on
#   16,384 GPUs with a save of 3 seconds, three hours on eight.
# - **"Asynchronous checkpoints are free."** Nearly, in time; see above for the rest.
# - **"Weights are enough to resume."** The run goes on after a jump of the loss, but it is a different run.
# - **"Elastic training is transparent."** Only if position, batch and learning rate follow a rule, and then up to
#   rounding and dropout.

# %% [markdown]
# ## Lab
#
# The same under torchrun: ranks of a small GPT are killed while they train and save, with your `resumable` and
# `save_shards` in the loop. The weights' hash must be that of a run without a failure. Then half of the
# run on all ranks and half on one fewer.
#
# ```
# distlab lab 12 --ranks 2 --impl reference
# distlab lab 12 --ranks 4 --impl mine --kills 4
# ```
#
# By torchrun itself, which is also how it runs on GPUs:
#
# ```
# torchrun --nproc-per-node 4 lessons/12_checkpoints_and_failures/lab.py --impl reference
# ```
#
# `lab_reference.md` next to it has the output to compare with.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. A job on 512 of the GPUs above, and a save that takes 20 seconds: how often?
# 2. The store takes 100 GB/s, a 70B model's checkpoint has 14 bytes per parameter. How long does a save take?
# 3. Ten minutes to restart, 16,384 GPUs: how much of the time is useful with the best interval? With one minute?
# 4. A batch of 1,024 on 128 ranks at a rate of 1e-3, the part of each rank stays, Adam. What is the rate on 96 ranks?
# 5. On average, how many steps are made twice per failure, if you save every 200 steps?

# %% tags=["nbval-check-output"]
print(f"1. every {young_s(20, 3600 / (512 * PER_HOUR)) / 60:.0f} minutes")
print(f"2. {14 * 70e9 / 100e9:.1f} s")
for restart_s in (600, 60):
    print(f"3. {restart_s:3} s to restart: {goodput(3.0, mtbf, restart_s=restart_s).useful:.1%} useful")
print(f"4. {1e-3 * (96 / 128) ** 0.5:.2e}: the batch is {1024 * 96 // 128}, and Adam takes the root")
print("5. about 100: half an interval")

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
# - torchft's documentation, https://docs.pytorch.org/torchft/: lighthouse, quorum, manager.
# - In this repository: `distlab/checkpoint/`, `distlab/elastic/` and `simulator/runs/`; each `__init__` says in which
#   order.
