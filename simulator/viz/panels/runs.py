"""Move the price, the failures and the number of devices of a whole run: what it costs, and where its time goes."""

from __future__ import annotations

import math

import ipywidgets as widgets
from matplotlib.figure import Figure

from distlab.plan import Cluster, Plan, Sharding, Workload
from simulator.hardware.presets import cluster as cluster_by_name
from simulator.models.by_name import model_by_name
from simulator.runs.failures import RATES, Failures, checkpoint_bytes
from simulator.runs.money import Run, bill, curve
from simulator.runs.spread import counts_of, spread
from simulator.viz.panels.panel import Panel
from simulator.viz.runs.cost_curve import describe_cost_curve, draw_cost_curve
from simulator.viz.runs.goodput import describe_goodput, draw_goodput

MODEL, CLUSTER, TOKENS = "llama-3-70b", "dgx-h100", 15e12
PLAN = Plan(8, 4, 64, tensor=8, sequence_parallel=True, sharding=Sharding(1), recompute="selective")
DEVICES = tuple(2**power for power in range(3, 18))
FAILING = tuple(name for name, rate in RATES.items() if rate.per_device_hour)


def cost_panel(
    workload: Workload | None = None,
    cluster: Cluster | None = None,
    plan: Plan | None = None,
    *,
    tokens: float = TOKENS,
) -> Panel:
    """Return a panel with the price, the tokens, and the failures: days and price on each number of devices.

    In code: `panel.controls["price"].value = 4.0`, `panel.controls["failures"].value = "llama-3"`.

    Args:
        workload: the model; a Llama 3 of 70 billion parameters by default.
        cluster: what it runs on; H100s in nodes of eight by default.
        plan: on one number of devices; others have more or fewer replicas and the same batch.
        tokens: of the run, where the slider begins.

    Raises:
        ValueError: the plan runs or fits on no number of devices.
    """
    model = model_by_name(MODEL) if workload is None else workload
    machine = cluster_by_name(CLUSTER) if cluster is None else cluster
    base = PLAN if plan is None else plan
    steps, left_out = spread(model, machine, base, counts_of(base))
    if not steps:
        raise ValueError(f"the plan runs on no number of devices: {'; '.join(left_out.values())}")

    def draw(price: float, trillions: float, failures: str, restart_minutes: float) -> tuple[Figure, str]:
        fails = Failures(failures, restart_s=60 * restart_minutes)
        found = curve([bill(step, Run(10**trillions * 1e12, price, fails)) for step in steps])
        return draw_cost_curve(found), describe_cost_curve(found)

    begin = math.log10(tokens / 1e12)
    return Panel(
        draw,
        price=widgets.FloatSlider(value=2.5, min=0.5, max=10, step=0.1, description="dollars per GPU hour"),
        trillions=widgets.FloatSlider(
            value=begin, min=min(-3.0, begin), max=max(2.0, begin), step=0.05, description="tokens: 10^x trillion"
        ),
        failures=widgets.Dropdown(options=list(RATES), value="llama-3", description="failures"),
        restart_minutes=widgets.FloatSlider(value=10, min=1, max=120, step=1, description="minutes to restart"),
    )


def goodput_panel(model: Workload | None = None, *, num_devices: int = 16_384) -> Panel:
    """Return a panel with the devices, the failures, and the times of a restart and a checkpoint: where the time goes.

    In code: `panel.controls["num_devices"].value = 1024`, `panel.controls["times_rate"].value = 2.0`.

    Args:
        model: the first checkpoint takes as long as its bytes at 2 TB/s; a Llama 3 of 405 billion by default.
        num_devices: where the slider begins; a power of two from 8 to 131,072.

    Raises:
        ValueError: the slider has no such number of devices.
    """
    if num_devices not in DEVICES:
        raise ValueError(f"num_devices is {num_devices}; choose one of {', '.join(map(str, DEVICES))}")
    sized = model_by_name("llama-3-405b") if model is None else model
    first_s = checkpoint_bytes(sized, Plan()) / 2e12
    low, high = -1.0, 4.0

    def draw(
        num_devices: int, failures: str, times_rate: float, restart_minutes: float, log_save_s: float
    ) -> tuple[Figure, str]:
        rate = RATES[failures].per_device_hour * times_rate
        name: str | float = failures if times_rate == 1 else rate
        fails, save_s = Failures(name, restart_s=60 * restart_minutes), 10**log_save_s
        return draw_goodput(fails, num_devices, save_s), describe_goodput(fails, num_devices, save_s)

    return Panel(
        draw,
        num_devices=widgets.SelectionSlider(options=list(DEVICES), value=num_devices, description="devices"),
        failures=widgets.Dropdown(options=list(FAILING), description="failures"),
        times_rate=widgets.FloatSlider(value=1.0, min=0.1, max=10, step=0.1, description="times as often"),
        restart_minutes=widgets.FloatSlider(value=10, min=1, max=120, step=1, description="minutes to restart"),
        log_save_s=widgets.FloatSlider(
            value=min(max(math.log10(first_s), low), high),
            min=low,
            max=high,
            step=0.05,
            description="save: 10^x seconds",
        ),
    )
