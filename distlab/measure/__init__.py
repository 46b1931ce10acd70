"""Where prediction meets measurement: this machine's speed, counted models, measured memory, runs against predictions.

Start at `runs.run`: it trains by a plan on real ranks, calibrates, and predicts the same step. Names load on first use,
so that `distlab doctor` works without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.measure.count.gpt import count_gpt
    from distlab.measure.count.module import workload_from_module
    from distlab.measure.machine.blocks import MIN_BLOCKS, interleave
    from distlab.measure.machine.facts import Machine, gpu_names, memory_bytes, num_cores, this_machine, version_of
    from distlab.measure.machine.ranks import device_of, on_first_rank
    from distlab.measure.machine.rates import Rates, device_for, measure_rates, operators_of
    from distlab.measure.machine.saved import DEFAULT_PATH, Calibration, calibrate, load_calibration
    from distlab.measure.machine.speed import Round, fit_cluster, measure_round, median_round
    from distlab.measure.memory.measured import KINDS, MeasuredMemory, MemoryLimitError, storage_bytes, track_memory
    from distlab.measure.runs.calibrate import CalibrationOfRun
    from distlab.measure.runs.calls import measure_messages
    from distlab.measure.runs.codec import measure_codec, median_codec
    from distlab.measure.runs.predict import CalibrationRound, median_calibration, predict_step
    from distlab.measure.runs.run import (
        RankReport,
        RunResult,
        TrainingRun,
        time_on_new_ranks,
        time_training,
        windows_of,
    )
    from distlab.measure.runs.timed_program import overlay_of, overlay_of_run, time_beside
    from distlab.measure.runs.windows import Verdict, Window, judge

_NAMES = {
    "machine.facts": ["Machine", "gpu_names", "memory_bytes", "num_cores", "this_machine", "version_of"],
    "machine.blocks": ["MIN_BLOCKS", "interleave"],
    "machine.ranks": ["device_of", "on_first_rank"],
    "machine.rates": ["Rates", "device_for", "measure_rates", "operators_of"],
    "machine.saved": ["DEFAULT_PATH", "Calibration", "calibrate", "load_calibration"],
    "machine.speed": ["Round", "fit_cluster", "measure_round", "median_round"],
    "count.module": ["workload_from_module"],
    "count.gpt": ["count_gpt"],
    "memory.measured": ["KINDS", "MemoryLimitError", "MeasuredMemory", "storage_bytes", "track_memory"],
    "runs.run": ["RankReport", "RunResult", "TrainingRun", "time_on_new_ranks", "time_training", "windows_of"],
    "runs.predict": ["CalibrationRound", "median_calibration", "predict_step"],
    "runs.timed_program": ["overlay_of", "overlay_of_run", "time_beside"],
    "runs.calibrate": ["CalibrationOfRun"],
    "runs.calls": ["measure_messages"],
    "runs.codec": ["measure_codec", "median_codec"],
    "runs.windows": ["Verdict", "Window", "judge"],
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = [
    "Calibration",
    "CalibrationOfRun",
    "CalibrationRound",
    "DEFAULT_PATH",
    "KINDS",
    "MIN_BLOCKS",
    "Machine",
    "MeasuredMemory",
    "MemoryLimitError",
    "RankReport",
    "Rates",
    "Round",
    "RunResult",
    "TrainingRun",
    "Verdict",
    "Window",
    "calibrate",
    "count_gpt",
    "device_for",
    "device_of",
    "fit_cluster",
    "gpu_names",
    "interleave",
    "judge",
    "load_calibration",
    "measure_codec",
    "measure_messages",
    "measure_rates",
    "measure_round",
    "median_calibration",
    "median_codec",
    "median_round",
    "memory_bytes",
    "num_cores",
    "on_first_rank",
    "operators_of",
    "overlay_of",
    "overlay_of_run",
    "predict_step",
    "storage_bytes",
    "this_machine",
    "time_beside",
    "time_on_new_ranks",
    "time_training",
    "track_memory",
    "version_of",
    "windows_of",
    "workload_from_module",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"distlab.measure.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'distlab.measure' has no attribute {name!r}")
