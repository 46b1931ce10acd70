"""The schedule builder: a schedule is made by clicks, and timed at once.

Read `levels.toml` first: what there is to solve; `levels` finds the par of each. `engine.js` and `known.js` have the
rules, times and names, as Python has them. `grid.js` and `builder.js` are what one sees and does, in a page or a
notebook. `builder` is the notebook's widget, runs on real ranks, and has `page_script` for a page.
"""
