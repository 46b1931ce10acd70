"""Kill training runs, and kill them while they save: does every run go on, and end with the same bits?

Two promises, each with a count of failures that must be 0: a run killed by SIGKILL at random moments and resumed ends
bitwise equal to the uninterrupted one, whichever way its gradients are averaged; and after a kill while saving the
newest checkpoint is whole and no older than the last that a rank knew to be saved. Moments come from a fixed seed;
where in the code they fall differs each time.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _blocks import by_value
from _rows import Row, absolute
from _script import run_script

from distlab.blocks.data import ByteCorpus, python_documentation
from distlab.blocks.gradient_hook import GradientHook
from distlab.blocks.models import GPT, GPTConfig
from distlab.checkpoint import load, newest, save
from distlab.checkpoint.parts import own_state, shared_state
from distlab.comm import RankError, Ranks
from distlab.compression import make_hook
from distlab.data_parallel import DataParallel, average_flat, broadcast_parameters, train_step
from distlab.hybrid import Hybrid
from distlab.pipeline import Pipeline, StageState, find_tied, split_gpt
from distlab.plan import Plan, one_f_one_b
from distlab.plan.compression import Compression
from distlab.rng import generator, seed_rank
from distlab.sharding import FullyShard, ShardedOptimizer, ShardedState

CONFIG = GPTConfig(context=16, num_layers=2, num_heads=2, hidden_size=32, dropout=0.2)
NUM_STEPS = 60
KILLS_A_RUN = 10
WAYS = {
    "manual": "averaged by one all-reduce after backward",
    "bucketed": "averaged by DataParallel",
    "top-k": "compressed by top-k with error memory",
    "fsdp": "reduced to shards by FullyShard, which each rank saves for itself",
    "zero-2": "reduced to shards by ShardedOptimizer, stage 2",
    "pipeline": "of a pipeline's stages, which each rank saves for itself",
    "tensor": "of layers cut over the ranks, which each rank saves for itself",
}


class Way(NamedTuple):
    """What a way of training is made of: a step, given its number, the end of it all, and what is saved."""

    step: Callable[[int], Any]
    close: Callable[[], None]
    parts: dict[str, Any]


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def prepare(way: str, module: GPT) -> Way:
    """Shard, replicate or split a module, and give it an optimizer."""
    if way == "pipeline":
        return split()
    if way == "tensor":
        return cut(module)
    model: Any = module
    close: Callable[[], None] = _nothing
    if way == "fsdp":
        model = FullyShard(module)
        optimizer: Any = adamw(model.parameters())
        synchronize, close, parts = model.synchronize, model.close, {"both": ShardedState(model, optimizer)}
    elif way == "zero-2":
        optimizer = ShardedOptimizer(module, adamw, stage=2, bucket_bytes=40_000)
        synchronize, close, parts = optimizer.synchronize, optimizer.close, {"model": module, "optimizer": optimizer}
    else:
        synchronize, hook = replicate(way, module)
        optimizer = adamw(module.parameters())
        parts = {"model": module, "optimizer": optimizer} | ({"hook": hook} if hook else {})
    corpus = ByteCorpus(python_documentation(), CONFIG.context)

    def step(number: int) -> None:
        batch = corpus.batch(number, 6, rank=dist.get_rank(), world_size=dist.get_world_size())
        train_step(model, optimizer, batch=batch, loss_fn=GPT.loss, synchronize=synchronize)

    return Way(step, close, parts)


def _nothing() -> None:
    """End a way of training that leaves nothing to end."""


def split() -> Way:
    """Make a pipeline by 1F1B of the same model on every rank; embedding and output layer share a weight."""
    schedule = one_f_one_b(dist.get_world_size(), 3)
    stages = split_gpt(GPT(CONFIG, generator(0, 0, "weights")), schedule.num_stages)
    own = {dist.get_rank(): stages[dist.get_rank()]}
    pipeline = Pipeline(own, schedule, loss=GPT.loss, tied=find_tied(stages))
    optimizer = adamw(pipeline.parameters())
    corpus = ByteCorpus(python_documentation(), CONFIG.context)

    def step(number: int) -> None:
        pipeline.zero_grad()
        pipeline.step(*corpus.batch(number, 6))
        optimizer.step()

    return Way(step, pipeline.close, {"both": StageState(own, optimizer)})


def cut(module: GPT) -> Way:
    """Cut each layer of the model over all ranks."""
    hybrid = Hybrid(module, Plan(tensor=dist.get_world_size()), adamw)
    corpus = ByteCorpus(python_documentation(), CONFIG.context)
    return Way(lambda number: hybrid.train_step(*corpus.batch(number, 6)), hybrid.close, {"both": hybrid})


def kill_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def replicate(way: str, model: GPT) -> tuple[Callable[[], None], GradientHook | None]:
    """Return what averages the model's gradients, and the hook, if there is one."""
    if way == "manual":
        broadcast_parameters(model)
        return (lambda: average_flat(model.parameters())), None
    hook = make_hook(Compression("top_k", ratio=0.1)) if way == "top-k" else None
    replicas = DataParallel(model, bucket_bytes=40_000, first_bucket_bytes=4_000, hook=hook)
    return replicas.synchronize, hook


def train(directory: Path, victim: int | None, delay_s: float, way: str) -> tuple[str, float]:
    """Run on each rank: resume, train to the end; return a digest of all that has a state, and the seconds it took."""
    begin = time.monotonic()
    rank = dist.get_rank()
    seed_rank(0, 0 if way == "tensor" else rank)  # ranks that share a layer drop the same elements
    made = prepare(way, GPT(CONFIG, generator(0, rank, "weights")))
    parts = made.parts
    if rank == victim:
        kill_after(delay_s)
    resumed = load(directory, parts=parts)
    for step in range(resumed.step if resumed else 0, NUM_STEPS):
        made.step(step)
        if step % 3 == 0:
            save(directory, step + 1, parts=parts, data_position=step + 1)
    state = [shared_state(parts), own_state(parts)["hooks"], own_state(parts)["shards"], torch.rand(2)]
    made.close()
    bits = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors_in(state))
    return hashlib.sha256(bits).hexdigest(), time.monotonic() - begin


def tensors_in(state: object) -> Iterator[torch.Tensor]:
    """Yield every tensor of nested lists and dictionaries."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for item in state.values():
            yield from tensors_in(item)
    elif isinstance(state, list | tuple):
        for item in state:
            yield from tensors_in(item)


def count_wrong_endings(num_kills: int, world_size: int, way: str) -> tuple[int, int, int]:
    """Kill training at random moments; return runs that ended otherwise than the uninterrupted one, runs, kills."""
    chance = random.Random(1)
    num_wrong = num_runs = killed = 0
    with Ranks(world_size, timeout_s=120, echo=False) as ranks, tempfile.TemporaryDirectory() as folder:
        ranks.run(train, Path(folder, "warm"), None, 0.0, way)
        uninterrupted = ranks.run(train, Path(folder, "uninterrupted"), None, 0.0, way)
        expected, longest_s = [digest for digest, _ in uninterrupted], uninterrupted[0][1]
        while killed < num_kills:
            num_runs += 1
            final, kills_here = None, 0
            while final is None:
                victim = chance.randrange(world_size) if kills_here < KILLS_A_RUN and killed < num_kills else None
                try:
                    delay_s = chance.uniform(0, longest_s)
                    final = ranks.run(train, Path(folder, str(num_runs)), victim, delay_s, way)
                except RankError as error:
                    require_kill(error)
                    killed += 1
                    kills_here += 1
            num_wrong += [digest for digest, _ in final] != expected
    return num_wrong, num_runs, killed


def save_for_ever(directory: Path, victim: int, delay_s: float) -> None:
    """Run on each rank: save step after step; a rank notes each step that it knows to be saved."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(200, 200)
    found = load(directory, parts={"model": model})
    step = found.step if found else 0
    if found:
        assert bool((model.weight == step).all()), f"the weights of step {step} hold {model.weight[0, 0].item()}"
    if rank == victim:
        kill_after(delay_s)
    while True:
        step += 1
        torch.nn.init.constant_(model.weight, step)
        save(directory, step, parts={"model": model}, keep=2)
        (directory / f"known-{rank}").write_text(str(step))


def count_lost_checkpoints(num_kills: int, world_size: int) -> int:
    """Kill a rank while it saves, again and again in one directory; return kills after which something was lost."""
    chance = random.Random(2)
    num_lost = 0
    with Ranks(world_size, timeout_s=60, echo=False) as ranks, tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        for _ in range(num_kills):
            try:
                ranks.run(save_for_ever, directory, chance.randrange(world_size), chance.uniform(0, 0.05))
            except RankError as error:
                require_kill(error)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                try:
                    found = newest(directory)
                except (RuntimeError, ValueError, UserWarning):
                    num_lost += 1
                    continue
            known = [int(path.read_text() or 0) for path in directory.glob("known-*")]
            num_lost += max(known, default=0) > (found.step if found else 0)
    return num_lost


def require_kill(error: RankError) -> None:
    """Let a kill pass; anything else that stops a run is a failure of its own."""
    if "SIGKILL" not in str(error):
        raise error


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield one row a promise."""
    by_value(__name__)
    for way, what in WAYS.items():
        wrong, num_runs, kills = count_wrong_endings(4 if quick else 100, 2, way)
        claim = (
            f"gradients {what}: runs not bitwise equal to the uninterrupted one, after {kills} SIGKILLs in {num_runs} "
            "runs on 2 ranks"
        )
        yield absolute(claim, [wrong], bar=0, unit="runs")
    for world_size in (1, 4):
        kills = 4 if quick else 100
        lost = count_lost_checkpoints(kills, world_size)
        claim = f"kills while saving after which the newest checkpoint was lost, of {kills}, {world_size} ranks"
        yield absolute(claim, [lost], bar=0, unit="kills")


if __name__ == "__main__":
    run_script(__doc__, rows)
