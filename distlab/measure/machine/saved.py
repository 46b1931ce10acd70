"""Calibrate this machine and keep the result: a Cluster that the simulator takes like any preset."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import torch
import torch.distributed as dist

from distlab.comm import Nodes, node_groups, run
from distlab.comm.command import runnable
from distlab.comm.device import nccl_version, total_bytes
from distlab.measure.machine.facts import memory_bytes, this_machine
from distlab.measure.machine.ranks import device_of
from distlab.measure.machine.rates import Rates, measure_rates, precisions
from distlab.measure.machine.speed import Observation, Round, fit_cluster, measure_round, median_round
from distlab.plan import Cluster, Work
from simulator import compute_s

MIN_ROUNDS = 3
RATES_LIMIT_S = 120.0
DEFAULT_PATH = Path.home() / ".cache" / "distlab" / "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """A fitted cluster, and how well the fit describes what it was fitted to.

    Attributes:
        cluster: what the simulator takes.
        errors: signed relative error of the fit at each observation, by name.
        seconds: how long calibrating took.
        machine: where and when; on GPUs with the versions of CUDA and nccl.
        rates: on GPUs, what kernels take by kind and shape, in each precision.
    """

    cluster: Cluster
    errors: dict[str, float]
    seconds: float
    machine: str
    rates: tuple[Rates, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the calibration as JSON-ready values."""
        return asdict(self)

    def save(self, path: Path) -> None:
        """Write the calibration to a file, making its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")


def calibrate(
    num_ranks: int,
    *,
    device: str = "cpu",
    nodes: Nodes | int = 1,
    seconds: float = 12.0,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Measure rounds on num_ranks ranks for about `seconds` and fit their median.

    On GPUs one of them is measured alone first, by kind and shape of kernels. The device of the cluster then has the
    best rate of matrix products and the rate of large copies, as data sheets state them. It has no time per kernel,
    since a host that runs ahead hides it. The errors are those of the fit to small models.

    Args:
        num_ranks: ranks that compute and communicate at once.
        device: "cpu" or "cuda".
        nodes: nodes that the ranks make (see `distlab.comm.run`): the links inside and between them are fitted apart.
        seconds: after this no further round starts; three rounds are always taken.
        progress: called on rank 0 with the whole seconds that have passed.
    """
    start = time.monotonic()
    rates = run(partial(_measure_rates, device), 1, timeout_s=RATES_LIMIT_S, record=False)[0] if device != "cpu" else ()
    made = Nodes.for_ranks(nodes, num_ranks)
    job = partial(_measure_rounds, device, made.count, seconds, progress)
    rounds = run(job, num_ranks, nodes=made, timeout_s=30 * seconds + 60, record=False)[0]
    middle = median_round(rounds)
    memory = memory_bytes() / num_ranks if device == "cpu" else total_bytes(0)
    cluster = fit_cluster(middle, num_ranks, memory_bytes=memory, num_nodes=made.count)
    errors = {row.what: _error(row, cluster) for row in middle.observations}
    machine = f"{this_machine()}{_software() if device != 'cpu' else ''}"
    return Calibration(with_rates(cluster, rates), errors, time.monotonic() - start, machine, rates)


def with_rates(cluster: Cluster, rates: Sequence[Rates]) -> Cluster:
    """Return the cluster with the device as the last of the rates, those in half precision, measured it."""
    if not rates:
        return cluster
    device = replace(
        cluster.device,
        matmul_flops_per_s=max(chain.from_iterable(rates[-1].matmul.values())),
        memory_bytes_per_s=rates[-1].bytes[-1] / rates[-1].memory_s[-1],
        kernel_s=0.0,
        host_link_bytes_per_s=min(rates[-1].to_device_bytes_per_s, rates[-1].to_host_bytes_per_s),
        source=f"measured by distlab calibrate in {rates[-1].precision}, the best shape found",
    )
    return replace(cluster, device=device)


def load_calibration(path: Path) -> Calibration:
    """Read a calibration that `save` wrote.

    Raises:
        ValueError: the file is missing or is not a calibration.
    """
    try:
        return cast(Calibration, _made(Calibration, json.loads(path.read_text())))
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; run {runnable('distlab calibrate')} first, or name a preset"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a calibration ({type(error).__name__}: {error}); run {runnable('distlab calibrate')}"
        ) from None


def _measure_rounds(
    device_kind: str, num_nodes: int, seconds: float, progress: Callable[[int], None] | None
) -> list[Round]:
    """Run on every rank: take rounds until `seconds` have passed."""
    device = device_of(device_kind, dist.get_rank())
    nodes = node_groups() if num_nodes > 1 else None
    start = time.monotonic()
    rounds: list[Round] = []
    works: dict[str, Work] = {}
    more = torch.tensor(1, device=device)
    while more:
        rounds.append(measure_round(device, works=works, nodes=nodes))
        passed = time.monotonic() - start
        if progress is not None and dist.get_rank() == 0:
            progress(min(int(passed), int(seconds)))
        more.fill_(len(rounds) < MIN_ROUNDS or passed * (1 + 1 / len(rounds)) < seconds)
        dist.broadcast(more, 0)  # clocks differ; one rank decides
    return rounds


def _measure_rates(device_kind: str) -> tuple[Rates, ...]:
    """Run on one rank: measure its device in each precision."""
    device = device_of(device_kind, 0)
    return tuple(measure_rates(device, dtype) for dtype in precisions(device))


def _made(kind: Any, value: Any) -> Any:
    """Return a value of JSON as its type has it: a record for a table, a tuple for a list."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: _made(hints[name], each) for name, each in value.items()})
    if isinstance(value, list):
        return tuple(_made(get_args(kind)[0], each) for each in value)
    return {name: _made(get_args(kind)[1], each) for name, each in value.items()} if isinstance(value, dict) else value


def _software() -> str:
    """Name what a GPU's times depend on, beyond torch."""
    return f", CUDA {torch.version.cuda}, nccl {'.'.join(map(str, nccl_version()))}"


def _error(row: Observation, cluster: Cluster) -> float:
    return compute_s(row.work, cluster.device) / row.seconds - 1
