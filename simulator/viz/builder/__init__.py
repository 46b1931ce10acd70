"""The schedule builder: a schedule is made by clicks, and timed at once.

Read `levels.toml` (what there is to solve), `levels` (its par), `engine.js` and `known.js` (rules, times and names, as
Python has them), `grid.js` and `builder.js` (what is seen and done, in a page or a notebook), then `builder` (the
notebook's widget, and runs on real ranks; `page_script` for a page).
"""
