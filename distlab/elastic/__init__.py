"""Elastic training: runs that survive the death of any rank at any moment, and go on with more or fewer ranks.

Begin with `plain`, the whole idea on one screen. What a cluster asks for stands beside it:

1. `work`: which samples a step takes on any number of ranks, and at which learning rate.
2. `run`: `ElasticRun`, the loop itself.
3. `leave`: SIGTERM, and ranks that are stopped.
4. `restart`: new ranks for those that failed, where no torchrun does it.
5. `faults` and `packets`: make things go wrong, to try all this; `agents`: several machines' torchruns on this one.
"""

from distlab.elastic.agents import Agent, Agents
from distlab.elastic.faults import Fault, Faults, InjectedFault, plan_faults
from distlab.elastic.leave import Left
from distlab.elastic.packets import lossy_loopback
from distlab.elastic.plain import plain_train
from distlab.elastic.restart import run_elastic
from distlab.elastic.run import ElasticRun, Saves
from distlab.elastic.work import BatchRule, Step, Work

__all__ = [
    "Agent",
    "Agents",
    "BatchRule",
    "ElasticRun",
    "Fault",
    "Faults",
    "InjectedFault",
    "Left",
    "Saves",
    "Step",
    "Work",
    "lossy_loopback",
    "plain_train",
    "plan_faults",
    "run_elastic",
]
