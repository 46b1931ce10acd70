"""How near the predictions come to published measurements, and which constants were fitted to them.

Read `case` first: one measured step and its prediction. Cases are made of tables of steps (`steps`), and of steps in
the words of a plan file, fitted to or not (`plan_rows`). `exact` has memory, bubbles and collectives. `refit` fits a
stack's constants, and leaves one structure, or one family, out at a time. `report` scores all of them and writes the
page. `confidence` says with an answer how far published steps like it were off.
`tables` and `plan_rows.json` hold the published rows, each with its source.
"""
