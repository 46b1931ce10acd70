"""Predict a training step: hardware in numbers, a cost model, an exact event engine, memory, and a Trace of the result.

Needs numpy only. `simulate(workload, cluster, plan)` returns a Step; figures are in `simulator.viz`.

Read the rooms in this order:

1. `hardware`: what work and messages cost. 2. `engine`: when each operation starts.
3. `pipeline`: schedules. 4. `stage`: what one stage costs. 5. `gradients`: what exchanges cost.
6. `step`: all together. 7. `memory`. 8. `models`. 9. `sweeps`. 10. `advisor`: which plan to use.
11. `runs`: failures, days and dollars of a whole run. 12. `validation`: how near all of it comes to published steps.

`units` converts numbers and says how wide they are; `plan_file` reads all that a step needs from one file; `listing`
says what has a name.
"""

from simulator.advisor.question import Question as Question
from simulator.advisor.reasons import (
    MapCell as MapCell,
    Reason as Reason,
    near_fit as near_fit,
    reasons as reasons,
    strategy_map as strategy_map,
    strategy_of as strategy_of,
    words_of as words_of,
)
from simulator.advisor.search import Choice as Choice, Search as Search, search as search
from simulator.advisor.ways_out import beside as beside, nearest as nearest, ways_out as ways_out
from simulator.gradients.compression import (
    CodecWork as CodecWork,
    MeasuredCodec as MeasuredCodec,
    codec_work as codec_work,
)
from simulator.gradients.whole_tensors import WholeUpdate as WholeUpdate, whole_update as whole_update
from simulator.hardware.cost import (
    all_gather_s as all_gather_s,
    all_reduce_s as all_reduce_s,
    all_to_all_s as all_to_all_s,
    bus_bytes_per_s as bus_bytes_per_s,
    compute_s as compute_s,
    dispatch_s as dispatch_s,
    hierarchical_all_reduce_s as hierarchical_all_reduce_s,
    hierarchical_all_to_all_s as hierarchical_all_to_all_s,
    message_s as message_s,
    reduce_scatter_s as reduce_scatter_s,
    ring_over_nodes_s as ring_over_nodes_s,
)
from simulator.hardware.fit import fit_link as fit_link, fit_steps as fit_steps
from simulator.hardware.presets import (
    ClusterDescription as ClusterDescription,
    Stack as Stack,
    cluster as cluster,
    device as device,
    link as link,
    names as names,
    sheet_note as sheet_note,
    stack as stack,
)
from simulator.hardware.redistribution import redistribution_s as redistribution_s
from simulator.memory.advice import DoesNotFitError as DoesNotFitError, check_fit as check_fit
from simulator.memory.memory import Memory as Memory, memory_of as memory_of
from simulator.models.attention_kernel import fuse_attention as fuse_attention
from simulator.models.by_name import model_by_name as model_by_name
from simulator.models.description import ModelDescription as ModelDescription
from simulator.models.gpt import (
    activation_bytes_per_layer as activation_bytes_per_layer,
    adam_state_bytes as adam_state_bytes,
    gpt_num_parameters as gpt_num_parameters,
    gpt_step_flops as gpt_step_flops,
    gpt_workload as gpt_workload,
    mix_experts as mix_experts,
)
from simulator.models.hugging_face.config import workload_from_config as workload_from_config
from simulator.models.llama import (
    LatentSizes as LatentSizes,
    LlamaSizes as LlamaSizes,
    llama_workload as llama_workload,
)
from simulator.models.parts import Mixture as Mixture
from simulator.pipeline.compiled import CompiledSchedule as CompiledSchedule
from simulator.pipeline.schedule_arrays import arrays_of as arrays_of, peak_in_flight as peak_in_flight
from simulator.pipeline.simulate_schedule import PipelineRun as PipelineRun, simulate_schedule as simulate_schedule
from simulator.plan_file import PlanFile as PlanFile, plan_of_text as plan_of_text, read_plan_file as read_plan_file
from simulator.runs.failures import (
    Failures as Failures,
    Goodput as Goodput,
    best_s as best_s,
    checkpoint_bytes as checkpoint_bytes,
    daly_s as daly_s,
    draw_runs as draw_runs,
    goodput as goodput,
    goodput_by_trial as goodput_by_trial,
    regroup_goodput as regroup_goodput,
    young_s as young_s,
)
from simulator.runs.local_sgd import LocalRound as LocalRound, local_sgd_round as local_sgd_round
from simulator.runs.money import (
    Bill as Bill,
    Curve as Curve,
    Run as Run,
    Spread as Spread,
    bill as bill,
    counts_of as counts_of,
    curve as curve,
    spread as spread,
)
from simulator.runs.published import RATES as RATES, STORES as STORES
from simulator.step.simulate import (
    Measured as Measured,
    Step as Step,
    closed_form_bubble as closed_form_bubble,
    simulate as simulate,
)
from simulator.step.timed import why_not_timed as why_not_timed
from simulator.sweeps.axis_order import (
    Placed as Placed,
    axes_inside_nodes as axes_inside_nodes,
    rank_orders as rank_orders,
)
from simulator.sweeps.compression import (
    CompressionSweep as CompressionSweep,
    break_even_bytes_per_s as break_even_bytes_per_s,
    sweep_compression as sweep_compression,
    with_bandwidth as with_bandwidth,
)
from simulator.sweeps.fsdp_units import UnitSweep as UnitSweep, sweep_units as sweep_units
