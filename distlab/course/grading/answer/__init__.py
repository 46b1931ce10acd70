"""A learner's answer before it runs: where it stands, which statements it needs, whether it can be called.

Read `source` (a module, a file or a notebook, as text) and `needed` (which statements of a notebook a set of functions
needs). `submission` has the answers to a whole lesson. `signature` asks: is it written, and can it be called?
"""
