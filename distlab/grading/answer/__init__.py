"""A learner's answer before it runs: where it stands, which statements it needs, whether it can be called.

Read `source` (a module, a file or a notebook, as text), `needed` (which statements of a notebook a set of functions
needs), `submission` (the answers to a whole lesson) and `signature` (is it written, and can it be called?).
"""
