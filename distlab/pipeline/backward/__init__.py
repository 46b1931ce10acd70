"""Backward in two parts, for zero-bubble schedules: the gradient of a stage's input now, that of its weights later.

Read `two_parts` (`SplitBackward`) and `layers` (a rule for each kind of layer, and which layers of a module have one).
"""

from distlab.pipeline.backward.two_parts import prepare_split as prepare_split
