"""How near the predictions come to published measurements, and which constants were fitted to them.

Read `case` (one measured step and its prediction), then `steps` (tables of steps, as cases), `plan_rows` (steps in the
words of a plan file, fitted to or not) and `exact` (tables of memory, bubbles and collectives). `refit` fits a stack's
constants and leaves one structure, or one family, out at a time; `report` scores all of them and writes the page;
`confidence` says with an answer how far published steps like it were off.
`tables` and `plan_rows.json` hold the published rows, each with its source.
"""
