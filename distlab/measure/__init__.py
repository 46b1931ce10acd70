"""Where prediction meets measurement: this machine's speed, counted models, measured memory, runs against predictions.

Start at `runs.run`: it trains by a plan on real ranks, calibrates, and predicts the same step. Names load on first use,
so that `distlab doctor` works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.faces import lazy

if TYPE_CHECKING:
    from distlab.measure.count.module import workload_from_module as workload_from_module
    from distlab.measure.machine.facts import (
        Machine as Machine,
        gpu_names as gpu_names,
        memory_bytes as memory_bytes,
        num_cores as num_cores,
        this_machine as this_machine,
        version_of as version_of,
    )
    from distlab.measure.machine.fit import MIN_BLOCKS as MIN_BLOCKS, interleave as interleave
    from distlab.measure.machine.ranks import device_of as device_of, on_first_rank as on_first_rank
    from distlab.measure.machine.rates import (
        best_device as best_device,
        device_for as device_for,
        operator_host_s as operator_host_s,
        operators_of as operators_of,
    )
    from distlab.measure.machine.speed import (
        DEFAULT_PATH as DEFAULT_PATH,
        Calibration as Calibration,
        Round as Round,
        calibrate as calibrate,
        fit_cluster as fit_cluster,
        load_calibration as load_calibration,
        measure_round as measure_round,
        median_round as median_round,
    )
    from distlab.measure.memory.measured import (
        KINDS as KINDS,
        MemoryLimitError as MemoryLimitError,
        track_memory as track_memory,
    )
    from distlab.measure.runs.calibrate import (
        CalibrationOfRun as CalibrationOfRun,
        median_calibration as median_calibration,
    )
    from distlab.measure.runs.calls import measure_codec as measure_codec, measure_messages as measure_messages
    from distlab.measure.runs.run import (
        RunResult as RunResult,
        TrainingRun as TrainingRun,
        overlay_of as overlay_of,
        overlay_of_run as overlay_of_run,
        time_on_new_ranks as time_on_new_ranks,
        time_training as time_training,
    )
    from distlab.measure.runs.windows import (
        RankReport as RankReport,
        Window as Window,
        judge as judge,
        time_beside as time_beside,
    )


__getattr__ = lazy(__name__)
