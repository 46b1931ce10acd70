"""Who did what and when: measured above, predicted right below it.

Read `timeline` (the figure). `timeline_widget` shows the same on a canvas; `facts` says it in numbers, also of many
measured and predicted steps together.
"""
