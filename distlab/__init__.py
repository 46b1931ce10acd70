"""distlab: learn distributed training by predicting, running and measuring it.

Techniques have packages of their own. What they share is in `blocks`; `comm` runs the ranks; `course` has what makes it
a course. `grading`, `models` and `data` can be imported from here as well. `rng` derives every seed, `recompute` trades
time for memory. Importing the package loads neither torch nor matplotlib; the subpackages load what they need. `faces`
says what of a package is public.
"""

__version__ = "0.1.0"
