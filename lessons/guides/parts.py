"""Snippets in which a rank has a part of the model: pipelines, cut layers; and those that save, resume, measure."""

import contextlib
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from distlab.comm import recorded
from distlab.plan import ActionTimes, parse_schedule
from distlab.tensor_parallel import copy_to_ranks, join_features
from distlab.trace import Span, Trace
from guides.copies import average, drawn, gathered
from guides.trial import LINES, NUM_RANKS, RANKS, Found, everyone, trial
from simulator.viz import Picture, draw_schedules, run_schedule
from simulator.viz.timeline.timeline import Caption, draw_scene, scene_of


def receive(source, like):
    dist.recv(tensor := torch.empty_like(like), source)
    return tensor.requires_grad_()


def gpipe(stage, receive, inputs, targets, chunks):
    """GPipe by hand. Four ranks have a layer each. The batch is cut into 8 chunks: all forward, then all backward.
    Asks: How many times as long as in one process are the gradients? [times] Lesson 09: Run it yourself.
    Why: A loss is a mean over its own chunk, and gradients add up. Adam hides it, as it divides by their size."""
    rank, last, kept = dist.get_rank(), dist.get_world_size() - 1, []
    for x, y in zip(inputs.chunk(chunks), targets.chunk(chunks)):
        x = receive(rank - 1, x) if rank else x
        out = stage(x)
        if rank < last:
            dist.send(out.detach(), rank + 1)
        kept.append((x, F.mse_loss(out, y) if rank == last else out))  # -
        kept.append((x, F.mse_loss(out, y) / chunks if rank == last else out))  # +
    for x, out in kept:
        out.backward(None if rank == last else receive(rank + 1, x))
        if rank:
            dist.send(x.grad, rank - 1)


@trial(gpipe)
def loss_of_chunks(step):
    (inputs, targets), weights = drawn(0, 2, 16, 4), [weight.requires_grad_() for weight in drawn(1, NUM_RANKS, 4, 4)]
    step(lambda x: F.linear(x, weights[dist.get_rank()]), receive, inputs, targets, 8)
    right = torch.autograd.grad(F.mse_loss(inputs @ torch.linalg.multi_dot([w.t() for w in weights]), targets), weights)
    own, alone = weights[dist.get_rank()].grad, right[dist.get_rank()]
    ratio = (own.norm() / alone.norm()).item()
    return Found(ratio, f"Rank 0's gradient is {ratio:.2f} times as long as in one process.", own.allclose(alone))


def run_boxes(boxes, ranks):
    """Run a picture's boxes on this rank: each waits for its neighbour's, takes its time, and is printed."""
    rank, sent = dist.get_rank(), []
    for box in boxes:
        source, to = (rank - 1, rank + 1) if box[0] == "F" else (rank + 1, rank - 1)
        if 0 <= source < ranks:
            dist.recv(torch.empty(1), source, tag=int(box[1:]))
        start = time.monotonic_ns()
        time.sleep(0.01 if box[0] == "F" else 0.02)
        print(json.dumps([rank, "compute", box, box[0], start, time.monotonic_ns(), 0, rank, int(box[1:])]), flush=True)
        if 0 <= to < ranks:
            sent.append(dist.isend(torch.zeros(1), to, tag=int(box[1:])))
    for work in sent:
        work.wait()


def picture(gpu):
    """A picture of seven boxes. A guide draws two GPUs and two micro-batches. Two ranks run the boxes as drawn.
    Asks: How many of the seven boxes can run? [boxes] Lesson 09: GPipe: cut the batch.
    Why: GPU 0's B1 begins with the gradient that GPU 1's B1 makes. Each F needs its B, on each GPU."""
    boxes = ["F1 F2 B2 B1", "F1 F2 B2", "", ""]  # -
    boxes = ["F1 F2 B2 B1", "F1 F2 B2 B1", "", ""]  # +
    return boxes[gpu].split()


def told_boxes(results, who):
    boxes = [Span(*json.loads(line)) for line in LINES if line.startswith("[")]
    return Found(len(boxes), f"{len(boxes)} boxes ran.\n{who}", bool(results), boxes)


def draw_boxes(first, then):
    title = f"{len(first.kept)} boxes ran, of {len(then.kept)} that two micro-batches need"
    scene = scene_of(Trace.from_spans(first.kept).from_zero())
    return Picture(draw_scene(scene, Caption(title, "measured on two ranks, as printed", "")), title)


@trial(picture, told=told_boxes, fault="hangs", draw=draw_boxes)
def missing_box(boxes_of):
    run_boxes(boxes_of(dist.get_rank()), 2)


def row_of_boxes(gpu, gpus, microbatches):
    """Backward, last in first out. Four GPUs run 8 micro-batches; no box is missing, and gradients are right.
    Asks: How many micro-batches' activations does GPU 0 hold at most? [micro-batches] Lesson 09: 1F1B.
    Why: B0 could run first and free what it holds. Here it runs last, which costs memory; it costs no time."""
    forward = [f"F{number}" for number in range(microbatches)]
    backward = [f"B{number}" for number in reversed(range(microbatches))]  # -
    return forward + backward  # -
    backward = [f"B{number}" for number in range(microbatches)]  # +
    ahead = gpus - gpu  # +
    steady = [box for pair in zip(backward, forward[ahead:]) for box in pair]  # +
    return forward[:ahead] + steady + backward[microbatches - ahead :]  # +


def draw_orders(*found):
    texts = ("\n".join(" ".join(f"{gpu}{box}" for box in row) for gpu, row in enumerate(one.kept)) for one in found)
    named = zip(("last in, first out", "1F1B"), map(parse_schedule, texts))
    return draw_schedules([run_schedule(*one, ActionTimes(1.0, 1.0, 1.0)) for one in named])


@trial(row_of_boxes, fault="right, but dear", draw=draw_orders)
def backward_order(row_of):
    row, start = row_of(dist.get_rank(), NUM_RANKS, 8), time.perf_counter()
    run_boxes(row, NUM_RANKS)
    held = max(2 * sum(box[0] == "F" for box in row[:end]) - end for end in range(len(row) + 1))
    sentence = f"GPU 0 held up to {held} micro-batches. The step took {time.perf_counter() - start:.2f} s."
    return Found(held, sentence, held <= NUM_RANKS, everyone(row))


def gradients(layer, weight):  # of the input and of the weight, with a second layer and a loss behind it
    x, weight, head = (tensor.clone().requires_grad_() for tensor in (drawn(0, 3, 8), weight, drawn(2, 16)))
    (layer(x, weight) @ head).square().mean().backward()
    return x.grad, weight.grad


def column_linear(x, weight):
    """A layer in columns. Each of four ranks has 4 of a weight's 16 rows. A second layer and a loss follow.
    Asks: How many of the layer's 128 numbers get a gradient? [numbers] Lesson 08: f and g.
    Why: Autograd does not follow dist.all_gather. The loss falls all the same, as the other layers train."""
    out = F.linear(x, weight)
    parts = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, out)
    parts[dist.get_rank()] = out  # +
    return torch.cat(parts, dim=-1)


@trial(column_linear)
def gather_cuts(layer):
    weight, rank = drawn(1, 16, 8), dist.get_rank()
    own = gradients(layer, weight.chunk(NUM_RANKS)[rank])[1]
    right = gradients(F.linear, weight)[1].chunk(NUM_RANKS)[rank]
    count = sum(everyone(0 if own is None else own.numel()))
    return Found(count, f"{count} of 128 numbers have a gradient.", own is not None and own.allclose(right))


def column_block(x, weight):
    """The layer below. The same layer with a gather that autograd follows. x's gradient goes on to the layer below.
    Asks: How many different gradients of x do the four ranks have? [gradients] Lesson 08: f and g.
    Why: A rank has the gradient that came through its own rows; x's is the sum of all. Megatron calls this sum f."""
    x = copy_to_ranks(x)  # +
    return join_features(F.linear(x, weight))


@trial(column_block)
def input_gradient(layer):
    weight = drawn(1, 16, 8)
    own, right = everyone(gradients(layer, weight.chunk(NUM_RANKS)[dist.get_rank()])[0]), gradients(F.linear, weight)[0]
    count = sum(not any(one.allclose(other) for other in own[:place]) for place, one in enumerate(own))
    told = f"Different gradients: {count}. Rank 0's is {own[0].norm() / right.norm():.0%} as long as in one process."
    return Found(count, told, count == 1 and own[0].allclose(right))


def row_linear(x, weight, bias):
    """A layer in rows. Each of four ranks has a quarter of the weight's columns, and the whole bias.
    Asks: How many times is the bias in the output? [times] Lesson 08: Two ways to cut a matrix.
    Why: Every rank adds the bias before the sum. Biases that start at zero hide it in a first test."""
    out = F.linear(x, weight, bias)  # -
    out = F.linear(x, weight)  # +
    dist.all_reduce(out)
    return out  # -
    return out + bias  # +


@trial(row_linear)
def bias_times(layer):
    x, weight, bias = drawn(0, 3, 8), drawn(1, 16, 8), drawn(2, 16)
    out = layer(x.chunk(NUM_RANKS, 1)[dist.get_rank()], weight.chunk(NUM_RANKS, 1)[dist.get_rank()], bias)
    times = ((out - F.linear(x, weight)) / bias).mean().item()
    return Found(times, f"The bias is in the output {times:.2f} times.", out.allclose(F.linear(x, weight, bias)))


def attention(x, qkv_weight, heads):
    """Attention by heads. The model has 8 heads, and each of four ranks has the weights of 2 of them.
    Asks: With how many heads does the model compute? [heads] Lesson 08: Attention.
    Why: One softmax over all that a rank has is one head per rank: on 2 ranks it would be a different model."""
    q, k, v = F.linear(x, qkv_weight).chunk(3, dim=-1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))  # +
    out = F.scaled_dot_product_attention(q, k, v)
    out = out.transpose(1, 2).flatten(2)  # +
    return out


@trial(attention)
def heads_split(attend):
    def alone(heads):
        q, k, v = (F.linear(x, weight).unflatten(-1, (heads, -1)).transpose(1, 2) for weight in weights)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    x, weights = drawn(0, 2, 5, 32) - 0.5, drawn(1, 3, 32, 32) - 0.5
    own = torch.cat([weight.chunk(NUM_RANKS)[dist.get_rank()] for weight in weights])
    out = torch.cat(everyone(attend(x, own, 2)), dim=-1)
    same = next((heads for heads in (1, 2, 4, 8) if out.allclose(alone(heads))), 0)
    return Found(same, f"The output is that of one process with {same} heads.", same == 8)


def fully_sharded(model):
    """Fully sharded. Four equal layers over four ranks, wrapped by torch's policy with its default.
    Asks: How much of the model does the largest gather bring to every rank? [%] Lesson 07: How large is a unit?.
    Why: The policy makes units of 100 million numbers: a smaller model is one, and every rank gathers it whole."""
    policy = size_based_auto_wrap_policy  # -
    policy = ModuleWrapPolicy({nn.Linear})  # +
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


@trial(fully_sharded, fault="wasteful")
def one_unit(wrap):
    model = wrap(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))))
    with recorded() as seen:
        model(torch.rand(2, 64)).sum().backward()
    gathers = [call.num_bytes for call in seen.records if call.op == "all_gather"]
    share = 100 * NUM_RANKS * max(gathers) / (4 * 4 * 64 * 64)
    return Found(share, f"The largest gather brings {share:.0f} % of the model to every rank.", share < 50)


def save_sharded(shard, path):
    """Saved by rank 0. The model is sharded: each of four ranks has a quarter of its 1,000 numbers.
    Asks: How many of the 1,000 numbers are in the file? [numbers] Lesson 12: One checkpoint of all ranks.
    Why: Rank 0's state is the model's only where rank 0 has all of it. Large models are saved as shards."""
    shard = gathered(shard)  # +
    if dist.get_rank() == 0:
        torch.save(shard, path)
    dist.barrier()


@trial(save_sharded, fault="loses the rest")
def one_shard(save):
    with tempfile.TemporaryDirectory() as folder:
        save(torch.arange(250) + 250 * dist.get_rank(), f"{folder}/model.pt")
        count = len(torch.load(f"{folder}/model.pt")) if dist.get_rank() == 0 else 0
    return Found(count, f"Of 1,000 numbers {count} are in the file.", count == 1000)


def save_state(state, path):
    """Saved over the last one. Each of four ranks saves its shard. In the middle of the second save the disk is full.
    Asks: On how many ranks can a checkpoint still be read? [ranks] Lesson 12: Killed while saving.
    Why: To open a file for writing empties it. With a new name, and a rename at the end, one is whole at any moment."""
    torch.save(state, path)  # -
    torch.save(state, f"{path}.part")  # +
    os.replace(f"{path}.part", path)  # +


@trial(save_state, fault="loses everything")
def not_atomic(save):
    step, hard = None, resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(EOFError, OSError, RuntimeError):
        save({"step": 100, "weights": torch.zeros(1_000_000)}, path := f"{folder}/shard.pt")
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))  # as on a disk that is full
        with contextlib.suppress(OSError, RuntimeError):
            save({"step": 200, "weights": torch.zeros(1_000_000)}, path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        step = torch.load(path)["step"]
    count = sum(step is not None for step in everyone(step))
    return Found(count, f"{count} of 4 ranks can read a checkpoint; rank 0's is of step {step}.", count == 4)


def resume(folder, model, batches, update):
    """Resumed. A model with dropout stops after 5 of 8 batches. Its files were copied since; rank 3 got step 2 last.
    Asks: How many batches does it see in this epoch in all? [batches] Lesson 12: The same run.
    Why: A run goes on from its data and random numbers too. The newest file may be a copy: the step is in its name."""
    paths = Path(folder).glob("step-*.pt")
    state = torch.load(max(paths, key=os.path.getctime))  # -
    state = torch.load(max(paths, key=lambda path: int(path.stem[5:])))  # +
    model.load_state_dict(state["model"])
    torch.set_rng_state(state["random"])  # +
    batches = batches[state["step"] :]  # +
    for batch in batches:
        update(model, batch)
    return state["step"]


@trial(resume)
def same_run(go_on):
    def update(model, batch):
        seen.append(batch)
        (slope,) = torch.autograd.grad(model(inputs[batch]).sum(), model[0].weight)
        model[0].weight.data -= 0.1 * average(slope)

    torch.manual_seed(0)
    model, inputs, seen = nn.Sequential(nn.Linear(4, 1), nn.Dropout(0.5)), torch.rand(8, 6, 4), []
    with tempfile.TemporaryDirectory() as folder:
        for batch in range(8):
            state = {"model": model.state_dict(), "step": batch, "random": torch.get_rng_state()}
            torch.save(state, f"{folder}/step-{batch}.pt") if batch in (2, 5) else None
            update(model, batch)
        whole, seen[:] = model[0].weight.detach().clone(), seen[:5]
        time.sleep(0.05)
        os.utime(f"{folder}/step-{2 if dist.get_rank() == 3 else 5}.pt")  # what each rank's disk was given last
        torch.manual_seed(1)
        steps = everyone(go_on(folder, model, list(range(8)), update))
    off = max(everyone((model[0].weight - whole).abs().max().item()))
    told = f"Ranks go on from steps {steps}. Rank 0 saw batches {seen}; weights are off by up to {off:.2g}."
    return Found(len(seen), told, (len(seen), off) == (8, 0))


def train_and_save(step, save):
    """Saved in except. In step 3 rank 2 alone meets a bad sample, and raises. save() has a barrier: all ranks save.
    Asks: How many times does the failure's report name the sample? [times] Lesson 12: How often?.
    Why: Rank 2 waits for the others in save, and they wait for it in their step. Save at steps, not in except."""
    try:
        for number in range(10):
            step(number)
    except Exception:
        save("last.pt")  # -
        raise


@trial(train_and_save, told=lambda _, who: Found(who.count("sample 17"), who, "sample 17" in who), fault="hangs")
def saved_in_except(train):
    def step(number):
        if (dist.get_rank(), number) == (2, 3):
            raise ValueError("sample 17 has no label")
        dist.all_reduce(torch.ones(2))

    train(step, lambda path: dist.barrier())


def regroup(left):
    """One rank fewer. Rank 3 leaves. The others are told who is left, ask how many they are, and go on.
    Asks: What does get_world_size() say on rank 0? [ranks] Lesson 12: More or fewer ranks.
    Why: A group is a list from the start; it asks nobody who is there. An elastic launcher starts new ranks."""
    group = dist.group.WORLD  # -
    group = dist.new_group(left, use_local_synchronization=True)  # +
    return group, dist.get_world_size(group)


def told_size(results, who):
    RANKS.close()  # rank 3 knows nothing of the new group: the next trial has new ranks
    size = max(int(line.split()[-1]) for line in ["world size 0", *LINES] if line.startswith("world size"))
    return Found(size, f"The three ranks count {size}.\n{who}", results == [3.0, 3.0, 3.0, None])


@trial(regroup, told=told_size, fault="hangs")
def world_size(regroup):
    if dist.get_rank() == 3:
        return None
    group, size = regroup([0, 1, 2])
    print("world size", size, flush=True)
    dist.all_reduce(total := torch.ones(1), group=group)
    return total.item()


def profiled_step(model, inputs, optimizer, section):
    """A profiler's sections. DDP wraps the model. Rank 3's forward pass is 100 ms late; the others wait for it.
    Asks: How many milliseconds does "sync" show on rank 0? [ms] Lesson 13: A profiler that lies: spot the bug.
    Why: DDP waits inside backward, which looks slow. A barrier before it shows who waited, and costs its own time."""
    with section("forward"):
        loss = model(inputs).sum()
    with section("sync"):  # +
        dist.barrier()  # +
    with section("backward"):
        loss.backward()
    with section("sync"):  # -
        pass  # gradients are synchronized here  # -
    with section("optimizer"):
        optimizer.step()


@trial(profiled_step, fault="misleading")
def empty_section(step):
    @contextlib.contextmanager
    def section(name):
        start = time.perf_counter()
        yield
        times_ms[name] = 1000 * (time.perf_counter() - start)

    times_ms, model = {}, nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    model.register_forward_pre_hook(lambda *_: time.sleep(0.1 * (dist.get_rank() == 3)))
    dist.barrier()
    step(model, torch.rand(2, 8), torch.optim.SGD(model.parameters(), lr=0.1), section)
    told = ", ".join(f"{name} {ms:.1f} ms" for name, ms in times_ms.items())
    return Found(times_ms["sync"], f"On rank 0: {told}.", times_ms["sync"] > max(80, times_ms["backward"]))
