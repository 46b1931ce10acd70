"""Right answers to lesson 12, written in other ways than the reference."""

import copy
import hashlib
import io
import json
import math
import os
import pickle
import shutil
import tempfile

import torch
import torch.distributed as dist


def save_with_descriptors(folder, step, state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    descriptor = os.open(folder / "saving", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, buffer.getvalue())
    os.fsync(descriptor)
    os.close(descriptor)
    os.rename(folder / "saving", folder / f"step-{step}.pt")
    names = os.open(folder, os.O_RDONLY)
    os.fsync(names)
    os.close(names)


def save_by_torch(folder, step, state):
    from distlab.checkpoint.files import flush_directory

    partial = folder / f"step-{step}.pt.partial"
    torch.save(state, partial)
    with partial.open("rb+") as file:
        os.fsync(file)
    partial.rename(folder / f"step-{step}.pt")
    flush_directory(folder)


def save_under_a_name_of_its_own(folder, step, state):
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".saving-", delete=False) as file:
        torch.save(state, file)
        file.flush()
        os.fdatasync(file.fileno())
    shutil.move(file.name, folder / f"step-{step}.pt")
    os.fsync(os.open(folder, os.O_DIRECTORY))


def shards_with_renames(folder, step, shard):
    rank, partial = dist.get_rank(), folder / "saving"
    if rank == 0:
        if partial.exists():
            shutil.rmtree(partial)
        os.makedirs(partial)
    dist.all_reduce(torch.zeros(1))
    with open(partial / f"rank-{rank}.pt", "wb") as file:
        torch.save(shard, file)
    dist.all_reduce(torch.zeros(1))
    if rank == 0:
        os.replace(partial, folder / f"step-{step}")
        shutil.rmtree(folder / f".step-{step}", ignore_errors=True)
    dist.barrier()


def shards_by_messages(folder, step, shard):
    partial = folder / f".step-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    dist.broadcast_object_list([None])
    dist.barrier()
    torch.save(shard, os.path.join(partial, f"rank-{dist.get_rank()}.pt"))
    done = [None] * dist.get_world_size()
    dist.all_gather_object(done, dist.get_rank())
    if dist.get_rank() == 0:
        os.rename(partial, folder / f"step-{step}")
    dist.broadcast_object_list([None])


def shards_of_rank_0(folder, step, shard):
    rank, n = dist.get_rank(), dist.get_world_size()
    every = [None] * n
    dist.all_gather_object(every, pickle.dumps(shard))
    if rank == 0:
        partial = folder / f"{step}.partial"
        partial.mkdir()
        for other, one in enumerate(every):
            torch.save(pickle.loads(one), partial / f"rank-{other}.pt")
        partial.rename(folder / f"step-{step}")
    dist.barrier()


def resume_by_bytes(model, optimizer, schedule, generator):
    def capture(position):
        file = io.BytesIO()
        states = [model.state_dict(), optimizer.state_dict(), schedule.state_dict()]
        torch.save([*states, generator.get_state(), torch.random.get_rng_state(), position], file)
        return {"file": file.getvalue()}

    def restore(state):
        saved = torch.load(io.BytesIO(state["file"]), weights_only=True)
        for part, one in zip((model, optimizer, schedule), saved, strict=False):
            part.load_state_dict(one)
        generator.set_state(saved[3])
        torch.random.set_rng_state(saved[4])
        return saved[5]

    return capture, restore


def resume_in_parts(model, optimizer, schedule, generator):
    def capture(position):
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        rest = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
        return {"w": weights, "rest": rest, "g": (generator.get_state(), torch.get_rng_state()), "at": position}

    def restore(state):
        torch.set_rng_state(state["g"][1])
        generator.set_state(state["g"][0])
        model.load_state_dict(state["w"])
        optimizer.load_state_dict(state["rest"][0])
        schedule.load_state_dict(state["rest"][1])
        return state["at"]

    return capture, restore


class Resume:
    """The same as an object."""

    def __init__(self, *parts):
        self.parts = parts

    def capture(self, position):
        *parts, generator = self.parts
        states = [part.state_dict() for part in parts]
        return copy.deepcopy(
            {"states": states, "random": [generator.get_state(), torch.get_rng_state()], "at": position}
        )

    def restore(self, state):
        *parts, generator = self.parts
        for part, one in zip(parts, state["states"], strict=True):
            part.load_state_dict(one)
        generator.set_state(state["random"][0])
        torch.set_rng_state(state["random"][1])
        return state["at"]


def resume_as_methods(model, optimizer, schedule, generator):
    run = Resume(model, optimizer, schedule, generator)
    return run.capture, run.restore


def newest_in_a_function(folder):
    def wrong_in(path):
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            if manifest["step"] != int(path.name[5:]):
                return ["manifest.json"]
        except (FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError):
            return ["manifest.json"]
        return [name for name, digest in manifest["files"].items() if digest_of(path / name) != digest]

    def digest_of(path):
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None

    damaged = []
    paths = [path for path in folder.iterdir() if path.name[:5] == "step-" and path.name[5:].isdigit()]
    for path in sorted(paths, key=lambda path: -int(path.name[5:])):
        wrong = wrong_in(path)
        if not wrong:
            return path, damaged
        damaged.extend(f"{path.name}/{name}" for name in wrong)
    return None, damaged


def newest_with_os(folder):
    steps = sorted(int(name[5:]) for name in os.listdir(folder) if name.startswith("step-") and name[5:].isdecimal())
    damaged = ()
    while steps:
        name = f"step-{steps[-1]}"
        try:
            with open(os.path.join(folder, name, "manifest.json")) as file:
                facts = json.load(file)
            wrong = [] if facts["step"] == steps[-1] else [f"{name}/manifest.json"]
        except Exception:
            wrong, facts = [f"{name}/manifest.json"], {}
        for file, digest in facts.get("files", {}).items() if not wrong else ():
            try:
                with open(os.path.join(folder, name, file), "rb") as opened:
                    right = hashlib.file_digest(opened, "sha256").hexdigest() == digest
            except OSError:
                right = False
            wrong += [] if right else [f"{name}/{file}"]
        if not wrong:
            return folder / name, list(damaged)
        damaged += tuple(wrong)
        steps.pop()
    return None, list(damaged)


def newest_recursively(folder, below=math.inf):
    numbers = [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()]
    numbers = [number for number in numbers if number < below]
    if not numbers:
        return None, []
    path = folder / f"step-{max(numbers)}"
    try:
        facts = json.loads((path / "manifest.json").read_bytes())
        files = facts["files"] if facts["step"] == max(numbers) else None
    except (OSError, ValueError):
        files = None
    wrong = ["manifest.json"] if files is None else []
    for name in files or {}:
        data = (path / name).read_bytes() if (path / name).is_file() else b"?"
        wrong += [name] * (hashlib.sha256(data).hexdigest() != files[name])
    if not wrong:
        return path, []
    good, more = newest_recursively(folder, max(numbers))
    return good, [*(f"{path.name}/{name}" for name in wrong), *more]


def load_by_elements(shard, size, num_saved, rank, read):
    old = math.ceil(size / num_saved)
    places = [at for at in range(rank * len(shard), (rank + 1) * len(shard)) if at < size]
    for index, at in enumerate(places):
        shard[index : index + 1] = read(at // old, at % old, at % old + 1)
    shard[len(places) :] = 0


def load_by_a_walk(shard, size, num_saved, rank, read):
    old, at, filled = -(-size // num_saved), rank * len(shard), 0
    while filled < len(shard) and at < size:
        saved, start = divmod(at, old)
        count = min(old - start, len(shard) - filled, size - at)
        shard[filled : filled + count].copy_(read(saved, start, start + count))
        filled, at = filled + count, at + count
    shard[filled:].fill_(0)


def load_joined(shard, size, num_saved, rank, read):
    old = (size + num_saved - 1) // num_saved
    ranges = [
        (k, range(max(rank * len(shard), k * old), min((rank + 1) * len(shard), (k + 1) * old, size)))
        for k in range(num_saved)
    ]
    parts = [read(k, one.start - k * old, one.stop - k * old) for k, one in ranges if len(one)]
    row = torch.cat([*parts, torch.zeros_like(shard)])
    shard.copy_(row[: len(shard)])


def samples_dealt(rule, lr, position, end, rank, world_size):
    batch = rule.batch
    if rule.world_size:
        batch = batch * world_size // rule.world_size
        lr = lr * math.pow(world_size / rule.world_size, {"linear": 1, "sqrt": 0.5}[rule.lr])
    samples = list(range(position, min(position + batch, end)))
    own = samples[rank::world_size]
    return own, len(own) / len(samples) * world_size, lr


def samples_by_tensors(rule, lr, position, end, rank, world_size):
    batch = rule.batch_on(world_size)
    rate = rule.scaled_lr(lr, world_size)
    samples = torch.arange(position, min(position + batch, end))
    own = samples.tensor_split(world_size)[rank]
    return own, torch.tensor(len(own) * world_size / len(samples), dtype=torch.float64), rate


def samples_one_by_one(rule, lr, position, end, rank, world_size):
    per_rank = None if rule.world_size is None else rule.batch // rule.world_size
    batch = rule.batch if per_rank is None else per_rank * world_size
    rate = lr if per_rank is None else lr * (batch / rule.batch) ** (0.5 if rule.lr == "sqrt" else 1)
    taken = min(batch, end - position)
    counts = [taken // world_size + (1 if one < taken % world_size else 0) for one in range(world_size)]
    first = position + sum(counts[:rank])
    return tuple(range(first, first + counts[rank])), counts[rank] / (taken / world_size), rate


def share_by_loops(uptimes_s, interval_s, save_s, restart_s):
    kept = 0.0
    for uptime in uptimes_s:
        rounds = 0
        while restart_s + (rounds + 1) * (interval_s + save_s) <= uptime:
            rounds += 1
        kept += rounds * interval_s
    return kept / math.fsum(uptimes_s)


def share_in_one_line(uptimes_s, interval_s, save_s, restart_s):
    return (
        interval_s
        * sum(math.floor(max(up - restart_s, 0) / (interval_s + save_s)) for up in uptimes_s)
        / sum(uptimes_s)
    )


def share_by_tensors(uptimes_s, interval_s, save_s, restart_s):
    up = torch.tensor(uptimes_s, dtype=torch.float64)
    rounds = ((up - restart_s).clamp(min=0) / (interval_s + save_s)).floor()
    return float((rounds * interval_s).sum() / up.sum())


ANSWERS = {
    "12.save": [save_with_descriptors, save_by_torch, save_under_a_name_of_its_own],
    "12.shards": [shards_with_renames, shards_by_messages, shards_of_rank_0],
    "12.resume": [resume_by_bytes, resume_in_parts, resume_as_methods],
    "12.newest": [newest_in_a_function, newest_with_os, newest_recursively],
    "12.load": [load_by_elements, load_by_a_walk, load_joined],
    "12.samples": [samples_dealt, samples_by_tensors, samples_one_by_one],
    "12.share": [share_by_loops, share_in_one_line, share_by_tensors],
}
