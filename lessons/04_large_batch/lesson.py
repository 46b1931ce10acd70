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
# # 4. Large batches
#
# 75 minutes. Comes after lessons 1 ([ranks](../GLOSSARY.md#rank) and messages) and 3 ([data
# parallel](../GLOSSARY.md#data-parallel)). You need no GPU: four processes on this machine are the four ranks.
#
# Afterwards you can
#
# - scale a learning rate with the batch, linearly or by the root, [warm it up](../GLOSSARY.md#warmup), and resume it
#   without a jump;
# - [accumulate](../GLOSSARY.md#accumulation) gradients over [micro-batches](../GLOSSARY.md#micro-batch) and ranks so
#   that they equal one large batch;
# - write [LARS](../GLOSSARY.md#lamb-lars) and LAMB, and say where implementations differ and what that does;
# - read from measured curves, with their spread, where large batches cost accuracy and what helps.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# The next picture shows four trainings of the same length: each sees the same data 20 times. Only the batch differs.
# Look at the number of updates. The largest batch makes 45 times fewer of them than the smallest. Can 20 updates teach
# a model what 900 taught it? With which learning rate, and with which optimizer? This lesson answers that.

# %%
from simulator.viz import draw_bars

updates = {f"batch {batch:,}": 20.0 * -(-1437 // batch) for batch in (32, 128, 512, 1437)}  # -(-a // b) rounds up
words = {"unit": "updates", "title": "20 passes over 1,437 samples: a larger batch means fewer updates"}
show(draw_bars(updates, **words))

# %% [markdown]
# Why would you want so large a batch? Lesson 3 left this question open. A GPT of 1.3 billion parameters trains on 8
# H100 with 16 samples of 2,048 tokens each: a batch of 128 samples. You get 64 GPUs. There are two ways to use them.
# Keep the batch, so that each GPU has 2 samples. Or keep 16 samples per GPU, so that the batch is 1,024. What does
# the simulator say about speed?

# %%
from distlab.plan import Plan
from simulator import cluster, gpt_workload, simulate


def samples_per_s(num_gpus, samples_each, **plan):
    gpt = gpt_workload(
        hidden_size=2048,
        num_layers=24,
        num_heads=16,
        sequence_length=2048,
        vocab_size=51200,
        microbatch_size=samples_each,
    )
    return simulate(gpt, cluster("dgx-h100", num_gpus, stack="best-case"), Plan(data=num_gpus, **plan)).samples_per_s


# %% [markdown]
# Eight times the GPUs, the same batch. Before you look: how many times faster, in samples per second? There is one
# [all-reduce](../GLOSSARY.md#all-reduce) of all gradients after backward ("flat"), and nothing hides it.

# %%
guess_0 = predict("How many times faster are 64 GPUs than 8, with the same batch?", unit="x")
guess_0

# %% tags=["nbval-check-output"]
base = samples_per_s(8, 16, gradient_sync="flat")
gains = {}
for each in (2, 4, 16):
    gain = samples_per_s(64, each, gradient_sync="flat") / base
    gains[f"{each} samples each, batch {64 * each:,}"] = gain
    print(f"64 GPUs with {each:2} samples each, a batch of {64 * each:5,}: {gain:.1f}x the samples a second of 8 GPUs")
print(guess_0.compare(next(iter(gains.values())), how="with the same batch it is"))

# %%
guess_0.lock()
words = {"unit": "x", "title": "64 GPUs against 8: eight times the GPUs are used well only with a large batch"}
show(draw_bars(gains, subtitle="samples per second, simulated", **words))

# %% [markdown]
# The larger batch uses the machine better: each GPU computes longer between two exchanges. But samples per second are
# not what you pay for. You pay for a model that is good enough, and a batch of 1,024 makes **eight times fewer
# updates** from the same data. If the model learns as much with fewer updates, you have it almost eight times sooner.
# If it then needs 20 % more data, you pay for 20 % more computing. This lesson is about those updates.

# %% [markdown]
# ## A real model, small enough to try
#
# 1,437 scanned digits to learn from, 360 to test on, and a network of two layers without normalisation. Batches go
# from 32 to **1,437, all of it**: one update per epoch. Every run gets 20 epochs: 900 updates with a batch of 32, and
# 20 with the largest.

# %%
import math

from distlab.data import digits

DATA = digits()
WIDTHS = (64, 128, 10)


def digit_net(seed=0):
    layers, draw = [], torch.Generator().manual_seed(seed)
    for wide, narrow in zip(WIDTHS[:-1], WIDTHS[1:], strict=True):
        layer = torch.nn.Linear(wide, narrow)
        torch.nn.init.normal_(layer.weight, std=math.sqrt(2 / wide), generator=draw)
        torch.nn.init.zeros_(layer.bias)
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


# %% [markdown]
# The training program, on any number of ranks. Each rank takes its slice of every batch; 1,437 samples on four ranks
# are slices of 360, 359, 359 and 359, so losses are weighted (lesson 3). `rate_of` gives the rate of every update.

# %%
from distlab.data import rank_slice
from distlab.data_parallel import DataParallel, average_per_parameter, loss_weight, train_step


def batch_of(step, batch, rank, world_size):
    epoch, place = divmod(step, -(-1437 // batch))
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(epoch))
    chosen = order[place * batch : (place + 1) * batch]
    start, stop = rank_slice(len(chosen), rank, world_size)
    chosen, share = chosen[start:stop], loss_weight(stop - start, len(chosen), world_size)
    return (DATA.train_inputs[chosen], DATA.train_targets[chosen]), share


# %%
def learn(make_optimizer, batch, rate_of, epochs=20, dtype=torch.float32):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = digit_net().to(dtype)
    replica = DataParallel(model, check_finite=False)  # some of these runs are meant to break
    optimizer = make_optimizer(model.parameters())
    for step in range(epochs * -(-1437 // batch)):
        (inputs, targets), share = batch_of(step, batch, rank, world_size)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        call = {"batch": (inputs.to(dtype), targets), "loss_fn": torch.nn.functional.cross_entropy}
        train_step(model, optimizer, **call, synchronize=replica.synchronize, weight=share)
    right = model(DATA.test_inputs.to(dtype)).argmax(-1) == DATA.test_targets
    return float(right.double().mean()), [p.detach() for p in model.parameters()]


# %% [markdown]
# First the proof that has to come before any curve: a batch of 1,437 on four ranks is the batch of 1,437 in one
# process.


# %% tags=["nbval-check-output"]
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.0, momentum=0.9)


ranks = Ranks(4)
proof = (sgd, 1437, lambda step: 0.01, 10, torch.float64)
judge = run(learn, 1, args=proof)[0]
for rank, (_, weights) in enumerate(ranks.run(learn, *proof)):
    gap = max(float((a - b).abs().max()) for a, b in zip(weights, judge[1], strict=True))
    print(f"after 10 updates rank {rank}'s weights are those of one process, to 1e-10: {gap < 1e-10}")

# %% [markdown]
# ## Linear scaling and warmup
#
# **Why in proportion?** k updates with rate $\eta$ move the weights by $-\eta\sum_{j=1}^k g_j$. If the gradients
# hardly change on that short way, one update with the mean of the k and rate $k\eta$ goes to the same place:
# $-k\eta\cdot\frac1k\sum_j g_j$. That is *linear scaling* (Goyal et al. 2017). It holds as long as the gradients
# hardly change.
#
# **Why by the root?** Adam divides a gradient by its own size, so an update is about as long as the rate says, for
# any batch. Where the noise of the samples is larger than the mean gradient, each update points a different way. After
# n such updates the weights are not $n\eta$ from the start but about $\sqrt n\,\eta$. With k times the batch there are
# n/k updates, and they come as far when $\eta'\sqrt{n/k} = \sqrt n\,\eta$: so $\eta' = \sqrt k\,\eta$ (Malladi et al.
# 2022). For SGD the same root follows when one asks for the same noise in *one* update: the mean of k times the samples
# has $1/\sqrt k$ of it (Krizhevsky 2014).
#
# **Why warmup?** At the start the gradient changes its direction fastest. So begin low, and rise to the full rate in
# some updates. (Goyal et al. rise from the base rate; here from a small share of the full one.)
#
# ### Exercise: a rate that grows with the batch
#
# Write `learning_rate(step, base_lr, *, batch, base_batch, num_warmup)`: linear scaling, then warmup. Update 0 has
# 1/num_warmup of the full rate. During training the rate depends on the update's number and on nothing else. You will
# see at the end what that is worth.

# %% exercise="04.rate"

# %% [markdown]
# With a batch of 32, SGD with momentum 0.9 was tuned (further down you see how): its rate is 0.32<!--out-->. Linear
# scaling to 1,437 gives 14.2<!--out-->. What accuracy do you expect, of 360 test digits, if batch 32 gets about 98 %?
# Guessing gives 10 %.

# %%
guess_1 = predict("Test accuracy of SGD with a batch of 1,437 and linear scaling?", unit="%")
guess_1


# %%
def scaled(batch, epochs=20, base_lr=0.316):
    num_warmup = epochs * -(-1437 // batch) // 10
    return lambda step: learning_rate(step, base_lr, batch=batch, base_batch=32, num_warmup=num_warmup)


guess_1.lock()
reached = {}
for batch in (32, 1437):
    accuracy, _ = ranks.run(learn, sgd, batch, scaled(batch))[0]
    reached[f"batch {batch:,}"] = 100 * accuracy
    print(f"batch {batch:5,}, rate {scaled(batch)(10**6):.3f}: accuracy {accuracy:.1%}")
print(guess_1.compare(reached["batch 1,437"]))

# %%
guess_1.lock()
words = {"unit": "%", "title": "SGD with linear scaling: a batch of 1,437 is no better than guessing"}
show(draw_bars(reached, subtitle="test accuracy after 20 passes; guessing gives 10 %", **words))

# %% [markdown]
# Twenty updates with a scaled rate do not replace nine hundred with the base rate. First the reason, then the remedy.

# %% [markdown]
# ## Every layer has its own scale
#
# A step moves each weight tensor by rate times gradient. What matters to a layer is the length of that step *relative
# to its own length*, $\eta\,|g|/|w|$. The digits' two layers are much alike. Look at a model with layers of several
# kinds: the small GPT of lesson 3, at its start, on 64 samples.

# %%
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig

CORPUS = ByteCorpus(python_documentation(), context=32)
CONFIG = GPTConfig(context=32, num_layers=2, num_heads=4, hidden_size=128)
gpt, (inputs, targets) = GPT(CONFIG, torch.Generator().manual_seed(0)), CORPUS.batch(0, 64)
GPT.loss(gpt(inputs), targets).backward()
matrices = {name: p for name, p in gpt.named_parameters() if p.dim() == 2}
relative = {name: float(p.grad.norm() / p.detach().norm()) for name, p in matrices.items()}
words = {"unit": "", "title": "One rate for all: some tensors take far longer steps than others"}
show(draw_bars(relative, subtitle="|g| / |w| of each matrix, at the start", **words))
print(f"the largest is {max(relative.values()) / min(relative.values()):.0f} times the smallest")

# %% [markdown]
# One rate must serve all of them. The rate that is right for the slow layers is too long a step for the fast ones.
# With a small batch, patience solves that: a low rate and many updates. With a large batch there are too few updates
# for that.
#
# **LARS** (You et al. 2017) gives each tensor a rate of its own, so that the step's length is in proportion to the
# weight's: the *trust ratio*, coefficient times $|w|$ over the update's length. The gradient keeps its direction and
# loses its length.
#
# ### Exercise: LARS
#
# Write `lars_step`. Take care of three things that public implementations got wrong. Decay is part of the update, so
# it is part of the length in the ratio. A bias is left out of the ratio and of decay. And a weight that starts at
# zero must be able to change.

# %% exercise="04.lars"

# %% [markdown]
# **What does the missing term do?** Take a layer with large weights and a small gradient. There decay is the larger
# part of the update, and a ratio that ignores decay makes the step far too long. In numbers, with |w| = 100, |g| =
# 0.01 and decay 0.01:

# %% tags=["nbval-check-output"]
weight, gradient = torch.full((10, 10), 10.0), torch.full((10, 10), 0.001)
settings = {"lr": 1.0, "momentum": 0.0, "coefficient": 0.001, "decay": 0.01}
moved, _ = lars_step(weight, gradient, torch.zeros(10, 10), **settings)
length, bare_ratio = float((moved - weight).norm()), 0.001 * weight.norm() / gradient.norm()
print(f"a step of {length / 100:.1%} of the weight, as asked: coefficient times |w|")
print(f"without decay in the ratio: {float(bare_ratio * (gradient + 0.01 * weight).norm()) / 100:.0%} of the weight")

# %%
steps = {"decay in the ratio": length, "decay left out": float(bare_ratio * (gradient + 0.01 * weight).norm())}
words = {"unit": "% of |w|", "title": "A ratio that ignores decay makes this step 100 times too long"}
show(draw_bars(steps, **words))

# %% [markdown]
# **LAMB** (You et al. 2020) does the same to Adam's direction, with decay inside. It became known by BERT, trained in
# 76 minutes on 1,024 TPUs.
#
# ### Exercise: LAMB
#
# Write `lamb_step`. Bias correction first, then decay, then the length. In an adapted tensor with no decay the
# correction nearly cancels, so forgetting it stays unnoticed for long.

# %% exercise="04.lamb"

# %% [markdown]
# The library's `LARS` and `LAMB` are your functions for many tensors at once. Do they agree? Three updates in float64,
# with every tensor adapted:


# %% tags=["nbval-check-output"]
from distlab.large_batch import LAMB, LARS, Trust

draw = torch.Generator().manual_seed(0)
yours = torch.randn(5, 4, generator=draw, dtype=torch.float64)
theirs = torch.nn.Parameter(yours.clone())
optimizer, mean, square = LAMB([theirs], 0.1, weight_decay=0.1), torch.zeros(5, 4), torch.zeros(5, 4)
for step in (1, 2, 3):
    theirs.grad = torch.randn(5, 4, generator=draw, dtype=torch.float64)
    yours, mean, square = lamb_step(yours, theirs.grad, mean, square, step=step, lr=0.1, decay=0.1)
    optimizer.step()
print("your LAMB and the library's are equal to 1e-12:", bool((theirs - yours).abs().max() < 1e-12))

# %% [markdown]
# Implementations differ, and a setting that is right for one is wrong for the next. `Trust` names the differences:
#
# | | the papers | TensorFlow Addons | pytorch_optimizer 4.1 | here |
# |---|---|---|---|---|
# | biases, norms adapted | not treated apart | not those that you list | LARS no, LAMB yes | no (`adapt="matrices"`) |
# | bias correction in LAMB | yes | yes | of the mean only, after the ratio | yes (`bias_correction`) |
# | limit | LAMB: phi, left open | none | LAMB: \|w\| at 10 | none (`max_ratio`, `max_weight_norm`) |
# | LARS: rate inside the buffer | yes | - | no | yes (`lr_in_buffer`) |
# | a norm of zero | not said | ratio 1 | ratio 1 | ratio 1 |
#
# (TensorFlow Addons is the code that the LAMB paper links. The LAMB in Google's ALBERT is the same without bias
# correction.)

# %% [markdown]
# ## All four on four ranks
#
# A batch of 1,437, twenty updates, on your four ranks. Rates are those that the experiment below found for this
# batch. LARS's 10 is not as high as it looks: with the coefficient of 0.001 it is a step of 1 % of the weight's
# length, before momentum. Write down first which of the four will be best, and by how much.

# %%
import json

from distlab.grading import load_lesson

RESULTS = json.loads((load_lesson("04").folder / "results.json").read_text())
RECORDS = RESULTS["tasks"]["shallow"]["records"]  # of this net
OWN_RATES = {r["optimizer"]: r["lr"] for r in RECORDS if r["rule"] == "own rate"}

# %%
OPTIMIZERS = {
    "SGD": sgd,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.0, weight_decay=1e-4),
    "LARS": lambda parameters: LARS(parameters, 0.0, weight_decay=1e-4),
    "LAMB": lambda parameters: LAMB(parameters, 0.0, weight_decay=1e-4),
}


# %%
from distlab.large_batch import LearningRateSchedule

one_run = {}
for name, make in OPTIMIZERS.items():
    rates = LearningRateSchedule(OWN_RATES[name], num_steps=20, num_warmup=2, decay="linear")
    one_run[name] = 100 * ranks.run(learn, make, 1437, rates.at)[0][0]
    print(f"{name:5} rate {OWN_RATES[name]:6.3g}: accuracy {one_run[name]:.1f}%")
words = {"unit": "%", "title": "With a rate found for this batch, twenty updates are enough to learn"}
show(draw_bars(one_run, subtitle="test accuracy, one run, batch 1,437", **words))

# %% [markdown]
# Your four ranks made one run of each. Do not conclude anything from one run: the experiment has five seeds.
#
# ## The experiment
#
# `benchmarks/large_batch_digits.py` ran this on one process for many rates and seeds, and left `results.json`. The
# rules were made before the runs. Each optimizer's rate is tuned at batch 32, on rates half a decade apart (a factor
# of 3.2), with a fifth of the training data held out. The test digits are used once, at the end. Larger batches get
# that rate by a rule, a tenth of the updates is warmup, then a linear decay. Always 20 epochs.


# %%
def accuracies(optimizer, rule):
    """Accuracies by batch: the base batch, and larger ones by the rule."""
    mine = [r for r in RECORDS if r["optimizer"] == optimizer and r["warmup"] and r["rule"] in ("base", rule)]
    return {r["batch"]: r["accuracies"] for r in sorted(mine, key=lambda r: r["batch"])}


shallow, protocol = RESULTS["tasks"]["shallow"], RESULTS["protocol"]
print(f"measured {shallow['date']}, torch {protocol['torch']}, {protocol['seeds']} seeds")

# %%
from simulator.viz import draw_batch_sizes

linear = {name: accuracies(name, "linear") for name in OPTIMIZERS}
subtitle = "Digits, two layers, 20 epochs; linear scaling from batch 32, warmup, linear decay."
show(draw_batch_sizes(linear, subtitle=subtitle))

# %%
by_root = {name: accuracies(name, "square root") for name in OPTIMIZERS}
subtitle = subtitle.replace("linear scaling", "square-root scaling")
show(draw_batch_sizes(by_root, subtitle=subtitle))

# %% [markdown]
# **Linear scaling breaks everything at 1,437.** The rate tuned at 32 was nearly as high as that batch allowed: half a
# decade more broke SGD and LARS. The rule asks for 45 times that rate, and warmup does not help.
#
# **With the root, LAMB holds**: from 97.8 %<!--out--> to 94.6 %<!--out-->. SGD and AdamW do not. LARS breaks first,
# with either rule: its tuned rate of 10 leaves no room above it.
#
# Is it the optimizer or the rule? Give each the rate that is best *for the largest batch*, found in the same way:

# %%
from statistics import fmean


def at_largest(records, rule, warmup=True):
    wanted = [r for r in records if (r["batch"], r["rule"], r["warmup"]) == (1437, rule, warmup)]
    return {r["optimizer"]: r for r in wanted}


# %%
RULES = {"linear": ("linear", True), "no warmup": ("linear", False)}
RULES |= {name: (name, True) for name in ("square root", "own rate")}
print(f"{'':14}{'batch 32':>10}   batch 1,437:", *(f"{rule:>12}" for rule in RULES))
for name, task in RESULTS["tasks"].items():
    records = task["records"]
    for optimizer in OPTIMIZERS:
        small = [r for r in records if (r["optimizer"], r["rule"], r["warmup"]) == (optimizer, "base", True)][0]
        row = [fmean(at_largest(records, *how)[optimizer]["accuracies"]) for how in RULES.values()]
        before = f"{name:8}{optimizer:6}{fmean(small['accuracies']):10.1%}{'':15}"
        print(before, *(f"{mean:12.1%}" for mean in row))

# %% [markdown]
# Read the last column first: a rate of its own for the batch.
#
# - **Two layers** (*shallow*): no optimizer wins. SGD, AdamW and LAMB are closer than five seeds on 360 digits can tell
#   apart. All have lost some three points against batch 32, LARS six: the price of 20 updates instead of 900.
# - **Eleven layers, nothing to normalise them** (*deep*): LAMB and AdamW hold best, within each other's spread. LAMB
#   needs no search for it: by the root rule it has as much.
# - **A small GPT** on text, five passes, 20 updates at 1,437; accuracy is the share of next bytes predicted right. To
#   predict "space" every time gives 19.1 %<!--out-->, and a model of NaN 0 %. So *no model has learned anything*, by
#   any rule. Twenty updates are too few for this model, and no optimizer replaces the others.
#
# So LAMB's main gain is that the rate need not be found again for every batch. Where each try of a search costs a
# thousand GPU hours, that is much. Against a tuned AdamW it shows no gain here, and Nado et al. 2021 found
# none on the benchmarks that made LARS and LAMB known. What was not measured: batches of many thousands, and models
# that take days.

# %% [markdown]
# ## A large batch that does not fit into memory
#
# A batch of 1,024 samples on 8 GPUs is 128 samples each, and they may hold 16. *Accumulation*: run eight
# micro-batches one after the other, let backward add up their gradients, exchange once, update once. The result is
# that of the large batch, if each sample counts the same.
#
# ### Exercise: a large batch in small pieces
#
# Write `accumulate(model, microbatches, loss_fn)`. Micro-batches may have unequal sizes; every rank has the same
# number of samples in all. Budget: one exchange of all gradients, not one per micro-batch.

# %% exercise="04.accumulate"


# %%
def accumulated(num_microbatches):
    rank = dist.get_rank()
    model = digit_net().double()
    (inputs, targets), _ = batch_of(0, 1436, rank, 4)  # 359 each, so that ranks are equal
    pieces = zip(inputs.double().tensor_split(num_microbatches), targets.tensor_split(num_microbatches), strict=True)
    with recorded() as seen:
        accumulate(model, list(pieces), torch.nn.functional.cross_entropy)
    return torch.cat([p.grad.flatten() for p in model.parameters()]), seen.records.payload_bytes(rank)


# %% tags=["nbval-check-output"]
whole, sent = ranks.run(accumulated, 1)[0]
for pieces in (2, 5, 8):
    gradient, sent_now = ranks.run(accumulated, pieces)[0]
    gap = float((gradient - whole).abs().max())
    print(f"{pieces} micro-batches: equal to one batch to 1e-12: {gap < 1e-12}, bytes sent equal: {sent_now == sent}")

# %% [markdown]
# With DDP the same is `no_sync()` around all micro-batches but the last, *forward and backward*: DDP decides in
# forward whether backward will exchange. Dividing the loss by the number of micro-batches is right only when they are
# of one size. For a language model that means the same number of *tokens that count* in each. In 2024 that fault was
# found in Hugging Face's Trainer, which many use (transformers, pull request 34191).
#
# **A popular claim: accumulation costs no memory, only time.** Predict before you look: how many samples per second
# do 64 GPUs make with 1 sample at a time, exchanged each time, and how many with 8 accumulated?

# %%
guess_2 = predict("How many times more samples a second with 8 accumulated, against 1?", unit="x")
guess_2

# %% tags=["nbval-check-output"]
each_time = samples_per_s(64, 1, gradient_sync="flat")
accumulated_gains = {}
for pieces in (1, 2, 8, 32):
    gain = samples_per_s(64, 1, gradient_sync="flat", num_microbatches=pieces) / each_time
    accumulated_gains[f"{pieces} per exchange"] = gain
    print(f"{pieces:2} micro-batches per exchange: {gain:.2f}x the samples per second")
gradients_gb = 1.3e9 * 4 / 1e9
print(f"memory: gradients of {gradients_gb:.1f} GB (32 bit) stay from the first micro-batch to the update")
print(guess_2.compare(accumulated_gains["8 per exchange"], how="simulated"))

# %%
guess_2.lock()
words = {"unit": "x", "title": "One exchange for many micro-batches: more samples per second"}
subtitle = "64 GPUs, micro-batches of 1 sample, simulated"
show(draw_bars(accumulated_gains, subtitle=subtitle, **words))

# %% [markdown]
# Both halves of the claim are wrong. Compared with an exchange and an update after each micro-batch, accumulation
# saves time, since one exchange serves many micro-batches. And it costs memory: the gradients must stay between
# micro-batches. Compared with a large batch that fits at once, it saves nothing.

# %% [markdown]
# ## Measured against predicted
#
# The same on this machine: the simulator is given your ranks' speed and the model's work, and says what a sample costs
# with one and with eight micro-batches. The model is the small GPT of lesson 3, which has enough to compute.

# %%
from distlab.measure import fit_cluster, measure_round, workload_from_module

MACHINE = fit_cluster(ranks.run(measure_round, torch.device("cpu"))[0], 4)


def count_work():
    model, (inputs, targets) = GPT(CONFIG), CORPUS.batch(0, 4)
    adam = torch.optim.AdamW(model.parameters())
    return workload_from_module(
        model, lambda: model.loss(model(inputs), targets), optimizer=adam, samples=4, name="small GPT"
    )


WORK = ranks.run(count_work)[0]

# %% [markdown]
# Commit first. Compared with one micro-batch per update, what does a sample cost with eight?

# %%
guess_3 = predict("Time of a sample with 8 micro-batches, of that with 1?", unit="%")
guess_3

# %%
import statistics
import time


def seconds_per_sample(pieces, num_updates=4):
    model, rank, times = GPT(CONFIG), dist.get_rank(), []
    optimizer = torch.optim.AdamW(model.parameters())
    for update in range(num_updates):
        batches = [CORPUS.batch(update * pieces + k, 16, rank=rank, world_size=4) for k in range(pieces)]
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        accumulate(model, batches, GPT.loss)
        optimizer.step()
        times.append((time.perf_counter() - start) / (16 * pieces))
    return statistics.median(times[1:])


# %%
guess_3.lock()
costs, said_and_took = {}, {}
for pieces in (1, 2, 8):
    said = simulate(WORK, MACHINE, Plan(4, gradient_sync="per_parameter", num_microbatches=pieces)).duration_s
    said_ms, took_ms = said / (16 * pieces) * 1e3, max(ranks.run(seconds_per_sample, pieces)) * 1e3
    costs[pieces] = took_ms
    said_and_took[f"{pieces} micro-batches"] = {"predicted": said_ms, "measured": took_ms}
    print(f"{pieces} micro-batches: {said_ms:.2f} ms a sample predicted, {took_ms:.2f} measured", end=" ")
    print(f"({said_ms / took_ms - 1:+.0%})")
print(guess_3.compare(100 * costs[8] / costs[1]))

# %%
guess_3.lock()
words = {"unit": "ms", "title": "What a sample costs, by the number of micro-batches in an update"}
show(draw_bars(said_and_took, **words))

# %% [markdown]
# One calibration and a few updates, on a machine that others use too: the error says how rough that is. Predicted and
# measured times agree on the cause: with eight micro-batches there is one exchange and one update instead of eight.

# %% [markdown]
# ## Popular claims, tested
#
# - **"Multiply the rate by the number of GPUs."** The rule is about the *batch*. With the same batch, 8 or 64 GPUs
#   need the same rate. A rule by GPUs is right only when each GPU brings its own samples.
# - **"With Adam you scale linearly too."** Refuted on the digits, from a rate as high as batch 32 allows: at 512, two
#   layers, 10 % by the linear rule and 81 % by the root.
# - **"LARS and LAMB train with any batch."** On the digits LAMB did with two layers, by the root rule; with eleven it
#   lost 19 points at 1,437. LARS did not, by either rule.
# - **"Accumulation is free / only time."** Above.
# - **"Larger batches converge better", "training is more stable".** The mean over $B$ samples has $1/B$ of their
#   variance, so one *update* is better. That helps while the noise is larger than the gradient itself. Where does it
#   end?
#
# McCandlish et al. 2018 give the border a number, the **noise scale**: the variance of one sample's gradient over the
# squared length of the true gradient. Data parallelism measures it for nothing. A rank's own gradient is that of a
# small batch, the ranks' mean that of a large one, and $E|g_B|^2 = |G|^2 + \text{variance}/B$ for both.


# %%
def squared_lengths(num_updates, tries=20):
    model, lengths = GPT(CONFIG, torch.Generator().manual_seed(0)), torch.zeros(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(num_updates + tries):
        inputs, targets = CORPUS.batch(step, 64, rank=dist.get_rank(), world_size=4)
        optimizer.zero_grad()
        GPT.loss(model(inputs), targets).backward()
        own = sum(p.grad.square().sum() for p in model.parameters())
        average_per_parameter(model.parameters())
        if step < num_updates:
            optimizer.step()
        else:
            lengths += torch.stack([own, sum(p.grad.square().sum() for p in model.parameters())])
    dist.all_reduce(lengths)
    return (lengths / 4).tolist()


# %%
for num_updates in (0, 100):
    small, large = ranks.run(squared_lengths, num_updates)[0]  # of 16 samples, and of 64
    scale = ((small - large) / (1 / 16 - 1 / 64)) / ((64 * large - 16 * small) / 48)
    print(f"after {num_updates} updates the noise scale is {scale:.0f} samples:")
    for batch in (16, 128, 1024):
        print(f"  a batch of {batch:4} needs {1 + scale / batch:4.1f} times the fewest updates,", end=" ")
        print(f"and {1 + batch / scale:5.1f} times the fewest samples")

# %% [markdown]
# (With noise scale $N$ a batch of $B$ needs $1 + N/B$ times the fewest updates and $1 + B/N$ times the fewest samples,
# by the same paper's model.)
#
# **Half true.** A larger batch needs fewer updates, and hardly fewer once it is larger than the noise scale. It never
# needs fewer *samples*: a batch far above the noise scale pays for many times as many, as the digits did. And the noise
# scale grows while a model learns, which is why large runs begin with a small batch and let it grow.
#
# - **"ImageNet in hours, not days."** Goyal et al. 2017 trained ResNet-50 in one hour on 256 GPUs (P100). The numbers:

# %% tags=["nbval-check-output"]
num_images, in_an_image = 90 * 1_281_167, 3 * 2 * 3.8e9  # 90 passes; 3.8e9 multiply-adds forward (He et al. 2016)
each = num_images * in_an_image / 3600 / 256
print(f"each of 256 GPUs did {each / 1e12:.1f} TFLOP/s, {each / 10.6e12:.0%} of a P100's 10.6 (data sheet, 2016)")
print(f"at that speed one GPU takes {256 / 24:.0f} days, and eight take {256 / 8:.0f} hours")
few, many = num_images // 8192, num_images // 256
print(f"with a batch of 8,192 that is {few:,} updates, one in {3600 / few * 1e3:.0f} ms", end="; ")
print(f"with a batch of 256 it would be {many:,}, one in {3600 / many * 1e3:.0f} ms")

# %% [markdown]
# True, and the batch did it: 32 images for each GPU. With a batch of 256 each would have one, and all gradients to
# exchange every 8 ms<!--out-->. Up to 8,192 the accuracy stayed, with linear scaling and warmup; above, it fell.

# %% [markdown]
# ## Spot the bug
#
# This warmup was found in a guide. A run from the start is perfect. Run the check as it is, read what it says, find
# the line, repair it.

# %% exercise="04.repair"

# %% [markdown]
# Why is it not noticed? The loss still falls. In the check's case, resumed after 2 of 5 updates of warmup, the rate
# ends at 2/5 of the one asked for, and stays there. A rate that is a
# function of the update's number cannot have this fault: `distlab.large_batch.LearningRateSchedule.at(step)`.

# %% [markdown]
# ## Production: torch's own
#
# torch has no LARS and no LAMB. With the ratio switched off ours must be torch's SGD and AdamW, to the last digits:
# that tests everything else in them. And what does an update cost, compared with torch's AdamW?

# %% tags=["nbval-check-output"]
PLAIN = Trust(adapt="none")
pairs = {
    "SGD": (sgd, lambda ps: LARS(ps, 0.0, lr_in_buffer=False, trust=PLAIN)),
    "AdamW": (
        lambda ps: torch.optim.AdamW(ps, 0.0, weight_decay=0.01),
        lambda ps: LAMB(ps, 0.0, eps=1e-8, weight_decay=0.01, trust=PLAIN),
    ),
}
for name, both in pairs.items():
    results = [run(learn, 1, args=(make, 512, lambda step: 0.01, 2, torch.float64))[0] for make in both]
    gap = max(float((a - b).abs().max()) for a, b in zip(results[0][1], results[1][1], strict=True))
    print(f"torch's {name} and ours without ratios are equal after 6 updates, to 1e-10: {gap < 1e-10}")


# %%
def seconds_of_an_update(makes, blocks=12, steps=10):
    torch.set_num_threads(1)
    rows = []
    optimizers = [make(GPT(CONFIG).parameters()) for make in makes]
    for optimizer in optimizers:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
    for _ in range(blocks):
        for optimizer in optimizers:
            start = time.perf_counter()
            for _ in range(steps):
                optimizer.step()
            rows.append((time.perf_counter() - start) / steps)
    return rows[:: len(makes)], rows[1 :: len(makes)]


# %%
lamb, adamw = run(seconds_of_an_update, 1, args=([lambda ps: LAMB(ps, 1e-3), torch.optim.AdamW],))[0]
ratios = [a / b for a, b in zip(lamb[1:], adamw[1:], strict=True)]
low, _, high = statistics.quantiles(ratios)
print(
    f"an update of LAMB: {statistics.median(lamb) * 1e3:.2f} ms, {statistics.median(ratios):.1f} times AdamW's", end=""
)
print(f"; half of the pairs: {low:.1f} to {high:.1f}")
update_ms = {"LAMB": 1e3 * statistics.median(lamb), "torch's AdamW": 1e3 * statistics.median(adamw)}
words = {"unit": "ms", "title": "One update of the small GPT, on one rank"}
show(draw_bars(update_ms, **words))

# %% [markdown]
# The lengths of all tensors cost two reads of memory; whether that shows next to the dozen reads and writes of Adam
# itself depends on the machine. (Against pytorch_optimizer's LAMB see `benchmarks/RESULTS.md`.)
#
# The same settings under other names:
#
# | | samples per update | micro-batch | warmup |
# |---|---|---|---|
# | torch | your loop, `no_sync()` | your loop | `lr_scheduler.LinearLR` |
# | DeepSpeed | `train_batch_size` | `train_micro_batch_size_per_gpu` | `WarmupLR`: `warmup_num_steps` |
# | Megatron-LM | `--global-batch-size`, `--rampup-batch-size` | `--micro-batch-size` | `--lr-warmup-iters` |
# | torchtitan | `training.global_batch_size` | `training.local_batch_size` | `lr_scheduler.warmup_steps` |
# | Horovod | `backward_passes_per_step` x ranks x batch | your loop | Keras: `LearningRateWarmupCallback` |
#
# Of these only DeepSpeed brings a LAMB of its own, `"type": "Lamb"` with `max_coeff` 10 and `min_coeff` 0.01, and
# none brings LARS. Those two numbers clip the ratio; the paper has a limit for |w| only. Where optimizer state is
# sharded a tensor's length is spread over ranks, and needs an all-reduce of squares. If every rank takes the ratio of
# its own piece instead, that is a different optimizer, and it depends on the number of ranks. Muon asks the same with a
# matrix in place of a number: [lesson 7](../07_sharding/lesson.ipynb#what-needs-the-whole).

# %% [markdown]
# ## Lab
#
# The same on your own hardware, as a plain script: a batch of 1,437 over all ranks, with the reference and with what
# you wrote in this notebook. It compares each optimizer with one process.
#
# ```
# distlab lab 04 --ranks 4 --impl reference
# distlab lab 04 --ranks 4 --impl mine --trace traces
# torchrun --nproc-per-node 4 lessons/04_large_batch/lab.py --batch 512 --epochs 10
# ```
#
# `lab_reference.md`, next to it, has the output to compare with.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. A rate of 3e-4 was tuned for 256 samples. For 4,096: what do the linear and the root rule say?
# 2. A run of 100,000 updates at batch 256 becomes one of batch 4,096 on the same data. How many updates, and how many
#    of them are warmup if 10 % are?
# 3. LAMB with rate 0.01, no decay: how long is a step of a matrix of length 50? How many such steps in one
#    direction make 50, if the length is taken as 50 all the way?
# 4. Micro-batches of 4,096, 4,096 and 512 tokens, each loss divided by 3: how many times too much does a token of the
#    last count?
# 5. Warmup of 1,000 updates to 0.8, the wrong version above, saved at update 400 and resumed: which rate does update
#    700 have, and which should it have?


# %% tags=["nbval-check-output"]
print(f"1. linear {3e-4 * 16:.1e}, root {3e-4 * 16**0.5:.1e}")
print(f"2. {100_000 // 16:,} updates, {100_000 // 160:,} of them warmup")
print(f"3. {0.01 * 50:.1f}, whatever the gradient; {1 / 0.01:.0f} updates")
print(f"4. {8704 / 3 / 512:.1f} times its share; a token of the others {8704 / 3 / 4096:.2f} times")
print(f"5. {0.8 * 400 / 1000 * 701 / 1000:.3f}, not {0.8 * 701 / 1000:.3f}")

# %%
ranks.close()

# %% [markdown]
# ## What to read next
#
# - Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017: linear scaling and warmup, in
#   experiments made with care.
# - McCandlish et al., *An Empirical Model of Large-Batch Training*, 2018: how to find out, before the run, up to which
#   batch it pays.
# - Nado et al., *A Large Batch Optimizer Reality Check*, 2021: what is left of LARS and LAMB after fair tuning.
#
# **Next: lesson 5.** A large batch sends less *often*. Lesson 5 sends *less*: the same number of exchanges, with fewer
# bytes in each.
#
# ## Sources
#
# - Goyal et al. 2017, *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*: linear scaling, warmup, batches to
#   8,192.
# - Krizhevsky 2014, *One weird trick for parallelizing convolutional neural networks*: the root, and why
#   linear was used all the same.
# - Malladi et al. 2022, *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*: the root for Adam.
# - You, Gitman, Ginsburg 2017, *Large Batch Training of Convolutional Networks*: LARS.
# - You et al. 2020, *Large Batch Optimization for Deep Learning: Training BERT in 76 minutes*: LAMB.
# - Nado et al. 2021, *A Large Batch Optimizer Reality Check*: tuned with the same care, standard optimizers reach
#   LARS and LAMB on their own benchmarks.
# - Shallue et al. 2019, *Measuring the Effects of Data Parallelism on Neural Network Training*: how far a larger
#   batch saves updates differs widely between models and data; with a tuned rate they saw no loss of accuracy.
# - McCandlish et al. 2018, *An Empirical Model of Large-Batch Training*: the noise scale (appendix A.1: from two batch
#   sizes), and updates and samples by batch. He et al. 2016, *Deep Residual Learning*: 3.8e9 multiply-adds an image.
# - DeepSpeed configuration JSON, Megatron-LM arguments, torchtitan's configuration, Horovod's DistributedOptimizer:
#   documentation.
