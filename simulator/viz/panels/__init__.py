"""Every widget with controls: the only room that needs ipywidgets, so that pictures work without it.

Read `panel` (controls over a picture), then a subject: `communication`, `planner`, and `schedules`, whose controls
stand over a timeline.
"""
