"""Pipeline schedules: boxes, bubbles, memory.

Read `schedule`, then `run` (what is drawn), `compare` and `bubbles`. `sweep`, `textbook` and `moment` supply figures
and words.
"""
