"""Mixtures of experts, and their experts spread over ranks: tokens travel to the experts that they chose, and back.

Begin with `plain`: `MixtureOfExperts`, a loop over all experts in one process, the whole idea on one screen. It asks
`router` (which experts, with which weights; is the load even?) and `assign` (who comes where; what capacity drops).

Then `layer`: `ExpertParallel`, the same layer with its experts split over a group of ranks; `exchange` has the two
messages that it needs and the rules that hold across ranks. Training with it: `gradients` (what ranks must sum, what is
complete already, and the norm of both). Whole models: `convert`.
"""

from distlab.expert_parallel.assign import Assignment as Assignment, assign as assign, capacity_of as capacity_of
from distlab.expert_parallel.convert import (
    balance_loss as balance_loss,
    expert_parallel as expert_parallel,
    mix_experts as mix_experts,
)
from distlab.expert_parallel.gradients import (
    clip_gradients_ as clip_gradients_,
    reduce_gradients as reduce_gradients,
    split_parameters as split_parameters,
)
from distlab.expert_parallel.layer import ExpertParallel as ExpertParallel
from distlab.expert_parallel.plain import Load as Load, MixtureOfExperts as MixtureOfExperts
from distlab.expert_parallel.router import Router as Router, Routing as Routing, switch_loss as switch_loss
