"""What a large batch costs in accuracy, and what LARS and LAMB save of it: an experiment on digits and on a small GPT.

Batches from 32 to 1,437 (all digits there are), always the same number of epochs: 45 times the batch means 45 times
fewer updates. Each optimizer's rate is tuned at batch 32 on the same number of rates, half a decade apart, with a fifth
of the training data held out. Larger batches get that rate by a rule (linear, square root), with warmup and linear
decay; and once more a rate of their own, tuned at that batch, to tell a bad rule from a bad optimizer. Accuracy is of
test samples that no choice has seen; spread is over seeds of weights and order.

    python benchmarks/large_batch_digits.py --save lessons/04_large_batch/results.json    # all of it: one hour and more
    python benchmarks/large_batch_digits.py --task gpt --optimizer LAMB --save lessons/04_large_batch/results.json
    python benchmarks/large_batch_digits.py --task shallow --quick
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from _rows import Row
from torch import Tensor, nn

from distlab.blocks.data import ByteCorpus, digits, python_documentation
from distlab.blocks.models import GPT, GPTConfig
from distlab.large_batch import LAMB, LARS, LearningRateSchedule, linear_scaled_lr, sqrt_scaled_lr
from distlab.measure import this_machine
from distlab.rng import derive_seed, generator

BASE_BATCH, BATCHES = 32, (32, 128, 512, 1437)
TUNE_SEEDS, SEEDS = (100, 101), (0, 1, 2, 3, 4)  # the GPT, 50 times the work of a net on digits, takes fewer: task_of
WARMUP = 0.1  # of the updates
MOMENTUM, DECAY = 0.9, 1e-4
GPT_SAMPLES, GPT_TEST, GPT_CONTEXT = 4 * 1437, 512, 32

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "SGD": lambda ps, lr: torch.optim.SGD(ps, lr, momentum=MOMENTUM, weight_decay=DECAY),
    "AdamW": lambda ps, lr: torch.optim.AdamW(ps, lr, weight_decay=DECAY),
    "LARS": lambda ps, lr: LARS(ps, lr, momentum=MOMENTUM, weight_decay=DECAY),
    "LAMB": lambda ps, lr: LAMB(ps, lr, weight_decay=DECAY),
}
MIDDLE = {"SGD": 0.1, "AdamW": 3e-3, "LARS": 10.0, "LAMB": 0.03}
RULES: dict[str, Callable[[float, int, int], float]] = {"linear": linear_scaled_lr, "square root": sqrt_scaled_lr}


@dataclass(frozen=True)
class Task:
    """Data, a model and a loss.

    Attributes:
        name: of the task.
        train: inputs and targets.
        test: inputs and targets.
        epochs: passes over the training data.
        model: makes the model from a seed.
        loss_fn: mean loss of outputs and targets.
        batches: the base batch and larger ones.
        seeds: of weights and order.
        tune_seeds: for choosing a rate.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    epochs: int
    model: Callable[[torch.Generator], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    batches: tuple[int, ...] = BATCHES
    seeds: tuple[int, ...] = SEEDS
    tune_seeds: tuple[int, ...] = TUNE_SEEDS

    def with_a_fifth_held_out(self) -> Task:
        """Return the task on four fifths of the training data, tested on the rest: for tuning."""
        inputs, targets = self.train
        cut = len(inputs) * 4 // 5
        return replace(self, train=(inputs[:cut], targets[:cut]), test=(inputs[cut:], targets[cut:]))


def perceptron(widths: Sequence[int], draw: torch.Generator) -> nn.Module:
    """Return a multilayer perceptron without any normalisation, its weights drawn for ReLU (He et al. 2015)."""
    layers: list[nn.Module] = []
    for wide, narrow in zip(widths, widths[1:], strict=False):
        layer = nn.Linear(wide, narrow)
        with torch.no_grad():
            layer.weight.normal_(std=math.sqrt(2 / wide), generator=draw)
            layer.bias.zero_()
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@cache
def task_of(name: str) -> Task:
    """Return a task by its name."""
    if name == "gpt":
        corpus = ByteCorpus(python_documentation(), GPT_CONTEXT)
        config = GPTConfig(context=GPT_CONTEXT, num_layers=2, num_heads=4, hidden_size=64)
        inputs, targets = corpus.batch(0, GPT_SAMPLES + GPT_TEST)  # of one epoch, so no two windows overlap
        train, test = (inputs[:GPT_SAMPLES], targets[:GPT_SAMPLES]), (inputs[GPT_SAMPLES:], targets[GPT_SAMPLES:])
        few = {"batches": (32, 512, 1437), "seeds": SEEDS[:3], "tune_seeds": TUNE_SEEDS[:1]}
        return Task(name, train, test, 5, lambda draw: GPT(config, draw), GPT.loss, **few)
    data = digits()
    widths = {"shallow": (64, 128, 10), "deep": (64, *[64] * 10, 10)}[name]
    train, test = (data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)
    return Task(name, train, test, 20, lambda draw: perceptron(widths, draw), nn.functional.cross_entropy)


TASKS = ("shallow", "deep", "gpt")


@dataclass(frozen=True)
class Run:
    """One training run, and what came of it."""

    task: str
    optimizer: str
    rule: str
    batch: int
    lr: float
    seed: int
    warmup: bool = True
    tuning: bool = False
    loss: float = math.nan
    accuracy: float = math.nan

    @property
    def score(self) -> float:
        """Loss, for comparing; a run that broke is worse than any."""
        return self.loss if math.isfinite(self.loss) else math.inf


def train(run: Run) -> Run:
    """Train, and return the run with its test loss and accuracy."""
    torch.set_num_threads(1)
    task = task_of(run.task)
    if run.tuning:
        task = task.with_a_fifth_held_out()
    inputs, targets = task.train
    batch = min(run.batch, len(inputs))
    per_epoch = -(-len(inputs) // batch)
    num_steps = task.epochs * per_epoch
    schedule = LearningRateSchedule(
        run.lr, num_steps, num_warmup=round(WARMUP * num_steps) if run.warmup else 0, decay="linear"
    )
    model = task.model(generator(run.seed, 0, "weights"))
    optimizer = OPTIMIZERS[run.optimizer](model.parameters(), run.lr)
    for step in range(num_steps):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            shuffle = torch.Generator().manual_seed(derive_seed(run.seed, 0, f"order {epoch}"))
            order = torch.randperm(len(inputs), generator=shuffle)
        chosen = order[place * batch : (place + 1) * batch]
        schedule.set(optimizer, step)
        optimizer.zero_grad()
        task.loss_fn(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return replace(run, **_tested(model, task))


@torch.no_grad()
def _tested(model: nn.Module, task: Task) -> dict[str, float]:
    outputs = model(task.test[0])
    right = (outputs.argmax(-1) == task.test[1]).double().mean()
    return {"loss": float(task.loss_fn(outputs, task.test[1])), "accuracy": float(right)}


def tuned(task: str, optimizer: str, batch: int) -> tuple[float, list[Run]]:
    """Return the best of five rates half a decade apart, and of more while the best is at an end."""
    tried: dict[int, list[Run]] = {}
    seeds = task_of(task).tune_seeds
    wanted = list(range(-2, 3))
    while wanted:
        runs = [
            Run(task, optimizer, "tuning", batch, MIDDLE[optimizer] * 10 ** (place / 2), seed, tuning=True)
            for place in wanted
            for seed in seeds
        ]
        done = [train(run) for run in runs]
        for index, place in enumerate(wanted):
            tried[place] = done[index * len(seeds) : (index + 1) * len(seeds)]
        best = min(tried, key=lambda place: fmean(run.score for run in tried[place]))
        wanted = [place for place in (best - 1, best + 1) if place not in tried and abs(place) < 10]
    return MIDDLE[optimizer] * 10 ** (best / 2), [run for place in sorted(tried) for run in tried[place]]


def experiment(task: str, optimizer: str, *, quick: bool = False) -> list[Run]:
    """Tune an optimizer at the base batch, scale its rate by each rule, and tune it again at the largest batch."""
    seeds, batches = task_of(task).seeds, task_of(task).batches
    largest = batches[-1]
    base, tries = tuned(task, optimizer, BASE_BATCH)
    own, more = tuned(task, optimizer, largest)
    larger = (largest,) if quick else batches[1:]
    plan = [("base", BASE_BATCH, base, True), ("base", BASE_BATCH, base, False), ("own rate", largest, own, True)]
    plan += [(rule, batch, scale(base, batch, BASE_BATCH), True) for rule, scale in RULES.items() for batch in larger]
    plan.append(("linear", largest, linear_scaled_lr(base, largest, BASE_BATCH), False))
    seeds = seeds[:2] if quick else seeds
    runs = [Run(task, optimizer, rule, batch, lr, seed, warm) for rule, batch, lr, warm in plan for seed in seeds]
    return [*tries, *more, *(train(run) for run in runs)]


def cells(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return one plain record for the runs that differ in nothing but the seed."""
    found: dict[Run, list[Run]] = {}
    for run in runs:
        found.setdefault(replace(run, seed=0, loss=0.0, accuracy=0.0), []).append(run)
    return [
        {"task": key.task, "optimizer": key.optimizer, "rule": key.rule, "batch": key.batch, "lr": key.lr}
        | {"warmup": key.warmup, "losses": [r.loss for r in same], "accuracies": [r.accuracy for r in same]}
        for key, same in found.items()
    ]


def save(path: Path, task: str, optimizer: str, records: list[dict[str, Any]]) -> None:
    """Write one optimizer's records of a task into a results file, with what they were measured on."""
    kept = json.loads(path.read_text()) if path.exists() else {"tasks": {}}
    kept["protocol"] = {"base_batch": BASE_BATCH, "batches": BATCHES, "warmup": WARMUP, "decay": "linear"}
    kept["protocol"] |= {"momentum": MOMENTUM, "weight_decay": DECAY, "seeds": len(SEEDS), "torch": torch.__version__}
    before = kept["tasks"].get(task, {"records": []})["records"]
    others = [record for record in before if record["optimizer"] != optimizer]
    order = list(OPTIMIZERS)
    every = sorted(others + records, key=lambda record: order.index(record["optimizer"]))
    machine = this_machine().as_dict()
    kept["tasks"][task] = {"date": datetime.now(UTC).date().isoformat(), "machine": machine, "records": every}
    kept["tasks"][task] |= {"epochs": task_of(task).epochs, "seeds": len(task_of(task).seeds)}
    path.write_text(json.dumps(kept, indent=1).replace("NaN", "null").replace("Infinity", "null") + "\n")


def rows(quick: bool = False) -> Iterator[Row]:
    """Yield what the largest batch costs each optimizer on the deep net, in points of accuracy; no bars."""
    chosen = ("SGD", "LAMB") if quick else OPTIMIZERS
    records = [record for name in chosen for record in cells(experiment("deep", name, quick=quick))]
    base = {r["optimizer"]: r for r in records if r["rule"] == "base" and r["warmup"]}
    for record in records:
        if record["batch"] != BATCHES[-1] or record["rule"] == "tuning":
            continue
        losses = [
            100 * (fmean(base[record["optimizer"]]["accuracies"]) - accuracy) for accuracy in record["accuracies"]
        ]
        how = f"{record['rule']}{'' if record['warmup'] else ', no warmup'}"
        claim = f"{record['optimizer']}, {how}: points of accuracy lost from batch {BASE_BATCH} to {BATCHES[-1]}"
        yield Row(claim, fmean(losses), None, None, (min(losses), max(losses)), "points", "-", None, "deep net, digits")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, action="append", help="one task, or several; all when left out")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, action="append", help="one, or several; all when left out")
    parser.add_argument("--quick", action="store_true", help="one larger batch, two seeds: shows that it runs")
    parser.add_argument("--save", type=Path, metavar="FILE", help="each optimizer is saved as soon as it is done")
    arguments = parser.parse_args()
    for task in arguments.task or TASKS:
        for optimizer in arguments.optimizer or OPTIMIZERS:
            records = cells(experiment(task, optimizer, quick=arguments.quick))
            for record in records:
                tell(record)
            if arguments.save:
                save(arguments.save, task, optimizer, records)


def tell(record: dict[str, Any]) -> None:
    """Print a record in a line."""
    accuracies, losses = record["accuracies"], record["losses"]
    print(
        f"{record['task']:8} {record['optimizer']:6} {record['rule']:12} {'' if record['warmup'] else 'no warmup':10}"
        f"{record['batch']:5} lr {record['lr']:9.4g}  accuracy {fmean(accuracies):6.1%} "
        f"({min(accuracies):.1%} to {max(accuracies):.1%})  loss {fmean(losses):.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
