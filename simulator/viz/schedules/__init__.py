"""Pipeline schedules: boxes, bubbles, memory.

Read `schedule`, then `run` (what is drawn), `compare` and `bubbles`. `moment` says one moment in words.
"""
