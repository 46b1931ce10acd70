"""The schedule builder: a schedule is made by clicks, and timed at once.

Read `levels.toml` (what there is to solve), `levels` (its par), `engine.js` (rules and times, those of Python), then
`builder.js` (the grid, in a page or a notebook) and `builder` (the notebook's widget, and runs on real ranks).
"""
