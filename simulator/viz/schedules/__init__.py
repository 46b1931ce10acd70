"""Pipeline schedules: boxes, bubbles, memory.

Read `schedule`, then `run` (what is drawn), `compare` and `bubbles`. `schedule_panel` and `schedule_editor` are widgets
over `schedule_timeline`; `sweep`, `textbook` and `moment` supply figures and words.
"""
