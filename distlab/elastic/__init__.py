"""Elastic training: runs that survive the death of any rank at any moment, and go on with more or fewer ranks.

Begin with `plain`, the whole idea on one screen. What a cluster asks for stands beside it:

1. `work`: which samples a step takes on any number of ranks, and at which learning rate.
2. `run`: `ElasticRun`, the loop itself, with SIGTERM; new ranks for those that failed, where no torchrun does it.
3. `votes`: replicas find flipped bits by comparing.
4. `plain_average`: no restart at all. `replicas`: the others finish the step, a new one takes a peer's state (`quorum`
   says who is in, `roster` has the store).
5. `faults`: make things go wrong, to try all this; `agents`: several machines' torchruns on this one.
"""

from distlab.elastic.agents import Agent as Agent, Agents as Agents
from distlab.elastic.faults import Fault as Fault, Faults as Faults, plan_faults as plan_faults
from distlab.elastic.plain import plain_train as plain_train
from distlab.elastic.plain_average import plain_average as plain_average
from distlab.elastic.quorum import Arrival as Arrival, Quorum as Quorum, quorum as quorum
from distlab.elastic.replicas import Replicas as Replicas, run_replicas as run_replicas
from distlab.elastic.roster import Seat as Seat
from distlab.elastic.run import ElasticRun as ElasticRun, Left as Left, Saves as Saves, run_elastic as run_elastic
from distlab.elastic.work import BatchRule as BatchRule, Step as Step, Work as Work
