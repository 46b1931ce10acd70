"""Who did what and when: measured above, predicted right below it.

Read `timeline` (the figure), then `draw_rows`. `timeline_widget` shows the same on a canvas (`packet` packs it);
`facts` says it in numbers, and `overlay` says what many measured and predicted steps say together.
`sections` sums the time of each rank by what it was for.
"""
