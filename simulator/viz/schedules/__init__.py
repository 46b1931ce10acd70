"""Pipeline schedules: boxes, bubbles, memory.

Read `schedule`, then `run` (what is drawn) and `compare`. `moment` says one moment in words.
"""
