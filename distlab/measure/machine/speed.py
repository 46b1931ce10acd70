"""Fit this machine: how fast its ranks compute and communicate when all of them do so at once; keep it in a file.

A round takes about a second. Every rank runs the same small transformers forward, backward and through an optimizer,
then all-reduces of growing size, then both together. A round is fitted to a Cluster of few numbers, each with a
physical meaning: seconds per kernel, floating-point operations per second, bytes per second in memory, latency and
bandwidth of an all-reduce, and how much computing and communicating slow each other down. The transformers have other
sizes and batches than the model to be predicted.

A rank's speed is measured with all ranks at work, since four ranks on two cores each get half a core.

`calibrate` starts ranks for some rounds; what it returns is a Cluster that the simulator takes like any preset.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import numpy as np
import torch
import torch.distributed as dist

from distlab.blocks.models import GPT, GPTConfig
from distlab.comm import Nodes, node_groups, run
from distlab.comm.command import runnable
from distlab.comm.device import nccl_version, total_bytes
from distlab.measure.count.module import count_layers
from distlab.measure.machine import ranks as on_ranks
from distlab.measure.machine.facts import memory_bytes, this_machine
from distlab.measure.machine.fit import fit_nonnegative, median_of
from distlab.measure.machine.rates import best_gpu
from distlab.plan import Cluster, Contention, Device, Link, Protocol, Work
from simulator import compute_s, fit_link

MESSAGE_BYTES = (4_096, 65_536, 524_288, 2_097_152, 8_388_608)
LEAST_SIZES = 3  # of MESSAGE_BYTES: latency and bandwidth come from two, and one more tells how well they fit
REPEATS = 3  # of each reference model's step in a round
SOURCE = "fitted by distlab calibrate"
MIN_ROUNDS = 3
THIS_MACHINE = "this machine"
DEFAULT_PATH = Path.home() / ".cache" / "distlab" / "calibration.json"
FEW, MANY = 3, 32  # all-reduces of a size; where ranks share cores, a short one takes 2 ms or 12 ms: a matter of turns


@dataclass(frozen=True)
class Reference:
    """A small model to be timed: its sizes, and how many samples a step takes."""

    hidden_size: int
    num_layers: int
    context: int
    samples: int

    @property
    def phases(self) -> tuple[str, str, str]:
        """Names of what is timed: forward, backward, update."""
        name = f"hidden {self.hidden_size} x {self.num_layers}"
        return f"{name} F", f"{name} B", f"{name} optimizer"

    def build(self, device: torch.device) -> tuple[GPT, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
        """Return a model, its optimizer, and a function that runs it forward on fixed tokens to a loss."""
        config = GPTConfig(num_layers=self.num_layers, hidden_size=self.hidden_size, context=self.context)
        generator = torch.Generator().manual_seed(0)
        model = GPT(config, generator).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        tokens = torch.randint(config.vocab_size, (self.samples, self.context), generator=generator).to(device)
        return model, optimizer, lambda: model.loss(model(tokens), tokens)


REFERENCES = (Reference(32, 2, 32, 2), Reference(64, 3, 96, 2), Reference(96, 2, 64, 8), Reference(256, 2, 64, 3))


@dataclass(frozen=True)
class Observation:
    """Some work and the seconds that it took on one rank while all ranks did the same."""

    what: str
    work: Work
    seconds: float


@dataclass(frozen=True)
class Round:
    """What the ranks observed in a round, as a mean over ranks: the same values on every rank.

    Attributes:
        observations: compute, by reference model and phase.
        all_reduce_s: seconds of one all-reduce, for the first of MESSAGE_BYTES; where there are nodes, inside a node.
        contention: slow-downs of computing and communicating at the same time.
        between_s: likewise between the ranks of one place in all nodes; () where there is one node.
    """

    observations: tuple[Observation, ...]
    all_reduce_s: tuple[float, ...]
    contention: Contention
    between_s: tuple[float, ...] = ()


def measure_round(
    device: torch.device,
    *,
    works: dict[str, Work] | None = None,
    nodes: Mapping[str, dist.ProcessGroup] | None = None,
    largest_bytes: int = MESSAGE_BYTES[-1],
) -> Round:
    """Take one round of measurements. Every rank calls it at the same time.

    Args:
        device: where the rank computes.
        works: counts of an earlier round, to save counting again; filled in by the first.
        nodes: this rank's `node_groups`, where the link inside nodes and the one between them are to be told apart.
        largest_bytes: the largest message to be predicted; messages up to the next of MESSAGE_BYTES are timed.
    """
    works = {} if works is None else works
    if not works:
        works |= on_ranks.on_first_rank(lambda: _count_references(device))
    starter = on_ranks.Starter(device)
    observations = [row for reference in REFERENCES for row in _time_reference(reference, starter, works)]
    groups = [None] if nodes is None else [nodes["local"], nodes["node"]]
    sizes = MESSAGE_BYTES[: max(LEAST_SIZES, 1 + sum(size < largest_bytes for size in MESSAGE_BYTES))]
    times = [_time_all_reduce(size, device, group) for group in groups for size in sizes]
    speeds = _time_contention(device)
    means = on_ranks.mean_over_ranks([*(row.seconds for row in observations), *times, *speeds], device)
    observations = [replace(row, seconds=mean) for row, mean in zip(observations, means, strict=False)]
    contention = Contention(max(1.0, 1 / means[-2]), max(1.0, 1 / means[-1]))
    found = tuple(means[len(observations) : -2])
    return Round(tuple(observations), found[: len(sizes)], contention, found[len(sizes) :])


def median_round(rounds: Sequence[Round]) -> Round:
    """Combine rounds taken one after the other into one."""
    return cast(Round, median_of(rounds))


def fit_cluster(measured: Round, num_ranks: int, *, memory_bytes: float = 1e9, num_nodes: int = 1) -> Cluster:
    """Fit a round to a cluster of num_ranks equal devices: on one link, or on one inside nodes and one between them."""
    kernel_s, flops_per_s, bytes_per_s = fit_device(measured.observations)
    device = Device(f"a rank of {THIS_MACHINE}", flops_per_s, bytes_per_s, memory_bytes, kernel_s, SOURCE)
    each = num_ranks // num_nodes

    def ring(seconds: Sequence[float], ranks: int, name: str) -> Link:
        if ranks == 1:  # nothing travels
            return Link("none", (Protocol(0.0, 1e18),))
        return fit_link(MESSAGE_BYTES[: len(seconds)], seconds, ranks, "ring", name=name, source=SOURCE)

    link = ring(measured.all_reduce_s, each, "between ranks")
    between = ring(measured.between_s, num_nodes, "between nodes") if num_nodes > 1 else link
    return Cluster(THIS_MACHINE, device, num_ranks, each, link if each > 1 else between, between, measured.contention)


def fit_device(observations: Sequence[Observation]) -> tuple[float, float, float]:
    """Fit seconds = kernels x kernel_s + flops / flops_per_s + bytes / bytes_per_s, none negative.

    Minimises the relative error.

    Returns:
        kernel_s, flops_per_s, bytes_per_s.
    """
    works = [(o.work.num_kernels, o.work.matmul_flops, o.work.memory_bytes) for o in observations]
    seconds = np.array([o.seconds for o in observations])
    found = fit_nonnegative(np.array(works, dtype=float) / seconds[:, None], np.ones(len(seconds)))
    if not found.any():
        raise RuntimeError(
            "calibration: the measured times fit no positive speed; run it again with nothing else running"
        )
    kernel_s, s_per_flop, s_per_byte = found.tolist()
    limit = 1e18  # a term that fits as zero costs nothing
    return kernel_s, min(1 / s_per_flop, limit) if s_per_flop else limit, 1 / s_per_byte if s_per_byte else limit


def _count_references(device: torch.device) -> dict[str, Work]:
    works: dict[str, Work] = {}
    for reference in REFERENCES:
        model, optimizer, loss = reference.build(device)
        counted, _ = count_layers(model, loss, optimizer=optimizer)
        forward = sum((layer.forward for layer in counted.layers), Work())
        backward = sum((layer.input_gradient + layer.weight_gradient for layer in counted.layers), Work())
        works |= dict(zip(reference.phases, (forward, backward, counted.optimizer), strict=True))
    return works


def _time_reference(reference: Reference, starter: on_ranks.Starter, works: dict[str, Work]) -> list[Observation]:
    """Time forward, backward and update of one reference on this rank: take the mean over ranks of what this returns.

    A rank's wait for a core is part of each phase. And a synchronous step ends when the slowest rank ends, so each
    rank's phases are multiplied until they add up to the slowest rank's time.
    """
    device = starter.device
    _, optimizer, loss = reference.build(device)
    rows = []
    for _ in range(REPEATS + 1):
        optimizer.zero_grad(set_to_none=False)
        begin, moments = starter.begin(), [on_ranks.now(device)]
        value = loss()
        moments.append(on_ranks.now(device))
        value.backward()
        moments.append(on_ranks.now(device))
        optimizer.step()
        moments.append(on_ranks.now(device))
        rows.append(np.diff(moments) * (moments[-1] - begin) / (moments[-1] - moments[0]))
    phases_s = np.array(rows[1:])  # [repeats, phases]; the first warms up
    own = phases_s.sum(axis=1)
    slowest = np.array(on_ranks.largest_over_ranks(own.tolist(), device))
    found = np.median(phases_s * (slowest / own)[:, None], axis=0).tolist()
    return [Observation(key, works[key], seconds) for key, seconds in zip(reference.phases, found, strict=True)]


def _time_all_reduce(num_bytes: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    tensor = torch.zeros(num_bytes // 4, device=device)
    cores = on_ranks.shared_cores(device)
    crowd = 1 if cores is None else max(1, dist.get_world_size() // (4 * cores))  # 64 ranks on two cores: 8
    repeats = max(1, max(FEW, min(MANY, 16_000_000 // num_bytes)) // crowd)
    return on_ranks.time_calls(lambda: dist.all_reduce(tensor, group=group), repeats, device)


def _time_contention(device: torch.device) -> tuple[float, float]:
    """Compute and all-reduce at the same time; return the speed of each, relative to its speed alone."""
    _, _, loss = REFERENCES[2].build(device)
    tensor = torch.zeros(262_144, device=device)  # 1 MiB

    @torch.enable_grad()  # `time_calls` switches gradients off
    def compute() -> None:
        for _ in range(3):
            loss().backward()

    def communicate(count: int) -> list[dist.Work]:
        return [dist.all_reduce(tensor, async_op=True) for _ in range(count)]

    compute_s = on_ranks.time_calls(compute, 1, device)
    one_s = on_ranks.time_calls(lambda: [work.wait() for work in communicate(4)], 1, device) / 4
    (agreed,) = on_ranks.largest_over_ranks([max(4, min(200, round(1.5 * compute_s / one_s)))], device)
    count = int(agreed)
    dist.barrier()
    start = on_ranks.now(device)
    works = communicate(count)
    compute()
    computed_s = on_ranks.now(device) - start
    for work in works:
        work.wait()
    both_s = on_ranks.now(device) - start
    left_s = both_s - computed_s  # communication that went on after computing had ended
    done_s = count * one_s - left_s  # what it had done by then, in seconds of its speed alone
    return compute_s / computed_s, min(1.0, max(done_s / computed_s, 0.05))


@dataclass(frozen=True)
class Calibration:
    """A fitted cluster, and how well the fit describes what it was fitted to.

    Attributes:
        cluster: what the simulator takes.
        errors: signed relative error of the fit at each observation, by name.
        seconds: how long calibrating took.
        machine: where and when; on GPUs with the versions of CUDA and nccl.
    """

    cluster: Cluster
    errors: dict[str, float]
    seconds: float
    machine: str

    def save(self, path: Path) -> None:
        """Write the calibration to a file, making its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def calibrate(num_ranks: int, *, device: str = "cpu", nodes: Nodes | int = 1, seconds: float = 12.0) -> Calibration:
    """Measure rounds on num_ranks ranks for about `seconds` and fit their median.

    On GPUs one of them is measured alone last, and the cluster's device is `best_device` in half precision. The errors
    are those of the fit to small models.

    Args:
        num_ranks: ranks that compute and communicate at once.
        device: "cpu" or "cuda".
        nodes: nodes that the ranks make (see `distlab.comm.run`): the links inside and between them are fitted apart.
        seconds: after this no further round starts; three rounds are always taken.
    """
    start = time.monotonic()
    made = Nodes.for_ranks(nodes, num_ranks)
    job = partial(_measure_rounds, device, made.count, seconds)
    rounds = run(job, num_ranks, nodes=made, timeout_s=30 * seconds + 60, record=False)[0]
    middle = median_round(rounds)
    memory = memory_bytes() / num_ranks if device == "cpu" else total_bytes(0)
    cluster = fit_cluster(middle, num_ranks, memory_bytes=memory, num_nodes=made.count)
    errors = {row.what: compute_s(row.work, cluster.device) / row.seconds - 1 for row in middle.observations}
    machine = str(this_machine())
    if device != "cpu":
        alone = run(partial(best_gpu, cluster.device), 1, timeout_s=120.0, record=False)[0]
        cluster = replace(cluster, device=alone)
        machine += f", CUDA {torch.version.cuda}, nccl {'.'.join(map(str, nccl_version()))}"
    return Calibration(cluster, errors, time.monotonic() - start, machine)


def load_calibration(path: Path) -> Calibration:
    """Read a calibration that `save` wrote.

    Raises:
        ValueError: the file is missing or is not a calibration.
    """
    again = runnable("distlab calibrate")
    try:
        return cast(Calibration, _made(Calibration, json.loads(path.read_text())))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; run {again} first, or name a preset") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a calibration ({type(error).__name__}: {error}); run {again}") from None


def _measure_rounds(device_kind: str, num_nodes: int, seconds: float) -> list[Round]:
    device = on_ranks.device_of(device_kind, dist.get_rank())
    nodes = node_groups() if num_nodes > 1 else None
    start = time.monotonic()
    rounds: list[Round] = []
    works: dict[str, Work] = {}
    more = torch.tensor(1, device=device)
    while more:
        rounds.append(measure_round(device, works=works, nodes=nodes))
        passed = time.monotonic() - start
        more.fill_(len(rounds) < MIN_ROUNDS or passed * (1 + 1 / len(rounds)) < seconds)
        dist.broadcast(more, 0)  # clocks differ; one rank decides
    return rounds


def _made(kind: Any, value: Any) -> Any:
    """Return a value of JSON as its type has it: a record for a table, a tuple for a list."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: _made(hints[name], each) for name, each in value.items()})
    if isinstance(value, list):
        return tuple(_made(get_args(kind)[0], each) for each in value)
    return {name: _made(get_args(kind)[1], each) for name, each in value.items()} if isinstance(value, dict) else value
