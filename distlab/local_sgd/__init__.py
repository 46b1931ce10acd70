"""Local SGD and DiLoCo: replicas train alone for many steps, then agree on what they have learned.

Begin with `plain`: an inner optimizer for each replica, an outer one for all. Then `diloco`: the same for real models,
in fragments that travel while the replicas train on, with a hook of compression, and with replicas that leave and come.
"""

from distlab.local_sgd.diloco import DiLoCo as DiLoCo, outer_step_ as outer_step_
from distlab.local_sgd.plain import PlainDiLoCo as PlainDiLoCo
