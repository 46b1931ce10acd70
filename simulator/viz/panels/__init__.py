"""Every widget with controls: the only room that needs ipywidgets, so that pictures work without it.

Read `panel` (controls over a picture), then a subject: `collectives`, `gradients`, `memory`, `degrees`, `runs`,
`planner`.
`schedules` has the panel and the editor of schedules, over `schedule_timeline`.
"""
