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
    from distlab.measure.machine.facts import Machine, gpu_names, memory_bytes, num_cores, this_machine, version_of
    from distlab.measure.machine.ranks import device_of, on_first_rank
    from distlab.measure.machine.ratio import (
        MIN_BLOCKS,
        Row,
        absolute,
        compare,
        compare_counts,
        format_rows,
        interleave,
        median_interval,
        noise,
        paired_ratio,
        ratio_holds,
        without_bar,
    )
    from distlab.measure.machine.saved import DEFAULT_PATH, Calibration, calibrate, load_calibration
    from distlab.measure.machine.speed import Round, fit_cluster, measure_round, median_round
    from distlab.measure.memory.measured import KINDS, MeasuredMemory, MemoryLimitError, storage_bytes, track_memory
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
    from distlab.measure.runs.windows import Verdict, Window, judge

_HOMES = {
    "Machine": "machine.facts",
    "gpu_names": "machine.facts",
    "memory_bytes": "machine.facts",
    "num_cores": "machine.facts",
    "this_machine": "machine.facts",
    "version_of": "machine.facts",
    "MIN_BLOCKS": "machine.ratio",
    "Row": "machine.ratio",
    "absolute": "machine.ratio",
    "compare": "machine.ratio",
    "compare_counts": "machine.ratio",
    "format_rows": "machine.ratio",
    "interleave": "machine.ratio",
    "median_interval": "machine.ratio",
    "noise": "machine.ratio",
    "paired_ratio": "machine.ratio",
    "ratio_holds": "machine.ratio",
    "without_bar": "machine.ratio",
    "device_of": "machine.ranks",
    "on_first_rank": "machine.ranks",
    "DEFAULT_PATH": "machine.saved",
    "Calibration": "machine.saved",
    "calibrate": "machine.saved",
    "load_calibration": "machine.saved",
    "Round": "machine.speed",
    "fit_cluster": "machine.speed",
    "measure_round": "machine.speed",
    "median_round": "machine.speed",
    "workload_from_module": "count.module",
    "count_gpt": "count.gpt",
    "KINDS": "memory.measured",
    "MemoryLimitError": "memory.measured",
    "MeasuredMemory": "memory.measured",
    "storage_bytes": "memory.measured",
    "track_memory": "memory.measured",
    "RankReport": "runs.run",
    "RunResult": "runs.run",
    "TrainingRun": "runs.run",
    "time_on_new_ranks": "runs.run",
    "time_training": "runs.run",
    "windows_of": "runs.run",
    "CalibrationRound": "runs.predict",
    "median_calibration": "runs.predict",
    "predict_step": "runs.predict",
    "measure_messages": "runs.calls",
    "measure_codec": "runs.codec",
    "median_codec": "runs.codec",
    "Verdict": "runs.windows",
    "Window": "runs.windows",
    "judge": "runs.windows",
}
__all__ = [
    "Calibration",
    "CalibrationRound",
    "DEFAULT_PATH",
    "KINDS",
    "MIN_BLOCKS",
    "Machine",
    "MeasuredMemory",
    "MemoryLimitError",
    "RankReport",
    "Round",
    "Row",
    "RunResult",
    "TrainingRun",
    "Verdict",
    "Window",
    "absolute",
    "calibrate",
    "compare",
    "compare_counts",
    "count_gpt",
    "device_of",
    "fit_cluster",
    "format_rows",
    "gpu_names",
    "interleave",
    "judge",
    "load_calibration",
    "measure_codec",
    "measure_messages",
    "measure_round",
    "median_calibration",
    "median_codec",
    "median_interval",
    "median_round",
    "memory_bytes",
    "noise",
    "num_cores",
    "on_first_rank",
    "paired_ratio",
    "predict_step",
    "ratio_holds",
    "storage_bytes",
    "this_machine",
    "time_on_new_ranks",
    "time_training",
    "track_memory",
    "version_of",
    "windows_of",
    "without_bar",
    "workload_from_module",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"distlab.measure.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'distlab.measure' has no attribute {name!r}")
