"""The schedule builder: a schedule is made by clicks, and timed at once.

Read `levels.toml` (what there is to solve), `levels` (its par), then `engine.js` (rules and times, those of Python).
"""
