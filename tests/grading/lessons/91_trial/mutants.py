"""Wrong versions of the small lesson."""

from __future__ import annotations

from distlab_lesson_91 import solutions

from distlab.grading import Mutant

MUTANTS = (Mutant("91.mean", "sum", solutions.mean_wrong, "sum not mean", "divide by world_size", 3, "bug museum 9"),)
