"""How near the predictions come to published measurements, and which constants were fitted to them.

Read `case` (one measured step and its prediction), then `steps` (the tables of steps, as cases) and `exact` (tables of
memory, bubbles and collectives). `refit` fits a stack's constants and leaves one structure out at a time; `report`
scores all of them and writes the page.
`tables` holds the published rows, each with its source.
"""
