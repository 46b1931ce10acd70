"""Predict a training step: hardware in numbers, a cost model, an exact event engine, memory, and a Trace of the result.

Needs numpy only. `simulate(workload, cluster, plan)` returns a Step; figures are in `simulator.viz`.

Read the rooms in this order:

1. `hardware`: what work and messages cost. 2. `engine`: when each operation starts.
3. `pipeline`: schedules. 4. `stage`: what one stage costs. 5. `gradients`: what exchanges cost.
6. `step`: all together. 7. `memory`. 8. `models`. 9. `sweeps`. 10. `advisor`: which plan to use.
11. `runs`: failures, days and dollars of a whole run. 12. `validation`: how near all of it comes to published steps.

`units` and `precision` convert numbers and say how wide they are; `plan_file` reads all that a step needs from one
file.
"""

from simulator.advisor.question import Question
from simulator.advisor.reasons import Reason, near_fit, reasons, words_of
from simulator.advisor.search import Choice, Search, search
from simulator.advisor.strategies import MapCell, strategy_map, strategy_of
from simulator.gradients.compression import Codec, MeasuredCodec, codec_work
from simulator.hardware.cost import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    broadcast_s,
    bus_bytes_per_s,
    compute_s,
    hierarchical_all_gather_s,
    hierarchical_all_reduce_s,
    hierarchical_all_to_all_s,
    message_s,
    reduce_scatter_s,
    ring_over_nodes_s,
)
from simulator.hardware.description import ClusterDescription
from simulator.hardware.fit import fit_link, fit_steps
from simulator.hardware.presets import Stack, cluster, device, link, names, stack
from simulator.memory.advice import DoesNotFitError, check_fit, smallest_change
from simulator.memory.memory import Memory, memory_of
from simulator.memory.published_formulas import activation_bytes_per_layer, adam_state_bytes
from simulator.models.attention_kernel import fuse_attention
from simulator.models.attention_products import LatentSizes
from simulator.models.by_name import model_by_name
from simulator.models.description import ModelDescription
from simulator.models.gpt import gpt_num_parameters, gpt_step_flops, gpt_workload
from simulator.models.hugging_face.config import workload_from_config
from simulator.models.llama import LlamaSizes, llama_workload
from simulator.models.mixture_of_experts import Mixture, mix_experts
from simulator.pipeline.compiled import CompiledSchedule
from simulator.pipeline.jitter import Jitter, Uneven
from simulator.pipeline.schedule_arrays import arrays_of, peak_in_flight
from simulator.pipeline.simulate_schedule import PipelineRun, simulate_schedule
from simulator.plan_file import PlanFile, plan_of_text, read_plan_file
from simulator.runs.checkpoints import Goodput, best_s, daly_s, goodput, young_s
from simulator.runs.failures import RATES, Failures, checkpoint_bytes
from simulator.runs.money import Bill, Curve, Run, bill, curve, goodput_of
from simulator.runs.monte_carlo import best_by_trial, draw_runs, goodput_by_trial
from simulator.runs.spread import Spread, counts_of, spread
from simulator.step.measured import Measured
from simulator.step.simulate import Step, closed_form_bubble, simulate
from simulator.step.timed import why_not_timed
from simulator.sweeps.axis_order import Placed, axes_inside_nodes, rank_orders
from simulator.sweeps.compression import (
    CompressionSweep,
    break_even_bytes_per_s,
    sweep_compression,
    with_bandwidth,
)
from simulator.sweeps.fsdp_units import UnitSweep, sweep_units

__all__ = [
    "RATES",
    "Bill",
    "Choice",
    "ClusterDescription",
    "Codec",
    "CompiledSchedule",
    "CompressionSweep",
    "Curve",
    "DoesNotFitError",
    "Failures",
    "Goodput",
    "Jitter",
    "LatentSizes",
    "LlamaSizes",
    "MapCell",
    "Measured",
    "MeasuredCodec",
    "Memory",
    "Mixture",
    "ModelDescription",
    "PipelineRun",
    "Placed",
    "PlanFile",
    "Question",
    "Reason",
    "Run",
    "Search",
    "Spread",
    "Stack",
    "Step",
    "Uneven",
    "UnitSweep",
    "activation_bytes_per_layer",
    "adam_state_bytes",
    "all_gather_s",
    "all_reduce_s",
    "all_to_all_s",
    "arrays_of",
    "axes_inside_nodes",
    "best_by_trial",
    "best_s",
    "bill",
    "break_even_bytes_per_s",
    "broadcast_s",
    "bus_bytes_per_s",
    "check_fit",
    "checkpoint_bytes",
    "closed_form_bubble",
    "cluster",
    "codec_work",
    "compute_s",
    "counts_of",
    "curve",
    "daly_s",
    "device",
    "draw_runs",
    "fit_link",
    "fit_steps",
    "fuse_attention",
    "goodput",
    "goodput_by_trial",
    "goodput_of",
    "gpt_num_parameters",
    "gpt_step_flops",
    "gpt_workload",
    "hierarchical_all_gather_s",
    "hierarchical_all_reduce_s",
    "hierarchical_all_to_all_s",
    "link",
    "llama_workload",
    "memory_of",
    "message_s",
    "mix_experts",
    "model_by_name",
    "names",
    "near_fit",
    "peak_in_flight",
    "plan_of_text",
    "rank_orders",
    "read_plan_file",
    "reasons",
    "reduce_scatter_s",
    "ring_over_nodes_s",
    "search",
    "simulate",
    "simulate_schedule",
    "smallest_change",
    "spread",
    "stack",
    "strategy_map",
    "strategy_of",
    "sweep_compression",
    "sweep_units",
    "why_not_timed",
    "with_bandwidth",
    "words_of",
    "workload_from_config",
    "young_s",
]
