"""Right answers to lesson 12, written in other ways than the reference."""

import copy
import functools
import hashlib
import io
import json
import math
import operator
import os
import shutil
import tempfile

import torch
import torch.distributed as dist


def save_with_descriptors(folder, step, state):
    torch.save(state, buffer := io.BytesIO())
    descriptor = os.open(folder / "saving", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, buffer.getvalue())
    os.fsync(descriptor)
    os.close(descriptor)
    os.rename(folder / "saving", folder / f"step-{step}.pt")
    os.fsync(os.open(folder, os.O_RDONLY))


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


def shards_with_sums(folder, step, shard):
    rank, partial = dist.get_rank(), folder / "saving"
    if rank == 0:
        os.makedirs(partial)
    dist.all_reduce(torch.zeros(1))
    with open(partial / f"rank-{rank}.pt", "wb") as file:
        torch.save(shard, file)
    dist.all_reduce(torch.zeros(1))
    if rank == 0:
        os.replace(partial, folder / f"step-{step}")
    dist.barrier()


def shards_by_messages(folder, step, shard):
    partial = folder / f".step-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    dist.broadcast_object_list([None])
    torch.save(shard, os.path.join(partial, f"rank-{dist.get_rank()}.pt"))
    dist.all_gather_object([None] * dist.get_world_size(), "written")
    if dist.get_rank() == 0:
        os.rename(partial, folder / f"step-{step}")
    dist.broadcast_object_list([None])


def shards_of_rank_0(folder, step, shard):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, shard)
    if dist.get_rank() == 0:
        partial = folder / f"{step}.partial"
        partial.mkdir()
        for other, one in enumerate(every):
            torch.save(one, partial / f"rank-{other}.pt")
        partial.rename(folder / f"step-{step}")
    dist.barrier()


def resume_by_bytes(model, optimizer, schedule, generator):
    parts = model, optimizer, schedule

    def capture(position):
        states = [part.state_dict() for part in parts]
        torch.save([*states, generator.get_state(), torch.random.get_rng_state(), position], file := io.BytesIO())
        return {"file": file.getvalue()}

    def restore(state):
        saved = torch.load(io.BytesIO(state["file"]), weights_only=True)
        for part, one in zip(parts, saved, strict=False):
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


def newest_in_functions(folder):
    def wrong_in(path):
        try:
            manifest = json.loads((path / "manifest.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            manifest = {"step": None}
        if manifest["step"] != int(path.name[5:]):
            return ["manifest.json"]
        data = {name: (path / name).read_bytes() if (path / name).exists() else b"" for name in manifest["files"]}
        return [name for name, sha in manifest["files"].items() if hashlib.sha256(data[name]).hexdigest() != sha]

    damaged, numbers = [], [path.name[5:] for path in folder.glob("step-*")]
    for number in sorted(map(int, filter(str.isdigit, numbers)), reverse=True):
        wrong = wrong_in(path := folder / f"step-{number}")
        if not wrong:
            return path, damaged
        damaged += [f"{path.name}/{name}" for name in wrong]
    return None, damaged


def newest_recursively(folder, below=math.inf):
    numbers = [int(path.name[5:]) for path in folder.glob("step-*") if path.name[5:].isdigit()]
    newest = max((number for number in numbers if number < below), default=None)
    if newest is None:
        return None, []
    path = folder / f"step-{newest}"
    try:
        facts = json.loads((path / "manifest.json").read_bytes())
        files = facts["files"] if facts["step"] == newest else None
    except (OSError, ValueError):
        files = None
    wrong = ["manifest.json"] if files is None else []
    for name in files or {}:
        data = (path / name).read_bytes() if (path / name).is_file() else b"?"
        wrong += [name] * (hashlib.sha256(data).hexdigest() != files[name])
    if not wrong:
        return path, []
    good, more = newest_recursively(folder, newest)
    return good, [*(f"{path.name}/{name}" for name in wrong), *more]


def load_by_elements(shard, size, num_saved, rank, read):
    old, first = math.ceil(size / num_saved), rank * len(shard)
    shard[:] = 0
    for at in range(first, min(first + len(shard), size)):
        shard[at - first] = read(at // old, at % old, at % old + 1)[0]


def load_by_a_walk(shard, size, num_saved, rank, read):
    old, at, filled = -(-size // num_saved), rank * len(shard), 0
    while filled < len(shard) and at < size:
        saved, start = divmod(at, old)
        count = min(old - start, len(shard) - filled, size - at)
        shard[filled : filled + count].copy_(read(saved, start, start + count))
        filled, at = filled + count, at + count
    shard[filled:].fill_(0)


def load_joined(shard, size, num_saved, rank, read):
    old, low = (size + num_saved - 1) // num_saved, rank * len(shard)
    ranges = [range(max(low, k * old), min(low + len(shard), (k + 1) * old, size)) for k in range(num_saved)]
    parts = [read(k, one.start - k * old, one.stop - k * old) for k, one in enumerate(ranges) if len(one)]
    shard.copy_(torch.cat([*parts, torch.zeros_like(shard)])[: len(shard)])


def share_in_one_line(uptimes_s, interval_s, save_s, restart_s):
    rounds = sum(math.floor(max(up - restart_s, 0) / (interval_s + save_s)) for up in uptimes_s)
    return interval_s * rounds / sum(uptimes_s)


def share_by_tensors(uptimes_s, interval_s, save_s, restart_s):
    up = torch.tensor(uptimes_s, dtype=torch.float64)
    return float((((up - restart_s).clamp(min=0) / (interval_s + save_s)).floor() * interval_s).sum() / up.sum())


def share_by_divmod(uptimes_s, interval_s, save_s, restart_s):
    saved = [divmod(max(0.0, uptime - restart_s), interval_s + save_s)[0] for uptime in uptimes_s]
    return functools.reduce(operator.add, saved) * interval_s / math.fsum(uptimes_s)


def quorum_by_tables(arrived, alive, last, min_replicas):
    here = {number: arrived[number] for number in sorted(set(arrived) & set(alive))}
    if not set(last.members) & set(alive) <= set(here):
        return None
    newest = dict(filter(lambda pair: pair[1].line == last.epoch, here.items()))
    if newest == {}:
        return None
    ahead = max(newest.values(), key=lambda one: (one.step, len(one.deal)))
    members = list(newest if ahead.deal and len(newest) >= min_replicas else here)
    return None if min_replicas > len(members) else (members, [one for one in members if one not in newest], ahead.step)


def quorum_by_sets(arrived, alive, last, min_replicas):
    living, waited_for = alive & arrived.keys(), alive & {*last.members}
    if waited_for - living:
        return None
    holders = {number for number in living if arrived[number].line >= last.epoch}
    if len(holders) < 1:
        return None
    steps = [arrived[number].step for number in holders]
    inside = [arrived[number].step for number in holders if len(arrived[number].deal)]
    is_alone = max(inside, default=-1) == max(steps) and len(holders) >= min_replicas
    members = holders if is_alone else living
    return (sorted(members), sorted(members - holders), max(steps)) if len(members) >= min_replicas else None


def quorum_in_a_loop(arrived, alive, last, min_replicas):
    for number in last.members:
        if number in alive and arrived.get(number) is None:
            return None
    holders, others, step, inside = [], [], 0, False
    for number, (line, made, deal, _) in sorted(arrived.items()):
        if number not in alive:
            continue
        if line != last.epoch:
            others.append(number)
            continue
        holders.append(number)
        inside = bool(deal) if made > step else inside or (made == step and bool(deal))
        step = max(step, made)
    takers = [] if inside and len(holders) >= min_replicas else others
    if not holders or len(holders) + len(takers) < min_replicas:
        return None
    return tuple(sorted(holders + takers)), takers, step
