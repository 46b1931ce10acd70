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
# # 5. Compression
#
# 90 minutes. Comes after lesson 3 ([data parallel](../GLOSSARY.md#data-parallel)); lesson 4 (large batches) helps, but
# you can do this one first. You need no GPU: four processes on this machine are the four [ranks](../GLOSSARY.md#rank).
#
# Afterwards you can
#
# - send less of a gradient in five ways: the largest elements, random ones, few bits, signs, thin factors;
# - keep what was not sent in an error memory, and show what happens to the loss without it;
# - let replicas train alone for H steps (local SGD, DiLoCo), and say what that saves and what it costs;
# - count what is really saved, by method and by number of ranks;
# - decide for a model, a wire and a compressor whether it pays.

# %%
# %load_ext distlab.course.notebook

# %% [markdown]
# ## The question
#
# You train a GPT of 1.3 billion parameters. You have four machines with one H100 each, and between them ordinary
# Ethernet of 10 Gb/s. A rank computes a step of 8,192 tokens; gradients are 16-bit numbers. A question of lesson 3
# ended with "hopeless, unless you send less". How hopeless?
#
# One machine alone does a step in its own time. Four do four times the work in a step, and they exchange gradients,
# hidden behind backward as well as possible. Before you look: how many times as much work per second do the four do,
# compared with one? Type a number into the box that the next cell shows, and press Commit.

# %%
guess_0 = predict("How many times the work of one machine do four do, on 10 Gb/s Ethernet?", unit="x")
guess_0

# %%
from distlab.plan import Cluster, Plan
from simulator import Measured, device, gpt_workload, link, simulate
from simulator.viz import draw_timeline

MODEL = gpt_workload(
    hidden_size=2048, num_layers=24, num_heads=16, sequence_length=2048, vocab_size=51200, microbatch_size=4
)


def step_on(num_machines, wire="ethernet-10g", compression=None):
    machines = Cluster("machines", device("h100-sxm"), num_machines, 1, link("nvlink4"), link(wire))
    return simulate(MODEL, machines, Plan(num_machines, compression=compression))


# %%
four, one = step_on(4), step_on(1)
rank_0 = four.trace.select(four.trace.rank == 0)  # all ranks do the same
words = "One machine's step: the GPU works for a moment, then it waits for the wire"
show(draw_timeline(rank_0, title=words))
print(guess_0.compare(4 * one.duration_s / four.duration_s, how="the simulator says"))

# %% [markdown]
# This is the step of one of the four machines. The upper row is what its GPU does, the lower row what its wire carries.
# Only the two boxes at the left end of the upper row are work, forward and backward. The grey rest is waiting. How much
# shorter can the lower row become, and does the model still learn then? This lesson answers both.

# %% tags=["nbval-check-output"]
guess_0.lock()
print(f"one machine: {one.duration_s * 1e3:.0f} ms per step; gradients: {MODEL.gradient_bytes / 1e9:.1f} GB")
for wire in ("ethernet-10g", "ethernet-100g", "infiniband-ndr"):
    step = step_on(4, wire)
    exposed = step.exposed_communication_s / step.duration_s
    print(f"4 machines, {wire:14}: {step.duration_s * 1e3:5.0f} ms per step, {exposed:4.0%} of it waiting, ", end="")
    print(f"{4 * one.duration_s / step.duration_s:.2f}x the work of one")

# %% [markdown]
# On 10 Gb/s **four machines do less than one**. You would pay for four and be faster with three switched off. A wire
# that is 40 times as fast cures it, if you can have one. If not: can the ranks send 30 times less, and still learn?
#
# Every way to do that throws something away. This lesson builds five of them, measures what each sends and what it
# loses, and then asks the only question that counts: does training get faster?

# %% [markdown]
# ## What is in a gradient?
#
# A small GPT reads Python's own documentation. Each of four ranks computes the gradient of its part of the batch, as in
# lesson 3; here it is as one row of numbers, after 20 updates. `Ranks(4)` starts four processes that stay until the end
# of the lesson.

# %%
from distlab.data import ByteCorpus, python_documentation
from distlab.models import GPT, GPTConfig

CORPUS = ByteCorpus(python_documentation(), context=32)
CONFIG = GPTConfig(context=32, num_layers=1, num_heads=2, hidden_size=32)


def gradient_of(rank, world_size, steps_before=0):
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps_before + 1):
        inputs, targets = CORPUS.batch(step, 16, rank=rank, world_size=world_size)
        optimizer.zero_grad()
        model.loss(model(inputs), targets).backward()
        if step < steps_before:
            optimizer.step()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# %%
ranks = Ranks(4)
gradients = ranks.run(lambda: gradient_of(dist.get_rank(), 4, steps_before=20))
gradient = gradients[0]
sizes = gradient.abs().sort(descending=True).values
length = sizes.square().sum()
print(f"{gradient.numel():,} elements, {4 * gradient.numel():,} bytes in float32")
for share in (0.001, 0.01, 0.1):
    count = int(share * gradient.numel())
    print(f"the largest {share:5.1%} have {sizes[:count].square().sum() / length:.0%} of the squared length")
print(f"half of all elements are below {sizes.median() / sizes[0]:.0e} of the largest")

# %% [markdown]
# Two facts to build on. **Few elements carry much of the gradient.** And the elements differ by many orders of
# magnitude, so most of the 32 bits of most elements describe almost nothing.
#
# The next cell is the test bench for the whole lesson. `bench(name, average)` calls `average(gradient)` on four real
# ranks. It counts, by the recorder, what a rank would send if each call ran as a ring (lesson 2). It also says how far
# the result is from the true mean, as a share of the mean's length.


# %%
def measured(average):
    own = gradients[dist.get_rank()]
    mean = own / dist.get_world_size()
    dist.all_reduce(mean)
    with recorded() as seen:
        got = average(own.clone())
    error = float((got - mean).norm() / mean.norm())
    return seen.records.ring_equivalent_bytes(dist.get_rank()), error


def bench(name, average):
    num_bytes, error = ranks.run(measured, average)[0]
    table[name] = num_bytes, error
    times = table["float32"][0] / num_bytes
    print(f"{name:20} {num_bytes:9,} bytes sent per rank, {times:6.1f}x less; wrong by {error:.1%}")


# %% [markdown]
# The cheapest idea needs no thought: send 16-bit numbers. `bfloat16` keeps float32's range and 8 bits of precision.
# `float16` keeps 11 bits, but nothing below 6e-8 or above 65,504: multiply the loss by a large number first, or small
# gradients become zeros.


# %%
def average_in(dtype):
    def average(gradient):
        smaller = (gradient / dist.get_world_size()).to(dtype)
        dist.all_reduce(smaller)
        return smaller.float()

    return average


table = {}
bench("float32", average_in(torch.float32))
bench("bfloat16", average_in(torch.bfloat16))
bench("float16", average_in(torch.float16))

# %%
from simulator.viz import draw_bars


def show_bytes(title):
    """Draw what each average so far has sent per rank."""
    sent_kb = {name: num_bytes / 1e3 for name, (num_bytes, _) in table.items()}
    words = {"unit": "kB", "title": title}
    show(draw_bars(sent_kb, subtitle="sent per rank, as recorded", **words))


show_bytes("Half of the bits is half of the bytes")

# %% [markdown]
# Half the bytes for an error of less than a hundredth, by one line of code. This compression is not worth a lesson, but
# it is what all others must beat. Keep it in mind: the bench below compares with float32, and against 16-bit gradients
# every factor is half of what it prints. (Megatron-LM and torchtitan sum gradients in float32 unless told otherwise,
# even where weights are bfloat16: a sum over many ranks and steps loses more than one rounding does.)

# %% [markdown]
# ## The largest elements: top-k
#
# Send the 1 % of largest magnitude, and count the rest as zeros. Guides say: "top-1 % sends a hundredth, it saves 99 %
# of the traffic". What does the bench say, on four ranks? One thing to think of: *which* elements are the largest?

# %%
guess_1 = predict("How many times less than float32 does top-1 % send, on 4 ranks?", unit="x")
guess_1

# %% [markdown]
# ### Exercise: top-k
#
# Write `average_top_k(gradient, k)`. Each rank has its own k places, so the receivers must be told which: every value
# travels with its index. And values of different places cannot be summed on the way: an
# [all-reduce](../GLOSSARY.md#all-reduce) is of no use. Each rank *gathers* the pairs of all ranks and adds them up
# itself. Where two ranks chose the same place, both count.
#
# Budget: k indices and k values, 8 bytes per pair, to each of the other ranks.

# %% exercise="05.top_k"

# %%
guess_1.lock()
bench("top-1 %", lambda gradient: average_top_k(gradient, gradient.numel() // 100))

# %%
print(guess_1.compare(table["float32"][0] / table["top-1 %"][0]))

# %% [markdown]
# ### "It saves 99 %"
#
# Where did the factor of 100 go? Half of it is indices. The rest is the **[all-gather](../GLOSSARY.md#all-gather)**. A
# [ring all-reduce](../GLOSSARY.md#ring-all-reduce) of $S$ bytes sends $2\frac{n-1}{n}S$ per rank, less than $2S$ on any
# number of ranks, since sums stay as long as their parts. What is gathered does not shrink: each rank's pairs must
# reach all others, $(n-1)$ times. With $k = rE$ of $E$ elements, 4 bytes each:
#
# $$\frac{\text{all-reduce}}{\text{top-k}} = \frac{2\frac{n-1}{n} \cdot 4E}{(n-1) \cdot 8 r E} = \frac{1}{n\,r}$$

# %% tags=["nbval-check-output"]
from distlab.comm.record.operations import ring_bytes

guess_1.lock()
for n in (2, 4, 8, 64, 100, 256):
    all_reduce, all_gather = ring_bytes("all_reduce", 4 * 10**6, n), ring_bytes("all_gather", 8 * 10**4, n)
    print(f"{n:3} ranks: top-1 % sends {all_reduce / all_gather:6.2f}x less than an all-reduce of everything")

# %%
guess_1.lock()
saved = {
    f"{n} ranks": ring_bytes("all_reduce", 4 * 10**6, n) / ring_bytes("all_gather", 8 * 10**4, n)
    for n in (2, 4, 8, 16, 32, 64, 100, 256)
}
words = {"unit": "x less", "title": "What top-1 % saves falls with the number of ranks, to nothing at 100"}
show(draw_bars(saved, **words))

# %% [markdown]
# To save 99 % is to send 100x less, and **100x holds nowhere.** It is 50x<!--out--> on 2 ranks, 25x<!--out--> on 4,
# 1x<!--out--> on 100, and on more ranks top-1 % sends *more* than no compression. A guide whose
# [top-k](../GLOSSARY.md#top-k) returns a whole tensor with zeros in it, and all-reduces that, saves nothing at all:
# zeros cost as many bytes as numbers.

# %% [markdown]
# ## Random elements: random-k
#
# All ranks draw the *same* places, from a generator with the same seed. Then no rank needs indices, and sums can be
# formed on the way: an all-reduce of k values, a hundredth on any number of ranks.
#
# The price: random places carry 1 % of the squared length, not the largest part of it. To be right *on average*, what
# is sent must be multiplied by $L/k$, for each place is drawn in only k of L cases. The result is unbiased and wild.
#
# ### Exercise: random-k
#
# Write `average_random_k(gradient, k, step)`. The draw must differ from step to step, or the same elements would learn
# forever and the others never. Budget: an all-reduce of k values.

# %% exercise="05.random_k"

# %%
bench("random 1 %", lambda gradient: average_random_k(gradient, gradient.numel() // 100, step=0))


# %%
def show_errors(title):
    """Draw how far each average so far is from the true mean."""
    errors = {name: 100 * error for name, (_, error) in table.items()}
    words = {"unit": "%", "title": title}
    subtitle = "distance from the true mean, as a share of its length"
    show(draw_bars(errors, subtitle=subtitle, **words))


show_errors("Random places are wrong by several lengths of the gradient")

# %% [markdown]
# That is not a misprint: wrong by several times its own length. One element in a hundred is 100 times too large, all
# the others are 0. The expected squared error is $L/k - 1 = 99$ times the squared length. So the error is about
# $\sqrt{99} \approx 10$ lengths long; a single draw can be luckier. Remember that number when you read that a
# compressor is good because it is unbiased.

# %% [markdown]
# ## Few bits: quantize
#
# Keep every element, but round it to one of $2^b$ levels. With 8 bits there are 256. The smallest value is level 0, the
# largest is level 255, and the steps between are equal. What travels is the number of the level: its *code*.
#
# torch has no tensor of 4-bit numbers: its smallest element is a byte. So several codes must be *packed* into each
# byte, or nothing is saved below 8 bits. The library's `pack_bits(codes, bits)` packs them, `unpack_bits` unpacks them.
#
# ### Exercise: quantize
#
# Write `average_quantized(gradient, bits)`. Each rank has a smallest value and a step of its own, so codes of different
# ranks mean different things and must not be summed. Gather, decode, then add. Think of a gradient whose elements are
# all equal.
#
# Budget: 8 bytes and `bits` bits an element, to each of the other ranks.

# %% exercise="05.quantize"

# %%
for bits in (8, 4, 2):
    bench(f"quantized, {bits} bits", lambda gradient, bits=bits: average_quantized(gradient, bits))
show_bytes("The methods so far: what each rank sends")

# %% [markdown]
# 8 bits are a quarter of 32, but on four ranks they save 2x<!--out-->: once more the all-gather. An all-reduce sends
# $2\frac{n-1}{n}$ times 32 bits an element, the all-gather $(n-1)$ times $b$ bits. The all-reduce sends $64/(nb)$ times
# as much: twice as much with 8 bits on 4 ranks, and on 8 ranks just as much, so that nothing is saved.
#
# And 4 bits are wrong by more than the gradient is long. Sixteen levels make 15 steps. They reach from the most
# negative element to the most positive one, about twice the largest magnitude: a step is about an eighth of it, while
# half of all elements are hundreds of times smaller. **One large element sets the step for all.** The library gives
# each block of 1,024 elements its own range:


# %%
from distlab.compression import dequantize, quantize

for bits in (8, 4, 2):
    error = (dequantize(quantize(gradient, bits)) - gradient).norm() / gradient.norm()
    print(f"{bits} bits, a range for each 1,024 elements: wrong by {error:.1%}")

# %% [markdown]
# ## One bit: signs, and a bug to spot
#
# The end of that road: one bit an element, plus or minus, times the mean magnitude. The following code does that. It
# was tested on a gradient of positive numbers, where it is right. Run the check as it is, read what it says, find the
# line, repair it.

# %% exercise="05.repair"

# %%
bench("signs", average_signs)

# %% [markdown]
# Sixteen times less on four ranks ($64/n$), and wrong by most of the gradient's length: every element now has the same
# size. As a compressor of one gradient this is terrible. Does it train?

# %% [markdown]
# ## What matters is not one step
#
# Train the small GPT, with the library's hooks. A `GradientHook` stands between a [bucket](../GLOSSARY.md#bucket) of
# gradients and the wire (lesson 3): `DataParallel(model, hook=...)` hands it this rank's gradients and takes back the
# mean. `TopK`, `RandomK`, `Quantize` and `Sign` are what you wrote, made fit for buckets of real models. Two ranks,
# `pair`, show as well as four whether a hook learns.


# %%
import math

from distlab.blocks.clip import NotFiniteError
from distlab.compression import PowerSGD, Quantize, RandomK, Sign, TopK
from distlab.data_parallel import DataParallel

NUM_STEPS = 80
pair = Ranks(2, timeout_s=180)


# %%
def train(make_hook, momentum=0.0):
    rank, world_size, losses = dist.get_rank(), dist.get_world_size(), []
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    replicas = DataParallel(model, hook=make_hook())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 * (1 - momentum), momentum=momentum)
    for step in range(NUM_STEPS):
        inputs, targets = CORPUS.batch(step, 16, rank=rank, world_size=world_size)
        optimizer.zero_grad()
        loss = model.loss(model(inputs), targets)
        try:
            (loss.backward(), replicas.synchronize(), optimizer.step())
        except NotFiniteError:  # NaN or inf, on all ranks at once
            return losses + [math.nan] * (NUM_STEPS - step)
        losses.append(float(loss.detach()))
    return losses


# %% [markdown]
# Each hook runs without memory first. `Quantize(1)` rounds each element to the smallest or the largest of its block of
# 1,024; random-k gets 10 %, ten times as much as top-k. Which of them will learn? Say which loss you expect of top-1 %
# after the last update, if 5.5<!--out--> is where all begin (a byte is one of 256: $\ln 256 = 5.5$), and the
# uncompressed run is the bar.


# %%
def mean_losses(make_hook, momentum=0.0):
    return torch.tensor(pair.run(train, make_hook, momentum)).mean(0)


def end_of(losses):
    last = float(losses[-5:].mean())
    return f"{last:.2f}" if last < 10 else "ran away"  # NaN is not below 10 either


HOOKS = {
    "top-1 %": lambda memory: TopK(0.01, error_feedback=memory),
    "random 10 %": lambda memory: RandomK(0.1, seed=0, error_feedback=memory),
    "1 bit, by range": lambda memory: Quantize(1, error_feedback=memory),
    "signs": lambda memory: Sign(error_feedback=memory),
}
plain = mean_losses(lambda: None)
print(f"no compression: {plain[0]:.2f} before the first update, {plain[-5:].mean():.2f} in the last five")

# %%
guess_2 = predict("Loss of top-1 % without memory, in the last five updates?", unit="nats")
guess_2

# %%
without = {name: mean_losses(lambda make=make: make(False)) for name, make in HOOKS.items()}
for name, losses in without.items():
    print(f"{name:12} {end_of(losses)}")
print(guess_2.compare(float(without["top-1 %"][-5:].mean())))

# %%
guess_2.lock()
ends = {"no compression": float(plain[-5:].mean())}
ends |= {name: float(losses[-5:].mean()) for name, losses in without.items() if end_of(losses) != "ran away"}
words = {"unit": "nats", "title": "Loss after 80 updates, without memory (who ran away is not drawn)"}
show(draw_bars(ends, subtitle="mean of the last five updates; less is better", **words))

# %% [markdown]
# ### What is dropped comes back
#
# Look at an element that is never among the largest. Its gradient may be small, but it points the same way in every
# step, and top-k never sends it: it never learns. The remedy is to **remember** what was not sent, and to add it to the
# next gradient. What is small now grows in the memory until it is large enough to be sent. Nothing is lost, it is only
# late. With $g_t$ the gradient, $e_t$ the memory and $C$ the compressor:
#
# $$ w_t = g_t + e_t \qquad \text{send } C(w_t) \qquad e_{t+1} = w_t - C(w_t) $$
#
# Add that up over all steps: what was sent, plus what the memory still holds, is exactly the sum of all gradients.
#
# ### Exercise: error feedback
#
# Write `average_with_memory(gradient, memory, compress)`. Each rank keeps its own memory, of what *it* did not send.

# %% exercise="05.feedback"


# %% tags=["nbval-check-output"]
def add_up(num_steps=50):
    """Ten numbers, two sent in each step: return the mean of what was sent, and what is kept."""
    constant = torch.arange(1.0, 11.0, dtype=torch.float64)
    memory, applied = torch.zeros(10, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    for _ in range(num_steps):
        applied += average_with_memory(constant, memory, lambda w: torch.where(w >= w.sort().values[-2], w, 0.0))
    return applied / num_steps, memory


applied, memory = run(add_up, 1)[0]
print("mean of what was sent:", [round(float(x), 1) for x in applied])
print(
    "sent + kept = 50 gradients:", torch.equal((50 * applied + memory).round(), 50 * torch.arange(1.0, 11.0).double())
)

# %% [markdown]
# Ten elements with the constant gradients 1 to 10, two of which are sent in each step. Without memory the 9 and the 10
# would be sent every time, and the others never. With it, each element's mean is nearly its gradient.
#
# Now the four hooks again, with memory. Which of them gains most? Say where top-1 % ends.

# %%
guess_3 = predict("Loss of top-1 % with memory, in the last five updates?", unit="nats")
guess_3

# %%
remembering = {name: mean_losses(lambda make=make: make(True)) for name, make in HOOKS.items()}
for name, losses in remembering.items():
    print(f"{name:12} without {end_of(without[name])}, with memory {end_of(losses)}")
print(guess_3.compare(float(remembering["top-1 %"][-5:].mean())))


# %%
from matplotlib import figure, rc_context

STYLES = "-", "--", ":", "-.", (0, (6, 1)), (0, (1, 1))
COLOURS = "#1A1A1A", "#0072B2", "#D55E00", "#00795A", "#A8457F", "#7A5C00"


# %%
@rc_context({"font.size": 12})
def draw_losses(title, panels, **axis):
    picture = figure.Figure(figsize=(12.8, 4.8), layout="constrained")
    for name, axes in zip(panels, picture.subplots(1, len(panels), sharey=True, squeeze=False)[0], strict=True):
        looks = zip(panels[name].items(), STYLES, COLOURS, strict=False)
        for (label, (losses, per_update)), style, colour in looks:
            x = per_update * torch.arange(10, len(losses) + 1)
            axes.plot(x, losses.unfold(0, 10, 1).mean(1), ls=style, color=colour, lw=2.4, label=label)
        axes.set(title=name, **axis)
        axes.spines[["top", "right"]].set_visible(False)
    picture.axes[0].set_ylabel("loss, mean of 10 updates (nats per byte)")
    picture.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=6, frameon=False)
    picture.suptitle(title, x=0.01, ha="left", fontsize=16, weight="bold")
    return picture


# %%
guess_3.lock()
words = "; ".join(f"{name}: {end_of(without[name])} without memory, {end_of(remembering[name])} with" for name in HOOKS)
title = "With an error memory, 1 % of the elements or one bit of each learn almost like all of it"
panels = {
    name: {"no compression": (plain, 1), "with memory": (remembering[name], 1), "without memory": (without[name], 1)}
    for name in HOOKS
}
picture = draw_losses(title, panels, xlabel="update", ylim=(2.7, 4.5))
show(picture, f"Loss against updates. No compression ends at {plain[-5:].mean():.2f}; {words}.")

# %% [markdown]
# The loss of one run jumps by a few hundredths from machine to machine and seed to seed, so do not read the second
# digit. What is plain: without memory signs lag far behind, top-1 % and one bit somewhat, and random places, each ten
# times too large, run away at a learning rate that suits all the others. With memory three follow the black line, and
# random places stay on a track above it. That a gradient may be wrong by 95 % in each step, and training hardly
# notices, is the most surprising fact of this lesson. The error of one step does not matter as long as it is repaid.

# %% [markdown]
# ### All of it on one screen
#
# Remember, choose, send, add: the library's `PlainTopK` is that and no more, one parameter after the other, once
# backward is over. The hooks do it for whole buckets while backward goes on.

# %%
import inspect

from distlab.compression import PlainTopK

print(inspect.getsource(PlainTopK.average))


# %% [markdown]
# ### The same losses over bytes
#
# Updates are not what you pay for on a slow wire: bytes are. The next cell records what a rank sends in one update. The
# wire then carries that number in every update. How many times fewer bytes does top-1 % send than no compression until
# its loss is below 3.4 for the first time, on these two ranks?

# %%
guess_bytes = predict("How many times fewer bytes does top-1 % send until its loss is below 3.4?", unit="x")
guess_bytes


# %%
def sent_per_update(make_hook):
    """Return the bytes that a rank sends in its second update, as recorded: in the first, hooks agree on shapes."""
    rank, model = dist.get_rank(), GPT(CONFIG, torch.Generator().manual_seed(0))
    replicas = DataParallel(model, hook=make_hook())
    for step in range(2):
        inputs, targets = CORPUS.batch(step, 16, rank=rank, world_size=2)
        model.zero_grad()
        with recorded() as seen:
            model.loss(model(inputs), targets).backward()
            replicas.synchronize()
    return seen.records.ring_equivalent_bytes(rank)


# %%
def bytes_below(limit, losses, num_bytes):
    """Return the bytes sent until the mean of ten updates is below a loss; infinite if it never is."""
    below = (losses.unfold(0, 10, 1).mean(1) < limit).nonzero()
    return (int(below[0]) + 10) * num_bytes if len(below) else math.inf


learned = {"no compression": plain} | remembering
sent = {name: pair.run(sent_per_update, lambda name=name: HOOKS[name](True))[0] for name in HOOKS}
sent = {"no compression": pair.run(sent_per_update, lambda: None)[0]} | sent
needed = {name: bytes_below(3.4, losses, sent[name]) for name, losses in learned.items()}
for name, num_bytes in needed.items():
    print(f"{name:15} {sent[name] / 1e3:7.1f} kB per update, {num_bytes / 1e6:6.2f} MB until the loss is below 3.4")
print(guess_bytes.compare(needed["no compression"] / needed["top-1 %"]))


# %%
guess_bytes.lock()
fewer = needed["no compression"] / needed["top-1 %"]
title = f"Top-1 % with memory comes to the same loss with {fewer:.0f} times fewer bytes"
words = "; ".join(f"{name} needs {num_bytes / 1e6:.2f} MB" for name, num_bytes in needed.items())
panels = {"": {name: (losses, sent[name] / 1e6) for name, losses in learned.items()}}
marks = {"xscale": "log", "xticks": (0.02, 0.1, 0.5, 2), "xticklabels": ("0.02", "0.1", "0.5", "2")}
picture = draw_losses(title, panels, xlabel="sent per rank since the start (MB)", **marks)
show(picture, f"Loss against bytes sent, the four methods with memory. Until the loss is below 3.4: {words}.")

# %% [markdown]
# A line that is further left learns the same from fewer bytes. Each line is the one above, moved to the left by what
# its method saves in one update: 88.1 kB<!--out--> against 1.8 kB<!--out--> is the 50x that you derived for top-1 % on
# two ranks. If a method needs more updates than no compression, it loses some of that again. Compare random 10 %: it
# sends 10x less per update, and its line ends higher.
#
# On more ranks the distances change. All-reduced bytes grow with $2\frac{n-1}{n}$, gathered ones with $n-1$: the lines
# of top-1 %, of 1 bit and of signs move towards the black one, and that of random places keeps its distance.

# %% [markdown]
# ## Thin factors: PowerSGD
#
# The gradient of a linear layer is a matrix $M$ of $R$ rows and $C$ columns: a sum of outer products, one for each
# token. Often a few directions hold most of it. Then $M \approx p\,q^\top$, with $p$ of size $R \times r$ and $q$ of
# size $C \times r$: $(R + C)\,r$ numbers instead of $R\,C$. This $r$ is called the *rank* of the factors. It is a word
# of linear algebra and has nothing to do with the ranks that run: rank 4 means factors of four columns.

# %% tags=["nbval-check-output"]
print("one layer of the 1.3B model, 2048 x 8192: ", end="")
print(", ".join(f"rank {r}: {2048 * 8192 / ((2048 + 8192) * r):.0f}x smaller" for r in (1, 4, 32)))

# %% [markdown]
# The best $p$ and $q$ come from a singular value decomposition, which costs far more than the step.
# [PowerSGD](../GLOSSARY.md#powersgd) makes one *power iteration* instead, starting from the last step's $q$, which is
# nearly right already:
#
# 1. $p = M q$, then make its columns orthonormal;
# 2. $q = M^\top p$. Then $p\,q^\top = p\,p^\top M$ is $M$, projected onto what $p$ spans.
#
# And here is the beauty of it. $M$ is the *mean* over ranks, which no rank has. But a matrix product is linear: the
# mean of the ranks' $M_r q$ is $M q$. So $p$ and $q$ can be summed on the way, by **all-reduce**, and the saving does
# not shrink with the number of ranks.
#
# ### Exercise: PowerSGD
#
# Write `average_low_rank(gradient, q)`. Budget: two all-reduces, of the thin factors.

# %% exercise="05.powersgd"


# %%
def low_rank_errors(rank_of_factors, num_steps=3):
    """Iterate on one real gradient matrix; return the error after each step, and that of the best factors."""
    own = gradients[dist.get_rank()][13_568:17_664].view(128, 32)  # the widening layer's weight
    mean = own / 4
    dist.all_reduce(mean)
    q, errors = torch.randn(own.shape[1], rank_of_factors, generator=torch.Generator().manual_seed(0)), []
    for _ in range(num_steps):
        approximation, q = average_low_rank(own, q)
        errors.append(float((approximation - mean).norm() / mean.norm()))
    values = torch.linalg.svdvals(mean)
    return errors, float(values[rank_of_factors:].norm() / mean.norm())


# %%
found = {}
for r in (1, 4, 8):
    errors, best = ranks.run(low_rank_errors, r)[0]
    steps = {f"iteration {step}": 100 * error for step, error in enumerate(errors, 1)}
    found[f"rank {r}"] = steps | {"best factors": 100 * best}
    print(f"rank {r}: wrong by {', '.join(f'{error:.0%}' for error in errors)} in steps 1, 2, 3; best {best:.0%}")
words = {"unit": "%", "title": "A second power iteration is nearly as good as the best factors"}
show(draw_bars(found, subtitle="error, as a share of the matrix' length", **words))

# %% [markdown]
# One iteration has at most two and a half times the error of the best factors, and on the same matrix a second or third
# is nearly as good as they are. In training the matrix changes a little in each step, and the iteration follows.

# %%
HOOKS["rank 2"] = lambda memory: PowerSGD(2, error_feedback=memory)
without["rank 2"], remembering["rank 2"] = (mean_losses(lambda m=m: HOOKS["rank 2"](m)) for m in (False, True))
print(f"rank 2: without memory {end_of(without['rank 2'])}, with {end_of(remembering['rank 2'])}")

# %% [markdown]
# ## When does it pay?
#
# So far you counted bytes. But the learner's clock shows time. A compressed step takes longer to compute: it must
# encode, it must decode what n ranks send, and while a rank encodes it does nothing else. **Compression pays where the
# wire saves more than the codec costs.** So it depends on the wire. Back to the four machines, whose gradients have 16
# bits. On 10 Gb/s their step takes 3,268 ms<!--out-->. How long will it take with codes of 8 bits, gathered?

# %%
guess_8_bits = predict("How long is a step on 10 Gb/s with 8-bit codes?", unit="ms")
guess_8_bits

# %%
from distlab.plan.compression import Compression

with_8_bits = step_on(4, "ethernet-10g", Compression("quantize", bits=8))
print(guess_8_bits.compare(with_8_bits.duration_s * 1e3, how="the simulator says"))

# %% tags=["nbval-check-output"]
guess_8_bits.lock()
COMPRESSIONS = (
    Compression("quantize", bits=8),
    Compression("sign"),
    Compression("top_k", ratio=0.01),
    Compression("random_k", ratio=0.01),
    Compression("powersgd", rank=4),
)
for compression in (None, *COMPRESSIONS):
    steps = [step_on(4, wire, compression).duration_s for wire in ("ethernet-10g", "ethernet-100g", "infiniband-ndr")]
    name = "none" if compression is None else compression.method
    print(f"{name:9}", ", ".join(f"{seconds * 1e3:5.0f} ms" for seconds in steps), "on 10 Gb/s, 100 Gb/s, 400 Gb/s")

# %% [markdown]
# Read the columns; one machine alone needs 162 ms<!--out-->. On 10 Gb/s PowerSGD makes four machines worth about three
# and a half, random-k nearly four. 8 bits gain *nothing*: gathered, an element's code goes to three other ranks, 3
# bytes; reduced, its 16 bits cost $2 \cdot \frac34 \cdot 2 = 3$ bytes too. On 400 Gb/s there is hardly anything to
# gain, since overlap hides nearly all: three of the five make the step longer. **"Compression speeds up training" is
# false where the wire is fast.**
#
# The picture shows it for every [bandwidth](../GLOSSARY.md#bandwidth), in gigabytes: 10 Gb/s are 1.25 GB/s. Where a
# line crosses the black one is its *break-even*: to the left of it, compression pays. Before you move the slider: where
# will the line of the signs cross, left or right of 100 Gb/s, which is 12.5 GB/s? The table above tells. The picture
# keeps Ethernet's delay and changes its bandwidth alone, so its right end is not exactly the InfiniBand of the table.

# %%
from simulator.sweeps.compression import bandwidths
from simulator.viz import compression_panel

MACHINES = Cluster("machines", device("h100-sxm"), 4, 1, link("nvlink4"), link("ethernet-10g"))
pays = compression_panel(MODEL, MACHINES, Plan(4), compressions=COMPRESSIONS, bytes_per_s=bandwidths(count=13))
pays

# %%
pays.controls["bytes_per_s"].value = 10e9
print(pays.text)

# %% [markdown]
# ### And on a wire that you can measure?
#
# Your machine has no 10 Gb/s wire, but it can play one. In `throttled(bytes_per_s)` every
# [collective](../GLOSSARY.md#collective) takes the time that a ring would need at that bandwidth: whoever waits for it
# sleeps until then. Computing goes on meanwhile, as with a real network card. First measure what the simulator must
# know about this machine: how fast it computes, and what encoding and decoding cost.

# %%
import time
from dataclasses import replace
from statistics import median

from distlab.measure import CalibrationOfRun, fit_cluster, median_calibration, workload_from_module
from distlab.plan import AXES, Contention, Link, Protocol

WIDE = GPTConfig(context=32, num_layers=2, num_heads=4, hidden_size=128)
QUANTIZE = Compression("quantize", bits=4)
SIZES = {"bucket_bytes": 500_000, "first_bucket_bytes": 500_000}


def calibration(compression):
    return CalibrationOfRun(Plan(2, compression=compression, **SIZES), AXES, {}, device=torch.device("cpu"))


ROUND = pair.run(lambda: calibration(QUANTIZE).measure())[0]
print(f"encode 1 MB: {(ROUND.codec.encode_s + 1e6 * ROUND.codec.encode_s_per_byte) * 1e3:.1f} ms, ", end="")
print(f"decode 2 ranks' 1 MB: {(ROUND.codec.decode_s + 1e6 * ROUND.codec.decode_s_per_byte) * 1e3:.1f} ms; ", end="")
print(f"in a step both take {ROUND.overhead.codec_slowdown:.1f} times as long")


# %%
def count_work(kind, **options):
    model, (inputs, targets) = GPT(WIDE), CORPUS.batch(0, 8, rank=0, world_size=2)
    call = {"optimizer": kind(model.parameters(), **options), "samples": 4, "name": "small GPT"}
    return workload_from_module(model, lambda: model.loss(model(inputs), targets), **call)


WORK = pair.run(lambda: count_work(torch.optim.SGD, lr=0.1, momentum=0.9))[0]


def with_wire(bytes_per_s, rounds):
    here = fit_cluster(median_calibration(rounds).compute, 2)
    wire = Link("throttled", (Protocol(here.intra_node.protocols[0].latency_s, bytes_per_s),))
    # Who waits for a throttled wire sleeps, and takes nothing from a rank that computes: no contention.
    return replace(here, intra_node=wire, contention=Contention())


def predicted(bytes_per_s, compression, rounds=(ROUND,)):
    middle = median_calibration(rounds)
    codec = middle.codec.slower(middle.overhead.codec_slowdown) if compression is not None else None
    plan = Plan(2, compression=compression, **SIZES)
    return simulate(WORK, with_wire(bytes_per_s, rounds), plan, measured=Measured(codec))


# %% [markdown]
# Two ranks, buckets of 500 kB, 1.7 MB of gradients. At 20 MB/s, the speed of slow Wi-Fi, a step without
# compression needs at least $2 \cdot \frac12 \cdot 1.7 / 20 = 85$ ms for the wire alone. What do you expect
# with 4 bits?

# %%
guess_4 = predict("How long is a step with 4 bits, at 20 MB/s?", unit="ms")
guess_4

# %%
guess_4.lock()
print(f"the simulator says {predicted(20e6, QUANTIZE).duration_s * 1e3:.0f} ms; ", end="")
print(f"without compression {predicted(20e6, None).duration_s * 1e3:.0f} ms")


# %%
from distlab.comm import throttled
from distlab.data_parallel import train_step
from distlab.trace import SpanWriter


def make_step(compression, spans):
    rank, model = dist.get_rank(), GPT(WIDE, torch.Generator().manual_seed(0))
    hook = Quantize(4) if compression is not None else None
    replicas = DataParallel(model, hook=hook, spans=spans, **SIZES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    call = {"loss_fn": model.loss, "synchronize": replicas.synchronize, "spans": spans}
    batch = CORPUS.batch(0, 8, rank=rank, world_size=2)
    return lambda: train_step(model, optimizer, batch=batch, **call)


# %% [markdown]
# A machine does not keep its speed. So `time_beside` calibrates, times a few steps, calibrates again, and so on, on the
# same ranks. `overlay_of` takes the step of median length, and predicts it from the calibrations around it.


# %%
from distlab.measure import overlay_of, time_beside


def timed(bytes_per_s, compression, make=make_step, steps_per_window=6):
    spans, rounds = SpanWriter(dist.get_rank()), calibration(compression)
    train = make(compression, spans)

    def step():
        with throttled(bytes_per_s):
            train()

    return time_beside(step, rounds.measure, spans, num_windows=3, steps_per_window=steps_per_window)


def measure(bytes_per_s, compression):
    reports = pair.run(timed, bytes_per_s, compression)
    return overlay_of(reports, lambda rounds: predicted(bytes_per_s, compression, rounds).trace)


# %%
overlay = measure(20e6, QUANTIZE)
print(guess_4.compare(overlay.middle_s[0] * 1e3))
print(overlay)

# %% [markdown]
# Predicted and measured on one timeline, at 20 MB/s with 4 bits: the upper row of each pair is what was measured, the
# pale one under it what the simulator said. Half of the measured steps end in the grey band; the prediction lets them
# end between the dotted lines. If the picture says that the machine was not calm, its boxes are pale. Close other
# programs and run the cell above again: it calibrates again, too.

# %%
from simulator.viz import Timeline

guess_4.lock()
timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, overlay.measured.duration_s)  # the whole step

# %% [markdown]
# ### The break-even, predicted and measured
#
# Now at four bandwidths, with 4 bits and without.


# %%
def median_step_s(bytes_per_s, compression, num_steps=7):
    step, times = make_step(compression, None), []
    with throttled(bytes_per_s):
        for _ in range(num_steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return median(times[2:])  # the first two warm up


for speed in (5e6, 20e6, 80e6, 320e6):
    for name, compression in {"none": None, "4 bits": QUANTIZE}.items():
        said_s, step_s = predicted(speed, compression).duration_s, max(pair.run(median_step_s, speed, compression))
        print(f"{speed / 1e6:3.0f} MB/s, {name:6}: predicted {said_s * 1e3:3.0f} ms, measured {step_s * 1e3:3.0f} ms")

# %% [markdown]
# Single runs on a machine that does other things too: expect a factor of two, not a digit. Between the bandwidth where
# 4 bits win and the one where they lose lies the break-even. An error that "none" has as well lies in how fast this
# machine computes or sends; one that only 4 bits have lies in the codec.
#
# **Timing a codec is a trap.** One bucket is encoded before the other ranks have woken up, so it shares no core. In a
# step all ranks encode at once, where four share two cores, and buckets have left the cache. So the calibration times
# twelve buckets in a row on all ranks together, and the codec inside the steps of two other models. More methods, with
# repeats: `benchmarks/throttled.py`.

# %% [markdown]
# ## Synchronise rarely
#
# All methods above send less after each step. A different way is to send nothing for H steps: each rank trains a
# *replica* as if it were alone. Then all meet, and agree.
#
# [Local SGD](../GLOSSARY.md#local-sgd) agrees on the mean of the replicas. [DiLoCo](../GLOSSARY.md#diloco) looks at
# what a replica has changed: agreed values minus own ones. That points uphill, like a gradient of H steps. So the
# mean change goes to a second optimizer, SGD with Nesterov's momentum: the [outer step](../GLOSSARY.md#outer-step). The
# *inner* one, AdamW, stays on its rank. With $\theta$ agreed on last, and $\theta_r$ the values of replica r:
#
# $$ d = \frac1n \sum_r (\theta - \theta_r) \qquad v \leftarrow \mu v + d
# \qquad \theta \leftarrow \theta - \eta\,(d + \mu v) $$
#
# In the exercise $v$ is `momentum`, $\mu$ `factor` and $\eta$ `lr`. With $\eta = 1$ and $\mu = 0$ that is local SGD.
# The library's plainest form, its step:

# %%
from distlab.local_sgd import DiLoCo, PlainDiLoCo

print(inspect.getsource(PlainDiLoCo.step))

# %% [markdown]
# ### Exercise: the outer step
#
# Write `outer_step(own, agreed, momentum, lr, factor)`. A rank comes with its own values after H steps. What all agreed
# on last and the outer momentum are the same on all ranks. All three belong to the caller, who needs them again: write
# into them. At the end the own values are the agreed ones. Budget: one all-reduce of as many elements as `own` has.

# %% exercise="05.outer"

# %%
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def train_rarely(every, lr, factor):
    rank, losses, model = dist.get_rank(), [], GPT(CONFIG, torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    agreed = parameters_to_vector(model.parameters()).detach()
    momentum = torch.zeros_like(agreed)
    for step in range(NUM_STEPS):
        batch = CORPUS.batch(step, 16, rank=rank, world_size=2)
        losses.append(float(train_step(model, optimizer, batch=batch, loss_fn=GPT.loss)))
        if (step + 1) % every == 0:
            own = parameters_to_vector(model.parameters()).detach()
            outer_step(own, agreed, momentum, lr, factor)
            vector_to_parameters(own, model.parameters())
    return losses


# %%
alone = {every: torch.tensor(pair.run(train_rarely, every, 1.0, 0.0)).mean(0) for every in (1, 10)}
print(f"H = 1: losses differ from those of data parallelism by {(alone[1] - plain).abs().max():.1g} at most")
panels = {"": {"data parallelism": (plain, 1)} | {f"H = {every}": (losses, 1) for every, losses in alone.items()}}
picture = draw_losses("With H = 1 local SGD is data parallelism", panels, xlabel="update")
show(picture, f"Data parallelism ends at {end_of(plain)}, H = 1 at {end_of(alone[1])}, H = 10 at {end_of(alone[10])}.")

# %% [markdown]
# **With H = 1 this is data parallelism**: the mean of the replicas after one step of SGD is one step by the mean
# gradient. With H = 10 a tenth of the bytes travels. Replicas that are apart for ten steps learn a little less.
#
# ### Between two nodes
#
# Now on a slow wire. The two ranks become two nodes of one rank each: everything that crosses takes the time of a wire
# of 20 MB/s and 200 us. (Nodes need Linux. Elsewhere do not run the cells of `ways`: what a Linux machine showed stands
# there.) Six ways to train, all with AdamW. The last one is *streaming*: half of the parameters meets at step 5, the
# other half at step 10, and their changes travel while the replica makes its next three steps.
#
# Without compression the wire alone takes 85 ms of each step, as computed above. DiLoCo meets once in ten steps. How
# long is its step on average, with its share of the meeting?

# %%
guess_diloco = predict("How long is a step of DiLoCo on average, with H = 10?", unit="ms")
guess_diloco

# %%
from distlab.comm import Nodes

EVERY, STREAM = 10, {"fragments": 2, "delay": 3}
MEAN, OUTER = {"lr": 1.0, "momentum": 0.0}, {"lr": 0.4, "momentum": 0.8}
OFTEN = {"DDP": lambda: None, "top-1 %": lambda: TopK(0.01), "rank 2": lambda: PowerSGD(2)}
WAYS = OFTEN | {"local SGD": MEAN, "DiLoCo": OUTER, "streaming": OUTER | STREAM}


def optimizer_of(way, model):
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if callable(way):  # it makes a hook
        return inner, DataParallel(model, hook=way()).synchronize
    return DiLoCo(model, inner, **{"every": EVERY} | way), None


# %%
def train_by(way, num_steps=80):
    rank, losses, model = dist.get_rank(), [], GPT(WIDE, torch.Generator().manual_seed(0))
    optimizer, synchronize = optimizer_of(way, model)
    with recorded() as seen:
        start = time.perf_counter()
        for step in range(num_steps):
            call = {"batch": CORPUS.batch(step, 8, rank=rank, world_size=2), "synchronize": synchronize}
            losses.append(float(train_step(model, optimizer, loss_fn=GPT.loss, **call)))
        seconds = time.perf_counter() - start
    return losses, seconds / num_steps, seen.records.ring_equivalent_bytes(rank) / num_steps


# %%
ways = {}
with Ranks(2, timeout_s=180, nodes=Nodes(2, between="20MB/s,200us")) as apart:
    for name, way in WAYS.items():
        losses, step_s, num_bytes = zip(*apart.run(train_by, way), strict=True)
        ways[name] = torch.tensor(losses).mean(0), max(step_s), num_bytes[0]
print(guess_diloco.compare(1e3 * ways["DiLoCo"][1]))

# %%
guess_diloco.lock()
for name, (losses, step_s, num_bytes) in ways.items():
    print(f"{name:9} {num_bytes / 1e3:7.1f} kB per step, {ways['DDP'][2] / num_bytes:5.1f}x less than DDP; ", end="")
    print(f"{step_s * 1e3:4.0f} ms per step; loss {losses[-10:].mean():.2f} in the last ten steps")
title = f"DiLoCo: a tenth of DDP's bytes, {ways['DiLoCo'][1] / ways['DDP'][1]:.0%} of its time, nearly its loss"
panels = {
    "sent per rank (MB)": {name: (losses, num_bytes / 1e6) for name, (losses, _, num_bytes) in ways.items()},
    "since the start (s)": {name: (losses, step_s) for name, (losses, step_s, _) in ways.items()},
}
words = "; ".join(f"{name} ends at {losses[-10:].mean():.2f}" for name, (losses, *_) in ways.items())
picture = draw_losses(title, panels, xscale="log")
show(picture, f"Loss against bytes and against seconds, six ways to train on two nodes. {words}.")

# %% [markdown]
# A line further left learns the same for less. Per byte the thin ways are furthest left, but they send in each step,
# encode in each step, and put an error memory in front of Adam, of which more below: their lines end high. Those that
# meet rarely send 10x<!--out--> less than DDP and end near it.
#
# ### A round, predicted
#
# The simulator knows rounds too: H steps alone, then a meeting, or fragments that travel beside the steps. Measured as
# above, on `throttled` ranks, with calibrations between the windows. A "step" of the picture is a round of ten.

# %%
from simulator import local_sgd_round

INNER = pair.run(lambda: count_work(torch.optim.AdamW, lr=1e-3))[0]


def make_round(options, spans):
    rank, model = dist.get_rank(), GPT(WIDE, torch.Generator().manual_seed(0))
    optimizer, _ = optimizer_of(options | {"spans": spans}, model)
    call = {"batch": CORPUS.batch(0, 8, rank=rank, world_size=2), "loss_fn": GPT.loss, "spans": spans}

    def train(steps=EVERY):
        for _ in range(steps):
            train_step(model, optimizer.inner, **call)
            with spans.span("meeting", kind="wait", lane="compute"):
                optimizer.meet()

    train(options.get("delay", 0))  # a round ends, as the predicted one, where nothing travels
    return train


# %%
def measure_round(options):
    reports = pair.run(timed, 20e6, None, lambda _, spans: make_round(options, spans))
    return overlay_of(reports, lambda rounds: local_sgd_round(INNER, with_wire(20e6, rounds), 2, **options).trace)


# %%
for name, options in (("streaming", STREAM), ("DiLoCo", {})):
    overlay = measure_round({"every": EVERY} | options)
    print(f"{name}: {overlay}")
timeline = Timeline(overlay)
timeline

# %%
timeline.view = (0.0, overlay.measured.duration_s)  # the whole round

# %% [markdown]
# This is DiLoCo: ten steps alone, and a meeting for which all wait. Streaming hides the meetings. What a replica learns
# while its changes travel is not lost: its values become half its own, half the agreed ones.
#
# And the four machines of the beginning, which did less than one, with H steps between two meetings?

# %% tags=["nbval-check-output"]
for every, options in ((1, {}), (10, {}), (100, {}), (500, {}), (100, {"fragments": 4, "delay": 6})):
    far = local_sgd_round(MODEL, MACHINES, 4, every=every, **options)
    print(f"H = {every:3}: {far.step_s * 1e3:4.0f} ms per step, ", end="")
    print(f"{4 * one.duration_s / far.step_s:.2f}x the work of one machine {options or ''}")

# %% [markdown]
# With H = 100 four machines do the work of 3.3<!--out-->, on a wire on which they did less than one. Fragments under
# way for six steps hide the rest.
#
# ### What goes wrong
#
# **The outer rate.** A change enters the momentum, and counts again in every later meeting: $\eta / (1 - \mu)$ times in
# all. The papers' 0.7 and 0.9 make that 7, on runs of tens of thousands of steps. And here, where there are eight
# meetings?


# %%
def last_loss(**way):
    return torch.tensor([losses for losses, *_ in pair.run(train_by, way)])[:, -10:].mean()


for lr, momentum in ((0.4, 0.8), (0.7, 0.9), (1.5, 0.9), (3.0, 0.9)):
    print(f"outer rate {lr}, momentum {momentum}: a change counts {lr / (1 - momentum):4.1f} times; ", end="")
    print(f"loss {last_loss(lr=lr, momentum=momentum):.2f}")

# %% [markdown]
# **H too large.** The replicas drift apart, and each learns from its own half of the data alone. With H = 80 they are
# alone to the end:

# %%
for every in (1, 10, 40, 80):
    losses = last_loss(every=every, **MEAN), last_loss(every=every, **OUTER)
    print(f"H = {every:2}: local SGD {losses[0]:.2f}, DiLoCo {losses[1]:.2f}")


# %% [markdown]
# DiLoCo has a best H. **If H is too small**, AdamW's steps, all of one size, add up in a momentum that is made for the
# changes of many steps. It is data parallelism only with H = 1, SGD inside and a mean outside.
#
# **A node leaves.** Under DDP the others wait for it in the next all-reduce. Here they need it once in H steps, and
# `regroup` goes on with those that are left. Of the four ranks the last one leaves in the middle of a round. The group
# of the others is there from the start; a real job makes it when a rank is missed (lesson 12).


# %%
def one_leaves(num_steps=60):
    rank, losses, model = dist.get_rank(), [], GPT(CONFIG, torch.Generator().manual_seed(0))
    inner, left = torch.optim.AdamW(model.parameters(), lr=3e-3), dist.new_group([0, 1, 2])
    optimizer = DiLoCo(model, inner, every=EVERY, **OUTER)
    for step in range(num_steps):
        if step == 35 and rank == 3:
            return losses
        if step == 35:
            optimizer.regroup(left)
        batch = CORPUS.batch(step, 16, rank=rank, world_size=4)
        losses.append(float(train_step(model, optimizer, batch=batch, loss_fn=GPT.loss)))
    return losses


# %%
stayed = ranks.run(one_leaves)
print("steps made by each rank:", [len(losses) for losses in stayed])
means = torch.tensor(stayed[:3]).mean(0)
print("loss of the others, by ten steps:", [f"{ten:.2f}" for ten in means.view(-1, 10).mean(1)])

# %% [markdown]
# What the last rank had learned since its last meeting is lost, and its share of the data. (With four ranks to the end
# the last two numbers are 3.37 and 3.35: later batches are harder, for all.)
#
# **Who trains so?** DiLoCo's paper: 8 replicas, H = 500, a loss as good as that of fully synchronous training.
# OpenDiLoCo repeated it over two continents: 90 to 95 % of the time was computing. INTELLECT-1, 10 billion parameters,
# was trained on three continents by up to 14 nodes, which came and left: H = 100, and 8 bits instead of 32, together
# 400 times fewer bytes; 83 to 96 % was computing. Streaming DiLoCo sends 4 bits: so does `DiLoCo(hook=Quantize(4))`.

# %% [markdown]
# ## Production: torch's own
#
# `DistributedDataParallel.register_comm_hook(state, hook)` is torch's place for what stands between bucket and wire. It
# comes with `fp16_compress_hook`, `bf16_compress_hook` and `powerSGD_hook`. Same model, same batches, turn by turn in
# one run: torch's and the library's. PowerSGD starts after two steps in both, since DDP rebuilds its buckets after the
# first. One bucket, because torch's PowerSGD hook can [hang](../GLOSSARY.md#deadlock-hang) with several on gloo.
# torch's bfloat16 hook refuses the CPU; the library's `Cast(torch.bfloat16)` takes it. PowerSGD's first factors are
# random, and the two draw differently: their losses agree to a few thousandths.

# %%
import time

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from distlab.compression import Cast


# %%
def ddp_with(name, model):
    replicas = DistributedDataParallel(model, bucket_cap_mb=25)
    if name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        replicas.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        replicas.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return replicas


def ours_with(name, model):
    hook = PowerSGD(2, start_step=2) if name == "PowerSGD" else Cast(torch.float16)
    return DataParallel(model, bucket_bytes=10**8, first_bucket_bytes=10**8, hook=hook)


# %%
def side_by_side(name, num_steps=12):
    rank, rows = dist.get_rank(), []
    models = [GPT(CONFIG, torch.Generator().manual_seed(0)) for _ in range(2)]
    replicas, ddp = ours_with(name, models[0]), ddp_with(name, models[1])
    programs = [(models[0], replicas.synchronize), (ddp, None)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(num_steps):
        batch = CORPUS.batch(step, 16, rank=rank, world_size=2)
        for (module, synchronize), optimizer in zip(programs, optimizers, strict=True):
            start = time.perf_counter()
            loss = train_step(module, optimizer, batch=batch, loss_fn=GPT.loss, synchronize=synchronize)
            rows.append((float(loss), time.perf_counter() - start))
    return rows[::2], rows[1::2]


# %%
from statistics import median, quantiles

step_ms = {}
for name in ("float16", "PowerSGD"):
    ours, theirs = pair.run(side_by_side, name)[0]
    gap = max(abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True))
    ratios = [a[1] / b[1] for a, b in zip(ours[3:], theirs[3:], strict=True)]
    low, _, high = quantiles(ratios)
    print(f"{name:9} losses differ by {gap:.0e} at most; a step takes {median(ratios):.2f} times torch's")
    print(f"{'':9} half of the pairs: {low:.2f} to {high:.2f}")
    step_ms[name] = {who: 1e3 * median(s for _, s in rows[3:]) for who, rows in (("ours", ours), ("torch", theirs))}
words = {"unit": "ms", "title": "A step with the library's hook, and with torch's own"}
show(draw_bars(step_ms, **words))

# %% [markdown]
# The same settings under other names:
#
# | | 16-bit gradients on the wire | fewer bits, or low rank |
# |---|---|---|
# | torch DDP | `fp16_compress_hook`, `bf16_compress_hook` | `powerSGD_hook` (`matrix_approximation_rank`) |
# | torchtitan, FSDP2 | `mixed_precision_reduce`; `MixedPrecisionPolicy(reduce_dtype)` | none found |
# | Megatron-LM | `--grad-reduce-in-bf16` (with `--bf16` alone: float32) | none found |
# | DeepSpeed | `communication_data_type` | `OneBitAdam` (`freeze_step`); `zero_quantized_gradients` (ZeRO stage 3) |
# | Horovod | `compression=hvd.Compression.fp16` | none found |
#
# Rarely: torch has `PostLocalSGDOptimizer` (means every so many steps, after a start like DDP), torchft has `LocalSGD`
# and a `DiLoCo` whose `sync_every`, `fragment_sync_delay` and `should_quantize` you know by now under other names.
#
# torchtitan's setting is float32 unless you change it, and only newer versions take "bfloat16" there.
#
# Read the right column again: three of the five have nothing there. torchtitan and Megatron-LM are made for clusters
# whose wires are fast, where you just saw that there is little to gain. Compression is for slow wires: Ethernet, rented
# machines far apart, homes.
#
# 1-bit Adam is not "signs, then Adam". Adam divides by its second moment, so an error memory in front of it would be
# divided by something that changes. 1-bit Adam runs plain Adam for `freeze_step` steps: DeepSpeed's tutorial starts
# from 15 to 25 % of all steps. Then it freezes the second moment and sends the signs of the *momentum*, with [error
# feedback](../GLOSSARY.md#error-feedback).

# %% [markdown]
# ## Popular claims, tested
#
# - **"Top-1 % saves 99 %."** Refuted: it sends 25x less on 4 ranks, which saves 96 %, and on more ranks it saves less;
#   $1/(nr)$ by the formula.
# - **"One bit saves 32x."** Against float32, $64/n$: 16x on 4 ranks, and 8x on 4 if your gradients are 16-bit anyway.
#   What keeps the 32 on any number of ranks is a scheme that reduces, such as 1-bit Adam's two phases:
#   [all-to-all](../GLOSSARY.md#all-to-all), then all-gather, of packed signs, $2\frac{n-1}{n}$ times a 32nd.
# - **"Compression speeds up training."** On a wire below its break-even. On InfiniBand at 400 Gb/s the simulator has
#   three of the five methods slower than none, and the other two 2 % faster, for a gradient that is far worse.
# - **"Unbiased means harmless."** Refuted: random-k is right on average, wrong by ten lengths each time, and at a
#   learning rate that is fine for plain SGD its loss ran away, even with 10 %.
# - **"DiLoCo sends 500 times less, for free."** The bytes hold, by construction: 1/H of them, and the paper's H was
#   500. Free it is not. You pay with memory: agreed values, momentum and changes, 12 bytes a parameter in float32. And
#   you pay with loss: how much depends on H, on the outer rate, and on how far your replicas drift. Where the wire is
#   fast there is nothing to gain, since gradients hide behind backward.
# - **"Error feedback repairs any compressor."** It gives back what was dropped, late, and late gradients act like a
#   larger step. Above the optimizer was plain SGD. With momentum, which keeps each gradient for ten steps more, at the
#   same speed in the long run ($0.2 \cdot (1 - 0.9)$):

# %%
for name in ("top-1 %", "signs"):
    ends = [end_of(mean_losses(lambda name=name, m=m: HOOKS[name](m), 0.9)) for m in (False, True)]
    print(f"{name:8} and momentum 0.9: without memory {ends[0]}, with memory {ends[1]}")

# %% [markdown]
# The gain shrinks, or turns into a loss. Remedies in use: a lower learning rate, uncompressed first steps
# (`start_step`), momentum applied on each rank before compression (Deep Gradient Compression), or compressing the
# momentum itself (1-bit Adam).

# %% [markdown]
# ## Lab
#
# The same on your own hardware, as a plain script. In a terminal, on four CPU ranks, with the reference and with what
# you wrote in this notebook:
#
# ```
# distlab lab 05 --ranks 4 --impl reference
# distlab lab 05 --ranks 4 --impl mine --trace traces
# ```
#
# The same by [torchrun](../GLOSSARY.md#torchrun), which is also how it runs on GPUs (`--nproc-per-node` is their
# number):
#
# ```
# torchrun --nproc-per-node 4 lessons/05_compression/lab.py --impl reference
# ```
#
# `lab_reference.md`, next to it, has the output to compare with. `--mb-per-s 20` plays a slow wire.

# %% [markdown]
# ## Questions
#
# Answer each on paper before you run the cell below, which has the answers.
#
# 1. From how many ranks on does top-k with a ratio of 0.1 % send more than 16-bit gradients?
# 2. 8-bit codes by all-gather: how many ranks until nothing is saved, against 16-bit gradients?
# 3. A layer of 4096 x 4096. PowerSGD with which rank sends as much as top-1 % does on 4 ranks?
# 4. A colleague's loss with top-k is exactly that of no compression, and so are the bytes. What did he write?
# 5. The memory of error feedback is float32, gradients are 16-bit. What does it cost for the 1.3B model, a rank?

# %% tags=["nbval-check-output"]
print("1. pairs of 2 + 4 bytes: (n-1) 6 r E against 2 (n-1)/n 2 E, so n = 4 / (6 r) =", round(4 / (6 * 0.001)), "ranks")
print("2. (n-1) E against 2 (n-1)/n 2 E: n = 4")
elements = 4096 * 4096
top_1_percent = 3 * 8 * 0.01 * elements  # (n-1) pairs of 8 bytes
print(f"3. 1.5 x 4 bytes x 8192 r = {top_1_percent / 1e6:.1f} MB: r = {top_1_percent / (1.5 * 4 * 8192):.0f}")
print("4. top-k of the mean, after an all-reduce of everything, with k = all; or a hook that was never registered")
print(f"5. {4 * MODEL.num_parameters / 1e9:.1f} GB, as much as the float32 weights")

# %%
ranks.close()
pair.close()

# %% [markdown]
# ## What to read next
#
# - Karimireddy et al., *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*, 2019: why a memory is
#   enough, in a proof of a page.
# - Vogels, Karimireddy, Jaggi, *PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization*, 2019.
# - Agarwal et al., *On the Utility of Gradient Compression in Distributed Training Systems*, 2022: more than
#   200 setups, and in how few of them it paid.
#
# **Next: lesson 6.** So far you counted what travels. Lesson 6 counts what stays: where the memory of a training step
# goes. Then lesson 7 divides it among the ranks.
#
# ## Sources
#
# - Aji and Heafield 2017, *Sparse Communication for Distributed Gradient Descent*; Lin et al. 2018, *Deep Gradient
#   Compression*: top-k with a memory, and what momentum does to it.
# - Seide et al. 2014, *1-Bit Stochastic Gradient Descent*: signs with error feedback, the first.
# - Alistarh et al. 2017, *QSGD*: quantization, and what being unbiased costs.
# - Karimireddy et al. 2019, *Error Feedback Fixes SignSGD and other Gradient Compression Schemes*.
# - Stich, Cordonnier, Jaggi 2018, *Sparsified SGD with Memory*: random-k and top-k.
# - Vogels, Karimireddy, Jaggi 2019, *PowerSGD*, algorithms 1 and 2.
# - Tang et al. 2021, *1-bit Adam*; DeepSpeed's tutorial on 1-bit Adam, read 2026-11. Its configuration JSON has the
#   other two settings.
# - Agarwal et al. 2022, *On the Utility of Gradient Compression in Distributed Training Systems*: when it does not pay.
# - Stich 2018 (1805.09767) and Lin et al. 2018 (1808.07217, post-local SGD); Douillard et al. 2023, *DiLoCo*
#   (2311.08105), and 2025, *Streaming DiLoCo* (2501.18512); Jaghouar et al. 2024, *OpenDiLoCo* (2407.07852) and
#   *INTELLECT-1 Technical Report* (2412.01152), with its model card.
# - PyTorch documentation, DDP Communication Hooks, read for torch 2.13. torchft's documentation, and source of
#   Megatron-LM (`arguments.py`), torchtitan (`TrainingConfig`) and Horovod (`torch/compression.py`), read 2026-11.
# - In this repository: `distlab/compression/sparse.py`, `quantize.py`, `powersgd.py`, `feedback.py`, in this order;
#   then `distlab/local_sgd/plain.py` and `diloco.py`.
